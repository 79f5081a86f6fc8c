"""Find the method rooms of a package and let each announce itself to transformers."""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from types import ModuleType


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
