"""The real clients load our repositories over HTTP from a Hub on localhost."""

import pytest
from hub_processes import DIGEST, run_clean
from hub_server import HubServer

WARM = DIGEST + "from diffusers import DiffusionPipeline\nfrom transformers import AutoModel, pipeline\n"


def load(name: str) -> str:
    return f'DiffusionPipeline.from_pretrained("closedloop/{name}", trust_remote_code=True)'


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def answers(hub, exports, tmp_path_factory) -> dict:
    for name in ("digits-16x16", "toy-nested", "toy-text"):
        hub.add("model", f"closedloop/{name}", exports / name)
    hub.add("dataset", "closedloop/digits", exports / "digits")
    jobs = {
        "digits": f"result = sample_digits({load('digits-16x16')})",
        "nested": f"result = sample_nested({load('toy-nested')})",
        "auto": """
model = AutoModel.from_pretrained("closedloop/toy-text", trust_remote_code=True)
result = model(torch.tensor([[1.0, 2.0]])).score.tolist()""",
        "task": """
pipe = pipeline("toy-task", model="closedloop/toy-text", trust_remote_code=True)
result = pipe({"values": [1.0, 2.0]})""",
        "data": """
from datasets import get_dataset_config_names, load_dataset
data = load_dataset("closedloop/digits", get_dataset_config_names("closedloop/digits")[0])
result = [data["train"].num_rows, data["test"].num_rows, sorted(data["test"].features)]""",
        "untrusted": """
result = DiffusionPipeline.from_pretrained("closedloop/digits-16x16")""",
        "missing": """
from huggingface_hub import hf_hub_download
hf_hub_download("closedloop/no-such-repo", "config.json")""",
        "missing file": """
from huggingface_hub import hf_hub_download
hf_hub_download("closedloop/toy-text", "no-such-file.json")""",
        "part": """
import httpx, os
url = os.environ["HF_ENDPOINT"] + "/closedloop/toy-text/resolve/main/config.json"
whole, part = httpx.get(url), httpx.get(url, headers={"Range": "bytes=2-5"})
result = [part.status_code, whole.content[2:6] == part.content]""",
    }
    scratch = tmp_path_factory.mktemp("client")
    return run_clean(scratch, jobs, WARM, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_TELEMETRY="1")


def test_images_are_bit_equal_when_the_pipeline_comes_over_http(answers, reference):
    assert answers["digits"] == {"result": reference["digits"]}


def test_images_are_bit_equal_when_a_nested_pipeline_with_companion_modules_comes_over_http(answers, reference):
    assert answers["nested"] == {"result": reference["nested"]}


def test_auto_model_answers_when_it_comes_over_http(answers):
    assert answers["auto"] == {"result": [8.5]}


def test_task_answers_when_it_comes_over_http(answers):
    assert answers["task"] == {"result": {"score": 8.5}}


def test_dataset_opens_when_it_comes_over_http(answers):
    assert answers["data"] == {"result": [1597, 200, ["image", "label", "pixel_values"]]}


def test_code_is_refused_when_it_is_not_trusted(answers):
    assert answers["untrusted"]["error"] == "ValueError"
    assert "trust_remote_code=True" in answers["untrusted"]["message"]


def test_error_is_the_librarys_own_when_a_repository_is_missing(answers):
    assert answers["missing"]["error"] == "RepositoryNotFoundError"


def test_error_is_the_librarys_own_when_a_file_is_missing(answers):
    assert answers["missing file"]["error"] == "RemoteEntryNotFoundError"


def test_server_sends_a_part_when_a_range_is_asked(answers):
    assert answers["part"] == {"result": [206, True]}


def test_every_file_of_code_came_over_http_when_the_pipeline_loaded(answers, hub):
    fetched = {line.rpartition("/")[2] for line in hub.log if line.startswith("GET /closedloop/toy-nested/resolve")}
    assert {"pipeline_toy_flow.py", "modeling_toy_flow.py", "toy_filters.py", "toy_kernels.py"} <= fetched
