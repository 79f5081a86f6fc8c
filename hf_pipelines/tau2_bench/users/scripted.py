"""A customer without a language model: deterministic given the seed, so that runs are reproducible offline.

It does what the agent asks for (`parse`), reports what the phone's tools say word for word, looks whether the problem
is gone after every change, and stops when it is. Noise makes it err on purpose.
"""

import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hf_pipelines.tau2_bench.players import Briefing
from hf_pipelines.tau2_bench.types import OUT_OF_SCOPE, STOP, TRANSFER, AnyMessage, Message, ToolCall, ToolMessage
from hf_pipelines.tau2_bench.users.parse import parse
from hf_pipelines.tau2_bench.users.phone_facts import GOAL_TOOLS, category_of, goal_met, switch_states
from hf_pipelines.tau2_bench.users.requests import SWITCHES, Request
from hf_pipelines.tau2_bench.users.slot_filler import SlotFiller

NOISES = ("omit", "confuse", "wrong_tool", "volunteer")
MAX_ACTIONS = {"Hard": 1}
DEFAULT_MAX_ACTIONS = 2
PATIENCE = 3  # turns in a row in which the agent asked for nothing before the customer gives up
WRITES = frozenset(
    (
        "set_network_mode_preference",
        "toggle_airplane_mode",
        "reseat_sim_card",
        "toggle_data",
        "toggle_roaming",
        "toggle_data_saver_mode",
        "set_apn_settings",
        "reset_apn_settings",
        "reboot_device",
        "toggle_wifi",
        "toggle_wifi_calling",
        "connect_vpn",
        "disconnect_vpn",
        "grant_app_permission",
        "make_payment",
    )
)
LOOKS = dict(SWITCHES.values())  # switch → tool that shows its state
MISTAKES = ("check_network_status", "check_wifi_status", "check_installed_apps", "check_sim_status")

TRANSFERRED = re.compile(
    r"\btransferring you\b|\b(?:being|been|are|was|were|will be) (?:now )?(?:transferred|handed over)|"
    r"\bconnected to a human|\bhand(?:ing)? you over\b"
)
IDENTITY = re.compile(
    r"\b(?:your (?:full )?name|(?:phone|mobile) number|customer id|date of birth|"
    r"identify (?:you|yourself)|who (?:am i|you))"
)
LOCATION = re.compile(
    r"\b(?:where are you|your location|travel\w*|abroad|at home or|outside (?:the|your) (?:home|country))"
)
PLAN = re.compile(r"\b(?:change|switch|upgrade|other|another|different|new|bigger|larger)\b[^.?!]{0,30}\bplan\b")
DATA = re.compile(
    r"\brefuel\w*|\bhow (?:much|many)\b[^.?!]{0,40}\b(?:data|gb|gigabytes)\b|\b(?:add|top up)\b[^.?!]*\b(?:gb|data)\b"
)
PAYMENT = re.compile(r"\b(?:pay|payment|overdue|bill)\b")
WORKS = re.compile(r"\b(?:works?|working|done|fixed|complete[d]?|resolved|solved|anything else|all set|back)\b")


class ScriptedUser:
    """The scripted customer: in telecom it holds the phone, elsewhere it fills slots from its scenario.

    Args:
        noise (`Mapping[str, float]`, *optional*): Probabilities, each 0 where left out: `omit` (says that a change was
            made and does nothing), `confuse` (asks again), `wrong_tool` (uses another tool), `volunteer` (looks at
            something nobody asked for).

    Raises:
        ValueError: If a noise is unknown or no probability.
    """

    def __init__(self, noise: Mapping[str, float] | None = None) -> None:
        self.noise = checked_noise(noise)
        self._player: PhoneCustomer | SlotFiller | None = None

    def start(self, briefing: Briefing) -> None:
        """Get ready for a new run."""
        holds_phone = any(tool["function"]["name"] == "check_status_bar" for tool in briefing.tools)
        self._player = PhoneCustomer(briefing, self.noise) if holds_phone else SlotFiller(briefing)

    def respond(self, view: Sequence[AnyMessage], notice: str | None = None) -> Message:
        """Take a turn."""
        return self._player.respond(view, notice)


