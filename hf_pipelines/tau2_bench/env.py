"""The world of one episode: two toolkits over two stores, coupled after every call.

>>> from hf_pipelines.tau2_bench.domains import get_domain
>>> env = Environment(get_domain("telecom"))
>>> env.call("get_details_by_id", {"id": "L1002"})["phone_number"]
'555-123-2002'
>>> env.call("toggle_data")
Traceback (most recent call last):
...
hf_pipelines.tau2_bench.schema.ToolError: toggle_data is a tool of the customer, not of the agent; ask the customer
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from hf_pipelines.tau2_bench.domains.base import Domain, Function, Toolkit, call
from hf_pipelines.tau2_bench.schema import ToolError
from hf_pipelines.tau2_bench.store import Store, json_copy
from hf_pipelines.tau2_bench.task import EnvAssertion, EnvCall, Task
from hf_pipelines.tau2_bench.types import AnyMessage, Message, Side, ToolCall, ToolMessage

NAMES = {"assistant": "agent", "user": "customer"}


class ReplayError(ValueError):
    """A recorded call gives another result than the recording."""


class Environment:
    """The state of one episode and everything that may change it. Two environments share nothing that changes.

    Args:
        domain (`Domain`): World to start from.
        solo (`bool`, defaults to `False`): Whether the assistant holds both toolkits.
        compat_text (`bool`, defaults to `False`): Whether the numbers in dictionary-shaped results become text, as in
            the public benchmark's files.

    Raises:
        ValueError: If `solo` is asked of a domain that cannot.
    """

    def __init__(self, domain: Domain, solo: bool = False, compat_text: bool = False) -> None:
        if solo and not domain.supports_solo:
            raise ValueError(f"solo=True: the domain {domain.name!r} has no solo mode; use mode='dual'")
        self.domain = domain
        self.solo = solo
        self.compat_text = compat_text
        self._build(None, None)

    def _build(self, agent_store: Store | None, user_store: Store | None) -> None:
        domain = self.domain
        self.agent = domain.agent_toolkit(agent_store or Store(domain.agent_state), **domain.options)
        self.user: Toolkit | None = None
        if domain.user_toolkit is not None:
            self.user = domain.user_toolkit(user_store or Store(domain.user_state))
        self._sides: dict[Side, Toolkit | None] = {"assistant": self.agent, "user": self.user}

    def copy(self) -> "Environment":
        """An independent environment in the same state."""
        other = Environment.__new__(Environment)
        other.domain, other.solo, other.compat_text = self.domain, self.solo, self.compat_text
        other._build(self.agent.store.copy(), self.user.store.copy() if self.user else None)
        return other

    # ------------------------------------------------------------------------------------------------------- tools

    def tools(self, side: Side) -> list[dict[str, Any]]:
        """The tools that a side may call, as OpenAI schemas."""
        kits = [self._sides[side]] if not self.solo else ([self.agent, self.user] if side == "assistant" else [])
        return [function.schema for kit in kits if kit is not None for function in kit.tools().values()]

    def find_tool(self, name: str, requestor: Side) -> tuple[Toolkit, Function]:
        """The tool that a call by this side means.

        Raises:
            ToolError: If the side has no such tool.
        """
        for side in ("assistant", "user") if self.solo and requestor == "assistant" else (requestor,):
            kit = self._sides.get(side)
            function = kit.tools().get(name) if kit is not None else None
            if function is not None:
                return kit, function
        other = self._sides["user" if requestor == "assistant" else "assistant"]
        if other is not None and name in other.tools() and not self.solo:
            if requestor == "assistant":
                raise ToolError(f"{name} is a tool of the customer, not of the agent; ask the customer")
            raise ToolError(f"{name} is a tool of the agent, not of the customer")
        raise ToolError(f"there is no tool {name!r}")

    def kind(self, name: str, requestor: Side = "assistant") -> str | None:
        """`"read"`, `"write"` or `"generic"`, or `None` if the side has no such tool."""
        try:
            return self.find_tool(name, requestor)[1].kind
        except ToolError:
            return None

    def call(self, name: str, arguments: dict[str, Any] | None = None, requestor: Side = "assistant") -> Any:
        """Run a tool, couple the sides, and return its result as a Python value of the caller's own.

        Raises:
            ToolError: If the world refuses; nothing has changed then.
        """
        return json_copy(self.run_tool(name, arguments or {}, requestor))

    def run_tool(self, name: str, arguments: Any, requestor: Side = "assistant", sync: bool = True) -> Any:
        """Like [`call`], but the result is the live record (do not change it), and the coupling can be left out."""
        kit, function = self.find_tool(name, requestor)
        result = call(kit, function, arguments)
        if sync:
            self.sync()
        return result

    def respond(self, tool_call: ToolCall) -> ToolMessage:
        """Run a player's call and answer it, whatever happens: a refused or failing call is an error message."""
        try:
            kit, function = self.find_tool(tool_call.name, tool_call.requestor)
            result = call(kit, function, tool_call.arguments)
            self.sync()
            content = result_text(result, self.compat_text and function.stringify)
            return ToolMessage(tool_call.id, content, tool_call.requestor)
        except ToolError as error:
            return ToolMessage(tool_call.id, f"Error: {error}", tool_call.requestor, error=True)
        except Exception as error:
            text = f"Error: the tool failed ({type(error).__name__}: {error})"
            return ToolMessage(tool_call.id, text, tool_call.requestor, error=True)

    # ------------------------------------------------------------------------------------------------------- state

    def sync(self) -> None:
        """Couple the two sides (a domain with single control has nothing to couple)."""
        if self.domain.sync is not None:
            self.domain.sync(self.agent.store, self.user.store)

    def hash(self) -> tuple[str, str | None]:
        """SHA-256 of the agent's and the customer's state."""
        return self.agent.store.hash(), self.user.store.hash() if self.user else None

    def same_state(self, other: "Environment") -> bool:
        """Whether both sides' states equal those of another environment of the same domain."""
        same_user = self.user is None or self.user.store.equals(other.user.store)
        return same_user and self.agent.store.equals(other.agent.store)

    def state(self) -> dict[str, Any]:
        """`{"agent": …, "user": …}` as a copy."""
        return {"agent": self.agent.store.to_dict(), "user": self.user.store.to_dict() if self.user else None}

    def run(self, step: EnvCall) -> Any:
        """Run a set-up step: a primitive or a tool of the named side.

        Raises:
            ValueError: If the side has no such function.
        """
        result = self._task_function(step)
        self.sync()
        return result

    def check(self, assertion: EnvAssertion) -> bool:
        """Whether an assertion of a task holds now."""
        return bool(self._task_function(assertion)) == assertion.assert_value

    def holds(self, assertion: EnvAssertion) -> bool:
        """As [`check`]; an assertion about a record that does not exist does not hold."""
        try:
            return self.check(assertion)
        except ValueError:
            return False

    def _task_function(self, step: EnvCall) -> Any:
        kit = self._sides.get(step.env_type)
        function = kit.functions.get(step.func_name) if kit is not None else None
        if function is None:
            raise ValueError(f"the side {step.env_type!r} of {self.domain.name!r} has no function {step.func_name!r}")
        return call(kit, function, step.arguments)

    # -------------------------------------------------------------------------------------------- start and replay

    @classmethod
    def for_task(cls, domain: Domain, task: Task, solo: bool = False, **arguments: Any) -> "Environment":
        """A new environment in a task's start state, its history replayed."""
        env = cls(domain, solo, **arguments)
        env.set_state(task.initialization_data, task.initialization_actions, task.message_history)
        return env

    def set_state(
        self,
        initialization_data: dict[str, Any] | None = None,
        initialization_actions: Sequence[EnvCall] = (),
        message_history: Sequence[AnyMessage] = (),
        strict: bool = True,
    ) -> list[str]:
        """Bring a new environment into a start state.

        Args:
            initialization_data (`dict`, *optional*): `{"agent_data": …, "user_data": …}`, merged into the named side.
            initialization_actions (`Sequence[EnvCall]`): Set-up steps.
            message_history (`Sequence`): Conversation whose write calls are run again.
            strict (`bool`, defaults to `True`): Whether a result other than the recorded one is an error.

        Returns:
            `list[str]`: Results that differ from the recording (empty when strict).

        Raises:
            ReplayError: If `strict` and a result differs.
        """
        for side, kit in (("agent_data", self.agent), ("user_data", self.user)):
            data = (initialization_data or {}).get(side)
            if data and kit is None:
                raise ValueError(f"initialization_data has {side!r}, but the domain has no customer side")
            if data:
                kit.store.begin()
                kit.store.merge(data)
        for step in initialization_actions:
            self.run(step)
        differences = self.replay(message_history, strict)
        self.sync()
        return differences

    def replay(
        self,
        messages: Sequence[AnyMessage],
        strict: bool = True,
        before: Callable[["Environment", ToolCall], None] | None = None,
    ) -> list[str]:
        """Run the write calls of a conversation again. Unknown tools, and calls that were never answered, are skipped.

        Args:
            messages (`Sequence`): The conversation.
            strict (`bool`, defaults to `True`): Whether a result other than the recorded one is an error.
            before (`Callable`, *optional*): Called with this environment and each write call that succeeded, before it
                runs again.

        Returns:
            `list[str]`: What differs from the recorded results.

        Raises:
            ReplayError: If `strict` and a result differs.
        """
        differences = []
        for tool_call, recorded in answered_calls(messages):
            if self.kind(tool_call.name, tool_call.requestor) != "write":
                continue
            if before is not None and not recorded.error:
                before(self, tool_call)
            answer = self.respond(tool_call)
            if not same_result(answer.content, recorded.content) and not (answer.error and recorded.error):
                text = f"{tool_call.name}: recorded {recorded.content!r:.200}, now {answer.content!r:.200}"
                if strict:
                    raise ReplayError(f"replay differs from the recording; {text} (strict=False tolerates it)")
                differences.append(text)
        return differences


def answered_calls(messages: Sequence[AnyMessage]) -> list[tuple[ToolCall, ToolMessage]]:
    """The calls of a conversation with the tool messages that answer them, in order."""
    pairs: list[tuple[ToolCall, ToolMessage]] = []
    pending: list[ToolCall] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            if pending:
                pairs.append((pending.pop(0), message))
        elif isinstance(message, Message):
            pending = list(message.tool_calls or ())
    return pairs


def same_result(left: str, right: str) -> bool:
    """Whether two result texts are the same text or the same JSON."""
    if left == right:
        return True
    try:
        return json.loads(left) == json.loads(right)
    except ValueError:
        return False


def result_text(result: Any, stringify: bool = False) -> str:
    """A tool's result as the text a player reads: text as it is, anything else as JSON."""
    if isinstance(result, str):
        return result
    return _ENCODER.encode(_stringified(result) if stringify else result)


_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)  # the world's records are trees


def _stringified(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stringified(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_stringified(item) for item in value]
    return str(value) if isinstance(value, (int, float)) else value
