"""The double-block NVFP4 quantizer Q(x), emulated bit for bit (arXiv 2510.27527, section on the double-block format).

    s_o = max|x over 128| / 2688                  outer scale, FP32; 1 where the block is zero
    s_i = E4M3((max|x over 16| / s_o) / 6)        inner scale, floored at 2^-9
    t   = x / (s_i·s_o)                           a true FP32 division: a reciprocal would break ties
    q   = E2M1 of t                               nearest with ties to the even code, or stochastic
    x̂   = q·(s_i·s_o)

Blocks lie along the contraction dim of the matrix product. For an operand that is used transposed (`dim=0`) they lie
along its rows' dim, so no transposed copy is made. NaN or Inf makes its whole outer block NaN.
"""

import torch
import torch.nn.functional as F

from .formats import (
    E4M3_MAX,
    E4M3_MIN,
    E4M3_MIN_NORMAL,
    code_of_e2m1,
    round_e2m1_,
    round_e2m1_stochastic_,
    round_e4m3_,
    to_e4m3,
)
from .rng import stochastic_noise

__all__ = ["INNER", "OUTER_DIVISOR", "Blocks", "Workspace", "block_scales", "over_row_groups"]

INNER = 16
OUTER_DIVISOR = 2688.0  # 6·448: largest E2M1 times largest E4M3
_TINY_SCALE = 1e-30  # below it FP32 denormals come near
_CHUNK = 1 << 17  # elements worked on at a time: the passes then stay in the second-level cache
_MAGNITUDE = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device="cpu")


