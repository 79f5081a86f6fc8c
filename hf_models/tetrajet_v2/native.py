"""Products on FP4 tensor cores (Blackwell), through `torch.nn.functional.scaled_mm`.

The hardware takes E2M1 codes, one E4M3 scale for 1×16 elements and one FP32 scale per tensor: the quantizer's layout
with `outer_block_size=-1`. The paper's own kernels also fuse one scale per 128 elements; that needs a kernel of one's
own.
"""

import torch
import torch.nn.functional as F

from .quantize import NVFP4Tensor

__all__ = ["native_available", "native_matmul", "swizzle_scales"]


def native_available() -> bool:
    """Whether the current device has FP4 tensor cores.

    Returns:
        `bool`: `True` from CUDA capability (10, 0) on.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Inner scales in the order the tensor cores read: tiles of 128 rows × 4 blocks, each as 32 × 4 × 4.

    Args:
        scales (`torch.Tensor`): `(rows, blocks)`, E4M3.

    Returns:
        `torch.Tensor`: Flat, E4M3; rows padded to 128, blocks to 4 with zeros.
    """
    rows, blocks = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)  # (tile, r//32, r%32, tile, c)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(torch.float8_e4m3fn)


def native_matmul(a: NVFP4Tensor, b: NVFP4Tensor) -> torch.Tensor:
    """a · bᵀ of two operands whose blocks lie along the contraction dim.

    Args:
        a (`NVFP4Tensor`): `(M, K)`, one outer scale.
        b (`NVFP4Tensor`): `(N, K)`, one outer scale.

    Returns:
        `torch.Tensor`: FP32, `(M, N)`.
    """
    (codes_a, scale_a), (codes_b, scale_b) = _operand(a), _operand(b)
    recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    y = F.scaled_mm(
        codes_a,
        codes_b.t(),
        [scale_a, a.outer],
        recipe,
        [scale_b, b.outer],
        recipe,
        swizzle,
        swizzle,
        output_dtype=torch.bfloat16,
    )
    return y[: a.shape[0], : b.shape[0]].to(torch.float32)


def _operand(q: NVFP4Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and swizzled scales; rows are padded to 16 and the contraction dim to 32 with zeros."""
    packed = q.pack()
    rows, columns = packed.codes.shape
    codes = F.pad(packed.codes, (0, -columns % 16, 0, -rows % 16))
    blocks = codes.shape[1] // 8
    inner = F.pad(packed.inner.view(torch.uint8), (0, blocks - packed.inner.shape[1], 0, codes.shape[0] - rows))
    return codes.contiguous().view(torch.float4_e2m1fn_x2), swizzle_scales(inner.view(torch.float8_e4m3fn))
