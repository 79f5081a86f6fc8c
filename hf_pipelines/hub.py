"""Turn any model, pipeline, data set or Space of ours into a Hub-ready folder; check it; upload it.

    >>> from hf_pipelines import hub
    >>> folder = hub.export("digits-16x16", "out/digits-16x16")  # doctest: +SKIP
    >>> hub.check("digits-16x16")  # doctest: +SKIP
    []
    >>> hub.push("digits-16x16", dry_run=True)  # doctest: +SKIP
    [('README.md', 4123), …]

An exported folder loads with `trust_remote_code=True` in a process that has never heard of this package: it carries
the code it needs (`code_bundle.py` says how).
"""

import ast
import importlib.metadata
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hf_pipelines.code_bundle import OWN_PACKAGES, package_closure
from hf_pipelines.hub_check import MARKER, Problem, iter_files, load_problems, static_problems, total_size_problems
from hf_pipelines.hub_code import carry_code

NAMESPACE = "closedloop"
KINDS = ("model", "dataset", "space")
_ASSETS = {"model": "model_cards", "space": "spaces"}
_NAME = re.compile(r"^\w[\w.-]*$", flags=re.ASCII)

Kind = Literal["model", "dataset", "space"]
Plan = dict[str, Path | bytes]  # what goes into an exported folder: content by relative path


class HubError(ValueError):
    """What a person can cause and put right: a wrong name, a folder in the way, a refused upload."""


@dataclass(frozen=True)
class RepoInfo:
    """One repository that this package can publish.

    Args:
        name (`str`): Its name, without the namespace.
        kind (`str`): `"model"` (pipelines too), `"dataset"` or `"space"`.
        path (`Path`, *optional*): Its folder; `None` for a data set, which is built on export.
        size (`int`): Bytes on disk; 0 for a data set.
    """

    name: str
    kind: Kind
    path: Path | None
    size: int


def asset_root(kind: Literal["model_cards", "spaces"]) -> Path:
    """Find the folder of shipped repositories.

    Args:
        kind (`str`): `"model_cards"` or `"spaces"`.

    Returns:
        `Path`: beside the packages in a checkout, inside `hf_pipelines` in an installed wheel. It may not exist.

    Raises:
        ValueError: `kind` is neither of the two.
    """
    if kind not in _ASSETS.values():
        raise ValueError(f"`kind` must be one of {tuple(_ASSETS.values())}, got {kind!r}.")
    package = Path(__file__).resolve().parent
    checkout = package.parent / kind
    return checkout if checkout.is_dir() else package / "_shipped" / kind


def repo(name: str) -> str:
    """Name a shipped model or pipeline so that `from_pretrained` finds it, offline where it can.

    Args:
        name (`str`): Name of a repository, such as `"digits-16x16"`.

    Returns:
        `str`: the path of the shipped repository, else its Hub id `closedloop/<name>`.

    Raises:
        ValueError: `name` is not the plain name of a repository.
    """
    _check_name(name)
    path = asset_root("model_cards") / name
    return str(path) if path.is_dir() else f"{NAMESPACE}/{name}"


def list_repos() -> list[RepoInfo]:
    """List the models, pipelines, data sets and Spaces that this package can publish, each kind in order of name."""
    from datasets_scripts import list_builders

    models = [path for path in _folders(asset_root("model_cards")) if any(iter_files(path))]
    spaces = [path for path in _folders(asset_root("spaces")) if (path / "app.py").is_file()]
    return [
        *(RepoInfo(path.name, "model", path, _size(path)) for path in models),
        *(RepoInfo(name, "dataset", None, 0) for name in sorted(list_builders(publishable=True))),
        *(RepoInfo(path.name, "space", path, _size(path)) for path in spaces),
    ]


def export(name_or_path: str | Path, out: str | Path, kind: Kind | None = None) -> Path:
    """Write a Hub-ready folder: the repository and the code it needs.

    Args:
        name_or_path (`str` or `Path`): Name of a shipped repository or of a data set, or a folder.
        out (`str` or `Path`): Folder to write; missing, empty, or one that an earlier export wrote.
        kind (`str`, *optional*): `"model"`, `"dataset"` or `"space"`, where a name alone is not clear.

    Returns:
        `Path`: the folder `out`.

    Raises:
        ValueError: There is no such repository, `out` holds files of yours, or code cannot be carried; the message
            says which.
    """
    source = _locate(name_or_path, kind)
    out = Path(out)
    previous = _previous_files(out)
    if source.path is not None:
        inner, outer = sorted((source.path.resolve(), out.resolve()), key=lambda path: -len(path.parts))
        if inner.is_relative_to(outer):
            raise HubError(f"`out` {str(out)!r} and the repository {str(source.path)!r} must not lie in one another.")
        _write(_plan(source.kind, source.path), out, previous)
        return out
    from datasets_scripts import build

    with tempfile.TemporaryDirectory() as folder:
        built = build(source.name, Path(folder) / source.name)
        _write({key: path for key, path in iter_files(Path(built))}, out, previous)
    return out


