"""OsciReset, OutControl and the monitors, without a Trainer."""

import logging
from itertools import pairwise

import pytest
import torch
from torch import nn

import hf_models.tetrajet_v2 as tj
from hf_models.tetrajet_v2.osci_reset import edge_closeness, lo_weight, trainable_layers

TARGETS = [0.25, 0.75, 1.25, 2.5, 0.5, 1, 3.5, -0.25]


def golden_layer(**osci):
    """One row of 128: w0 = 2688 and w16 = 6 pin both scales of block 1 to 1."""
    config = tj.TetraJetConfig("tetrajet_v2_base", osci_reset={"enabled": True, "start": 0, **osci})
    model = nn.Sequential(nn.Linear(128, 1, bias=False))
    row = torch.zeros(1, 128)
    row[0, 0], row[0, 16] = 2688.0, 6.0
    row[0, 17:25] = torch.tensor([0.26, 0.74, 1.26, 2.49, 0.1, 0.3, 3.49, -0.26])
    model[0].weight.data = row
    return tj.prepare_model(model, config)


def run_golden(engine, model, steps=400):
    """SGD lr 0.02 on Q(w) − target; code changes of elements 17…24."""
    w = model[0].weight.data
    target = torch.tensor(TARGETS)
    changes, previous = torch.zeros(8), tj.nvfp4_quantize(w).codes[0, 17:25]
    for i in range(steps):
        w[0, 17:25] -= 0.02 * (tj.nvfp4_fake_quant(w)[0, 17:25] - target)
        codes = tj.nvfp4_quantize(w).codes[0, 17:25]
        changes += codes != previous
        previous = codes
        if engine is not None:
            engine.step(i)
    return changes.tolist()


# ----------------------------------------------------------------------------------------------------------- OsciReset


def test_weights_flip_at_every_step_when_nothing_resets_them():
    assert run_golden(None, golden_layer()) == [399, 399, 399, 399, 1, 1, 400, 399]


def test_flips_halve_when_oscillating_weights_are_reset():
    model = golden_layer(period=50, window=10, threshold=8.0)
    engine = tj.OsciReset(model)
    got = run_golden(engine, model)
    for g, expected in zip(got, [199, 199, 199, 199, 1, 1, 200, 199], strict=True):
        assert abs(g - expected) <= 2


def test_first_reset_selects_the_oscillating_elements_when_the_window_ends(monkeypatch):
    model = golden_layer(period=50, window=10, threshold=8.0)
    engine = tj.OsciReset(model)
    chosen = {}
    original = tj.OsciReset._reset

    def spy(self, layer, name, mask, w):
        chosen["mask"], chosen["rho"] = mask.clone(), None
        return original(self, layer, name, mask, w)

    monkeypatch.setattr(tj.OsciReset, "_reset", spy)
    w, target = model[0].weight.data, torch.tensor(TARGETS)
    for i in range(12):
        w[0, 17:25] -= 0.02 * (tj.nvfp4_fake_quant(w)[0, 17:25] - target)
        if i == 10:
            engine.step(i)
            window = engine._windows["0"]
            rho = window.ratio()[0, 17:25]
            oscillating = [0, 1, 2, 3, 6, 7]
            assert torch.allclose(rho[oscillating], torch.full((6,), 100.0), rtol=1e-3)
            assert float(rho[[4, 5]].max()) < 8
        else:
            report = engine.step(i)
            assert (report is not None) == (i == 11)
    assert chosen["mask"].nonzero()[:, 1].tolist() == [17 + k for k in oscillating]
    assert report == {"0": 6} and engine.num_resets == 6 and not engine.is_tracking
    q = tj.nvfp4_fake_quant(w)
    assert torch.equal(w[0, [17 + k for k in oscillating]], q[0, [17 + k for k in oscillating]])


def test_no_other_weight_changes_its_code_when_a_weight_is_reset(generator):
    w = torch.randn(32, 256, generator=generator)
    q = tj.nvfp4_quantize(w)
    mask = torch.rand(32, 256, generator=generator) < 0.3
    after = tj.nvfp4_quantize(torch.where(mask, q.dequantize(), w))
    assert torch.equal(q.codes, after.codes) and torch.equal(q.inner.view(torch.uint8), after.inner.view(torch.uint8))


