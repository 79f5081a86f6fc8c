"""Number formats: E2M1 (4 bit), E4M3 (8 bit) and MXFP8, emulated bit for bit on any device.

An E2M1 code is `s << 3 | m`, the sign bit and a three-bit magnitude; −0 is code 8. Codes pack two to a byte, the even
index in the low nibble. E4M3 is `torch.float8_e4m3fn`. MXFP8 puts one power of two on each block of 32 E4M3 elements.
"""

import torch
import torch.nn.functional as F

__all__ = [
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_MIN",
    "decode_e2m1",
    "encode_e2m1",
    "from_mxfp8",
    "mxfp8_fake_quant",
    "pack_e2m1",
    "to_e4m3",
    "to_mxfp8",
    "unpack_e2m1",
]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# value of each of the 16 codes; the device is named because a loader may have made "meta" the default
E2M1_VALUES = torch.tensor([*_MAGNITUDES, *(-v for v in _MAGNITUDES)], dtype=torch.float32, device="cpu")
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # smallest positive (subnormal) value
E4M3_MIN_NORMAL = 2.0**-6
MXFP8_BLOCK = 32

_EXPONENT = 0x7F800000  # exponent bits of an FP32 number
# a tensor, because a Python scalar would be converted at every call
_EXPONENT_MASK = torch.tensor(_EXPONENT, dtype=torch.int32, device="cpu")
_ONE = 0x3F800000  # bits of 1.0
_E4M3_NORMAL = 121 << 23  # bits of 2^-6, the smallest normal E4M3 number
_MAGIC_E4M3 = (20 << 23) | (1 << 22)  # as _MAGIC, with unit 2^E/8
_MAGIC = (22 << 23) | (
    1 << 22
)  # added to the bits of 2^E: bits of 1.5·2^(22+E), whose unit in the last place is 2^E/2


def round_e2m1_(t: torch.Tensor, scratch: torch.Tensor | None = None, saturate: bool = True) -> torch.Tensor:
    """Round to the nearest E2M1 value in place, ties to the even code.

    The grid's step at |t| in [2^E, 2^(E+1)) is g = 2^E/2, and 0.5 below 1. Adding and subtracting 1.5·2^23·g lets the
    FP32 adder do the rounding: at that size its unit in the last place is g, and an even mantissa is an even code.

    Args:
        t (`torch.Tensor`): FP32 values, overwritten; NaN stays NaN.
        scratch (`torch.Tensor`, *optional*): Int32 work space of the shape of `t`.
        saturate (`bool`, defaults to `True`): Clamp to ±6; may be dropped where |t| < 7 is known.

    Returns:
        `torch.Tensor`: `t`.
    """
    step_bits = torch.bitwise_and(t.view(torch.int32), _EXPONENT_MASK, out=scratch)
    magic = step_bits.clamp_min_(_ONE).add_(_MAGIC).view(torch.float32)
    t.add_(magic).sub_(magic)
    return t.clamp_(-6.0, 6.0) if saturate else t


