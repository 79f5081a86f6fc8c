"""Which of the customer's tools a text of the agent asks for.

First the tools that the text names exactly, with or without arguments, then the words of each sentence; negated,
finished and postponed things, and what the agent says of itself, ask for nothing.

>>> parse("Reset the APN settings, then restart your phone.")
[('reset_apn_settings', {}, None), ('reboot_device', {}, None)]
>>> parse("Please turn off Airplane Mode.")
[('toggle_airplane_mode', {}, False)]
"""

import ast
import json
import re
from functools import lru_cache
from typing import Any

from hf_pipelines.tau2_bench.schema import Signature
from hf_pipelines.tau2_bench.users.requests import PERMISSIONS, Request, app_in, mode_in, requests_in, wanted_state

MAX_TEXT, MAX_ARGUMENTS = 20_000, 600
SENTENCE = re.compile(r"(?<=[.!?;:\n])\s+|\n+")
CLAUSE = re.compile(
    r",\s*|\bbut\b|\b(?:and )?then\b|\band (?=(?:please |also )*(?:turn|switch|toggle|enable|disable|activate|restart|"
    r"reboot|reset|check|run|set|disconnect|connect|grant|give|allow|try|look|open|make|pay|tell|let|put|send)\b)|"
    r"(?=\b(?:after|once|when|because|since|as soon as|so that|before|until)\b)"
)
SUBORDINATE = re.compile(r"(?:after|once|when|because|since|as soon as|so that|before|until|if|unless)\b")
NEGATION = re.compile(
    r"\b(?:do(?:es)? ?n[o'’]t|don['’]t|need ?n[o'’]t|no need|(?:can|could|should|must|may|is|are|have|has) ?n['’]?o?t|"
    r"cannot|never|without|instead of|avoid|not necessary|rather than)\b"
)
PUT_OFF = re.compile(r"\b(?:already|later|next time|in a moment|afterwards)\b")
OWN_ACT = re.compile(r"(?:and |so |now |okay |ok |great |thanks |please )*(?:i|we|let me)\b(?!['’]d like you)")
ASKS_YOU = re.compile(r"\b(?:you to|ask you|please|like you|need you|want you|recommend|suggest|you could)\b")
CONSENT = re.compile(
    r"\b(?:are you willing|would you like|do you (?:agree|want|accept|consent)|is it ok(?:ay)?|"
    r"(?:may|can|shall|should) (?:i|we)|would (?:it|that) be|are you (?:fine|ok(?:ay)?|happy)|do i have)\b"
)


def parse(text: str) -> list[tuple[str, dict[str, Any], bool | None]]:
    """What the agent asks the customer to do.

    Args:
        text (`str`): A message of the agent.

    Returns:
        `list[tuple[str, dict, bool | None]]`: Tool, arguments, and, for a switch, the wanted state (`None` where the
        text leaves it open), in the order of the text, each once.
    """
    text, named = _take_names(text[:MAX_TEXT])
    requests: list[Request] = []
    for sentence in SENTENCE.split(text):
        question = sentence.rstrip().endswith("?")
        plain = re.sub(r"if you have(?:n['’]t| not)(?: done so)?(?: yet)? already", "", sentence.lower())
        has_names = "\x00" in plain
        for clause in _clauses(plain):
            found = _named_in(clause, named) if has_names else [item[1:] for item in requests_in(clause, question)]
            requests += [request for request in found if request not in requests]
    return requests


def _clauses(sentence: str) -> list[str]:
    """The parts of a sentence that can ask for something, without what is negated, put off or the agent's own."""
    kept = []
    for part in CLAUSE.split(sentence):
        clause = part.strip(" \t.!?;:\"'*-()")
        if not clause or SUBORDINATE.match(clause) or PUT_OFF.search(clause) or CONSENT.search(clause):
            continue
        if OWN_ACT.match(clause) and not ASKS_YOU.search(clause):
            continue
        clause = NEGATION.split(clause)[0].strip()
        if clause:
            kept.append(clause)
    return kept


