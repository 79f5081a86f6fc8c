"""ARM models: folders, adapters, training mode, types, training-free mode."""

import pytest
import torch
from arm_models import decode, feed, gap, stir, tiny_arm, tiny_backbone, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM

from hf_models import ArmForCausalLM
from hf_models.arm import ArmCache, ArmMemory, convert_to_arm, load_arm_adapter, save_arm_adapter

IDS = tokens(2, 40)


def memories(model) -> list[ArmMemory]:
    return [module for module in model.modules() if isinstance(module, ArmMemory)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_are_bit_equal_when_a_folder_is_loaded(family, tmp_path):
    model = tiny_arm(family)
    model.save_pretrained(tmp_path)
    expected = model(IDS).logits
    for loader in (AutoModelForCausalLM, ArmForCausalLM, type(model)):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is type(model) and loaded.config.to_dict()["arm_window"] == 6
        assert torch.equal(loaded(IDS).logits, expected)
    hidden = AutoModel.from_pretrained(tmp_path)(IDS).last_hidden_state
    assert torch.equal(model.lm_head(hidden), expected)


def test_backbone_loads_with_a_new_memory_when_opened_as_arm(tmp_path):
    tiny_backbone().save_pretrained(tmp_path)
    config = convert_to_arm(tiny_backbone(), gate_bias=-20, window=64).config
    model = type(tiny_arm()).from_pretrained(tmp_path, config=config)
    assert gap(model(IDS).logits, tiny_backbone()(IDS).logits) < 1e-5  # the gate's bias is kept: closed


def test_memory_alone_travels_when_an_adapter_is_saved(tmp_path):
    model = tiny_arm()
    save_arm_adapter(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arm_adapter.safetensors", "arm_adapter_config.json"]
    assert torch.equal(load_arm_adapter(tiny_backbone(), tmp_path)(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="does not fit"):
        load_arm_adapter(tiny_arm(levels=1), tmp_path)
    with pytest.raises(FileNotFoundError, match="no ARM adapter"):
        load_arm_adapter(tiny_backbone(), tmp_path / "nothing")


def test_lora_is_saved_reloaded_and_merged_when_the_memory_trains_too(tmp_path):
    model = tiny_arm()
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=projections, modules_to_save=["arm"]))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in lora.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    lora.eval()
    expected = lora(IDS).logits
    assert gap(expected, tiny_arm()(IDS).logits) > 1e-3
    lora.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_arm(), tmp_path).eval()
    assert torch.equal(again(IDS).logits, expected)
    merged = lora.merge_and_unload()
    assert gap(merged(IDS).logits, expected) < 1e-5
    assert gap(decode(merged, IDS), expected) < 1e-5


def test_loss_and_gradients_are_equal_when_activations_are_recomputed():
    results = []
    for checkpoint in (False, True):
        model = tiny_arm().train()
        if checkpoint:
            model.activation_checkpointing_enable()
        torch.manual_seed(3)
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_every_parameter_of_the_memory_learns_when_trained():
    model = tiny_arm().train()
    torch.manual_seed(0)
    model(IDS, labels=IDS).loss.backward()
    for memory in memories(model):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in memory.parameters())


def test_noise_is_drawn_when_training_only():
    model = tiny_arm(epsilon=0.3)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


def test_loss_holds_balance_and_read_cost_when_training_only():
    model = tiny_arm(balance_coef=0.5, read_coef=0.25).eval()
    out = model(IDS, labels=IDS)
    plain = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert out.loss.item() == pytest.approx(plain.item(), abs=1e-5)
    model.train()
    model.read_cost_scale = 0.5
    torch.manual_seed(1)
    out = model(IDS, labels=IDS)
    plain = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    expected = plain + 0.5 * out.balance_loss + 0.25 * 0.5 * out.read_cost
    assert out.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert 0 <= out.read_cost.item() <= 1 and out.read_buckets.shape == IDS.shape


def test_no_cache_is_made_when_training():
    model = tiny_arm().train()
    assert model(IDS).cache is None
    assert isinstance(model.eval()(IDS).cache, ArmCache)


@torch.no_grad()
def test_attentions_cover_slots_sinks_and_window_when_one_token_is_fed():
    model = tiny_arm()
    cache = ArmCache(model.config)
    model(IDS[:, :30], cache=cache)
    out = model(IDS[:, 30:31], cache=cache, output_attentions=True)
    assert len(out.attentions) == 2 and out.attentions[0].shape == (2, 4, 1, 12 + 2 + 6)
    assert gap(out.attentions[0].sum(-1), torch.ones(2, 4, 1)) < 1e-6
    assert (out.attentions[0][..., -6:] > 0).all()


@torch.no_grad()
def test_memory_stays_in_float32_when_the_weights_are_bfloat16(tmp_path):
    tiny_arm().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and memories(model)[0].router.dtype == torch.float32
    cache = ArmCache(model.config)
    assert gap(decode(model, IDS, cache), model(IDS).logits) <= 1e-2 * model(IDS).logits.abs().max().item()
    assert cache.layers[0].state.N.dtype == torch.float32 and cache.layers[0].state.wk.dtype == torch.bfloat16


# ---- training-free ----


@torch.no_grad()
def test_training_free_mode_is_the_same_when_fed_in_any_pieces():
    model = tiny_arm(mode="training_free")
    assert not [p for memory in memories(model) for p in memory.parameters()]
    whole = model(IDS).logits
    assert gap(decode(model, IDS), whole) < 1e-5 and gap(feed(model, IDS, [13, 1, 20, 6]), whole) < 1e-5


@torch.no_grad()
def test_tokens_are_stored_once_when_they_leave_the_window():
    model = tiny_arm(mode="training_free")  # window 6, 2 sinks
    cache = ArmCache(model.config)
    for length, stored in ((6, 0), (2, 0), (1, 1), (20, 21)):
        feed(model, tokens(2, length, seed=length), [length], cache)
        counts = cache.layers[0].state.c
        assert counts.sum(-1).tolist() == [[float(stored)] * 2] * 2  # merged or not, every token counts once
        assert torch.equal(counts, counts.round())


@torch.no_grad()
def test_equal_keys_share_a_slot_when_nothing_was_trained():
    model = tiny_arm(mode="training_free", layers=[0])
    cache = ArmCache(model.config)
    feed(model, torch.full((1, 40), 7), [40], cache)
    counts = cache.layers[0].state.c[0]  # the first layer's keys before rotation depend on the token alone
    assert (counts > 0).sum(-1).tolist() == [1, 1] and counts.amax(-1).tolist() == [32.0, 32.0]


def test_directions_are_restored_when_a_training_free_folder_is_loaded(tmp_path):
    model = tiny_arm(mode="training_free", seed=7)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert not torch.equal(memories(model)[0].directions, memories(tiny_arm(mode="training_free"))[0].directions)


def test_stirred_models_are_equal_when_the_seed_is():
    assert torch.equal(stir(tiny_arm())(IDS).logits, tiny_arm()(IDS).logits)
