"""E2M1, E4M3, MXFP8, packing, the Hadamard transform and the random streams."""

import numpy as np
import pytest
import torch

from hf_models.tetrajet_v2 import (
    E2M1_VALUES,
    block_rht,
    decode_e2m1,
    encode_e2m1,
    from_mxfp8,
    hadamard_matrix,
    mxfp8_fake_quant,
    pack_e2m1,
    stream_generator,
    to_e4m3,
    to_mxfp8,
    unpack_e2m1,
)
from hf_models.tetrajet_v2.formats import decode_packed_e2m1, round_e4m3_
from hf_models.tetrajet_v2.reference import e2m1_table, e4m3_table, round_to_table
from hf_models.tetrajet_v2.rng import random_signs, splitmix64, stochastic_noise


def adversarial(table: np.ndarray) -> np.ndarray:
    """Every entry and every midpoint of a table, with both FP32 neighbours of each."""
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2]).astype(np.float32)
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-1))
    return np.abs(np.concatenate([points, up, down]))


# -------------------------------------------------------------------------------------------------------------- E2M1


def test_values_are_the_e2m1_table_when_decoded():
    assert E2M1_VALUES.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(E2M1_VALUES[8])
    assert torch.equal(decode_e2m1(torch.arange(16)), E2M1_VALUES)


def test_codes_equal_the_table_search_when_a_million_values_and_all_ties_are_encoded():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(0, 7, 1_000_000).astype(np.float32), adversarial(e2m1_table())])
    for sign in (1, -1):
        expected = round_to_table(x, e2m1_table()) + (8 if sign < 0 else 0)
        assert np.array_equal(encode_e2m1(torch.from_numpy(sign * x)).numpy(), expected)


def test_sign_is_kept_when_a_value_rounds_to_zero():
    assert encode_e2m1(torch.tensor([0.0, -0.0, 0.2, -0.2])).tolist() == [0, 8, 0, 8]


def test_magnitude_saturates_when_above_six():
    assert encode_e2m1(torch.tensor([6.5, 7.0, 1e30, -torch.inf])).tolist() == [7, 7, 7, 15]


