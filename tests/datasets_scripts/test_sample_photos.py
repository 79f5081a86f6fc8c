"""The two photographs of scikit-learn."""

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from datasets_scripts import SamplePhotos
from datasets_scripts.sample_photos import centre_crop


def prepared(cache, **config):
    builder = SamplePhotos(cache_dir=str(cache), **config)
    builder.download_and_prepare()
    return builder.as_dataset()


def test_photos_are_those_of_scikit_learn_when_full(tmp_path):
    splits = prepared(tmp_path, config_name="full")
    assert list(splits) == ["test"]
    assert splits["test"]["name"][:] == ["china.jpg", "flower.jpg"]
    for row, expected in zip(splits["test"], load_sample_images().images, strict=True):
        assert row["image"].size == (640, 427)
        assert np.array_equal(np.asarray(row["image"]), expected)  # stored without loss


def test_photos_are_centre_crops_when_small(tmp_path):
    rows = prepared(tmp_path, config_name="256x256")["test"]
    for row, pixels in zip(rows, load_sample_images().images, strict=True):
        assert (row["image"].size, row["image"].mode) == ((256, 256), "RGB")
        whole = Image.fromarray(pixels).resize((384, 256), Image.Resampling.BICUBIC)  # 256/427 · 640 = 383.7
        assert np.array_equal(np.asarray(row["image"]), np.asarray(whole)[:, 64:320])


@pytest.mark.parametrize("size", [(7, 5), (5, 7), (6, 6)])
def test_crop_is_square_and_central_when_sides_differ(size):
    crop = centre_crop(Image.new("L", size, 9), 10)
    assert crop.size == (10, 10)
    assert set(crop.tobytes()) == {9}  # nothing from outside of the picture
