"""What a run shows: pass^k with intervals, where failures come from, and how far the customer can be trusted."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from hf_pipelines.tau2_bench.config import RunConfig
from hf_pipelines.tau2_bench.metrics import (
    Cell,
    Decomposition,
    PassK,
    breakdown,
    check_inventory,
    decompose,
    pass_k,
)
from hf_pipelines.tau2_bench.store_runs import RunRecord, RunStore
from hf_pipelines.tau2_bench.task import Task

GROUPS = ("category", "atoms", "gold size", "persona", "hand-over")
REPORT_FILE = "report.json"


@dataclass
class Report:
    """Results of all modes that were run.

    Args:
        records (`list[RunRecord]`): The trials.
        config (`RunConfig`): The run's settings.
        tasks (`Sequence[Task]` or `Sequence[str]`): Tasks that were to be run.
        modes (`Sequence[str]`): Modes that were to be run.
        partial (`bool`): Whether missing trials are allowed.
    """

    records: list[RunRecord]
    config: RunConfig
    tasks: Sequence[Task | str] = ()
    modes: Sequence[str] = ("dual",)
    partial: bool = False
    missing: dict[str, list[tuple[str, int]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError("there are no runs to report on")
        ids = [task if isinstance(task, str) else task.id for task in self.tasks]
        ids = ids or sorted({record.task_id for record in self.records})
        self._ids = ids
        self.missing = {
            mode: check_inventory(self.cells(mode), ids, self.config.trials, self.partial)["missing"]
            for mode in self.modes
        }

    @classmethod
    def load(
        cls,
        folder: str | Path,
        allow_partial: bool = False,
        tasks: Sequence[Task | str] = (),
        trials: int | None = None,
    ) -> "Report":
        """Read a folder of runs.

        Args:
            folder (`str` or `Path`): `out` of [`evaluate`].
            allow_partial (`bool`, defaults to `False`): Report on what is there where trials are missing.
            tasks (`Sequence`, *optional*): Tasks that were to be run; default: those found.
            trials (`int`, *optional*): Trials of each; default: the configuration's.

        Raises:
            FileNotFoundError: No such run.
            ValueError: Trials are missing or doubled.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} holds no run: there is no config.json in it")
        config = RunConfig.load(folder / "config.json")
        if trials is not None:
            config.trials = trials
        records = RunStore(folder).records()
        digests = Counter((record.mode, record.digest) for record in records)
        for mode in {mode for mode, _ in digests}:
            kept = [digest for m, digest in digests if m == mode]
            if len(kept) > 1:
                raise ValueError(
                    f"{folder} mixes {len(kept)} configurations in mode {mode!r} ({', '.join(kept)}); "
                    "use a folder for each"
                )
        modes = list(dict.fromkeys(record.mode for record in records))
        return cls(records, config, tasks, modes or ["dual"], allow_partial)

    # ---- figures ----

    def cells(self, mode: str) -> list[Cell]:
        """The trials of a mode, as metrics see them."""
        return [record.to_cell() for record in self.records if record.mode == mode]

    @property
    def is_partial(self) -> bool:
        """Whether trials are missing."""
        return any(self.missing.values())

    @cached_property
    def pass_k(self) -> dict[str, PassK]:
        """Mode → pass^k, infrastructure errors counted as failures (or as the configuration says)."""
        return {mode: pass_k(self.cells(mode), infra=self.config.infra) for mode in self.modes if self.cells(mode)}

    @cached_property
    def pass_k_excl(self) -> dict[str, PassK]:
        """Mode → pass^k without the trials that ended in an infrastructure error."""
        return {mode: pass_k(self.cells(mode), infra="exclude") for mode in self.modes if self.cells(mode)}

    @property
    def decomposition(self) -> Decomposition | None:
        """Reasoning against guiding, where more than one mode was run."""
        return decompose(record.to_cell() for record in self.records) if len(self.modes) > 1 else None

    def breakdown(self, by: str, mode: str | None = None) -> dict[Any, PassK]:
        """pass^k by `"category"`, `"atoms"`, `"gold size"`, `"persona"` or `"hand-over"`."""
        return breakdown(self.cells(mode or self.modes[0]), by, self.config.infra)

    @property
    def attribution(self) -> dict[str, int]:
        """Label → failed dual runs."""
        labels = Counter(record.attribution["label"] for record in self.records if record.attribution)
        return dict(labels.most_common())

    @property
    def audit(self) -> dict[str, float]:
        """Share of runs in which the customer said something that was not so, and in which that mattered."""
        audits = [record.audit for record in self.records if record.audit is not None]
        if not audits:
            return {}
        wrong = sum(bool(audit["events"]) for audit in audits)
        critical = sum(any(event["severity"] == "critical" for event in audit["events"]) for audit in audits)
        return {"runs": len(audits), "rate": wrong / len(audits), "critical rate": critical / len(audits)}

    @property
    def vacuous(self) -> int:
        """Tasks with a component of the basis that has nothing to check."""
        return len({r.task_id for r in self.records if (r.reward_info.get("info") or {}).get("vacuous")})

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        decomposition = self.decomposition
        return {
            "config": self.config.to_dict(),
            "partial": self.is_partial,
            "missing": {mode: len(cells) for mode, cells in self.missing.items()},
            "n_tasks": len(self._ids),
            "pass_k": {mode: value.to_dict() for mode, value in self.pass_k.items()},
            "pass_k_excl": {mode: value.to_dict() for mode, value in self.pass_k_excl.items()},
            "decomposition": None if decomposition is None else decomposition.to_dict(),
            "attribution": self.attribution,
            "audit": self.audit,
            "vacuous_tasks": self.vacuous,
            "breakdown": {by: {str(key): value.values for key, value in self.breakdown(by).items()} for by in GROUPS},
            "mean_steps": sum(record.steps for record in self.records) / len(self.records),
            "terminations": dict(Counter(record.termination for record in self.records)),
        }

    def to_markdown(self, baselines: dict[str, "Report"] | None = None) -> str:
        """Tables of the figures; `baselines` (name → report) are printed beside."""
        from hf_pipelines.benchmark import markdown_table

        reports = {"this run": self, **(baselines or {})}
        lines = []
        if self.is_partial:
            lines.append(f"**PARTIAL**: {sum(map(len, self.missing.values()))} trials are missing.\n")
        policy = self.config.policy or "manual"
        lines.append(
            f"{len(self._ids)} tasks of {self.config.domain} ({self.config.split}, version {self.config.version}), "
            f"{self.config.trials} trials, policy {policy}, seed {self.config.seed}, "
            f"agent {_name(self.config.agent)}, customer {_name(self.config.user)}.\n"
        )
        ks = sorted({k for report in reports.values() for value in report.pass_k.values() for k in value.values})
        rows = [
            [name, mode, *(_share(value, k) for k in ks), f"{value.mean_reward:.3f}", str(value.excluded_trials)]
            for name, report in reports.items()
            for mode, value in _with_exclusions(report).items()
        ]
        columns = ["run", "mode", *(f"pass^{k}" for k in ks), "mean reward", "infrastructure errors"]
        lines.append(markdown_table(columns, rows))
        gaps = self.decomposition
        if gaps is not None:
            named = {
                "reasoning gap (1 − solo)": gaps.reasoning_gap,
                "coordination gap (solo − dual)": gaps.coordination_gap,
                "planning share (oracle − dual)": gaps.planning_share,
                "residual talk error (1 − oracle)": gaps.residual_talk_error,
            }
            rows = [[name, f"{value:.3f}"] for name, value in named.items() if value is not None]
            lines += ["", markdown_table(["where failures come from", "pass^1"], rows)]
        if self.attribution:
            rows = [[label, str(count)] for label, count in self.attribution.items()]
            lines += ["", markdown_table(["failed dual runs", "number"], rows)]
        if self.audit:
            shares = f"{100 * self.audit['rate']:.1f} % ({100 * self.audit['critical rate']:.1f} % critical)"
            lines += ["", f"The customer said something untrue in {shares} of {self.audit['runs']:.0f} runs."]
        unjudged = sum(value.unjudged_tasks for value in self.pass_k.values())
        if unjudged:
            lines.append(f"{unjudged} tasks are unjudged for want of a judge; they count as not solved.")
        if self.vacuous:
            lines.append(f"{self.vacuous} tasks list a component with nothing to check.")
        if self.config.user.get("kind") == "scripted":
            lines.append(
                "The customer is a script: these figures compare with each other, not with the public leaderboard."
            )
        return "\n".join(lines) + "\n"

    def save(self, folder: str | Path) -> Path:
        """Write `report.json` and `report.md`; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT_FILE).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(self.to_markdown(), encoding="utf-8")
        return folder

    def to_eval_results(self, folder: str | Path, dataset_id: str, mode: str = "dual") -> Path:
        """Write `.eval_results/tau2_bench.yaml` of a model repo.

        Args:
            folder (`str` or `Path`): The repo's folder.
            dataset_id (`str`): Hub id of the benchmark's data set, `org/name`.
            mode (`str`, defaults to `"dual"`): Which mode's pass^1, in percent.

        Returns:
            `Path`: the file.

        Raises:
            ValueError: The run is partial, the mode was not run, or the id is no Hub id.
        """
        from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

        if self.is_partial:
            raise ValueError("the run is PARTIAL: complete it before you publish its figures")
        if mode not in self.pass_k:
            raise ValueError(f"mode={mode!r} was not run; there is {', '.join(self.pass_k)}")
        if dataset_id.count("/") != 1:
            raise ValueError(f"dataset_id={dataset_id!r} must be 'namespace/name'")
        entries = []
        for domain in sorted({record.domain for record in self.records}):
            cells = [r.to_cell() for r in self.records if r.mode == mode and r.domain == domain]
            value = pass_k(cells, [1], self.config.infra)
            notes = (
                f"pass^1, {self.config.trials} trials, {value.n_tasks} tasks, mode {mode}, customer "
                f"{_name(self.config.user)}, policy {self.config.policy or 'manual'}, version {self.config.version}"
            )
            entries.append(
                EvalResultEntry(
                    dataset_id=dataset_id,
                    task_id=f"tau2_bench_{domain}",
                    value=round(100 * value.values[1], 2),
                    date=date.today().isoformat(),
                    notes=notes,
                )
            )
        target = Path(folder) / ".eval_results" / "tau2_bench.yaml"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False), encoding="utf-8")
        return target


def _with_exclusions(report: Report) -> dict[str, PassK]:
    """The rows of a report: each mode, and where trials were lost to infrastructure a second row without them."""
    rows: dict[str, PassK] = {}
    for mode, value in report.pass_k.items():
        rows[mode] = value
        left_out = report.pass_k_excl[mode]
        if left_out.excluded_trials and report.config.infra == "fail":
            rows[f"{mode}, without infrastructure errors ({left_out.excluded_tasks} tasks fewer)"] = left_out
    return rows


def _share(value: PassK, k: int) -> str:
    if k not in value.values:
        return ""
    low, high = value.intervals[k]
    return f"{value.values[k]:.3f} [{low:.3f}, {high:.3f}]"


def _name(description: dict[str, Any]) -> str:
    extras = [f"{key}={value}" for key, value in description.items() if key != "kind" and value not in (None, {}, [])]
    kind = str(description.get("kind", description))
    return f"{kind} ({', '.join(extras)})" if extras else kind
