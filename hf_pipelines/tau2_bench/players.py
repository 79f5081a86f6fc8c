"""What the orchestrator asks of a player, and what a player may answer.

A player is anything with `start(briefing)` and `respond(view, notice)`: a language model, a script, a person at a
keyboard. It sees only its own side of the conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from hf_pipelines.tau2_bench.task import Task
from hf_pipelines.tau2_bench.types import AnyMessage, Message, Side


@dataclass
class Briefing:
    """What a player knows before the first turn.

    Args:
        side (`str`): `"assistant"` or `"user"`.
        instructions (`str`): For the agent the policy (and, by mode, ticket and gold steps), for the customer the
            scenario; a language model puts it into its system prompt.
        tools (`list[dict]`): The side's tools as OpenAI schemas.
        task (`Task`): The task. Only scripted players look into it.
        mode (`str`): `"dual"`, `"solo"`, `"oracle"` or `"oracle_solo"`.
        seed (`int`): Seed of this run; the player's only source of chance.
        persona (`str`, *optional*): How the customer behaves.
    """

    side: Side
    instructions: str
    tools: list[dict[str, Any]]
    task: Task
    mode: str
    seed: int
    persona: str | None = None


@runtime_checkable
class Player(Protocol):
    """An agent or a customer."""

    def start(self, briefing: Briefing) -> None:
        """Get ready for a new run; nothing of an earlier one may remain."""

    def respond(self, view: Sequence[AnyMessage], notice: str | None = None) -> Message:
        """Take a turn.

        Args:
            view (`Sequence`): The conversation as this side sees it.
            notice (`str`, *optional*): Why the last answer could not be used; it is not part of the conversation.
        """


class MalformedOutput(Exception):
    """A player's output that is no message (broken JSON, nothing but reasoning, cut by length); it is asked again."""


class InfrastructureError(Exception):
    """A player could not answer for reasons that are not its own (a server that is down, a time-out)."""


class ContextWindowExceeded(Exception):
    """The conversation no longer fits into the player's context."""


@dataclass
class Note:
    """Something the orchestrator had to mend or refuse.

    Args:
        turn_idx (`int`): Place in the conversation.
        side (`str`): Who caused it.
        what (`str`): In words.
    """

    turn_idx: int
    side: Side
    what: str

    def to_dict(self) -> dict[str, Any]:
        """Storage format."""
        return dict(vars(self))


@dataclass
class Run:
    """One finished run, still without a verdict.

    Args:
        task_id (`str`): The task.
        messages (`list`): The whole conversation, the task's history included.
        termination (`str`): Why it ended.
        steps, errors (`int`): Turns and executions; failed calls and unusable answers.
        mode (`str`): The mode.
        seed (`int`): The run's seed.
        start_time, end_time (`str`): ISO times.
        duration (`float`): Seconds.
        notes (`list[Note]`): What was mended.
        reason (`str`, *optional*): For an end by an error, what happened.
    """

    task_id: str
    messages: list[AnyMessage]
    termination: str
    steps: int
    errors: int
    mode: str
    seed: int
    start_time: str
    end_time: str
    duration: float
    notes: list[Note] = field(default_factory=list)
    reason: str | None = None
