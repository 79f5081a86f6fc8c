"""An agent that follows the telecom workflow policy: look, repair, look again, up to three times a step.

It works from the customer's words and the tools' results alone; it never looks at the gold plan. The three paths are
those of `policies/telecom_workflow.md`.
"""

import json
import re
from collections.abc import Callable, Collection, Generator
from typing import Any

from hf_pipelines.tau2_bench.agents.phone_words import request
from hf_pipelines.tau2_bench.agents.script_player import Do, Say, Script, ScriptedAgent, hand_over
from hf_pipelines.tau2_bench.domains.telecom.entities import TODAY
from hf_pipelines.tau2_bench.modes import is_solo
from hf_pipelines.tau2_bench.players import Briefing
from hf_pipelines.tau2_bench.users import phone_facts as facts

TOPICS = (
    "airplane",
    "sim",
    "apn",
    "suspension",
    "roaming",
    "data",
    "refuel",
    "saver",
    "preference",
    "vpn",
    "wifi_calling",
    "permissions",
    "mmsc",
)
TRIES = 3
MOST_REFUELED_GB = 2.0
BEST_MODE = "4g_5g_preferred"
ANSWERS = {  # look → what its result must show
    "check_status_bar": r"Status bar: ",
    "check_network_status": r"Data roaming: ",
    "check_network_mode_preference": r"Preferred network mode: ",
    "run_speed_test": r"Speed test",
    "check_sim_status": r"SIM card",
    "check_data_restriction_status": r"Data Saver is ",
    "check_apn_settings": r"APN name: ",
    "check_wifi_calling_status": r"Wi-Fi Calling is ",
    "check_vpn_status": r"VPN is",
    "check_app_permissions": r"Granted to ",
    "can_send_mms": r"can(?:not)? send MMS",
    "check_payment_request": r"[Pp]ayment request",
}
Part = Generator[Say | Do, str, Any]


class CannotGoOn(Exception):
    """No permitted step is left, or a rule says to hand over."""


class WorkflowScript(ScriptedAgent):
    """Follows the workflow policy.

    Args:
        skip (`Collection[str]`, defaults to `()`): Topics that it is blind to, some of `TOPICS`.

    Raises:
        ValueError: If a topic is unknown.
    """

    def __init__(self, skip: str | Collection[str] = ()) -> None:
        skip = (skip,) if isinstance(skip, str) else tuple(skip)
        for topic in skip:
            if topic not in TOPICS:
                raise ValueError(f"skip has {topic!r}, which is not one of {', '.join(TOPICS)}")
        self.skip = frozenset(skip)

    def script(self, briefing: Briefing, opening: str) -> Script:
        """The whole support call."""
        visit = Visit(is_solo(briefing.mode), self.skip)
        heard = _ticket(briefing.instructions) if visit.solo else opening
        path = {"service_issue": visit.service, "mobile_data_issue": visit.mobile_data, "mms_issue": visit.mms}
        try:
            yield from visit.identify(heard)
            yield from path[complaint(heard)]()
        except CannotGoOn as reason:
            yield from hand_over(str(reason), visit.solo)


def complaint(text: str) -> str:
    """The kind of trouble that a customer's words or a ticket describe."""
    low = text.lower()
    if re.search(r"\bmms\b|picture messag|photo messag", low):
        return "mms_issue"
    if re.search(r"\binternet\b|\bmobile data\b|\bslow\b|\bspeed\b", low):
        return "mobile_data_issue"
    return "service_issue"


def _ticket(instructions: str) -> str:
    found = re.search(r"<ticket>(.*?)</ticket>", instructions, re.S)
    return found.group(1) if found else instructions


