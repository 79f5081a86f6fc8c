"""CelebA and AFHQ builders on files written in their exact layouts."""

import numpy as np
import pytest
from PIL import Image

from datasets_scripts import AFHQ, CelebA, build


def photo(path, size, colour):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, "black")
    image.paste(colour, (size[0] // 4, size[1] // 4, 3 * size[0] // 4, 3 * size[1] // 4))
    image.save(path, quality=95)


@pytest.fixture
def celeba(tmp_path):
    for index in range(1, 6):
        photo(tmp_path / "img_align_celeba" / f"{index:06d}.jpg", (178, 218), "red")
    lines = [f"{index:06d}.jpg {part}" for index, part in zip(range(1, 6), (0, 0, 0, 1, 2), strict=True)]
    (tmp_path / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def afhq(tmp_path):
    for split, count in (("train", 2), ("val", 1)):
        for label, colour in (("cat", "red"), ("dog", "green"), ("wild", "blue")):
            for index in range(count):
                photo(tmp_path / split / label / f"{index}.jpg", (512, 512), colour)
    return tmp_path


def prepared(builder_class, data_dir, cache, **config):
    builder = builder_class(cache_dir=str(cache), data_dir=str(data_dir), **config)
    builder.download_and_prepare()
    return builder.as_dataset()


def test_celeba_has_the_official_splits_and_crops_the_centre(celeba, tmp_path):
    splits = prepared(CelebA, celeba, tmp_path / "cache")
    assert {name: rows.num_rows for name, rows in splits.items()} == {"train": 3, "validation": 1, "test": 1}
    row = splits["test"][0]
    assert row["name"] == "000005.jpg" and row["image"].size == (128, 128)
    assert np.asarray(row["image"])[64, 64, 0] > 200


def test_afhq_has_labels_and_takes_val_for_test(afhq, tmp_path):
    splits = prepared(AFHQ, afhq, tmp_path / "cache")
    assert {name: rows.num_rows for name, rows in splits.items()} == {"train": 6, "test": 3}
    assert splits["test"]["label"][:] == [0, 1, 2] and splits["test"][0]["image"].size == (256, 256)
    assert np.argmax(np.asarray(splits["test"][1]["image"])[128, 128]) == 1  # the dog is green


def test_build_writes_a_folder_that_load_dataset_opens(celeba, tmp_path):
    import datasets

    folder = build("celeba", tmp_path / "out", data_dir=celeba)
    assert datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache")).num_rows == 3


@pytest.mark.parametrize("builder_class", [CelebA, AFHQ])
def test_missing_folder_names_the_layout(builder_class, tmp_path):
    with pytest.raises(ValueError, match="data_dir"):
        prepared(builder_class, tmp_path / "nowhere", tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="expected layout"):
        prepared(builder_class, tmp_path / "empty", tmp_path / "cache")


def test_missing_photo_is_named(celeba, tmp_path):
    (celeba / "img_align_celeba" / "000005.jpg").unlink()
    with pytest.raises(Exception, match="generating the dataset") as error:
        prepared(CelebA, celeba, tmp_path / "cache")
    assert "000005.jpg" in str(error.value.__cause__)


def test_size_must_be_positive():
    with pytest.raises(ValueError, match="size"):
        CelebA(size=0)
