"""NVFP4 tensors and the functions that quantize to them (the algorithm is in `blocks`).

Blocks lie along the contraction dim of the matrix product. NaN or Inf makes its whole outer block NaN.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .blocks import INNER, Blocks, Workspace, block_scales, over_row_groups
from .formats import decode_e2m1, decode_packed_e2m1, pack_e2m1, unpack_e2m1

__all__ = ["NVFP4Tensor", "Workspace", "nvfp4_fake_quant", "nvfp4_quantize", "nvfp4_quantize_2d"]


@dataclass
class NVFP4Tensor:
    """A quantized tensor.

    Args:
        codes (`torch.Tensor`): E2M1 codes, uint8, `(..., K)`; or `(..., ceil(K/2))` when `is_packed`.
        inner (`torch.Tensor`): Inner scales s_i, `float8_e4m3fn`, `(..., ceil(K/16))`.
        outer (`torch.Tensor`): Outer scales s_o, FP32, `(..., ceil(K/outer_block_size))`, or `(1,)` for one per
            tensor.
        shape (`torch.Size`): Shape of the tensor it stands for.
        outer_block_size (`int`): Elements under one outer scale; -1 for the whole tensor.
        is_packed (`bool`, defaults to `False`): Two codes to a byte.
    """

    codes: torch.Tensor
    inner: torch.Tensor
    outer: torch.Tensor
    shape: torch.Size
    outer_block_size: int = 128
    is_packed: bool = False

    @property
    def _size(self) -> int:
        return self.shape[-1] if self.shape else 1

    def pack(self) -> "NVFP4Tensor":
        """The same tensor with two codes to a byte.

        Returns:
            `NVFP4Tensor`: Packed tensor; itself when already packed.
        """
        if self.is_packed:
            return self
        return NVFP4Tensor(pack_e2m1(self.codes), self.inner, self.outer, self.shape, self.outer_block_size, True)

    def unpacked_codes(self) -> torch.Tensor:
        """Codes, one to a byte.

        Returns:
            `torch.Tensor`: Uint8, of the shape of the tensor.
        """
        return unpack_e2m1(self.codes, self._size) if self.is_packed else self.codes

    def scales(self) -> torch.Tensor:
        """Product s_i·s_o of every inner block, rounded to FP32.

        Returns:
            `torch.Tensor`: FP32, `(..., ceil(K/16))`.
        """
        inner = self.inner.to(torch.float32)
        if self.outer_block_size == -1:
            return inner * self.outer
        per = self.outer_block_size // INNER
        return inner * self.outer.repeat_interleave(per, dim=-1)[..., : inner.shape[-1]]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """x̂ = value(code)·(s_i·s_o).

        Args:
            dtype (`torch.dtype`, defaults to float32): Dtype of the result; the product itself is FP32.

        Returns:
            `torch.Tensor`: Numbers of the tensor's shape.
        """
        if self.codes.numel() == 0:
            return torch.zeros(self.shape, dtype=dtype, device=self.codes.device)
        size = self._size
        values = decode_packed_e2m1(self.codes) if self.is_packed else decode_e2m1(self.codes)
        scales = self.scales()
        values = F.pad(values, (0, scales.shape[-1] * INNER - values.shape[-1]))
        values = values.unflatten(-1, (scales.shape[-1], INNER)).mul_(scales.unsqueeze(-1)).flatten(-2)
        return values[..., :size].reshape(self.shape).to(dtype)


def _check(x: torch.Tensor, outer_block_size: int, rounding: str, scale_rounding: str) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x must be a real floating-point tensor, got {x.dtype}")
    if outer_block_size != -1 and (outer_block_size <= 0 or outer_block_size % INNER):
        raise ValueError(f"outer_block_size must be -1 or a positive multiple of 16, got {outer_block_size}")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if scale_rounding not in ("nearest", "up"):
        raise ValueError(f"scale_rounding must be 'nearest' or 'up', got {scale_rounding!r}")


def nvfp4_quantize(
    x: torch.Tensor,
    outer_block_size: int = 128,
    rounding: str = "nearest",
    scale_rounding: str = "nearest",
    generator: torch.Generator | None = None,
    tile_2d: bool = False,
    tensor_amax: float | None = None,
) -> NVFP4Tensor:
    """Quantize to NVFP4 codes and scales, blocks along the last dim.

    Args:
        x (`torch.Tensor`): Numbers of any real floating dtype, `(..., K)`; quantized in FP32. Any K: the tail is
            zero-padded inside and padding changes no scale.
        outer_block_size (`int`, defaults to 128): Elements under one FP32 scale; -1 for the whole tensor.
        rounding (`str`, defaults to `"nearest"`): `"nearest"` (ties to the even code) or `"stochastic"` (unbiased).
        scale_rounding (`str`, defaults to `"nearest"`): How the inner scale is rounded to E4M3: `"nearest"` or `"up"`.
        generator (`torch.Generator`, *optional*): Noise of stochastic rounding.
        tile_2d (`bool`, defaults to `False`): Inner blocks of 16×16 of a matrix instead of 1×16.
        tensor_amax (`float`, *optional*): With `outer_block_size=-1`, the maximum behind the outer scale, at least
            that of `x`.

    Returns:
        `NVFP4Tensor`: Codes and scales.

    Raises:
        TypeError: If `x` is complex or integer.
        ValueError: If an option is not one of the allowed ones.

    Example:
        ```python
        >>> import torch
        >>> from hf_models.tetrajet_v2 import nvfp4_quantize
        >>> q = nvfp4_quantize(torch.linspace(-1, 1, 128).view(1, 128))
        >>> q.codes.shape, q.inner.shape, q.outer.shape
        (torch.Size([1, 128]), torch.Size([1, 8]), torch.Size([1, 1]))
        >>> bool((q.dequantize() - torch.linspace(-1, 1, 128)).abs().max() < 0.17)
        True

        ```
    """
    _check(x, outer_block_size, rounding, scale_rounding)
    if tile_2d:
        _check_matrix(x)
    shape = x.shape
    x = x.detach().reshape(shape or 1)
    lead, size = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        inner = x.new_zeros((*lead, -(-size // INNER)), dtype=torch.float8_e4m3fn)
        outer = x.new_ones(
            (1,) if outer_block_size == -1 else (*lead, -(-size // outer_block_size)), dtype=torch.float32
        )
        return NVFP4Tensor(x.new_zeros(x.shape, dtype=torch.uint8), inner, outer, shape, outer_block_size)
    blocks = Blocks(x.reshape(-1, size), -1)
    amax = blocks.amax()
    if tile_2d:
        amax = over_row_groups(amax, INNER)
    inner, outer, scales = block_scales(amax, outer_block_size, scale_rounding, tile_2d, tensor_amax)
    out = torch.empty_like(blocks.view, dtype=torch.uint8)
    codes = blocks.crop(blocks.round(inner, scales, rounding, scale_rounding, generator, out))
    outer = outer if outer_block_size == -1 else outer.reshape(*lead, outer.shape[1])
    inner = inner.abs().to(torch.float8_e4m3fn).reshape(*lead, inner.shape[1])  # one NaN byte, 0x7F
    return NVFP4Tensor(codes.reshape(x.shape), inner, outer, shape, outer_block_size)


def nvfp4_fake_quant(
    x: torch.Tensor,
    outer_block_size: int = 128,
    rounding: str = "nearest",
    scale_rounding: str = "nearest",
    generator: torch.Generator | None = None,
    tile_2d: bool = False,
    dim: int = -1,
    workspace: Workspace | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """Quantize and dequantize in one go: the same numbers as `nvfp4_quantize(...).dequantize()`, without the codes.

    Args:
        x (`torch.Tensor`): Numbers of any real floating dtype, `(..., K)`, or a matrix `(K, C)` with `dim=0`.
        outer_block_size (`int`, defaults to 128): Elements under one FP32 scale; -1 for the whole tensor.
        rounding (`str`, defaults to `"nearest"`): `"nearest"` or `"stochastic"`.
        scale_rounding (`str`, defaults to `"nearest"`): `"nearest"` or `"up"`.
        generator (`torch.Generator`, *optional*): Noise of stochastic rounding.
        tile_2d (`bool`, defaults to `False`): Inner blocks of 16×16 of a matrix instead of 1×16.
        dim (`int`, defaults to -1): Dim the blocks lie along: -1, or 0 for a matrix that enters the product
            transposed.
        workspace (`Workspace`, *optional*): Scratch memory shared by several calls.
        inplace (`bool`, defaults to `False`): Overwrite `x`, which must be contiguous and whole blocks.

    Returns:
        `torch.Tensor`: Quantized numbers, of the shape and dtype of `x`.

    Raises:
        TypeError: If `x` is complex or integer.
        ValueError: If an option is not one of the allowed ones.
    """
    _check(x, outer_block_size, rounding, scale_rounding)
    if tile_2d or dim != -1:
        _check_matrix(x)
    if dim not in (-1, 0):
        raise ValueError(f"dim must be -1 or 0, got {dim}")
    if x.numel() == 0:
        return x.detach().clone()
    shape, x = x.shape, x.detach()
    blocks = Blocks(x.reshape(-1, shape[-1] if x.dim() else 1), dim, workspace)
    amax = blocks.amax()
    if tile_2d:
        amax = over_row_groups(amax, INNER)
    inner, _, scales = block_scales(amax, outer_block_size, scale_rounding, tile_2d)
    out = blocks.view if inplace else torch.empty_like(blocks.view)
    out = blocks.crop(blocks.round(inner, scales, rounding, scale_rounding, generator, out))
    return out.reshape(shape).to(x.dtype)


def nvfp4_quantize_2d(
    x: torch.Tensor,
    outer_block_size: int = -1,
    rounding: str = "nearest",
    scale_rounding: str = "nearest",
    generator: torch.Generator | None = None,
) -> NVFP4Tensor:
    """Quantize a matrix in 16×16 tiles: the matrix and its transpose have the same codes (arXiv 2509.25149).

    Args:
        x (`torch.Tensor`): Matrix of any real floating dtype.
        outer_block_size (`int`, defaults to -1): Side of the square under one FP32 scale; -1 for the whole tensor.
        rounding (`str`, defaults to `"nearest"`): `"nearest"` or `"stochastic"`.
        scale_rounding (`str`, defaults to `"nearest"`): `"nearest"` or `"up"`.
        generator (`torch.Generator`, *optional*): Noise of stochastic rounding.

    Returns:
        `NVFP4Tensor`: Codes and scales, the scales repeated for every row of a tile.

    Raises:
        ValueError: If `x` is not a matrix.
    """
    return nvfp4_quantize(x, outer_block_size, rounding, scale_rounding, generator, tile_2d=True)


def _check_matrix(x: torch.Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must be a matrix for 16×16 tiles or blocks along dim 0, got shape {tuple(x.shape)}")
