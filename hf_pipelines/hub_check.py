"""Find what would be wrong with a repository on the Hub: read it, then load it where our package is out of reach."""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_pipelines.code_bundle import OWN_PACKAGES, SourceModule, is_own

MAX_WEIGHTS = 5_000_000  # bytes a repository
MAX_FILE = 5_000_000  # bytes of any other file
MAX_ALL_WEIGHTS = 40_000_000  # bytes of all shipped repositories
MARKER = ".closedloop-export.json"  # lists what an export wrote, so that it can be written again; never uploaded
_UNSAFE = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib", ".dill", ".h5", ".msgpack"}
_REQUIRED = {
    "model": ("license", "library_name", "tags"),
    "dataset": ("license", "configs"),
    "space": ("title", "sdk", "app_file", "license"),
}
# one of these must be imported by the module that defines a component, or the in-package loader refuses it
_BASES = {
    *("ModelMixin", "SchedulerMixin", "DiffusionPipeline", "BaseGuidance", "PreTrainedModel", "PreTrainedTokenizer"),
    *("PreTrainedTokenizerFast", "FeatureExtractionMixin", "ProcessorMixin", "ImageProcessingMixin"),
}
_CODE_BLOCK = re.compile(r"^[ \t]*```(?:python|py)\b[^\n]*\n(.*?)^[ \t]*```", flags=re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|\b(?:src|href)=[\"']([^\"']+)")
_LOAD_SECONDS = 300


@dataclass(frozen=True)
class Problem:
    """One thing to put right.

    Args:
        repo (`str`): Name of the repository.
        rule (`str`): Which rule it breaks, such as `"card"` or `"weights"`.
        message (`str`): What is wrong, in one line.
    """

    repo: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.repo}: {self.rule}: {self.message}"


