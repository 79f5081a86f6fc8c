"""What ARM says to inputs that it cannot take, and what it does with unusual ones."""

import logging

import pytest
import torch
from arm_models import decode, feed, gap, tiny_arm, tiny_backbone, tokens
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    StaticCache,
    T5Config,
)

from hf_models.arm import ArmCache, ArmLlamaConfig, ArmMemory, convert_to_arm
from hf_models.arm.convert_arm import arm_config


@pytest.fixture(scope="module")
def model():
    """A Llama with memory."""
    return tiny_arm()


IDS = tokens(2, 20)
FIX = r"pass ArmCache\(model.config\) or leave cache unset"


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache, list])
def test_cache_is_refused_with_the_fix_when_it_is_no_arm_cache(model, kind):
    cache = StaticCache(model.config, max_cache_len=32) if kind is StaticCache else kind()
    with pytest.raises(ValueError, match=FIX):
        model(IDS, cache=cache)


def test_past_key_values_is_understood_when_the_old_name_is_used(model):
    cache = ArmCache(model.config)
    with torch.no_grad():
        model(IDS[:, :10], past_key_values=cache)
        assert cache.get_seq_length() == 10
        assert gap(model(IDS[:, 10:], past_key_values=cache).logits, model(IDS).logits[:, 10:]) < 1e-5
    with pytest.raises(ValueError, match=FIX):
        model(IDS, past_key_values=DynamicCache())


@pytest.mark.parametrize("name", ["static", "quantized", "offloaded", "dynamic"])
def test_cache_implementation_is_refused_with_the_fix_when_generating(model, name):
    with pytest.raises(ValueError, match=FIX):
        model.generate(IDS, max_new_tokens=2, cache_implementation=name)


@pytest.mark.parametrize(
    ("changes", "mine", "theirs"),
    [
        ({"window": 7}, "'window': 6", "'window': 7"),
        ({"slots_per_bucket": 4}, "'slots_per_bucket': 3", "'slots_per_bucket': 4"),
        ({"sinks": 1}, "'sinks': 2", "'sinks': 1"),
    ],
)
def test_cache_is_refused_with_both_settings_when_made_for_another_memory(model, changes, mine, theirs):
    with pytest.raises(ValueError, match=theirs) as error:
        model(IDS, cache=ArmCache(tiny_arm(**changes).config))
    assert mine in str(error.value)


def test_cache_is_refused_with_both_depths_when_made_for_another_depth(model):
    other = tiny_arm(base=tiny_backbone(num_hidden_layers=1))
    with pytest.raises(ValueError, match="'layers': 1") as error:
        model(IDS, cache=ArmCache(other.config))
    assert "'layers': 2" in str(error.value)


def test_batch_is_refused_with_both_sizes_when_the_cache_holds_another(model):
    cache = model(IDS).cache
    with pytest.raises(ValueError, match=r"batch of 2\b.*batch of 3\b"):
        model(tokens(3, 1), cache=cache)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 1, 20, 20, dtype=torch.bool), "4-D.*2-D"),
        ({"full_attention": torch.ones(2, 20)}, "dict.*2-D"),
        (torch.ones(2, 19), r"\(2, 19\).*\(2, 20\)"),
        (torch.ones(2, 21), r"\(2, 21\).*\(2, 20\)"),
        (torch.ones(1, 20), r"\(1, 20\).*\(2, 20\)"),
    ],
)
def test_mask_is_refused_when_not_2d_or_of_another_length(model, mask, words):
    with pytest.raises(ValueError, match=words):
        model(IDS, attention_mask=mask)


def test_mask_is_refused_when_it_leaves_out_the_tokens_seen(model):
    cache = model(IDS).cache
    with pytest.raises(ValueError, match=r"20 tokens seen and 1 new"):
        model(IDS[:, :1], attention_mask=torch.ones(2, 1), cache=cache)


@torch.no_grad()
def test_state_is_untouched_and_logits_finite_when_a_row_is_all_padding(model):
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0] = 0
    cache = ArmCache(model.config)
    assert model(IDS, attention_mask=mask, cache=cache).logits.isfinite().all()
    mask = torch.cat((mask, mask[:, :1]), 1)
    out = model(IDS[:, :1], attention_mask=mask, cache=cache)
    assert out.logits.isfinite().all()
    for layer in cache.layers:
        for name, tensor in layer.state._asdict().items():
            assert tensor is None or not tensor[0].any(), name
    assert gap(out.logits[1], decode(model, torch.cat((IDS, IDS[:, :1]), 1))[1, -1:]) < 1e-5


