"""Price processes: states, one exact or Euler step, and the laws from which training states are drawn."""

import math
from collections.abc import Callable
from typing import Any

import torch

from .samplers_krr_soc import normal


class BlackScholes:
    """Correlated geometric Brownian motion, exact in time. State: prices (d,).

    Args:
        spot (`torch.Tensor`): S₀, (d,).
        rate (`float`): r.
        dividend (`torch.Tensor`): δ, (d,).
        volatility (`torch.Tensor`): σ, (d,).
        correlation (`torch.Tensor`): ρ, (d, d).
        dt (`float`): Length of a step.
    """

    def __init__(
        self,
        spot: torch.Tensor,
        rate: float,
        dividend: torch.Tensor,
        volatility: torch.Tensor,
        correlation: torch.Tensor,
        dt: float,
    ):
        self.spot, self.volatility, self.dt = spot, volatility, dt
        self.drift = rate - dividend - volatility**2 / 2
        self.mix = correlation_factor(correlation) * volatility[:, None]  # σ_i L_ij
        self.state_dim = self.noise_dim = self.num_assets = len(spot)
        equal = correlation[~torch.eye(len(spot), dtype=torch.bool, device=spot.device)]
        self.is_exchangeable = all(bool((x == x[:1]).all()) for x in (spot, volatility, dividend, equal))

    def initial(self) -> torch.Tensor:
        """X₀, (d,)."""
        return self.spot

    def sample(self, t: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """`count` draws of X_t, (count, d)."""
        z = normal((count, self.noise_dim), generator, self.spot)
        return self._move(self.spot, z, t * self.dt)

    def step(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """X_{t+1} from X_t (..., d) and z ~ N(0, I) (..., d)."""
        return self._move(x, z, self.dt)

    def _move(self, x: torch.Tensor, z: torch.Tensor, time: float) -> torch.Tensor:
        return x * torch.exp(self.drift * time + math.sqrt(time) * (z @ self.mix.T))

    def prices(self, x: torch.Tensor) -> torch.Tensor:
        """Asset prices of a state."""
        return x

    def coordinates(self, x: torch.Tensor, horizon: float) -> torch.Tensor:
        """log(x/X₀)/(σ√T), (..., d)."""
        return (x / self.spot).log() / (self.volatility * math.sqrt(horizon))


class Heston:
    """Heston's model by full-truncation Euler. State: price and variance (2,).

    Args:
        spot (`torch.Tensor`): S₀, (1,).
        rate (`float`): r.
        dividend (`torch.Tensor`): δ, (1,).
        dt (`float`): Length of a step.
        v0 (`float`): Initial variance.
        kappa (`float`): Speed of mean reversion.
        theta (`float`): Long-run variance.
        xi (`float`): Volatility of the variance.
        rho (`float`): Correlation of price and variance.
        substeps (`int`, defaults to 8): Euler steps a step.
    """

    def __init__(
        self,
        spot: torch.Tensor,
        rate: float,
        dividend: torch.Tensor,
        dt: float,
        v0: float = 0.04,
        kappa: float = 2.0,
        theta: float = 0.04,
        xi: float = 0.3,
        rho: float = -0.6,
        substeps: int = 8,
    ):
        if len(spot) != 1:
            raise ValueError(f"dim={len(spot)} must be 1 for the process 'heston'.")
        for name, value in {"v0": v0, "kappa": kappa, "theta": theta, "xi": xi}.items():
            if not value > 0:
                raise ValueError(f"process_params[{name!r}]={value} must be positive.")
        if not -1 <= rho <= 1 or substeps < 1:
            raise ValueError(f"process_params rho={rho} must be in [-1, 1] and substeps={substeps} at least 1.")
        self.spot, self.rate, self.dividend, self.dt = spot, rate, dividend, dt
        self.v0, self.kappa, self.theta, self.xi, self.rho, self.substeps = v0, kappa, theta, xi, rho, substeps
        self.state_dim, self.num_assets, self.noise_dim = 2, 1, 2 * substeps
        self.is_exchangeable = True

    def initial(self) -> torch.Tensor:
        """(S₀, v₀)."""
        return torch.cat([self.spot, self.spot.new_tensor([self.v0])])

    def sample(self, t: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """`count` draws of X_t, (count, 2)."""
        x = self.initial().expand(count, -1)
        for _ in range(t):
            x = self.step(x, normal((count, self.noise_dim), generator, self.spot))
        return x

    def step(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """`substeps` Euler steps, the variance truncated at zero where it is used: x (..., 2), z (..., 2·substeps)."""
        log_s, v = x[..., 0].log(), x[..., 1]
        h = self.dt / self.substeps
        drift = self.rate - self.dividend[0]
        for pair in z.unflatten(-1, (self.substeps, 2)).unbind(-2):
            first, second = pair.unbind(-1)
            positive = v.clamp(min=0)
            root = (positive * h).sqrt()
            log_s = log_s + (drift - positive / 2) * h + root * first
            v = v + self.kappa * (self.theta - positive) * h
            v = v + self.xi * root * (self.rho * first + math.sqrt(1 - self.rho**2) * second)
        return torch.stack([log_s.exp(), v], -1)

    def prices(self, x: torch.Tensor) -> torch.Tensor:
        """The price, (..., 1)."""
        return x[..., :1]

    def coordinates(self, x: torch.Tensor, horizon: float) -> torch.Tensor:
        """Scaled log price and variance, (..., 2)."""
        log_s = (x[..., 0] / self.spot[0]).log() / math.sqrt(self.theta * horizon)
        spread = self.xi * math.sqrt(self.theta / (2 * self.kappa))  # stationary standard deviation of the variance
        return torch.stack([log_s, (x[..., 1] - self.theta) / spread], -1)


class PathStates:
    """States of simulated paths, for processes of which only samples exist.

    Args:
        paths (`torch.Tensor`): (paths, N + 1, d), all starting at the same state.
        step (`Callable`, *optional*): Simulator (x (..., d), z (..., noise_dim)) → next state (..., d).
        noise_dim (`int`, *optional*): Normal variates of a step; default d.
        num_assets (`int`, *optional*): Leading coordinates that are prices; default all.
    """

    def __init__(
        self,
        paths: torch.Tensor,
        step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        noise_dim: int | None = None,
        num_assets: int | None = None,
    ):
        if paths.ndim != 3 or not torch.isfinite(paths).all():
            raise ValueError(f"paths must be finite and (paths, dates, d), got {tuple(paths.shape)}.")
        self.paths, self._step = paths.double(), step
        self.spot = self.paths[0, 0]
        self.state_dim = paths.shape[-1]
        self.noise_dim = self.state_dim if noise_dim is None else noise_dim
        self.num_assets = self.state_dim if num_assets is None else num_assets
        self.is_exchangeable = False

    def initial(self) -> torch.Tensor:
        """The first state of the first path."""
        return self.spot

    def sample(self, t: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """Rows drawn with replacement from the paths' states at t."""
        rows = torch.randint(len(self.paths), (count,), generator=generator, device=generator.device)
        return self.paths[rows.to(self.paths.device), t]

    def step(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Of the user's simulator.

        Raises:
            NotImplementedError: There is none, and the value of holding cannot be averaged without it.
        """
        if self._step is None:
            raise NotImplementedError(
                "paths alone cannot average over what follows a state: give a one-step simulator, "
                "PathStates(paths, step=simulate), where simulate(x, z) returns the next states."
            )
        return self._step(x, z)

    def prices(self, x: torch.Tensor) -> torch.Tensor:
        """The leading coordinates."""
        return x[..., : self.num_assets]

    def coordinates(self, x: torch.Tensor, horizon: float) -> torch.Tensor:
        """Coordinates less their mean over their deviation at the last date."""
        last = self.paths[:, -1]
        return (x - last.mean(0)) / last.std(0).clamp(min=1e-300)


PROCESSES: dict[str, Callable[..., Any]] = {"black_scholes": BlackScholes, "heston": Heston}


def correlation_factor(correlation: torch.Tensor) -> torch.Tensor:
    """L with LLᵀ = ρ, for singular ρ too.

    Raises:
        ValueError: Not symmetric with a unit diagonal, or not positive semidefinite.
    """
    if not torch.equal(correlation, correlation.T) or not bool((correlation.diagonal() == 1).all()):
        raise ValueError("correlation must be a symmetric matrix with ones on its diagonal.")
    factor, info = torch.linalg.cholesky_ex(correlation)
    if not info:
        return factor
    values, vectors = torch.linalg.eigh(correlation)
    if float(values.min()) < -1e-10:
        raise ValueError(
            f"correlation is not positive semidefinite: its smallest eigenvalue is {float(values.min()):.3g}."
        )
    return vectors * values.clamp(min=0).sqrt()
