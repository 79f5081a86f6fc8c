"""Noise for the average over the next state: Monte Carlo, antithetic, shifted Sobol points, quadrature."""

import math

import numpy as np
import torch

SAMPLERS = ("qmc", "mc", "antithetic", "gauss_hermite", "monomial3", "exact")
TINY = 1e-12


def normal(shape: tuple[int, ...], generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers of the dtype and device of `like`, drawn where the generator lives."""
    z = torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device)
    return z.to(like.device)


class InnerSampler:
    """Draws (rows, M, noise_dim) noise and the weights (M,) of its average.

    Args:
        name (`str`): `"qmc"`, scrambled Sobol points with an independent shift per row; `"mc"`; `"antithetic"`;
            `"gauss_hermite"`, a tensor grid for up to three dimensions; `"monomial3"`, ±√d e_i.
        count (`int`): M; for Gauss–Hermite the nearest power with at most that many points.
        noise_dim (`int`): d.
        seed (`int`): Seed of the Sobol points.
        shared (`bool`, defaults to `False`): The same noise for every row.
        like (`torch.Tensor`): Gives dtype and device.
    """

    def __init__(self, name: str, count: int, noise_dim: int, seed: int, like: torch.Tensor, shared: bool = False):
        if name not in SAMPLERS:
            raise ValueError(f"sampler={name!r} must be one of {', '.join(SAMPLERS)}.")
        self.name, self.count, self.noise_dim, self.shared, self.like = name, count, noise_dim, shared, like
        self.weights: torch.Tensor | None = None
        self.points: torch.Tensor | None = None
        if name == "antithetic" and count % 2:
            raise ValueError(f"n_inner={count} must be even for the antithetic sampler.")
        if name == "qmc":
            engine = torch.quasirandom.SobolEngine(noise_dim, scramble=True, seed=seed)
            self.points = engine.draw(count, dtype=torch.float64).to(like)
        elif name == "gauss_hermite":
            self.points, self.weights = gauss_hermite_grid(count, noise_dim, like)
        elif name == "monomial3":
            axes = math.sqrt(noise_dim) * torch.eye(noise_dim, dtype=like.dtype, device=like.device)
            self.points = torch.cat([axes, -axes])
        if name in ("gauss_hermite", "monomial3"):
            self.count = len(self.points)

    def draw(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Noise for `rows` states.

        Args:
            rows (`int`): States.
            generator (`torch.Generator`): Source of all randomness but the Sobol points'.

        Returns:
            `torch.Tensor`: (rows, M, noise_dim), standard normal in law.
        """
        if self.name in ("gauss_hermite", "monomial3"):
            return self.points.expand(rows, -1, -1)
        drawn = 1 if self.shared else rows
        if self.name == "qmc":
            shift = torch.rand(
                drawn, 1, self.noise_dim, generator=generator, dtype=self.like.dtype, device=generator.device
            )
            uniform = (self.points + shift.to(self.like.device)) % 1
            z = torch.special.ndtri(uniform.clamp_(TINY, 1 - TINY))
        else:
            size = self.count // 2 if self.name == "antithetic" else self.count
            z = normal((drawn, size, self.noise_dim), generator, self.like)
            if self.name == "antithetic":
                z = torch.cat([z, -z], 1)
        return z.expand(rows, -1, -1)

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the noise: (rows, M, …) → (rows, …)."""
        if self.weights is None:
            return values.mean(1)
        return torch.tensordot(self.weights, values, dims=([0], [1]))


def gauss_hermite_grid(count: int, dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensor grid of at most `count` Gauss–Hermite points for N(0, I): points (M, d), weights (M,).

    Raises:
        ValueError: More than three dimensions.
    """
    if dim > 3:
        raise ValueError(f"sampler='gauss_hermite' is a tensor grid for at most 3 noise dimensions, here {dim}.")
    order = max(1, math.floor(count ** (1 / dim) + 1e-9))
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    nodes, weights = like.new_tensor(nodes), like.new_tensor(weights / weights.sum())
    points = torch.cartesian_prod(*[nodes] * dim).reshape(-1, dim)
    products = torch.cartesian_prod(*[weights] * dim).reshape(-1, dim).prod(-1)
    return points, products
