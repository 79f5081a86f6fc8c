"""pass^k and what is read from it: intervals, break-downs, and the split of failures into reasoning and guiding.

pass^k of a task with n trials and c successes is C(c, k)/C(n, k), the chance that k trials drawn without replacement
all succeed; of a task set it is the mean over tasks, never pooled over trials.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

DRAWS = 10_000  # of the bootstrap
INFRASTRUCTURE = "infrastructure_error"


@dataclass(frozen=True)
class Cell:
    """One finished trial, as far as metrics look at it.

    Args:
        task_id (`str`): The task.
        trial (`int`): Which of its trials.
        success (`bool`): Whether it was solved.
        reward (`float`): Its reward.
        termination (`str`): Why it ended.
        mode (`str`, defaults to `"dual"`): The mode.
        unjudged (`bool`, defaults to `False`): Whether a judge was missing.
        labels (`dict`): What to break down by, such as `{"category": "mms"}`.
    """

    task_id: str
    trial: int
    success: bool
    reward: float
    termination: str
    mode: str = "dual"
    unjudged: bool = False
    labels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_infrastructure(self) -> bool:
        """Whether the model never had its chance."""
        return self.termination == INFRASTRUCTURE


def pass_hat_k(n: int, c: int, k: int) -> float:
    """C(c, k)/C(n, k).

    >>> pass_hat_k(4, 3, 2)
    0.5

    Args:
        n (`int`): Trials.
        c (`int`): Successes.
        k (`int`): Trials that must all succeed.

    Raises:
        ValueError: Not 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 − C(n − c, k)/C(n, k): the chance that one of k trials succeeds.

    Args:
        n (`int`): Trials.
        c (`int`): Successes.
        k (`int`): Trials.

    Raises:
        ValueError: Not 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    _check_counts(n, c, k)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def _check_counts(n: int, c: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must be between 1 and the number of trials, {n}.")
    if not 0 <= c <= n:
        raise ValueError(f"c={c} successes in {n} trials.")


def check_inventory(
    cells: Iterable[Cell], task_ids: Sequence[str], trials: int, allow_partial: bool = False
) -> dict[str, list[tuple[str, int]]]:
    """Whether every (task, trial) is there once.

    Args:
        cells (`Iterable[Cell]`): Of one mode.
        task_ids (`Sequence[str]`): Tasks that were to be run.
        trials (`int`): Trials of each.
        allow_partial (`bool`, defaults to `False`): Only report what is missing.

    Returns:
        `dict`: lists `missing`, `duplicate` and `unknown` of (task id, trial).

    Raises:
        ValueError: There is nothing to report on, or cells are missing, doubled or unknown.
    """
    if trials < 1:
        raise ValueError(f"trials={trials} must be at least 1.")
    if not task_ids:
        raise ValueError("there are no tasks to report on.")
    counts = Counter((cell.task_id, cell.trial) for cell in cells)
    wanted = {(task, trial) for task in task_ids for trial in range(trials)}
    found = {
        "missing": sorted(wanted - set(counts)),
        "duplicate": sorted(key for key, count in counts.items() if count > 1),
        "unknown": sorted(set(counts) - wanted),
    }
    wrong = {name: keys for name, keys in found.items() if keys}
    if found["duplicate"] or found["unknown"] or (found["missing"] and not allow_partial):
        parts = [f"{len(keys)} {name}, such as {keys[0][0]!r} trial {keys[0][1]}" for name, keys in wrong.items()]
        shown = "; ".join(parts)
        raise ValueError(f"the run is not complete: {shown}. allow_partial=True reports on what is there, as PARTIAL.")
    return found


@dataclass
class PassK:
    """pass^k of a set of trials.

    Args:
        values (`dict[int, float]`): k → pass^k.
        intervals (`dict[int, tuple[float, float]]`): k → 95 % interval by bootstrap over tasks.
        pass_at (`dict[int, float]`): k → pass@k.
        mean_reward (`float`): Over all trials counted.
        n_tasks (`int`): The denominator.
        n_trials (`int`): Trials counted.
        excluded_trials (`int`): Trials left out for infrastructure errors.
        excluded_tasks (`int`): Tasks of which no trial is left, or fewer than k.
        unjudged_tasks (`int`): Tasks with a trial for which a judge was missing; they count as failures.
    """

    values: dict[int, float]
    intervals: dict[int, tuple[float, float]]
    pass_at: dict[int, float]
    mean_reward: float
    n_tasks: int
    n_trials: int
    excluded_trials: int = 0
    excluded_tasks: int = 0
    unjudged_tasks: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def pass_k(
    cells: Iterable[Cell],
    ks: Sequence[int] | None = None,
    infra: Literal["fail", "exclude"] = "fail",
    seed: int = 0,
) -> PassK:
    """pass^k over tasks, with bootstrap intervals.

    Args:
        cells (`Iterable[Cell]`): Trials of one mode.
        ks (`Sequence[int]`, *optional*): Default: 1 up to the least number of trials of a task.
        infra (`str`, defaults to `"fail"`): Whether trials that ended in an infrastructure error count as failures, or
            are left out (`"exclude"`).
        seed (`int`, defaults to 0): Of the bootstrap.

    Returns:
        [`PassK`].

    Raises:
        ValueError: No trials, or a k that is larger than the number of trials of a task.
    """
    if infra not in ("fail", "exclude"):
        raise ValueError(f"infra={infra!r} must be 'fail' or 'exclude'.")
    tasks: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        tasks[cell.task_id].append(cell)
    if not tasks:
        raise ValueError("there are no runs to count.")
    dropped = 0
    counted: dict[str, tuple[int, int]] = {}
    rewards: list[float] = []
    for task, trials in tasks.items():
        kept = [cell for cell in trials if infra == "fail" or not cell.is_infrastructure]
        dropped += len(trials) - len(kept)
        rewards += [cell.reward for cell in kept]
        if kept:
            counted[task] = (len(kept), sum(cell.success for cell in kept))
    unjudged = sum(any(cell.unjudged for cell in trials) for trials in tasks.values())
    full = min(len(trials) for trials in tasks.values())
    ks = list(range(1, full + 1)) if ks is None else list(ks)
    for k in ks:
        if not 1 <= k <= full:
            raise ValueError(f"k={k} must be between 1 and the {full} trials that every task has.")
    rng = np.random.default_rng(seed)
    values, intervals, at = {}, {}, {}
    for k in ks:
        enough = [(n, c) for n, c in counted.values() if n >= k]
        per_task = np.array([pass_hat_k(n, c, k) for n, c in enough])
        values[k] = float(per_task.mean()) if len(per_task) else math.nan
        intervals[k] = _interval(per_task, rng)
        at[k] = float(np.mean([pass_at_k(n, c, k) for n, c in enough])) if enough else math.nan
    excluded_tasks = len(tasks) - sum(n >= max(ks) for n, _ in counted.values())
    return PassK(
        values,
        intervals,
        at,
        float(np.mean(rewards)) if rewards else math.nan,
        len(tasks),
        len(rewards),
        dropped,
        excluded_tasks,
        unjudged,
    )


def _interval(per_task: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    if not len(per_task):
        return math.nan, math.nan
    draws = rng.integers(len(per_task), size=(DRAWS, len(per_task)))
    low, high = np.quantile(per_task[draws].mean(1), (0.025, 0.975))
    return float(low), float(high)


@dataclass
class PairedDifference:
    """How much better one run is than another on the same tasks.

    Args:
        difference (`float`): Mean of first − second over tasks.
        interval (`tuple[float, float]`): 95 % by bootstrap over tasks.
        n_tasks (`int`): Tasks that both have.
    """

    difference: float
    interval: tuple[float, float]
    n_tasks: int


def compare(first: Iterable[Cell], second: Iterable[Cell], k: int = 1, seed: int = 0) -> PairedDifference:
    """Paired difference of pass^k.

    Args:
        first (`Iterable[Cell]`): Trials of a run.
        second (`Iterable[Cell]`): Trials of another on the same tasks.
        k (`int`, defaults to 1): k.
        seed (`int`, defaults to 0): Of the bootstrap.

    Raises:
        ValueError: They have no task in common, or too few trials for k.
    """
    scores = [_by_task(cells, k) for cells in (first, second)]
    common = sorted(set(scores[0]) & set(scores[1]))
    if not common:
        raise ValueError("the two runs have no task in common.")
    gaps = np.array([scores[0][task] - scores[1][task] for task in common])
    return PairedDifference(float(gaps.mean()), _interval(gaps, np.random.default_rng(seed)), len(common))


def _by_task(cells: Iterable[Cell], k: int = 1) -> dict[str, float]:
    counts: dict[str, list[bool]] = defaultdict(list)
    for cell in cells:
        counts[cell.task_id].append(cell.success)
    return {task: pass_hat_k(len(wins), sum(wins), k) for task, wins in counts.items()}


def breakdown(
    cells: Iterable[Cell], by: str | Callable[[Cell], Any], infra: Literal["fail", "exclude"] = "fail"
) -> dict[Any, PassK]:
    """pass^k of each group.

    Args:
        cells (`Iterable[Cell]`): Trials.
        by (`str` or `Callable`): A label's name, or a function of a cell.
        infra (`str`, defaults to `"fail"`): As in [`pass_k`].

    Returns:
        `dict`: group → [`PassK`], in sorted order.
    """
    groups: dict[Any, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.labels.get(by) if isinstance(by, str) else by(cell)].append(cell)
    return {key: pass_k(groups[key], infra=infra) for key in sorted(groups, key=lambda key: (str(type(key)), key))}


@dataclass
class Decomposition:
    """Where failures come from, by comparing modes on the same tasks (differences of pass^1).

    Args:
        scores (`dict[str, float]`): Mode → pass^1.
        reasoning_gap (`float`, *optional*): 1 − solo.
        coordination_gap (`float`, *optional*): solo − dual.
        planning_share (`float`, *optional*): oracle − dual.
        residual_talk_error (`float`, *optional*): 1 − oracle.
        tasks (`dict[str, str]`): Task → `"solved"`, `"coordination"`, `"reasoning"` or `"both"`.
    """

    scores: dict[str, float]
    reasoning_gap: float | None = None
    coordination_gap: float | None = None
    planning_share: float | None = None
    residual_talk_error: float | None = None
    tasks: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def decompose(cells: Iterable[Cell]) -> Decomposition:
    """Reasoning against guiding; needs the modes `dual` and `solo`, and `oracle` for the rest.

    Args:
        cells (`Iterable[Cell]`): Trials of all modes on the same tasks.

    Returns:
        [`Decomposition`]: with `None` where a mode was not run.

    Raises:
        ValueError: The modes were run on different tasks.
    """
    modes: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        modes[cell.mode].append(cell)
    wins = {mode: _by_task(group) for mode, group in modes.items()}
    sets = {mode: frozenset(tasks) for mode, tasks in wins.items()}
    if len(set(sets.values())) > 1:
        shown = ", ".join(f"{mode} {len(tasks)}" for mode, tasks in sets.items())
        raise ValueError(f"modes must be run on the same tasks to be compared; they have {shown}.")
    scores = {mode: float(np.mean(list(tasks.values()))) for mode, tasks in wins.items()}
    result = Decomposition(scores)
    dual, solo, oracle = (scores.get(mode) for mode in ("dual", "solo", "oracle"))
    if solo is not None:
        result.reasoning_gap = 1 - solo
    if solo is not None and dual is not None:
        result.coordination_gap = solo - dual
    if oracle is not None:
        result.residual_talk_error = 1 - oracle
    if oracle is not None and dual is not None:
        result.planning_share = oracle - dual
    if dual is not None and solo is not None:
        result.tasks = {task: _verdict(task, wins) for task in wins["dual"]}
    return result


def _verdict(task: str, wins: dict[str, dict[str, float]]) -> str:
    """One task's label; a mode solves it if at least half of its trials do."""
    solved = {mode: tasks[task] >= 0.5 for mode, tasks in wins.items()}
    if solved["dual"]:
        return "solved"
    if solved["solo"]:
        return "coordination"
    return "reasoning" if solved.get("oracle", True) else "both"
