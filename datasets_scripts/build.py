"""Write a data set as a Hub-ready folder: Parquet files, and a card whose YAML lists configs and splits."""

import importlib
from pathlib import Path

import datasets
import yaml

BUILDERS = {
    "digits": ("datasets_scripts.digits", "Digits", "handwritten digits, 1,797 real scans, 8×8 and 16×16"),
    "sample_photos": ("datasets_scripts.sample_photos", "SamplePhotos", "two photographs that ship with scikit-learn"),
    "recall_tasks": ("datasets_scripts.recall_tasks", "RecallTasks", "six synthetic recall tasks, 160 tokens"),
    "markov_corpus": ("datasets_scripts.character_corpora", "MarkovCorpus", "synthetic text, a million characters"),
    "python_help_texts": ("datasets_scripts.character_corpora", "PythonHelpTexts", "texts of Python's help()"),
    "sim_paths": ("datasets_scripts.sim_paths", "SimPathsBuilder", "simulated paths of option markets, 16 configs"),
    "celeba": ("datasets_scripts.face_and_animal_photos", "CelebA", "celebrity faces 128×128; needs --data-dir"),
    "afhq": ("datasets_scripts.face_and_animal_photos", "AFHQ", "animal faces 256×256; needs --data-dir"),
}
NEED_DOWNLOAD = ("celeba", "afhq")  # their licences forbid passing them on


def list_builders(publishable: bool = False) -> dict[str, str]:
    """Names of the data sets that [`build`] knows, each with a line about it.

    Args:
        publishable (`bool`, defaults to `False`): Only those that need no download of yours and may be passed on.
    """
    return {name: about for name, (_, _, about) in BUILDERS.items() if not (publishable and name in NEED_DOWNLOAD)}


def get_builder(name: str) -> type[datasets.GeneratorBasedBuilder]:
    """The builder class of a data set.

    Raises:
        ValueError: There is no such data set.
    """
    if name not in BUILDERS:
        raise ValueError(f"no data set {name!r}; there is {', '.join(BUILDERS)}.")
    module, class_name, _ = BUILDERS[name]
    return getattr(importlib.import_module(module), class_name)


def build(name: str, out_dir: str | Path, seed: int = 0, data_dir: str | Path | None = None) -> Path:
    """Write all configs and splits of a data set.

    Args:
        name (`str`): A name of [`list_builders`].
        out_dir (`str`): Folder to write; must be new or empty.
        seed (`int`, defaults to 0): Seed of the split and of anything drawn.
        data_dir (`str`, *optional*): Your download, for data sets that may not ship.

    Returns:
        `Path`: the folder, which `datasets.load_dataset` opens.

    Raises:
        ValueError: The name is unknown, the folder is not empty, or `data_dir` has not the layout expected.
    """
    builder_class = get_builder(name)
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"`out_dir` {str(out)!r} exists and is not an empty folder.")
    out.mkdir(parents=True, exist_ok=True)
    configs, sizes = [], {}
    for config in builder_class.BUILDER_CONFIGS:
        builder = builder_class(config_name=config.name, seed=seed, data_dir=data_dir and str(data_dir))
        builder.download_and_prepare()
        files = []
        for split in builder.info.splits:
            path = f"{config.name}/{split}-00000-of-00001.parquet"
            (out / config.name).mkdir(exist_ok=True)
            rows = builder.as_dataset(split=split)
            rows.to_parquet(str(out / path))
            files.append({"split": split, "path": path})
            sizes[f"{config.name}/{split}"] = rows.num_rows
        entry = {"config_name": config.name, "data_files": files}
        if config.name == builder_class.DEFAULT_CONFIG_NAME:
            entry["default"] = True
        configs.append(entry)
    (out / "README.md").write_text(_card(name, builder.info, configs, sizes, seed), encoding="utf-8")
    return out


def _card(name: str, info: datasets.DatasetInfo, configs: list[dict], sizes: dict[str, int], seed: int) -> str:
    total = sum(sizes.values())
    kinds = {type(feature) for feature in info.features.values()}
    modality = "image" if datasets.Image in kinds else "time-series" if datasets.Array2D in kinds else "text"
    front = {
        "license": info.license,
        "pretty_name": name.replace("_", " ").capitalize(),
        "tags": ["closedloop", modality],
        "size_categories": ["n<1K" if total < 1000 else "1K<n<10K" if total < 10_000 else "10K<n<100K"],
        "configs": configs,
    }
    features = "\n".join(f"- `{column}`: {feature}" for column, feature in info.features.items())
    splits = "\n".join(f"| {split} | {rows} |" for split, rows in sizes.items())
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---

# {front["pretty_name"]}

{info.description}

Source: {info.homepage}. Written by `closedloop data build {name} --seed {seed}`; the same seed writes the same rows.

## Use

```python
from datasets import load_dataset

rows = load_dataset("closedloop/{name}", "{configs[0]["config_name"]}", split="{configs[0]["data_files"][0]["split"]}")
```

## Columns (of the last config)

{features}

## Splits

| config/split | rows |
| --- | --- |
{splits}

## Citation

```bibtex
{info.citation}
```
"""
