"""KRR-DP (arXiv 2509.20239): backward induction with Monte Carlo averages and kernel ridge regression."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from .features_krr_soc import FeatureMap, index_scale
from .kernels_krr_soc import gaussian_kernel_mean, kernel_matrix, kernel_product
from .problems_krr_soc import OptimalStopping
from .regression_krr_soc import choose_solver, solve_cg, solve_dense, whitened_system
from .samplers_krr_soc import InnerSampler

BLOCK = 256  # states whose randomness one generator gives: results do not depend on who computes which block
ROWS = 8192
LAMBDAS = tuple(10.0**power for power in range(-9, 0))
LENGTHSCALES, SHRINKS = (0.75, 1.5, 3.0), (1.0, 3.0, 10.0, 30.0)
STREAMS = {
    "states": 0,
    "inner": 1,
    "centers": 2,
    "index": 3,
    "initial": 4,
    "lower": 5,
    "upper": 6,
    "holdout": 7,
    "evaluation": 8,
}


def generator_of(seed: int, stream: str, *ids: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator that depends on the seed and on what it is for, and on nothing else."""
    state = np.random.SeedSequence([seed, STREAMS[stream], *ids]).generate_state(2, np.uint32)
    return torch.Generator(device).manual_seed(int(state[0]) << 31 | int(state[1]) >> 1)


@dataclass
class Stage:
    """The regression of one date.

    Args:
        centers (`torch.Tensor`): (m, p).
        alpha (`torch.Tensor`): (m, k).
        low, high (`torch.Tensor`): Bounds of the clipping, (k,).
        lengthscale (`float`): ℓ.
        lam (`float`): λ.
        shrink (`float`, defaults to 1): Damping of the coordinates beside the index, the same for all dates.
    """

    centers: torch.Tensor
    alpha: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    lengthscale: float
    lam: float
    shrink: float = 1.0


