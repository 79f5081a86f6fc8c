"""Fixtures of the integration tests: toy method rooms, exported repositories, a Hub on localhost."""

import importlib
import json
import sys
import textwrap
from pathlib import Path

import pytest
from hub_processes import BUILD, run_python, write_rooms
from hub_server import HubServer

import hf_models

PACKAGE = "import lazy_loader\n\n__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)\n"


@pytest.fixture(scope="session")
def rooms(tmp_path_factory) -> Path:
    """Folder of the toy rooms."""
    root = tmp_path_factory.mktemp("rooms")
    write_rooms(root)
    return root


@pytest.fixture(scope="session")
def exports(rooms, tmp_path_factory) -> Path:
    """Folder with exported repositories, their originals in `saved/`, and `reference.json`."""
    out = tmp_path_factory.mktemp("exports")
    run_python(BUILD, rooms, out, cwd=tmp_path_factory.mktemp("build"))
    return out


@pytest.fixture(scope="session")
def reference(exports) -> dict:
    """What the repositories answered inside our package."""
    return json.loads((exports / "reference.json").read_text())


@pytest.fixture
def hub_server():
    """An empty Hub on localhost."""
    with HubServer() as server:
        yield server


@pytest.fixture
def write_modules(tmp_path, monkeypatch):
    """Write modules of throw-away rooms `hf_models.room_…`: source by path below `hf_models`."""
    monkeypatch.setattr(hf_models, "__path__", [*hf_models.__path__, str(tmp_path)])

    def write(**sources: str) -> None:
        for name, source in sources.items():
            room, _, module = name.partition("__")
            folder = tmp_path / f"room_{room}"
            folder.mkdir(exist_ok=True)
            if not (folder / "__init__.py").exists():
                (folder / "__init__.py").write_text(PACKAGE)
                (folder / "__init__.pyi").write_text("")
            file = "__init__.pyi" if module == "stub" else "__init__.py" if module == "init" else f"{module}.py"
            (folder / file).write_text(textwrap.dedent(source), encoding="utf-8")
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.startswith("hf_models.room_")]:
        del sys.modules[name]