def test_low_nibble_is_the_even_index_when_packed():
    assert pack_e2m1(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("size", [0, 1, 2, 7, 48])
def test_codes_come_back_when_packed_and_unpacked(size):
    codes = torch.arange(3 * size, dtype=torch.uint8).remainder_(16).view(3, size)
    packed = pack_e2m1(codes)
    assert packed.shape == (3, (size + 1) // 2)
    assert torch.equal(unpack_e2m1(packed, size), codes)
    assert torch.equal(decode_packed_e2m1(packed)[:, :size], decode_e2m1(codes))


# -------------------------------------------------------------------------------------------------------------- E4M3


def test_all_256_bytes_decode_as_torch_when_the_reference_table_is_built():
    byte = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    assert np.array_equal(byte[:127], e4m3_table().astype(np.float32))
    assert np.array_equal(byte[128:255], -e4m3_table().astype(np.float32))
    assert np.isnan(byte[[127, 255]]).all()


@pytest.mark.parametrize("mode", ["nearest", "up"])
def test_e4m3_equals_the_table_search_when_a_million_values_and_all_ties_are_rounded(mode):
    rng = np.random.default_rng(1)
    x = np.exp(rng.uniform(np.log(1e-4), np.log(500), 1_000_000)).astype(np.float32)
    x = np.concatenate([x, adversarial(e4m3_table())])
    expected = round_to_table(x, e4m3_table(), mode)
    assert np.array_equal(to_e4m3(torch.from_numpy(x), mode).view(torch.uint8).numpy(), expected)
    if mode == "nearest":
        inside = np.minimum(x, 448)
        arithmetic = round_e4m3_(torch.from_numpy(inside.copy())).numpy()
        assert np.array_equal(arithmetic, e4m3_table()[round_to_table(inside, e4m3_table())].astype(np.float32))


def test_infinity_and_nan_are_nan_when_rounded_to_e4m3():
    for mode in ("nearest", "up"):
        assert to_e4m3(torch.tensor([torch.inf, torch.nan]), mode).to(torch.float32).isnan().all()


def test_mode_is_refused_when_unknown():
    with pytest.raises(ValueError, match="'nearest' or 'up', got 'down'"):
        to_e4m3(torch.ones(1), "down")


# ------------------------------------------------------------------------------------------------------------- MXFP8


def test_golden_values_when_quantized_to_mxfp8():
    block = torch.zeros(32)
    block[:8] = torch.tensor([1, -3, 0.1, 448, 500, 0, 1e-3, 2.5])
    assert mxfp8_fake_quant(block)[:9].tolist() == [1, -3, 0.1015625, 448, 512, 0, 0, 2.5, 0]
    assert mxfp8_fake_quant(torch.full((32,), 0.3)).tolist() == [0.3125] * 32
    assert mxfp8_fake_quant(torch.tensor([1] + [0.07] * 31))[:2].tolist() == [1, 0.0703125]
    assert mxfp8_fake_quant(torch.zeros(32)).tolist() == [0.0] * 32


def test_scale_is_rounded_up_when_the_maximum_is_no_power_of_two():
    _, exponents = to_mxfp8(torch.tensor([[448.0] + [0] * 31, [448.1] + [0] * 31, [0.0] * 32]))
    assert exponents.flatten().tolist() == [127, 128, 127]  # s = 1, 2, 1


def test_layouts_agree_when_blocks_lie_along_either_dim(generator):
    x = torch.randn(80, 48, generator=generator) * torch.exp(3 * torch.randn(80, 1, generator=generator))
    assert torch.equal(mxfp8_fake_quant(x.t().contiguous(), 0), mxfp8_fake_quant(x).t())
    assert torch.equal(from_mxfp8(*to_mxfp8(x)), mxfp8_fake_quant(x))
    assert float((mxfp8_fake_quant(x) - x).norm() / x.norm()) < 0.03


def test_only_its_block_is_nan_when_an_mxfp8_input_holds_nan_or_infinity():
    x = torch.ones(3, 32)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    y = mxfp8_fake_quant(x)
    assert y[:2].isnan().all() and torch.equal(y[2], x[2])


def test_extremes_stay_finite_when_quantized_to_mxfp8():
    x = torch.tensor([[3.4e38] * 32, [1e-44] * 32, [1.2e-38] * 32])
    y = mxfp8_fake_quant(x)
    assert y.isfinite().all() and torch.allclose(y[0], x[0], rtol=0.07) and torch.allclose(y[2], x[2], rtol=0.07)


# ------------------------------------------------------------------------------------------------- transform, streams


SIGNS = [1, -1, 1, 1, -1, 1, -1, -1, 1, 1, -1, 1, -1, -1, 1, -1]
TRANSFORMED = [-4, 0, 0, -4, 15, -11, 5, 15, 0, -4, 4, 0, -7, 15, -15, -9]


def test_golden_vector_when_transformed():
    signs = torch.tensor(SIGNS, dtype=torch.float32)
    assert block_rht(torch.arange(16.0), signs).tolist() == TRANSFORMED
    columns = torch.arange(16.0)[:, None].repeat(1, 3)
    assert block_rht(columns, signs, dim=0)[:, 2].tolist() == TRANSFORMED


@pytest.mark.parametrize("size", [2, 16, 32, 128])
def test_product_is_unchanged_when_both_operands_are_transformed(size, generator):
    a, b = torch.randn(5, 128, generator=generator).double(), torch.randn(128, 7, generator=generator).double()
    signs = random_signs(size, generator)
    assert torch.allclose(block_rht(a, signs) @ block_rht(b, signs, dim=0), a @ b, atol=1e-12)


def test_transform_is_refused_when_sizes_do_not_fit():
    with pytest.raises(ValueError, match="not a multiple of the group of 16"):
        block_rht(torch.ones(20), torch.ones(16))
    with pytest.raises(ValueError, match="power of two, got 12"):
        hadamard_matrix(12)


def test_streams_differ_when_any_word_of_the_key_differs():
    base = dict(seed=1, step=2, micro=3, layer=4, operand=5, rank=6)
    draws = [torch.rand(4, generator=stream_generator(**base))]
    assert torch.equal(draws[0], torch.rand(4, generator=stream_generator(**base)))
    draws += [torch.rand(4, generator=stream_generator(**{**base, key: base[key] + 1})) for key in base]
    assert len({tuple(d.tolist()) for d in draws}) == 7
    assert splitmix64(1, 2) != splitmix64(2, 1) and splitmix64(0) == 0xE220A8397B1DCDAF  # published first output


def test_noise_is_the_16_bit_grid_when_drawn(generator):
    u = stochastic_noise(100_001, generator).double()
    k = u * 2**16 - 0.5
    assert torch.equal(k, k.round()) and int(k.min()) >= 0 and int(k.max()) <= 65535
    assert abs(float(u.mean()) - 0.5) < 4 * 0.2887 / 100_001**0.5
    assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 4 / 100_000**0.5
