"""Slow, table-searching NumPy twin of the quantizer: the oracle of the tests and of the benchmark's self-check.

It shares no code with `formats` and `quantize`: every rounding looks for the nearest table entry in FP64, where all
the numbers involved are exact.
"""

import numpy as np

__all__ = ["e2m1_table", "e4m3_table", "quantize_reference", "round_to_table"]

_f32 = np.float32


def e2m1_table() -> np.ndarray:
    """The eight magnitudes of E2M1.

    Returns:
        `np.ndarray`: FP64, ascending; the index is the code without its sign.
    """
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def e4m3_table() -> np.ndarray:
    """The 127 non-negative finite numbers of E4M3.

    Returns:
        `np.ndarray`: FP64, ascending; the index is the byte.
    """
    byte = np.arange(127)
    exponent, mantissa = byte >> 3, byte & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(np.float64) - 10))


def round_to_table(x: np.ndarray, table: np.ndarray, mode: str = "nearest") -> np.ndarray:
    """Index of the table entry that each number rounds to.

    Args:
        x (`np.ndarray`): Non-negative numbers; beyond the table they saturate.
        table (`np.ndarray`): Ascending entries.
        mode (`str`, defaults to `"nearest"`): `"nearest"` (ties to the even index) or `"up"`.

    Returns:
        `np.ndarray`: Indices; -1 for NaN.
    """
    x = x.astype(np.float64)
    above = np.clip(np.searchsorted(table, x, side="left"), 0, len(table) - 1)  # first entry ≥ x
    below = np.maximum(above - 1, 0)
    if mode == "up":
        index = above
    else:
        down, up = x - table[below], table[above] - x
        tie = np.where(below % 2 == 0, below, above)
        index = np.where(down < up, below, np.where(down > up, above, tie))
        index = np.where(x >= table[-1], len(table) - 1, index)
    return np.where(np.isnan(x), -1, index)


def quantize_reference(
    x: np.ndarray,
    outer_block_size: int = 128,
    scale_rounding: str = "nearest",
    noise: np.ndarray | None = None,
    tile_2d: bool = False,
) -> dict[str, np.ndarray]:
    """Quantize the rows of a matrix, block by block.

    Args:
        x (`np.ndarray`): FP32 matrix `(rows, K)`.
        outer_block_size (`int`, defaults to 128): Elements under one outer scale; -1 for all.
        scale_rounding (`str`, defaults to `"nearest"`): Or `"up"`.
        noise (`np.ndarray`, *optional*): Uniform noise `(rows, K padded to 16)`: round stochastically with it.
        tile_2d (`bool`, defaults to `False`): 16×16 tiles.

    Returns:
        `dict[str, np.ndarray]`: `codes` (uint8, `(rows, K)`), `inner` (bytes, `(rows, ceil(K/16))`), `outer` (FP32,
        one for each inner block) and `values` (FP32, `(rows, K)`).
    """
    with np.errstate(all="ignore"):
        return _quantize(np.asarray(x, dtype=_f32), outer_block_size, scale_rounding, noise, tile_2d)


def _tile_max(a: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Largest entry of the tile (rows × columns) each entry lies in; NaN wins."""
    out = np.empty_like(a)
    for i in range(0, a.shape[0], rows):
        for j in range(0, a.shape[1], columns):
            out[i : i + rows, j : j + columns] = a[i : i + rows, j : j + columns].max()
    return out


def _quantize(x, outer_block_size, scale_rounding, noise, tile_2d):
    rows, size = x.shape
    width = -(-size // 16) * 16
    padded = np.zeros((rows, width), dtype=_f32)
    padded[:, :size] = x
    amax = np.abs(padded).reshape(rows, -1, 16).max(-1)  # (rows, blocks)
    if tile_2d:
        amax = _tile_max(amax, 16, 1)
    if outer_block_size == -1:
        largest = np.full_like(amax, amax.max() if amax.size else 0)
    else:
        largest = _tile_max(amax, outer_block_size if tile_2d else 1, outer_block_size // 16)
    outer = largest / _f32(2688)
    outer[outer == 0] = 1
    outer[np.isinf(outer)] = np.nan
    ratio = np.minimum((amax / outer) / _f32(6), _f32(448))
    table = e4m3_table()
    index = round_to_table(ratio, table, scale_rounding)
    inner_byte = np.where(index < 0, 0x7F, np.maximum(index, 1)).astype(np.uint8)  # byte 1 is 2^-9, the floor
    inner = np.where(index < 0, np.nan, table[np.clip(inner_byte, 0, 126)]).astype(_f32)
    product = inner * outer
    scale = np.repeat(product, 16, axis=1)
    t = padded / np.where(scale == 0, _f32(np.inf), scale)
    grid = e2m1_table()
    magnitude = np.minimum(np.abs(t), _f32(6))
    if noise is None:
        code = round_to_table(magnitude, grid)
    else:
        step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0)).astype(_f32)
        signed = np.copysign(magnitude, t)
        drawn = step * np.floor((signed / step).astype(_f32) + noise.astype(_f32))
        code = round_to_table(np.abs(drawn), grid)
    values = np.copysign(grid[code], padded).astype(_f32) * scale
    code = np.where(np.isnan(scale), 0, code | np.where(np.signbit(padded), 8, 0))  # NaN lives in the scale
    return {
        "codes": code[:, :size].astype(np.uint8),
        "inner": inner_byte,
        "outer": outer,
        "values": values[:, :size],
    }