def block_scales(
    amax: torch.Tensor,
    outer_block_size: int = 128,
    scale_rounding: str = "nearest",
    tile_2d: bool = False,
    tensor_amax: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both scales of every inner block from the blocks' largest magnitudes.

    Args:
        amax (`torch.Tensor`): max|x| of every inner block, FP32, `(rows, blocks)`.
        outer_block_size (`int`, defaults to 128): -1 for one outer scale, or a multiple of 16.
        scale_rounding (`str`, defaults to `"nearest"`): Or `"up"`, with which no element is ever clipped.
        tile_2d (`bool`, defaults to `False`): Share the scale among 16 rows (16×16 tiles; outer tiles are square too),
            so that the transposed tensor has the same scales.
        tensor_amax (`float`, *optional*): With one outer scale, the maximum it stands for (shared by fused layers at
            export).

    Returns:
        `tuple`: s_i (FP32 on the E4M3 grid, `(rows, blocks)`), s_o (FP32, `(rows, outer blocks)` or `(1,)`) and the
        FP32 product s_i·s_o of every inner block.
    """
    if tile_2d:
        amax = over_row_groups(amax, INNER)
    blocks = amax.shape[1]
    if outer_block_size == -1:
        largest = amax.amax().reshape(1) if amax.numel() else amax.new_zeros(1)
        if tensor_amax is not None:
            largest.fill_(tensor_amax)
        grouped, outer = amax, largest
    else:
        per = outer_block_size // INNER
        missing = -blocks % per
        grouped = (F.pad(amax, (0, missing)) if missing else amax).unflatten(1, (-1, per))
        largest = grouped.contiguous().view(torch.int32).amax(-1, keepdim=True).view(torch.float32)  # NaN is largest
        if tile_2d:
            largest = over_row_groups(largest.squeeze(-1), outer_block_size).unsqueeze(-1)
    outer = largest / OUTER_DIVISOR
    outer = torch.where(outer == 0, 1.0, outer)
    outer += outer - outer  # Inf becomes NaN, as loud as NaN itself
    ratio = (grouped / outer).div_(6.0).clamp_(max=E4M3_MAX)
    inner = round_e4m3_(ratio) if scale_rounding == "nearest" else to_e4m3(ratio, "up").to(torch.float32)
    inner = inner.clamp_min_(E4M3_MIN)
    product = inner * outer
    if outer_block_size == -1:
        return inner, outer, product
    inner, product = inner.flatten(1)[:, :blocks], product.flatten(1)[:, :blocks]
    return inner, outer.squeeze(-1), product


def over_row_groups(amax: torch.Tensor, group: int) -> torch.Tensor:
    """Replace each entry by the largest of its column inside its group of rows.

    Args:
        amax (`torch.Tensor`): `(rows, blocks)`.
        group (`int`): Rows of a group.

    Returns:
        `torch.Tensor`: `(rows, blocks)`.
    """
    rows = amax.shape[0]
    grouped = F.pad(amax, (0, 0, 0, -rows % group)).unflatten(0, (-1, group)).amax(1)
    return grouped.repeat_interleave(group, dim=0)[:rows]


class Workspace:
    """Scratch memory that the quantizers of one pass hand on to each other: fresh memory is slow memory."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def like(self, x: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized tensor of the shape of `x`, valid until the next call with this name.

        Args:
            x (`torch.Tensor`): Gives shape and device.
            name (`str`): Which buffer.
            dtype (`torch.dtype`): Its dtype.

        Returns:
            `torch.Tensor`: Contiguous tensor.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < x.numel():
            buffer = self._buffers[name] = torch.empty(x.numel(), dtype=dtype, device=x.device)
        return buffer[: x.numel()].view(x.shape)


class Blocks:
    """A matrix seen as inner blocks along its last dim (`dim=-1`) or along its rows (`dim=0`), and passes over it.

    `view` is `(blocks, 16)` or `(groups of 16 rows, 16, columns)`; the scales have size 1 in the dim of 16.
    """

    def __init__(self, x: torch.Tensor, dim: int, workspace: Workspace | None = None) -> None:
        self.workspace = workspace or Workspace()
        size = x.shape[dim]
        pad = -size % INNER
        x = x.to(torch.float32)
        if pad:
            x = F.pad(x, (0, pad) if dim == -1 else (0, 0, 0, pad))
        x = x.contiguous()
        self.dim, self.size, self.padded_shape = dim, size, x.shape
        self.view = x.view(-1, INNER) if dim == -1 else x.view(-1, INNER, x.shape[1])
        self.chunk = (
            max(1, _CHUNK // max(1, self.view[:1].numel())) if x.device.type == "cpu" else max(1, len(self.view))
        )

    def amax(self) -> torch.Tensor:
        """max|x| of every block, `(rows, blocks)`: the bits of |x| as integers have the order of |x|, NaN largest."""
        view = self.view
        shape = (len(view),) if self.dim == -1 else (len(view), view.shape[2])
        out = torch.empty(shape, dtype=torch.int32, device=view.device)
        scratch = self.workspace.like(view[: self.chunk], "bits", torch.int32)
        for part, target in zip(view.view(torch.int32).split(self.chunk), out.split(self.chunk), strict=True):
            magnitude = torch.bitwise_and(part, _MAGNITUDE, out=scratch[: len(part)])
            torch.amax(magnitude, 1, out=target)
        out = out.view(torch.float32)
        return out.view(self.padded_shape[0], -1) if self.dim == -1 else out.t()

    def spread(self, per_block: torch.Tensor) -> torch.Tensor:
        """Bring `(rows, blocks)` values into the shape that broadcasts against `view`."""
        return per_block.reshape(-1, 1) if self.dim == -1 else per_block.t().contiguous().unsqueeze(1)

    def crop(self, full: torch.Tensor) -> torch.Tensor:
        full = full.view(self.padded_shape)
        return full if self.padded_shape[self.dim] == self.size else full.narrow(self.dim, 0, self.size)

    def round(
        self,
        inner: torch.Tensor,
        scales: torch.Tensor,
        rounding: str,
        scale_rounding: str,
        generator: torch.Generator | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Fill `out`, of the shape of `view`, with x̂ (FP32; may be `view` itself) or with the codes (uint8)."""
        view = self.view
        stochastic = rounding == "stochastic"
        product = divisor = self.spread(scales)
        # Clamping can only matter where an inner scale is subnormal (its rounding error is large), where SR meets a
        # scale that was rounded down, or beside the extreme scales. Asking costs less than clamping, on a CPU.
        extreme = view.device.type != "cpu" or not float(scales.min()) >= _TINY_SCALE  # NaN is extreme too
        saturate = extreme or (scale_rounding == "nearest" if stochastic else float(inner.min()) < E4M3_MIN_NORMAL)
        if extreme:  # a product that underflowed: dividing by Inf gives code 0, and x̂ = 0·0
            divisor = torch.where(product == 0, torch.inf, product)
        codes = out.dtype == torch.uint8
        first = view[: self.chunk]
        bits = self.workspace.like(first, "bits", torch.int32)
        values = self.workspace.like(first, "values", torch.float32) if codes else None
        if stochastic:
            noise = self.workspace.like(first, "noise", torch.float32)
            draws = self.workspace.like(first.flatten()[: -(-first.numel() // 4)], "draws", torch.int64)
        chunks = (x.split(self.chunk) for x in (view, divisor, product, out))
        for part, divide_by, multiply_by, target in zip(*chunks, strict=True):
            n = len(part)
            t, scratch = (values[:n] if codes else target), bits[:n]
            torch.div(part, divide_by, out=t)
            if stochastic:
                if saturate:
                    t.clamp_(-6.0, 6.0)
                u = stochastic_noise(part.numel(), generator, view.device, noise[:n], draws).view(part.shape)
                round_e2m1_stochastic_(t, u, scratch)
            else:
                round_e2m1_(t, scratch, saturate)
            if codes:
                target.copy_(code_of_e2m1(t, part))
            else:
                t.mul_(multiply_by)
        if codes and extreme:
            out.masked_fill_(product.isnan().expand_as(out), 0)
        return out
