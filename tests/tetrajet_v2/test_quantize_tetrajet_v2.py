"""The double-block quantizer: golden values, equality with the table-searching oracle, bad input."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_models.tetrajet_v2 import nvfp4_fake_quant, nvfp4_quantize, nvfp4_quantize_2d
from hf_models.tetrajet_v2.blocks import Blocks
from hf_models.tetrajet_v2.reference import e2m1_table, quantize_reference
from hf_models.tetrajet_v2.rng import stochastic_noise

OPTIONS = list(itertools.product([-1, 16, 128], ["nearest", "up"], [False, True]))


def edge_row() -> torch.Tensor:
    """The golden row of eight hand-made blocks."""
    five = float(np.nextafter(np.float32(5), np.float32(6)))
    blocks = [
        [448 * v for v in (6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, five, -0.25, -0.75, -5, -2.5, 0, 0.2499, -6)],
        [6, 3.25, -1.75],
        [6.375, 6, 5, -3.5],
        [6 * 2**-9, 2**-9, -(2**-10)],
        [6 * 2**-11, 2**-11, -(2**-12)],
        [-0.0],
        [7.125, 4, -1],
        [1.0] * 16,
    ]
    return torch.tensor([[v for block in blocks for v in block + [0.0] * (16 - len(block))]])


def dense_row() -> torch.Tensor:
    i = torch.arange(128)
    return (((37 * i) % 101 - 50).float() / 16)[None]


def tie_matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    """Values on and beside the ties of their own block's grid, with all sorts of block sizes and zero blocks."""
    rng = np.random.default_rng(seed)
    grid = e2m1_table()
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    t = rng.choice(points, (rows, columns)) * rng.choice([-1, 1], (rows, columns))
    scale = np.repeat(rng.choice(2.0 ** np.arange(-18, 10), (rows, -(-columns // 16))), 16, axis=1)[:, :columns]
    x = (t * scale).astype(np.float32)
    direction = rng.choice([-np.inf, 0, np.inf], (rows, columns)).astype(np.float32)
    x = np.where(direction == 0, x, np.nextafter(x, direction))
    x[rng.random((rows, columns)) < 0.02] = 0
    x[:: max(1, rows // 8), :16] = 0
    return x


def compare(x: np.ndarray, outer: int, scale_rounding: str, tile_2d: bool, stochastic: bool) -> None:
    """Codes, scale bytes and values against the oracle, bit for bit."""
    rows, columns = x.shape
    width = -(-columns // 16) * 16
    noise = None
    if stochastic:
        noise = stochastic_noise(rows * width, torch.Generator().manual_seed(3)).view(rows, width).numpy()
    expected = quantize_reference(x, outer, scale_rounding, noise, tile_2d)
    options = dict(
        outer_block_size=outer,
        rounding="stochastic" if stochastic else "nearest",
        scale_rounding=scale_rounding,
        tile_2d=tile_2d,
    )
    q = nvfp4_quantize(torch.from_numpy(x), generator=torch.Generator().manual_seed(3), **options)
    assert np.array_equal(q.codes.numpy(), expected["codes"])
    assert np.array_equal(q.inner.view(torch.uint8).numpy(), expected["inner"])
    fake = nvfp4_fake_quant(torch.from_numpy(x), generator=torch.Generator().manual_seed(3), **options)
    for values in (q.dequantize(), q.pack().dequantize(), fake):
        assert np.array_equal(values.numpy(), expected["values"], equal_nan=True)


# ------------------------------------------------------------------------------------------------------ golden values


PACKED_EDGE = (
    "0722446687ea0cf0 570c000000000000 77e6000000000000 2709000000000000"
    " 0308000000000000 0800000000000000 570a000000000000 7777777777777777"
)
PACKED_DENSE = (
    "bfe5692ec7f45a0ed6724cafe6613db7f5692ed7f45b8ee6724cafe5603dc7f5"
    "691ed7f45b8ed6724cafe6603dc7f56a1ed6f35b9ee6724cbfe5603dc7f56a1e"
)


def test_edge_row_has_the_golden_codes_and_scales_when_quantized():
    q = nvfp4_quantize(edge_row())
    assert float(q.outer) == 1.0
    assert bytes(q.inner.view(torch.uint8)[0].tolist()).hex() == "7e3838010101" + "3a23"
    assert bytes(q.pack().codes[0].tolist()).hex() == PACKED_EDGE.replace(" ", "")
    codes = q.codes.view(8, 16).tolist()
    assert codes[0] == [7, 0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 14, 12, 0, 0, 15]
    assert codes[1][:3] == [7, 5, 12] and codes[2][:4] == [7, 7, 6, 14] and codes[3][:3] == [7, 2, 9]
    assert codes[4][:3] == [3, 0, 8] and codes[5][0] == 8 and codes[6][:3] == [7, 5, 10] and codes[7] == [7] * 16
    assert q.dequantize().view(8, 16)[7].tolist() == [1.03125] * 16


def test_only_the_block_with_an_inexact_scale_differs_when_scales_are_rounded_up():
    q = nvfp4_quantize(edge_row(), scale_rounding="up")
    assert bytes(q.inner.view(torch.uint8)[0].tolist()).hex() == "7e3839010101" + "3a23"
    assert q.codes.view(8, 16)[2, :4].tolist() == [7, 7, 6, 13]


def test_dense_row_has_the_golden_bytes_and_errors_when_quantized():
    x = dense_row()
    q = nvfp4_quantize(x)
    assert float(q.outer) == float.fromhex("0x1.30c30cp-10")
    assert q.inner.float().tolist() == [[448, 448, 416, 448, 448, 416, 448, 416]]
    assert bytes(q.pack().codes[0].tolist()).hex() == PACKED_DENSE
    assert abs(float((q.dequantize() - x).square().sum()) - 4.742818) < 1e-5
    up = nvfp4_quantize(x, scale_rounding="up")
    assert up.inner.float().tolist() == [[448] * 8]
    assert abs(float((up.dequantize() - x).square().sum()) - 4.840170) < 1e-5


def test_zero_row_stays_zero_when_quantized():
    q = nvfp4_quantize(torch.zeros(1, 128))
    assert q.outer.tolist() == [[1.0]] and q.inner.view(torch.uint8).tolist() == [[1] * 8]
    assert not q.codes.any() and torch.equal(q.dequantize(), torch.zeros(1, 128))


@pytest.mark.parametrize(
    ("t", "low", "high"),
    [(0.6, 0.5, 1), (2.3, 2, 3), (4.5, 4, 6), (0.1, 0, 0.5), (1.9, 1.5, 2), (5.9, 4, 6), (-2.3, -3, -2), (3.0, 3, 3)],
)
def test_two_neighbours_with_the_right_mean_and_variance_when_rounded_stochastically(t, low, high, generator):
    draws = 200_000
    x = torch.full((draws // 8, 16), t)
    x[:, 8:] = 0
    x[:, 8] = 6 * 448.0  # pins s_i = 448·s_o, …
    x[:, 0] = t
    x = torch.cat([x, torch.zeros(draws // 8, 112)], 1)
    x[:, 16:24], x[:, 24] = t, 6.0  # … so the second block has s_i·s_o = 1
    y = nvfp4_fake_quant(x, rounding="stochastic", generator=generator)[:, 16:24].double().flatten()
    assert set(y.unique().tolist()) <= {low, high}  # never a third value
    step, p = high - low, (t - low) / (high - low) if high > low else 0.0
    error = step * (p * (1 - p) / draws) ** 0.5
    assert abs(float(y.mean()) - t) <= 4 * error + 1e-6
    assert abs(float(y.var()) - p * (1 - p) * step**2) <= 0.02 * step**2


@pytest.mark.parametrize(
    ("scale_rounding", "rounding", "expected"),
    [
        ("nearest", "nearest", 0.00904),
        ("nearest", "stochastic", 0.0187),
        ("up", "nearest", 0.00989),
        ("up", "stochastic", 0.0212),
    ],
)
def test_relative_error_is_the_golden_one_when_normal_numbers_are_quantized(
    scale_rounding, rounding, expected, generator
):
    x = torch.randn(1024, 1024, generator=generator)
    y = nvfp4_fake_quant(x, 128, rounding, scale_rounding, generator)
    assert float((y - x).square().sum() / x.square().sum()) == pytest.approx(expected, rel=0.02)


# -------------------------------------------------------------------------------------------------------- bit equality


@pytest.mark.parametrize(("outer", "scale_rounding", "stochastic"), OPTIONS)
def test_everything_equals_the_oracle_when_a_million_values_are_quantized(outer, scale_rounding, stochastic):
    rng = np.random.default_rng(0)
    size = np.exp(rng.standard_normal((4096, 16)) * 2).astype(np.float32)
    x = rng.standard_normal((4096, 256)).astype(np.float32) * np.repeat(size, 16, axis=1)
    compare(x, outer, scale_rounding, False, stochastic)  # 1 048 576 values


@pytest.mark.parametrize(("outer", "scale_rounding", "stochastic"), OPTIONS)
def test_everything_equals_the_oracle_when_a_million_values_sit_on_ties(outer, scale_rounding, stochastic):
    compare(tie_matrix(4096, 256, 1), outer, scale_rounding, False, stochastic)


@pytest.mark.parametrize("tile_2d", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (17, 48), (33, 80), (128, 96), (5, 129), (40, 300)])
def test_everything_equals_the_oracle_when_sizes_are_no_multiples(shape, tile_2d):
    for outer, scale_rounding, stochastic in OPTIONS:
        compare(tie_matrix(*shape, 2), outer, scale_rounding, tile_2d, stochastic)


def test_everything_equals_the_oracle_when_values_are_extreme():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 200)).astype(np.float32)
    x *= (10.0 ** np.linspace(-46, 38, 64, dtype=np.float64)).astype(np.float32)[:, None]
    x[5, 7], x[9, 130], x[11] = np.nan, -np.inf, 0
    for outer, scale_rounding, stochastic in OPTIONS:
        clean = np.nan_to_num(x, posinf=1, neginf=1) if outer == -1 else x
        compare(clean, outer, scale_rounding, False, stochastic)


@pytest.mark.parametrize("stochastic", [False, True])
def test_layouts_agree_when_blocks_lie_along_rows(stochastic, generator):
    x = torch.randn(300, 40, generator=generator)
    for outer, scale_rounding in itertools.product([-1, 128], ["nearest", "up"]):
        if not stochastic:
            expected = nvfp4_fake_quant(x.t().contiguous(), outer, "nearest", scale_rounding).t()
            assert torch.equal(nvfp4_fake_quant(x, outer, "nearest", scale_rounding, dim=0), expected)
        else:
            noise = torch.Generator().manual_seed(1)
            y = nvfp4_fake_quant(x, outer, "stochastic", scale_rounding, noise, dim=0)
            padded = torch.nn.functional.pad(x, (0, 0, 0, 4))
            u = stochastic_noise(304 * 40, torch.Generator().manual_seed(1)).view(19, 16, 40)
            u = u.permute(2, 0, 1).reshape(40, 304)
            expected = quantize_reference(padded.t().numpy(), outer, scale_rounding, u.numpy())["values"]
            assert np.array_equal(y.numpy(), expected.T[:300])


def test_result_is_the_same_when_chunks_are_small(monkeypatch, generator):
    x = torch.randn(96, 256, generator=generator)
    whole = [
        nvfp4_fake_quant(x, 128, r, "nearest", torch.Generator().manual_seed(1)) for r in ("nearest", "stochastic")
    ]
    monkeypatch.setattr("hf_models.tetrajet_v2.blocks._CHUNK", 1024)
    assert Blocks(x, -1).chunk == 64
    parts = [
        nvfp4_fake_quant(x, 128, r, "nearest", torch.Generator().manual_seed(1)) for r in ("nearest", "stochastic")
    ]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("tile_2d", [False, True])
@pytest.mark.parametrize("outer", [-1, 128])
def test_codes_and_scales_are_unchanged_when_quantized_twice(outer, tile_2d, generator):
    x = torch.randn(160, 320, generator=generator) * torch.exp(torch.randn(160, 1, generator=generator))
    once = nvfp4_quantize(x, outer, tile_2d=tile_2d)
    twice = nvfp4_quantize(once.dequantize(), outer, tile_2d=tile_2d)
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(once.inner.view(torch.uint8), twice.inner.view(torch.uint8))
    change = (once.dequantize() - twice.dequantize()).abs() / once.dequantize().abs().clamp_min(1e-30)
    assert float(change.max()) <= 2**-22


def test_transpose_has_the_same_codes_when_blocks_are_16_by_16(generator):
    x = torch.randn(64, 96, generator=generator)
    for outer in (-1, 32):
        q, qt = nvfp4_quantize_2d(x, outer), nvfp4_quantize_2d(x.t(), outer)
        assert torch.equal(q.codes, qt.codes.t()) and torch.equal(q.dequantize(), qt.dequantize().t())


def test_codes_come_from_a_true_division_when_values_sit_on_ties():
    scale = torch.tensor(3 * 2**-11) * torch.tensor(1.0000001)
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2)[None] * scale
    q = nvfp4_quantize(x)
    product = q.scales()[0, 0]
    assert torch.equal(q.dequantize(), torch.tensor(quantize_reference(x.numpy())["values"]))
    t = (x.double() / product.double()).float()  # correctly rounded, what FP32 division must give
    ties = torch.tensor([0, 2, 2, 4, 4, 6, 6, 7])
    assert torch.equal(q.codes[0, :8].long()[t[0, :8] == x[0, :8] / scale], ties[t[0, :8] == x[0, :8] / scale])


def test_outer_maximum_is_exact_when_quantized(generator):
    x = torch.randn(200, 128, generator=generator)
    q = nvfp4_quantize(x)
    index = x.abs().argmax(1, keepdim=True)
    assert bool((q.inner.float().amax(1) == 448).all())
    assert torch.allclose(q.dequantize().gather(1, index), x.gather(1, index), rtol=3e-7)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_only_its_outer_block_is_nan_when_one_number_is_not_finite(bad, generator):
    x = torch.randn(4, 300, generator=generator)
    clean = nvfp4_fake_quant(x)
    x[1, 130] = bad
    for rounding in ("nearest", "stochastic"):
        y = nvfp4_fake_quant(x, rounding=rounding, generator=torch.Generator().manual_seed(0))
        assert y[1, 128:256].isnan().all()
        y[1, 128:256] = 0
        assert y.isfinite().all()
    y = nvfp4_quantize(x).dequantize()
    assert y[1, 128:256].isnan().all() and torch.equal(y[0], clean[0]) and torch.equal(y[1, :128], clean[1, :128])
    assert nvfp4_fake_quant(x, -1).isnan().all()


@pytest.mark.parametrize("value", [3.4e38, torch.finfo(torch.float32).max, 1.0, 1e-30, 1e-37, 1e-41, 1e-45])
def test_result_is_finite_when_a_row_is_constant_and_extreme(value):
    x = torch.full((2, 128), value)
    y = nvfp4_fake_quant(x)
    assert y.isfinite().all()
    if value >= 1e-30:
        assert torch.allclose(y, x, rtol=1e-6)


def test_small_block_is_kept_when_its_scale_underflows():
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 16] = 2688.0, 6 * 2**-11  # r = 2^-11 < 2^-9
    assert float(nvfp4_fake_quant(x)[0, 16]) == 1.5 * 2**-9


def test_scale_bytes_are_never_nan_when_a_tensor_has_zero_blocks(generator):
    x = torch.randn(64, 256, generator=generator)
    x[::3, 16:48], x[5] = 0, 0
    for outer in (-1, 128):
        assert not bool((nvfp4_quantize(x, outer).inner.view(torch.uint8) & 0x7F == 0x7F).any())


@pytest.mark.parametrize("size", [1, 15, 17, 48, 80, 96, 130, 200])
def test_result_equals_explicit_padding_when_the_size_is_no_multiple(size, generator):
    x = torch.randn(7, size, generator=generator)
    padded = torch.nn.functional.pad(x, (0, -size % 128))
    for outer in (-1, 128):
        assert torch.equal(nvfp4_fake_quant(x, outer), nvfp4_fake_quant(padded, outer)[:, :size])
        q, expected = nvfp4_quantize(x, outer), nvfp4_quantize(padded, outer)
        assert torch.equal(q.codes, expected.codes[:, :size]) and q.inner.shape == (7, -(-size // 16))
    columns = nvfp4_fake_quant(x.t(), dim=0)
    assert torch.equal(columns.t(), nvfp4_fake_quant(x))


@pytest.mark.parametrize("shape", [(), (5,), (0,), (0, 32), (3, 0), (2, 3, 4, 40), (1, 1, 16), (3, 1)])
def test_shape_and_dtype_are_kept_when_any_tensor_is_quantized(shape, generator):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(shape, generator=generator).to(dtype)
        y = nvfp4_fake_quant(x)
        assert y.shape == x.shape and y.dtype == dtype
        q = nvfp4_quantize(x)
        assert q.codes.shape == (x.shape or (1,)) and torch.equal(q.dequantize(dtype), y)
        assert torch.equal(q.pack().dequantize(dtype), y)


def test_result_is_the_same_when_the_input_is_a_strided_or_expanded_view(generator):
    x = torch.randn(64, 96, generator=generator)
    assert torch.equal(nvfp4_fake_quant(x.t()), nvfp4_fake_quant(x.t().contiguous()))
    assert torch.equal(nvfp4_fake_quant(x[::2, ::3]), nvfp4_fake_quant(x[::2, ::3].contiguous()))
    row = torch.randn(1, 96, generator=generator)
    assert torch.equal(nvfp4_fake_quant(row.expand(4, 96)), nvfp4_fake_quant(row).expand(4, 96))
    assert torch.equal(
        nvfp4_fake_quant(x.view(8, 8, 96).transpose(0, 1)).transpose(0, 1).reshape(64, 96), nvfp4_fake_quant(x)
    )


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool])
def test_input_is_refused_when_it_is_not_real_floating_point(dtype):
    with pytest.raises(TypeError, match="real floating-point"):
        nvfp4_quantize(torch.ones(2, 16).to(dtype))


def test_option_is_refused_when_it_is_not_allowed():
    x = torch.ones(2, 16)
    with pytest.raises(ValueError, match="outer_block_size must be -1 or a positive multiple of 16, got 24"):
        nvfp4_quantize(x, 24)
    with pytest.raises(ValueError, match="rounding must be"):
        nvfp4_quantize(x, rounding="floor")
    with pytest.raises(ValueError, match="scale_rounding must be"):
        nvfp4_fake_quant(x, scale_rounding="down")
    with pytest.raises(ValueError, match="dim must be"):
        nvfp4_fake_quant(x, dim=1)
    with pytest.raises(ValueError, match="must be a matrix"):
        nvfp4_quantize_2d(torch.ones(2, 2, 16))


def test_other_rows_do_not_change_when_rows_are_appended(generator):
    x, more = torch.randn(16, 256, generator=generator), 100 * torch.randn(3, 256, generator=generator)
    both = nvfp4_quantize(torch.cat([x, more]))
    assert torch.equal(both.codes[:16], nvfp4_quantize(x).codes)


def test_input_is_untouched_when_quantized(generator):
    x = torch.randn(16, 256, generator=generator)
    copy = x.clone()
    nvfp4_fake_quant(x, rounding="stochastic", generator=generator)
    nvfp4_quantize(x)
    assert torch.equal(x, copy)


def test_constants_stay_on_the_cpu_when_first_imported_inside_a_meta_context():
    code = (
        "import torch\n"
        "with torch.device('meta'):\n"
        "    import hf_models.tetrajet_v2 as tj\n"
        "    tj.nvfp4_fake_quant, tj.hadamard_matrix(16, 'cpu')\n"
        "x = torch.linspace(-1, 1, 32)[None]\n"
        "print(float(tj.block_rht(tj.nvfp4_fake_quant(x, rounding='stochastic'), torch.ones(16)).abs().sum()) > 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n", done.stderr[-2000:]