def iter_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield what belongs to a repository: relative POSIX path and file, in order.

    Raises:
        ValueError: A symbolic link leads out of the folder.
    """
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if {"__pycache__", ".git", ".cache", ".gradio"} & set(parts) or path.suffix == ".pyc":
            continue
        if path.name in (".DS_Store", MARKER):
            continue
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is a link that leads out of {folder}; a repository holds its own files.")
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


# ------------------------------------------------------------------------------------------------------ reading


def static_problems(name: str, kind: str, folder: Path) -> list[Problem]:
    """Check card, sizes, formats and results without loading anything.

    Args:
        name (`str`): Name of the repository, for the messages.
        kind (`str`): `"model"`, `"dataset"` or `"space"`.
        folder (`Path`): The repository.

    Returns:
        `list[Problem]`: in the order of the files.
    """
    found: list[tuple[str, str]] = [*_card(kind, folder), *_sizes(folder)]
    for key, path in iter_files(folder):
        if path.suffix == ".safetensors":
            found += _weights(key, path)
        elif key.startswith(".eval_results/") and path.suffix in (".yaml", ".yml"):
            found += _results(key, path)
        elif path.name == "model_index.json":
            found += _components(key, path)
    return [Problem(name, rule, " ".join(message.split())) for rule, message in found]


def total_size_problems(root: Path) -> list[Problem]:
    """Check that the weights of all repositories below `root` together are small enough."""
    total = sum(path.stat().st_size for path in root.rglob("*.safetensors"))
    if total <= MAX_ALL_WEIGHTS:
        return []
    message = f"the weights of all repositories take {total:,} bytes; at most {MAX_ALL_WEIGHTS:,} are allowed."
    return [Problem(root.name, "size", message)]


def _card(kind: str, folder: Path) -> Iterator[tuple[str, str]]:
    from huggingface_hub import DatasetCard, ModelCard, SpaceCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    path = folder / "README.md"
    if not path.is_file():
        yield "card", "README.md is missing."
        return
    text = path.read_text(encoding="utf-8")
    card_class = {"model": ModelCard, "dataset": DatasetCard, "space": SpaceCard}[kind]
    try:
        card = card_class(text)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        yield "card", f"README.md: the front matter is not valid: {error}"
        return
    block = REGEX_YAML_BLOCK.search(text)  # as written; the card object turns a string of tags into a list of letters
    data: dict[str, Any] = (yaml.safe_load(block.group(2)) if block else None) or {}
    missing = [key for key in _REQUIRED[kind] if not data.get(key)]
    if missing:
        yield "card", f"README.md: the front matter lacks {', '.join(missing)}."
    if not isinstance(data.get("tags", []), list):
        yield "card", f"README.md: `tags` must be a list, got {data['tags']!r}."
    if not isinstance(data.get("pipeline_tag", ""), str):
        yield "card", f"README.md: `pipeline_tag` must be one task, got {data['pipeline_tag']!r}."
    if kind == "space" and data.get("app_file") and not (folder / str(data["app_file"])).is_file():
        yield "card", f"README.md: `app_file` {data['app_file']!r} does not exist."
    yield from _code_blocks(text)
    yield from _links(card.text, folder)


def _code_blocks(text: str) -> Iterator[tuple[str, str]]:
    for match in _CODE_BLOCK.finditer(text):
        lines = textwrap.dedent(match.group(1)).splitlines()
        if any(line.startswith(">>>") for line in lines):
            lines = [line[4:] for line in lines if line.startswith((">>>", "..."))]
        try:
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            line = text[: match.start()].count("\n") + 1
            yield "code-block", f"README.md, line {line}: the code block does not parse: {error.msg}."


def _links(text: str, folder: Path) -> Iterator[tuple[str, str]]:
    for match in _LINK.finditer(_CODE.sub("", text)):
        target = (match.group(1) or match.group(2)).partition("#")[0]
        if not target or re.match(r"^[a-z][a-z0-9+.-]*:|^/", target):
            continue
        path = (folder / target.partition("?")[0]).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.exists():
            yield "link", f"README.md links to {target}, which the repository does not hold."


def _sizes(folder: Path) -> Iterator[tuple[str, str]]:
    weights = 0
    for key, path in iter_files(folder):
        size = path.stat().st_size
        if path.suffix == ".safetensors":
            weights += size
        elif path.suffix.lower() in _UNSAFE:
            yield "format", f"{key}: weights and arrays must be .safetensors, not {path.suffix}."
        elif size > MAX_FILE:
            yield "size", f"{key} takes {size:,} bytes; at most {MAX_FILE:,} are allowed."
    if weights > MAX_WEIGHTS:
        yield "size", f"the weights take {weights:,} bytes; at most {MAX_WEIGHTS:,} are allowed."


def _weights(key: str, path: Path) -> Iterator[tuple[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as tensors:
            tensors.keys()
    except (SafetensorError, OSError) as error:
        yield "weights", f"{key} cannot be read: {error}."


def _results(key: str, path: Path) -> Iterator[tuple[str, str]]:
    from huggingface_hub import parse_eval_result_entries

    try:
        parse_eval_result_entries(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        yield "results", f"{key} is not a list of evaluation results: {type(error).__name__}: {error}."


def _components(key: str, path: Path) -> Iterator[tuple[str, str]]:
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        yield "config", f"{key} is not valid JSON: {error}."
        return
    for name, value in index.items():
        if not isinstance(value, list) or not isinstance(value[0], str) or not is_own(value[0]):
            continue
        try:
            tree = SourceModule.find(value[0]).tree
        except ValueError as error:
            yield "config", f"{key}: component {name!r}: {error}"
            continue
        imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        if not imported & _BASES:
            yield (
                "base-class",
                (
                    f"{key}: component {name!r}: {value[0]} must itself import the base class that {value[1]} derives "
                    "from (ModelMixin, SchedulerMixin, …); diffusers looks for it there."
                ),
            )


# ------------------------------------------------------------------------------------------------------ loading


def load_problems(name: str, kind: str, folder: Path) -> list[Problem]:
    """Load an exported repository in a fresh process without this package and without network.

    Args:
        name (`str`): Name of the repository, for the messages.
        kind (`str`): `"model"`, `"dataset"` or `"space"`.
        folder (`Path`): The exported folder. Its code is run.

    Returns:
        `list[Problem]`: what could not be loaded, one line each.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        task = {
            "kind": kind,
            "folder": str(folder.resolve()),
            "blocked": [package for package in OWN_PACKAGES if not (kind == "space" and (folder / package).is_dir())],
            "report": str(report),
        }
        command = [sys.executable, "-I", "-c", _LOADER, json.dumps(task)]
        try:
            done = subprocess.run(
                command, cwd=scratch, env=clean_environment(Path(scratch)), capture_output=True, timeout=_LOAD_SECONDS
            )
        except subprocess.TimeoutExpired:
            return [Problem(name, "load", f"loading takes more than {_LOAD_SECONDS} seconds.")]
        if not report.is_file():
            return [Problem(name, "load", f"the process that loads it ended with exit status {done.returncode}.")]
        return [Problem(name, "load", message) for message in json.loads(report.read_text(encoding="utf-8"))]


