"""ARM's exported repository answers the same where our package cannot be imported."""

import pytest
import torch
from hub_processes import run_clean
from transformers import AutoModelForCausalLM

from hf_pipelines import hub

SUBFOLDERS = ("", "slots-8", "full-attention")
IDS = list(range(150, 60, -3))
ANSWER = """
model = AutoModelForCausalLM.from_pretrained({folder!r}, subfolder={subfolder!r}, trust_remote_code=True).eval()
ids = torch.tensor([{ids}])
out = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True)
result = [model(ids).logits.flatten().tolist(), out.sequences.tolist(), type(out.cache).__name__]
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    """What each model of the exported repository answers in a process without our package."""
    scratch = tmp_path_factory.mktemp("arm")
    folder = hub.export("arm-recall", scratch / "exported")
    (scratch / "empty").mkdir()
    jobs = {name or "root": ANSWER.format(folder=str(folder), subfolder=name, ids=IDS) for name in SUBFOLDERS}
    return run_clean(scratch / "empty", jobs, "import torch\nfrom transformers import AutoModelForCausalLM\n")


@pytest.mark.parametrize("subfolder", SUBFOLDERS)
def test_export_answers_the_same_when_our_package_is_absent(subfolder, answers):
    answer = answers[subfolder or "root"]
    assert "result" in answer, answer["traceback"]
    logits, sequences, cache = answer["result"]
    model = AutoModelForCausalLM.from_pretrained(hub.repo("arm-recall"), subfolder=subfolder).eval()
    ids = torch.tensor([IDS])
    assert torch.equal(torch.tensor(logits), model(ids).logits.flatten())
    assert torch.equal(torch.tensor(sequences), model.generate(ids, max_new_tokens=4))
    assert cache == ("DynamicCache" if subfolder == "full-attention" else "ArmCache")
