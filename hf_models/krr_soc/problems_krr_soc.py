"""Finite-horizon decision problems that can be simulated: optimal stopping and general stochastic control."""

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .configuration_krr_soc import KrrSocConfig
from .payoffs_krr_soc import Payoff, get_payoff
from .processes_krr_soc import PROCESSES, BlackScholes
from .samplers_krr_soc import normal


@runtime_checkable
class ControlProblem(Protocol):
    """Maximise E[Σ_{t<N} D_t F_t(X_t, u_t) + D_N Φ(X_N)] over controls u_t, X_{t+1} = π_t(X_t, u_t, Z_{t+1}).

    Attributes: `n_steps` N, `state_dim`, `noise_dim`, `controls`, a tensor (|U|, …) of all controls.
    """

    n_steps: int
    state_dim: int
    noise_dim: int
    controls: torch.Tensor

    def sample_states(self, t: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """Training states drawn from μ_t, (count, state_dim)."""
        ...

    def step(self, t: int, x: torch.Tensor, u: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """π_t: states (..., state_dim), one control, noise (..., noise_dim) → next states."""
        ...

    def reward(self, t: int, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """F_t, (...)."""
        ...

    def terminal(self, x: torch.Tensor) -> torch.Tensor:
        """Φ, (...)."""
        ...

    def discount(self, t: int) -> float:
        """γ_t, from date t + 1 to t."""
        ...


class OptimalStopping:
    """When to take a payoff: stop (0) or hold (1).

    Args:
        process (`BlackScholes`, `Heston`, `PathStates` or alike): The market.
        payoff (`str`): Registered name.
        strike (`float`): K.
        n_steps (`int`): N.
        maturity (`float`): T.
        rate (`float`): r.
        exercise_dates (`Sequence[int]`, *optional*): Dates 0 … N at which stopping pays; default: all.
        payoff_params (`dict`, *optional*): Further arguments of the payoff.
    """

    def __init__(
        self,
        process: Any,
        payoff: str,
        strike: float,
        n_steps: int,
        maturity: float,
        rate: float,
        exercise_dates: Sequence[int] | None = None,
        payoff_params: dict[str, Any] | None = None,
    ):
        self.process, self.strike = process, strike
        self.payoff: Payoff = get_payoff(payoff)
        self.payoff_params = payoff_params or {}
        self.n_steps, self.maturity, self.rate = n_steps, maturity, rate
        self.dates = frozenset(range(n_steps + 1) if exercise_dates is None else exercise_dates)
        self.state_dim, self.noise_dim = process.state_dim, process.noise_dim
        self.controls = torch.tensor([0, 1])

    def sample_states(self, t: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """States under the uncontrolled law, (count, state_dim)."""
        return self.process.sample(t, count, generator)

    def step(self, t: int, x: torch.Tensor, u: torch.Tensor | None, z: torch.Tensor) -> torch.Tensor:
        """The next state if held."""
        return self.process.step(x, z)

    def exercise(self, t: int, x: torch.Tensor) -> torch.Tensor:
        """C_t(x): the payoff (...), −∞ where the date does not allow it, and 0 instead at maturity."""
        if t not in self.dates:
            fill = 0.0 if t == self.n_steps else -math.inf
            return x.new_full(x.shape[:-1], fill)
        return self.payoff.value(self.process.prices(x), self.strike, **self.payoff_params)

    def reward(self, t: int, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """C_t if stopped, else 0."""
        return self.exercise(t, x) if int(u) == 0 else x.new_zeros(x.shape[:-1])

    def terminal(self, x: torch.Tensor) -> torch.Tensor:
        """C_N."""
        return self.exercise(self.n_steps, x)

    def discount(self, t: int) -> float:
        """e^{−rΔt}."""
        return math.exp(-self.rate * self.maturity / self.n_steps)

    def index(self, x: torch.Tensor) -> torch.Tensor:
        """Signed index g of the payoff, (...)."""
        return self.payoff.index(self.process.prices(x), self.strike, **self.payoff_params)

    @property
    def is_symmetric(self) -> bool:
        """Whether the payoff does not see the order of assets that are exchangeable."""
        return self.payoff.symmetric and self.process.is_exchangeable and self.process.num_assets > 1


class LinearQuadratic:
    """A linear system with quadratic costs, whose value is known: x' = a x + b u + s z, reward −(q x² + c u²).

    Args:
        controls (`torch.Tensor`): Grid of controls, (|U|, 1).
        n_steps (`int`, defaults to 5): N.
        a, b, noise (`float`): Dynamics.
        q, c, terminal_weight (`float`): Costs.
        spread (`float`, defaults to 1.2): Standard deviation of the training states.
    """

    def __init__(
        self,
        controls: torch.Tensor | None = None,
        n_steps: int = 5,
        a: float = 0.9,
        b: float = 0.5,
        noise: float = 0.3,
        q: float = 1.0,
        c: float = 0.5,
        terminal_weight: float = 2.0,
        spread: float = 1.2,
    ):
        grid = torch.linspace(-3, 3, 121, dtype=torch.float64)[:, None] if controls is None else controls
        self.controls, self.n_steps, self.state_dim, self.noise_dim = grid, n_steps, 1, 1
        self.a, self.b, self.noise, self.q, self.c = a, b, noise, q, c
        self.terminal_weight, self.spread = terminal_weight, spread

    def sample_states(self, t: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """N(0, spread²), (count, 1)."""
        return self.spread * normal((count, 1), generator, self.controls)

    def step(self, t: int, x: torch.Tensor, u: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """a x + b u + s z."""
        return self.a * x + self.b * u + self.noise * z

    def reward(self, t: int, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """−(q x² + c u²)."""
        return -(self.q * x[..., 0].square() + self.c * u.square().sum())

    def terminal(self, x: torch.Tensor) -> torch.Tensor:
        """−(terminal weight) x²."""
        return -self.terminal_weight * x[..., 0].square()

    def discount(self, t: int) -> float:
        """1."""
        return 1.0

    def exact_value(self, x: torch.Tensor, t: int = 0) -> torch.Tensor:
        """V_t(x) = −(P_t x² + c_t) by the Riccati recursion, without bounds on the control."""
        p, constant = self.terminal_weight, 0.0
        for _ in range(self.n_steps - t):
            constant += p * self.noise**2
            gain = p * self.a * self.b / (self.c + p * self.b**2)
            p = self.q + p * self.a**2 - gain * p * self.a * self.b
        return -(p * x[..., 0].square() + constant)


def natural_unit(config: KrrSocConfig) -> float:
    """The first spot, where the payoff scales with prices: results are then the same in every currency."""
    is_free = config.features != "raw" and config.clip_bound is None and config.process != "custom"
    if not is_free or not get_payoff(config.payoff).homogeneous:
        return 1.0
    return float(config.spot if isinstance(config.spot, (int, float)) else config.spot[0])


def stopping_problem(config: KrrSocConfig, device: torch.device | str = "cpu", unit: float = 1.0) -> OptimalStopping:
    """The optimal-stopping problem of a configuration.

    Args:
        config ([`KrrSocConfig`]): The configuration.
        device (`torch.device`, defaults to `"cpu"`): Of its tensors.
        unit (`float`, defaults to 1): Currency of which prices and strike are multiples.

    Raises:
        ValueError: Payoff or parameters of the process are not known.
    """

    def vector(value: float | list[float]) -> torch.Tensor:
        x = torch.as_tensor(value, dtype=torch.float64, device=device)
        return x.expand(config.dim).clone() if x.ndim == 0 else x

    dt = config.maturity / config.n_steps
    spot, dividend = vector(config.spot) / unit, vector(config.dividend)
    if config.process == "black_scholes":
        rho = torch.as_tensor(config.correlation, dtype=torch.float64, device=device)
        if rho.ndim == 0:
            eye = torch.eye(config.dim, dtype=torch.float64, device=device)
            rho = rho.expand(config.dim, config.dim) * (1 - eye) + eye
        process: Any = BlackScholes(spot, config.rate, dividend, vector(config.volatility), rho, dt)
    else:
        parameters = config.process_params or {}
        try:
            process = PROCESSES[config.process](spot, config.rate, dividend, dt, **parameters)
        except TypeError as error:
            raise ValueError(f"process_params={parameters} do not fit {config.process!r}: {error}.") from None
    return OptimalStopping(
        process,
        config.payoff,
        config.strike / unit,
        config.n_steps,
        config.maturity,
        config.rate,
        config.exercise_dates,
        config.payoff_params,
    )
