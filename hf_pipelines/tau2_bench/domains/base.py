"""What every domain is made of: a toolkit per side, a start state, a rule that couples the sides, and policies."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_pipelines.tau2_bench.schema import Signature, ToolError, signature_of, summary
from hf_pipelines.tau2_bench.store import BaseState, Store

Kind = Literal["read", "write", "generic", "setup", "assertion"]
POLICIES_FOLDER = Path(__file__).parent / "policies"


@dataclass(frozen=True)
class Function:
    """One callable of a toolkit.

    Args:
        name (`str`): Its name.
        kind (`str`): `"read"`, `"write"` and `"generic"` are tools; `"setup"` and `"assertion"` are for tasks only.
        method (`Callable`): The unbound method.
        stringify (`bool`): Whether the public benchmark turns the numbers of its result into text (`compat_text`).
    """

    name: str
    kind: Kind
    method: Callable
    stringify: bool = False

    @cached_property
    def signature(self) -> Signature:
        """Checks and schema of the arguments."""
        return signature_of(self.method)

    @property
    def is_tool(self) -> bool:
        """Whether a player can call it."""
        return self.kind in ("read", "write", "generic")

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
        function = {"name": self.name, "description": summary(self.method), "parameters": self.signature.schema}
        return {"type": "function", "function": function}


def _marker(kind: Kind, stringify: bool = False) -> Callable[[Callable], Callable]:
    def mark(method: Callable) -> Callable:
        method._function = Function(method.__name__, kind, method, stringify)
        return method

    return mark


read_tool = _marker("read")
write_tool = _marker("write")
generic_tool = _marker("generic")
setup = _marker("setup")
assertion = _marker("assertion")
read_tool_with_plain_result = _marker("read", stringify=True)


class Toolkit:
    """The functions of one side over its store. A method is a tool because of its decorator.

    Args:
        store (`Store`): The side's state.
    """

    functions: ClassVar[dict[str, Function]] = {}
    _tools: ClassVar[dict[str, Function]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        found = {}
        for base in reversed(cls.__mro__):
            found.update({name: m._function for name, m in vars(base).items() if hasattr(m, "_function")})
        cls.functions = found
        cls._tools = {name: function for name, function in found.items() if function.is_tool}

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def tools(cls) -> dict[str, Function]:
        """Name → tool, in the order of definition."""
        return cls._tools


def call(toolkit: Toolkit, function: Function, arguments: dict[str, Any]) -> Any:
    """Run a function with checked arguments; if it fails half-way, its side is as it was before.

    Raises:
        ToolError: If an argument is wrong or the world refuses.
    """
    bound = function.signature.bind(arguments)
    toolkit.store.begin()
    try:
        return function.method(toolkit, **bound)
    except BaseException:
        toolkit.store.rollback()
        raise


@dataclass(eq=False)
class Domain:
    """A world that episodes start from.

    Args:
        name (`str`): `"telecom"`, `"mock"`, `"airline"` or `"retail"`.
        clock (`str`): The fixed time of the world, for the policies.
        agent_toolkit (`type`): Tools of the agent.
        agent_state (`BaseState`): Start state of the agent's side.
        user_toolkit (`type`, *optional*): Tools of the customer; `None` for a domain with single control.
        user_state (`BaseState`, *optional*): Start state of the customer's side.
        sync (`Callable`, *optional*): `sync(agent_store, user_store)` couples the sides after every call.
        policies (`dict[tuple[str, bool], tuple[str, ...]]`): (variant, solo) → files of `policies/` that make it up.
        options (`dict`): Keyword arguments of the agent's toolkit.
        tripwire (`Callable`, *optional*): `tripwire(agent_store, name, arguments)` names the rule of the policy that a
            write call of the agent is about to break, or returns `None`.
    """

    name: str
    clock: str
    agent_toolkit: type[Toolkit]
    agent_state: BaseState
    user_toolkit: type[Toolkit] | None = None
    user_state: BaseState | None = None
    sync: Callable[[Store, Store], None] | None = None
    policies: dict[tuple[str, bool], tuple[str, ...]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    tripwire: Callable[[Store, str, dict[str, Any]], str | None] | None = None

    @property
    def variants(self) -> list[str]:
        """Names of the policy's variants."""
        return sorted({variant for variant, _ in self.policies})

    @property
    def supports_solo(self) -> bool:
        """Whether one player can hold both toolkits: there are solo policies and no name is on both sides."""
        names = self.agent_toolkit.tools().keys() & (self.user_toolkit.tools().keys() if self.user_toolkit else set())
        return any(solo for _, solo in self.policies) and not names

    def policy(self, variant: str | None = None, solo: bool = False) -> str:
        """The policy text of the agent.

        Args:
            variant (`str`, *optional*): One of `variants`; `None` takes `"manual"` where there is one.
            solo (`bool`, defaults to `False`): Whether for an agent that works alone.

        Raises:
            ValueError: If there is no such variant, or no solo edition.
        """
        if variant is None:
            variant = "manual" if "manual" in self.variants else self.variants[0]
        if variant not in self.variants:
            raise ValueError(f"policy={variant!r} is not one of {self.variants} of the domain {self.name!r}")
        if (variant, solo) not in self.policies:
            raise ValueError(f"the domain {self.name!r} has no solo mode; use mode='dual' or mode='oracle'")
        files = self.policies[variant, solo]
        return "\n\n".join((POLICIES_FOLDER / name).read_text(encoding="utf-8").strip() for name in files) + "\n"


def require(records: dict[str, Any], key: str, what: str) -> Any:
    """The record with this key.

    Raises:
        ToolError: If there is none.
    """
    record = records.get(key)
    if record is None:
        raise ToolError(f"there is no {what} {key!r}")
    return record
