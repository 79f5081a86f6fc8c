"""A task: who the customer is, how the world starts, and what counts as done.

A [`Task`] keeps the JSON it came from and reads it through properties, so that a task file survives a round trip with
all its fields.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hf_pipelines.tau2_bench.store import json_copy
from hf_pipelines.tau2_bench.types import AnyMessage, Side, ToolCall, messages_from_dicts

COMPONENTS = ("DB", "ENV_ASSERTION", "COMMUNICATE", "ACTION", "NL_ASSERTION")
TRANSFER_TOOL = "transfer_to_human_agents"
DEFAULT_BASIS = ("DB", "COMMUNICATE")


@dataclass(frozen=True)
class EnvCall:
    """A set-up step: `func_name` of one side's toolkit with arguments."""

    env_type: Side
    func_name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EnvCall":
        """Read the storage format."""
        return cls(data["env_type"], data["func_name"], data.get("arguments") or {})


@dataclass(frozen=True)
class EnvAssertion(EnvCall):
    """A condition on the end state: the function must return `assert_value`."""

    assert_value: bool = True

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EnvAssertion":
        """Read the storage format."""
        arguments = data.get("arguments") or {}
        return cls(data["env_type"], data["func_name"], arguments, data.get("assert_value", True))


@dataclass(frozen=True)
class Action:
    """A step of the gold plan.

    Args:
        name (`str`): Tool.
        arguments (`dict`): Its arguments.
        requestor (`str`): Side that runs it.
        compare_args (`tuple[str, ...]`, *optional*): Arguments that must agree for a match; `None` means those that
            the predicted call has, `()` none.
        action_id (`str`): Its name in the file.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    requestor: Side = "assistant"
    compare_args: tuple[str, ...] | None = None
    action_id: str = ""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Action":
        """Read the storage format."""
        compare = data.get("compare_args")
        return cls(
            data["name"],
            data.get("arguments") or {},
            data.get("requestor") or "assistant",
            None if compare is None else tuple(compare),
            data.get("action_id") or "",
        )

    def matches(self, call: ToolCall) -> bool:
        """Whether a call has this name and equal arguments over `compare_args` (the public benchmark's rule)."""
        if self.name != call.name:
            return False
        keys = call.arguments.keys() if self.compare_args is None else set(self.compare_args)
        predicted = {key: value for key, value in call.arguments.items() if key in keys}
        return predicted == {key: value for key, value in self.arguments.items() if key in keys}


_TELECOM_ID = re.compile(r"\[(?P<category>\w+)\](?P<atoms>[^\[]*)\[PERSONA:(?P<persona>\w+)\]")


class Task:
    """One task.

    Args:
        data (`dict`): Its JSON object. The task owns it: change a copy (`to_dict`) instead.
        domain_name (`str`): Domain it belongs to.
        data_dir (`str`, *optional*): Folder of the domain's database, for domains that are not packaged.
        splits (`tuple[str, ...]`): Splits it is in.
    """

    def __init__(
        self, data: dict[str, Any], domain_name: str, data_dir: str | None = None, splits: Iterable[str] = ()
    ) -> None:
        self.data = data
        self.domain_name = domain_name
        self.data_dir = data_dir
        self.splits = tuple(splits)

    def __repr__(self) -> str:
        return f"Task({self.domain_name!r}, {self.id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and (self.domain_name, self.data) == (other.domain_name, other.data)

    def __hash__(self) -> int:
        return hash((self.domain_name, self.id))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, as a copy."""
        return json_copy(self.data)

    # ------------------------------------------------------------------------------------------------ who and what

    @property
    def id(self) -> str:
        """Unique name in its domain."""
        return str(self.data["id"])

    @property
    def ticket(self) -> str | None:
        """What a solo agent is told instead of talking to the customer."""
        return self.data.get("ticket")

    @property
    def persona(self) -> str | None:
        """How the customer behaves, in words."""
        return (self.data.get("user_scenario") or {}).get("persona")

    @property
    def instructions(self) -> dict[str, Any] | str | None:
        """The customer's scenario: fields by name, or one text."""
        return (self.data.get("user_scenario") or {}).get("instructions")

    @cached_property
    def _id_parts(self) -> dict[str, str]:
        match = _TELECOM_ID.match(self.id)
        return match.groupdict() if match else {}

    @property
    def category(self) -> str | None:
        """Kind of trouble, from the id of a telecom task."""
        return self._id_parts.get("category")

    @property
    def atoms(self) -> tuple[str, ...]:
        """Faults that make up a telecom task."""
        atoms = self._id_parts.get("atoms")
        return tuple(atoms.split("|")) if atoms else ()

    @property
    def persona_name(self) -> str | None:
        """`"None"`, `"Easy"` or `"Hard"`, from the id of a telecom task."""
        return self._id_parts.get("persona")

    # ------------------------------------------------------------------------------------------------------- start

    @property
    def _start(self) -> dict[str, Any]:
        return self.data.get("initial_state") or {}

    @property
    def initialization_data(self) -> dict[str, Any] | None:
        """`{"agent_data": …, "user_data": …}` to merge into the start state."""
        return self._start.get("initialization_data")

    @cached_property
    def initialization_actions(self) -> tuple[EnvCall, ...]:
        """Set-up steps in order."""
        return tuple(EnvCall.from_dict(item) for item in self._start.get("initialization_actions") or ())

    @cached_property
    def message_history(self) -> tuple[AnyMessage, ...]:
        """Conversation before the episode."""
        return tuple(messages_from_dicts(self._start.get("message_history") or ()))

    # -------------------------------------------------------------------------------------------------------- goal

    @property
    def criteria(self) -> dict[str, Any] | None:
        """The JSON object of what counts as done; `None` makes every run a success."""
        return self.data.get("evaluation_criteria")

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The gold plan."""
        return tuple(Action.from_dict(item) for item in (self.criteria or {}).get("actions") or ())

    @cached_property
    def env_assertions(self) -> tuple[EnvAssertion, ...]:
        """Conditions on the end state."""
        return tuple(EnvAssertion.from_dict(item) for item in (self.criteria or {}).get("env_assertions") or ())

    @property
    def communicate_info(self) -> tuple[str, ...]:
        """Strings that the agent must say."""
        return tuple((self.criteria or {}).get("communicate_info") or ())

    @property
    def nl_assertions(self) -> tuple[str, ...]:
        """Statements about the conversation for a judge."""
        return tuple((self.criteria or {}).get("nl_assertions") or ())

    @property
    def reward_basis(self) -> tuple[str, ...]:
        """Components whose product is the reward; `[DB, COMMUNICATE]` where the file names none."""
        if self.criteria is None:
            return ()
        basis = self.criteria.get("reward_basis")
        return DEFAULT_BASIS if basis is None else tuple(basis)

    @property
    def must_transfer(self) -> bool:
        """Whether the gold plan hands the customer over."""
        return any(action.name == TRANSFER_TOOL for action in self.actions)
