"""Arguments of the page's functions: what is allowed, and how a person hears of what is not."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import gradio as gr

MAX_SEED = 2**31 - 1


def readable(function: Callable) -> Callable:
    """Show a `ValueError`, which names what is wrong, as a message in the page."""

    def message(error: ValueError) -> gr.Error:
        return gr.Error(str(error).replace("`", ""), print_exception=False)

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def steps(*args, **kwargs):
            try:
                yield from function(*args, **kwargs)
            except ValueError as error:
                raise message(error) from error

        return steps

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise message(error) from error

    return call


def check_number(name: str, value: Any, low: float, high: float, whole: bool = False) -> float:
    """Return `value` if it is a finite number in [low, high], else raise `ValueError` that says so."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{name} must be {kind} from {_short(low)} to {_short(high)}, got {shown(value)}.")
    return int(value) if whole else float(value)


def _short(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def shown(value: Any) -> str:
    """A value as a message quotes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_seed(value: Any) -> int:
    """Return a seed, or raise `ValueError`."""
    return check_number("The seed", value, 0, MAX_SEED, whole=True)


def check_choice(name: str, value: Any, options: Iterable[str]) -> str:
    """Return `value`, or raise `ValueError` that lists the options."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}; got {shown(value)}.")
    return value


def check_choices(
    name: str, values: Any, options: Iterable[str], least: int = 0, most: int | None = None
) -> list[str]:
    """Return the distinct `values` in the order of the options, or raise `ValueError` that says what is allowed."""
    most = len(list(options)) if most is None else most
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} must be a list of {', '.join(options)}; got {shown(values)}.")
    for value in values:
        check_choice(f"Each of {name[0].lower()}{name[1:]}", value, options)
    chosen = [option for option in options if option in values]
    if not least <= len(chosen) <= most:
        wanted = f"at least {least}" if len(chosen) < least else f"at most {most} at a time"
        raise ValueError(f"{name} must be {wanted}, got {len(chosen)}.")
    return chosen


def check_switch(name: str, value: Any) -> bool:
    """Return a truth value, or raise `ValueError`."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}.")
    return value


def choices(options: dict[str, str]) -> list[tuple[str, str]]:
    """(label, key) pairs of options."""
    return [(label, key) for key, label in options.items()]
