"""Imports: what the packages pull in, what they cost, and that they go one way (architecture, rules 1 and 2)."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hf_models", "hf_pipelines", "datasets_scripts", "spaces")
HEAVY = {"diffusers", "datasets", "gradio", "mujoco", "sklearn", "matplotlib"}
CORES = {"flow_control", "small_flow", "packaged_llm"}  # rooms that several methods share


def python(*arguments: str, repeats: int = 1) -> tuple[subprocess.CompletedProcess, float]:
    """Run Python and return the result and the CPU seconds of the child, the best of `repeats`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    seconds = []
    for _ in range(repeats):
        before = os.times()
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300
        )
        after = os.times()
        assert done.returncode == 0, done.stderr[-3000:]
        seconds.append(after.children_user - before.children_user + after.children_system - before.children_system)
    return done, min(seconds)


# ------------------------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("statement", ["import hf_models, hf_pipelines", "import hf_pipelines.cli"])
def test_nothing_heavy_is_imported_when_a_package_is(statement):
    done, _ = python("-X", "importtime", "-c", statement)
    lines = [line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {name.split(".")[0] for name in lines}
    assert "hf_models" in imported
    assert imported & HEAVY == set()


def test_torch_is_not_imported_when_the_command_line_only_starts():
    code = "import sys; sys.argv[0] = '/usr/bin/closedloop'; import hf_pipelines.cli; print('torch' in sys.modules)"
    assert python("-c", code)[0].stdout == "False\n"


def test_auto_classes_know_our_models_when_a_package_was_imported():
    code = "import hf_models; from transformers import AutoConfig; print(AutoConfig.for_model('arm_llama').arm_window)"
    assert python("-c", code)[0].stdout == "64\n"


def test_import_costs_at_most_1_3_of_transformers_when_measured():
    _, ours = python("-c", "import hf_models, hf_pipelines", repeats=3)
    _, theirs = python("-c", "from transformers import AutoModel, PreTrainedModel, pipeline", repeats=3)
    assert ours <= 1.3 * theirs


# ----------------------------------------------------------------------------------------------------- public names


@pytest.mark.parametrize("package", ["hf_models", "hf_pipelines", "datasets_scripts"])
def test_every_public_name_resolves_when_asked(package):
    code = f"import {package} as p; print(len([getattr(p, n) for n in p.__all__]), set(p.__all__) - set(dir(p)))"
    done, _ = python("-c", code)
    count, missing = done.stdout.split(maxsplit=1)
    assert int(count) >= 2 and missing.strip() == "set()"


def test_names_of_the_architecture_resolve_when_imported():
    code = (
        "from hf_models import SmallFlowModel, GaussianMixtureFlowModel\n"
        "from hf_pipelines import SmallFlowPipeline, attach_controller, ControlledFlowMatchEulerScheduler\n"
        "from hf_pipelines import MPCFlowController, MPCFlowPipeline, operators, hub\n"
        "from hf_pipelines.flow_control import MPCFlowPipeline as same, operators as same_operators\n"
        "print(same is MPCFlowPipeline, same_operators is operators, hub.__name__)"
    )
    assert python("-c", code)[0].stdout.split() == ["True", "True", "hf_pipelines.hub"]


@pytest.mark.parametrize("package", ["hf_models", "hf_pipelines", "hf_pipelines.flow_control", "datasets_scripts"])
def test_unknown_name_is_an_attribute_error_when_asked(package):
    code = f"import {package} as p\ntry: p.NoSuchName\nexcept AttributeError as error: print(error)"
    done, _ = python("-c", code)
    assert "NoSuchName" in done.stdout


# --------------------------------------------------------------------------------------------------------- one way


def imported_names(source: str, package: str) -> set[str]:
    """Absolute dotted names that a module imports anywhere in it; `from a import b` gives `a.b`.

    Args:
        source (`str`): The code.
        package (`str`): The package it lies in, for relative imports.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def room_of_public_names() -> dict[str, str]:
    """Where each public name of `hf_models` and `hf_pipelines` is defined, from the stubs."""
    rooms = {}
    for package in ("hf_models", "hf_pipelines"):
        for name in imported_names((ROOT / package / "__init__.pyi").read_text(), package):
            module, _, attribute = name.rpartition(".")
            rooms[f"{package}.{attribute}"] = f"{module}.{attribute}"
    return rooms


def modules() -> dict[str, set[str]]:
    """What every module of ours imports, by path."""
    public = room_of_public_names()
    found = {}
    for top in PACKAGES:
        for path in sorted((ROOT / top).rglob("*.py")):
            package = ".".join(path.relative_to(ROOT).parent.parts)
            names = imported_names(path.read_text(encoding="utf-8"), package)
            found[path.relative_to(ROOT).as_posix()] = {public.get(name, name) for name in names}
    return found


MODULES = modules()


def offenders(allowed) -> list[str]:
    return [
        f"{path} imports {name}"
        for path, names in MODULES.items()
        for name in sorted(names)
        if not allowed(path, name)
    ]


def room(path: str) -> str | None:
    """Room of a file or a dotted name, such as `mpc_flow`; `None` for modules of the package itself."""
    parts = path.replace(".py", "").replace("/", ".").split(".")
    return parts[1] if len(parts) > 1 and (ROOT / parts[0] / parts[1]).is_dir() else None


def test_imports_are_all_found_when_a_module_is_read():
    source = """
import a.b as c
from hf_models import x
from . import sibling
from .inner import y as z
from ..other import w
def later():
    from hf_pipelines.cli import main
"""
    assert imported_names(source, "hf_pipelines.room") == {
        *("a.b", "hf_models.x", "hf_pipelines.room.sibling", "hf_pipelines.room.inner.y"),
        *("hf_pipelines.other.w", "hf_pipelines.cli.main"),
    }
    assert len(MODULES) > 30
    assert (
        "hf_models.small_flow.modeling_small_flow.SmallFlowModel"
        in MODULES["hf_pipelines/flow_control/pipeline_small_flow.py"]
    )
    assert room_of_public_names()["hf_pipelines.MPCFlowPipeline"].startswith("hf_pipelines.mpc_flow.")


def test_packages_import_one_way_when_all_modules_are_read():
    lower = {
        "spaces": {"hf_pipelines", "hf_models", "datasets_scripts", "spaces"},
        "hf_pipelines": {"hf_pipelines", "hf_models"},
        "hf_models": {"hf_models"},
        "datasets_scripts": {"datasets_scripts"},
    }

    def allowed(path: str, name: str) -> bool:
        top, target = path.split("/")[0], name.split(".")[0]
        if target not in PACKAGES or target in lower[top]:
            return True
        # trainers and benchmarks import data sets; so do the commands that list, build and publish them
        reads_data = path.split("/")[-1].startswith(("train_", "benchmark_", "ablations_", "experiments_"))
        commands = path in ("hf_pipelines/cli.py", "hf_pipelines/hub.py")
        return target == "datasets_scripts" and (reads_data or commands)

    assert offenders(allowed) == []


def test_rooms_of_two_methods_import_nothing_of_each_other_when_all_modules_are_read():
    def allowed(path: str, name: str) -> bool:
        if name.split(".")[0] not in ("hf_models", "hf_pipelines") or path.split("/")[0] == "spaces":
            return True
        return room(path) is None or room(name) in {None, room(path), *CORES}

    assert offenders(allowed) == []


def test_what_travels_imports_no_trainer_benchmark_plot_or_command_when_all_modules_are_read():
    travels = ("configuration_", "modeling_", "scheduling_", "pipeline_", "controller_", "cache_", "quantizer_")
    kept_out = ("train_", "trainer_", "benchmark_", "ablations_", "baselines_")

    def allowed(path: str, name: str) -> bool:
        if not path.split("/")[-1].startswith(travels):
            return True
        parts = name.split(".")
        if parts[0] in ("matplotlib", "gradio", "typer", "rich", "datasets", "sklearn", "datasets_scripts"):
            return False
        inside = parts[0] in PACKAGES
        return not (inside and any(part.startswith(kept_out) or part in ("cli", "benchmark") for part in parts[1:]))

    assert offenders(allowed) == []
