"""Why a run failed: reasoning, guiding the customer, protocol, budget, or the simulated customer itself.

The rules are deterministic and the first that fits decides. They are this library's own; the paper compares modes
instead (see `metrics.decompose`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.env import Environment, answered_calls
from hf_pipelines.tau2_bench.metrics import INFRASTRUCTURE
from hf_pipelines.tau2_bench.players import Run
from hf_pipelines.tau2_bench.scoring import RewardInfo
from hf_pipelines.tau2_bench.task import TRANSFER_TOOL, Action, Task
from hf_pipelines.tau2_bench.types import AnyMessage, Message, ToolCall
from hf_pipelines.tau2_bench.users.parse import parse


@dataclass
class Attribution:
    """Why a run failed.

    Args:
        label (`str`): Such as `"coordination/not_executed"`.
        turn_idx (`int`, *optional*): The message that shows it.
        missing (`list[dict]`): Gold actions without a successful matching call: name, arguments, requestor.
    """

    label: str
    turn_idx: int | None = None
    missing: list[dict[str, Any]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The part before the slash."""
        return self.label.partition("/")[0]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def attribute(task: Task, run: Run, verdict: RewardInfo, audit: Any = None, noisy: bool = False) -> Attribution:
    """Explain one failed dual run.

    Args:
        task (`Task`): The task.
        run (`Run`): The run.
        verdict (`RewardInfo`): Its verdict, a failure.
        audit (`Audit`, *optional*): Of the customer.
        noisy (`bool`, defaults to `False`): Whether the customer was made to err on purpose.

    Returns:
        [`Attribution`].

    Raises:
        ValueError: The run was a success.
    """
    if verdict.success:
        raise ValueError(f"the run of {task.id!r} succeeded; there is no failure to attribute")
    messages = run.messages
    calls = list(answered_calls(messages))
    missing = _missing(task, calls)
    shown = [{"name": a.name, "arguments": dict(a.arguments), "requestor": a.requestor} for a in missing]
    end = len(messages) - 1

    def found(label: str, turn: int | None = None) -> Attribution:
        return Attribution(label, end if turn is None else turn, shown)

    if run.termination == INFRASTRUCTURE:
        return found("infra")
    if run.termination == "agent_error":
        return found("protocol")
    if run.termination == "too_many_errors":
        return found(_errors_label(task, calls))
    transferred = _turn_of_call(messages, TRANSFER_TOOL, "assistant")
    if task.must_transfer and transferred is None:
        return found("reasoning/missed_transfer")
    if run.termination in ("max_steps", "timeout"):
        return found("budget")
    if run.termination in ("user_error", "context_window_exceeded", "unexpected_error"):
        return found("user_simulator" if run.termination == "user_error" else "protocol")
    for action in missing:
        if action.requestor == "user":
            turn = _turn_of_call(messages, action.name, "assistant")
            if turn is not None:
                return found("coordination/role_confusion", turn)
    for action in missing:
        if action.requestor == "user":
            turn = _turn_of_request(messages, action)
            if turn is not None:
                blamed = audit is not None and not noisy and audit.blames(turn)
                return found("user_simulator" if blamed else "coordination/not_executed", turn)
    if missing and transferred is not None and not task.must_transfer:
        return found("reasoning/premature_transfer", transferred)
    for action in missing:
        turn = _turn_of_call(messages, action.name, action.requestor)
        if turn is not None:
            return found("reasoning/wrong_argument", turn)
    if missing:
        return found("reasoning/missing_step")
    return _nothing_missing(task, run, verdict, found)


def _nothing_missing(task: Task, run: Run, verdict: RewardInfo, found: Any) -> Attribution:
    components = verdict.reward_breakdown
    state_wrong = any(components.get(name) == 0 for name in ("DB", "ENV_ASSERTION"))
    if state_wrong:
        turn = _last_turn_with_goal(task, run)
        if turn is not None:
            return found("reasoning/undone", turn)
        if components.get("DB") == 0 or not (verdict.db_check or {}).get("db_match", True):
            return found("reasoning/harmful_extra")
        return found("reasoning/missing_step")
    return found("communication")


def _missing(task: Task, calls: Sequence[tuple[ToolCall, Any]]) -> list[Action]:
    """Gold actions without a successful call of the right side that matches."""
    good = [call for call, answer in calls if not answer.error and isinstance(call.arguments, dict)]
    return [a for a in task.actions if not any(c.requestor == a.requestor and a.matches(c) for c in good)]


def _errors_label(task: Task, calls: Sequence[tuple[ToolCall, Any]]) -> str:
    """Whether at least half of the failed calls were the agent's attempts at the customer's tools."""
    domain = get_domain(task.domain_name, task.data_dir)
    theirs = set(domain.user_toolkit.tools()) if domain.user_toolkit else set()
    failed = [call for call, answer in calls if answer.error]
    confused = [call for call in failed if call.requestor == "assistant" and call.name in theirs]
    return "coordination/role_confusion" if failed and 2 * len(confused) >= len(failed) else "protocol"


def _turn_of_call(messages: Sequence[AnyMessage], name: str, side: str) -> int | None:
    """The first message in which a side called a tool."""
    turns = (
        place
        for place, message in enumerate(messages)
        if isinstance(message, Message)
        and message.role == side
        and any(call.name == name for call in message.tool_calls or ())
    )
    return next(turns, None)


def _turn_of_request(messages: Sequence[AnyMessage], action: Action) -> int | None:
    """The last text in which the agent asked the customer for a tool, by name or in words."""
    turns = (
        place
        for place, message in reversed(list(enumerate(messages)))
        if isinstance(message, Message)
        and message.role == "assistant"
        and message.is_text
        and any(request[0] == action.name for request in parse(message.content))
    )
    return next(turns, None)


def _last_turn_with_goal(task: Task, run: Run) -> int | None:
    """The last call after which every assertion held that does not hold in the end."""
    if not task.env_assertions:
        return None
    domain = get_domain(task.domain_name, task.data_dir)
    env = Environment(domain, run.mode in ("solo", "oracle_solo"))
    env.set_state(task.initialization_data, task.initialization_actions)
    last = None
    for place, message in enumerate(run.messages):
        if not (isinstance(message, Message) and message.tool_calls):
            continue
        for call in message.tool_calls:
            env.respond(call)
        env.sync()
        if all(env.holds(item) for item in task.env_assertions):
            last = place
    return last