def clean_environment(scratch: Path) -> dict[str, str]:
    """Return environment variables for a process without our package, caches in `scratch` and no network."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHONPATH", "GRADIO_"))}
    return kept | {
        "HF_HOME": str(scratch / "hf"),
        "HF_MODULES_CACHE": str(scratch / "modules"),
        "HF_HUB_OFFLINE": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


_LOADER = r"""
import importlib.abc, json, os, pathlib, sys

task = json.loads(sys.argv[1])
folder = pathlib.Path(task["folder"])
problems = []

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in task["blocked"]:
            raise ModuleNotFoundError(f"No module named {name!r} outside of closedloop", name=name)

sys.meta_path.insert(0, Blocker())

def attempt(what, function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        reason = " ".join(str(error).split())[:400]
        problems.append(f"{what}: {type(error).__name__}: {reason}")

def load_model():
    if (folder / "model_index.json").is_file():
        from diffusers import DiffusionPipeline
        DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
        return
    import transformers
    for file in ("preprocessor_config.json", "processor_config.json"):
        if (folder / file).is_file():
            for name in json.loads((folder / file).read_text()).get("auto_map", {}):
                attempt(name, getattr(transformers, name).from_pretrained, folder, trust_remote_code=True)
    if not (folder / "config.json").is_file():
        return
    config = json.loads((folder / "config.json").read_text())
    if "_class_name" in config:
        from diffusers import AutoModel
        AutoModel.from_pretrained(folder, trust_remote_code=True)
        return
    names = [name for name in config.get("auto_map", {}) if name != "AutoConfig"] or config.get("architectures", [])
    attempt("AutoConfig", transformers.AutoConfig.from_pretrained, folder, trust_remote_code=True)
    for name in names:
        loaded = attempt(name, getattr(transformers, name).from_pretrained, folder, trust_remote_code=True,
                         output_loading_info=True)
        if loaded and loaded[1]["missing_keys"]:
            problems.append(f"{name}: the weights lack {', '.join(sorted(loaded[1]['missing_keys'])[:5])}")
    for name in [] if problems else config.get("custom_pipelines", {}):
        attempt(f"pipeline({name!r})", transformers.pipeline, name, model=str(folder), trust_remote_code=True)

def load_dataset():
    import datasets
    for name in datasets.get_dataset_config_names(str(folder)):
        attempt(name, datasets.load_dataset, str(folder), name)

def load_space():
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    import app
    if not hasattr(app, "demo"):
        raise TypeError("app.py must define `demo`, a gradio.Blocks")
    from gradio import Blocks
    if not isinstance(app.demo, Blocks):
        raise TypeError(f"`demo` in app.py must be a gradio.Blocks, got {type(app.demo).__name__}")

attempt(task["kind"], {"model": load_model, "dataset": load_dataset, "space": load_space}[task["kind"]])
pathlib.Path(task["report"]).write_text(json.dumps(problems))
os._exit(0)  # a Space may have left threads behind
"""
