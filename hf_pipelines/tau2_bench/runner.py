"""`evaluate`: play every (task, trial, mode) once, judge it, keep it on disk, and report."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_pipelines.tau2_bench.agents.build import build_agent, describe
from hf_pipelines.tau2_bench.attribution import attribute
from hf_pipelines.tau2_bench.config import RunConfig
from hf_pipelines.tau2_bench.judge import ChatModel
from hf_pipelines.tau2_bench.metrics import INFRASTRUCTURE
from hf_pipelines.tau2_bench.modes import is_solo
from hf_pipelines.tau2_bench.orchestrator import Orchestrator, trial_seeds
from hf_pipelines.tau2_bench.players import Player, Run
from hf_pipelines.tau2_bench.report import Report
from hf_pipelines.tau2_bench.scoring import RewardInfo, score_run
from hf_pipelines.tau2_bench.store_runs import RunRecord, RunStore
from hf_pipelines.tau2_bench.task import Task
from hf_pipelines.tau2_bench.types import AnyMessage
from hf_pipelines.tau2_bench.users.audit import audit_user
from hf_pipelines.tau2_bench.users.build import build_user

INFRASTRUCTURE_RETRIES = 2


@dataclass(frozen=True)
class CellSpec:
    """A trial to run."""

    task: Task
    trial: int
    seed: int
    config: RunConfig

    @property
    def key(self) -> tuple[str, str, int, int, str, str]:
        """As of [`RunRecord`]."""
        return self.task.domain_name, self.task.id, self.trial, self.seed, self.config.mode, self.config.digest


def evaluate(
    agent: Any,
    tasks: Sequence[Task],
    user: Any = "scripted",
    *,
    trials: int = 4,
    modes: Sequence[str] = ("dual",),
    seed: int = 300,
    judge: ChatModel | None = None,
    out: str | Path | None = None,
    workers: int = 1,
    rank: int = 0,
    ranks: int = 1,
    resume: bool = True,
    progress: bool = True,
    on_record: Callable[[RunRecord], None] | None = None,
    **settings: Any,
) -> Report:
    """Run the benchmark.

    Args:
        agent (`str`, `dict`, `ChatModel`, `Player` class or factory): Who is judged; see `build_agent`.
        tasks (`Sequence[Task]`): Of [`load_tasks`].
        user (`str`, `dict`, `ChatModel` or factory, defaults to `"scripted"`): The customer; see `build_user`.
        trials (`int`, defaults to 4): Trials of each task.
        modes (`Sequence[str]`, defaults to `("dual",)`): Modes to run one after another.
        seed (`int`, defaults to 300): The trials' seeds come from it.
        judge (`ChatModel`, *optional*): For NL assertions.
        out (`str` or `Path`, *optional*): Folder in which each finished run is kept. What is there already is not run
            again.
        workers (`int`, defaults to 1): Runs at a time. Results do not depend on it.
        rank (`int`, defaults to 0): This process.
        ranks (`int`, defaults to 1): Processes that share the work.
        resume (`bool`, defaults to `True`): Whether runs found in `out` count.
        progress (`bool`, defaults to `True`): Show a bar.
        on_record (`Callable`, *optional*): Called with each finished run.
        **settings: Further fields of [`RunConfig`].

    Returns:
        [`Report`]: over the runs of this process; with several, `Report.load(out)` afterwards has all.

    Raises:
        ValueError: No tasks, less than one trial, or a setting out of range.
    """
    if not tasks:
        raise ValueError("tasks is empty: there is nothing to run")
    domains = sorted({task.domain_name for task in tasks})
    if not modes:
        raise ValueError("modes is empty: name at least one, such as 'dual'")
    base = RunConfig(
        domain=domains[0] if len(domains) == 1 else "+".join(domains),
        trials=trials,
        seed=seed,
        workers=workers,
        agent=describe(agent),
        user=describe(user),
        judge=describe(judge) if judge is not None else None,
        out=None if out is None else str(out),
        **settings,
    )
    seeds = trial_seeds(seed, trials)
    cells = [
        CellSpec(task, trial, seeds[trial], replace(base, mode=mode))
        for mode in modes
        for task in tasks
        for trial in range(trials)
    ]
    store = RunStore(out, rank) if out is not None else None
    if store is not None and rank == 0:
        base.save(store.folder / "config.json")
    done = {record.key: record for record in store.records()} if store is not None and resume else {}
    mine = cells[rank::ranks]
    records = [done[cell.key] for cell in mine if cell.key in done]
    todo = [cell for cell in mine if cell.key not in done]
    make_agent, make_user = build_agent(agent), build_user(user)
    bar = tqdm(total=len(mine), initial=len(records), desc="tau2", disable=not progress)
    solved = sum(record.success for record in records)
    for record in _run_all(todo, make_agent, make_user, judge, workers):
        if store is not None:
            store.add(record)
        records.append(record)
        solved += record.success
        bar.update()
        bar.set_postfix(solved=f"{solved}/{len(records)}")
        if on_record is not None:
            on_record(record)
    bar.close()
    if store is not None and ranks == 1:
        store.archive_repeats()
    return Report(records, base, tasks, modes, partial=ranks > 1)


def _run_all(
    cells: Iterable[CellSpec],
    make_agent: Callable[[], Player],
    make_user: Callable[[], Player],
    judge: ChatModel | None,
    workers: int,
) -> Iterable[RunRecord]:
    if workers == 1:
        for cell in cells:
            yield run_cell(cell, make_agent, make_user, judge)
        return
    queue = iter(cells)
    with ThreadPoolExecutor(workers) as pool:
        pending: set[Future] = set()
        try:
            while True:
                for cell in queue:
                    pending.add(pool.submit(run_cell, cell, make_agent, make_user, judge))
                    if len(pending) >= 2 * workers:
                        break
                if not pending:
                    return
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield future.result()
        finally:
            for future in pending:
                future.cancel()


def run_cell(
    cell: CellSpec,
    make_agent: Callable[[], Player],
    make_user: Callable[[], Player],
    judge: ChatModel | None = None,
    on_message: Callable[[AnyMessage], None] | None = None,
) -> RunRecord:
    """Play, judge and explain one trial; an infrastructure error is tried again before it counts.

    Args:
        cell (`CellSpec`): What to run.
        make_agent (`Callable`): Gives a fresh agent.
        make_user (`Callable`): Gives a fresh customer.
        judge (`ChatModel`, *optional*): For NL assertions.
        on_message (`Callable`, *optional*): Called with each new message.
    """
    config, task = cell.config, cell.task
    for _ in range(INFRASTRUCTURE_RETRIES + 1):
        orchestrator = Orchestrator(
            task,
            make_agent(),
            None if is_solo(config.mode) else make_user(),
            mode=config.mode,
            policy=config.policy,
            seed=cell.seed,
            max_steps=config.max_steps,
            max_errors=config.max_errors,
            timeout_s=config.timeout_s,
            one_call_per_turn=config.one_call_per_turn,
            hide_arguments=config.hide_arguments,
        )
        run = orchestrator.run(on_message)
        if run.termination != INFRASTRUCTURE:
            break
    verdict = judge_run(task, run, config, judge)
    return make_record(cell, run, verdict)


def judge_run(task: Task, run: Run, config: RunConfig, judge: ChatModel | None = None) -> RewardInfo:
    """The verdict under a configuration's rules."""
    return score_run(
        task,
        run.messages,
        run.termination,
        solo=is_solo(run.mode),
        judge=judge,
        communicate=config.communicate,
        compare_actions=config.compat,
        sync_gold=config.sync_gold,
    )


