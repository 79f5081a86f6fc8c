"""`load_tasks`: the tasks of a domain, generated or read from a folder or a Hub data set, and checked before use."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_pipelines.tau2_bench.domains import DOMAINS, PACKAGED, domain_folder, get_domain, layout
from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.domains.mock_tasks import mock_tasks
from hf_pipelines.tau2_bench.domains.telecom_tasks import SPLITS, generate_tasks
from hf_pipelines.tau2_bench.schema import ToolError
from hf_pipelines.tau2_bench.task import COMPONENTS, EnvCall, Task

VERSIONS = ("1.0.1", "0.2", "verified")
SIDES = ("assistant", "user")


def load_tasks(
    domain: str,
    split: str = "base",
    data_dir: str | Path | None = None,
    hub_id: str | None = None,
    version: str = "1.0.1",
    only_with_actions: bool = False,
    task_ids: Sequence[str] | None = None,
) -> list[Task]:
    """The tasks of one domain.

    Telecom and mock are made here, offline; with a folder or a Hub id their public files are read instead. Airline and
    retail always need one of the two.

    >>> len(load_tasks("telecom"))
    114

    Args:
        domain (`str`): `"telecom"`, `"mock"`, `"airline"` or `"retail"`.
        split (`str`, defaults to `"base"`): Telecom `"base"` (114), `"train"` (74), `"test"` (40), `"small"` (20),
            `"full"` (2,285), and, generated, `"all"` (3,405); elsewhere a split of the file, or `"all"`.
        data_dir (`str` or `Path`, *optional*): Folder in the layout of the public repository's data.
        hub_id (`str`, *optional*): Hub data set in the same layout.
        version (`str`, defaults to `"1.0.1"`): Edition of the airline and retail task files: `"1.0.1"`, `"0.2"` (the
            first release) or `"verified"` (the corrected edition). Results of different editions do not compare.
        only_with_actions (`bool`, defaults to `False`): Whether to leave out tasks without a gold action, as the Hub's
            registration of the benchmark does (43 of 50 airline and 112 of 114 retail tasks remain).
        task_ids (`Sequence[str]`, *optional*): Only these, in this order.

    Returns:
        `list[Task]`: The tasks in the order of the file or the generator.

    Raises:
        ValueError: If an argument is unknown, a task is malformed, or no task is left.
        FileNotFoundError: If the folder does not hold the files.
    """
    if domain not in DOMAINS:
        raise ValueError(f"domain={domain!r} is not one of {', '.join(DOMAINS)}")
    if version not in VERSIONS:
        raise ValueError(f"version={version!r} is not one of {', '.join(VERSIONS)}")
    if version != "1.0.1" and domain not in ("airline", "retail"):
        raise ValueError(f"version={version!r}: only airline and retail have other editions; {domain!r} is 1.0.1")
    if data_dir is not None and hub_id is not None:
        raise ValueError("give data_dir or hub_id, not both")
    if hub_id is not None:
        data_dir = download(hub_id)
    if data_dir is None and domain not in PACKAGED:
        raise ValueError(f"data_dir=None: the {domain} tasks are not packaged; {layout(domain)}")
    if data_dir is not None:
        tasks = read_tasks(domain, split, data_dir, version)
    elif domain == "telecom":
        tasks = generate_tasks(split)
    else:
        tasks = mock_tasks()
        if split not in ("base", "all"):
            raise ValueError(f"split={split!r} is not one of base, all")
    if only_with_actions:
        tasks = [task for task in tasks if task.actions]
    if task_ids is not None:
        by_id = {task.id: task for task in tasks}
        unknown = [task_id for task_id in task_ids if task_id not in by_id]
        if unknown:
            raise ValueError(f"task_ids: {unknown[0]!r} is not in the split {split!r} of {domain!r}")
        tasks = [by_id[task_id] for task_id in task_ids]
    if not tasks:
        raise ValueError(f"no task is left of domain={domain!r}, split={split!r}")
    check_tasks(tasks, get_domain(domain, data_dir))
    return tasks


def download(hub_id: str) -> str:
    """The local folder of a Hub data set (its cache when offline)."""
    from huggingface_hub import snapshot_download

    patterns = [f"*{name}/*{ending}" for name in DOMAINS for ending in (".json", ".json.gz", ".toml")]
    return snapshot_download(hub_id, repo_type="dataset", allow_patterns=patterns)


# ------------------------------------------------------------------------------------------------------ task files


def read_tasks(domain: str, split: str, data_dir: str | Path, version: str = "1.0.1") -> list[Task]:
    """The tasks of a split from the files of a folder; fields that this code does not know are kept.

    Raises:
        ValueError: If the split is unknown or a file is not what it should be.
        FileNotFoundError: If a file is missing.
    """
    folder = domain_folder(domain, data_dir)
    if version == "1.0.1":
        records = read_json(folder, "tasks", domain)
    else:
        edition = "v0.2" if version == "0.2" else version
        records = read_json(_edition_folder(folder, edition), f"{domain}_tasks", domain)
    if not isinstance(records, list) or not all(isinstance(r, dict) and "id" in r for r in records):
        raise ValueError(f"{folder}: the task file must be a list of objects with an id")
    splits = read_json(folder, "split_tasks", domain)
    if split != "all" and split not in splits:
        raise ValueError(f"split={split!r} is not one of {', '.join([*splits, 'all'])}")
    members = {name: {str(task_id) for task_id in ids} for name, ids in splits.items()}
    kept = [record for record in records if split == "all" or str(record["id"]) in members[split]]
    return [
        Task(record, domain, str(folder), [name for name, ids in members.items() if str(record["id"]) in ids])
        for record in kept
    ]


def _edition_folder(folder: Path, edition: str) -> Path:
    places = (folder.parent / "alt_tasks" / edition, folder / "alt_tasks" / edition, folder / edition)
    return next((place for place in places if place.is_dir()), places[0])


def read_json(folder: Path, stem: str, domain: str) -> Any:
    """`folder/stem.json` or `.json.gz`.

    Raises:
        FileNotFoundError: If there is neither.
        ValueError: If the file is not JSON.
    """
    plain, packed = folder / f"{stem}.json", folder / f"{stem}.json.gz"
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise FileNotFoundError(f"no {plain} (or .json.gz); {layout(domain)}")
    data = path.read_bytes()
    try:
        return json.loads(gzip.decompress(data) if path is packed else data)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


# ------------------------------------------------------------------------------------------------------ validation


def check_tasks(tasks: Sequence[Task], domain: Domain) -> None:
    """Refuse tasks that could not be run or judged.

    Raises:
        ValueError: If ids repeat, or a task names an unknown reward component, set-up function or assertion, or gives
            them arguments they do not take. The message names the task and the field.
    """
    seen: set[str] = set()
    checked: dict[str, str | None] = {}
    for task in tasks:
        if task.id in seen:
            raise ValueError(f"task {task.id!r} is there twice")
        seen.add(task.id)
        for problem in task_problems(task, domain, checked):
            raise ValueError(f"task {task.id!r}: {problem}")


def task_problems(task: Task, domain: Domain, checked: dict[str, str | None] | None = None) -> Iterator[str]:
    """Yield what is malformed in a task, each with its field.

    Args:
        task (`Task`): The task.
        domain (`Domain`): Its world.
        checked (`dict`, *optional*): Steps that were looked at before, so that thousands of tasks cost little.
    """
    checked = {} if checked is None else checked
    try:
        basis, actions = task.reward_basis, task.actions
        steps = [("initial_state.initialization_actions", step) for step in task.initialization_actions]
        steps += [("evaluation_criteria.env_assertions", step) for step in task.env_assertions]
        _ = task.message_history
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        yield f"cannot be read ({type(error).__name__}: {error})"
        return
    for component in basis:
        if component not in COMPONENTS:
            yield f"evaluation_criteria.reward_basis has {component!r}; allowed are {', '.join(COMPONENTS)}"
    for action in actions:
        if action.requestor not in SIDES:
            yield f"evaluation_criteria.actions: requestor {action.requestor!r} must be assistant or user"
    for field, step in steps:
        key = f"{field} {step.env_type} {step.func_name} {step.arguments}"
        if key not in checked:
            checked[key] = _step_problem(step, domain, needs_assertion=field.endswith("assertions"))
        if checked[key]:
            yield f"{field}: {checked[key]}"
    for side in task.initialization_data or ():
        if side not in ("agent_data", "user_data"):
            yield f"initial_state.initialization_data has {side!r}; allowed are agent_data and user_data"


def _step_problem(step: EnvCall, domain: Domain, needs_assertion: bool) -> str | None:
    kits = {"assistant": domain.agent_toolkit, "user": domain.user_toolkit}
    kit = kits.get(step.env_type)
    if kit is None:
        return f"env_type {step.env_type!r} is no side of {domain.name!r}"
    function = kit.functions.get(step.func_name)
    kind = "assertion" if needs_assertion else "set-up function"
    if function is None or (function.kind == "assertion") != needs_assertion:
        return f"{step.func_name!r} is no {kind} of the side {step.env_type!r} of {domain.name!r}"
    try:
        function.signature.bind(step.arguments)
    except ToolError as error:
        return f"{step.func_name}: {error}"
    return None


__all__ = ["SPLITS", "VERSIONS", "check_tasks", "load_tasks", "read_tasks", "task_problems"]
