"""Feature vectors of states."""

from typing import Any

import torch

FEATURES = ("indexed", "log", "raw")


class FeatureMap:
    """φ: states (n, state_dim) → features (n, p).

    `"indexed"`: [coordinates ÷ shrink, standardised signed index of the payoff], where coordinates are
    log(x/X₀)/(σ√T), sorted in descending order if payoff and market are symmetric; `"log"`: coordinates alone,
    never sorted; `"raw"`: the state.

    Args:
        kind (`str`): One of these.
        problem (`ControlProblem`): The problem.
        mean, sd (`float`): Of the signed index at maturity.
        shrink (`float`, defaults to 1): ≥ 1 damps the coordinates beside the index.
    """

    def __init__(self, kind: str, problem: Any, mean: float = 0.0, sd: float = 1.0, shrink: float = 1.0):
        self.kind, self.problem, self.mean, self.sd, self.shrink = kind, problem, mean, sd, shrink

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """φ(x)."""
        if self.kind == "raw":
            return x
        problem = self.problem
        log = problem.process.coordinates(x, problem.maturity)
        if self.kind == "log":
            return log
        if problem.is_symmetric:
            log = log.sort(dim=-1, descending=True).values
        index = (problem.index(x) - self.mean) / self.sd
        return torch.cat([log / self.shrink, index[:, None]], -1)


def index_scale(problem: Any, generator: torch.Generator, count: int = 2000) -> tuple[float, float]:
    """Mean and standard deviation of the signed index at maturity."""
    index = problem.index(problem.sample_states(problem.n_steps, count, generator))
    sd = float(index.std())
    return float(index.mean()), sd if sd > 0 else 1.0