def check(name_or_path: str | Path, kind: Kind | None = None, *, load: bool = True) -> list[Problem]:
    """Find what would be wrong with a repository on the Hub.

    Card, sizes, file formats, code blocks, links and results are read; then an export is loaded in a process that
    cannot import this package, without network.

    Args:
        name_or_path (`str` or `Path`): Name of a shipped repository or of a data set, or a folder.
        kind (`str`, *optional*): `"model"`, `"dataset"` or `"space"`, where a name alone is not clear.
        load (`bool`, defaults to `True`): Whether to load it; `False` only reads, which takes no time.

    Returns:
        `list[Problem]`: empty where all is well.

    Raises:
        ValueError: There is no such repository.
    """
    source = _locate(name_or_path, kind)
    with tempfile.TemporaryDirectory() as folder:
        # the name of the folder is the name of the repo, as it is in a Hub cache
        return _export_and_check(source, Path(folder) / source.name, load=load)


def push(
    name: str,
    repo_id: str | None = None,
    *,
    kind: Kind | None = None,
    dry_run: bool = False,
    token: str | None = None,
    private: bool = False,
) -> list[tuple[str, int]]:
    """Export, check and upload a repository; nothing is uploaded while `check` finds a problem.

    Args:
        name (`str`): Name of a shipped repository or of a data set, or a folder.
        repo_id (`str`, *optional*): Where to; `closedloop/<name>` when `None`.
        kind (`str`, *optional*): `"model"`, `"dataset"` or `"space"`, where a name alone is not clear.
        dry_run (`bool`, defaults to `False`): Only say what would go; the Hub is not contacted.
        token (`str`, *optional*): A Hub token that may write; that of `hf auth login` when `None`.
        private (`bool`, defaults to `False`): Whether a repository created by this call is private.

    Returns:
        `list[tuple[str, int]]`: path and size in bytes of each file.

    Raises:
        ValueError: `check` found problems, or the Hub refused or could not be reached; one line each.
    """
    source = _locate(name, kind)
    repo_id = repo_id or f"{NAMESPACE}/{source.name}"
    if not all(_NAME.match(part) for part in repo_id.split("/")) or repo_id.count("/") != 1:
        raise HubError(f"`repo_id` must be 'namespace/name', got {repo_id!r}.")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / source.name
        problems = _export_and_check(source, out, load=True)
        if problems:
            raise HubError("\n".join([f"{source.name} is not fit to publish:", *map(str, problems)]))
        files = [(key, path.stat().st_size) for key, path in iter_files(out)]
        if not dry_run:
            _upload(out, repo_id, source.kind, token, private)
    return files


# -------------------------------------------------------------------------------------------------------- finding


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name) or ".." in name:
        raise HubError(f"`name` must be the plain name of a repository such as 'digits-16x16', got {name!r}.")


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for _, path in iter_files(folder))


def _kind_of(folder: Path) -> Kind:
    if (folder / "app.py").is_file():
        return "space"
    if any(folder.glob("*.json")) or any(folder.rglob("*.safetensors")):
        return "model"
    return "dataset"


def _locate(name_or_path: str | Path, kind: Kind | None) -> RepoInfo:
    if kind is not None and kind not in KINDS:
        raise HubError(f"`kind` must be one of {KINDS} or None, got {kind!r}.")
    text = str(name_or_path)
    if isinstance(name_or_path, str) and _NAME.match(text):
        matches = [info for info in list_repos() if info.name == text and kind in (None, info.kind)]
        if len(matches) > 1:
            raise HubError(f"{text!r} is the name of a {' and of a '.join(m.kind for m in matches)}: give `kind`.")
        if matches:
            return matches[0]
    folder = Path(name_or_path)
    if folder.is_dir() and folder.resolve().name:
        return RepoInfo(folder.resolve().name, kind or _kind_of(folder), folder, _size(folder))
    if not folder.exists() and _NAME.match(text):
        names = ", ".join(f"{info.name} ({info.kind})" for info in list_repos() if kind in (None, info.kind))
        raise HubError(f"`name_or_path` must be a folder or one of {names}; got {text!r}.")
    raise HubError(f"`name_or_path` must be a folder or the name of a repository, got {text!r}.")


