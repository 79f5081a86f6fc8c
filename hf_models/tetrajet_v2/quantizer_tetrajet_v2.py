"""The Hugging Face side: `from_pretrained(quantization_config=…)`, `prepare_model`, `set_recipe`, OLMo2 sizes."""

import logging
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from .configuration_tetrajet_v2 import TetraJetConfig
from .linear import TetraJetLinear, iter_layers
from .packing import OUTLIER_BUFFERS
from .rng import TetraJetState

__all__ = ["TetraJetHfQuantizer", "olmo2_config", "prepare_model", "set_recipe", "unconverted_experts"]

logger = logging.getLogger(__name__)


def convert_layers(model: nn.Module, config: TetraJetConfig, skip: list[str], state: TetraJetState) -> int:
    """Replace every plain linear layer (`nn.Linear`, `Conv1D`, exact types) that is not skipped.

    Args:
        model (`nn.Module`): The model, changed in place.
        config (`TetraJetConfig`): The recipe.
        skip (`list[str]`): Names or patterns of modules left alone.
        state (`TetraJetState`): Counters the layers share.

    Returns:
        `int`: Layers replaced.
    """
    from transformers.pytorch_utils import Conv1D

    from .conv1d import TetraJetConv1D

    replaced: dict[int, nn.Module] = {}
    names = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
    for name, module in names:
        if type(module) not in (nn.Linear, Conv1D) or not should_convert_module(name, skip):
            continue
        if id(module) not in replaced:
            make = TetraJetLinear.from_linear if type(module) is nn.Linear else TetraJetConv1D.from_conv1d
            replaced[id(module)] = make(module, config, state)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced[id(module)])
    return len(replaced)


def number_layers(model: nn.Module, state: TetraJetState) -> None:
    """Give the layers their numbers and the shared counters.

    Args:
        model (`nn.Module`): The model.
        state (`TetraJetState`): Counters.
    """
    for number, (_, layer) in enumerate(iter_layers(model)):
        layer.layer_id, layer.state = number, state
    model.tetrajet_state = state


def unconverted_experts(model: nn.Module) -> dict[str, int]:
    """Fused 3-D expert weights, which stay in high precision.

    Args:
        model (`nn.Module`): The model.

    Returns:
        `dict[str, int]`: Name of the parameter → number of its elements.
    """
    return {name: p.numel() for name, p in model.named_parameters() if p.dim() == 3 and not name.endswith("bias")}


def warn_about_experts(model: nn.Module) -> None:
    """Warn with the list and the share of parameters that no quantized layer holds because they are fused experts.

    Args:
        model (`nn.Module`): The model.
    """
    experts = unconverted_experts(model)
    if experts:
        share = sum(experts.values()) / max(1, sum(p.numel() for p in model.parameters()))
        logger.warning(
            "%d fused 3-D expert weights (%.1f %% of the parameters) stay in high precision: %s",
            len(experts),
            100 * share,
            ", ".join(experts),
        )


