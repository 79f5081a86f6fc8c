"""A chat model that gives prepared answers, for tests and examples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class ScriptedChat:
    """Gives its answers one after the other; the last one is repeated.

    Args:
        answers (`Sequence`): Texts, `{"content", "tool_calls", …}` dictionaries, functions of the messages, or
            exceptions to raise.

    Raises:
        ValueError: If there is no answer.
    """

    def __init__(self, answers: Sequence[str | Mapping[str, Any] | Exception | Callable[..., Any]]) -> None:
        if not answers:
            raise ValueError("answers is empty: give at least one")
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        tool_choice: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """The next answer."""
        answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
        self.requests.append(
            {"messages": messages, "tools": tools, "tool_choice": tool_choice, "seed": seed, **options}
        )
        if callable(answer) and not isinstance(answer, Exception):
            answer = answer(messages)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            answer = {"content": answer}
        empty = {"content": None, "tool_calls": [], "reasoning": None, "usage": None, "finish_reason": "stop"}
        return {**empty, **answer}

    def describe(self) -> dict[str, Any]:
        """For reports."""
        return {"kind": "scripted_chat", "answers": len(self.answers)}
