"""Fixtures of all tests: no Hub, one thread, quiet progress bars, shared small models."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # tiny_pipelines

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits_pipe():
    """The shipped 16×16 flow."""
    from hf_pipelines import SmallFlowPipeline, hub

    pipe = SmallFlowPipeline.from_pretrained(hub.repo("digits-16x16"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def digits():
    """Test images (200, 1, 16, 16) in [−1, 1]."""
    from datasets_scripts import load_digit_tensors

    return load_digit_tensors(16, "test")[0]


@pytest.fixture
def generator():
    """A generator with seed 0."""
    return torch.Generator().manual_seed(0)