def checked_noise(noise: Mapping[str, float] | None) -> dict[str, float]:
    """Noise with every knob.

    Raises:
        ValueError: If a knob is unknown or its value no probability.
    """
    noise = dict(noise or {})
    for name, value in noise.items():
        if name not in NOISES:
            raise ValueError(f"noise has {name!r}, which is not one of {', '.join(NOISES)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ValueError(f"noise[{name!r}]={value!r} must be a probability between 0 and 1")
    return {name: float(noise.get(name, 0.0)) for name in NOISES}


class PhoneCustomer:
    """A telecom customer with the phone in hand.

    Args:
        briefing (`Briefing`): The scenario.
        noise (`dict[str, float]`): Every knob.
    """

    def __init__(self, briefing: Briefing, noise: dict[str, float]) -> None:
        task, fields = briefing.task, briefing.task.instructions
        fields = fields if isinstance(fields, dict) else {"reason_for_call": str(fields or "")}
        self.category = category_of(task.category, {item.func_name for item in task.env_assertions})
        self.goal_tool = GOAL_TOOLS[self.category]
        self.reason = in_first_person(str(fields.get("reason_for_call") or "My phone does not work as it should."))
        self.known = in_first_person(str(fields.get("known_info") or ""))
        self.max_actions = MAX_ACTIONS.get(task.persona_name, DEFAULT_MAX_ACTIONS)
        self.noise = noise
        self.rng = random.Random(f"{briefing.seed}|{task.id}|customer")
        self.facts: dict[str, tuple[bool, str]] = {}
        self.queue: deque[Request] = deque()
        self.reports: list[str] = []
        self.asked = False  # whether the goal is checked because the agent wants to know
        self.changed = False
        self.idle = 0
        self.calls = 0
        self.running: str | None = None
        self.opened = False

    def respond(self, view: Sequence[AnyMessage], notice: str | None = None) -> Message:
        """Take a turn."""
        last = view[-1] if view else None
        if isinstance(last, ToolMessage):
            return self._on_result(last.content)
        return self._on_text(last.content if last is not None else "")

    # ----------------------------------------------------------------------------------------------- what was said

    def _on_text(self, text: str) -> Message:
        low = text.lower()
        if TRANSFERRED.search(low):
            return _say(TRANSFER)
        self.reports, self.changed, self.asked = [], False, False
        requests = parse(text)
        if requests:
            self.idle, self.opened = 0, True
            return self._on_requests(requests)
        if not self.opened:
            self.opened = True
            return _say(self.reason)
        answer = self._answer(low)
        if answer is not None:
            self.idle = 0
            return _say(answer)
        self.idle += 1
        if WORKS.search(low):
            self.asked = True
            return self._call(self.goal_tool)
        if self.idle >= PATIENCE:
            return _say(OUT_OF_SCOPE)
        return _say(f"My problem is still there. {self.reason}")

    def _answer(self, low: str) -> str | None:
        """The answer to a question of which the scenario knows something."""
        if PLAN.search(low):
            return "No, I do not want another plan."
        if DATA.search(low):
            return "Yes, 2.0 GB please; I agree to the price."
        if IDENTITY.search(low):
            return self.known or None
        if LOCATION.search(low) and re.search(
            r"\babroad\b|\bat home\b|\bin the (?:us|united states)\b", self.known.lower()
        ):
            return self.known
        if PAYMENT.search(low) and "?" in low:
            return "Yes, I agree to pay."
        return None

    def _on_requests(self, requests: list[Request]) -> Message:
        if len(requests) > self.max_actions:
            return _say("That is too much at once for me. Please tell me one step at a time.")
        if self._happens("confuse"):
            return _say("Sorry, I did not understand that. What exactly shall I do?")
        self.queue = deque()
        for request in requests:
            if request[0] in WRITES and self._happens("omit"):
                self.reports.append("Done, I did that.")
            elif request[0] in WRITES and self._happens("wrong_tool"):
                self.queue.append((self.rng.choice(MISTAKES), {}, None))
            else:
                self.queue.append(request)
        if self._happens("volunteer"):
            self.queue.append(("check_network_status", {}, None))
        return self._next()

    def _happens(self, name: str) -> bool:
        return self.noise[name] > 0 and self.rng.random() < self.noise[name]

    # ----------------------------------------------------------------------------------------------- what was done

    def _on_result(self, text: str) -> Message:
        self.facts.update(switch_states(text))
        tool, self.running = self.running, None
        if tool == self.goal_tool and goal_met(self.category, text):
            return _say("\n".join([*self.reports, text, f"Thank you, the problem is solved. {STOP}"]))
        if self.queue and self.queue[0][2] is not None and tool == LOOKS.get(self.queue[0][0]):
            if self.queue[0][0] not in self.facts:  # the look did not tell: do as asked
                name, arguments, _ = self.queue.popleft()
                self.queue.appendleft((name, arguments, None))
            return self._next()
        self.reports.append(text)
        if tool == self.goal_tool:
            self.changed = False
            if self.asked:
                return _say(OUT_OF_SCOPE if self.idle >= PATIENCE else f"No, it is not solved yet. {text}")
        self.changed = self.changed or (tool in WRITES and tool != "make_payment")
        return self._next()

    def _next(self) -> Message:
        """The next call of the queue, the look at the goal after a change, or the report."""
        while self.queue:
            name, arguments, wanted = self.queue[0]
            if wanted is not None and name in self.facts and self.facts[name][0] == wanted:
                self.queue.popleft()
                self.reports.append(f"That is already so: {self.facts[name][1]}.")
                continue
            if wanted is not None and name not in self.facts and name in LOOKS:
                return self._call(LOOKS[name])
            self.queue.popleft()
            return self._call(name, arguments)
        if self.changed:
            return self._call(self.goal_tool)
        return _say("\n".join(self.reports) or "I did not see anything.")

    def _call(self, name: str, arguments: dict[str, Any] | None = None) -> Message:
        self.running = name
        self.calls += 1
        return Message("user", tool_calls=[ToolCall(f"user_{self.calls}", name, dict(arguments or {}), "user")])


_PERSON = (
    (r"\byou are\b", "I am"),
    (r"\byou have\b", "I have"),
    (r"\byou were\b", "I was"),
    (r"\byour\b", "my"),
    (r"\byours\b", "mine"),
    (r"\byou\b", "I"),
)


def in_first_person(text: str) -> str:
    """A scenario's "you are …" as the customer says it."""
    for pattern, word in _PERSON:
        text = re.sub(pattern, word, text, flags=re.IGNORECASE)
    return re.sub(r"(^|[.!?] )([a-z])", lambda match: match.group(1) + match.group(2).upper(), text)


def _say(text: str) -> Message:
    return Message("user", text)
