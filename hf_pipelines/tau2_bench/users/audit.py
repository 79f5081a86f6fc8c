"""Audit of a customer, without a judge: what it said or did that the world, the agent or the scenario do not bear out.

The conversation is replayed in the task's world, so that each statement about the phone is held against the phone as
it was.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.env import Environment
from hf_pipelines.tau2_bench.modes import is_solo
from hf_pipelines.tau2_bench.players import Run
from hf_pipelines.tau2_bench.task import Task
from hf_pipelines.tau2_bench.types import STOP, AnyMessage, Message, ToolMessage
from hf_pipelines.tau2_bench.users.claims import claims_done, contradictions, revealed_fields
from hf_pipelines.tau2_bench.users.parse import parse

Kind = Literal["false_fact", "false_claim", "unasked_disclosure", "unrequested_stop", "unrequested_call"]
KINDS = ("false_fact", "false_claim", "unasked_disclosure", "unrequested_stop", "unrequested_call")
BLAMED = ("false_claim", "unrequested_stop")
PROFILES = ("standard", "strict")
_QUESTION = re.compile(r"\?|\b(?:done|fixed|complete[d]?|solved|resolved|works?)\b")  # of which a look is an answer


@dataclass
class Event:
    """Something a customer should not have said or done.

    Args:
        turn_idx (`int`): Place of the message.
        kind (`str`): One of `KINDS`.
        severity (`str`): `"critical"` if the run failed and would have passed without it, else `"benign"`.
        text (`str`): In words.
    """

    turn_idx: int
    kind: Kind
    severity: Literal["critical", "benign"]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


@dataclass
class Audit:
    """What an audit found.

    Args:
        events (`list[Event]`): In the order of the conversation.
        turns (`int`): Messages of the customer.
        answers (`dict[int, int]`): Place of a text of the agent → place of the customer's next text.
    """

    events: list[Event] = field(default_factory=list)
    turns: int = 0
    answers: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def rate(self) -> float:
        """Share of the customer's messages with an event."""
        return len({event.turn_idx for event in self.events}) / self.turns if self.turns else 0.0

    @property
    def critical_rate(self) -> float:
        """Share of the customer's messages with a critical event."""
        critical = {event.turn_idx for event in self.events if event.severity == "critical"}
        return len(critical) / self.turns if self.turns else 0.0

    def blames(self, turn_idx: int) -> bool:
        """Whether the customer answered a request with a false claim, or stopped at it or after it without reason.

        Args:
            turn_idx (`int`): Place of the agent's text.
        """
        answer = self.answers.get(turn_idx)
        for event in self.events:
            if event.kind == "false_claim" and answer is not None and event.turn_idx == answer:
                return True
            if event.kind == "unrequested_stop" and event.turn_idx > turn_idx:
                return True
        return False

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "events": [event.to_dict() for event in self.events],
            "turns": self.turns,
            "rate": self.rate,
            "critical_rate": self.critical_rate,
        }


