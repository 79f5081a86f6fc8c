"""The benchmark: what the experiments compute, that recipes differ as claimed, and the command's result."""

import pytest
import torch

import hf_models.tetrajet_v2 as tj
from hf_pipelines.benchmark import find_benchmarks
from hf_pipelines.tetrajet_v2.benchmark_tetrajet_v2 import ABLATIONS, LANGUAGE, run, run_performance
from hf_pipelines.tetrajet_v2.experiments_tetrajet_v2 import (
    METHODS,
    Annealing,
    gradient_concentration,
    make_config,
    teacher_student_error,
)


def test_method_beats_the_other_recipes_when_the_run_is_quick():
    result = run(quick=True)
    assert "tetrajet_v2" in find_benchmarks()
    assert {c.baseline: c.wins for c in result.comparisons} == {"bf16": False, "nvfp4_rtn": True, "nvidia_nvfp4": True}
    assert result.seconds > 0 and set(result.figures) == {"concentration"}
    again = run(quick=True)
    assert [row.metrics for row in again.rows] == [row.metrics for row in result.rows]


def test_error_falls_like_one_over_n_only_when_the_gradient_is_unbiased():
    base, nearest = (gradient_concentration(METHODS[n], [1, 64]) for n in ("tetrajet_v2_base", "nvfp4_rtn"))
    for key in ("dx", "dw"):
        assert 64 * base[key][64] / base[key][1] == pytest.approx(1, abs=0.3)
        assert nearest[key][64] == pytest.approx(nearest[key][1], rel=1e-6)
    assert nearest["dx"][1] == pytest.approx(2.6e-2, rel=0.1)  # the specification's table
    assert nearest["dw"][1] == pytest.approx(2.4e-2, rel=0.1)


def test_error_is_that_of_the_plain_student_when_nothing_is_quantized():
    from datasets_scripts.tetrajet_corpora import teacher_student

    stream = teacher_student(0)
    a, b = (weight.clone().requires_grad_() for weight in stream.student)
    optimizer = torch.optim.AdamW([a, b], lr=2e-3, betas=(0.9, 0.95), weight_decay=0)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 2e-3 * (step + 1) / 20
        x, y = stream.batch(step)
        optimizer.zero_grad()
        (torch.nn.functional.silu(x @ a.t()) @ b.t() - y).square().mean().backward()
        optimizer.step()
    x, y = stream.clean()
    expected = (torch.nn.functional.silu(x @ a.t()) @ b.t() - y).square().mean() / y.square().mean()
    assert teacher_student_error(METHODS["bf16"], steps=3) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_schedule_of_the_experiment_is_kept_when_a_preset_switches_parts_on():
    record, osci = {"record_start": 20, "record_steps": 10}, {"start": 600, "period": 40, "window": 20}
    configs = {name: make_config(fields, 3, record, osci) for name, fields in METHODS.items()}
    on = {name: (c.out_control.enabled, c.osci_reset.enabled) for name, c in configs.items()}
    assert on["tetrajet_v2"] == (True, True) and on["base + OsciReset"] == (False, True)
    assert on["base + OutControl"] == (True, False) and on["tetrajet_v2_base"] == on["bf16"] == (False, False)
    assert all((c.osci_reset.start, c.out_control.record_start, c.seed) == (600, 20, 3) for c in configs.values())
    assert set(tj.RECIPES) <= set(METHODS) and set(LANGUAGE) <= set(METHODS)
    assert all(make_config(fields, 0, record, osci) for fields in ABLATIONS.values())


def test_recipes_anneal_the_same_model_on_the_same_batches_when_compared():
    annealing = Annealing(corpus="markov", pretrain_steps=4, steps=24, eval_windows=8)
    before = {name: p.clone() for name, p in annealing.base.named_parameters()}
    plain, again, full = (annealing.anneal(METHODS[name]) for name in ("bf16", "bf16", "tetrajet_v2"))
    assert plain == again and set(plain) == {"val loss"}
    assert set(full) == {"val loss", "oscillating", "distance ratio"} and 0 <= full["oscillating"] <= 1
    assert all(torch.equal(p, before[name]) for name, p in annealing.base.named_parameters())
    assert plain["val loss"] < annealing.loss(annealing.base)


@pytest.mark.slow
def test_all_claims_hold_when_the_full_run_is_done():
    result = run(seed=0)
    assert [bar.claim for bar in result.bars if not bar.passed] == []
    names = {"concentration", "teacher student", "tiny llama", "summary tetrajet_v2"}
    assert set(result.card_tables) == names


@pytest.mark.slow
def test_costs_are_measured_when_performance_is_asked():
    result = run_performance()
    assert len(result.bars) == 6 and set(result.card_tables) == {"performance", "costs"}
