"""Finished runs on disk: a JSON line each, a file per process; a killed run loses at most the cell it was in."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_pipelines.tau2_bench.metrics import Cell
from hf_pipelines.tau2_bench.scoring import SUCCESS_TOLERANCE

CELLS, ARCHIVE = "cells", "archive"


@dataclass
class RunRecord:
    """One finished trial with its verdict.

    Args:
        task_id (`str`): The task.
        domain (`str`): Its domain.
        trial (`int`): Which trial.
        seed (`int`): The trial's seed.
        mode (`str`): The mode.
        digest (`str`): Of the configuration.
        termination (`str`): Why it ended.
        reward (`float`): The reward.
        reward_info (`dict`): The verdict's components.
        messages (`list[dict]`): The conversation in the storage format.
        steps (`int`): Turns and executions.
        errors (`int`): Failed calls and unusable answers.
        start_time, end_time (`str`): ISO times.
        duration (`float`): Seconds.
        notes (`list[dict]`): What was mended.
        reason (`str`, *optional*): For an end by an error.
        labels (`dict`): What to break down by.
        attribution (`dict`, *optional*): Why a failed dual run failed.
        audit (`dict`, *optional*): What the customer said that was not so.
    """

    task_id: str
    domain: str
    trial: int
    seed: int
    mode: str
    digest: str
    termination: str
    reward: float
    reward_info: dict[str, Any]
    messages: list[dict[str, Any]]
    steps: int
    errors: int
    start_time: str
    end_time: str
    duration: float
    notes: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    attribution: dict[str, Any] | None = None
    audit: dict[str, Any] | None = None

    @property
    def key(self) -> tuple[str, str, int, int, str, str]:
        """What makes a cell unique: domain, task, trial, seed, mode, configuration."""
        return self.domain, self.task_id, self.trial, self.seed, self.mode, self.digest

    @property
    def success(self) -> bool:
        """Whether the run counts as solved."""
        return abs(self.reward - 1) <= SUCCESS_TOLERANCE

    def to_cell(self) -> Cell:
        """For the metrics."""
        unjudged = bool((self.reward_info.get("info") or {}).get("unjudged"))
        return Cell(
            self.task_id, self.trial, self.success, self.reward, self.termination, self.mode, unjudged, self.labels
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RunRecord":
        """Read `to_dict`'s output.

        Raises:
            ValueError: A field is missing; the way a run ended is never guessed.
        """
        missing = [name for name in ("task_id", "trial", "termination", "reward", "messages") if name not in data]
        if missing:
            raise ValueError(f"a stored run lacks {', '.join(missing)}")
        return cls(**{name: value for name, value in data.items() if name in cls.__dataclass_fields__})


class RunStore:
    """The runs of a folder.

    Args:
        folder (`str` or `Path`): Made where it is not there.
        rank (`int`, defaults to 0): Which process writes; each has its own file.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder)
        self.file = self.folder / CELLS / f"rank-{rank}.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._mend()

    def _mend(self) -> None:
        """Cut off the half line that a killed process left."""
        if not self.file.is_file():
            return
        data = self.file.read_bytes()
        if data and not data.endswith(b"\n"):
            with self.file.open("r+b") as stream:
                stream.truncate(data.rfind(b"\n") + 1)

    def add(self, record: RunRecord) -> None:
        """Append a finished run; it is on disk when this returns."""
        line = json.dumps(record.to_dict(), ensure_ascii=False)
        with self._lock, self.file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def records(self) -> list[RunRecord]:
        """All runs, the newest of each cell, in order of domain, mode, task and trial."""
        newest: dict[tuple, RunRecord] = {}
        for record in self._read():
            kept = newest.get(record.key)
            if kept is None or record.end_time >= kept.end_time:
                newest[record.key] = record
        return sorted(newest.values(), key=lambda record: (record.domain, record.mode, record.task_id, record.trial))

    def _read(self) -> Iterator[RunRecord]:
        for file in sorted((self.folder / CELLS).glob("rank-*.jsonl")):
            with file.open(encoding="utf-8") as stream:
                for line in stream:
                    if not line.endswith("\n"):
                        continue  # another process is writing it
                    yield RunRecord.from_dict(json.loads(line))

    def archive_repeats(self) -> int:
        """Move all but the newest run of each cell into the archive; returns how many. Call it from one process."""
        newest = {record.key: record.end_time for record in self.records()}
        moved = 0
        for file in sorted((self.folder / CELLS).glob("rank-*.jsonl")):
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            stay, repeats = [], []
            for line in lines:
                record = RunRecord.from_dict(json.loads(line))
                if newest.get(record.key) == record.end_time:
                    stay.append(line)
                    newest.pop(record.key)
                else:
                    repeats.append(line)
            if repeats:
                moved += len(repeats)
                (self.folder / ARCHIVE).mkdir(exist_ok=True)
                with (self.folder / ARCHIVE / file.name).open("a", encoding="utf-8") as stream:
                    stream.writelines(repeats)
                temporary = file.with_suffix(".tmp")
                temporary.write_text("".join(stay), encoding="utf-8")
                temporary.replace(file)
        return moved
