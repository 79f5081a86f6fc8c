"""Where the error of a fitted value comes from, and how large samples should be (Theorem 1 of arXiv 2509.20239)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .dynamic_programming_krr_soc import ValueFunction, generator_of
from .samplers_krr_soc import InnerSampler

Reference = Callable[[int, torch.Tensor], torch.Tensor]  # (t, states (n, state_dim)) → V_t (n,)
EXACT_1D, EXACT = 64, 4096  # points of the accurate average: Gauss–Hermite in one dimension, shifted Sobol else
ROWS = 262_144


@dataclass
class ErrorDecomposition:
    """Mean squared errors at a date under the law of the states, in squared currency.

    Args:
        regression (`float`): I_eff = ‖Ŵ_t − T_t Ŵ_{t+1}‖².
        monte_carlo (`float`): II = ‖T̃_t Ŵ_{t+1} − T_t Ŵ_{t+1}‖², of the M samples of the inner average.
        propagation (`float`, *optional*): III = ‖T_t Ŵ_{t+1} − T_t V_{t+1}‖²; needs a reference.
        total (`float`, *optional*): E_t = ‖Ŵ_t − V_t‖²; needs a reference.
    """

    regression: float
    monte_carlo: float
    propagation: float | None = None
    total: float | None = None


class _KnownValue(ValueFunction):
    """A value function given by a formula, to put through the same Bellman operator."""

    def __init__(self, function: ValueFunction, reference: Reference):
        super().__init__(function.problem, function.settings, function.features, {})
        self.reference = reference

    def value(self, t: int, x: torch.Tensor) -> torch.Tensor:
        return self.reference(t, x)


def bellman(
    function: ValueFunction, t: int, x: torch.Tensor, sampler: InnerSampler, generator: torch.Generator
) -> torch.Tensor:
    """T_t Ŵ_{t+1}(x) = max_u {F_t(x, u) + γ_t · average of Ŵ_{t+1}}, (n,), in blocks of bounded memory.

    Args:
        function (`ValueFunction`): Ŵ.
        t (`int`): Date.
        x (`torch.Tensor`): (n, state_dim).
        sampler (`InnerSampler`): Of the average.
        generator (`torch.Generator`): Its randomness.
    """
    parts = [
        function.best(t, rows, function.action_values(t, rows, sampler, generator))
        for rows in x.split(max(1, ROWS // sampler.count))
    ]
    return torch.cat(parts)


@torch.no_grad()
def error_decomposition(
    model: Any, t: int, n_eval: int = 500, reference: Reference | None = None, seed: int = 0
) -> ErrorDecomposition:
    """Measure the three terms of Theorem 1 on fresh states.

    Args:
        model ([`KrrSocModel`]): Fitted.
        t (`int`): Date, 1 … N − 1.
        n_eval (`int`, defaults to 500): Fresh states.
        reference (`Callable`, *optional*): (t, states) → V_t, the true value.
        seed (`int`, defaults to 0): Of states and noise.

    Returns:
        [`ErrorDecomposition`].

    Raises:
        ValueError: No such date, or fewer than two states.
    """
    config = model.config
    if not isinstance(t, int) or not 1 <= t < config.n_steps:
        raise ValueError(f"t={t!r} must be a date 1 … {config.n_steps - 1}.")
    if n_eval < 2:
        raise ValueError(f"n_eval={n_eval} must be at least 2.")
    function = model.value_function()
    problem, unit = function.problem, model.unit  # computed in multiples of the unit, reported in currency
    like = model.centers
    x = problem.sample_states(t, n_eval, generator_of(seed, "evaluation", t, device=like.device))
    one = problem.noise_dim == 1
    exact = InnerSampler("gauss_hermite" if one else "qmc", EXACT_1D if one else EXACT, problem.noise_dim, seed, like)
    name = "qmc" if config.sampler == "exact" else config.sampler
    few = InnerSampler(name, config.n_inner, problem.noise_dim, seed, like, config.shared_noise)

    def apply(values: ValueFunction, sampler: InnerSampler) -> torch.Tensor:
        return unit * bellman(values, t, x, sampler, generator_of(seed, "evaluation", t, 1, device=like.device))

    fitted, target = unit * function.value(t, x), apply(function, exact)
    out = ErrorDecomposition(_mean_square(fitted - target), _mean_square(apply(function, few) - target))
    if reference is not None:

        def scaled(date: int, states: torch.Tensor) -> torch.Tensor:
            return reference(date, model.unscale(states)) / unit

        out.propagation = _mean_square(target - apply(_KnownValue(function, scaled), exact))
        out.total = _mean_square(fitted - reference(t, model.unscale(x)))
    return out


def suggest_budget(n: int, beta: float = 1.0) -> tuple[float, int]:
    """λ and M that balance the terms of the error bound for n states, with unit constants.

    λ = n^{−1/(β+1)} and M = n^{β/(β+1)}; the bound is then of order n^{−β/(β+1)}.

    Args:
        n (`int`): States a date.
        beta (`float`, defaults to 1): Source condition in (0, 1]; 1: the target lies in the kernel's space.

    Returns:
        `tuple[float, int]`: λ and M.

    Raises:
        ValueError: n < 1 or β outside of (0, 1].
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1.")
    if not 0 < beta <= 1:
        raise ValueError(f"beta={beta} must be in (0, 1].")
    return n ** (-1 / (beta + 1)), math.ceil(n ** (beta / (beta + 1)) - 1e-9)


def propagation_constant(problem: Any) -> float:
    """c_P = e^{−2rΔt} of optimal stopping: errors of later dates are damped when r > 0."""
    return problem.discount(0) ** 2


def slope(sizes: Sequence[float], errors: Sequence[float]) -> float:
    """Rate of convergence: the least-squares slope of log error against log size.

    Raises:
        ValueError: Fewer than two points, or one is not positive.
    """
    if len(sizes) != len(errors) or len(sizes) < 2:
        raise ValueError(f"a slope needs two or more points, got {len(sizes)} sizes and {len(errors)} errors.")
    if min(*sizes, *errors) <= 0:
        raise ValueError("sizes and errors must be positive.")
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def _mean_square(x: torch.Tensor) -> float:
    return float(x.square().mean())
