"""An agent that is a chat model."""

from collections.abc import Sequence

from hf_pipelines.tau2_bench.agents.chat_format import conversation, message_of
from hf_pipelines.tau2_bench.judge import ChatModel
from hf_pipelines.tau2_bench.modes import is_solo
from hf_pipelines.tau2_bench.players import Briefing
from hf_pipelines.tau2_bench.types import AnyMessage, Message

INSTRUCTIONS = (
    "You are a customer service agent. Help the customer as the policy below allows, and follow it to the letter. In "
    "each turn write to the customer or make one tool call; never do both in the same turn."
)
SOLO_INSTRUCTIONS = (
    "You are a customer service agent who works on a ticket alone; there is nobody to talk to. In each turn make one "
    "tool call. Follow the policy below to the letter, and call `done` when the ticket is finished."
)


class LLMAgent:
    """Asks a chat model for every turn; keeps nothing between turns, since the view holds the conversation.

    Args:
        model (`ChatModel`): The model; it may be shared.
        instructions (`str`, *optional*): What stands above the policy instead of the usual sentences.
    """

    def __init__(self, model: ChatModel, instructions: str | None = None) -> None:
        self.model, self.instructions = model, instructions
        self._system = ""

    def start(self, briefing: Briefing) -> None:
        """Write the system prompt."""
        usual = SOLO_INSTRUCTIONS if is_solo(briefing.mode) else INSTRUCTIONS
        self._system = f"{self.instructions or usual}\n\n<policy>\n{briefing.instructions.strip()}\n</policy>"
        self._tools, self._seed = briefing.tools, briefing.seed
        self._choice = "required" if is_solo(briefing.mode) else "auto"

    def respond(self, view: Sequence[AnyMessage], notice: str | None = None) -> Message:
        """Take a turn."""
        messages = conversation(self._system, view, "assistant", notice)
        answer = self.model(messages, tools=self._tools, tool_choice=self._choice, seed=self._seed)
        return message_of(answer, self._tools, "assistant")
