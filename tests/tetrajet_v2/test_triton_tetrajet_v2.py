"""The Triton quantizer against the emulated one, on a GPU or through Triton's interpreter."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_models.tetrajet_v2 import nvfp4_fake_quant

ROOT = Path(__file__).parents[2]


def check(device: str, size: tuple[int, int] = (70, 300)) -> None:
    """RTN bit for bit, stochastic rounding by its two neighbours and its mean; also run by the interpreter below."""
    from hf_models.tetrajet_v2.triton_quantize import triton_fake_quant

    g = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=g) * torch.exp(3 * torch.randn(size[0], 1, generator=g))
    x[3], x[5, 7], x[9, 20], x[11] = 0, torch.nan, torch.inf, x[11] * 1e-38
    for outer, scale_rounding, dim in itertools.product((-1, 128), ("nearest", "up"), (-1, 0)):
        clean = x.nan_to_num(posinf=1) if outer == -1 else x
        expected = nvfp4_fake_quant(clean, outer, "nearest", scale_rounding, dim=dim)
        got = triton_fake_quant(clean.to(device), outer, "nearest", scale_rounding, dim=dim).cpu()
        assert torch.equal(got.nan_to_num(7e7), expected.nan_to_num(7e7)), (outer, scale_rounding, dim)
    y = torch.randn(16, 128, generator=g)
    draws = [
        triton_fake_quant(y.to(device), rounding="stochastic", scale_rounding="up", generator=g).cpu()
        for _ in range(64)
    ]
    assert not torch.equal(draws[0], draws[1])
    assert max(len(set(values)) for values in torch.stack(draws).flatten(1).t().tolist()) <= 2
    mean = torch.stack(draws).mean(0)
    assert float((mean - y).square().sum() / y.square().sum()) < 2 * 0.0212 / 64
    print("EQUAL")


@pytest.mark.gpu
def test_kernel_equals_the_emulation_when_a_gpu_is_there():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("triton")
    check("cuda", (1024, 4096))


def test_kernel_equals_the_emulation_when_tritons_interpreter_runs_it():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the GPU test covers it")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import test_triton_tetrajet_v2 as t; t.check('cpu')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert "EQUAL" in done.stdout, done.stderr[-4000:]
