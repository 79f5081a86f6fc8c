"""Runs one episode: whose turn it is, what happens to a call, when it ends (arXiv 2506.07982, section 3).

```
history none   dual: greeting of the agent, then USER       solo: AGENT
USER  → text → AGENT     stop mark → user_stop      calls → ENV
AGENT → text → USER      solo: done → agent_stop    calls → ENV     solo text → agent_error
ENV   → every call in order, answered to its sender, whose turn it is again
```
"""

import json
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.env import Environment
from hf_pipelines.tau2_bench.modes import DONE, agent_briefing, check_mode, is_solo, user_briefing
from hf_pipelines.tau2_bench.players import (
    ContextWindowExceeded,
    InfrastructureError,
    MalformedOutput,
    Note,
    Player,
    Run,
)
from hf_pipelines.tau2_bench.task import Task
from hf_pipelines.tau2_bench.types import (
    STOP,
    AnyMessage,
    Message,
    Side,
    SystemMessage,
    ToolCall,
    ToolMessage,
    agent_view,
    user_view,
)

GREETING = "Hi! How can I help you today?"
MAX_STEPS, MAX_ERRORS, SEED = 200, 10, 300
RETRIES = {"assistant": 3, "user": 1}  # how often an unusable answer is asked again
Turn = Literal["assistant", "user", "env"]


def trial_seeds(seed: int, trials: int) -> list[int]:
    """The seeds of the trials of a run, from the run's seed alone.

    >>> trial_seeds(300, 4)
    [626729, 373753, 361454, 1567]

    Raises:
        ValueError: If `trials` is less than 1.
    """
    if trials < 1:
        raise ValueError(f"trials={trials} must be at least 1")
    rng = random.Random(seed)
    return [rng.randint(0, 1_000_000) for _ in range(trials)]