def audit_user(task: Task, run: Run, success: bool, profile: str = "standard") -> Audit:
    """Audit the customer of one dual run.

    Args:
        task (`Task`): The task.
        run (`Run`): The run.
        success (`bool`): Whether it was solved.
        profile (`str`, defaults to `"standard"`): `"strict"` also counts what of the scenario the customer tells
            unasked.

    Returns:
        [`Audit`].

    Raises:
        ValueError: If the profile is unknown.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile={profile!r} is not one of {', '.join(PROFILES)}")
    if is_solo(run.mode):
        return Audit()
    auditor = _Auditor(task, run, success, profile)
    auditor.walk()
    return auditor.audit


class _Auditor:
    def __init__(self, task: Task, run: Run, success: bool, profile: str) -> None:
        self.task, self.run, self.success, self.strict = task, run, success, profile == "strict"
        domain = get_domain(task.domain_name, task.data_dir)
        self.env = Environment(domain)
        self.env.set_state(task.initialization_data, task.initialization_actions)
        self.has_phone = domain.user_toolkit is not None and "check_status_bar" in domain.user_toolkit.tools()
        self.audit = Audit()
        self.asked: list[tuple[str, dict[str, Any], bool | None]] = []  # what the agent's last text asked for
        self.executed: set[str] = set()  # tools run since then
        self.last_agent_text = ""
        self.last_agent_turn: int | None = None

    def walk(self) -> None:
        messages = self.run.messages
        start = len(self.task.message_history)
        for place, message in enumerate(messages):
            if isinstance(message, ToolMessage) or not isinstance(message, Message):
                continue
            if message.role == "assistant":
                self._agent(place, message)
            else:
                self._customer(place, message, place >= start)
            if message.tool_calls and place + 1 < len(messages):  # a call that was cut off never ran
                for call, answer in zip(message.tool_calls, _answers(messages, place), strict=False):
                    self.env.respond(call)
                    if message.role == "user" and not answer.error:
                        self.executed.add(call.name)

    def _agent(self, place: int, message: Message) -> None:
        if message.is_text:
            self.asked, self.executed = parse(message.content), set()
            self.last_agent_text, self.last_agent_turn = message.content, place

    def _customer(self, place: int, message: Message, counted: bool) -> None:
        if not counted:
            return
        self.audit.turns += 1
        for call in message.tool_calls or ():
            if not self._called_for(call.name):
                self._add(place, "unrequested_call", f"ran {call.name}, which the agent did not ask for")
        if not message.is_text:
            return
        if self.last_agent_turn is not None:
            self.audit.answers.setdefault(self.last_agent_turn, place)
        text = message.content
        if self.has_phone:
            for fact in contradictions(text, self.env.user.device, self.env.user.surroundings):
                self._add(place, "false_fact", fact)
        self._claims(place, text)
        if self.strict:
            for name in revealed_fields(text, self.last_agent_text, self.task.instructions, place):
                self._add(place, "unasked_disclosure", f"told {name} unasked")
        if STOP in text and not self._goal_met():
            self._add(place, "unrequested_stop", "ended the conversation as solved, though the goal is not met")

    def _called_for(self, name: str) -> bool:
        """A call is in order if it was asked for, answers a question, or looks (reads are free after any change)."""
        if any(name == tool for tool, _, _ in self.asked):
            return True
        kind = self.env.kind(name, "user")
        if kind != "write":  # looking in order to answer, or at the goal after a change
            return (
                bool(self.asked) or bool(self.executed) or _QUESTION.search(self.last_agent_text.lower()) is not None
            )
        return re.search(rf"\b{re.escape(name)}\b", self.last_agent_text) is not None

    def _claims(self, place: int, text: str) -> None:
        writes = [tool for tool, _, _ in self.asked if self.env.kind(tool, "user") == "write"]
        undone = [tool for tool in writes if tool not in self.executed]
        if undone and claims_done(text):
            self._add(place, "false_claim", f"claims to have done {', '.join(undone)}, which it did not run")

    def _goal_met(self) -> bool:
        """Whether the assertions, or else the gold writes' end state, hold: what the customer can wish for."""
        if not self.task.env_assertions:
            return True
        return all(self.env.holds(item) for item in self.task.env_assertions if item.env_type == "user")

    def _add(self, place: int, kind: Kind, text: str) -> None:
        severity = "benign" if self.success or not self._would_pass(place, kind) else "critical"
        self.audit.events.append(Event(place, kind, severity, text))

    def _would_pass(self, place: int, kind: Kind) -> bool:
        """Whether the run would have reached its goal without this event, the rest of the gold plan run from there."""
        if kind in ("false_fact", "unasked_disclosure") and self.run.termination not in ("user_stop",):
            return False
        env = self.env.copy()
        done = _successful_calls(self.run.messages[:place])
        for action in self.task.actions:
            if any(c.requestor == action.requestor and action.matches(c) for c in done):
                continue
            try:
                env.run_tool(action.name, action.arguments, action.requestor)
            except Exception:  # the world is no longer such that the gold plan helps
                return False
        checks = self.task.env_assertions
        return bool(checks) and all(env.holds(item) for item in checks)


def _answers(messages: Sequence[AnyMessage], place: int) -> list[ToolMessage]:
    found = []
    for message in messages[place + 1 :]:
        if not isinstance(message, ToolMessage):
            break
        found.append(message)
    return found


def _successful_calls(messages: Sequence[AnyMessage]) -> list[Any]:
    from hf_pipelines.tau2_bench.env import answered_calls

    return [call for call, answer in answered_calls(messages) if not answer.error and isinstance(call.arguments, dict)]
