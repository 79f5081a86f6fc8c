"""README and model cards: their Python blocks run, and their numbers are those that a command wrote."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "model_cards").glob("*/README.md"))]


def python_blocks():
    for path in DOCUMENTS:
        for index, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)):
            yield pytest.param(code, id=f"{path.parent.name}-{index}")


@pytest.mark.parametrize("code", list(python_blocks()))
def test_python_block_runs_as_printed(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<block>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("size", ["8x8", "16x16"])
def test_card_quotes_the_losses_that_training_wrote(size):
    folder = ROOT / "model_cards" / f"digits-{size}"
    card = (folder / "README.md").read_text(encoding="utf-8")
    for value in json.loads((folder / "training_metrics.json").read_text()).values():
        assert f"| {value:.3f} |" in card


def test_card_of_mpc_flow_shows_the_table_of_its_results():
    from hf_pipelines.mpc_flow.benchmark_mpc_flow import METHODS, TASKS

    folder = ROOT / "model_cards" / "mpc-flow-digits-16x16"
    card = (folder / "README.md").read_text(encoding="utf-8")
    result = json.loads((folder / ".eval_results" / "mpc_flow.json").read_text())
    rows = {row["name"]: row["metrics"] for row in result["rows"]}
    for method in METHODS:
        line = next(line for line in card.splitlines() if line.startswith(f"| {method} |"))
        cells = [cell.strip().strip("*") for cell in line.split("|")[2:]]
        for task, cell in zip(TASKS, cells, strict=False):
            metrics = rows.get(f"{task.name} / {method}")
            expected = "–" if metrics is None else f"{metrics['psnr']:.1f}/{metrics['ssim']:.2f}"
            assert cell.replace("*", "") == expected
    assert all(bar["passed"] for bar in result["bars"])


def test_readme_shows_the_two_commands_of_set_up_and_ci_runs_the_second():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 'pip install -e ".[all]" && closedloop demo\n' in readme
    assert 'pip install -e ".[test]" && pytest\n' in readme
    assert "the README's test command" in (ROOT / ".ci" / "run").read_text()
