"""What an agent may ask a customer to do with the phone: words of a clause → tool, arguments, wanted state.

A target is a thing of the phone (airplane mode, SIM card, …). Whether a clause asks to look at it or to change it
follows from its verbs; a mere statement about it asks for nothing.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

Request = tuple[str, dict[str, Any], bool | None]
Found = tuple[int, str, dict[str, Any], bool | None]

SWITCHES = {  # target → (switch, look)
    r"(?:air|aero)plane[ -]?mode|flight mode": ("toggle_airplane_mode", "check_network_status"),
    r"data[ -]sav(?:er|ing)(?: mode)?": ("toggle_data_saver_mode", "check_data_restriction_status"),
    r"(?:data )?roaming": ("toggle_roaming", "check_network_status"),
    r"wi-?fi[ -]calling": ("toggle_wifi_calling", "check_wifi_calling_status"),
    r"wi-?fi(?![ -]calling)": ("toggle_wifi", "check_wifi_status"),
    r"(?:(?:mobile|cellular) )?data(?![ -](?:sav|roam|us(?:e|age)|restrict|plan|limit|refuel|connection|service))": (
        "toggle_data",
        "check_network_status",
    ),
}
SWITCH_VERB = re.compile(
    r"\b(turn(?:ing)?|switch(?:ing)?|toggl(?:e|ing)|enabl(?:e|ing)|disabl(?:e|ing)|(?:de)?activat(?:e|ing)|flip|"
    r"make sure|ensure)\b"
)
OFF = re.compile(r"\b(?:off|disabl(?:e|ed|ing)|deactivat(?:e|ed|ing))\b")
ON = re.compile(r"\b(?:on|enabl(?:e|ed|ing)|(?<!de)activat(?:e|ed|ing))\b")
LOOK = re.compile(
    r"\b(?:check|see|look|verify|confirm|tell|let me know|show me|report|read|find out|whether|have a look|inspect)\b"
)
MODES = ("4g_5g_preferred", "4g_only", "3g_only", "2g_only")
PERMISSIONS = ("sms", "storage", "phone", "network")
APPS = {"browser": r"\bbrowser\b", "messaging": r"\bmessag\w+\b"}
_PICTURE = r"(?:mms\b|(?:picture|photo|multimedia) messag\w+|(?:picture|photo)s?\b)"
_DISTANCE = r"[^,;]{0,40}?"


def app_in(text: str) -> str:
    """The app that a clause names; the messaging app where it names none."""
    return next((name for name, pattern in APPS.items() if re.search(pattern, text)), "messaging")


def mode_in(text: str) -> str | None:
    """The network mode that a clause names last, in the phone's spelling."""
    for mode in MODES:
        if mode in text:
            return mode
    _, _, wanted = text.rpartition(" to ")
    wanted = wanted if re.search(r"\dg", wanted) else text
    if "5g" in wanted:
        return "4g_5g_preferred"
    found = re.search(r"\b([234])g\b", wanted)
    return f"{found.group(1)}g_only" if found else None


def wanted_state(clause: str, start: int = 0, end: int | None = None) -> bool | None:
    """The state a clause wants for what stands in `clause[start:end]`: just behind it, else before it, else after."""
    end = len(clause) if end is None else end
    for part in (clause[end : end + 14], clause[:start], clause[end:]):
        off, on = _last(OFF, part), _last(ON, part)
        if off != on:
            return on > off
    return None


def _last(pattern: re.Pattern[str], text: str) -> int:
    return max((match.start() for match in pattern.finditer(text)), default=-1)


def requests_in(clause: str, question: bool) -> list[Found]:
    """What one clause asks for, with places.

    Args:
        clause (`str`): In lower case.
        question (`bool`): Whether its sentence ends with a question mark.
    """
    looks = question or LOOK.search(clause) is not None
    found: list[Found] = []
    for rule in (_switches, _vpn, _apn, _sim, _network, _apps, _picture_messages, _payment, _restart, _reads):
        found += rule(clause, looks)
    return sorted(found, key=lambda item: item[0])


def _switches(clause: str, looks: bool) -> Iterator[Found]:
    past = re.match(r"(?:did|have|has) you\b", clause)
    verb = None if past else SWITCH_VERB.search(clause)
    asked = re.search(r"\b(?:on|off|enabled|disabled|active|status|setting|state|using|use|connected)\b", clause)
    permission = "permission" in clause
    for target, (switch, look) in SWITCHES.items():
        match = re.search(rf"\b(?:{target})\b", clause)
        if match is None or permission or (switch == "toggle_data" and re.search(r"data\b.{0,12}\bspeed", clause)):
            continue
        if verb is not None and not (
            LOOK.search(clause[: verb.start()]) or clause[match.end() :].startswith(" settings")
        ):
            yield match.start(), switch, {}, wanted_state(clause, *match.span())
        elif looks and asked:
            yield match.start(), look, {}, None


def _vpn(clause: str, looks: bool) -> Iterator[Found]:
    match = re.search(r"\bvpn\b", clause)
    if match is None:
        return
    verb = re.search(r"\b(?:disconnect(?:ing)?|connect(?:ing)?|turn|switch|enable|disable|(?:de)?activate)\b", clause)
    if verb is None or re.match(r"(?:did|have|are|is) ", clause):
        if looks:
            yield match.start(), "check_vpn_status", {}, None
        return
    leaves = verb.group().startswith(("dis", "deac")) or wanted_state(clause, *match.span()) is False
    yield match.start(), "disconnect_vpn" if leaves else "connect_vpn", {}, None


def _apn(clause: str, looks: bool) -> Iterator[Found]:
    match = re.search(r"\bapn\b|access point|\bmmsc\b", clause)
    if match is None:
        return
    if re.search(r"\b(?:reset(?:ting)?|restore|restoring)\b", clause):
        yield match.start(), "reset_apn_settings", {}, None
    elif looks:
        yield match.start(), "check_apn_settings", {}, None


