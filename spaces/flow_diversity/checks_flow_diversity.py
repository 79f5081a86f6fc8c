"""Arguments of the page's functions: what is allowed, and how a person hears of what is not."""

import functools
import math
from collections.abc import Callable
from typing import Any

import gradio as gr

MAX_SEED = 2**31 - 1
MAX_IMAGES = 16
STEPS_RANGE = (2, 60)
GAMMA_RANGE = (0.0, 12.0)
LOG10_TAU_RANGE = (-1.0, 3.0)
BETA_RANGE = (0.0, 1.0)


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


def check_sampling(num_images: Any, steps: Any, seed: Any) -> tuple[int, int, int]:
    """Number of images, steps and seed, all whole numbers within bounds, or `ValueError`."""
    return (
        check_number("The number of images", num_images, 1, MAX_IMAGES, whole=True),
        check_number("The number of steps", steps, *STEPS_RANGE, whole=True),
        check_number("The seed", seed, 0, MAX_SEED, whole=True),
    )


def check_control(gamma0: Any, gate_low: Any, gate_high: Any, log10_tau: Any, beta0: Any, project: Any) -> dict:
    """Arguments of the controller from those of the page, or `ValueError` that names what is wrong."""
    gate = tuple(check_number("An end of the gate", end, 0, 1) for end in (gate_low, gate_high))
    if not gate[0] < gate[1]:
        raise ValueError(f"The gate's lower end must be below its upper end, got {gate[0]:g} and {gate[1]:g}.")
    if not isinstance(project, bool):
        raise ValueError(f"The projection must be on (true) or off (false), got {project!r}.")
    return {
        "gamma0": check_number("The strength γ₀", gamma0, *GAMMA_RANGE),
        "gate": gate,
        "tau": 10 ** check_number("log₁₀ τ", log10_tau, *LOG10_TAU_RANGE),
        "beta0": check_number("The noise β₀", beta0, *BETA_RANGE),
        "ortho": float(project),
    }


def choices(options: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, key) pairs of options that are labels or have one as `label`."""
    return [(getattr(option, "label", option), key) for key, option in options.items()]
