"""Tool calls in the text of a language model: the notations of open models, tried in order. Text is data, never code.

| notation | example |
| --- | --- |
| tagged JSON | `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>` (repeats) |
| tagged function | `<function=f><parameter=a>1</parameter></function>` |
| bracket tag | `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]` |
| JSON | a bare or fenced object or list with `name` and `arguments` or `parameters` |
| call list | `[f(a=1), g()]` |
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_pipelines.tau2_bench.players import MalformedOutput

THINK = re.compile(r"<(think|thinking|reasoning)>(.*?)(?:</\1>|\Z)", re.S | re.I)
LATE_THINK = re.compile(r"\A(.*?)</(?:think|thinking|reasoning)>", re.S | re.I)  # the template opened it in the prompt
MAX_LENGTH = 100_000


@dataclass
class Parsed:
    """A model's output in parts.

    Args:
        content (`str`, *optional*): Text for the other side.
        tool_calls (`list[dict]`): `{"name", "arguments"}` each.
        reasoning (`str`, *optional*): Thoughts, which nobody else sees.
    """

    content: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str | None = None


def parse_output(text: str, tools: Sequence[dict[str, Any]] | None = None) -> Parsed:
    """Split a model's output into text, calls and reasoning.

    Args:
        text (`str`): Decoded output.
        tools (`Sequence[dict]`, *optional*): OpenAI schemas. Untagged notations (JSON, call lists) count as calls only
            for these names, and arguments are cast to their types.

    Raises:
        MalformedOutput: If a tagged call cannot be read, so that the model can be told why.
    """
    content, reasoning = split_reasoning(text[:MAX_LENGTH])
    names = {tool["function"]["name"] for tool in tools or ()}
    for parser in _PARSERS:
        found = parser(content, names)
        if found is not None:
            calls, rest = found
            calls = [cast_call(call, tools) for call in calls]
            return Parsed(rest.strip() or None, calls, reasoning)
    return Parsed(content.strip() or None, [], reasoning)


def split_reasoning(text: str) -> tuple[str, str | None]:
    """The text without its thoughts, and the thoughts."""
    thoughts = []
    late = LATE_THINK.match(text)
    if late and not THINK.search(late.group(1)) and "<think" not in late.group(1).lower():
        thoughts.append(late.group(1))
        text = text[late.end() :]
    thoughts += [match.group(2) for match in THINK.finditer(text)]
    joined = "\n".join(part.strip() for part in thoughts if part.strip())
    return THINK.sub("", text), joined or None


Found = tuple[list[dict[str, Any]], str] | None


def _tagged_json(text: str, names: set[str]) -> Found:
    if "<tool_call>" not in text:
        return None
    calls, rest, place = [], "", 0
    for match in re.finditer(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", text, re.S):
        rest += text[place : match.start()]
        place = match.end()
        inner = match.group(1).strip()
        functions = _functions(inner)
        calls += functions if functions else _calls_of(_json(inner, "<tool_call>"), "<tool_call>")
    return calls, rest + text[place:]


def _functions(text: str) -> list[dict[str, Any]]:
    calls = []
    for match in re.finditer(r"<function=([^>\s]+)\s*>(.*?)(?:</function>|(?=<function=)|\Z)", text, re.S):
        parameters = re.findall(
            r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", match.group(2), re.S
        )
        body = match.group(2).strip()
        arguments: Any = dict(parameters)
        if not parameters and body.startswith("{"):
            arguments = _json(body, "<function=…>")
        calls.append({"name": match.group(1), "arguments": arguments})
    return calls


def _tagged_function(text: str, names: set[str]) -> Found:
    if "<function=" not in text:
        return None
    rest = re.sub(r"<function=[^>\s]+\s*>.*?(?:</function>|(?=<function=)|\Z)", "", text, flags=re.S)
    return _functions(text), rest


def _bracket_tag(text: str, names: set[str]) -> Found:
    before, tag, after = text.partition("[TOOL_CALLS]")
    if not tag:
        return None
    after = after.strip()
    named = re.match(r"([\w.-]+)\s*(?:\[CALL_ID\]\S+?)?(?:\[ARGS\])?\s*(\{)", after)  # name[ARGS]{…}, repeated
    if named:
        calls = []
        for part in re.split(r"\[TOOL_CALLS\]", after):
            head = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[{]+)?(?:\[ARGS\])?\s*", part)
            if head is None:
                raise MalformedOutput(f"the call {part!r:.80} could not be read; write name[ARGS]{{…}}")
            calls.append({"name": head.group(1), "arguments": _first_json(part[head.end() :], "[TOOL_CALLS]")[0]})
        return calls, before
    value, end = _first_json(after, "[TOOL_CALLS]")
    return _calls_of(value, "[TOOL_CALLS]"), before + after[end:]


def _plain_json(text: str, names: set[str]) -> Found:
    fenced = re.search(r"```(?:json|tool_call|tool_code)?\s*\n?(.*?)```", text, re.S)
    candidates = [(fenced.group(1).strip(), fenced.span())] if fenced else []
    stripped = text.strip()
    for opening in ("{", "["):
        place = stripped.find(opening)
        if place >= 0:
            candidates.append((stripped[place:], None))
    for candidate, span in candidates:
        try:
            value, end = json.JSONDecoder().raw_decode(candidate)
        except (ValueError, RecursionError):
            continue
        calls = _recognised(value, names)
        if calls:
            rest = text[: span[0]] + text[span[1] :] if span else stripped.replace(candidate[:end], "", 1)
            return calls, rest
    return None


def _recognised(value: Any, names: set[str]) -> list[dict[str, Any]]:
    """Calls of known tools; nothing where any item is none."""
    items = value if isinstance(value, list) else [value]
    try:
        calls = _calls_of(items, "")
    except MalformedOutput:
        return []
    return calls if calls and all(call["name"] in names for call in calls) else []


def _call_list(text: str, names: set[str]) -> Found:
    stripped = re.sub(r"^```\w*\s*|\s*```$", "", text.strip())
    if not re.match(r"\[?\s*[A-Za-z_]\w*\(", stripped) or len(stripped) > 5000:
        return None
    source = stripped if stripped.startswith("[") else f"[{stripped}]"
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = []
    for item in tree.elts if isinstance(tree, ast.List) else ():
        if not (isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id in names):
            return None
        if item.args or any(word.arg is None for word in item.keywords):
            return None
        try:
            arguments = {word.arg: ast.literal_eval(word.value) for word in item.keywords}
            json.dumps(arguments)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
        calls.append({"name": item.func.id, "arguments": arguments})
    return (calls, "") if calls else None


_PARSERS: tuple[Callable[[str, set[str]], Found], ...] = (
    _tagged_json,
    _tagged_function,
    _bracket_tag,
    _plain_json,
    _call_list,
)


# ------------------------------------------------------------------------------------------------------------ parts


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedOutput(f"the JSON in {where} could not be read ({error}); write it again") from None


def _first_json(text: str, where: str) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text.strip())
    except (ValueError, RecursionError) as error:
        raise MalformedOutput(f"the JSON after {where} could not be read ({error}); write it again") from None


def _calls_of(value: Any, where: str) -> list[dict[str, Any]]:
    calls = []
    for item in value if isinstance(value, list) else [value]:
        inner = item.get("function", item) if isinstance(item, dict) else item
        if isinstance(inner, str) and isinstance(item, dict):  # {"function": "name", "arguments": …}
            inner = {**item, "name": inner}
        name = inner.get("name") if isinstance(inner, dict) else None
        if not isinstance(name, str):
            raise MalformedOutput(f"a call in {where} must be an object with name and arguments, not {item!r:.80}")
        if not where and not ({"arguments", "parameters"} & inner.keys()):
            raise MalformedOutput("no arguments")
        arguments = inner.get("arguments", inner.get("parameters", {}))
        calls.append({"name": name, "arguments": {} if arguments is None else arguments})
    return calls


def cast_call(call: dict[str, Any], tools: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """A call with arguments cast to the types of its tool's schema ("2" → 2.0 for a number); what does not fit stays.

    Args:
        call (`dict`): `{"name", "arguments"}`; arguments may be the JSON text of an object.
        tools (`Sequence[dict]`, *optional*): OpenAI schemas.
    """
    arguments = call["arguments"]
    if isinstance(arguments, str):
        try:
            loaded = json.loads(arguments or "{}")
            arguments = loaded if isinstance(loaded, dict) else arguments
        except (ValueError, RecursionError):
            pass
    schema = next((t["function"] for t in tools or () if t["function"]["name"] == call["name"]), None)
    properties = (schema or {}).get("parameters", {}).get("properties", {})
    if isinstance(arguments, dict):
        arguments = {str(key): _cast(value, properties.get(key) or {}) for key, value in arguments.items()}
    return {**call, "arguments": arguments}


def _cast(value: Any, schema: dict[str, Any]) -> Any:
    if "anyOf" in schema:
        options = schema["anyOf"]
        if value is None or (isinstance(value, str) and value.strip().lower() in ("null", "none")):
            return None if any(option.get("type") == "null" for option in options) else value
        return _cast(value, next((option for option in options if option.get("type") != "null"), {}))
    kind = schema.get("type")
    if not isinstance(value, str):
        return str(value) if kind == "string" and type(value) in (int, float) else value
    text = value.strip()
    try:
        if kind == "integer":
            return int(text)
        if kind == "number":
            number = float(text)
            return number if number - number == 0 else value
        if kind == "boolean" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in ("object", "array"):
            loaded = json.loads(text)
            return loaded if isinstance(loaded, {"object": dict, "array": list}[kind]) else value
    except (ValueError, RecursionError):
        pass
    return value
