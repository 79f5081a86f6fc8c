"""From a Python signature to an OpenAI tool schema, and from a model's arguments to checked Python values.

The same annotations serve both: what the schema promises is what the check enforces, without casts (a model's adapter
casts text to numbers where it wants to; the world does not guess).
"""

import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, is_typeddict

Check = Callable[[Any, str], Any]


class ToolError(ValueError):
    """A call that the world refuses: it becomes a tool message with `error=true` and changes nothing."""


@dataclass(frozen=True)
class Signature:
    """The arguments of one function of a toolkit.

    Args:
        parameters (`dict[str, Check]`): Name → check, in the order of the function.
        required (`tuple[str, ...]`): Names without a default.
        schema (`dict`): JSON schema of the arguments object.
    """

    parameters: dict[str, Check]
    required: tuple[str, ...]
    schema: dict[str, Any] = field(repr=False)

    def bind(self, arguments: Any) -> dict[str, Any]:
        """Check a model's arguments.

        Raises:
            ToolError: If one is missing, unknown or of the wrong type.
        """
        if not isinstance(arguments, dict):
            raise ToolError(f"the arguments must be a JSON object, not {_kind(arguments)}")
        bound = {}
        for name, value in arguments.items():
            check = self.parameters.get(name)
            if check is None:
                known = ", ".join(self.parameters) or "none"
                raise ToolError(f"unknown argument {name!r}; the arguments are: {known}")
            bound[name] = check(value, name)
        missing = [name for name in self.required if name not in bound]
        if missing:
            raise ToolError(f"missing argument(s): {', '.join(missing)}")
        return bound


def signature_of(function: Callable) -> Signature:
    """Read a method's annotations and Google-style docstring; the first parameter (`self`) is left out."""
    hints = typing.get_type_hints(function, include_extras=True)
    described = argument_texts(function)
    checks, properties, required = {}, {}, []
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        schema, checks[name] = schema_and_check(hints[name])
        properties[name] = {**schema, "description": described.get(name, "")}
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            properties[name]["default"] = parameter.default
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Signature(checks, tuple(required), schema)


def summary(function: Callable) -> str:
    """What a function does: its docstring up to the first section."""
    return re.split(r"\n\s*(?:Args|Returns|Raises):", inspect.getdoc(function) or "")[0].strip().replace("\n", " ")


def argument_texts(function: Callable) -> dict[str, str]:
    """Argument → its text in the docstring's `Args:` section."""
    section = re.search(r"Args:\n(.*?)(?:\n\S|\Z)", inspect.getdoc(function) or "", re.S)
    texts: dict[str, str] = {}
    name = None
    for line in section.group(1).split("\n") if section else ():
        entry = re.match(r" {4}(\w+): (.*)", line)
        if entry:
            name, text = entry.groups()
            texts[name] = text.strip()
        elif name and line.strip():
            texts[name] += " " + line.strip()
    return texts


def schema_and_check(hint: Any) -> tuple[dict[str, Any], Check]:
    """JSON schema and check of one annotation.

    Raises:
        TypeError: If the annotation is none of those that tools use.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _SIMPLE:
        return dict(_SIMPLE[hint][0]), _SIMPLE[hint][1]
    if origin is Literal:
        return {"type": "string", "enum": list(parts)}, _one_of(parts)
    if origin is list:
        schema, check = schema_and_check(parts[0])
        return {"type": "array", "items": schema}, _list_of(check)
    if origin in (Union, types.UnionType) and len(parts) == 2 and parts[1] is type(None):
        schema, check = schema_and_check(parts[0])
        return {"anyOf": [schema, {"type": "null"}]}, lambda value, name: None if value is None else check(value, name)
    if origin is dict or hint is dict:
        return {"type": "object"}, _mapping
    if is_typeddict(hint):
        return _record(hint)
    raise TypeError(
        f"a tool's argument is annotated {hint!r}; use str, int, float, bool, Literal, list or a TypedDict"
    )


def _record(hint: Any) -> tuple[dict[str, Any], Check]:
    properties, checks = {}, {}
    for key, part in typing.get_type_hints(hint, include_extras=True).items():
        inner = get_args(part)[0] if get_origin(part) in (NotRequired, Required) else part
        properties[key], checks[key] = schema_and_check(inner)
    required = [key for key in properties if key in hint.__required_keys__]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    fields = Signature(checks, tuple(required), schema)

    def check(value: Any, name: str) -> dict[str, Any]:
        try:
            return fields.bind(value)
        except ToolError as error:
            raise ToolError(f"{name}: {error}") from None

    return schema, check


def _kind(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _wrong(name: str, value: Any, wanted: str) -> ToolError:
    return ToolError(f"{name} must be {wanted}, not {_kind(value)} ({value!r:.80})")


def _text(value: Any, name: str) -> str:
    if type(value) is not str:
        raise _wrong(name, value, "text")
    return value


def _flag(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise _wrong(name, value, "true or false")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or value != value or value in (float("inf"), float("-inf")):
        raise _wrong(name, value, "a finite number")
    try:
        return float(value)
    except OverflowError:
        raise ToolError(f"{name} is too large") from None


def _whole(value: Any, name: str) -> int:
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    raise _wrong(name, value, "a whole number")


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _wrong(name, value, "an object")
    return value


def _list_of(check: Check) -> Check:
    def check_list(value: Any, name: str) -> list[Any]:
        if type(value) is not list:
            raise _wrong(name, value, "a list")
        return [check(item, f"{name}[{index}]") for index, item in enumerate(value)]

    return check_list


def _one_of(allowed: tuple[str, ...]) -> Check:
    def check_member(value: Any, name: str) -> str:
        if value not in allowed or type(value) is not str:
            raise ToolError(f"{name} must be one of {', '.join(allowed)}, not {value!r:.80}")
        return value

    return check_member


_SIMPLE: dict[Any, tuple[dict[str, str], Check]] = {
    str: ({"type": "string"}, _text),
    bool: ({"type": "boolean"}, _flag),
    int: ({"type": "integer"}, _whole),
    float: ({"type": "number"}, _number),
}
