"""The exported MPC-Flow repo restores an image, from an empty directory, where our package cannot be imported."""

import torch
from hub_processes import run_clean

from hf_pipelines import MPCFlowPipeline, hub
from hf_pipelines.flow_control.metrics import psnr

RESTORE = """
pipe = DiffusionPipeline.from_pretrained({folder!r}, trust_remote_code=True)
pipe.set_progress_bar_config(disable=True)
y = torch.load({y!r}, weights_only=True)
out = pipe(y, mode={mode!r}, num_inference_steps=12, generator=torch.Generator().manual_seed(0), output_type="pt")
result = [out.images.flatten().tolist(), out.nfe, out.nbp]
"""


def test_export_restores_bit_equal_images_when_our_package_is_absent(tmp_path, digits):
    folder = hub.export("mpc-flow-digits-16x16", tmp_path / "exported")
    pipe = MPCFlowPipeline.from_pretrained(hub.repo("mpc-flow-digits-16x16"))
    pipe.set_progress_bar_config(disable=True)
    y = pipe.operator.measure(digits[:2], noise_std=0.05, generator=torch.Generator().manual_seed(1))
    torch.save(y, tmp_path / "y.pt")
    jobs = {mode: RESTORE.format(folder=str(folder), y=str(tmp_path / "y.pt"), mode=mode) for mode in ("rhc", "dt")}
    (tmp_path / "empty").mkdir()
    answers = run_clean(tmp_path / "empty", jobs, "import torch\nfrom diffusers import DiffusionPipeline\n")
    for mode in jobs:
        assert "result" in answers[mode], answers[mode]["traceback"]
        values, nfe, nbp = answers[mode]["result"]
        settings = {"mode": mode, "num_inference_steps": 12, "output_type": "pt"}
        expected = pipe(y, generator=torch.Generator().manual_seed(0), **settings)
        assert torch.equal(torch.tensor(values), expected.images.flatten())
        assert (nfe, nbp) == (expected.nfe, expected.nbp)
        restored, degraded = expected.images * 2 - 1, pipe.operator.pinv(y)
        if mode == "dt":
            assert float(psnr(restored, digits[:2]).mean()) > float(psnr(degraded, digits[:2]).mean()) + 3


def test_installed_classes_load_the_export_without_running_its_code(tmp_path):
    folder = hub.export("mpc-flow-digits-16x16", tmp_path / "exported")
    pipe = MPCFlowPipeline.from_pretrained(folder)
    assert type(pipe.base).__module__ == "hf_pipelines.flow_control.pipeline_small_flow"
    assert type(pipe.operator).__module__ == "hf_pipelines.mpc_flow.operators"
