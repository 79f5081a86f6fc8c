"""A scripted customer for domains without a phone: it answers from its scenario and agrees to what gold plans hold.

Its runs exercise the plumbing; they do not compare with runs against a customer that is a language model.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.modes import scenario_text
from hf_pipelines.tau2_bench.players import Briefing
from hf_pipelines.tau2_bench.types import OUT_OF_SCOPE, STOP, TRANSFER, AnyMessage, Message, ToolCall, ToolMessage
from hf_pipelines.tau2_bench.users.parse import parse

PATIENCE = 3
TRANSFERRED = re.compile(
    r"\btransferring you\b|\b(?:being|been|are|was|will be) (?:now )?(?:transferred|handed over)\b"
)
PROPOSAL = re.compile(
    r"\b(?:shall i|should i|may i|can i|do you (?:want|confirm|agree)|would you like me|confirm|proceed|"
    r"is (?:that|this) (?:ok|okay|correct|right)|yes or no|\(yes/no\))"
)
DONE = re.compile(
    r"\b(?:done|completed?|finished|processed|updated|changed|cancelled|booked|created|added|made|marked)\b"
)
ALL_DONE = re.compile(
    r"\b(?:all|everything)\b[^.?!]{0,40}\b(?:done|completed?|finished|processed)\b|\banything else\b"
)
IDENTIFIER = re.compile(r"(?<![\w$.])#?[A-Za-z_]*\d[\w-]*")


class SlotFiller:
    """A customer that confirms a proposed change if it names nothing but ids of the gold writes or of its scenario.

    Args:
        briefing (`Briefing`): The scenario and the task.
    """

    def __init__(self, briefing: Briefing) -> None:
        task = briefing.task
        self.scenario = scenario_text(task.instructions)
        fields = task.instructions if isinstance(task.instructions, dict) else {}
        self.reason = str(fields.get("reason_for_call") or self.scenario or "I need help.")
        self.known = str(fields.get("known_info") or self.scenario)
        domain = get_domain(task.domain_name, task.data_dir)
        kinds = domain.agent_toolkit.tools()
        self.writes = [a for a in task.actions if a.name in kinds and kinds[a.name].kind == "write"]
        self.allowed = set(identifiers(self.scenario))
        for action in self.writes:
            self.allowed |= set(identifiers(json.dumps(action.arguments)))
        self.own_tools = {tool["function"]["name"] for tool in briefing.tools}
        self.left = len(self.writes)
        self.idle = self.calls = 0
        self.opened = self.dismissed = self.confirmed = False
        self.pending_stop = False

    def respond(self, view: Sequence[AnyMessage], notice: str | None = None) -> Message:
        """Take a turn."""
        last = view[-1] if view else None
        if isinstance(last, ToolMessage):
            return self._say(STOP if self.pending_stop else f"I see: {last.content}")
        text = last.content if isinstance(last, Message) and last.role == "assistant" else ""
        low = text.lower()
        if TRANSFERRED.search(low):
            return self._say(TRANSFER)
        for name, arguments, _ in parse(text):
            if name in self.own_tools:
                return self._call(name, arguments)
        if not self.opened and not any(isinstance(m, Message) and m.role == "user" for m in view):
            self.opened = True
            return self._say(self.reason)
        self.opened = True
        if DONE.search(low) and not ("?" in low and PROPOSAL.search(low)):
            self._count(text, low)
            if self.left <= 0:
                return self._stop()
            self.idle = 0
            return self._say("Thank you. What about the rest?")
        if PROPOSAL.search(low):
            self.idle = 0
            return self._say("Yes." if self._agrees(text) else "No, that is not what I want.")
        if ALL_DONE.search(low) and self.left <= 0:
            return self._stop()
        self.idle += 1
        if self.idle >= PATIENCE:
            return self._say(OUT_OF_SCOPE)
        return self._say(self.known if self.idle == 1 and self.known else self.reason)

    def _agrees(self, text: str) -> bool:
        return bool(self.writes) and set(identifiers(text)) <= self.allowed

    def _count(self, text: str, low: str) -> None:
        """Take the gold writes that a report names off the list: all, those with all their ids, or else one."""
        named = set(identifiers(text))
        if ALL_DONE.search(low):
            self.left = 0
            return
        wanted = [set(identifiers(json.dumps(action.arguments))) for action in self.writes]
        self.left -= max(1, sum(bool(ids) and ids <= named for ids in wanted))

    def _stop(self) -> Message:
        note = re.search(r"\bnotif_\w+", self.scenario)
        if note and "dismiss_notification" in self.own_tools and not self.dismissed:
            self.dismissed = self.pending_stop = True
            return self._call("dismiss_notification", {"notification_id": note.group()})
        return self._say(f"Thank you, that is all. {STOP}")

    def _call(self, name: str, arguments: dict[str, Any]) -> Message:
        self.calls += 1
        return Message("user", tool_calls=[ToolCall(f"user_{self.calls}", name, arguments, "user")])

    def _say(self, text: str) -> Message:
        return Message("user", text)


def identifiers(text: str) -> list[str]:
    """The ids of a text: words with a digit and at least four characters, amounts of money aside."""
    return [word.lstrip("#") for word in IDENTIFIER.findall(text) if len(word) >= 4]
