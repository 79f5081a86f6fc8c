"""What a benchmark run is: tasks, players, rules. A configuration can be written to JSON and read again."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from hf_pipelines.tau2_bench.modes import MODES
from hf_pipelines.tau2_bench.orchestrator import MAX_ERRORS, MAX_STEPS, SEED

NOT_IN_HASH = ("out", "trials", "task_ids", "split", "infra", "workers", "mode", "seed")  # they change no single run
CHOICES = {"communicate": ("upstream", "strict"), "compat": ("strict", "upstream"), "infra": ("fail", "exclude")}


@dataclass
class RunConfig:
    """Settings of a run; each result carries their hash.

    Args:
        domain (`str`): Domain of the tasks.
        split (`str`): Split of the tasks.
        task_ids (`list[str]`, *optional*): Only these tasks.
        version (`str`): Edition of the task files.
        mode (`str`): `"dual"`, `"solo"`, `"oracle"` or `"oracle_solo"`.
        policy (`str`, *optional*): Variant of the policy; `None` is the domain's default (manual).
        trials (`int`): Trials of each task.
        seed (`int`): Seed from which the trials' seeds come.
        max_steps (`int`): Turns and executions before a run is cut off.
        max_errors (`int`): Failed calls and unusable answers before a run is cut off.
        timeout_s (`float`, *optional*): Seconds before a run is cut off.
        agent (`dict`): Description of the agent.
        user (`dict`): Description of the customer.
        judge (`dict`, *optional*): Description of the judge; without one NL assertions stay unjudged.
        compat (`str`): `"strict"`: gold actions count only if the right side made them successfully; `"upstream"`.
        communicate (`str`): `"upstream"` (substring) or `"strict"` (whole numbers).
        one_call_per_turn (`bool`): Whether only the first call of a message runs.
        hide_arguments (`bool`): In the oracle modes, name tools only.
        infra (`str`): Whether infrastructure errors count as failures (`"fail"`) or are left out (`"exclude"`).
        sync_gold (`bool`): Whether the gold replay couples the sides after every action.
        workers (`int`): Runs at a time.
        out (`str`, *optional*): Folder of the results.

    Raises:
        ValueError: A value is out of range.
    """

    domain: str = "telecom"
    split: str = "base"
    task_ids: list[str] | None = None
    version: str = "1.0.1"
    mode: str = "dual"
    policy: str | None = None
    trials: int = 4
    seed: int = SEED
    max_steps: int = MAX_STEPS
    max_errors: int = MAX_ERRORS
    timeout_s: float | None = None
    agent: dict[str, Any] = field(default_factory=lambda: {"kind": "workflow_script"})
    user: dict[str, Any] = field(default_factory=lambda: {"kind": "scripted"})
    judge: dict[str, Any] | None = None
    compat: Literal["strict", "upstream"] = "strict"
    communicate: Literal["upstream", "strict"] = "upstream"
    one_call_per_turn: bool = False
    hide_arguments: bool = False
    infra: Literal["fail", "exclude"] = "fail"
    sync_gold: bool = True
    workers: int = 1
    out: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(MODES)}")
        for name in ("trials", "max_steps", "max_errors", "workers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s!r} must be positive")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RunConfig":
        """Read `to_dict`'s output.

        Raises:
            ValueError: A field is unknown or a value out of range.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"unknown fields {', '.join(unknown)}; there is {', '.join(sorted(known))}")
        return cls(**data)

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "RunConfig":
        """Read from JSON.

        Raises:
            ValueError: Not an object with known fields.
        """
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"{path} must hold a JSON object, it holds a {type(data).__name__}")
        return cls.from_dict(data)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that change with everything that can change a single run."""
        data = {name: value for name, value in self.to_dict().items() if name not in NOT_IN_HASH}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]
