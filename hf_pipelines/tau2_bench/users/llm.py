"""A customer that is a chat model, with guards against the mistakes that such customers make."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hf_pipelines.tau2_bench.agents.chat_format import conversation, message_of
from hf_pipelines.tau2_bench.judge import ChatModel
from hf_pipelines.tau2_bench.players import Briefing
from hf_pipelines.tau2_bench.types import STOP, AnyMessage, Message, ToolMessage
from hf_pipelines.tau2_bench.users.phone_facts import GOAL_TOOLS, category_of, goal_met

GUARDS = ("retry", "off")


@cache
def guidelines() -> str:
    """What every customer model is told."""
    return (Path(__file__).parent / "guidelines.md").read_text(encoding="utf-8").strip()


class LLMUser:
    """Asks a chat model for every turn of the customer.

    Guards: an empty answer is asked again once (then `user_error`); of text beside calls the calls win. With
    `guard="retry"`, a stop while the scenario's own check was never run, or last said "not solved", is asked again
    once with that fact; what the model says then counts.

    Args:
        model (`ChatModel`): The model; it may be shared.
        guard (`str`, defaults to `"retry"`): `"off"` for runs that are to compare with the public leaderboard.

    Raises:
        ValueError: If `guard` is unknown.
    """

    def __init__(self, model: ChatModel, guard: str = "retry") -> None:
        if guard not in GUARDS:
            raise ValueError(f"guard={guard!r} is not one of {', '.join(GUARDS)}")
        self.model, self.guard = model, guard
        self._briefing: Briefing | None = None

    def start(self, briefing: Briefing) -> None:
        """Write the system prompt."""
        self._briefing = briefing
        parts = [guidelines()]
        if briefing.persona:
            parts.append(f"<persona>\n{briefing.persona}\n</persona>")
        parts.append(f"<scenario>\n{briefing.instructions}\n</scenario>")
        self._system = "\n\n".join(parts)
        names = {tool["function"]["name"] for tool in briefing.tools}
        task = briefing.task
        self._category = category_of(task.category, {item.func_name for item in task.env_assertions})
        self._goal_tool = GOAL_TOOLS[self._category] if GOAL_TOOLS[self._category] in names else None

    def respond(self, view: Sequence[AnyMessage], notice: str | None = None) -> Message:
        """Take a turn."""
        message = self._ask(view, notice)
        if self.guard == "off" or self._goal_tool is None or message.stop_mark != STOP:
            return message
        doubt = self._doubt(view)
        if doubt is None:
            return message
        again = self._ask(view, doubt)
        return replace(again, raw_data={**(again.raw_data or {}), "guarded_stop": message.content})

    def _ask(self, view: Sequence[AnyMessage], notice: str | None) -> Message:
        briefing = self._briefing
        messages = conversation(self._system, view, "user", notice)
        tools: list[dict[str, Any]] = briefing.tools
        answer = self.model(messages, tools=tools or None, tool_choice="auto" if tools else None, seed=briefing.seed)
        return message_of(answer, tools, "user")

    def _doubt(self, view: Sequence[AnyMessage]) -> str | None:
        """Why it is too early to stop, or `None`."""
        names: dict[str, str] = {}
        last = None
        for message in view:
            if isinstance(message, Message):
                names.update({call.id: call.name for call in message.tool_calls or ()})
            elif isinstance(message, ToolMessage) and names.get(message.id) == self._goal_tool:
                last = message.content
        if last is None:
            return f"you end the conversation as solved, but you have not used {self._goal_tool} to see whether it is"
        if not goal_met(self._category, last):
            return f"you end the conversation as solved, but {self._goal_tool} last said: {last}"
        return None
