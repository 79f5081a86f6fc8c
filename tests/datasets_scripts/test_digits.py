"""The handwritten digits (flow_control_core §5): values, split, seed."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from datasets_scripts import Digits, load_digit_tensors


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of our own, so that nothing of an earlier version is read."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", params=[8, 16])
def built(request, cache):
    """Side in pixels and the splits, for both configs."""
    builder = Digits(config_name=f"{request.param}x{request.param}", cache_dir=cache)
    builder.download_and_prepare()
    return request.param, builder.as_dataset().with_format("numpy")


def pixels(rows) -> np.ndarray:
    return np.stack(rows["pixel_values"][:])


def test_columns_have_the_described_types_when_built(built):
    side, splits = built
    row = splits["test"].with_format(None)[0]
    assert set(row) == {"image", "pixel_values", "label"}
    assert (row["image"].size, row["image"].mode) == ((side, side), "L")
    assert splits["test"].features["label"].names == [str(digit) for digit in range(10)]
    assert pixels(splits["test"]).dtype == np.float32


def test_split_has_1597_and_200_images_when_built(built):
    side, splits = built
    assert {name: rows.num_rows for name, rows in splits.items()} == {"train": 1597, "test": 200}
    assert pixels(splits["train"]).shape == (1597, 1, side, side)


def test_values_span_minus_one_to_one_when_built(built):
    for rows in built[1].values():
        assert pixels(rows).min() == -1 and pixels(rows).max() == 1


def test_split_is_the_permutation_of_torch_seed_0_when_no_seed_is_given(cache):
    builder = Digits(config_name="8x8", cache_dir=cache)
    builder.download_and_prepare()
    splits = builder.as_dataset().with_format("numpy")
    scans, labels = load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).numpy()
    expected = (scans / 8 - 1).reshape(-1, 1, 8, 8)[order]  # sixteenths: exact in float32
    assert np.array_equal(pixels(splits["test"]), expected[:200])
    assert np.array_equal(pixels(splits["train"]), expected[200:])  # the rest: no image is in both
    assert np.array_equal(splits["test"]["label"][:], labels[order][:200])
    assert np.array_equal(splits["train"]["label"][:], labels[order][200:])
    assert order[:3].tolist() == [362, 1568, 1440]  # torch draws today what it drew when the weights were trained


def test_large_images_are_bicubic_when_the_size_is_16(cache):
    small, large = (Digits(config_name=name, cache_dir=cache) for name in ("8x8", "16x16"))
    images = []
    for builder in (small, large):
        builder.download_and_prepare()
        images.append(torch.from_numpy(pixels(builder.as_dataset(split="test").with_format("numpy"))))
    expected = torch.nn.functional.interpolate(images[0], (16, 16), mode="bicubic", align_corners=False)
    assert expected.abs().max() > 1  # bicubic overshoots; hence the clamp
    assert torch.equal(images[1], expected.clamp(-1, 1))


def test_picture_is_the_rounded_values_when_looked_at(built):
    rows = built[1]["test"].with_format(None)
    for row in rows.select(range(20)):
        expected = np.rint((np.asarray(row["pixel_values"], dtype=np.float32)[0] + 1) * 127.5)
        assert np.array_equal(np.asarray(row["image"]), expected.astype(np.uint8))


def test_split_differs_when_the_seed_does(cache, built):
    side, splits = built
    builder = Digits(config_name=f"{side}x{side}", seed=1, cache_dir=cache)
    builder.download_and_prepare()
    other = builder.as_dataset(split="test").with_format("numpy")
    assert not np.array_equal(pixels(other), pixels(splits["test"]))
    again = Digits(config_name=f"{side}x{side}", cache_dir=cache)  # the other seed has a cache entry of its own
    again.download_and_prepare()
    assert np.array_equal(pixels(again.as_dataset(split="test").with_format("numpy")), pixels(splits["test"]))


def test_size_is_named_when_the_builder_cannot_make_it(cache):
    with pytest.raises(ValueError, match="`size` must be 8 or 16, got 12"):
        Digits(config_name="16x16", size=12, cache_dir=cache)


def test_tensors_are_those_of_the_builder_when_loaded(built):
    side, splits = built
    for split, rows in splits.items():
        images, labels = load_digit_tensors(side, split)
        assert images.dtype == torch.float32 and labels.dtype == torch.int64
        assert np.array_equal(images.numpy(), pixels(rows))
        assert np.array_equal(labels.numpy(), rows["label"][:])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((12, "train"), "`size` must be 8 or 16, got 12"),
        (("16", "train"), "`size` must be 8 or 16, got '16'"),
        ((16, "validation"), "`split` must be 'train' or 'test', got 'validation'"),
        ((16, None), "`split` must be 'train' or 'test', got None"),
    ],
)
def test_argument_is_named_when_tensors_are_asked_wrongly(arguments, match):
    with pytest.raises(ValueError, match=match):
        load_digit_tensors(*arguments)