def make_record(cell: CellSpec, run: Run, verdict: RewardInfo) -> RunRecord:
    """Everything that is kept of one trial."""
    task = cell.task
    audit = None if is_solo(run.mode) else audit_user(task, run, verdict.success)
    blame = None
    if not verdict.success and not is_solo(run.mode):
        blame = attribute(task, run, verdict, audit, noisy=bool(cell.config.user.get("noise"))).to_dict()
    return RunRecord(
        task_id=task.id,
        domain=task.domain_name,
        trial=cell.trial,
        seed=cell.seed,
        mode=run.mode,
        digest=cell.config.digest,
        termination=run.termination,
        reward=verdict.reward,
        reward_info=verdict.to_dict(),
        messages=[message.to_dict() for message in run.messages],
        steps=run.steps,
        errors=run.errors,
        start_time=run.start_time,
        end_time=run.end_time,
        duration=run.duration,
        notes=[note.to_dict() for note in run.notes],
        reason=run.reason,
        labels=task_labels(task),
        attribution=blame,
        audit=None if audit is None else audit.to_dict(),
    )


def task_labels(task: Task) -> dict[str, Any]:
    """What to break results down by."""
    return {
        "category": task.category,
        "atoms": len(task.atoms),
        "gold size": len(task.actions),
        "persona": task.persona_name,
        "hand-over": task.must_transfer,
    }
