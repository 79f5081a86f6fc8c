"""Arguments of the page's functions: what is allowed, and how a person hears of what is not."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import gradio as gr

MAX_SEED = 2**31 - 1
WINDOW_RANGE = (1, 64)
FACTS_RANGE = (1, 16)
BUCKETS_RANGE = (1, 4)
CONTEXT_RANGE = (48, 2048)
SEQUENCES_RANGE = (8, 64)
INSIDE_RANGE = (16, 240)
SECONDS_RANGE = (1, 20)
SLOTS = ("4", "8", "16", "32")
POLICIES = {"all": "all buckets", "fixed": "the n best buckets", "adaptive": "adaptive: the model decides per token"}


def readable(function: Callable) -> Callable:
    """Show a `ValueError`, which names what is wrong, as a message in the page."""

    def error_of(error: ValueError) -> gr.Error:
        return gr.Error(str(error).replace("`", ""), print_exception=False)

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def stepwise(*args, **kwargs):
            try:
                yield from function(*args, **kwargs)
            except ValueError as error:
                raise error_of(error) from error

        return stepwise

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise error_of(error) from error

    return wrapper


def check_number(name: str, value: Any, low: float, high: float, whole: bool = False) -> float:
    """Return `value` if it is a finite number in [low, high], else raise `ValueError` that says so."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (whole and value != int(value)):
        raise ValueError(f"{name} must be a {'whole ' * whole}number from {low:g} to {high:.0f}, got {value!r}.")
    return int(value) if whole else float(value)


def check_choice(name: str, value: Any, choices: Any) -> str:
    """Return `value`, or raise `ValueError` that lists the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
    return value


def check_reading(slots: Any, policy: Any, buckets: Any) -> tuple[int, str, int]:
    """Number of slots, read policy and its number of buckets, or `ValueError`."""
    return (
        int(check_choice("The number of slots", slots, SLOTS)),
        check_choice("The read policy", policy, POLICIES),
        check_number("The number of buckets", buckets, *BUCKETS_RANGE, whole=True),
    )


def choices(options: dict[str, str]) -> list[tuple[str, str]]:
    """(label, key) pairs of options."""
    return [(label, key) for key, label in options.items()]
