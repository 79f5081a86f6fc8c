"""State hashes: canonical JSON and its SHA-256, so that 25 and 25.0, or two key orders, are one state."""

import hashlib
import json
import math
from datetime import date, datetime
from enum import Enum
from typing import Any


def canonical_json(value: Any) -> str:
    """Write a JSON-like value in the one form that equal values share.

    Keys are sorted, there are no spaces, text stays UTF-8, enums become their values, dates ISO text, tuples lists,
    and floats with an integral value integers. The order of lists is kept.

    Args:
        value (`Any`): Dictionaries with text keys, lists, tuples, text, numbers, booleans, `None`, dates, enums.

    Returns:
        `str`: The canonical text.

    Raises:
        ValueError: If a number is NaN or infinite.
        TypeError: If a value has no JSON form.
    """
    return json.dumps(_normalized(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def state_hash(value: Any) -> str:
    """SHA-256 (64 hexadecimal digits) of the canonical JSON of `value`.

    >>> state_hash({"b": 1.0, "a": []}) == state_hash({"a": (), "b": 1})
    True
    """
    return text_hash(canonical_json(value))


def text_hash(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _normalized(value: Any) -> Any:
    if isinstance(value, Enum):
        return _normalized(value.value)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"a state holds {value}; only finite numbers can be hashed")
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"a state has the key {wrong[0]!r}; keys must be text")
        return {key: _normalized(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normalized(item) for item in value]
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    raise TypeError(f"a state holds a {type(value).__name__}, which has no JSON form")