@torch.no_grad()
def test_attentions_are_finite_when_the_new_token_is_padding_in_an_empty_row(model):
    mask = torch.zeros(2, 4, dtype=torch.long)
    mask[1] = 1
    cache = ArmCache(model.config)
    model(IDS[:, :3], attention_mask=mask[:, :3], cache=cache)
    out = model(IDS[:, 3:4], attention_mask=mask, cache=cache, output_attentions=True)
    assert all(p.isfinite().all() for p in out.attentions)


@torch.no_grad()
def test_position_ids_turn_keys_only_when_given(model):
    positions = torch.arange(20).expand(2, -1)
    assert gap(model(IDS, position_ids=positions + 7).logits, model(IDS).logits) < 1e-4  # distances are the same
    stretched = model(IDS, position_ids=positions * 2)
    assert gap(stretched.logits, model(IDS).logits) > 1e-3
    state, other = model(IDS).cache.layers[0].state, stretched.cache.layers[0].state
    assert torch.equal(state.N, other.N)  # what is written, and in which order, is that of arrival
    assert torch.equal(state.ev, other.ev)


def test_packed_sequences_are_refused_when_positions_restart(model):
    positions = torch.cat((torch.arange(12), torch.arange(8))).expand(2, -1)
    with pytest.raises(ValueError, match="packed sequences"):
        model(IDS, position_ids=positions)


def test_attentions_are_refused_when_several_tokens_are_new(model):
    with pytest.raises(ValueError, match="output_attentions needs a single new token"):
        model(IDS, output_attentions=True)


@torch.no_grad()
def test_attention_implementation_stays_arm_with_a_warning_when_another_is_asked_for(tmp_path, caplog):
    model = tiny_arm()
    before = model(IDS).logits
    logger = logging.getLogger("transformers")
    propagate, logger.propagate = logger.propagate, True
    try:
        model.set_attn_implementation("sdpa")
        assert "'sdpa' is ignored" in caplog.text
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        assert "'eager' is ignored" in caplog.text
    finally:
        logger.propagate = propagate
    assert model.config._attn_implementation == loaded.config._attn_implementation == "arm"
    assert torch.equal(model(IDS).logits, before)
    assert torch.equal(loaded(IDS).logits, before)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Phi3Config(), "qkv_proj"),
        (Gemma2Config(), "caps its attention logits"),
        (T5Config(), "encoder-decoder"),
        (MistralConfig(), "sliding-window"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=0, num_hidden_layers=2), "sliding-window"),
    ],
)
def test_conversion_is_refused_with_the_reason_when_the_architecture_does_not_fit(config, reason):
    with pytest.raises(NotImplementedError, match=reason):
        arm_config(config)


def test_conversion_is_refused_when_an_argument_is_unknown_or_the_model_converted(model):
    with pytest.raises(TypeError, match=r"slots.*allowed are"):
        arm_config(LlamaConfig(), slots=4)
    with pytest.raises(NotImplementedError, match="already"):
        convert_to_arm(model)


