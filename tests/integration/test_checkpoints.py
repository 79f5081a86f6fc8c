"""The checkpoint to go on from after a kill."""

import json

import pytest

from hf_models._checkpoints import last_complete_checkpoint


@pytest.fixture
def run(tmp_path):
    """Checkpoints 2 and 10 are whole, 30 was cut while its state was written, 40 has none yet."""
    for step, text in ((2, json.dumps({"global_step": 2})), (10, "{}"), (30, '{"global'), (40, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if text is not None:
            (folder / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-2" / "more.bin").write_text("")
    (tmp_path / "checkpoint-best").mkdir()
    return tmp_path


def test_newest_whole_checkpoint_is_found_when_the_last_was_cut(run):
    assert last_complete_checkpoint(run) == str(run / "checkpoint-10")


def test_checkpoint_is_passed_over_when_a_file_written_later_is_missing(run):
    assert last_complete_checkpoint(run, "more.bin") == str(run / "checkpoint-2")
    assert last_complete_checkpoint(run, "never.bin") is None


def test_none_is_found_when_there_is_no_run(tmp_path):
    assert last_complete_checkpoint(tmp_path) is last_complete_checkpoint(tmp_path / "nowhere") is None
