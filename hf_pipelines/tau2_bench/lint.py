"""Look for defects of tasks: gold plans that fail, goals that nothing has to be done for, tickets without consent.

Nothing here changes a score. A finding says which task, which kind, and what was seen, so that a report can list
results on sound tasks beside the whole.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.env import Environment
from hf_pipelines.tau2_bench.hashing import state_hash
from hf_pipelines.tau2_bench.scoring import is_vacuous, score_run
from hf_pipelines.tau2_bench.task import Action, Task

CODES = {
    "unknown_tool": "a gold action names a tool that its side does not have",
    "gold_write_error": "a gold action that should change the state fails",
    "gold_read_error": "a gold action that only looks something up fails",
    "gold_changes_nothing": "the gold plan leaves the state as it was",
    "noop_passes": "doing nothing already scores 1",
    "vacuous_basis": "a component of the reward has nothing to check",
    "goal_met_early": "all assertions hold before the last gold action that changes something",
    "unsat_assertion": "an assertion does not hold after the gold plan",
    "order_sensitive": "the order of items in one gold call changes the end state",
    "state_corrupt": "after the gold plan an order's item has another price or other options than the catalogue",
    "ticket_missing_consent": "the gold plan needs a consent that the ticket for solo agents does not give",
    "persona_age_conflict": "the persona's age does not fit the stored date of birth",
}
AGE_TOLERANCE_YEARS = 5
CONSENTS = {
    "refuel_data": re.compile(r"refuel|\d\s?GB", re.IGNORECASE),
    "make_payment": re.compile(r"\bpay", re.IGNORECASE),
}
_AGE = re.compile(r"(\d{2,3})[- ]years?[- ]old|\bage[d:]? (\d{2,3})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """A defect of one task.

    Args:
        task_id (`str`): The task.
        code (`str`): Kind, a key of `CODES`.
        message (`str`): What was seen.
        details (`dict`): Figures and names.
    """

    task_id: str
    code: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Storage format."""
        return dict(vars(self))


def lint_tasks(tasks: Sequence[Task], domain: Domain | str | None = None) -> list[Finding]:
    """Check tasks for defects.

    >>> from hf_pipelines.tau2_bench.tasks import load_tasks
    >>> lint_tasks(load_tasks("telecom", task_ids=["[service_issue]airplane_mode_on[PERSONA:None]"], split="full"))
    []

    Args:
        tasks (`Sequence[Task]`): Tasks of one domain.
        domain (`Domain` or `str`, *optional*): Its world; `None` takes that of the tasks.

    Returns:
        `list[Finding]`: In the order of the tasks and of `CODES`.

    Raises:
        ValueError: If there are no tasks.
    """
    if not tasks:
        raise ValueError("tasks is empty; give at least one task")
    if not isinstance(domain, Domain):
        domain = get_domain(domain or tasks[0].domain_name, tasks[0].data_dir)
    return [finding for task in tasks for finding in lint_task(task, domain)]


def lint_task(task: Task, domain: Domain) -> list[Finding]:
    """The defects of one task."""
    start = Environment.for_task(domain, task)
    gold = start.copy()
    replay = list(_gold_steps(task, gold))
    checks: tuple[Callable[..., Iterator[Finding]], ...] = (
        _gold_errors,
        _nothing_to_do,
        _goal,
        _item_order,
        _catalogue,
        _consents,
        _age,
    )
    return [finding for check in checks for finding in check(task, domain, start, gold, replay)]


@dataclass(frozen=True)
class _Step:
    """One gold action: its tool's kind (`None`: no such tool), its error, and whether all assertions held before."""

    action: Action
    kind: str | None
    error: str | None
    met_before: bool


def _gold_steps(task: Task, env: Environment) -> Iterator[_Step]:
    for action in task.actions:
        met = _all_met(task, env)
        kind, error = env.kind(action.name, action.requestor), None
        try:
            env.run_tool(action.name, action.arguments, action.requestor)
        except Exception as caught:  # whatever is wrong with it is the finding
            error = str(caught)
        yield _Step(action, kind, error, met)


def _all_met(task: Task, env: Environment) -> bool:
    return bool(task.env_assertions) and all(env.holds(item) for item in task.env_assertions)


# ---------------------------------------------------------------------------------------------------------- the checks


def _gold_errors(
    task: Task, domain: Domain, start: Environment, gold: Environment, steps: Sequence[_Step]
) -> Iterator[Finding]:
    codes = (("unknown_tool", (None,)), ("gold_write_error", ("write",)), ("gold_read_error", ("read", "generic")))
    for code, kinds in codes:
        failed = {step.action.name: step.error for step in steps if step.error is not None and step.kind in kinds}
        if failed:
            message = "; ".join(f"{name}: {error}" for name, error in failed.items())
            yield Finding(task.id, code, message, {"tools": sorted(failed)})


