"""From a player's view to the messages of a chat model, and from a model's answer to a message."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_pipelines.tau2_bench.agents.tool_parsers import cast_call, parse_output
from hf_pipelines.tau2_bench.players import MalformedOutput
from hf_pipelines.tau2_bench.types import AnyMessage, Message, Side, SystemMessage, ToolCall, ToolMessage

NOTICE = "Your last answer could not be used: {notice}. Answer again."


def conversation(
    system: str, view: Sequence[AnyMessage], side: Side, notice: str | None = None
) -> list[dict[str, Any]]:
    """A view in OpenAI form. The own side is `"assistant"`, the other one `"user"`; reasoning is not fed back.

    Args:
        system (`str`): Instructions.
        view (`Sequence`): What the side sees.
        side (`str`): Whose view it is.
        notice (`str`, *optional*): Why the last answer could not be used.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    names: dict[str, str] = {}
    for message in view:
        if isinstance(message, SystemMessage):
            continue
        if isinstance(message, ToolMessage):
            name = names.get(message.id, "")
            messages.append({"role": "tool", "tool_call_id": message.id, "name": name, "content": message.content})
        elif message.tool_calls:
            names.update({call.id: call.name for call in message.tool_calls})
            messages.append({"role": "assistant", "content": "", "tool_calls": [_call(c) for c in message.tool_calls]})
        else:
            role = "assistant" if message.role == side else "user"
            messages.append({"role": role, "content": message.content})
    if notice is not None:
        messages.append({"role": "user", "content": NOTICE.format(notice=notice.rstrip("."))})
    return messages


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def message_of(answer: Mapping[str, Any], tools: Sequence[dict[str, Any]], side: Side) -> Message:
    """A model's answer as a message.

    Args:
        answer (`Mapping`): `{"content", "tool_calls", "reasoning", "usage", "finish_reason"}`.
        tools (`Sequence[dict]`): OpenAI schemas, for the types of arguments.
        side (`str`): Whose message it is.

    Raises:
        MalformedOutput: If it is cut off, cannot be read, or holds neither text nor call.
    """
    if answer.get("parse_error"):
        raise MalformedOutput(str(answer["parse_error"]))
    content, reasoning = answer.get("content"), answer.get("reasoning")
    calls = [dict(call) for call in answer.get("tool_calls") or ()]
    if answer.get("finish_reason") == "length":
        raise MalformedOutput("the answer was cut off by its length (reason: length); answer more briefly")
    if isinstance(content, str) and content.strip():
        parsed = parse_output(content, tools if not calls else None) if not calls else None
        if parsed is not None:
            content, calls = parsed.content, parsed.tool_calls
            reasoning = "\n".join(part for part in (reasoning, parsed.reasoning) if part) or None
    if not calls and not (isinstance(content, str) and content.strip()):
        why = "it held nothing but reasoning" if reasoning else "it was empty"
        raise MalformedOutput(f"{why}; write a text or call a tool")
    raw = {"reasoning": reasoning} if reasoning else None
    made = []
    for call in calls:
        fixed = cast_call({"name": str(call.get("name")), "arguments": call.get("arguments") or {}}, tools)
        made.append(ToolCall(str(call.get("id") or ""), fixed["name"], fixed["arguments"], side))
    usage = answer.get("usage")
    return Message(side, content or None, made or None, usage=dict(usage) if usage else None, raw_data=raw)