class TetraJetHfQuantizer(HfQuantizer):
    """Puts `TetraJetLinear` into a model that `from_pretrained` loads.

    Args:
        quantization_config (`TetraJetConfig`): The recipe.
        **kwargs: Of `HfQuantizer`.
    """

    requires_calibration = False

    def __init__(self, quantization_config: TetraJetConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._outliers_loaded = False
        self._skip: list[str] = []

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is required: the format is emulated on any device.

        Args:
            *args: Ignored.
            **kwargs: Ignored.
        """

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Keep the dtype, but say once what half-precision master weights cost.

        Args:
            dtype (`torch.dtype`): Dtype given to `from_pretrained`.

        Returns:
            `torch.dtype`: The same dtype.
        """
        if dtype in (torch.bfloat16, torch.float16) and self.quantization_config.weights == "master":
            _warn_half_precision(dtype)
        return dtype

    def skip_list(self, model: nn.Module) -> list[str]:
        """Modules that stay in high precision.

        Args:
            model (`nn.Module`): The model.

        Returns:
            `list[str]`: Names or patterns.
        """
        named = self.quantization_config.modules_to_not_convert
        if not hasattr(model, "all_tied_weights_keys"):
            return list(named or [])
        keep = getattr(model, "_keep_in_fp32_modules", None)
        return self.get_modules_to_not_convert(model, named, keep, add_default_skips=True)

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files=None, **kwargs: Any) -> None:
        config = self.quantization_config
        state = TetraJetState(config.seed)
        self._skip = self.skip_list(model)
        convert_layers(model, config, self._skip, state)
        number_layers(model, state)
        shapes = _checkpoint_shapes(checkpoint_files)
        self._outliers_loaded = any(key.endswith(".selected") for key in shapes)
        if self.pre_quantized and config.weights == "packed":
            for name, layer in iter_layers(model):
                layer.pack_(name, empty=True)
                for key, (shape, _) in layer.packed_shapes(name).items():
                    found = shapes.get(_strip(model, f"{name}.{key}", shapes), shape)
                    if tuple(found) != tuple(shape):
                        raise ValueError(
                            f"{name}.{key}: shape {tuple(shape)} is expected, the file has {tuple(found)}"
                        )
        elif not self._outliers_loaded:
            # a plain checkpoint has no outlier buffers: nothing is missing, they start unselected
            patterns = {rf"(^|\.){buffer}$" for buffer in OUTLIER_BUFFERS}
            model._keys_to_ignore_on_load_missing = set(model._keys_to_ignore_on_load_missing or ()) | patterns

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        config = self.quantization_config
        number_layers(model, getattr(model, "tetrajet_state", TetraJetState(config.seed)))
        for name, layer in iter_layers(model):
            layer.refresh(name, loaded=self._outliers_loaded)
        if config.weights == "packed":
            pack_model(model, config)
        warn_about_experts(model)
        return model

    def is_serializable(self) -> bool:
        """Both layouts are plain safetensors.

        Returns:
            `bool`: `True`.
        """
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters can be trained in both modes, the weights themselves in master mode."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the weights themselves can be trained."""
        return self.quantization_config.weights == "master"

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """What `save_pretrained` writes.

        Args:
            model (`nn.Module`): The model.

        Returns:
            `tuple`: `None` (the ordinary state dict) in master mode, the packed tensors in packed mode; and the file's
            metadata.
        """
        metadata = {"tetrajet_weights": self.quantization_config.weights}
        return (None if self.is_qat_trainable else model.state_dict()), metadata

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        for name, layer in list(iter_layers(model)):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _plain_layer(layer, dtype))
        if hasattr(model, "tetrajet_state"):
            del model.tetrajet_state
        return model


def _plain_layer(layer: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """`nn.Linear` (or `Conv1D`) that holds the forward weight."""
    matrix = layer.dequantized_matrix()
    dtype = dtype or matrix.dtype
    bias = layer.bias
    if isinstance(layer, nn.Linear):
        plain = nn.Linear(layer.in_features, layer.out_features, bias is not None, device="meta")
    else:
        from transformers.pytorch_utils import Conv1D

        plain = Conv1D(layer.out_features, layer.in_features)
    plain.weight = nn.Parameter(layer._from_matrix(matrix).to(dtype).contiguous())
    plain.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype))
    return plain.train(layer.training)


def _checkpoint_shapes(files: list[str] | None) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in files or []:
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                shapes.update({key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()})  # noqa: SIM118
    return shapes


