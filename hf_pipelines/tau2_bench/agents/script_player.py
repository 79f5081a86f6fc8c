"""A scripted agent is a generator: it yields what it does and receives what came of it.

`yield Say(text)` gives the customer's answer, `yield Do(tool, arguments)` the tool's result.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_pipelines.tau2_bench.modes import DONE, is_solo
from hf_pipelines.tau2_bench.players import Briefing
from hf_pipelines.tau2_bench.task import TRANSFER_TOOL
from hf_pipelines.tau2_bench.types import AnyMessage, Message, ToolCall

CLOSING = "Does everything work now? Is there anything else I can do for you?"
TRANSFERRED = "You are being transferred to a human agent."


@dataclass(frozen=True)
class Say:
    """A text to the customer."""

    text: str


@dataclass(frozen=True)
class Do:
    """A call of a tool of one's own."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


Script = Generator[Say | Do, str, None]


class ScriptedAgent:
    """Base of the scripted agents: plays `script`, then closes (solo: `done`; else a closing question, repeated)."""

    def script(self, briefing: Briefing, opening: str) -> Script:
        """What the agent does.

        Args:
            briefing (`Briefing`): What it knows.
            opening (`str`): The customer's first text; empty in solo modes.
        """
        raise NotImplementedError

    def start(self, briefing: Briefing) -> None:
        """Get ready for a new run."""
        self._briefing, self._running, self._calls = briefing, None, 0
        self._solo = is_solo(briefing.mode)
        self._over = False

    def respond(self, view: Sequence[AnyMessage], notice: str | None = None) -> Message:
        """Take a turn."""
        heard = (view[-1].content or "") if view else ""
        step = None
        if not self._over:
            try:
                if self._running is None:
                    self._running = self.script(self._briefing, heard)
                    step = next(self._running)
                else:
                    step = self._running.send(heard)
            except StopIteration:
                self._over = True
        if step is None:
            step = Do(DONE) if self._solo else Say(CLOSING)
        if isinstance(step, Say):
            return Message("assistant", step.text)
        self._calls += 1
        return Message("assistant", tool_calls=[ToolCall(f"agent_{self._calls}", step.name, dict(step.arguments))])


def hand_over(summary: str, solo: bool) -> Script:
    """Transfer the customer, and say so."""
    yield Do(TRANSFER_TOOL, {"summary": summary})
    if not solo:
        yield Say(TRANSFERRED)
