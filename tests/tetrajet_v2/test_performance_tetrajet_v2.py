"""Costs: the ratios of the emulation (slow: they need a quiet machine) and what the measuring functions return."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_models.tetrajet_v2 as tj
from hf_models.tetrajet_v2.performance import measure_linear, measure_osci_reset, measure_packing


def test_figures_are_positive_when_measured_small():
    figures = measure_linear(64, 32, 32, repeats=2)
    assert (
        figures["ratio"] == pytest.approx(figures["seconds"] / figures["reference_seconds"]) and figures["ratio"] > 0
    )
    assert all(v > 1e5 for v in measure_packing(64, 64, repeats=1).values())


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "limit"), [((1024, 256, 256), 4.0), ((2048, 1024, 1024), 2.6)])
def test_layer_stays_near_its_target_when_compared_with_fp32(shape, limit):
    # the targets, 3.0 and 2.0, are bars of `bench --performance`; machines differ by a quarter
    ratios = []
    while len(ratios) < 4 and min(ratios, default=limit + 1) > limit:  # the machine may be busy
        ratios.append(measure_linear(*shape, recipe="tetrajet_v2_base", repeats=30 if shape[1] == 256 else 5)["ratio"])
    assert min(ratios) <= limit


@pytest.mark.slow
def test_packing_reaches_its_targets_when_one_thread_runs():
    figures = measure_packing()
    assert figures["pack_weights_per_second"] >= 50e6 and figures["unpack_weights_per_second"] >= 100e6


@pytest.mark.slow
def test_oscireset_costs_at_most_its_targets_when_a_small_model_trains():
    torch.manual_seed(0)
    model = tj.prepare_model(AutoModelForCausalLM.from_config(tj.olmo2_config("tiny")), "tetrajet_v2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 250, (16, 64))

    def step():
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    figures = measure_osci_reset(model, step)
    assert figures["window_share"] <= 0.15 and figures["outside_share"] <= 0.005