class Visit:
    """One support call: who calls, what is known, and the paths of the policy.

    Args:
        solo (`bool`): Whether the phone's tools are the agent's own.
        skip (`Collection[str]`): Topics to be blind to.
    """

    def __init__(self, solo: bool, skip: Collection[str]) -> None:
        self.solo, self.skip = solo, skip
        self.customer_id = self.number = ""
        self.line_id: str | None = None
        self.heard = ""  # everything that the customer said about themselves

    # ------------------------------------------------------------------------------------------------------- phone

    def phone(self, tool: str, wanted: bool | None = None, **arguments: Any) -> Part:
        """Run a step on the phone, or have it run; returns what is heard of it."""
        if self.solo:
            return (yield Do(tool, arguments))
        return (yield Say(request(tool, arguments, wanted)))

    def look(self, tool: str, **arguments: Any) -> Part:
        """Have something looked at, until the answer shows it."""
        for _ in range(TRIES):
            heard = yield from self.phone(tool, **arguments)
            if re.search(ANSWERS[tool], heard):
                return heard
        raise CannotGoOn(f"The customer could not tell the result of {tool}.")

    def repair(
        self,
        tool: str,
        done: Callable[[str], bool],
        check: str,
        wanted: bool | None = None,
        check_with: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Part:
        """Have something changed, and make sure that it was: by the answer or a look; returns the last answer."""
        heard = ""
        for _ in range(TRIES):
            heard = yield from self.phone(tool, wanted, **arguments)
            if done(heard):
                return heard
            heard = yield from self.look(check, **(check_with or {}))
            if done(heard):
                return heard
        return heard

    def switch(self, tool: str, on: bool, check: str) -> Part:
        """Bring a switch into a state."""
        return (yield from self.repair(tool, lambda heard: _is(heard, tool, on), check, wanted=on))

    # -------------------------------------------------------------------------------------------------- back office

    def office(self, tool: str, **arguments: Any) -> Part:
        """Call a tool of the back office; returns its result, JSON as Python values."""
        text = yield Do(tool, arguments)
        try:
            return json.loads(text)
        except ValueError:
            return text

    def identify(self, heard: str) -> Part:
        """Find the customer by the phone number."""
        self.heard = heard
        for _ in range(TRIES):
            found = re.search(r"\b\d{3}-\d{3}-\d{4}\b", self.heard)
            if found:
                break
            if self.solo:
                raise CannotGoOn("The ticket names no phone number.")
            self.heard += " " + (yield Say("I am sorry to hear that. What is your name, and your phone number?"))
        else:
            raise CannotGoOn("The customer could not be identified.")
        self.number = found.group()
        self.customer = yield from self.office("get_customer_by_phone", phone_number=self.number)
        if not isinstance(self.customer, dict):
            raise CannotGoOn("There is no such customer.")
        self.customer_id = self.customer["customer_id"]

    def line(self) -> Part:
        """The record of the line with the customer's number."""
        if self.line_id is not None:
            return (yield from self.office("get_details_by_id", id=self.line_id))
        for line_id in self.customer["line_ids"]:
            record = yield from self.office("get_details_by_id", id=line_id)
            if isinstance(record, dict) and record["phone_number"] == self.number:
                self.line_id = line_id
                return record
        raise CannotGoOn("The customer has no such line.")

    # ------------------------------------------------------------------------------------------------------ path 1

    def service(self) -> Part:
        """Path 1: until the status bar shows a signal."""
        heard = yield from self.look("check_status_bar")
        if _signal(heard):
            return
        if "Airplane Mode" in (facts.status_bar_in(heard) or "") and "airplane" not in self.skip:
            heard = yield from self.switch("toggle_airplane_mode", False, "check_network_status")
            if (yield from self._has_signal(heard)):
                return
        if "sim" not in self.skip:
            heard = yield from self.look("check_sim_status")
            if "locked" in heard:
                raise CannotGoOn("The SIM card is locked.")
            if "missing" in heard:
                seated = yield from self.repair("reseat_sim_card", _seated, "check_sim_status")
                if (yield from self._has_signal(seated)):
                    return
                if "put back in" not in seated or "locked" in seated:
                    heard = yield from self.look("check_sim_status")
                    if "locked" in heard:
                        raise CannotGoOn("The SIM card is locked.")
        if "apn" not in self.skip and (yield from self._reset_apn()):
            return
        if "suspension" not in self.skip and (yield from self._resume()):
            return
        raise CannotGoOn("There is still no service after all steps.")

    def _has_signal(self, heard: str) -> Part:
        if facts.status_bar_in(heard) is None:
            heard = yield from self.look("check_status_bar")
        return _signal(heard)

    def _reset_apn(self) -> Part:
        """Reset the access point and restart; returns whether there is a signal then."""
        for _ in range(TRIES):
            yield from self.repair("reset_apn_settings", _reset, "check_apn_settings")
            heard = yield from self.phone("reboot_device")
            if (yield from self._has_signal(heard)):
                return True
            if "has restarted" in heard:
                return False
            settings = yield from self.look("check_apn_settings")
            if "pending" not in settings and "incorrect" not in settings:
                return False
        return False

    def _restart(self) -> Part:
        """Restart the phone; returns whether there is a signal then."""
        for _ in range(TRIES):
            heard = yield from self.phone("reboot_device")
            if (yield from self._has_signal(heard)):
                return True
            if "has restarted" in heard:
                return False
        return False

    def _resume(self) -> Part:
        """Lift the suspension of the line where the rules allow it; returns whether there is a signal then."""
        line = yield from self.line()
        if line["status"] != "Suspended":
            return False
        if (line.get("contract_end_date") or TODAY) < TODAY:
            raise CannotGoOn("The line is suspended and its contract has ended.")
        bills = yield from self.office("get_bills_for_customer", customer_id=self.customer_id)
        for bill in bills:
            if bill["status"] in ("Overdue", "Awaiting Payment"):
                yield from self._collect(bill)
        yield from self.office("resume_line", customer_id=self.customer_id, line_id=line["line_id"])
        return (yield from self._restart())

    def _collect(self, bill: dict[str, Any]) -> Part:
        """Have an overdue bill paid."""
        if not self.solo:
            due = f"A bill over ${bill['total_due']:.2f} is overdue. Do you agree to pay it?"
            if not re.search(r"\byes\b", (yield Say(due)).lower()):
                raise CannotGoOn("The customer does not pay the overdue bill.")
        if bill["status"] == "Overdue":
            yield from self.office("send_payment_request", customer_id=self.customer_id, bill_id=bill["bill_id"])
        for _ in range(TRIES):
            yield from self.look("check_payment_request")
            yield from self.phone("make_payment")
            record = yield from self.office("get_details_by_id", id=bill["bill_id"])
            if record["status"] == "Paid":
                return
        raise CannotGoOn("The overdue bill was not paid.")

    # ------------------------------------------------------------------------------------------------------ path 2

    def mobile_data(self) -> Part:
        """Path 2: until the speed is excellent."""
        word = yield from self._speed()
        if word == "none":
            word = yield from self.connection()
        for topic, step in (("saver", self._saver), ("preference", self._preference), ("vpn", self._vpn)):
            if word == "Excellent":
                return
            if topic not in self.skip:
                word = (yield from step()) or (yield from self._speed())
        if word != "Excellent":
            raise CannotGoOn("Mobile data is still slow after all steps.")

    def _speed(self, heard: str = "") -> Part:
        """The speed's word as already heard, or by a test."""
        return facts.speed_in(heard) or facts.speed_in((yield from self.look("run_speed_test")))

    def connection(self) -> Part:
        """Path 2.1: until data reaches the internet; returns the speed's word."""
        yield from self.service()
        word = yield from self._speed()
        status = ""
        if word == "none" and "roaming" not in self.skip and (yield from self._travels()):
            status = yield from self.look("check_network_status")
            if _is(status, "toggle_roaming", False):
                heard = yield from self.switch("toggle_roaming", True, "check_network_status")
                word = yield from self._speed(heard)
            if word == "none" and not (yield from self.line())["roaming_enabled"]:
                yield from self.office("enable_roaming", customer_id=self.customer_id, line_id=self.line_id)
                word = yield from self._speed()
        if word == "none" and "data" not in self.skip:
            status = status or (yield from self.look("check_network_status"))
            if _is(status, "toggle_data", False):
                heard = yield from self.switch("toggle_data", True, "check_network_status")
                word = yield from self._speed(heard)
        if word == "none" and "refuel" not in self.skip and (yield from self._refuel()):
            word = yield from self._speed()
        if word == "none":
            raise CannotGoOn("There is still no mobile data after all steps.")
        return word

    def _travels(self) -> Part:
        if not self.solo and not re.search(r"\babroad\b|\bat home\b|\btravel", self.heard.lower()):
            self.heard += " " + (yield Say("Are you at home, or are you travelling abroad?"))
        return re.search(r"\babroad\b|\btravel", self.heard.lower()) is not None

    def _refuel(self) -> Part:
        """Add data where the line has used up its own; returns whether it did."""
        line = yield from self.line()
        usage = yield from self.office("get_data_usage", customer_id=self.customer_id, line_id=self.line_id)
        refueled = float(usage["data_refueling_gb"])
        if float(usage["data_used_gb"]) < float(usage["data_limit_gb"]) + refueled:
            return False
        room = MOST_REFUELED_GB - refueled
        if room <= 0:
            raise CannotGoOn("The line has used up its data, and no more may be added.")
        wanted = _ticket_amount(self.heard)
        if not self.solo:
            plan = yield from self.office("get_details_by_id", id=line["plan_id"])
            price = plan["data_refueling_price_per_gb"]
            heard = yield Say(f"Your data is used up. I can refuel it for ${price} per GB. How much data do you want?")
            wanted = _ticket_amount(heard)
            if wanted:
                cost = f"Refueling {min(wanted, room)} GB costs ${price * min(wanted, room):.2f}. Do you agree?"
                wanted = wanted if re.search(r"\byes\b", (yield Say(cost)).lower()) else 0.0
        if wanted <= 0:
            raise CannotGoOn("The customer does not want to add data.")
        amount = min(wanted, room)
        yield from self.office("refuel_data", customer_id=self.customer_id, line_id=self.line_id, gb_amount=amount)
        return True

    def _saver(self) -> Part:
        heard = yield from self.look("check_data_restriction_status")
        if _is(heard, "toggle_data_saver_mode", True):
            heard = yield from self.switch("toggle_data_saver_mode", False, "check_data_restriction_status")
            return facts.speed_in(heard)
        return facts.speed_in(heard)

    def _preference(self) -> Part:
        heard = yield from self.look("check_network_mode_preference")
        if not _prefers_best(heard):
            heard = yield from self.repair(
                "set_network_mode_preference", _prefers_best, "check_network_mode_preference", mode=BEST_MODE
            )
        return facts.speed_in(heard)

    def _vpn(self) -> Part:
        heard = yield from self.look("check_vpn_status")
        if "No VPN" not in heard:
            heard = yield from self.repair("disconnect_vpn", _without_vpn, "check_vpn_status")
        return facts.speed_in(heard)

    # ------------------------------------------------------------------------------------------------------ path 3

    def mms(self) -> Part:
        """Path 3: until a picture message can be sent."""
        if facts.sends_mms((yield from self.look("can_send_mms"))):
            return
        yield from self.service()
        if (yield from self._speed()) == "none":
            yield from self.connection()
        steps = (
            ("preference", self._leave_2g),
            ("wifi_calling", self._wifi_calling),
            ("permissions", self._permissions),
            ("mmsc", self._mmsc),
        )
        for topic, step in steps:
            if topic not in self.skip:
                yield from step()
        if not facts.sends_mms((yield from self.look("can_send_mms"))):
            raise CannotGoOn("Picture messages still fail after all steps.")

    def _leave_2g(self) -> Part:
        heard = yield from self.look("check_network_status")
        if "Network type: 2G" in heard:
            check = "check_network_mode_preference"
            yield from self.repair("set_network_mode_preference", _prefers_best, check, mode=BEST_MODE)

    def _wifi_calling(self) -> Part:
        heard = yield from self.look("check_wifi_calling_status")
        if _is(heard, "toggle_wifi_calling", True):
            yield from self.switch("toggle_wifi_calling", False, "check_wifi_calling_status")

    def _permissions(self) -> Part:
        app = {"app_name": "messaging"}
        heard = yield from self.look("check_app_permissions", **app)
        for permission in ("storage", "sms"):
            if not _granted(heard, permission):
                yield from self.repair(
                    "grant_app_permission",
                    lambda answer, name=permission: _granted(answer, name),
                    "check_app_permissions",
                    check_with=app,
                    **app,
                    permission=permission,
                )

    def _mmsc(self) -> Part:
        for _ in range(TRIES):
            heard = yield from self.look("check_apn_settings")
            if "MMSC URL: not set" not in heard:
                return
            if "pending" not in heard:
                yield from self.repair("reset_apn_settings", _reset, "check_apn_settings")
            heard = yield from self.phone("reboot_device")
            if "has restarted" in heard:
                return


# -------------------------------------------------------------------------------------------------- what answers show


def _is(heard: str, switch: str, on: bool) -> bool:
    state = facts.switch_states(heard).get(switch)
    return state is not None and state[0] == on


def _signal(heard: str) -> bool:
    bar = facts.status_bar_in(heard)
    return bar is not None and facts.has_signal(bar)


def _seated(heard: str) -> bool:
    return "put back in" in heard or "is active" in heard or "locked" in heard


def _reset(heard: str) -> bool:
    return "will be reset" in heard or "reset is pending" in heard


def _prefers_best(heard: str) -> bool:
    return re.search(rf"Preferred network mode(?::| is now) {BEST_MODE}", heard) is not None


def _without_vpn(heard: str) -> bool:
    return "No VPN" in heard or "now disconnected" in heard


def _granted(heard: str, permission: str) -> bool:
    now = re.search(rf"now has the permission {permission}\b", heard)
    listed = re.search(r"Granted to \w+: ([^.]*)\.", heard)
    return now is not None or (listed is not None and permission in listed.group(1).split(", "))


def _ticket_amount(text: str) -> float:
    found = re.search(r"(\d+(?:\.\d+)?) ?GB\b", text)
    return float(found.group(1)) if found else 0.0
