"""Find the method rooms of a package and let each announce itself to transformers."""

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

PACKAGES = ("hf_models", "hf_pipelines")


def iter_rooms(package: str, path: Iterable[str]) -> Iterator[ModuleType]:
    """Import and yield every room (sub-package) of `package`, in order of name.

    A room's `__init__` loads its own names lazily, so this costs next to nothing.
    """
    for info in pkgutil.iter_modules(path):
        if info.ispkg and not info.name.startswith("_"):
            yield importlib.import_module(f"{package}.{info.name}")


def register_rooms(package: str, path: Iterable[str]) -> None:
    """Call `register()` of every room that has one (Auto classes, `pipeline(...)` tasks, quantizers)."""
    for room in iter_rooms(package, path):
        register = room.__dict__.get("register")
        if register is not None:
            register()


def register_on_import(package: str, path: Iterable[str]) -> None:
    """What a package does when it is imported: register its rooms, which costs the import of transformers.

    The `closedloop` command does it later, when a command runs, so that `closedloop --help` answers at once.
    """
    program = sys.argv[0] if sys.argv else ""
    is_command = Path(program).stem == "closedloop" or (program == "-m" and "hf_pipelines.cli" in sys.orig_argv)
    if not is_command:
        register_rooms(package, path)


def register_all() -> None:
    """Register the rooms of both packages, as importing them does outside the command line."""
    for package in PACKAGES:
        register_rooms(package, importlib.import_module(package).__path__)
