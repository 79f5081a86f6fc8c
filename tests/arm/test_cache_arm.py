"""The cache of ARM models: bytes, files, rows, rollback."""

import logging

import pytest
import torch
from arm_models import decode, feed, gap, tiny_arm, tiny_backbone, tokens

from hf_models.arm import ArmCache, arm_config_for_budget, cache_bytes
from hf_pipelines.arm.performance_arm import peak_growth

IDS = tokens(3, 60)


@pytest.fixture(scope="module")
def model():
    return tiny_arm()


def filled(model, columns: int) -> ArmCache:
    cache = ArmCache(model.config)
    feed(model, IDS[:, :columns], [columns], cache)
    return cache


def states(cache: ArmCache) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in layer.state if x is not None]


def test_bytes_equal_the_formula_when_a_cache_is_filled(model):
    assert filled(model, 5).nbytes() == filled(model, 55).nbytes() == cache_bytes(model.config, torch.float32, 3)


@torch.no_grad()
def test_saved_cache_goes_on_bit_for_bit_when_loaded(model, tmp_path):
    cache = filled(model, 30)
    cache.save(tmp_path / "cache.safetensors")
    loaded = ArmCache.load(tmp_path / "cache.safetensors", model.config)
    assert loaded.get_seq_length() == 30
    copy = cache.copy()
    expected = model(IDS[:, 30:40], cache=cache).logits
    assert torch.equal(model(IDS[:, 30:40], cache=loaded).logits, expected)
    assert torch.equal(model(IDS[:, 30:40], cache=copy).logits, expected)


def test_other_settings_are_named_when_a_file_does_not_fit(model, tmp_path):
    filled(model, 5).save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match=r"'window': 6.*'window': 7"):
        ArmCache.load(tmp_path / "cache.safetensors", tiny_arm(window=7).config)
    with pytest.raises(ValueError, match="empty"):
        ArmCache(model.config).save(tmp_path / "empty.safetensors")


@torch.no_grad()
def test_rows_follow_when_a_batch_is_reordered(model):
    order = torch.tensor([2, 0, 1])
    cache, plain = filled(model, 30), filled(model, 30)
    cache.reorder_cache(order)
    assert all(torch.equal(a, b[order]) for a, b in zip(states(cache), states(plain), strict=True))
    out = model(IDS[order, 30:40], cache=cache).logits
    assert gap(out, model(IDS[:, 30:40], cache=plain).logits[order]) < 1e-6


@torch.no_grad()
def test_rows_are_chosen_and_repeated_when_asked(model):
    expected = model(IDS[:, 30:40], cache=filled(model, 30)).logits
    cache = filled(model, 30)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 2
    assert gap(model(IDS[[1, 1], 30:40], cache=cache).logits, expected[[1, 1]]) < 1e-6


@pytest.mark.parametrize("mode", ["trained", "training_free"])
@pytest.mark.parametrize("before", [0, 3, 25])
@torch.no_grad()
def test_rollback_leaves_no_trace_when_drafts_are_taken_back(mode, before):
    model = tiny_arm(mode=mode)
    cache = ArmCache(model.config)
    if before:
        model(IDS[:, :before], cache=cache)
    cache.activate_past_recording()
    model(IDS[:, before : before + 4], cache=cache)  # several drafts without a crop between
    model(tokens(3, 5, seed=9), cache=cache)
    model(tokens(3, 1, seed=8), cache=cache)
    cache.crop(-6)
    assert cache.get_seq_length() == before + 4
    plain = ArmCache(model.config)
    model(IDS[:, : before + 4], cache=plain)
    assert all(gap(a.float(), b.float()) < 1e-6 for a, b in zip(states(cache), states(plain), strict=True))
    rest = IDS[:, before + 4 : before + 20]
    assert gap(decode(model, rest, cache), decode(model, rest, plain)) < 1e-5


