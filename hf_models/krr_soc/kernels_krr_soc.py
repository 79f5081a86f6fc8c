"""Radial kernels on feature vectors."""

import math
from collections.abc import Callable

import torch


def squared_distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """‖a_i − b_j‖², (n, p) and (m, p) → (n, m), never negative."""
    cross = torch.addmm(b.square().sum(-1)[None], a, b.T, alpha=-2)
    cross = cross.add_(a.square().sum(-1, keepdim=True))
    return cross.clamp(min=0) if cross.requires_grad else cross.clamp_(min=0)


def _rbf(squared: torch.Tensor, lengthscale: float) -> torch.Tensor:
    return squared.mul_(-0.5 / lengthscale**2).exp_()


def _matern32(squared: torch.Tensor, lengthscale: float) -> torch.Tensor:
    r = squared.sqrt() * (math.sqrt(3) / lengthscale)
    return (-r).exp() * (1 + r)


def _matern52(squared: torch.Tensor, lengthscale: float) -> torch.Tensor:
    r = squared.sqrt() * (math.sqrt(5) / lengthscale)
    return (-r).exp() * (1 + r + r.square() / 3)


def _laplacian(squared: torch.Tensor, lengthscale: float) -> torch.Tensor:
    return (squared.sqrt() * (-1 / lengthscale)).exp()


KERNELS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "rbf": _rbf,
    "matern32": _matern32,
    "matern52": _matern52,
    "laplacian": _laplacian,
}


def kernel_matrix(
    name: str, a: torch.Tensor, b: torch.Tensor, lengthscale: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """k(a_i, b_j).

    Args:
        name (`str`): `"rbf"`, exp(−r²/2ℓ²); `"matern32"`, `"matern52"`; or `"laplacian"`, exp(−r/ℓ).
        a (`torch.Tensor`): (n, p).
        b (`torch.Tensor`): (m, p).
        lengthscale (`float`): ℓ > 0.
        dtype (`torch.dtype`, *optional*): Precision of the evaluation; the result has that of `a`.

    Returns:
        `torch.Tensor`: (n, m).
    """
    wanted = a.dtype
    if dtype is not None and dtype != wanted:
        a, b = a.to(dtype), b.to(dtype)
    return KERNELS[name](squared_distances(a, b), float(lengthscale)).to(wanted)


def kernel_product(
    name: str,
    x: torch.Tensor,
    centers: torch.Tensor,
    alpha: torch.Tensor,
    lengthscale: float,
    dtype: torch.dtype | None = None,
    rows: int = 16_384,
) -> torch.Tensor:
    """f(x) = Σ_j α_j k(x, c_j), in blocks of rows so that memory stays bounded.

    Args:
        name (`str`): Kernel.
        x (`torch.Tensor`): (n, p).
        centers (`torch.Tensor`): (m, p).
        alpha (`torch.Tensor`): (m, k).
        lengthscale (`float`): ℓ.
        dtype (`torch.dtype`, *optional*): Precision of the kernel's evaluation.
        rows (`int`, defaults to 16,384): Rows at a time.

    Returns:
        `torch.Tensor`: (n, k).
    """
    if not alpha.any():
        return x.new_zeros(len(x), alpha.shape[1])
    parts = [kernel_matrix(name, part, centers, lengthscale, dtype) @ alpha for part in x.split(rows)]
    return torch.cat(parts)


def gaussian_kernel_mean(
    mean: torch.Tensor, centers: torch.Tensor, covariance: torch.Tensor, lengthscale: float
) -> torch.Tensor:
    """E k(m + ε, c) for the Gaussian kernel and ε ~ N(0, S): |I + S/ℓ²|^(−½) exp(−½ (m−c)ᵀ(ℓ²I + S)⁻¹(m−c)).

    Args:
        mean (`torch.Tensor`): (n, p).
        centers (`torch.Tensor`): (m, p).
        covariance (`torch.Tensor`): S, (p, p).
        lengthscale (`float`): ℓ.

    Returns:
        `torch.Tensor`: (n, m).
    """
    identity = torch.eye(covariance.shape[0], dtype=covariance.dtype, device=covariance.device)
    factor = torch.linalg.cholesky(lengthscale**2 * identity + covariance)  # L
    whitened = [torch.linalg.solve_triangular(factor, x.T, upper=False).T for x in (mean, centers)]
    log_volume = factor.diagonal().log().sum() - covariance.shape[0] * math.log(lengthscale)
    return (-0.5 * squared_distances(*whitened) - log_volume).exp()