def _strip(model: nn.Module, key: str, shapes: dict[str, Any]) -> str:
    """Key under which the file holds a tensor: with or without the base model's prefix."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for candidate in (key, prefix + key, key.removeprefix(prefix)):
        if candidate in shapes:
            return candidate
    return key


_warned: set[str] = set()


def _warn_half_precision(dtype: torch.dtype) -> None:
    if str(dtype) not in _warned:
        _warned.add(str(dtype))
        logger.warning(
            "Master weights in %s lose updates below 2^-9 of their size. For training load with dtype=torch.float32 "
            "and set bf16=True in TrainingArguments.",
            dtype,
        )


def pack_model(model: nn.Module, config: TetraJetConfig) -> None:
    """Replace all master weights by codes and scales, in place.

    Args:
        model (`nn.Module`): The model.
        config (`TetraJetConfig`): Its config; `weights` becomes `"packed"`.
    """
    layers = list(iter_layers(model))
    config.weights = "packed"
    config.out_control.selected = any(layer._has_outliers for _, layer in layers)
    for name, layer in layers:
        layer.pack_(name)


def prepare_model(model: nn.Module, config: TetraJetConfig | str | None = None) -> nn.Module:
    """Convert a model in memory, as `from_pretrained(quantization_config=…)` converts a loaded one.

    A second call changes nothing. Use it to train from scratch: `AutoModel.from_config` ignores quantization configs.

    Args:
        model (`nn.Module`): A transformers model, or any module. Changed in place.
        config (`TetraJetConfig` or `str`, *optional*): The recipe or its name; default `"tetrajet_v2"`.

    Returns:
        `nn.Module`: The model.

    Raises:
        ValueError: If the model is already converted with another config (use `set_recipe`).
    """
    if config is None or isinstance(config, str):
        config = TetraJetConfig(config or "tetrajet_v2")
    current = getattr(model, "hf_quantizer", None)
    if current is not None:
        if not isinstance(current, TetraJetHfQuantizer):
            raise ValueError(f"model is already quantized by {type(current).__name__}")
        if current.quantization_config != config:
            raise ValueError("model is already converted with another config: change it with set_recipe(model, ...)")
        return model
    config = config.replace()  # packing changes it; the caller may use theirs again
    quantizer = TetraJetHfQuantizer(config, pre_quantized=False)
    state = TetraJetState(config.seed)
    convert_layers(model, config, quantizer.skip_list(model), state)
    number_layers(model, state)
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = config.quant_method
    if hasattr(model, "config"):
        model.config.quantization_config = config
    if config.weights == "packed":
        pack_model(model, config)
    warn_about_experts(model)
    return model


def set_recipe(model: nn.Module, **changes: Any) -> TetraJetConfig:
    """Change the recipe of a converted model, for instance `set_recipe(model, recipe="nvfp4_rtn", seed=1)`.

    transformers ignores a `quantization_config` given over a checkpoint that already has one, so this is how its
    options change.

    Args:
        model (`nn.Module`): A converted model.
        **changes: Fields of `TetraJetConfig`; `recipe` brings its preset's values along. `weights` and
            `modules_to_not_convert` are fixed by the conversion.

    Returns:
        `TetraJetConfig`: The new config.

    Raises:
        ValueError: If the model is not converted, or a field is unknown, not allowed or fixed.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, TetraJetHfQuantizer):
        raise ValueError("model is not converted: call prepare_model(model, config) first")
    old = quantizer.quantization_config
    for name in ("weights", "modules_to_not_convert"):
        if name in changes and changes[name] != getattr(old, name):
            raise ValueError(f"{name} is fixed by the conversion and cannot be changed to {changes[name]!r}")
    config = old.replace(**changes)
    for _, layer in iter_layers(model):
        layer.configure(config)
    quantizer.quantization_config = config
    model.tetrajet_state.seed = config.seed
    if hasattr(model, "config"):
        model.config.quantization_config = config
    return config


OLMO2_SIZES = {  # hidden size, layers, heads, MLP inner size, vocabulary, longest sequence
    "tiny": (64, 2, 4, 128, 256, 128),
    "70M": (512, 8, 8, 1024, 100278, 4096),
    "150M": (768, 12, 12, 1536, 100278, 4096),
    "370M": (1024, 16, 16, 4096, 100278, 4096),
}


def olmo2_config(size: str = "tiny"):
    """Model config of the paper's OLMo2 runs: RMSNorm after sub-layers, QK-norm, SwiGLU, no bias, untied (2510.27527).

    Args:
        size (`str`, defaults to `"tiny"`): `"70M"`, `"150M"`, `"370M"`, or `"tiny"` for tests.

    Returns:
        `transformers.Olmo2Config`: Give it to `AutoModelForCausalLM.from_config`, then call `prepare_model`.

    Raises:
        ValueError: If the size is unknown.
    """
    from transformers import Olmo2Config

    if size not in OLMO2_SIZES:
        raise ValueError(f"size must be one of {list(OLMO2_SIZES)}, got {size!r}")
    hidden, layers, heads, inner, vocabulary, length = OLMO2_SIZES[size]
    return Olmo2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attention_bias=False,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=0 if size == "tiny" else 100257,
    )
