"""The quantizer as one Triton kernel, for GPUs: bit-equal to the emulated one when rounding to nearest.

Imported only on request: `from hf_models.tetrajet_v2.triton_quantize import triton_fake_quant`. One program quantizes
a tile of rows × one outer block. NaN is found through the integer order of the bits, since the hardware maximum drops
it, and the divisions are IEEE ones (`div_rn`), since an approximate one breaks ties.
"""

import torch
import triton
import triton.language as tl

from .blocks import OUTER_DIVISOR

__all__ = ["triton_fake_quant"]

_EXPONENT = tl.constexpr(0x7F800000)
_ONE = tl.constexpr(0x3F800000)
_MAGIC_E2M1 = tl.constexpr((22 << 23) | (1 << 22))
_MAGIC_E4M3 = tl.constexpr((20 << 23) | (1 << 22))
_E4M3_NORMAL = tl.constexpr(121 << 23)


@triton.jit
def _outer_scale(largest):
    """s_o of the largest magnitude: 1 for zero, NaN for Inf."""
    outer = tl.math.div_rn(largest, 2688.0)
    outer = tl.where(outer == 0.0, 1.0, outer)
    return outer + (outer - outer)


@triton.jit
def _inner_scale(ratio, ROUND_UP: tl.constexpr):
    """E4M3 of r, floored at 2^-9; adding and subtracting 1.5·2^23 units rounds to nearest even."""
    ratio = tl.where(ratio > 448.0, 448.0, ratio)
    step_bits = tl.maximum(ratio.to(tl.int32, bitcast=True) & _EXPONENT, _E4M3_NORMAL)
    magic = (step_bits + _MAGIC_E4M3).to(tl.float32, bitcast=True)
    inner = (ratio + magic) - magic
    if ROUND_UP:
        own_bits = tl.maximum(inner.to(tl.int32, bitcast=True) & _EXPONENT, _E4M3_NORMAL)
        step = (own_bits - (3 << 23)).to(tl.float32, bitcast=True)
        inner = tl.where(inner < ratio, inner + step, inner)
    return tl.where(inner < 0.001953125, 0.001953125, inner)


@triton.jit
def _fake_quant_kernel(
    x_ptr, out_ptr, outer_ptr, rows, columns, seed,
    x_row, x_column, out_row, out_column,
    ROWS: tl.constexpr, OUTER: tl.constexpr, ONE_SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, ROUND_UP: tl.constexpr,
):  # fmt: skip
    """Fake-quantize a tile of ROWS × OUTER; with ONE_SCALE the outer scale of the tensor is given."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * OUTER + tl.arange(0, OUTER)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (ROWS, OUTER // 16, 16))
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    inner_bits = tl.max(bits, axis=2)  # (ROWS, blocks)
    amax = inner_bits.to(tl.float32, bitcast=True)
    if ONE_SCALE:
        outer = tl.load(outer_ptr) + tl.zeros((ROWS, 1), dtype=tl.float32)
    else:
        outer = _outer_scale(tl.max(inner_bits, axis=1).to(tl.float32, bitcast=True))[:, None]
    outer = tl.broadcast_to(outer, (ROWS, OUTER // 16))
    ratio = tl.math.div_rn(tl.math.div_rn(amax, outer), 6.0)
    product = _inner_scale(ratio, ROUND_UP) * outer
    divisor = tl.where(product == 0.0, float("inf"), product)
    t = tl.math.div_rn(x, tl.broadcast_to(divisor[:, :, None], (ROWS, OUTER // 16, 16)))
    t = tl.where(t > 6.0, 6.0, t)
    t = tl.where(t < -6.0, -6.0, t)
    step_bits = tl.maximum(t.to(tl.int32, bitcast=True) & _EXPONENT, _ONE)
    if STOCHASTIC:
        inverse = (-step_bits + _EXPONENT).to(tl.float32, bitcast=True)  # 1/g
        index = tl.reshape(row * columns + column, (ROWS, OUTER // 16, 16))
        k = tl.randint(seed, index) & 0xFFFF
        u = (k.to(tl.float32) + 0.5) * 0.0000152587890625
        q = tl.floor(t * inverse + u) * ((step_bits - (1 << 23)).to(tl.float32, bitcast=True))
    else:
        magic = (step_bits + _MAGIC_E2M1).to(tl.float32, bitcast=True)
        q = (t + magic) - magic
    y = q * tl.broadcast_to(product[:, :, None], (ROWS, OUTER // 16, 16))
    y = tl.reshape(y, (ROWS, OUTER))
    tl.store(out_ptr + row * out_row + column * out_column, y, mask=inside)


def triton_fake_quant(
    x: torch.Tensor,
    outer_block_size: int = 128,
    rounding: str = "nearest",
    scale_rounding: str = "nearest",
    generator: torch.Generator | None = None,
    dim: int = -1,
) -> torch.Tensor:
    """`nvfp4_fake_quant` as one kernel launch.

    Args:
        x (`torch.Tensor`): Matrix of a real floating dtype on a GPU.
        outer_block_size (`int`, defaults to 128): Power of two from 16 to 1024, or -1 for one outer scale.
        rounding (`str`, defaults to `"nearest"`): `"nearest"`, bit-equal to the emulation, or `"stochastic"`, whose
            noise comes from a Philox stream keyed by one draw from `generator`.
        scale_rounding (`str`, defaults to `"nearest"`): `"nearest"` or `"up"`.
        generator (`torch.Generator`, *optional*): Source of the key, on the device of `x` or on the CPU.
        dim (`int`, defaults to -1): Dim the blocks lie along, -1 or 0.

    Returns:
        `torch.Tensor`: FP32 numbers of the shape of `x`.

    Raises:
        ValueError: If an option is not supported.
    """
    sizes = (-1, 16, 32, 64, 128, 256, 512, 1024)
    if outer_block_size not in sizes:
        raise ValueError(f"outer_block_size must be one of {sizes} for the Triton quantizer, got {outer_block_size}")
    if rounding not in ("nearest", "stochastic") or scale_rounding not in ("nearest", "up"):
        raise ValueError(f"rounding {rounding!r} or scale_rounding {scale_rounding!r} is not allowed")
    if x.dim() != 2 or dim not in (-1, 0) or not x.is_floating_point():
        raise ValueError(f"x must be a real matrix and dim -1 or 0, got {x.dtype} {tuple(x.shape)} and {dim}")
    x = x.detach()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return out
    source, target = (x, out) if dim == -1 else (x.t(), out.t())
    rows, columns = source.shape
    one_scale = outer_block_size == -1
    width = 128 if one_scale else outer_block_size
    outer = torch.ones(1, device=x.device)
    if one_scale:
        outer = x.to(torch.float32).abs().amax().reshape(1) / OUTER_DIVISOR
        outer = torch.where(outer == 0, 1.0, outer)
        outer = outer + (outer - outer)
    seed = 0
    if rounding == "stochastic":
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(0, 2**31 - 1, (1,), generator=generator, device=device))
    tile_rows = max(1, 2048 // width)
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(columns, width))
    _fake_quant_kernel[grid](
        source, target, outer, rows, columns, seed, *source.stride(), *target.stride(),
        ROWS=tile_rows, OUTER=width, ONE_SCALE=one_scale, STOCHASTIC=rounding == "stochastic",
        ROUND_UP=scale_rounding == "up",
    )  # fmt: skip
    return out
