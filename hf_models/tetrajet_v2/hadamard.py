"""Block-wise random Hadamard transform: x ↦ x·diag(σ)·H/√n on consecutive groups of n along the contraction dim.

The transform is orthogonal, so when both operands of a matrix product get the same signs the product does not change,
while an outlier is spread over its group before quantization.
"""

import functools
import math

import torch

__all__ = ["block_rht", "hadamard_matrix"]


@functools.cache
def _sylvester(size: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def hadamard_matrix(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Sylvester Hadamard matrix in natural order.

    Args:
        size (`int`): A power of two.
        device (`torch.device` or `str`, defaults to `"cpu"`): Device of the matrix.

    Returns:
        `torch.Tensor`: FP32 entries ±1, `(size, size)`.

    Raises:
        ValueError: If `size` is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"hadamard size must be a power of two, got {size}")
    return _sylvester(size).to(device)


def block_rht(x: torch.Tensor, signs: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Transform every group of `len(signs)` along `dim`.

    Args:
        x (`torch.Tensor`): FP32 numbers; the size of `dim` must be a multiple of the group.
        signs (`torch.Tensor`): σ, entries ±1, the same for every group.
        dim (`int`, defaults to -1): -1, or 0 for a matrix whose rows are the contraction dim.

    Returns:
        `torch.Tensor`: Transformed numbers of the shape of `x`.

    Raises:
        ValueError: If `dim` is not supported or its size is not a multiple of the group.
    """
    n = signs.numel()
    if x.shape[dim] % n:
        raise ValueError(f"dim {dim} of size {x.shape[dim]} is not a multiple of the group of {n}")
    if x.numel() == 0:
        return x.clone()
    transform = signs.to(x.dtype)[:, None] * hadamard_matrix(n, x.device).to(x.dtype) / math.sqrt(n)  # (n, n)
    if dim in (-1, x.dim() - 1):
        return (x.reshape(-1, n) @ transform).view(x.shape)
    if dim == 0 and x.dim() == 2:
        return torch.matmul(transform.t(), x.reshape(-1, n, x.shape[1])).view(x.shape)
    raise ValueError(f"dim must be -1, or 0 of a matrix, got {dim} for {x.dim()} dims")