def jitter(model, step, size=0.02):
    g = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.data.add_(size * torch.randn(p.shape, generator=g))


@pytest.mark.parametrize("start", [0, 7, 10])
def test_window_opens_at_the_next_phase_zero_when_start_is_inside_a_period(start):
    model = tj.prepare_model(nn.Sequential(nn.Linear(32, 8)), "tetrajet_v2_base")
    engine = tj.OsciReset(model, tj.OsciResetConfig(start=start, period=10, window=3))
    tracking = []
    for i in range(25):
        jitter(model, i)
        engine.step(i)
        tracking.append(engine.is_tracking)
    first = -(-start // 10) * 10
    expected = [i >= first and i % 10 <= 3 for i in range(25)]
    assert tracking == expected


def test_start_is_a_share_of_all_steps_when_it_is_a_float():
    model = tj.prepare_model(nn.Sequential(nn.Linear(32, 8)), "tetrajet_v2_base")
    assert tj.OsciReset(model, tj.OsciResetConfig(start=0.64), total_steps=12505).start == 8003
    with pytest.raises(ValueError, match="total_steps is needed"):
        tj.OsciReset(model, tj.OsciResetConfig(start=0.64))
    with pytest.raises(ValueError, match="no quantized layers"):
        tj.OsciReset(nn.Linear(4, 4))


def test_distances_are_the_sums_of_the_definition_when_tracked():
    model = tj.prepare_model(nn.Sequential(nn.Linear(64, 8, bias=False)), "tetrajet_v2_base")
    engine = tj.OsciReset(model, tj.OsciResetConfig(start=0, period=20, window=5))
    path = []
    for i in range(5):
        jitter(model, i)
        path.append(model[0].weight.detach().clone())
        engine.step(i)
    window = engine._windows["0"]
    q = [tj.nvfp4_fake_quant(w) for w in path]
    assert torch.allclose(window.d_w, sum((b - a).abs() for a, b in pairwise(path)), atol=1e-6)
    assert torch.allclose(window.d_q, sum((b - a).abs() for a, b in pairwise(q)), atol=1e-6)


def test_unmoved_weights_are_never_reset_when_a_window_ends():
    model = tj.prepare_model(nn.Sequential(nn.Linear(64, 8, bias=False)), "tetrajet_v2_base")
    engine = tj.OsciReset(model, tj.OsciResetConfig(start=0, period=5, window=2))
    before = model[0].weight.detach().clone()
    assert [engine.step(i) for i in range(4)] == [None, None, None, {"0": 0}]
    assert torch.equal(model[0].weight, before)


def test_ten_percent_nearest_an_edge_are_tracked_when_memory_is_saved():
    config = tj.OsciResetConfig(start=0, period=20, window=5, detect="distance_ratio_mem_eff")
    model = tj.prepare_model(nn.Sequential(nn.Linear(256, 100, bias=False)), "tetrajet_v2_base")
    engine = tj.OsciReset(model, config)
    engine.step(0)
    window = engine._windows["0"]
    assert window.index.numel() == 2560 and window.w_prev.shape == (2560,)
    e = edge_closeness(model[0].weight.detach(), model[0].recipe).flatten()
    inside = torch.zeros(25600, dtype=torch.bool)
    inside[window.index.long()] = True
    assert float(e[inside].min()) >= float(e[~inside].max())
    size = sum(v.nbytes for v in engine.state_dict().values())
    assert size / 25600 <= 2.4


def test_memory_efficient_variant_resets_a_subset_when_compared_with_the_full_one():
    masks = {}
    for detect in ("distance_ratio", "distance_ratio_mem_eff"):
        torch.manual_seed(0)
        model = tj.prepare_model(nn.Sequential(nn.Linear(128, 64, bias=False)), "tetrajet_v2_base")
        engine = tj.OsciReset(model, tj.OsciResetConfig(start=0, period=20, window=10, detect=detect, threshold=4))
        base = model[0].weight.detach().clone()
        for i in range(12):
            model[0].weight.data.copy_(base + 0.002 * (-1) ** i)
            before = model[0].weight.detach().clone()
            engine.step(i)
        masks[detect] = model[0].weight.detach() != before
    full, sampled = masks.values()
    assert int(sampled.sum()) > 0 and bool((full | ~sampled).all())


def test_edge_closeness_is_the_definition_when_values_are_listed():
    values = [0.0, 0.25, 0.26, 0.5, 1.7499, 1.9, 2.2, 2.4999, 2.5001, 3.5, 3.9, 4.9, 5.1, 6.0]
    w = torch.zeros(1, 128)
    w[0, 0], w[0, 16] = 2688.0, 6.0
    w[0, 17 : 17 + len(values)] = torch.tensor(values)
    e = edge_closeness(w, tj.TetraJetConfig("tetrajet_v2_base"))[0, 17 : 17 + len(values)]
    expected = [0, 0.5, 0.48, 0, 0.4998, 0.2, 0.2, 0.4999, 0.4999, 0.5, 0.1, 0.45, 0.45, 0]
    assert torch.allclose(e, torch.tensor(expected), atol=2e-5)
    w[0, 17] = 6.3  # outward of ±6 the gap is 2
    assert abs(float(edge_closeness(w, tj.TetraJetConfig("tetrajet_v2_base"))[0, 17]) - 0.0) < 0.2


def test_weights_near_an_edge_are_reset_at_every_phase_zero_when_the_variant_is_bin_edge(generator):
    model = tj.prepare_model(nn.Sequential(nn.Linear(128, 64, bias=False)), "tetrajet_v2_base")
    engine = tj.OsciReset(model, tj.OsciResetConfig(start=4, period=4, window=2, detect="bin_edge"))
    w = model[0].weight.data
    e, q = edge_closeness(w, model[0].recipe), tj.nvfp4_fake_quant(w)
    expected = torch.where(e > 0.495, q, w)
    reports = [engine.step(i) for i in range(5)]
    assert reports[:4] == [None] * 4 and reports[4] == {"0": int((e > 0.495).sum())}
    assert reports[4]["0"] > 0 and torch.equal(w, expected) and not engine.is_tracking


def test_only_lo_columns_are_reset_when_outliers_are_selected(generator):
    config = tj.TetraJetConfig("tetrajet_v2", osci_reset={"detect": "bin_edge", "start": 0, "period": 4, "window": 2})
    model = tj.prepare_model(nn.Sequential(nn.Linear(64, 64, bias=False)), config)
    model[0].select(torch.randperm(64, generator=generator))
    before = model[0].weight.detach().clone()
    lo = model[0].lo_idx.long()
    w_lo = before[:, lo]
    expected = torch.where(edge_closeness(w_lo, config) > 0.495, tj.nvfp4_fake_quant(w_lo), w_lo)
    count = tj.OsciReset(model).step(0)["0"]
    after = model[0].weight.detach()
    assert count > 0 and torch.equal(after[:, lo], expected)
    assert torch.equal(after[:, model[0].hi_idx.long()], before[:, model[0].hi_idx.long()])


def test_quantizer_is_the_forward_one_when_blocks_are_two_dimensional(generator):
    config = tj.TetraJetConfig("nvidia_nvfp4", osci_reset={"enabled": True, "detect": "bin_edge", "start": 0})
    model = tj.prepare_model(nn.Sequential(nn.Linear(64, 64, bias=False)), config)
    tj.OsciReset(model).step(0)
    w = model[0].weight.detach()
    moved = w == tj.nvfp4_fake_quant(w, -1, tile_2d=True)
    assert int(moved.sum()) > 0


def test_parameter_is_reset_once_when_two_layers_share_it():
    model = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)])
    model[1].weight = model[0].weight
    tj.prepare_model(model, "tetrajet_v2_base")
    assert [name for name, _ in trainable_layers(model)] == ["0"]


