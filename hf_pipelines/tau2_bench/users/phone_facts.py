"""What the results of the phone's tools say: switches, signal, speed, picture messages."""

import re

SWITCH_FACTS = {  # tool that flips it → how results show its state
    "toggle_airplane_mode": r"Airplane mode(?::| is now) (ON|OFF)",
    "toggle_data": r"Mobile data(?::| is now) (ON|OFF)",
    "toggle_roaming": r"Data roaming(?::| is now) (ON|OFF)",
    "toggle_data_saver_mode": r"Data Saver is(?: now)? (ON|OFF)",
    "toggle_wifi_calling": r"Wi-Fi Calling is(?: now)? (ON|OFF)",
    "toggle_wifi": r"Wi-Fi(?: radio:| is| is now) (ON|OFF)",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in SWITCH_FACTS.items()}
_SPEED = re.compile(r"Speed test: ([\d.]+) Mbps \(([\w ]+)\)")
_SIGNAL = re.compile(r"Signal (Poor|Fair|Good|Excellent)")
GOAL_TOOLS = {
    "service_issue": "check_status_bar",
    "mobile_data_issue": "run_speed_test",
    "mms_issue": "can_send_mms",
}


def switch_states(text: str) -> dict[str, tuple[bool, str]]:
    """Tool → (whether it is on, the words that say so), for every switch that a text shows."""
    states = {}
    for name, pattern in _PATTERNS.items():
        shown = list(pattern.finditer(text))
        if shown:  # the last one is the newest
            found = shown[-1]
            states[name] = (found.group(1) == "ON", found.group())
    return states


def status_bar_in(text: str) -> str | None:
    """The last status bar of a text."""
    lines = re.findall(r"Status bar: ([^\n]*)", text)
    return lines[-1] if lines else None


def has_signal(bar: str) -> bool:
    """Whether a status bar shows a signal."""
    return _SIGNAL.search(bar) is not None


def speed_in(text: str) -> str | None:
    """The word of the last speed test in a text, `"none"` where it failed, `None` where there was none."""
    place, word = -1, None
    for match in _SPEED.finditer(text):
        place, word = match.start(), match.group(2)
    if text.rfind("Speed test failed") > place:
        return "none"
    return word


def sends_mms(text: str) -> bool | None:
    """Whether the last trial in a text could send a picture message."""
    words = re.findall(r"The messaging app (can|cannot) send MMS", text)
    return words[-1] == "can" if words else None


def goal_met(category: str, text: str) -> bool:
    """Whether the result of a category's goal tool says that the problem is gone."""
    if category == "mobile_data_issue":
        return speed_in(text) == "Excellent"
    if category == "mms_issue":
        return sends_mms(text) is True
    bar = status_bar_in(text)
    return bar is not None and has_signal(bar)


def category_of(category: str | None, assertions: set[str]) -> str:
    """The kind of trouble: the task's own, or what its assertions ask about."""
    if category in GOAL_TOOLS:
        return category
    if "assert_can_send_mms" in assertions:
        return "mms_issue"
    return "mobile_data_issue" if "assert_internet_speed" in assertions else "service_issue"
