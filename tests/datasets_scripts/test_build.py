"""`build` writes folders that `load_dataset` opens."""

import ast
import hashlib
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
from huggingface_hub import DatasetCard

from datasets_scripts import SamplePhotos, build, get_builder, list_builders
from datasets_scripts.tetrajet_corpora import pydoc_corpus, split_text


def rows_of_whole_lines(split: str) -> int:
    """Rows of at least 1,000 characters; versions of Python differ in their help texts."""
    ends = np.cumsum([len(line) for line in split_text(pydoc_corpus(), split).splitlines(keepends=True)])
    count, start = 0, 0
    while start < ends[-1]:
        start = ends[min(np.searchsorted(ends, start + 1000), len(ends) - 1)]
        count += 1
    return count


CONFIGS = {
    "digits": {"16x16": {"train": 1597, "test": 200}, "8x8": {"train": 1597, "test": 200}},
    "sample_photos": {"full": {"test": 2}, "256x256": {"test": 2}},
    "markov_corpus": {"words": {"train": 845, "test": 95}},
    "python_help_texts": {"help": {split: rows_of_whole_lines(split) for split in ("train", "test")}},
    "sim_paths": {
        name: {"train": 1000}
        for name in (
            *("put", "paper_d2", "paper_d5", "paper_d10", "paper_d20", "heston", "lqr"),
            *(f"dividend_d{d}_s{spot}" for d in (2, 3, 5) for spot in (90, 100, 110)),
        )
    },
    "recall_tasks": {
        "associative_recall": {"train": 4096, "test": 256},
        "associative_recall_overwrite": {"train": 4096, "test": 256},
        "needle": {"train": 1024, "test": 256},
        "persistence": {"train": 1024, "test": 256},
        "copy_task": {"train": 4096, "test": 256},
        "multi_query_recall": {"train": 4096, "test": 256},
    },
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of our own, so that nothing of an earlier version is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def built(request, tmp_path_factory) -> tuple[str, Path]:
    """Name and folder of each data set that needs no download."""
    return request.param, build(request.param, tmp_path_factory.mktemp("built") / request.param)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_publishable_data_set_is_covered_when_listed():
    assert set(list_builders(publishable=True)) == set(CONFIGS)
    assert all(about for about in list_builders().values())


def test_every_config_opens_when_built(built, tmp_path):
    name, folder = built
    assert sorted(datasets.get_dataset_config_names(str(folder))) == sorted(CONFIGS[name])
    for config, splits in CONFIGS[name].items():
        rows = datasets.load_dataset(str(folder), config, cache_dir=str(tmp_path))
        assert {split: data.num_rows for split, data in rows.items()} == splits


def test_default_config_opens_when_none_is_named(built, tmp_path):
    name, folder = built
    rows = datasets.load_dataset(str(folder), cache_dir=str(tmp_path))
    default = get_builder(name).DEFAULT_CONFIG_NAME
    assert {split: data.num_rows for split, data in rows.items()} == CONFIGS[name][default]


def test_rows_are_those_of_the_builder_when_opened(built, tmp_path):
    name, folder = built
    for config, splits in CONFIGS[name].items():
        builder = get_builder(name)(config_name=config)
        builder.download_and_prepare()
        split = list(splits)[-1]
        source = builder.as_dataset(split=split)
        opened = datasets.load_dataset(str(folder), config, split=split, cache_dir=str(tmp_path))
        assert opened.features == source.features
        for first, second in zip(opened.select(range(2)), source.select(range(2)), strict=True):
            if "image" in first:
                assert np.array_equal(np.asarray(first.pop("image")), np.asarray(second.pop("image")))
            assert first == second


def test_folders_are_byte_equal_when_built_twice(built, tmp_path):
    name, folder = built
    expected = digests(folder)
    assert len(expected) == 1 + sum(map(len, CONFIGS[name].values()))  # the card and a file per split
    with pytest.MonkeyPatch.context() as patch:  # from nothing, not from the cache of the first build
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        assert digests(build(name, tmp_path / name)) == expected


def test_split_differs_when_the_seed_does(tmp_path):
    first, second = (build("digits", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert digests(first)["8x8/test-00000-of-00001.parquet"] != digests(second)["8x8/test-00000-of-00001.parquet"]
    assert "--seed 1" in (second / "README.md").read_text(encoding="utf-8")


def test_front_matter_is_valid_when_built(built):
    name, folder = built
    card = DatasetCard.load(folder / "README.md")
    data = card.data.to_dict()
    assert data["license"] in ("cc-by-4.0", "cc-by-2.0", "apache-2.0", "other")
    sizes = {"digits": "1K<n<10K", "recall_tasks": "10K<n<100K", "sim_paths": "10K<n<100K"}
    assert data["size_categories"] == [sizes.get(name, "n<1K")]
    kinds = {"digits": "image", "sample_photos": "image", "sim_paths": "time-series"}
    assert data["tags"] == ["closedloop", kinds.get(name, "text")]
    assert {config["config_name"] for config in data["configs"]} == set(CONFIGS[name])
    assert [config.get("default", False) for config in data["configs"]].count(True) == 1
    for config in data["configs"]:
        for entry in config["data_files"]:
            assert (folder / entry["path"]).is_file()
    assert "@" in card.text and "http" in card.text  # citation and source


def test_code_of_the_card_runs_when_the_folder_stands_for_the_hub(built):
    name, folder = built
    (block,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    ast.parse(block)
    assert f'"closedloop/{name}"' in block
    names: dict = {}
    exec(block.replace(f"closedloop/{name}", str(folder)), names)
    assert names["rows"].num_rows in {next(iter(splits.values())) for splits in CONFIGS[name].values()}


def test_splits_of_the_card_are_counted_when_built(built):
    name, folder = built
    rows = dict(re.findall(r"^\| (\S+/\S+) \| (\d+) \|$", (folder / "README.md").read_text(), flags=re.MULTILINE))
    expected = {f"{config}/{split}": str(n) for config, splits in CONFIGS[name].items() for split, n in splits.items()}
    assert rows == expected


def test_folder_is_refused_when_it_is_not_empty(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"`out_dir` '.*' exists and is not an empty folder"):
        build("sample_photos", tmp_path)
    with pytest.raises(ValueError, match=r"`out_dir` .*notes\.txt'"):
        build("sample_photos", tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert build("sample_photos", tmp_path / "empty") == tmp_path / "empty"


def test_known_names_are_listed_when_the_name_is_unknown(tmp_path):
    for call in (lambda: build("mnist", tmp_path / "out"), lambda: get_builder("mnist")):
        with pytest.raises(ValueError, match=r"no data set 'mnist'; there is .*digits.*sample_photos"):
            call()
    assert not (tmp_path / "out").exists()


def test_builder_class_is_found_when_the_name_is_known():
    assert get_builder("sample_photos") is SamplePhotos
