"""Messages, tool calls and tasks: the objects of an episode and their storage format.

Messages are written as in the public benchmark's result files; a task keeps the JSON it came from, so that fields this
code does not know survive a round trip.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Side = Literal["assistant", "user"]
STOP, TRANSFER, OUT_OF_SCOPE = "###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"
STOP_MARKS = (STOP, TRANSFER, OUT_OF_SCOPE)


@dataclass
class ToolCall:
    """A player's wish to run a tool. `requestor` is who asks: `"assistant"` or `"user"`."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    requestor: Side = "assistant"

    def to_dict(self) -> dict[str, Any]:
        """Storage format."""
        return {"id": self.id, "name": self.name, "arguments": self.arguments, "requestor": self.requestor}

    @classmethod
    def from_dict(cls, data: dict[str, Any], requestor: Side = "assistant") -> "ToolCall":
        """Read the storage format; `requestor` is the sender where the file has none."""
        return cls(data.get("id") or "", data["name"], data.get("arguments") or {}, data.get("requestor") or requestor)


@dataclass
class Message:
    """A turn of the assistant or the user: text or tool calls, never both, never neither.

    Args:
        role (`str`): `"assistant"` or `"user"`.
        content (`str`, *optional*): What is said to the other side.
        tool_calls (`list[ToolCall]`, *optional*): What is asked of the world.
        turn_idx (`int`, *optional*): Place in the episode.
        timestamp (`str`, *optional*): ISO time.
        cost (`float`, *optional*): What the model charged.
        usage (`dict`, *optional*): Token counts.
        raw_data (`dict`, *optional*): Anything the player wants to keep, such as dropped text or reasoning.
    """

    role: Side
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    turn_idx: int | None = None
    timestamp: str | None = None
    cost: float | None = None
    usage: dict[str, Any] | None = None
    raw_data: dict[str, Any] | None = None

    @property
    def is_text(self) -> bool:
        """Whether it says something, so that the other side sees it."""
        return not self.tool_calls and bool(self.content and self.content.strip())

    @property
    def stop_mark(self) -> str | None:
        """The stop mark of a user's text; marks anywhere else mean nothing."""
        if self.role != "user" or not self.is_text:
            return None
        return next((mark for mark in STOP_MARKS if mark in self.content), None)

    def to_dict(self) -> dict[str, Any]:
        """Storage format."""
        calls = [call.to_dict() for call in self.tool_calls] if self.tool_calls else None
        return {
            "role": self.role,
            "content": self.content,
            "tool_calls": calls,
            "turn_idx": self.turn_idx,
            "timestamp": self.timestamp,
            "cost": self.cost,
            "usage": self.usage,
            "raw_data": self.raw_data,
        }


@dataclass
class ToolMessage:
    """The world's answer to one call, seen by the requestor only."""

    id: str
    content: str
    requestor: Side = "assistant"
    error: bool = False
    turn_idx: int | None = None
    timestamp: str | None = None
    role: Literal["tool"] = "tool"

    def to_dict(self) -> dict[str, Any]:
        """Storage format."""
        names = ("role", "id", "content", "requestor", "error", "turn_idx", "timestamp")
        return {name: getattr(self, name) for name in names}


@dataclass
class SystemMessage:
    """Instructions before the first turn."""

    content: str
    role: Literal["system"] = "system"

    def to_dict(self) -> dict[str, Any]:
        """Storage format."""
        return {"role": "system", "content": self.content}


AnyMessage = Message | ToolMessage | SystemMessage


def message_from_dict(data: dict[str, Any]) -> AnyMessage:
    """Read one message of the storage format; fields it does not know are ignored.

    Raises:
        ValueError: If the role is unknown.
    """
    role = data.get("role")
    if role == "system":
        return SystemMessage(data.get("content") or "")
    if role == "tool":
        return ToolMessage(
            data.get("id") or "",
            data.get("content") or "",
            data.get("requestor") or "assistant",
            bool(data.get("error", False)),
            data.get("turn_idx"),
            data.get("timestamp"),
        )
    if role in ("assistant", "user"):
        calls = [ToolCall.from_dict(call, role) for call in data.get("tool_calls") or ()]
        keep = {name: data.get(name) for name in ("content", "turn_idx", "timestamp", "cost", "usage", "raw_data")}
        return Message(role, tool_calls=calls or None, **keep)
    raise ValueError(f"a message has role {role!r}; allowed are assistant, user, tool and system")


def tool_messages_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The single messages of a stored record: upstream may pack several tool messages into one with a list."""
    return data["tool_messages"] if data.get("tool_messages") else [data]


def messages_from_dicts(records: Iterable[dict[str, Any]]) -> list[AnyMessage]:
    """Read a stored conversation.

    Where the records of tool messages name no requestor, it is that of the call with the same id.

    Raises:
        ValueError: If calls and tool messages do not belong together.
    """
    messages: list[AnyMessage] = []
    pending: list[ToolCall] = []
    for record in records:
        for data in tool_messages_of(record):
            message = message_from_dict(data)
            if isinstance(message, ToolMessage):
                if not pending or (message.id and pending[0].id and message.id != pending[0].id):
                    raise ValueError(f"message_history: tool message {message.id!r} answers no call before it")
                message.requestor = pending.pop(0).requestor
            elif pending:
                raise ValueError(f"message_history: the call {pending[0].name!r} has no tool message after it")
            elif isinstance(message, Message) and message.tool_calls:
                pending = list(message.tool_calls)
            messages.append(message)
    return messages


# ----------------------------------------------------------------------------------------------------------- views


def agent_view(messages: Sequence[AnyMessage]) -> list[AnyMessage]:
    """What the agent sees: all texts, its own calls and their results."""
    return _view(messages, "assistant")


def user_view(messages: Sequence[AnyMessage]) -> list[AnyMessage]:
    """What the customer sees: all texts, its own calls and their results."""
    return _view(messages, "user")


def _view(messages: Sequence[AnyMessage], side: Side) -> list[AnyMessage]:
    return [m for m in messages if (m.requestor if isinstance(m, ToolMessage) else m.role) == side or is_text(m)]


def is_text(message: AnyMessage) -> bool:
    """Whether both sides see it."""
    return isinstance(message, Message) and message.is_text


def flip_roles(view: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """A user's view as a language model wants it: user and assistant change places, its tool messages stay."""
    swap = {"user": "assistant", "assistant": "user"}
    flipped = [message.to_dict() for message in view]
    return [{**data, "role": swap.get(data["role"], data["role"])} for data in flipped]