class ValueFunction:
    """Ŵ_t and the policy it implies.

    Args:
        problem (`ControlProblem`): The problem.
        settings (`KrrSocConfig`): Method's settings.
        features (`FeatureMap`): φ.
        stages (`dict[int, Stage]`): Regressions of the dates 1 … N − 1.
    """

    def __init__(self, problem: Any, settings: Any, features: FeatureMap, stages: dict[int, Stage]):
        self.problem, self.settings, self.features, self.stages = problem, settings, features, stages
        self.is_stopping = isinstance(problem, OptimalStopping)
        self.kernel_dtype = getattr(torch, settings.kernel_dtype)

    def fitted(self, t: int, x: torch.Tensor) -> torch.Tensor:
        """Clipped regression of date t, (n, k)."""
        stage = self.stages[t]
        f = kernel_product(
            self.settings.kernel, self.features(x), stage.centers, stage.alpha, stage.lengthscale, self.kernel_dtype
        )
        return f.clamp(stage.low, stage.high)

    def value(self, t: int, x: torch.Tensor) -> torch.Tensor:
        """Ŵ_t, (n,): the terminal value at N without any regression."""
        if t == self.problem.n_steps:
            return self.problem.terminal(x)
        f = self.fitted(t, x)
        if self.settings.target == "value":
            return f[:, 0]
        if self.is_stopping:
            return torch.maximum(self.problem.exercise(t, x), f[:, 0])  # max(C_t, q̂_t)
        return f.amax(1)  # max over controls of q̂_t(x, u)

    def action_values(
        self, t: int, x: torch.Tensor, sampler: InnerSampler, generator: torch.Generator
    ) -> torch.Tensor:
        """q(u) = F_t(x, u) + γ_t · mean over z of Ŵ_{t+1}(π_t(x, u, z)): (n, |U|), or (n, 1) of holding."""
        gamma = self.problem.discount(t)
        if sampler.name == "exact" and t + 1 < self.problem.n_steps:
            return gamma * self._exact_mean(t, x)
        z = sampler.draw(len(x), generator)  # (n, M, noise_dim)
        columns = []
        for u in (None,) if self.is_stopping else self.problem.controls:
            ahead = self.problem.step(t, x[:, None], u, z)  # (n, M, state_dim)
            values = self.value(t + 1, ahead.flatten(0, 1)).unflatten(0, z.shape[:2])
            q = gamma * sampler.average(values)
            columns.append(q if self.is_stopping else q + self.problem.reward(t, x, u))
        return torch.stack(columns, 1)

    def _exact_mean(self, t: int, x: torch.Tensor) -> torch.Tensor:
        """E Ŵ_{t+1}(X_{t+1}) in closed form: the log features of geometric Brownian motion are Gaussian."""
        process, stage, horizon = self.problem.process, self.stages[t + 1], self.problem.maturity
        scale = process.volatility * horizon**0.5
        mean = self.features(x) + process.drift * process.dt / scale
        mix = process.mix * process.dt**0.5 / scale[:, None]
        return gaussian_kernel_mean(mean, stage.centers, mix @ mix.T, stage.lengthscale) @ stage.alpha

    def best(self, t: int, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """max_u q(u), with the payoff of stopping among the choices."""
        best = q.amax(1)
        return torch.maximum(self.problem.exercise(t, x), best) if self.is_stopping else best


def fit_value_function(
    problem: Any,
    settings: Any,
    like: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
    rank: int = 0,
    ranks: int = 1,
    on_stage: Callable[[int, Stage], None] | None = None,
    stages: dict[int, Stage] | None = None,
) -> ValueFunction:
    """Walk backward through time.

    Args:
        problem (`ControlProblem`): The problem.
        settings (`KrrSocConfig`): Method's settings.
        like (`torch.Tensor`): Gives dtype (float64) and device.
        gather (`Callable`, *optional*): Sums a tensor over processes.
        rank (`int`, defaults to 0): This process, which averages for its own blocks of states.
        ranks (`int`, defaults to 1): Processes.
        on_stage (`Callable`, *optional*): Called with (t, stage) after each date, for checkpoints.
        stages (`dict[int, Stage]`, *optional*): Dates done before, from which to go on.

    Returns:
        `ValueFunction`: with a stage for each date 1 … N − 1.
    """
    seed, device = settings.seed, like.device
    mean, sd = 0.0, 1.0
    if settings.features == "indexed":
        mean, sd = index_scale(problem, generator_of(seed, "index", device=device))
    shrink = stages[max(stages)].shrink if stages else 1.0
    features = FeatureMap(settings.features, problem, mean, sd, shrink)
    function = ValueFunction(problem, settings, features, dict(stages or {}))
    lengthscale = None
    if stages:
        lengthscale = -1.0 if settings.lengthscale == "holdout" else stages[max(stages)].lengthscale
    sampler = InnerSampler(
        "qmc" if settings.sampler == "exact" else settings.sampler,
        settings.n_inner,
        problem.noise_dim,
        seed,
        like,
        settings.shared_noise,
    )
    sampler.name = settings.sampler
    dates = [t for t in range(problem.n_steps - 1, 0, -1) if t not in function.stages]
    for t in tqdm(dates, desc="backward induction", disable=not settings.progress):
        x = sample_blocks(problem, settings, t, device)
        y = _targets(function, t, x, sampler, rank, ranks)
        if gather is not None:
            y = gather(y)
        if lengthscale is None:
            lengthscale, features.shrink = _tune(function, x, y)
        stage = _regress(function, t, x, y, lengthscale)
        stage.shrink = features.shrink
        function.stages[t] = stage
        if on_stage is not None:
            on_stage(t, stage)
    return function


def sample_blocks(problem: Any, settings: Any, t: int, device: torch.device | str) -> torch.Tensor:
    """Training states of date t, (n, state_dim), block by block from generators of their own."""
    n = settings.n_states
    blocks = range(-(-n // BLOCK))
    parts = [
        problem.sample_states(t, min(BLOCK, n - b * BLOCK), generator_of(settings.seed, "states", t, b, device=device))
        for b in blocks
    ]
    return torch.cat(parts)


def _targets(
    function: ValueFunction, t: int, x: torch.Tensor, sampler: InnerSampler, rank: int, ranks: int
) -> torch.Tensor:
    """Regression targets (n, k): q of each action, or their maximum; rows of other processes stay 0."""
    settings, problem = function.settings, function.problem
    by_value = settings.target == "value"
    actions = 1 if by_value or function.is_stopping else len(problem.controls)
    y = x.new_zeros(len(x), actions)
    for b in range(rank, -(-len(x) // BLOCK), ranks):
        rows = slice(b * BLOCK, (b + 1) * BLOCK)
        block = 0 if settings.shared_noise else b
        generator = generator_of(settings.seed, "inner", t, block, device=x.device)
        q = function.action_values(t, x[rows], sampler, generator)
        y[rows] = function.best(t, x[rows], q)[:, None] if by_value else q
    return y


def _tune(function: ValueFunction, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """ℓ and shrink by generalised cross-validation at the last date before maturity; fixed values stay."""
    settings, features = function.settings, function.features
    if settings.lengthscale == "holdout":
        return -1.0, features.shrink  # chosen at every date
    lengths = [settings.lengthscale] if settings.lengthscale != "gcv" else None
    shrinks = SHRINKS if settings.features == "indexed" else (1.0,)
    if settings.shrink is not None:
        shrinks = (settings.shrink,)
    if lengths is not None and len(shrinks) == 1:
        return float(lengths[0]), shrinks[0]
    best = None
    for shrink in shrinks:
        features.shrink = shrink
        phi = features(x)
        unit = 1.0 if settings.features != "raw" else _median_distance(phi)
        for lengthscale in lengths or [unit * factor for factor in LENGTHSCALES]:
            centers = phi[_center_rows(settings, 0, len(x), x.device)]
            system = _system(settings, phi, centers, y, lengthscale)
            score = min(system.gcv(lam) for lam in _lambdas(settings))
            if best is None or score < best[0]:
                best = (score, float(lengthscale), shrink)
    return best[1], best[2]


def _regress(function: ValueFunction, t: int, x: torch.Tensor, y: torch.Tensor, lengthscale: float) -> Stage:
    """Ŵ_t from the targets (n, k)."""
    settings = function.settings
    phi = function.features(x)
    low, high = clip_bounds(settings, function, x, y)
    rows = _center_rows(settings, t, len(x), x.device)
    centers = phi[rows]
    if not y.any():
        return Stage(centers, y.new_zeros(len(rows), y.shape[1]), low, high, max(lengthscale, 1.0), 0.0)
    if lengthscale < 0:
        lengthscale = _hold_out(settings, t, phi, y)
    solver = choose_solver(settings.solver, len(x), len(rows))
    kernel_mm = kernel_matrix(settings.kernel, centers, centers, lengthscale)
    lam = settings.lam
    if solver == "dense" and lam != "gcv":
        kernel_nn = kernel_matrix(settings.kernel, phi, phi, lengthscale)
        return Stage(phi, solve_dense(kernel_nn, y, lam), low, high, lengthscale, lam)
    if solver == "cg":
        if lam == "gcv":
            few = slice(0, 2000)
            system = _system(settings, phi[few], centers[:500], y[few], lengthscale)
            lam = min(LAMBDAS, key=system.gcv)
        alpha = solve_cg(_blocks(settings, phi, centers, lengthscale), kernel_mm, y, lam)
        return Stage(centers, alpha, low, high, lengthscale, lam)
    system = _system(settings, phi, centers, y, lengthscale)
    if lam == "gcv":
        lam = min(LAMBDAS, key=system.gcv)
    return Stage(centers, system.solve(lam), low, high, lengthscale, lam)


def clip_bounds(
    settings: Any, function: ValueFunction, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of the fitted values, which the theory needs: |Ŵ| ≤ B."""
    nonnegative = function.is_stopping and function.problem.payoff.nonnegative
    infinite = torch.full_like(y[0], torch.inf)
    if settings.clip == "none":
        return -infinite, infinite
    if settings.clip == "nonnegative":
        return torch.zeros_like(y[0]), infinite
    if settings.clip == "symmetric":
        bound = settings.clip_bound
        if bound is None:
            bound = float(function.problem.terminal(x).abs().max().maximum(y.abs().max()))
        return torch.full_like(y[0], -bound), torch.full_like(y[0], bound)
    low = torch.zeros_like(y[0]) if nonnegative else y.amin(0)
    return low, y.amax(0)


def _center_rows(settings: Any, t: int, n: int, device: torch.device) -> torch.Tensor:
    """The first m states of a seeded permutation."""
    m = settings.n_centers
    if m > n:
        warnings.warn(f"n_centers={m} is more than n_states={n}; all {n} states are centres.", stacklevel=3)
        m = n
    generator = generator_of(settings.seed, "centers", t)
    return torch.randperm(n, generator=generator)[:m].to(device)


def _lambdas(settings: Any) -> tuple[float, ...]:
    return LAMBDAS if settings.lam == "gcv" else (settings.lam,)


def _blocks(
    settings: Any, phi: torch.Tensor, centers: torch.Tensor, lengthscale: float
) -> Callable[[], Iterator[torch.Tensor]]:
    dtype = getattr(torch, settings.kernel_dtype)
    return lambda: (kernel_matrix(settings.kernel, rows, centers, lengthscale, dtype) for rows in phi.split(ROWS))


def _system(settings: Any, phi: torch.Tensor, centers: torch.Tensor, y: torch.Tensor, lengthscale: float):
    kernel_mm = kernel_matrix(settings.kernel, centers, centers, lengthscale)
    return whitened_system(_blocks(settings, phi, centers, lengthscale), kernel_mm, y)


def _hold_out(settings: Any, t: int, phi: torch.Tensor, y: torch.Tensor) -> float:
    """The lengthscale of the grid with the least error on 30 % of the states, fitted on the others."""
    order = torch.randperm(len(phi), generator=generator_of(settings.seed, "holdout", t)).to(phi.device)
    cut = max(1, len(phi) * 7 // 10)
    train, test = order[:cut], order[cut:]
    centers = phi[train[: settings.n_centers]]
    lam = 1e-6 if settings.lam == "gcv" else settings.lam

    def error(lengthscale: float) -> float:
        alpha = _system(settings, phi[train], centers, y[train], lengthscale).solve(lam)
        return float(
            (kernel_product(settings.kernel, phi[test], centers, alpha, lengthscale) - y[test]).square().mean()
        )

    return min(settings.lengthscale_grid, key=error)


def _median_distance(phi: torch.Tensor) -> float:
    few = phi[:500]
    return float(torch.pdist(few).median().clamp(min=1e-12))