class Orchestrator:
    """One run of one task.

    Args:
        task (`Task`): The task.
        agent (`Player`): The agent.
        user (`Player`, *optional*): The customer; not needed where the agent works alone.
        domain (`Domain`, *optional*): The world, where it is not the one the task names.
        mode (`str`, defaults to `"dual"`): One of `MODES`.
        policy (`str`, *optional*): Variant of the policy.
        seed (`int`, defaults to 300): The run's seed.
        max_steps (`int`, defaults to 200): Turns and executions before the run is cut off.
        max_errors (`int`, defaults to 10): Failed calls and unusable answers before the run is cut off.
        timeout_s (`float`, *optional*): Seconds before the run is cut off.
        one_call_per_turn (`bool`, defaults to `False`): Whether only the first call of a message runs.
        hide_arguments (`bool`, defaults to `False`): For the oracle modes, whether the plan names tools only.

    Raises:
        ValueError: If the task cannot be played in this mode, or a limit is less than 1.
    """

    def __init__(
        self,
        task: Task,
        agent: Player,
        user: Player | None = None,
        *,
        domain: Domain | None = None,
        mode: str = "dual",
        policy: str | None = None,
        seed: int = SEED,
        max_steps: int = MAX_STEPS,
        max_errors: int = MAX_ERRORS,
        timeout_s: float | None = None,
        one_call_per_turn: bool = False,
        hide_arguments: bool = False,
    ) -> None:
        self.domain = domain or get_domain(task.domain_name, task.data_dir)
        check_mode(self.domain, task, mode)
        self.solo = is_solo(mode)
        if not self.solo and user is None:
            raise ValueError(f"user=None: mode={mode!r} needs a customer")
        for name, value in (("max_steps", max_steps), ("max_errors", max_errors)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.task, self.mode, self.seed = task, mode, seed
        self.players: dict[Side, Player | None] = {"assistant": agent, "user": None if self.solo else user}
        self.max_steps, self.max_errors, self.timeout_s = max_steps, max_errors, timeout_s
        self.one_call_per_turn = one_call_per_turn
        self.env = Environment.for_task(self.domain, task, self.solo)
        self.messages: list[AnyMessage] = []
        self.notes: list[Note] = []
        self.steps = self.errors = 0
        self.termination: str | None = None
        self.reason: str | None = None
        self.turn: Turn = "assistant"
        self._briefings: list[tuple[Player, Any]] = [
            (agent, agent_briefing(self.domain, task, self.env, mode, policy, seed, hide_arguments))
        ]
        if not self.solo:
            self._briefings.append((user, user_briefing(task, self.env, mode, seed)))
        self._started = time.monotonic()
        self._start_time = _now()

    # ----------------------------------------------------------------------------------------------------- the run

    def run(self, on_message: Callable[[AnyMessage], None] | None = None) -> Run:
        """Play until the run ends; every end has a name, none is an exception.

        Args:
            on_message (`Callable`, *optional*): Called with each new message.
        """
        self.start()
        shown = len(self.messages)
        while self.termination is None:
            self.step()
            for message in self.messages[shown:] if on_message else ():
                on_message(message)
            shown = len(self.messages)
        return self.result()

    def start(self) -> None:
        """Brief the players and say whose turn it is first."""
        self._started, self._start_time = time.monotonic(), _now()
        for player, briefing in self._briefings:
            try:
                self._guarded(briefing.side, lambda player=player, briefing=briefing: player.start(briefing))
            except MalformedOutput as error:
                self._end("unexpected_error", f"{briefing.side}: {error}")
        self.messages = [replace(message) for message in self.task.message_history]
        for place, message in enumerate(self.messages):
            if not isinstance(message, SystemMessage):
                message.turn_idx = place
        if self.messages:
            self.turn = self._turn_after(self.messages[-1])
        elif self.solo:
            self.turn = "assistant"
        else:
            self._append(Message("assistant", GREETING))
            self.turn = "user"

    def step(self) -> None:
        """One turn of a player, or the execution of the calls of the last message."""
        if self.termination is not None:
            return
        if self.turn == "env":
            self._execute()
        else:
            self._play(self.turn)
        self.steps += 1
        self.env.sync()
        if self.termination is None and self.turn != "env":
            self._check_limits()

    def result(self) -> Run:
        """The finished run.

        Raises:
            RuntimeError: If the run has not ended.
        """
        if self.termination is None:
            raise RuntimeError("the run has not ended yet; call step() until termination is set")
        return Run(
            task_id=self.task.id,
            messages=self.messages,
            termination=self.termination,
            steps=self.steps,
            errors=self.errors,
            mode=self.mode,
            seed=self.seed,
            start_time=self._start_time,
            end_time=_now(),
            duration=time.monotonic() - self._started,
            notes=self.notes,
            reason=self.reason,
        )

    # --------------------------------------------------------------------------------------------------- the turns

    def _play(self, side: Side) -> None:
        message = self._ask(side)
        if message is None:
            return
        if side == "assistant" and self.solo:
            calls = message.tool_calls or []
            if any(call.name == DONE for call in calls):
                rest = [call for call in calls if call.name != DONE]
                if rest:
                    self._note(side, f"{len(rest)} call(s) beside done were dropped")
                self._append(replace(message, content=STOP, tool_calls=None))
                self._end("agent_stop")
                return
            if not calls:
                self._append(message)
                self._end("agent_error", "an agent that works alone answered with text instead of a call")
                return
        self._append(message)
        if message.tool_calls:
            self.turn = "env"
        elif message.stop_mark is not None:
            self._end("user_stop")
        else:
            self.turn = "user" if side == "assistant" else "assistant"

    def _ask(self, side: Side) -> Message | None:
        """A usable message of a player; asks again where it has to. `None` where the run has ended instead."""
        view = agent_view(self.messages) if side == "assistant" else user_view(self.messages)
        notice = None
        for _ in range(RETRIES[side] + 1):
            try:
                answer = self._guarded(side, lambda notice=notice: self.players[side].respond(view, notice))
                if self.termination is not None:
                    return None
                return self._usable(side, answer)
            except MalformedOutput as error:
                notice = str(error)
                self.errors += 1
                self._note(side, f"unusable answer: {notice}")
        name = "agent_error" if side == "assistant" else "user_error"
        self._end(name, f"{RETRIES[side] + 1} unusable answers in a row; the last: {notice}")
        return None

    def _guarded(self, side: Side, action: Callable[[], Any]) -> Any:
        """Run a player's code; whatever it raises ends the run with a name."""
        try:
            return action()
        except MalformedOutput:
            raise
        except ContextWindowExceeded as error:
            self._end("context_window_exceeded", str(error))
        except InfrastructureError as error:
            self._end("infrastructure_error", str(error))
        except Exception:
            self._end("unexpected_error", f"{side}: {traceback.format_exc(limit=-3)}")
        return None

    def _usable(self, side: Side, message: Any) -> Message:
        """Bring a player's message into the protocol.

        Raises:
            MalformedOutput: If it says nothing and calls nothing.
        """
        if not isinstance(message, Message):
            raise MalformedOutput(f"a player must return a Message, not {type(message).__name__}")
        calls = list(message.tool_calls or ())
        text = message.content if isinstance(message.content, str) and message.content.strip() else None
        if not calls and text is None:
            raise MalformedOutput("your answer was empty; write a text or call a tool")
        raw = dict(message.raw_data or {})
        if calls and text is not None:
            raw["dropped_text"] = text
            text = None
            self._note(side, "text beside tool calls was dropped")
        if self.one_call_per_turn and len(calls) > 1:
            self._note(side, f"{len(calls) - 1} further call(s) were dropped")
            calls = calls[:1]
        fixed = self._numbered(side, calls)
        return replace(message, role=side, content=text, tool_calls=fixed or None, raw_data=raw or None)

    def _numbered(self, side: Side, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Calls with unique ids, the sender as requestor, and arguments read from JSON text where they are text."""
        seen: set[str] = set()
        fixed = []
        for place, call in enumerate(calls):
            call_id = call.id if isinstance(call.id, str) else ""
            if call_id in seen or not call_id:
                if call_id:
                    self._note(side, f"the id {call_id!r} of a call was there twice")
                call_id = f"call_{len(self.messages)}_{place}"
            seen.add(call_id)
            arguments = {} if call.arguments is None else call.arguments
            if isinstance(arguments, str):
                arguments = _object_of(arguments)
            fixed.append(ToolCall(call_id, str(call.name), arguments, side))
        return fixed

    def _execute(self) -> None:
        last = self.messages[-1]
        for call in last.tool_calls:
            answer = self.env.respond(call)
            self.errors += answer.error
            self._append(answer)
        self.turn = last.role

    def _turn_after(self, message: AnyMessage) -> Turn:
        if isinstance(message, ToolMessage):
            return message.requestor
        if isinstance(message, Message) and message.tool_calls:
            return "env"
        return "user" if message.role == "assistant" and not self.solo else "assistant"

    # -------------------------------------------------------------------------------------------------------- ends

    def _check_limits(self) -> None:
        if self.steps >= self.max_steps:
            self._end("max_steps", f"{self.steps} steps")
        elif self.errors >= self.max_errors:
            self._end("too_many_errors", f"{self.errors} errors")
        elif self.timeout_s is not None and time.monotonic() - self._started >= self.timeout_s:
            self._end("timeout", f"more than {self.timeout_s} s")

    def _end(self, termination: str, reason: str | None = None) -> None:
        self.termination, self.reason = termination, reason

    def _append(self, message: AnyMessage) -> None:
        message.turn_idx = len(self.messages)
        message.timestamp = _now()
        self.messages.append(message)

    def _note(self, side: Side, what: str) -> None:
        self.notes.append(Note(len(self.messages), side, what))


def _object_of(text: str) -> Any:
    """The JSON object in a text, or the text itself, which the environment then refuses."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _now() -> str:
    return datetime.now().isoformat(timespec="milliseconds")
