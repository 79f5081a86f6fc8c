"""Prompt lists: reading, sampling with and without control, resuming, bad input."""

import json

import pytest
from PIL import Image
from tiny_pipelines import tiny_flux_with_text

from hf_pipelines import FlowDiversityPipeline
from hf_pipelines.flow_diversity import load_concepts, sample_concepts

CONCEPTS = {"truck": ["a red house", "a house"]}
SETTINGS = {"images_per_prompt": 2, "num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 8}


@pytest.fixture(scope="module")
def pipe():
    base = tiny_flux_with_text()
    return FlowDiversityPipeline(base, gamma0=8.0)


@pytest.mark.filterwarnings("ignore:no feature encoder")
def test_sets_are_written_and_finished_ones_are_passed_over(pipe, tmp_path):
    folders = sample_concepts(pipe, CONCEPTS, tmp_path, seeds=(1111, 2222), **SETTINGS)
    assert [folder.relative_to(tmp_path).as_posix() for folder in folders] == [
        f"truck/{prompt}-{seed}" for prompt in ("000", "001") for seed in (1111, 2222)
    ]
    pictures = sorted(folders[0].glob("*.png"))
    assert len(pictures) == 2 and Image.open(pictures[0]).size == (16, 16)
    assert json.loads((folders[1] / "prompt.json").read_text())["seed"] == 2222
    (folders[1] / "prompt.json").unlink()  # as if killed while writing
    before = {folder: (folder / "000.png").stat().st_mtime_ns for folder in folders}
    sample_concepts(pipe, CONCEPTS, tmp_path, seeds=(1111, 2222), **SETTINGS)
    changed = [folder for folder in folders if (folder / "000.png").stat().st_mtime_ns != before[folder]]
    assert changed == [folders[1]]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold an object"),
        ('{"truck": "a truck"}', "'truck' must have a list"),
        ('{"truck": [""]}', "'truck' must have a list"),
        ('{"../truck": ["a truck"]}', "name of a folder"),
    ],
)
def test_bad_list_is_named(tmp_path, text, match):
    path = tmp_path / "concepts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        load_concepts(path)


def test_good_list_is_read(tmp_path):
    path = tmp_path / "concepts.json"
    path.write_text(json.dumps(CONCEPTS))
    assert load_concepts(path) == CONCEPTS
