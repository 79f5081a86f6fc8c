"""The four domains. Telecom and mock come with the package; airline and retail read a folder that the user names."""

from functools import lru_cache
from importlib import import_module
from pathlib import Path

from hf_pipelines.tau2_bench.domains.base import Domain

DOMAINS = ("telecom", "mock", "airline", "retail")
PACKAGED = ("telecom", "mock")


def get_domain(name: str, data_dir: str | Path | None = None, compat: str = "upstream") -> Domain:
    """A domain, read once per process and folder.

    Args:
        name (`str`): `"telecom"`, `"mock"`, `"airline"` or `"retail"`.
        data_dir (`str` or `Path`, *optional*): Folder with a sub-folder of the domain's name (or that sub-folder
            itself). Airline and retail need it.
        compat (`str`, defaults to `"upstream"`): For retail, whether an order's modified items all get the last
            item's variant, as in the public benchmark (`"upstream"`), or each its own (`"fixed"`).

    Raises:
        ValueError: If `name` or `compat` is unknown, or a domain that is not packaged gets no folder.
        FileNotFoundError: If the folder has no such domain.
    """
    if name not in DOMAINS:
        raise ValueError(f"domain={name!r} is not one of {', '.join(DOMAINS)}")
    if compat not in ("upstream", "fixed"):
        raise ValueError(f"compat={compat!r} must be 'upstream' or 'fixed'")
    folder = None if data_dir is None else domain_folder(name, data_dir)
    if folder is None and name not in PACKAGED:
        raise ValueError(f"data_dir=None: {name!r} is not packaged; {layout(name)}")
    return _load(name, folder, compat)


@lru_cache(maxsize=16)
def _load(name: str, folder: Path | None, compat: str) -> Domain:
    module = import_module(f"{__name__}.{name}")
    return module.load(folder, compat) if name == "retail" else module.load(folder)


def layout(name: str) -> str:
    """What a data folder must look like, for error messages."""
    database = "db.toml" if name == "telecom" else "db.json"
    return (
        f"give data_dir= a folder that holds {name}/{database}, {name}/tasks.json (or .json.gz) and "
        f"{name}/split_tasks.json, as in the public repository's data/tau2/domains, or hub_id= of such a data set"
    )


def domain_folder(name: str, data_dir: str | Path) -> Path:
    """The sub-folder of a domain in a folder that the user names.

    Raises:
        FileNotFoundError: If there is none.
    """
    root = Path(data_dir).expanduser()
    database = "db.toml" if name == "telecom" else "db.json"
    for folder in (root / name, root / "domains" / name, root / "data" / "tau2" / "domains" / name, root):
        if (folder / database).is_file() and (folder != root or root.name == name):
            return folder.resolve()
    raise FileNotFoundError(f"data_dir={str(data_dir)!r} holds no {name}/{database}; {layout(name)}")