@torch.no_grad()
def test_crop_is_refused_when_it_goes_too_far_or_forward(model):
    cache = filled(model, 10)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    with pytest.raises(ValueError, match="further than the 0 tokens recorded"):
        cache.crop(-1)
    cache.activate_past_recording()
    model(IDS[:, 10:14], cache=cache)
    cache.crop(0)  # keeps the tokens, forgets the way back
    assert cache.get_seq_length() == 14
    with pytest.raises(ValueError, match="further than the 0 tokens recorded"):
        cache.crop(-1)


@torch.no_grad()
def test_last_tokens_can_be_taken_back_when_a_long_prompt_was_recorded(model):
    cache = ArmCache(model.config)
    cache.activate_past_recording()
    long = tokens(1, 1500)
    model(long, cache=cache, logits_to_keep=1)
    model(tokens(1, 3, seed=4), cache=cache)
    cache.crop(-3)
    plain = ArmCache(model.config)
    model(long, cache=plain, logits_to_keep=1)
    assert all(gap(a.float(), b.float()) < 1e-5 for a, b in zip(states(cache), states(plain), strict=True))
    assert sum(len(layer._log) for layer in cache.layers) == 0


@torch.no_grad()
def test_state_comes_back_when_it_was_offloaded(model):
    cache, plain = filled(model, 20), filled(model, 20)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert torch.equal(model(IDS[:, 20:30], cache=cache).logits, model(IDS[:, 20:30], cache=plain).logits)


def test_report_counts_writes_when_slots_are_used(model):
    cache = filled(model, 40)
    report = cache.slot_report()
    assert [row["layer"] for row in report] == [0, 1]
    for row, layer in zip(report, cache.layers, strict=True):
        assert row["writes"] == int(layer.state.ev.sum()) > 0
        assert row["occupied"] == pytest.approx(float((layer.state.c > 0).float().mean()))
        assert 0 <= row["bucket_entropy"] <= 1 and 0 < row["mass"] <= 1


@pytest.mark.parametrize("warned", [True, False])
def test_router_that_collapses_is_reported_when_it_sends_all_to_one_bucket(warned, model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    cache = filled(model, 40)
    for layer in cache.layers:
        layer.state.ev.fill_(1000)
        if warned:
            layer.state.ev[..., 1:] = 0
    with caplog.at_level("WARNING"):
        entropies = [row["bucket_entropy"] for row in cache.slot_report()]
    assert ("the router sends most tokens to few buckets" in caplog.text) == warned
    assert entropies == pytest.approx([0.0 if warned else 1.0] * 2, abs=1e-6)


@pytest.mark.slow
def test_peak_memory_stays_when_the_prompt_is_eight_times_longer():
    # MB; the allocator's fragments scatter from 5 to 17, whole-prompt activations would be over 50
    assert peak_growth(32_768) - peak_growth(4096) < 30


@pytest.mark.parametrize("layers", [[0], [1]])
@torch.no_grad()
def test_other_layers_attend_fully_when_only_some_have_a_memory(layers):
    model = tiny_arm(layers=layers)
    whole = model(IDS).logits
    assert gap(decode(model, IDS), whole) < 1e-5
    mask = torch.ones(3, 70, dtype=torch.long)
    ids = torch.cat((torch.zeros(3, 10, dtype=torch.long), IDS), 1)
    mask[:, :10] = 0
    cache = ArmCache(model.config)
    parts = [
        model(ids[:, a:b], attention_mask=mask[:, :b], cache=cache).logits for a, b in ((0, 33), (33, 34), (34, 70))
    ]
    assert gap(torch.cat(parts, 1)[:, 10:], whole) < 1e-5
    cache.crop(0)
    assert cache.nbytes() > filled(model, 20).nbytes()  # it grows: that is what the warning says


def test_budget_is_used_but_not_exceeded_when_given_in_megabytes():
    config = tiny_backbone().config
    for megabytes in (0.05, 0.2):
        chosen = arm_config_for_budget(config, megabytes, torch.float32, window=8)
        assert cache_bytes(chosen, torch.float32) <= megabytes * 1e6 < 2.2 * cache_bytes(chosen, torch.float32)
    with pytest.raises(ValueError, match="too small"):
        arm_config_for_budget(config, 0.001)
    with pytest.raises(ValueError, match="chosen by the budget"):
        arm_config_for_budget(config, 1, levels=2)
