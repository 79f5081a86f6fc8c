"""Imports are followed and rewritten so that code runs in a flat folder."""

import pytest

from hf_pipelines.code_bundle import find_cycle, flatten, package_closure, resolve


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from hf_models.room_b.y import Y", "from .y import Y"),
        ("from hf_models.room_b.y import Y as Z", "from .y import Y as Z"),
        ("from hf_models.room_b.y import Y, other as o", "from .y import Y, other as o"),
        (
            "from hf_models.room_b.y import (\n    Y,  # kept\n    other,\n)",
            "from .y import (\n    Y,  # kept\n    other,\n)",
        ),
        ("from hf_models.room_b.y import Y  # σ kept", "from .y import Y  # σ kept"),
        ("from hf_models.room_b.y \\\n    import Y", "from .y import Y"),
        (
            "def f():\n    'σ'; from hf_models.room_b.y import Y\n    return Y",
            "def f():\n    'σ'; from .y import Y\n    return Y",
        ),
        (
            "def f():\n    from hf_models.room_b.y import Y\n    return Y",
            "def f():\n    from .y import Y\n    return Y",
        ),
        ("from hf_models.room_b import Y", "from .y import Y"),
        ("from hf_models.room_b import Renamed", "from .y import Y as Renamed"),
        ("from hf_models.room_b import Renamed as R", "from .y import Y as R"),
        ("from hf_models.room_b import y", "from . import y"),
        ("from hf_models.room_b import y as module", "from . import y as module"),
        ("from hf_models.room_b import Y, W", "from .y import Y\nfrom .w import W"),
        ("if True:\n    from hf_models.room_b import Y, W", "if True:\n    from .y import Y\n    from .w import W"),
        ("if True: from hf_models.room_b import Y, W", "if True: from .y import Y; from .w import W"),
        ("from ..room_b.y import Y", "from .y import Y"),
        ("from ..room_b import Y", "from .y import Y"),
        ("from .c import C", "from .c import C"),
        ("from . import c", "from . import c"),
        ("from hf_models import SmallFlowModel", "from .modeling_small_flow import SmallFlowModel"),
        ("from torch import nn\nimport math", "from torch import nn\nimport math"),
        ('TEXT = "from hf_models.room_b.y import Y"', 'TEXT = "from hf_models.room_b.y import Y"'),
    ],
)
def test_import_is_rewritten_when_flattened(write_modules, before, after):
    write_modules(
        a__x=before + "\n",
        a__c="C = 1\n",
        b__y="Y = other = 1\n",
        b__w="W = 1\n",
        b__stub="from .w import W as W\nfrom .y import Y as Renamed\nfrom .y import Y as Y\n",
    )
    text = flatten("hf_models.room_a.x")["x.py"]
    assert text.partition("\n\n# The Hub loaders")[0].strip() == after


def test_files_are_those_needed_when_flattened(write_modules):
    write_modules(
        a__x="from .y import Y\n", a__y="from hf_models.room_b.z import Z as Y\n", a__unused="", b__z="Z = 1\n"
    )
    assert list(flatten("hf_models.room_a.x")) == ["x.py", "y.py", "z.py"]


def test_indirect_modules_are_named_when_the_loader_would_miss_them(write_modules):
    write_modules(a__x="from .y import Y\n", a__y="def f():\n    from . import z\n", a__z="Z = 1\n")
    files = flatten("hf_models.room_a.x")
    assert "if False:\n    from .z import __name__ as _z  # noqa: F401\n" in files["x.py"]
    assert (
        "if False:\n    from .z import __name__ as _z  # noqa: F401\n" in files["y.py"]
    )  # `from . import z` is no match
    assert files["z.py"] == "Z = 1\n"


def test_loaders_find_every_file_when_they_read_the_entry_alone(write_modules, tmp_path):
    from diffusers.utils.dynamic_modules_utils import get_relative_imports

    write_modules(a__x="from .y import Y\n", a__y="from .z import Y\n", a__z="from hf_models.room_b import Y\n")
    write_modules(b__stub="from .w import Y as Y\n", b__w="Y = 1\n")
    files = flatten("hf_models.room_a.x")
    (tmp_path / "x.py").write_text(files["x.py"])
    assert {f"{name}.py" for name in get_relative_imports(tmp_path / "x.py")} == set(files) - {"x.py"}


def test_bytes_are_the_same_when_a_module_is_entry_or_companion(write_modules):
    write_modules(a__x="from .y import Y\n", a__y="from .z import Y\n", a__z="from .w import Y\n", a__w="Y = 1\n")
    whole, part = flatten("hf_models.room_a.x"), flatten("hf_models.room_a.y")
    assert part == {name: whole[name] for name in part}


