"""NL assertions: a chat model reads the conversation and says which statements about it hold."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hf_pipelines.tau2_bench.types import AnyMessage, Message, ToolMessage

INSTRUCTIONS = (
    "You check statements about a conversation between a customer and a support agent. Judge each statement only by "
    "the transcript: it holds if the transcript shows it, and it does not hold if the transcript contradicts it or "
    "leaves it open. Answer with nothing but a JSON list with one object per statement, in the given order: "
    '[{"statement": "…", "reason": "one sentence", "met": true or false}, …].'
)
ATTEMPTS = 2


class ChatModel(Protocol):
    """Any chat model: local, behind an endpoint, or scripted."""

    def __call__(
        self, messages: list[dict[str, Any]], tools: Any = None, tool_choice: Any = None, seed: int | None = None
    ) -> Mapping[str, Any]:
        """Answer a conversation with `{"content", "tool_calls", "reasoning", "usage", "finish_reason"}`."""


def transcript(messages: Sequence[AnyMessage]) -> str:
    """The conversation as lines of text, with tool calls and results."""
    lines = []
    for message in messages:
        if isinstance(message, ToolMessage):
            lines.append(f"[result for {message.requestor}] {message.content}")
        elif isinstance(message, Message) and message.tool_calls:
            lines += [f"[{message.role} calls] {c.name}({json.dumps(c.arguments)})" for c in message.tool_calls]
        elif isinstance(message, Message):
            lines.append(f"{message.role}: {message.content}")
    return "\n".join(lines)


def judge_assertions(
    judge: ChatModel | None, assertions: Sequence[str], messages: Sequence[AnyMessage], seed: int = 0
) -> list[dict[str, Any]]:
    """Ask the judge which statements hold.

    Args:
        judge (`ChatModel`, *optional*): The model; `None` leaves every statement unjudged. There is no fallback to
            another model.
        assertions (`Sequence[str]`): The statements.
        messages (`Sequence`): The conversation.
        seed (`int`, defaults to 0): Seed passed to the model.

    Returns:
        `list[dict]`: `{"nl_assertion", "met", "justification"}` per statement; `met` is `None` where unjudged.
    """
    if not assertions:
        return []
    if judge is None:
        return _unjudged(assertions, "no judge was given")
    numbered = "\n".join(f"{place}. {text}" for place, text in enumerate(assertions, 1))
    request = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": f"Transcript:\n{transcript(messages)}\n\nStatements:\n{numbered}"},
    ]
    answer = ""
    for _ in range(ATTEMPTS):
        try:
            answer = judge(request, seed=seed).get("content") or ""
        except Exception as error:  # a judge that is down leaves the run unjudged, it does not end the evaluation
            return _unjudged(assertions, f"the judge failed ({type(error).__name__}: {error})")
        verdicts = _parse(answer, len(assertions))
        if verdicts is not None:
            return [
                {"nl_assertion": text, "met": met, "justification": reason}
                for text, (met, reason) in zip(assertions, verdicts, strict=True)
            ]
    return _unjudged(assertions, f"the judge's answer could not be read: {answer!r:.200}")


def _unjudged(assertions: Sequence[str], why: str) -> list[dict[str, Any]]:
    return [{"nl_assertion": text, "met": None, "justification": why} for text in assertions]


def _parse(answer: str, count: int) -> list[tuple[bool, str]] | None:
    found = re.search(r"\[.*\]", answer, re.S)
    try:
        items = json.loads(found.group()) if found else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(items, list) or len(items) != count:
        return None
    if not all(isinstance(item, dict) and isinstance(item.get("met"), bool) for item in items):
        return None
    return [(item["met"], str(item.get("reason", ""))) for item in items]
