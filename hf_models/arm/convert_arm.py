"""From a backbone to an ARM model, and back to exact attention for a while."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .cache_arm import cache_signature
from .configuration_arm import ArmConfig, ArmLlamaConfig, ArmMistralConfig, ArmQwen2Config, ArmQwen3Config
from .memory_arm import ArmMemory
from .modeling_arm import MODELS

CONFIGS: dict[str, type[ArmConfig]] = {
    "llama": ArmLlamaConfig,
    "qwen2": ArmQwen2Config,
    "qwen3": ArmQwen3Config,
    "mistral": ArmMistralConfig,
}
REASONS = {
    "phi3": "its queries, keys and values come from one fused projection (qkv_proj)",
    "gemma2": "it caps its attention logits",
    "deepseek_v2": "its keys and values are compressed to latents (MLA)",
    "deepseek_v3": "its keys and values are compressed to latents (MLA)",
}
ARM_FIELDS = frozenset(name.removeprefix("arm_") for name in ArmConfig.__annotations__ if name.startswith("arm_"))


def arm_config(config: PreTrainedConfig, **arm_kwargs: Any) -> ArmConfig:
    """The ARM configuration of a backbone's configuration.

    Args:
        config (`PreTrainedConfig`): Configuration of a Llama, Qwen2, Qwen3 or Mistral model.
        **arm_kwargs: Fields of [`ArmConfig`] without the prefix `arm_`.

    Returns:
        [`ArmConfig`] of the same family.

    Raises:
        NotImplementedError: The family, or its sliding-window layers, are not supported; says why.
        TypeError: An argument that does not exist.
    """
    unknown = sorted(set(arm_kwargs) - ARM_FIELDS)
    if unknown:
        raise TypeError(f"unknown argument {', '.join(unknown)}; allowed are {', '.join(sorted(ARM_FIELDS))}.")
    if isinstance(config, ArmConfig):
        raise NotImplementedError("the model has a routed memory already; change its configuration and reload it.")
    family = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{family}: encoder-decoder models are not supported, only causal language models.")
    if family not in CONFIGS:
        reason = REASONS.get(
            family, "its attention layers are not known to follow the q_proj/k_proj/v_proj/o_proj layout"
        )
        raise NotImplementedError(f"{family} is not supported: {reason}. Supported are {', '.join(CONFIGS)}.")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if sliding or (family == "mistral" and config.sliding_window is not None):
        raise NotImplementedError(
            f"{family} with sliding-window layers (sliding_window={config.sliding_window}) is not supported: those "
            "layers were trained to see their window only. Set sliding_window to None if it is unused."
        )
    values = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}
    values |= {f"arm_{name}": value for name, value in arm_kwargs.items()}
    return CONFIGS[family](**values)


def convert_to_arm(model: PreTrainedModel, **arm_kwargs: Any) -> PreTrainedModel:
    """Give a causal language model a routed memory; its own weights are shared, not copied.

    Args:
        model (`PreTrainedModel`): A Llama, Qwen2, Qwen3 or Mistral model with a language-model head.
        **arm_kwargs: Fields of [`ArmConfig`] without the prefix `arm_`, for example `window=64, sinks=4` or
            `mode="training_free"`.

    Returns:
        The ARM model. Its memory is new and has to be trained (`hf_models.arm.train_arm`), except in the training-free
        mode.

    Raises:
        NotImplementedError: The architecture is not supported.
        TypeError: The model has no language-model head, or an argument does not exist.
    """
    config = arm_config(model.config, **arm_kwargs)
    if getattr(model, "lm_head", None) is None:
        raise TypeError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM.")
    weight = model.get_input_embeddings().weight
    with torch.device("meta"):
        converted = MODELS[type(config)][1](config)
    converted.load_state_dict(model.state_dict(), strict=False, assign=True)
    converted.model.rotary_emb.rotary = model.model.rotary_emb
    converted.tie_weights()
    for memory in converted.modules():
        if isinstance(memory, ArmMemory):
            memory.to_empty(device=weight.device)
            memory.float()
            memory.reset_parameters()
    for name, parameter in model.named_parameters():
        converted.get_parameter(name).requires_grad_(parameter.requires_grad)
    converted.generation_config = model.generation_config
    converted.config.dtype = model.config.dtype
    # a new module starts in training mode: its noise would leak into a model that is being evaluated
    return converted.train(model.training)


@contextmanager
def full_attention(model: nn.Module) -> Iterator[nn.Module]:
    """Exact attention over the same weights for the length of a block: the teacher of a distillation, or a check.

    Args:
        model (`nn.Module`): An ARM model, possibly wrapped (PEFT, DDP).

    Yields:
        The model; it is an ARM model again after the block, also after an error.
    """
    configs = {id(m.config): m.config for m in model.modules() if isinstance(getattr(m, "config", None), ArmConfig)}
    before = [config._attn_implementation for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation_internal = "sdpa"
        yield model
    finally:
        for config, name in zip(configs.values(), before, strict=True):
            config._attn_implementation_internal = name


def save_arm_adapter(model: nn.Module, folder: str | os.PathLike) -> Path:
    """Write only the memory's parameters, `arm_adapter.safetensors` and `arm_adapter_config.json`.

    Args:
        model (`nn.Module`): An ARM model.
        folder (`str` or `PathLike`): Where to.

    Returns:
        `Path`: the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if ".arm." in name}
    save_file(tensors, folder / "arm_adapter.safetensors")
    fields = {name: value for name, value in model.config.to_dict().items() if name.startswith("arm_")}
    (folder / "arm_adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return folder


def load_arm_adapter(model: PreTrainedModel, folder: str | os.PathLike) -> PreTrainedModel:
    """Put a saved memory onto a backbone, or into an ARM model with the same settings.

    Args:
        model (`PreTrainedModel`): The backbone the adapter was trained on, or an ARM model.
        folder (`str` or `PathLike`): Written by [`save_arm_adapter`].

    Returns:
        The ARM model.

    Raises:
        FileNotFoundError: The folder holds no adapter.
        ValueError: The adapter does not fit the model.
    """
    folder = Path(folder)
    config_file = folder / "arm_adapter_config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{folder} holds no ARM adapter (arm_adapter_config.json is missing).")
    fields = json.loads(config_file.read_text())
    if not isinstance(model.config, ArmConfig):
        model = convert_to_arm(model, **{name.removeprefix("arm_"): value for name, value in fields.items()})
    other = {name: value for name, value in fields.items() if getattr(model.config, name) != value}
    tensors = load_file(folder / "arm_adapter.safetensors")
    mine = {name: value.shape for name, value in model.state_dict().items() if ".arm." in name}
    if {name: value.shape for name, value in tensors.items()} != mine:
        raise ValueError(
            f"the adapter in {folder} does not fit this model: its settings differ in {other or 'the sizes'}."
        )
    model.load_state_dict(tensors, strict=False)
    return model


