"""Where exercising becomes the better choice along one asset's price."""

import math
from typing import Any

import torch


@torch.no_grad()
def exercise_boundary(model: Any, t: int, axis: int, points: int, width: float) -> torch.Tensor:
    """Search a grid of one asset's prices for changes of the decision, and refine each by bisection.

    Args:
        model ([`KrrSocModel`]): Fitted.
        t (`int`): Date, 1 … N − 1.
        axis (`int`): Asset; the others stay at the spot.
        points (`int`): Prices of the grid, equally spaced in the logarithm.
        width (`float`): Half width of the grid in standard deviations of the log price at maturity.

    Returns:
        `torch.Tensor`: boundaries in ascending order.
    """
    problem = model.problem
    start = problem.process.initial()
    volatility = getattr(problem.process, "volatility", start.new_full((len(start),), 0.2))
    spread = width * float(volatility[axis]) * math.sqrt(problem.maturity)

    def stops(prices: torch.Tensor) -> torch.Tensor:
        x = start.repeat(len(prices), 1)
        x[:, axis] = prices
        payoff = problem.exercise(t, x)
        return (payoff > 0) & (payoff >= model(x, t).continuation)

    grid = float(start[axis]) * torch.linspace(-spread, spread, points, dtype=start.dtype, device=start.device).exp()
    sign = stops(grid)
    change = (sign[1:] != sign[:-1]).nonzero()[:, 0]
    low, high, low_sign = grid[change], grid[change + 1], sign[change]
    for _ in range(40 if len(change) else 0):
        middle = (low + high) / 2
        same = stops(middle) == low_sign
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return (low + high) / 2