def test_frozen_and_packed_layers_are_left_alone_when_tracking():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    tj.prepare_model(model, "tetrajet_v2_base")
    model[0].weight.requires_grad_(False)
    model[1].pack_()
    assert [name for name, _ in trainable_layers(model)] == ["2"]


def test_flattened_shards_are_refused_with_advice_when_fsdp1_cut_the_rows():
    model = tj.prepare_model(nn.Sequential(nn.Linear(32, 32)), "tetrajet_v2_base")
    model[0].weight = nn.Parameter(torch.zeros(700))
    with pytest.raises(RuntimeError, match=r"0\.weight has 1 dims: FSDP1 .* FSDP2"):
        lo_weight(model[0], "0")


@pytest.mark.parametrize("detect", ["distance_ratio", "distance_ratio_mem_eff"])
def test_result_is_identical_when_the_state_is_saved_inside_a_window(detect):
    def build():
        torch.manual_seed(0)
        model = tj.prepare_model(nn.Sequential(nn.Linear(64, 16, bias=False)), "tetrajet_v2_base")
        return model, tj.OsciReset(model, tj.OsciResetConfig(start=0, period=12, window=6, threshold=1, detect=detect))

    model, engine = build()
    other, _ = build()
    for i in range(20):
        jitter(model, i)
        if i == 4:
            saved = {k: v.clone() for k, v in engine.state_dict().items()}
            weights = {k: v.clone() for k, v in model.state_dict().items()}
        engine.step(i)
    other.load_state_dict(weights)
    resumed = tj.OsciReset(other, engine.config)
    resumed.load_state_dict(saved)
    for i in range(4, 20):
        if i > 4:
            jitter(other, i)
        resumed.step(i)
    assert engine.num_resets > 0 and resumed.num_resets == engine.num_resets
    assert torch.equal(model[0].weight, other[0].weight)