def cache_bytes(config: ArmConfig, dtype: torch.dtype = torch.bfloat16, batch_size: int = 1) -> int:
    """Bytes of an [`ArmCache`] in a model of type `dtype`, for all layers with memory."""
    signature = cache_signature(config)
    K, d, W, sinks = signature["kv_heads"], config.arm_head_dim, config.arm_window, config.arm_sinks
    M, G, state = config.arm_slots, config.arm_buckets, getattr(torch, config.arm_state_dtype).itemsize
    slots = K * M * (2 * d + 1) * state + K * G * 8
    near = K * (W + sinks) * 2 * d * dtype.itemsize + W + 8
    if config.arm_mode == "training_free":
        near += K * W * d * dtype.itemsize
    layers = config.num_hidden_layers if config.arm_layers is None else len(config.arm_layers)
    return batch_size * layers * (slots + near)


def arm_config_for_budget(
    config: PreTrainedConfig, megabytes: float, dtype: torch.dtype = torch.bfloat16, **arm_kwargs: Any
) -> ArmConfig:
    """The largest memory whose cache fits a budget.

    Args:
        config (`PreTrainedConfig`): A backbone's configuration.
        megabytes (`float`): Cache size for a batch of one, in units of 10⁶ bytes.
        dtype (`torch.dtype`, defaults to `torch.bfloat16`): Type of the model.
        **arm_kwargs: Other fields; `levels` and `slots_per_bucket` are chosen here.

    Returns:
        [`ArmConfig`] with most slots.

    Raises:
        ValueError: Not even one slot fits.
    """
    taken = {"levels", "slots_per_bucket"} & set(arm_kwargs)
    if taken:
        raise ValueError(f"{', '.join(sorted(taken))} is chosen by the budget; leave it out.")
    best = None
    smallest = math.inf
    for levels in range(1, 9):
        for slots in range(1, 17):
            candidate = arm_config(config, levels=levels, slots_per_bucket=slots, **arm_kwargs)
            size = cache_bytes(candidate, dtype) / 1e6
            smallest = min(smallest, size)
            if size <= megabytes and (best is None or _size(candidate) > _size(best)):
                best = candidate
            if size > megabytes:
                break
    if best is None:
        raise ValueError(
            f"megabytes={megabytes} is too small: window, sinks and the fewest slots need {smallest:.3f}."
        )
    return best


def _size(config: ArmConfig) -> tuple[int, int]:
    """More slots first, then four per bucket or as near to it as possible."""
    return config.arm_slots, -abs(config.arm_slots_per_bucket - 4)