def _sim(clause: str, looks: bool) -> Iterator[Found]:
    match = re.search(r"\bsim\b", clause)
    again = re.search(r"\b(?:reseat(?:ing)?|re-?insert(?:ing)?)\b", clause)
    out = re.search(r"\b(?:take|taking|remov(?:e|ing)|eject|pull|pop|push|put|insert)\b", clause) if match else None
    if again or out:
        yield (again or out).start(), "reseat_sim_card", {}, None
    elif match and looks:
        yield match.start(), "check_sim_status", {}, None


def _network(clause: str, looks: bool) -> Iterator[Found]:
    kind = re.search(r"\b(?:network|preferred|preference|mode)\b", clause)
    if kind is None or "permission" in clause:
        return
    change = re.search(r"\b(?:set|setting|chang(?:e|ing)|switch|choose|select|prefer)\b", clause)
    mode = mode_in(clause)
    if change and mode and not re.search(r"\b(?:what|which|whether)\b", clause):
        yield change.start(), "set_network_mode_preference", {"mode": mode}, None
    elif looks and re.search(r"network[ -](?:mode|preference)|prefer", clause):
        yield kind.start(), "check_network_mode_preference", {}, None
    elif looks and re.search(r"network[ -](?:status|connection|type)|connect\w* to (?:a|the) network", clause):
        yield kind.start(), "check_network_status", {}, None


def _apps(clause: str, looks: bool) -> Iterator[Found]:
    listed = re.search(r"\b(?:installed apps|apps (?:are )?(?:installed|do you have)|list\w* .{0,20}apps)\b", clause)
    status = re.search(r"\bapp(?:'s)? status|status of the \w+ app\b", clause)
    permission = re.search(r"\bpermissions?\b|\baccess to\b|\bto access\b", clause)
    give = re.search(r"\b(?:grant(?:ing)?|giv(?:e|ing)|allow(?:ing)?|enabl(?:e|ing)|turn|switch|add)\b", clause)
    names = [name for name in PERMISSIONS if re.search(rf"\b{name}\b", clause)]
    if listed and looks:
        yield listed.start(), "check_installed_apps", {}, None
    elif status and looks:
        yield status.start(), "check_app_status", {"app_name": app_in(clause)}, None
    elif permission and give and names and not LOOK.search(clause[: give.start()]):
        for name in sorted(names, key=clause.index):
            arguments = {"app_name": app_in(clause), "permission": name}
            yield give.start(), "grant_app_permission", arguments, None
    elif permission and looks and not re.search(r"\bpermission to (?!access)", clause):
        yield permission.start(), "check_app_permissions", {"app_name": app_in(clause)}, None


def _picture_messages(clause: str, looks: bool) -> Iterator[Found]:
    match = re.search(rf"\bsend(?:ing)?\b{_DISTANCE}\b{_PICTURE}", clause)
    imperative = re.match(r"(?:please |now |then |kindly )*send\b|.*\b(?:try|attempt|test)\b", clause)
    if match and (looks or imperative):
        yield match.start(), "can_send_mms", {}, None


def _payment(clause: str, looks: bool) -> Iterator[Found]:
    pays = re.search(
        r"\b(?:mak(?:e|ing)|complet(?:e|ing)|submit|authori[sz]e) (?:the |a |this |that |your )?payment\b|"
        r"\baccept\b.{0,25}\brequest\b|\bapprove\b.{0,25}\b(?:request|payment)\b|"
        r"\bpay (?:it|the|your|this|that|now|for)\b",
        clause,
    )
    request = re.search(r"\bpayment request\b|\brequest (?:for|to) pay", clause)
    if pays and not re.match(r"(?:did|have) you\b", clause):
        yield pays.start(), "make_payment", {}, None
    elif request and looks:
        yield request.start(), "check_payment_request", {}, None


def _restart(clause: str, looks: bool) -> Iterator[Found]:
    match = re.search(r"(?<!a )(?<!the )(?<!next )\b(?:re-?start(?:ing)?|re-?boot(?:ing)?|power[- ]cycle)\b", clause)
    cycle = re.search(r"\b(?:turn|switch|power) (?:it|(?:your|the) (?:phone|device)) off\b", clause)
    asked = re.match(r"(?:did|have) you\b", clause)
    if (match or cycle) and not asked:
        yield (match or cycle).start(), "reboot_device", {}, None


def _reads(clause: str, looks: bool) -> Iterator[Found]:
    speed = re.search(r"\bspeed ?test\b|\b(?:test|measure|check)\b.{0,25}\bspeed\b", clause)
    does = re.search(r"\b(?:run|running|do|perform|repeat|start|try|take|conduct|test|measure|retry)\b", clause)
    if speed and (does or looks):
        yield speed.start(), "run_speed_test", {}, None
    bar = re.search(r"\bstatus bar\b|\btop of (?:the|your) screen\b", clause)
    signal = re.search(r"\b(?:any|a|the|what) signal\b|\bsignal (?:bars|strength)\b", clause)
    if (bar or signal) and looks and not speed:
        yield (bar or signal).start(), "check_status_bar", {}, None
    inbox = re.search(r"\b(?:notifications?|inbox)\b", clause)
    if inbox and re.search(r"\bdismiss\b|\bmark\b.{0,20}\bread\b", clause):
        named = re.search(r"\bnotif_\w+", clause)
        if named:
            yield inbox.start(), "dismiss_notification", {"notification_id": named.group()}, None
    elif inbox and looks:
        yield inbox.start(), "check_notifications", {}, None


Rule = Callable[[str, bool], Iterator[Found]]