def test_window_is_dropped_when_outliers_are_selected_inside_it(caplog):
    model = tj.prepare_model(nn.Sequential(nn.Linear(64, 16)), "tetrajet_v2")
    engine = tj.OsciReset(model, tj.OsciResetConfig(start=0, period=12, window=6))
    engine.step(0)
    model[0].select(torch.arange(64))
    with caplog.at_level(logging.INFO, logger="hf_models"):
        engine.step(1)
    assert not engine.is_tracking and "selected inside a window" in caplog.text


# ---------------------------------------------------------------------------------------------------------- OutControl


def recorder_model(**out_control):
    config = tj.TetraJetConfig("tetrajet_v2", out_control={"record_start": 3, "record_steps": 2, **out_control})
    return tj.prepare_model(nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16)), config)


def test_largest_channels_are_selected_in_falling_order_when_recording_ends(generator):
    model = recorder_model()
    engine = tj.OutControl(model)
    acc = torch.zeros(64)
    selected = []
    for step in range(6):
        engine.begin(step)
        for _ in range(2):  # micro-batches
            x = torch.randn(8, 64, generator=generator) * torch.linspace(1, 3, 64)
            model.train()(x)
            if 3 <= step < 5:
                acc += x.norm(dim=0)
            with torch.no_grad():
                model.eval()(100 * torch.randn(8, 64, generator=generator))  # evaluation is not recorded
        selected.append(engine.step(step))
    assert selected == [False] * 4 + [True, False] and engine.is_done
    order = acc.sort(descending=True).indices
    assert model[0].hi_idx.tolist() == order[:16].tolist() and model[0].lo_idx.tolist() == order[16:].tolist()
    assert model[0].recorder is None and bool(model[0].selected)


def test_narrow_layer_stays_pure_fp4_when_outliers_are_enabled(caplog):
    model = recorder_model()
    with caplog.at_level(logging.INFO, logger="hf_models"):
        tj.OutControl(model)
    assert "pure FP4: 2" in caplog.text and "hi_idx" not in model[2]._buffers and model[2].outliers is None


def test_forward_is_plain_fp4_when_channels_are_not_selected_yet(generator):
    model = recorder_model()
    x = torch.randn(8, 64, generator=generator)
    assert torch.equal(model[0](x), tj.fqt_linear(x, model[0].weight, model[0].bias, "tetrajet_v2_base"))


def test_recording_starts_at_once_with_a_warning_when_its_steps_are_over(caplog, generator):
    model = recorder_model()
    engine = tj.OutControl(model)
    with caplog.at_level(logging.WARNING, logger="hf_models"):
        engine.begin(40)
    assert "step 40 is past record_start=3" in caplog.text
    model.train()(torch.randn(4, 64, generator=generator))
    assert [engine.step(40), engine.step(41)] == [False, True]


