"""Small random ARM models whose memory really works, and ways of feeding them."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_models.arm import ArmCache, ArmMemory, convert_to_arm

BACKBONES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
}
VOCAB = 50


def tiny_backbone(family: str = "llama", seed: int = 0, gain: float = 3.0, **fields) -> PreTrainedModel:
    """Hidden 32, two layers, four heads over two kv heads; weights enlarged so that attention is not flat."""
    torch.manual_seed(seed)
    model_class, config_class, extra = BACKBONES[family]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = model_class(config_class(**(sizes | extra | fields))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
    return model


@torch.no_grad()
def stir(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """Random gates, policies and slot keys, so that every part of the memory matters."""
    g = torch.Generator().manual_seed(seed)
    for memory in model.modules():
        if isinstance(memory, ArmMemory) and memory.config.arm_mode == "trained":
            for parameter, std in (
                (memory.gate.weight, 1.0),
                (memory.gate.bias, 1.0),
                (memory.policy.weight, 0.3),
                (memory.policy_bias, 1.0),
                (memory.policy_scale, 0.5),
                (memory.slot_keys, 1.0),
            ):
                parameter.copy_(std * torch.randn(parameter.shape, generator=g))
    return model


def tiny_arm(family: str = "llama", base: PreTrainedModel | None = None, **arm) -> PreTrainedModel:
    """A stirred ARM model with 12 slots, window 6, 2 sinks, segments of 16 and chunks of 4."""
    base = tiny_backbone(family) if base is None else base
    sizes = {"branching": 2, "levels": 2, "slots_per_bucket": 3, "window": 6, "sinks": 2, "segment": 16, "chunk": 4}
    return stir(convert_to_arm(base, **(sizes | arm)))


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids without the padding id 0."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model: PreTrainedModel, ids: torch.Tensor, sizes: list[int], cache: ArmCache | None = None) -> torch.Tensor:
    """Logits of `ids` fed in calls of the given numbers of tokens."""
    assert sum(sizes) == ids.shape[1]
    cache = ArmCache(model.config) if cache is None else cache
    pieces = ids.split(sizes, 1)
    return torch.cat([model(piece, cache=cache).logits for piece in pieces], 1)


def decode(model: PreTrainedModel, ids: torch.Tensor, cache: ArmCache | None = None) -> torch.Tensor:
    """Logits of `ids` fed token by token."""
    return feed(model, ids, [1] * ids.shape[1], cache)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite where only one is finite."""
    return (a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max().item()