# -------------------------------------------------------------------------------------------------------- planning


def _plan(kind: Kind, folder: Path) -> Plan:
    """Say what an exported folder holds; nothing is written before all of it is known."""
    plan: Plan = dict(iter_files(folder))
    if kind == "model":
        carry_code(plan)
    elif kind == "space":
        _carry_packages(plan)
    return plan


def _carry_packages(plan: Plan) -> None:
    """Add what a Space needs to run alone: our modules in their packages, the models it names, the licence."""
    bundled = (*OWN_PACKAGES, "model_cards")
    scripts = [
        path
        for key, path in plan.items()
        if key.endswith(".py") and key.split("/")[0] not in bundled and isinstance(path, Path)
    ]
    plan.update(package_closure(scripts))
    texts = {
        node.value
        for script in scripts
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"), filename=str(script)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for model in _folders(asset_root("model_cards")):
        if model.name in texts:
            plan.update({f"model_cards/{model.name}/{key}": path for key, path in iter_files(model)})
    plan.setdefault("LICENSE", _license())


def _license() -> bytes:
    checkout = Path(__file__).resolve().parent.parent / "LICENSE"
    if checkout.is_file():
        return checkout.read_bytes()
    try:
        text = importlib.metadata.distribution("closedloop").read_text("licenses/LICENSE")
    except importlib.metadata.PackageNotFoundError:
        text = None
    if text is None:
        raise HubError("the LICENSE of closedloop is missing from this installation; install it again.")
    return text.encode()


# -------------------------------------------------------------------------------------------------------- writing


def _previous_files(out: Path) -> list[str]:
    """Files of an earlier export in `out`; `HubError` where `out` holds anything else."""
    if not out.exists():
        return []
    if not out.is_dir():
        raise HubError(
            f"`out` {str(out)!r} is a file; it must be a folder that is missing, empty or an earlier export."
        )
    present = {key for key, _ in iter_files(out)}
    marker = out / MARKER
    if not present and not marker.is_file():
        return []
    known: set[str] = set()
    if marker.is_file():
        try:
            known = set(json.loads(marker.read_text(encoding="utf-8"))["files"])
        except (ValueError, KeyError, TypeError) as error:
            raise HubError(f"`out` {str(out)!r} holds a damaged {MARKER}; choose another folder.") from error
    if strange := sorted(present - known):
        raise HubError(
            f"`out` {str(out)!r} holds files that no export wrote ({', '.join(strange[:3])}); choose another folder."
        )
    return sorted(present)


def _write(plan: Plan, out: Path, previous: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    contents = {key: item if isinstance(item, bytes) else None for key, item in sorted(plan.items())}
    for key in previous:
        (out / key).unlink()
    marker = json.dumps({"files": list(contents)}, indent=2, sort_keys=True) + "\n"
    (out / MARKER).write_text(marker, encoding="utf-8")  # first: an interrupted export can be repeated
    for key, content in contents.items():
        target = out / key
        target.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            shutil.copyfile(plan[key], target)
        else:
            target.write_bytes(content)


# -------------------------------------------------------------------------------------------------------- publishing


def _export_and_check(source: RepoInfo, out: Path, load: bool) -> list[Problem]:
    problems = []
    try:
        if source.path is not None:
            problems += static_problems(source.name, source.kind, source.path)
            if source.path.resolve().parent == asset_root("model_cards").resolve():
                problems += total_size_problems(asset_root("model_cards"))
        export(source.path or source.name, out, source.kind)
    except ValueError as error:
        return [*problems, Problem(source.name, "export", " ".join(str(error).split()))]
    if source.path is None:
        problems += static_problems(source.name, source.kind, out)
    if load and not any(problem.rule == "weights" for problem in problems):
        problems += load_problems(source.name, source.kind, out)
    return problems


def _upload(folder: Path, repo_id: str, kind: Kind, token: str | None, private: bool) -> None:
    from huggingface_hub import HfApi

    try:
        api = HfApi(token=token)
        api.create_repo(
            repo_id, repo_type=kind, private=private, exist_ok=True, space_sdk="gradio" if kind == "space" else None
        )
        api.upload_folder(
            repo_id=repo_id,
            repo_type=kind,
            folder_path=folder,
            commit_message="Upload with closedloop",
            ignore_patterns=[MARKER],
        )
    except Exception as error:  # the client raises its own errors, those of its HTTP library and of the system
        reason = next(iter(str(error).strip().splitlines()), "")
        raise HubError(f"uploading {repo_id} failed: {type(error).__name__}: {reason}") from error