# ------------------------------------------------------------------------------------------------------ exact names


@lru_cache(maxsize=1)
def _tools() -> dict[str, Signature]:
    """The customers' tools of all domains that have some."""
    from hf_pipelines.tau2_bench.domains import PACKAGED, get_domain

    kits = [get_domain(name).user_toolkit for name in PACKAGED]
    return {name: function.signature for kit in kits if kit is not None for name, function in kit.tools().items()}


@lru_cache(maxsize=1)
def _name_pattern() -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)({'|'.join(sorted(_tools(), key=len, reverse=True))})(?!\w)")


def _take_names(text: str) -> tuple[str, list[tuple[str, dict[str, Any] | None]]]:
    """Put a mark in the place of each exact name with its arguments; returns the text and what was taken."""
    taken: list[tuple[str, dict[str, Any] | None]] = []
    pieces, place = [], 0
    for match in _name_pattern().finditer(text):
        if match.start() < place:
            continue
        arguments, end = _arguments_at(text, match.end(), match.group())
        pieces.append(f"{text[place : match.start()]} \x00{len(taken)}\x00 ")
        taken.append((match.group(), arguments))
        place = end
    return "".join(pieces) + text[place:], taken


def _arguments_at(text: str, place: int, tool: str) -> tuple[dict[str, Any] | None, int]:
    """The arguments that follow a name, `(mode="x")`, `({"mode": "x"})` or ` {"mode": "x"}`, and where they end."""
    rest = text[place : place + MAX_ARGUMENTS]
    opening = re.match(r"[`*]*\s*(?:with |arguments |args |:)*\s*([({])", rest)
    if opening is None:
        return None, place
    start = opening.start(1)
    depth, quote = 0, None
    for index in range(start, len(rest)):
        sign = rest[index]
        if quote:
            quote = None if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth == 0:
                return _read_arguments(rest[start : index + 1], tool), place + index + 1
    return None, place


def _read_arguments(text: str, tool: str) -> dict[str, Any] | None:
    inner = text[1:-1].strip() if text.startswith("(") else text
    if not inner:
        return {}
    if inner.startswith("{"):
        try:
            value = json.loads(inner)
            return value if isinstance(value, dict) else None
        except (ValueError, RecursionError):
            pass
    try:
        call = ast.parse(f"f({inner})", mode="eval").body
        names = list(_tools()[tool].parameters)
        values = {names[place]: ast.literal_eval(item) for place, item in enumerate(call.args)}
        values.update({item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg})
    except (SyntaxError, ValueError, IndexError, TypeError, AttributeError, RecursionError, MemoryError):
        return None
    if list(values) == names[:1] and isinstance(values[names[0]], dict) and values[names[0]].keys() <= set(names):
        return values[names[0]]
    return values


def _named_in(clause: str, named: list[tuple[str, dict[str, Any] | None]]) -> list[Request]:
    found: list[Request] = []
    for match in re.finditer("\x00(\\d+)\x00", clause):
        tool, arguments = named[int(match.group(1))]
        wanted = wanted_state(clause, *match.span()) if tool.startswith("toggle_") else None
        choices = [arguments] if arguments else _arguments_from_words(tool, clause)
        found += [(tool, choice, wanted) for choice in choices]
    return found


def _arguments_from_words(tool: str, clause: str) -> list[dict[str, Any]]:
    """Arguments for a tool that was named without them; none at all where the words do not give them."""
    required = _tools()[tool].required
    if not required:
        return [{}]
    if tool == "set_network_mode_preference":
        mode = mode_in(clause)
        return [{"mode": mode}] if mode else []
    if tool in ("check_app_permissions", "check_app_status"):
        return [{"app_name": app_in(clause)}]
    if tool == "grant_app_permission":
        names = [name for name in PERMISSIONS if re.search(rf"\b{name}\b", clause)]
        return [{"app_name": app_in(clause), "permission": name} for name in names]
    if tool == "dismiss_notification":
        notification = re.search(r"\bnotif_\w+", clause)
        return [{"notification_id": notification.group()}] if notification else []
    return []
