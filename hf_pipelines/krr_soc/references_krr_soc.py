"""Reference prices: a table of the literature's and of accurate computations, and a lattice for one dimension.

Sources: QuantLib 1.44 (finite differences, 1-D and Heston), two-asset binomial lattices and Becker, Cheridito and
Jentzen (JMLR 20:74, 2019) for the max-calls with dividends, quadrature for the others.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.interpolate import CubicSpline

PAPER_MARKET = {"rate": 0.05, "volatility": 0.2, "correlation": 0.2, "maturity": 1.0, "n_steps": 9}
DIVIDEND_MARKET = {"rate": 0.05, "volatility": 0.2, "dividend": 0.1, "maturity": 3.0, "n_steps": 9}


@dataclass(frozen=True)
class Case:
    """An option of which the price is known.

    Args:
        fields (`dict`): Arguments of `KrrSocConfig`.
        value (`float`): Price of the option with its dates of exercise.
    """

    fields: dict[str, Any] = field(hash=False)
    value: float


def _paper(payoff: str, dim: int, value: float) -> Case:
    return Case({"payoff": payoff, "dim": dim, **PAPER_MARKET}, value)


def _dividend(dim: int, spot: float, value: float) -> Case:
    return Case({"payoff": "max_call", "dim": dim, "spot": spot, **DIVIDEND_MARKET}, value)


CASES: dict[str, Case] = {
    "put S90": Case({"spot": 90.0}, 11.3927436),
    "put S100": Case({}, 6.0275786),
    "put S110": Case({"spot": 110.0}, 2.9515886),
    "put S36 K40": Case({"spot": 36.0, "strike": 40.0, "rate": 0.06}, 4.4372651),
    "put S36 K40, 50 dates": Case({"spot": 36.0, "strike": 40.0, "rate": 0.06, "n_steps": 50}, 4.4778111),
    "put, last 3 dates": Case({"exercise_dates": [7, 8, 9]}, 5.80859),
    "put, last date": Case({"exercise_dates": [9]}, 5.57330),
    "geometric put d2": _paper("geo_put", 2, 4.5661152),
    "geometric put d5": _paper("geo_put", 5, 3.4031949),
    "geometric put d10": _paper("geo_put", 10, 2.9256442),
    "geometric put d20": _paper("geo_put", 20, 2.6603116),
    "geometric put d40": _paper("geo_put", 40, 2.5192480),
    "geometric put d100": _paper("geo_put", 100, 2.4315214),
    "max-call d2": _paper("max_call", 2, 16.8536178),
    "max-call d5": _paper("max_call", 5, 27.1931552),
    "max-call d10": _paper("max_call", 10, 35.2383114),
    "max-call d20": _paper("max_call", 20, 42.9448181),
    "max-call d40": _paper("max_call", 40, 50.2660798),
    "max-call d100": _paper("max_call", 100, 59.4619414),
    "dividend max-call d2 S90": _dividend(2, 90.0, 8.075),
    "dividend max-call d2 S100": _dividend(2, 100.0, 13.902),
    "dividend max-call d2 S110": _dividend(2, 110.0, 21.345),
    "dividend max-call d3 S90": _dividend(3, 90.0, 11.29),
    "dividend max-call d3 S100": _dividend(3, 100.0, 18.69),
    "dividend max-call d3 S110": _dividend(3, 110.0, 27.58),
    "dividend max-call d5 S90": _dividend(5, 90.0, 16.644),
    "dividend max-call d5 S100": _dividend(5, 100.0, 26.159),
    "dividend max-call d5 S110": _dividend(5, 110.0, 36.772),
    "Heston put": Case(
        {
            "process": "heston",
            "process_params": {"v0": 0.04, "kappa": 2.0, "theta": 0.04, "xi": 0.3, "rho": -0.6},
        },
        5.96463,
    ),
}
EUROPEAN_PUT = 5.5735260  # S = K = 100, r = 0.05, σ = 0.2, T = 1
# repeats' means of the paper's Table 1 (10 repetitions; its geometric-put "benchmark" may be exercised at any time)
PAPER_RESULTS = {
    "geometric put d2": 4.63,
    "geometric put d5": 3.46,
    "geometric put d10": 2.98,
    "geometric put d20": 2.70,
    "max-call d2": 16.93,
    "max-call d5": 27.16,
    "max-call d10": 35.14,
    "max-call d20": 42.62,
}


class BermudanLattice:
    """V_t of a Bermudan put or call on one geometric Brownian motion, by integration on a grid of log prices.

    Args:
        spot, strike (`float`): S₀ and K.
        rate, dividend, volatility, maturity (`float`): r, δ, σ and T.
        n_steps (`int`): N.
        is_put (`bool`, defaults to `True`): Put or call.
        dates (`Sequence[int]`, *optional*): Dates of exercise; default 0 … N.
        points (`int`, defaults to 3001): Grid points over ±8 standard deviations.
    """

    def __init__(
        self,
        spot: float = 100.0,
        strike: float = 100.0,
        rate: float = 0.05,
        dividend: float = 0.0,
        volatility: float = 0.2,
        maturity: float = 1.0,
        n_steps: int = 9,
        is_put: bool = True,
        dates: Any = None,
        points: int = 3001,
    ):
        self.strike, self.sign, self.n_steps = strike, -1.0 if is_put else 1.0, n_steps
        self.dates = set(range(n_steps + 1) if dates is None else dates)
        dt = maturity / n_steps
        width = 8 * volatility * math.sqrt(maturity)
        self.grid = np.linspace(-width, width, points) + math.log(spot)
        mean = self.grid + (rate - dividend - volatility**2 / 2) * dt
        spread = volatility * math.sqrt(dt)
        weights = np.exp(-0.5 * ((self.grid[None] - mean[:, None]) / spread) ** 2)
        weights *= (self.grid[1] - self.grid[0]) / (spread * math.sqrt(2 * math.pi)) * math.exp(-rate * dt)
        value = self._payoff(n_steps, np.exp(self.grid))
        self.held: dict[int, CubicSpline] = {}
        for t in range(n_steps - 1, -1, -1):
            held = weights @ value
            self.held[t] = CubicSpline(self.grid, held)
            value = np.maximum(held, self._payoff(t, np.exp(self.grid)))

    def _payoff(self, t: int, prices: np.ndarray) -> np.ndarray:
        pays = np.maximum(self.sign * (prices - self.strike), 0.0)
        return pays if t in self.dates else np.zeros_like(pays)

    def __call__(self, t: int, x: torch.Tensor) -> torch.Tensor:
        """V_t of prices (n, 1) → (n,); within seven deviations of the spot."""
        prices = x[:, 0].cpu().numpy()
        value = self._payoff(t, prices)
        if t < self.n_steps:
            value = np.maximum(value, self.held[t](np.log(prices)))
        return torch.as_tensor(value, dtype=x.dtype, device=x.device)


def geometric_put_lattice(dim: int, rate: float, volatility: float, correlation: float, **fields: Any):
    """The one-dimensional option that a put on a geometric mean is.

    Args:
        dim (`int`): Assets.
        rate (`float`): r.
        volatility (`float`): σ of each.
        correlation (`float`): ρ of all pairs.
        fields: Further arguments of [`BermudanLattice`].

    Returns:
        [`BermudanLattice`]: with σ_G = σ√((1 + (d − 1)ρ)/d) and dividend (σ² − σ_G²)/2.
    """
    mean_volatility = volatility * math.sqrt((1 + (dim - 1) * correlation) / dim)
    dividend = (volatility**2 - mean_volatility**2) / 2
    return BermudanLattice(rate=rate, dividend=dividend, volatility=mean_volatility, **fields)
