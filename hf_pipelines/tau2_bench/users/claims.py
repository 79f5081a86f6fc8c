"""What a customer's text states: facts of the phone, finished changes, fields of the scenario. A lexicon, no model.

A fact counts only where it is stated plainly ("airplane mode is on"); questions, doubts and wishes are left alone.
 What is not recognised is not an error.
"""

import re
from typing import Any

from hf_pipelines.tau2_bench.domains.telecom import phone

_ON_OFF = {  # what is spoken of → field of the phone
    r"air(?:plane)? ?(?:plane )?mode": "airplane_mode",
    r"(?:mobile|cellular) data": "data_enabled",
    r"(?:data )?roaming": "roaming_enabled",
    r"data saver(?: mode)?": "data_saver_mode",
    r"wi-?fi calling": "wifi_calling_enabled",
    r"vpn": "vpn_connected",
}
_STATE = (
    r"\s*(?::|is|shows(?: as)?|says|switched|turned)\s*(?:now |currently |switched |turned )?"
    r"(on|off|enabled|disabled|connected)\b"
)
_FACTS = [(re.compile(rf"\b(?:{words}){_STATE}"), field) for words, field in _ON_OFF.items()]
_HEDGED = re.compile(r"\?|\b(?:if|whether|should|think|maybe|was|were|before|earlier|want|wish|already|until)\b")
_NO_VPN = re.compile(r"\bno vpn is (?:connected|on)\b|\bvpn is (?:not connected|disconnected)\b")
_SPEED = re.compile(r"(\d+(?:\.\d+)?) ?mbps(?: \((very poor|poor|fair|good|excellent)\))?")
_SIGNAL = re.compile(r"\b(?:signal(?: strength)?(?: is|:)? (none|poor|fair|good|excellent)|(no signal))\b")
_SIM = re.compile(r"\bsim(?: card)? is (?:now )?(active|missing|locked)\b|\b(no sim)\b")
_MMS = re.compile(r"\b(can ?not|can't|can) (?:now )?send (?:an? )?(?:mms|picture)")
_DONE = re.compile(
    r"\bdone\b|\bi(?:'ve| have| just)? (?:turned|switched|toggled|restarted|rebooted|reset|paid|made the payment|"
    r"disconnected|reseated|re-?inserted|granted|changed|set|enabled|disabled|did (?:that|it|this|as))\b|\bi did\b|"
    r"\bcompleted (?:it|that)\b|"
    r"\bhas been (?:turned|switched|reset|restarted|paid)\b"
)
_NOT_DONE = re.compile(
    r"\b(?:not (?:yet )?done|have ?n[o']t|did ?n[o']t|could ?n[o']t|cannot|can't|will|going to|once|when)\b"
)
_WHERE = re.compile(r"\babroad\b|\bin france\b")
_AT_HOME = re.compile(r"\bat home\b|\bin the (?:us|united states)\b")


def contradictions(text: str, device: dict[str, Any], surroundings: dict[str, Any]) -> list[str]:
    """Statements about the phone and its place that are not so, each in words.

    Args:
        text (`str`): What the customer says.
        device (`dict`): The phone as it is.
        surroundings (`dict`): Where it is.
    """
    wrong = []
    for sentence in re.split(r"(?<=[.!?])\s+|\n+", text.lower()):
        if _HEDGED.search(sentence):
            continue
        wrong += _wrong_switches(sentence, device)
        wrong += _wrong_measures(sentence, device, surroundings)
        here, home = _WHERE.search(sentence), _AT_HOME.search(sentence)
        plain = bool(here) != bool(home) and not re.search(r"\bnot\b", sentence)
        if plain and bool(here) != bool(surroundings["is_abroad"]):
            wrong.append(f"says to be {'abroad' if here else 'at home'}")
    return wrong


def _wrong_switches(sentence: str, device: dict[str, Any]) -> list[str]:
    wrong = []
    for pattern, name in _FACTS:
        for match in pattern.finditer(sentence):
            stated = match.group(1) in ("on", "enabled", "connected")
            if name == "roaming_enabled" and "on line" in sentence:
                continue
            if stated != bool(device[name]):
                wrong.append(f"says {match.group()!r}")
    if _NO_VPN.search(sentence) and device["vpn_connected"]:
        wrong.append("says that no VPN is connected")
    return wrong


def _wrong_measures(sentence: str, device: dict[str, Any], surroundings: dict[str, Any]) -> list[str]:
    wrong = []
    mbps, word = phone.speed(device, surroundings)
    for match in _SPEED.finditer(sentence):
        if (
            mbps is None
            or abs(float(match.group(1)) - mbps) > 1e-6
            or (match.group(2) or word.lower()) != word.lower()
        ):
            wrong.append(f"says a speed of {match.group()!r}")
    for match in _SIGNAL.finditer(sentence):
        stated = match.group(1) or "none"
        if stated != device["network_signal_strength"]:
            wrong.append(f"says {match.group()!r}")
    sim = phone.sim_status(device)
    for match in _SIM.finditer(sentence):
        stated = match.group(1) or "missing"
        if not sim.startswith(stated):
            wrong.append(f"says {match.group()!r}")
    for match in _MMS.finditer(sentence):
        if (match.group(1) == "can") != phone.can_send_mms(device, surroundings):
            wrong.append(f"says {match.group()!r}")
    return wrong


def claims_done(text: str) -> bool:
    """Whether a text says that a change was made."""
    low = text.lower()
    return _DONE.search(low) is not None and _NOT_DONE.search(low) is None


def revealed_fields(text: str, asked: str, instructions: Any, place: int) -> list[str]:
    """What a text tells of the customer's identity and place that the agent's last text did not ask for.

    Args:
        text (`str`): The customer's text.
        asked (`str`): The agent's last text.
        instructions (`dict` or `str`): The scenario.
        place (`int`): Place in the conversation.
    """
    known = str(instructions.get("known_info") or "") if isinstance(instructions, dict) else ""
    found = []
    number = re.search(r"\b\d{3}-\d{3}-\d{4}\b", known)
    question = asked.lower()
    if (
        number
        and number.group() in text
        and not re.search(r"\bnumber\b|\bidentif|\bwho\b|\blook (?:you|up)", question)
    ):
        found.append("the phone number")
    asked_place = re.search(
        r"\bwhere\b|\btravel|\babroad\b|\bhome\b|\blocation\b|\bcountry\b|\bname\b|\bnumber\b", question
    )
    if not asked_place and _names_place(known) and _names_place(text):
        found.append("the location")
    return found


def _names_place(text: str) -> bool:
    return (_WHERE.search(text.lower()) or _AT_HOME.search(text.lower())) is not None
