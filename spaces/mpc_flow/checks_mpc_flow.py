"""Arguments of the page's functions: what is allowed, and how a person hears of what is not."""

import functools
import math
from collections.abc import Callable
from typing import Any

import gradio as gr

MAX_SEED = 2**31 - 1
LOG10_LAM_RANGE = (-1.0, 3.0)


def readable(function: Callable) -> Callable:
    """Show a `ValueError`, which names what is wrong, as a message in the page."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise gr.Error(str(error).replace("`", ""), print_exception=False) from error

    return wrapper


def check_number(name: str, value: Any, low: float, high: float, whole: bool = False) -> float:
    """Return `value` if it is a finite number in [low, high], else raise `ValueError` that says so."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (whole and value != int(value)):
        low, high = (int(bound) if bound == int(bound) else bound for bound in (low, high))
        raise ValueError(f"{name} must be a {'whole ' * whole}number from {low} to {high}, got {value!r}.")
    return int(value) if whole else float(value)


def check_choice(name: str, value: Any, choices: Any) -> Any:
    """Return `choices[value]`, or raise `ValueError` that lists them."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
    return choices[value]


def choices(options: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, key) pairs of options that are labels, begin with one, or have one as `label`."""
    labels = {key: option[0] if isinstance(option, tuple) else option for key, option in options.items()}
    return [(getattr(label, "label", label), key) for key, label in labels.items()]
