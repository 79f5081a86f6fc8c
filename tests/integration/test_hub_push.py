"""`hub.push` uploads what `hub.check` finds sound, and says in one line why it could not."""

import json
import shutil

import pytest
from hub_processes import CARD, run_python

from hf_pipelines import hub

PUSH = """
import json, sys
from hf_pipelines import hub

folder, dry_run, token = sys.argv[1], sys.argv[2] == "dry", sys.argv[3]
if sys.argv[2] != "whole":
    hub.load_problems = lambda *_: []  # that stage takes seconds, and one test here is enough
try:
    answer = {"files": hub.push(folder, "closedloop/digits-8x8", dry_run=dry_run, token=token)}
except ValueError as error:
    answer = {"error": type(error).__name__, "message": str(error)}
print("ANSWER" + json.dumps(answer))
"""


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "digits-8x8"
    shutil.copytree(hub.repo("digits-8x8"), folder)
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture
def push(tmp_path, repository):
    """Run `hub.push` in a process of its own, for `HF_ENDPOINT` is read on import."""

    def run(endpoint: str, mode: str = "push", token: str = "hf_x") -> dict:
        cwd = tmp_path / "cwd"
        cwd.mkdir()
        printed = run_python(PUSH, repository, mode, token, cwd=cwd, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
        return json.loads(printed.partition("ANSWER")[2])

    return run


def test_files_are_listed_when_the_push_is_dry(push, hub_server, repository):
    files = dict(push(hub_server.url, "dry")["files"])
    assert hub_server.log == []
    assert hub_server.repos == {}
    assert set(files) == {
        *("README.md", "model_index.json", "training_metrics.json"),
        *("pipeline_small_flow.py", "modeling_small_flow.py"),
        *("model/config.json", "model/diffusion_pytorch_model.safetensors", "model/modeling_small_flow.py"),
        "scheduler/scheduler_config.json",
    }
    assert files["README.md"] == len(CARD.encode())
    weights = repository / "model/diffusion_pytorch_model.safetensors"
    assert files["model/diffusion_pytorch_model.safetensors"] == weights.stat().st_size


def test_repository_holds_the_export_when_pushed(push, hub_server, tmp_path):
    files = dict(push(hub_server.url, "whole")["files"])
    served = hub_server.repos["model", "closedloop/digits-8x8"]
    assert {path: len(content) for path, content in served.items()} == files
    assert served["README.md"] == CARD.encode()


def test_error_is_one_line_when_the_hub_cannot_be_reached(push):
    answer = push("http://127.0.0.1:1")
    assert answer["error"] == "HubError"
    assert answer["message"].startswith("uploading closedloop/digits-8x8 failed: ConnectError: ")
    assert "\n" not in answer["message"]


def test_error_is_one_line_when_the_token_is_refused(push, hub_server):
    answer = push(hub_server.url, token="refused")
    assert answer["message"].startswith("uploading closedloop/digits-8x8 failed: HfHubHTTPError: ")
    assert "401" in answer["message"]
    assert "\n" not in answer["message"]
    assert hub_server.repos == {}


def test_nothing_is_sent_when_a_problem_is_found(push, hub_server, repository):
    (repository / "README.md").unlink()
    answer = push(hub_server.url)
    assert answer["message"].splitlines() == [
        "digits-8x8 is not fit to publish:",
        "digits-8x8: card: README.md is missing.",
    ]
    assert hub_server.log == []


@pytest.mark.parametrize("repo_id", ["digits", "a/b/c", "../digits", "closedloop/"])
def test_repo_id_is_refused_when_it_is_not_namespace_and_name(repo_id):
    with pytest.raises(ValueError, match="`repo_id` must be 'namespace/name'"):
        hub.push("digits-8x8", repo_id, dry_run=True)