def _nothing_to_do(
    task: Task, domain: Domain, start: Environment, gold: Environment, steps: Sequence[_Step]
) -> Iterator[Finding]:
    if gold.same_state(start) and "DB" in task.reward_basis:
        yield Finding(task.id, "gold_changes_nothing", CODES["gold_changes_nothing"])
    idle = score_run(task, task.message_history, "user_stop", domain=domain)
    if idle.success:
        basis = ", ".join(task.reward_basis)
        yield Finding(task.id, "noop_passes", f"an idle agent satisfies {basis}", {"basis": list(task.reward_basis)})
    vacuous = [component for component in task.reward_basis if is_vacuous(component, task)]
    if vacuous:
        yield Finding(task.id, "vacuous_basis", f"{', '.join(vacuous)} has nothing to check", {"components": vacuous})


def _goal(
    task: Task, domain: Domain, start: Environment, gold: Environment, steps: Sequence[_Step]
) -> Iterator[Finding]:
    writes = [step for step in steps if step.kind == "write"]
    if writes and writes[-1].met_before:
        place = next(index for index, step in enumerate(steps) if step.met_before)
        name = steps[place].action.name
        yield Finding(task.id, "goal_met_early", f"met before gold action {place} ({name})", {"action": place})
    unmet = [item.func_name for item in task.env_assertions if not gold.holds(item)]
    if unmet:
        yield Finding(
            task.id, "unsat_assertion", f"not true after the gold plan: {', '.join(unmet)}", {"names": unmet}
        )


def _item_order(
    task: Task, domain: Domain, start: Environment, gold: Environment, steps: Sequence[_Step]
) -> Iterator[Finding]:
    reversible = [action.name for action in task.actions if _parallel_lists(action)]
    if not reversible:
        return
    other = start.copy()
    for action in task.actions:
        arguments = dict(action.arguments)
        for name in _parallel_lists(action):
            arguments[name] = arguments[name][::-1]
        try:
            other.run_tool(action.name, arguments, action.requestor)
        except Exception:  # the same error as in the gold plan, reported there
            continue
    if _rounded_hash(other) != _rounded_hash(gold):
        yield Finding(task.id, "order_sensitive", f"{', '.join(reversible)} with its lists reversed ends elsewhere")


def _parallel_lists(action: Action) -> list[str]:
    """Names of the lists of ids that pair up in an action, if there are two or more of one length above 1."""
    lists = [
        name
        for name, value in action.arguments.items()
        if name.endswith("_ids") and isinstance(value, list) and len(value) > 1
    ]
    lengths = {len(action.arguments[name]) for name in lists}
    return lists if len(lists) > 1 and len(lengths) == 1 else []


def _rounded_hash(env: Environment) -> str:
    """Hash of the records that differ from the start, amounts to a hundredth: sums of floats depend on their order."""
    store = env.agent.store
    changed = {
        name: {key: record for key, record in table.items() if store.base.tables[name].get(key) is not record}
        for name, table in store.tables.items()
    }
    return state_hash(_rounded(changed))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


def _catalogue(
    task: Task, domain: Domain, start: Environment, gold: Environment, steps: Sequence[_Step]
) -> Iterator[Finding]:
    store = gold.agent.store
    if not {"orders", "products"} <= store.tables.keys():
        return
    wrong = []
    for order_id, order in store["orders"].items():
        if order is store.base.tables["orders"].get(order_id):
            continue
        for item in order["items"]:
            variant = store["products"].get(item["product_id"], {}).get("variants", {}).get(item["item_id"])
            if variant and (variant["price"], variant["options"]) != (item["price"], item["options"]):
                wrong.append([order_id, item["item_id"]])
    if wrong:
        message = f"{len(wrong)} item(s) with the price or options of another"
        yield Finding(task.id, "state_corrupt", message, {"wrong_rows": len(wrong), "items": wrong})


def _consents(
    task: Task, domain: Domain, start: Environment, gold: Environment, steps: Sequence[_Step]
) -> Iterator[Finding]:
    needed = {action.name for action in task.actions} & CONSENTS.keys()
    missing = sorted(name for name in needed if task.ticket and not CONSENTS[name].search(task.ticket))
    if missing:
        message = f"the ticket does not agree to {', '.join(missing)}"
        yield Finding(task.id, "ticket_missing_consent", message, {"tools": missing})


def _age(
    task: Task, domain: Domain, start: Environment, gold: Environment, steps: Sequence[_Step]
) -> Iterator[Finding]:
    found = _AGE.search(task.persona or "")
    born = _date_of_birth(start)
    if found is None or born is None:
        return
    stated = int(found.group(1) or found.group(2))
    today = date.fromisoformat(domain.clock[:10])
    actual = today.year - born.year - ((today.month, today.day) < (born.month, born.day))
    if abs(stated - actual) > AGE_TOLERANCE_YEARS:
        message = f"the persona is {stated} years old, the customer {actual}"
        yield Finding(task.id, "persona_age_conflict", message, {"stated": stated, "stored": actual})


def _date_of_birth(env: Environment) -> date | None:
    """Date of birth of the customer whose phone it is, where the world knows it."""
    around = env.user.store.tables.get("surroundings") if env.user else None
    if not around or not around.get("phone_number"):
        return None
    lines = env.agent.store["lines"]
    for customer in env.agent.store["customers"].values():
        if around["phone_number"] in [lines[line_id]["phone_number"] for line_id in customer["line_ids"]]:
            return date.fromisoformat(customer["date_of_birth"])
    return None
