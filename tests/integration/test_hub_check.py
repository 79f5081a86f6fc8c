"""`hub.check` finds each planted fault, and nothing in a sound repository."""

import re
import shutil
from pathlib import Path

import pytest
from hub_processes import CARD

from hf_pipelines import hub, hub_check

RESULTS = "- dataset:\n    id: closedloop/digits\n    task_id: sampling\n  value: 0.5\n"
SPACE_CARD = "---\ntitle: Toy\nsdk: gradio\napp_file: app.py\nlicense: apache-2.0\n---\n# Toy\n"
APP = """
import gradio as gr
from hf_models import GaussianMixtureFlowModel
from hf_pipelines import hub

MODEL = "digits-8x8"
assert __import__("pathlib").Path(hub.repo(MODEL)).is_relative_to(__import__("pathlib").Path.cwd())
model = GaussianMixtureFlowModel()

with gr.Blocks() as demo:
    gr.Markdown("toy")
"""


def write(folder: Path, name: str, content: str | bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def edit(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text(encoding="utf-8")
    assert old in text
    write(folder, name, text.replace(old, new))


@pytest.fixture
def digits(tmp_path) -> Path:
    """A sound repository."""
    folder = tmp_path / "digits-8x8"
    shutil.copytree(hub.repo("digits-8x8"), folder)
    write(folder, "README.md", CARD)
    write(folder, ".eval_results/digits.yaml", RESULTS)
    return folder


@pytest.fixture
def space(tmp_path) -> Path:
    """A sound Space."""
    folder = tmp_path / "toy_space"
    write(folder, "app.py", APP)
    write(folder, "README.md", SPACE_CARD)
    return folder


def test_no_problem_is_found_when_a_repository_is_sound(digits):
    assert hub.check(digits) == []


def test_no_problem_is_found_when_a_space_is_sound(space):
    assert hub.check(space) == []


def test_no_problem_is_found_when_a_dataset_is_sound():
    assert hub.check("digits", kind="dataset") == []


FAULTS = {
    "card": (lambda folder: (folder / "README.md").unlink(), "card", r"README\.md is missing"),
    "license": (lambda folder: edit(folder, "README.md", "license: apache-2.0\n", ""), "card", "lacks license"),
    "library": (
        lambda folder: edit(folder, "README.md", "library_name: diffusers\n", ""),
        "card",
        "lacks library_name",
    ),
    "tags": (lambda folder: edit(folder, "README.md", "tags:\n- flow-matching\n", ""), "card", "lacks tags"),
    "tag list": (
        lambda folder: edit(folder, "README.md", "tags:\n- flow-matching", "tags: flow"),
        "card",
        "`tags` must be a list, got 'flow'",
    ),
    "yaml": (lambda folder: edit(folder, "README.md", "tags:\n", "tags: [\n"), "card", "front matter is not valid"),
    "code block": (
        lambda folder: edit(folder, "README.md", "pass\n", "pass pass\n"),
        "code-block",
        r"README\.md, line 13: the code block does not parse",
    ),
    "link": (
        lambda folder: edit(folder, "README.md", "model/config.json", "model/none.json"),
        "link",
        r"links to model/none\.json",
    ),
    "link out": (
        lambda folder: edit(folder, "README.md", "model/config.json", "../../secret"),
        "link",
        r"links to \.\./\.\./secret",
    ),
    "large file": (
        lambda folder: write(folder, "figure.png", bytes(5_000_001)),
        "size",
        r"figure\.png takes 5,000,001 bytes; at most 5,000,000",
    ),
    "pickle": (lambda folder: write(folder, "model/weights.bin", b"x"), "format", r"weights\.bin: .*\.safetensors"),
    "array": (lambda folder: write(folder, "data.npy", b"x"), "format", r"data\.npy"),
    "results": (lambda folder: write(folder, ".eval_results/digits.yaml", "- value: 1\n"), "results", "KeyError"),
    "results yaml": (
        lambda folder: write(folder, ".eval_results/a.yaml", "- [\n"),
        "results",
        r"a\.yaml is not a list",
    ),
    "corrupt weights": (
        lambda folder: write(folder, "model/diffusion_pytorch_model.safetensors", b"\xff" * 100),
        "weights",
        r"model/diffusion_pytorch_model\.safetensors cannot be read: .*header",
    ),
    "cut weights": (
        lambda folder: write(
            folder,
            "model/diffusion_pytorch_model.safetensors",
            (folder / "model/diffusion_pytorch_model.safetensors").read_bytes()[:-1000],
        ),
        "weights",
        r"model/diffusion_pytorch_model\.safetensors cannot be read",
    ),
    "unknown module": (
        lambda folder: edit(folder, "model_index.json", "modeling_small_flow", "modeling_gone"),
        "config",
        r"component 'model': .*modeling_gone",
    ),
    "base class": (
        lambda folder: edit(
            folder, "model_index.json", "hf_models.small_flow.modeling_small_flow", "hf_models._rooms"
        ),
        "base-class",
        r"hf_models\._rooms must itself import the base class",
    ),
    "json": (lambda folder: write(folder, "model_index.json", "{"), "config", r"model_index\.json is not valid JSON"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_when_planted(digits, name):
    plant, rule, message = FAULTS[name]
    assert hub.check(digits, load=False) == []
    plant(digits)
    found = [problem for problem in hub.check(digits, load=False) if problem.rule == rule]
    assert len(found) == 1
    assert found[0].repo == "digits-8x8"
    assert re.search(message, found[0].message), found[0].message
    assert "\n" not in str(found[0])
    assert "Traceback" not in str(found[0])


def test_weights_are_refused_when_they_are_too_large(digits):
    import torch
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1_300_000)}, digits / "model/extra.safetensors")
    messages = [problem.message for problem in hub.check(digits, load=False)]
    assert len(messages) == 1
    assert messages[0].startswith("the weights take 7,02")


def test_all_weights_are_counted_when_repositories_lie_together(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_check, "MAX_ALL_WEIGHTS", 150)
    for name in ("a", "b"):
        write(tmp_path, f"{name}/model.safetensors", bytes(100))
    (problem,) = hub_check.total_size_problems(tmp_path)
    assert problem.message == "the weights of all repositories take 200 bytes; at most 150 are allowed."


def test_load_fails_when_code_is_missing_from_the_repository(digits, tmp_path):
    exported = hub.export(digits, tmp_path / "out")
    (exported / "modeling_small_flow.py").unlink()
    shutil.rmtree(exported / "model")
    (problem,) = hub_check.load_problems("digits-8x8", "model", exported)
    assert problem.rule == "load"
    assert "modeling_small_flow.py" in problem.message
    assert "\n" not in problem.message


def test_load_fails_when_a_transformers_repository_lacks_weights(exports, tmp_path):
    from safetensors.torch import save_file

    folder = tmp_path / "toy-text"
    shutil.copytree(exports / "toy-text", folder)
    save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
    (problem,) = hub_check.load_problems("toy-text", "model", folder)
    assert problem.message == "AutoModel: the weights lack scale.weight"


def test_load_fails_when_a_space_defines_no_demo(space):
    write(space, "app.py", "page = 1\n")
    (problem,) = hub.check(space)
    assert str(problem) == "toy_space: load: space: TypeError: app.py must define `demo`, a gradio.Blocks"


def test_space_fault_is_found_when_its_file_is_missing(space):
    edit(space, "README.md", "app.py", "main.py")
    assert [problem.message for problem in hub.check(space, load=False)] == [
        "README.md: `app_file` 'main.py' does not exist."
    ]


def test_export_problem_is_one_line_when_code_cannot_travel(space):
    write(space, "app.py", "from hf_models.nothing import X\n")
    write(space, "helper.py", "import hf_models.nothing\n")
    (problem,) = hub.check(space, load=False)
    assert problem.rule == "export"
    assert "hf_models.nothing" in problem.message


def test_name_is_refused_when_no_repository_has_it():
    with pytest.raises(ValueError, match="got 'no-such-repo'"):
        hub.check("no-such-repo")
