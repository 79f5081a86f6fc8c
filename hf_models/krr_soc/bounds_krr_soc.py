"""Certificates of an optimal-stopping value: a lower bound by the policy, an upper bound by the dual martingale."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.special import ndtri
from tqdm.auto import tqdm

from .dynamic_programming_krr_soc import ValueFunction, generator_of
from .samplers_krr_soc import InnerSampler, normal

BATCH = 500  # paths of the upper bound at a time


@dataclass
class Bound:
    """A Monte Carlo bound.

    Args:
        value (`float`): Mean over paths.
        standard_error (`float`): Of the mean.
        count (`int`): Paths.
        skewness (`float`): Of a path's value.
    """

    value: float
    standard_error: float
    count: int
    skewness: float

    def times(self, unit: float) -> "Bound":
        """In another currency."""
        return Bound(unit * self.value, unit * self.standard_error, self.count, self.skewness)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class Price:
    """A price with its certificates.

    Args:
        price (`float`): Of the backward induction.
        lower, upper (`Bound`, *optional*): Bounds with standard errors.
        interval (`tuple[float, float]`, *optional*): Contains the true price with probability 1 − α.
        alpha (`float`): α.
        consistent (`bool`): Whether the bounds are in order up to three standard errors.
        seconds (`float`): Wall time of all this.
    """

    price: float
    lower: Bound | None = None
    upper: Bound | None = None
    interval: tuple[float, float] | None = None
    alpha: float = 0.05
    consistent: bool = True
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {"price": self.price, "alpha": self.alpha, "consistent": self.consistent, "seconds": self.seconds}
        if self.lower is not None and self.upper is not None and self.interval is not None:
            parts |= {"lower": self.lower.to_dict(), "upper": self.upper.to_dict(), "interval": list(self.interval)}
        return parts


def mean_of_paths(samples: torch.Tensor) -> Bound:
    """Mean, standard error and skewness of one number a path."""
    centred = samples - samples.mean()
    sd = float(centred.square().mean().sqrt())
    skewness = float(centred.pow(3).mean()) / sd**3 if sd > 0 else 0.0
    return Bound(float(samples.mean()), float(samples.std()) / len(samples) ** 0.5, len(samples), skewness)


@torch.no_grad()
def lower_bound(
    function: ValueFunction,
    count: int,
    initial_continuation: float,
    seed: int,
    start: torch.Tensor | None = None,
    date: int = 0,
    batch: int = 50_000,
) -> Bound:
    """L: the mean payoff of the policy on new paths, discounted to their first date.

    Stop at the first allowed date with C_t > 0 and C_t ≥ q̂_t(X_t); take C_N at maturity.

    Args:
        function (`ValueFunction`): Fitted.
        count (`int`): Paths.
        initial_continuation (`float`): q̂ of the state from which paths start.
        seed (`int`): Of the paths.
        start (`torch.Tensor`, *optional*): That state (state_dim,); default: the problem's initial one.
        date (`int`, defaults to 0): Its date.
        batch (`int`, defaults to 50,000): Paths at a time.

    Returns:
        [`Bound`].
    """
    problem = function.problem
    x0 = problem.process.initial() if start is None else start
    stopped_now = problem.exercise(date, x0[None])[0]
    if float(stopped_now) > 0 and float(stopped_now) >= initial_continuation:
        return Bound(float(stopped_now), 0.0, count, 0.0)
    parts = []
    for index, size in enumerate(_sizes(count, batch)):
        generator = generator_of(seed, "lower", index, device=x0.device)
        x, gain = x0.expand(size, -1), x0.new_zeros(size)
        alive = torch.arange(size, device=x0.device)  # only these are simulated on
        discount = 1.0
        for t in range(date + 1, problem.n_steps + 1):
            z = normal((len(alive), problem.noise_dim), generator, x0)
            x = problem.step(t - 1, x, None, z)
            discount *= problem.discount(t - 1)
            payoff = problem.exercise(t, x)
            if t == problem.n_steps:
                gain[alive] = discount * payoff
                break
            candidates = (payoff > 0).nonzero()[:, 0]
            if not len(candidates):
                continue
            held = continuation(function, t, x[candidates], seed)
            stop = candidates[payoff[candidates] >= held]
            gain[alive[stop]] = discount * payoff[stop]
            keep = torch.ones(len(alive), dtype=torch.bool, device=x0.device)
            keep[stop] = False
            alive, x = alive[keep], x[keep]
        parts.append(gain)
    return mean_of_paths(torch.cat(parts))


@torch.no_grad()
def upper_bound(
    function: ValueFunction,
    count: int,
    inner: int,
    seed: int,
    progress: bool = False,
    start: torch.Tensor | None = None,
    date: int = 0,
) -> Bound:
    """U: the mean over paths of max_t (D_t C_t − M_t) with the martingale of Ŵ (Rogers; Andersen and Broadie).

    M_{t+1} = M_t + D_{t+1}(Ŵ_{t+1}(X_{t+1}) − Ê[Ŵ_{t+1} | X_t]) ; the noise of the inner average only raises U.

    Args:
        function (`ValueFunction`): Fitted.
        count (`int`): Paths.
        inner (`int`): Shifted Sobol points of each inner average.
        seed (`int`): Of paths and points.
        progress (`bool`, defaults to `False`): Show a bar.
        start (`torch.Tensor`, *optional*): State (state_dim,) from which paths start; default: the initial one.
        date (`int`, defaults to 0): Its date.

    Returns:
        [`Bound`].
    """
    problem = function.problem
    x0 = problem.process.initial() if start is None else start
    sampler = InnerSampler("qmc", inner, problem.noise_dim, seed + 1, x0)
    parts = []
    sizes = list(_sizes(count, BATCH))
    for index, size in enumerate(tqdm(sizes, desc="upper bound", disable=not progress)):
        generator = generator_of(seed, "upper", index, device=x0.device)
        x, martingale, discount = x0.expand(size, -1), x0.new_zeros(size), 1.0
        best = problem.exercise(date, x)  # D^0 C_0 − M_0
        for t in range(date, problem.n_steps):
            ahead = problem.step(t, x[:, None], None, sampler.draw(size, generator))
            mean = sampler.average(function.value(t + 1, ahead.flatten(0, 1)).unflatten(0, (size, -1)))
            x = problem.step(t, x, None, normal((size, problem.noise_dim), generator, x0))
            discount *= problem.discount(t)
            martingale = martingale + discount * (function.value(t + 1, x) - mean)
            best = torch.maximum(best, discount * problem.exercise(t + 1, x) - martingale)
        parts.append(best)
    return mean_of_paths(torch.cat(parts))


def continuation(function: ValueFunction, t: int, x: torch.Tensor, seed: int) -> torch.Tensor:
    """q̂_t(x): the regression, or for the target "value" a fresh nested average, since Ŵ ≈ max(C, q) is no q."""
    if function.settings.target == "continuation":
        return function.fitted(t, x)[:, 0]
    sampler = InnerSampler("qmc", function.settings.n_inner, function.problem.noise_dim, seed, x)
    generator = generator_of(seed, "inner", t, 1_000_000, device=x.device)
    parts = [function.action_values(t, rows, sampler, generator)[:, 0] for rows in x.split(1024)]
    return torch.cat(parts)


def interval(lower: Bound, upper: Bound, alpha: float) -> tuple[float, float]:
    """[L − z s_L, U + z s_U] with the normal quantile z of 1 − α/2."""
    z = float(ndtri(1 - alpha / 2))
    return lower.value - z * lower.standard_error, upper.value + z * upper.standard_error


def is_consistent(lower: Bound, upper: Bound) -> bool:
    """Whether the bounds are in order up to three standard errors."""
    return lower.value - 3 * lower.standard_error <= upper.value + 3 * upper.standard_error


def _sizes(count: int, batch: int) -> list[int]:
    return [min(batch, count - start) for start in range(0, count, batch)]