def test_empty_batch_leaves_the_statistics_alone_when_recording():
    model = recorder_model()
    engine = tj.OutControl(model)
    engine.begin(3)
    model.train()(torch.empty(0, 64))
    assert engine.state_dict().keys() == {"first_step"}


def test_input_counts_once_when_the_layer_is_checkpointed(generator):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(8, 64, generator=generator)
    sums = []
    for mode in (None, True, False):
        model = recorder_model().train()
        engine = tj.OutControl(model)
        engine.begin(3)
        leaf = x.clone().requires_grad_()
        (model(leaf) if mode is None else checkpoint(model, leaf, use_reentrant=mode)).sum().backward()
        sums.append(engine.state_dict()["0/norms"])
    assert torch.equal(sums[0], x.norm(dim=0)) and torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


def test_selection_is_identical_when_the_recording_is_interrupted(generator):
    xs = [torch.randn(8, 64, generator=generator) for _ in range(4)]
    whole, first, second = recorder_model(), recorder_model(), recorder_model()
    engine = tj.OutControl(whole)
    for step in range(3, 5):
        engine.begin(step)
        whole.train()(xs[step - 3])
        engine.step(step)
    a = tj.OutControl(first)
    a.begin(3)
    first.train()(xs[0])
    a.step(3)
    b = tj.OutControl(second)
    b.load_state_dict(a.state_dict())
    b.begin(4)
    second.train()(xs[1])
    assert b.step(4)
    assert torch.equal(whole[0].hi_idx, second[0].hi_idx) and torch.equal(whole[0].lo_idx, second[0].lo_idx)


# ------------------------------------------------------------------------------------------------------------ monitors


def test_share_and_ratio_are_those_of_the_golden_row_when_reported():
    model = golden_layer()
    window = tj.OscillationWindow(model)
    w, target = model[0].weight.data, torch.tensor(TARGETS)
    for _ in range(20):
        w[0, 17:25] -= 0.02 * (tj.nvfp4_fake_quant(w)[0, 17:25] - target)
        window.update()
    report = tj.oscillation_report(model, window)
    assert report["steps"] == 20 and report["share"] == 6 / 128
    assert report["layers"]["0"]["share"] == 6 / 128 and report["distance_ratio"] > 20
    with pytest.raises(ValueError, match="of this model"):
        tj.oscillation_report(golden_layer(), window)


def test_report_counts_layers_codes_and_leftovers_when_a_model_is_converted():
    model = nn.ModuleDict({"a": nn.Linear(64, 32), "b": nn.Linear(64, 32), "e": nn.Embedding(10, 64)})
    tj.prepare_model(model, tj.TetraJetConfig("tetrajet_v2", modules_to_not_convert=["b"]))
    model["a"].select(torch.arange(64))
    report = tj.quantization_report(model)
    assert report.layers == {"a": {"shape": (32, 64), "mode": "master", "nvfp4_channels": 48, "mxfp8_channels": 16}}
    assert report.fp4_parameters == 32 * 48 and report.mxfp8_parameters == 32 * 16
    assert report.unquantized == {"b.weight": 2048, "e.weight": 640}
    assert report.total_parameters == sum(p.numel() for p in model.parameters())
    codes = tj.nvfp4_quantize(model["a"].weight[:, 16:]).codes
    assert report.code_histogram == torch.bincount(codes.flatten().long(), minlength=16).tolist()
    text = str(report)
    assert "1 quantized layers" in text and "not quantized: b.weight (2,048), e.weight (640)" in text
    before = report.code_histogram
    model["a"].pack_()
    assert tj.quantization_report(model).code_histogram == before


def test_layer_is_untouched_when_its_gradient_bias_is_measured(generator):
    layer = tj.TetraJetLinear(64, 32, recipe="tetrajet_v2_base")
    x, dy = torch.randn(16, 64, generator=generator), torch.randn(16, 32, generator=generator)
    state = layer.state
    e = tj.gradient_bias(layer, x, dy, 4)
    assert set(e) == {"dx", "dw"} and set(e["dx"]) == {1, 4} and e["dx"][4] < e["dx"][1]
    assert layer.state is state and layer.weight.grad is None and not x.requires_grad
