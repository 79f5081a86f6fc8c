"""The exported flow-diversity repo samples the same set where our package cannot be imported."""

import torch
from hub_processes import run_clean

from hf_pipelines import FlowDiversityPipeline, hub

SAMPLE = """
pipe = DiffusionPipeline.from_pretrained({folder!r}, trust_remote_code=True)
pipe.set_progress_bar_config(disable=True)
settings = {{"class_labels": [3] * 8, "guidance_scale": 3.0, "output_type": "pt"}}
out = pipe(generator=torch.Generator().manual_seed(0), **settings)
result = [out.images.flatten().tolist(), out.log[-1]["log_volume"], pipe.config.gamma0]
"""


def test_export_samples_the_same_set_when_our_package_is_absent(tmp_path):
    folder = hub.export("flow-diversity-digits-8x8", tmp_path / "exported")
    (tmp_path / "empty").mkdir()
    prelude = "import torch\nfrom diffusers import DiffusionPipeline\n"
    answer = run_clean(tmp_path / "empty", {"sample": SAMPLE.format(folder=str(folder))}, prelude)["sample"]
    assert "result" in answer, answer["traceback"]
    pipe = FlowDiversityPipeline.from_pretrained(folder)  # installed classes, without running the repo's code
    pipe.set_progress_bar_config(disable=True)
    settings = {"class_labels": [3] * 8, "guidance_scale": 3.0, "output_type": "pt"}
    expected = pipe(generator=torch.Generator().manual_seed(0), **settings)
    values, volume, gamma0 = answer["result"]
    assert torch.equal(torch.tensor(values), expected.images.flatten())
    assert volume == expected.log[-1]["log_volume"] and gamma0 == 4.0