def round_e2m1_stochastic_(t: torch.Tensor, u: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
    """Round stochastically to E2M1 in place: g·floor(t/g + u), with the grid's step g at t.

    Args:
        t (`torch.Tensor`): FP32 values in [−6, 6], overwritten.
        u (`torch.Tensor`): Noise in [0, 1) of the same shape.
        scratch (`torch.Tensor`, *optional*): Int32 work space of the shape of `t`.

    Returns:
        `torch.Tensor`: `t`.
    """
    step_bits = torch.bitwise_and(t.view(torch.int32), _EXPONENT_MASK, out=scratch).clamp_min_(_ONE)
    inverse = step_bits.neg_().add_(_EXPONENT).view(torch.float32)  # 1/g, a power of two: t/g below is exact
    torch.addcmul(u, t, inverse, out=t)
    return t.floor_().div_(inverse)


def code_of_e2m1(q: torch.Tensor, sign_source: torch.Tensor) -> torch.Tensor:
    """Codes of values that already lie on the E2M1 grid.

    Args:
        q (`torch.Tensor`): FP32 values on the grid (NaN becomes magnitude 0).
        sign_source (`torch.Tensor`): FP32 numbers whose sign bits give the sign, so that −0 and small negatives keep
            theirs.

    Returns:
        `torch.Tensor`: Codes, uint8, of the same shape.
    """
    a = q.abs()
    code = torch.minimum(a * 2, a + 2)  # 0, .5, 1, 1.5, 2, 3 → 0 … 5
    code = torch.minimum(code, a.mul_(0.5).add_(4)).nan_to_num_(0.0).to(torch.uint8)  # 4, 6 → 6, 7
    sign = (sign_source.contiguous().view(torch.int32) >> 28).bitwise_and_(8)
    return code.bitwise_or_(sign.to(torch.uint8))


def encode_e2m1(t: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code of each number; ties go to the even code, |t| saturates at 6.

    Args:
        t (`torch.Tensor`): Numbers of any floating dtype, already divided by their scale. E2M1 has no NaN: it must
            live in the scale; here NaN gives magnitude 0.

    Returns:
        `torch.Tensor`: Codes 0 … 15, uint8, of the same shape.
    """
    t = t.detach().to(torch.float32).contiguous()
    return code_of_e2m1(round_e2m1_(t.clone()), t)


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Value of each E2M1 code.

    Args:
        codes (`torch.Tensor`): Codes 0 … 15 of an integer dtype.
        dtype (`torch.dtype`, defaults to float32): Dtype of the result; every E2M1 value is exact in all of them.

    Returns:
        `torch.Tensor`: Values of the shape of `codes`.
    """
    table = E2M1_VALUES.to(device=codes.device, dtype=dtype)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Pack two codes into a byte, the even index in the low nibble.

    Args:
        codes (`torch.Tensor`): Uint8 codes of shape `(..., K)`; an odd K gets one zero code.

    Returns:
        `torch.Tensor`: Bytes of shape `(..., ceil(K/2))`, uint8.
    """
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    codes = codes.contiguous()
    if codes.numel() == 0:
        return codes.new_empty(*codes.shape[:-1], codes.shape[-1] // 2)
    pairs = codes.view(torch.int16)  # low byte = even index on a little-endian machine
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_e2m1(packed: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """Undo `pack_e2m1`.

    Args:
        packed (`torch.Tensor`): Bytes of shape `(..., P)`, uint8.
        size (`int`, *optional*): K, when it was odd.

    Returns:
        `torch.Tensor`: Codes of shape `(..., size or 2·P)`, uint8.
    """
    pairs = packed.to(torch.int16)
    codes = ((pairs & 0xF) | ((pairs & 0xF0) << 4)).view(torch.uint8)
    return codes if size is None else codes[..., :size]


def decode_packed_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Values of packed codes by one look-up of 256 pairs.

    Args:
        packed (`torch.Tensor`): Bytes of shape `(..., P)`, uint8.

    Returns:
        `torch.Tensor`: FP32 values of shape `(..., 2·P)`.
    """
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack([decode_e2m1(byte & 0xF), decode_e2m1(byte >> 4)], dim=-1).view(torch.int64).view(-1)
    values = pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.float32)
    return values.view(*packed.shape[:-1], -1) if packed.numel() else values.view(*packed.shape[:-1], 0)


def round_e4m3_(x: torch.Tensor) -> torch.Tensor:
    """Round numbers in [0, 448] to the nearest E4M3 number in place, ties to even, by the addition of `round_e2m1_`.

    Args:
        x (`torch.Tensor`): FP32 numbers, contiguous; NaN stays NaN. Several times faster than a cast there and back.

    Returns:
        `torch.Tensor`: `x`.
    """
    step_bits = torch.bitwise_and(x.view(torch.int32), _EXPONENT_MASK).clamp_min_(_E4M3_NORMAL)
    magic = step_bits.add_(_MAGIC_E4M3).view(torch.float32)
    return x.add_(magic).sub_(magic)


def to_e4m3(x: torch.Tensor, mode: str = "nearest") -> torch.Tensor:
    """Round non-negative numbers to E4M3.

    Args:
        x (`torch.Tensor`): Non-negative numbers; above 448 saturates, infinity and NaN give NaN.
        mode (`str`, defaults to `"nearest"`): `"nearest"` (ties to even) or `"up"` (smallest E4M3 number ≥ x, at most
            448).

    Returns:
        `torch.Tensor`: `torch.float8_e4m3fn` of the same shape.
    """
    if mode not in ("nearest", "up"):
        raise ValueError(f"mode must be 'nearest' or 'up', got {mode!r}")
    x = x.to(torch.float32)
    x = torch.where(x.isinf(), torch.nan, x).clamp(max=E4M3_MAX)  # torch's own cast would turn Inf into 448
    y = x.to(torch.float8_e4m3fn)
    if mode == "nearest":
        return y
    byte = y.view(torch.uint8)
    return (byte + (y.to(torch.float32) < x).to(torch.uint8)).view(torch.float8_e4m3fn)


def _scale_of_exponent(biased: torch.Tensor) -> torch.Tensor:
    """FP32 value of E8M0 exponents (int32): 2^(b−127), NaN for 255."""
    bits = torch.where(biased == 0, 1 << 22, biased << 23)  # 2^-127 is an FP32 denormal
    return torch.where(biased == 255, torch.nan, bits.view(torch.float32))


def _times_scale(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Element times scale in FP32; a number just below the largest FP32 may round up to 2^128, which saturates."""
    largest = torch.finfo(torch.float32).max
    return elements.to(torch.float32).mul_(scale).clamp_(-largest, largest)


def _mxfp8_blocks(blocks: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements (E4M3) and biased exponents (int32, `dim` kept with size 1) of blocks that lie along `dim`."""
    amax = blocks.abs().amax(dim, keepdim=True)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)  # amax/448 = mantissa·2^exponent, mantissa in [1/2, 1)
    biased = (exponent - (mantissa == 0.5).to(torch.int32) + 127).clamp_(0, 254)
    biased = torch.where(amax == 0, 127, biased)  # zero block: s = 1
    biased = torch.where(amax.isfinite(), biased, 255)
    elements = (blocks / _scale_of_exponent(biased)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return elements, biased


def to_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to MXFP8 in blocks of 32 along the last dim: s = 2^ceil(log2(max|x|/448)), element = E4M3 of x/s.

    Args:
        x (`torch.Tensor`): Numbers of any floating dtype, `(..., K)`; K is zero-padded to a multiple of 32 inside.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Elements (`float8_e4m3fn`, `(..., K)`) and biased exponents b of s =
        2^(b−127) (uint8, `(..., ceil(K/32))`; 255 is NaN and marks a block that held NaN or Inf; a zero block has s =
        1).
    """
    x = x.detach().to(torch.float32)
    size = x.shape[-1]
    blocks = F.pad(x, (0, -size % MXFP8_BLOCK)).unflatten(-1, (-1, MXFP8_BLOCK))
    elements, biased = _mxfp8_blocks(blocks, -1)
    return elements.flatten(-2)[..., :size], biased.squeeze(-1).to(torch.uint8)


def from_mxfp8(elements: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Undo `to_mxfp8`.

    Args:
        elements (`torch.Tensor`): E4M3 elements `(..., K)`.
        exponents (`torch.Tensor`): Biased exponents, uint8, `(..., ceil(K/32))`.
        dtype (`torch.dtype`, defaults to float32): Dtype of the result.

    Returns:
        `torch.Tensor`: Dequantized numbers, `(..., K)`.
    """
    scale = _scale_of_exponent(exponents.to(torch.int32))
    scale = scale.repeat_interleave(MXFP8_BLOCK, dim=-1)[..., : elements.shape[-1]]
    return _times_scale(elements, scale).to(dtype)


def mxfp8_fake_quant(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Round to MXFP8 and back, M(x).

    Args:
        x (`torch.Tensor`): Numbers of any floating dtype, `(..., K)`, or `(K, C)` with `dim=0`.
        dim (`int`, defaults to -1): The contraction dim: -1, or 0 for a matrix.

    Returns:
        `torch.Tensor`: FP32 numbers of the shape of `x`.
    """
    x = x.detach().to(torch.float32)
    size = x.shape[dim]
    if dim == 0:
        blocks = F.pad(x, (0, 0, 0, -size % MXFP8_BLOCK)).unflatten(0, (-1, MXFP8_BLOCK))
        elements, biased = _mxfp8_blocks(blocks, 1)
        return _times_scale(elements, _scale_of_exponent(biased)).flatten(0, 1)[:size]
    blocks = F.pad(x, (0, -size % MXFP8_BLOCK)).unflatten(-1, (-1, MXFP8_BLOCK))
    elements, biased = _mxfp8_blocks(blocks, -1)
    return _times_scale(elements, _scale_of_exponent(biased)).flatten(-2)[..., :size]