@pytest.mark.parametrize(
    "fields",
    [
        {"arm_window": 0},
        {"arm_branching": 0},
        {"arm_levels": 0},
        {"arm_slots_per_bucket": 0},
        {"arm_epsilon": 1.0},
        {"arm_epsilon": -0.1},
        {"arm_tau": 0.0},
        {"arm_tau": -1.0},
        {"arm_sinks": -1},
        {"arm_read_policy": "some"},
        {"arm_read_buckets": 65},
        {"arm_layers": [99]},
        {"arm_mode": "magic"},
    ],
)
def test_configuration_is_refused_with_the_field_when_a_value_is_out_of_range(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        ArmLlamaConfig(**fields)


@torch.no_grad()
def test_nothing_happens_when_there_are_no_tokens(model):
    cache = ArmCache(model.config)
    assert model(IDS[:, :0], cache=cache).logits.shape == (2, 0, 50)
    model(IDS[:, :12], cache=cache)
    assert model(IDS[:, :0], cache=cache).logits.shape == (2, 0, 50)
    assert gap(feed(model, IDS[:, 12:], [8], cache), model(IDS).logits[:, 12:]) < 1e-5


@pytest.mark.parametrize("training", [True, False])
def test_memory_is_in_the_mode_of_the_model_when_converted(training):
    base = tiny_backbone().train(training)
    model = convert_to_arm(base)
    assert all(m.training is training for m in model.modules() if isinstance(m, ArmMemory))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@torch.no_grad()
def test_other_rows_are_untouched_when_one_row_is_not_finite(model, value):
    embeds = model.get_input_embeddings()(IDS)
    expected = model(inputs_embeds=embeds).logits
    embeds[0, 9] = value
    logits = model(inputs_embeds=embeds).logits
    assert torch.equal(logits[1], expected[1])
    assert not logits[0, 9].isfinite().all()
    cache = ArmCache(model.config)
    steps = torch.cat([model(inputs_embeds=embeds[:, t : t + 1], cache=cache).logits for t in range(20)], 1)
    assert gap(steps[1], expected[1]) < 1e-5


@torch.no_grad()
def test_padding_is_ignored_when_its_embedding_is_huge_before_the_text(model):
    embeds = model.get_input_embeddings()(IDS)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :4] = 0
    expected = model(inputs_embeds=embeds, attention_mask=mask).logits
    embeds[0, :4] = 1e4
    assert gap(model(inputs_embeds=embeds, attention_mask=mask).logits[0, 4:], expected[0, 4:]) < 1e-5


@torch.no_grad()
def test_slot_is_weighed_as_a_key_at_its_distance_when_the_rope_scales_attention():
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    model = tiny_arm(
        base=tiny_backbone(rope_parameters=yarn),
        branching=1,
        levels=1,
        slots_per_bucket=1,
        window=1,
        sinks=0,
        memory_distance=1,
        read_policy="all",
    )
    for memory in (m for m in model.modules() if isinstance(m, ArmMemory)):
        memory.gate.weight.zero_()
        memory.gate.bias.fill_(20)
    cache = model(IDS[:, :1]).cache
    for memory in (m for m in model.modules() if isinstance(m, ArmMemory)):
        memory.gate.bias.fill_(-20)
    got = model(IDS[:, 1:2], cache=cache, output_attentions=True).attentions[0]  # slot at distance 1, window at 0
    model.model.config._attn_implementation_internal = "eager"
    expected = model(IDS[:, :2], output_attentions=True, use_cache=False).attentions[0][:, :, 1:]
    assert model.model.rotary_emb.rotary.attention_scaling > 1.2
    assert gap(got, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_decoding_equals_one_call_when_weights_are_16_bit(dtype):
    model = tiny_arm(base=tiny_backbone().to(dtype), read_policy="all")
    logits = model(IDS).logits
    cache = ArmCache(model.config)
    assert gap(decode(model, IDS, cache), logits) <= 1e-2 * logits.abs().max().item()
    state = cache.layers[0].state
    assert (logits.dtype, state.N.dtype, state.c.dtype, state.wk.dtype) == (dtype, torch.float32, torch.float32, dtype)


@torch.no_grad()
def test_padding_is_moved_when_a_whole_prompt_is_compiled(model):
    torch._dynamo.reset()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    ids = IDS[:, :20]
    compiled = torch.compile(model.forward, backend="eager")(ids, attention_mask=mask, use_cache=False)
    assert gap(compiled.logits[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()]) < 1e-5


@torch.no_grad()
def test_positions_go_on_from_the_real_tokens_when_no_mask_follows_a_padded_prompt(model):
    ids = torch.cat((IDS, IDS[:, :5]), 1)
    seen = IDS.shape[1]
    mask = torch.ones(2, seen, dtype=torch.long)
    mask[0, :6] = 0
    cache = model(IDS, attention_mask=mask).cache
    grown = torch.cat((mask, torch.ones(2, 5, dtype=torch.long)), 1)
    expected = model(ids, attention_mask=grown).logits[:, seen:]
    assert gap(model(ids[:, seen:], cache=cache).logits, expected) < 1e-5