def test_module_in_a_subfolder_is_named_when_asked(write_modules):
    write_modules(a__x="X = 1\n")
    text = flatten("hf_models.room_a.x", named=["model.codec"])["x.py"]
    assert "    from .model.codec import __name__ as _model_codec  # noqa: F401\n" in text


def test_flattening_ends_when_modules_import_each_other(write_modules):
    write_modules(a__x="from .y import Y\nX = 1\n", a__y="Y = 1\ndef f():\n    from .x import X\n", a__z="")
    assert set(flatten("hf_models.room_a.x")) == {"x.py", "y.py"}
    assert find_cycle("hf_models.room_a.x") in ("hf_models.room_a.x", "hf_models.room_a.y")
    assert find_cycle("hf_models.room_a.z") is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\nimport hf_models.room_b.y\n", r"x\.py, line 2: `import hf_models\.room_b\.y` cannot be carried"),
        ("import hf_models\n", r"line 1: `import hf_models` cannot be carried"),
        ("import math, hf_models.room_b as b\n", "cannot be carried"),
        ("from hf_models.room_b.y import *\n", r"line 1: .*name what you import"),
        (
            "from hf_models.room_b.trainer_b import T\n",
            r"room_a\.x imports hf_models\.room_b\.trainer_b: .*house rule 2",
        ),
        ("def f():\n    from hf_models.room_b.train_b import T\n", "house rule 2"),
        ("from hf_models.room_b.benchmark_b import T\n", "house rule 2"),
        ("from hf_pipelines.cli import main\n", "house rule 2"),
        ("from hf_models.room_c.y import Y\nfrom hf_models.room_b.y import Y as Z\n", "two modules called 'y'"),
        ("from hf_models.room_b.missing import Y\n", r"hf_models\.room_b\.missing has no 'Y'"),
        ("from hf_models.room_b import Missing\n", r"hf_models\.room_b has no 'Missing'"),
        ("from hf_models.room_d import HERE\n", r"has no 'HERE'|defined in .*room_d"),
        ("from hf_models.room_d import here\n", r"defined in .*room_d.*__init__\.py"),
    ],
)
def test_flattening_is_refused_when_an_import_cannot_travel(write_modules, source, message):
    write_modules(
        a__x=source,
        b__y="Y = 1\n",
        c__y="Y = 2\n",
        b__trainer_b="T = 1\n",
        b__train_b="T = 1\n",
        b__benchmark_b="T = 1\n",
        d__init="HERE = 1\ndef here(): ...\n",
    )
    if "hf_pipelines.cli" in source and resolve("hf_pipelines.cli", "main") is None:
        message = "hf_pipelines.cli has no 'main'"
    with pytest.raises(ValueError, match=message):
        flatten("hf_models.room_a.x")


def test_entry_is_refused_when_it_does_not_exist():
    with pytest.raises(ValueError, match=r"`module` 'hf_models\.no_room\.x' does not exist"):
        flatten("hf_models.no_room.x")


def test_lazy_names_pull_in_their_modules_when_a_script_imports_them(tmp_path):
    (tmp_path / "app.py").write_text("from hf_pipelines import SmallFlowPipeline\n")
    assert set(package_closure([tmp_path / "app.py"])) == {
        *("hf_models/__init__.py", "hf_models/__init__.pyi", "hf_models/_rooms.py"),
        *("hf_models/small_flow/__init__.py", "hf_models/small_flow/__init__.pyi"),
        "hf_models/small_flow/modeling_small_flow.py",
        *("hf_pipelines/__init__.py", "hf_pipelines/__init__.pyi"),
        *("hf_pipelines/flow_control/__init__.py", "hf_pipelines/flow_control/__init__.pyi"),
        "hf_pipelines/flow_control/pipeline_small_flow.py",
    }


@pytest.mark.parametrize(
    "line",
    [
        "import hf_models.small_flow.modeling_small_flow",
        "from hf_models.small_flow import modeling_small_flow",
        "def f():\n    from hf_models.small_flow.modeling_small_flow import SmallFlowModel",
        "from hf_models.small_flow import SmallFlowModel as M",
    ],
)
def test_module_is_pulled_in_when_a_script_imports_it_in_any_form(tmp_path, line):
    (tmp_path / "app.py").write_text(line + "\n")
    found = package_closure([tmp_path / "app.py"])
    assert "hf_models/small_flow/modeling_small_flow.py" in found
    assert "hf_models/_rooms.py" in found
    assert not any(path.startswith("hf_pipelines/") for path in found)


def test_nothing_is_pulled_in_when_a_script_uses_none_of_ours(tmp_path):
    (tmp_path / "app.py").write_text("import json\nfrom pathlib import Path\n")
    assert package_closure([tmp_path / "app.py"]) == {}
