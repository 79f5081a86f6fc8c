"""Four-bit checkpoints: our own exact layout, and the two layouts inference engines read.

| layout               | tensors of a layer                                                 | outer scale            |
|----------------------|--------------------------------------------------------------------|------------------------|
| `tetrajet`           | `weight_packed`, `weight_scale`, `weight_outer_scale`, `weight_hi*` | of 128, multiplier     |
| `compressed-tensors` | `weight_packed`, `weight_scale`, `weight_global_scale`             | divisor 2688/max       |
| `modelopt`           | `weight`, `weight_scale`, `weight_scale_2`                         | multiplier max/2688    |

The two interop layouts have one outer scale per tensor, so the master weight is quantized anew for them; the report
says what that changed. Engines fuse q/k/v and gate/up into one matrix with one outer scale, so those share their
maximum.
"""

import copy
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .blocks import INNER, OUTER_DIVISOR
from .formats import from_mxfp8
from .functional import quantize_weight_codes
from .linear import TetraJetLayer, iter_layers
from .packing import OUTLIER_BUFFERS, PACKED_BUFFERS
from .quantize import NVFP4Tensor, nvfp4_quantize

__all__ = ["export_packed", "import_packed", "read_packed"]

logger = logging.getLogger(__name__)

LAYOUTS = ("compressed-tensors", "modelopt", "tetrajet")
SCHEMES = ("NVFP4A16", "NVFP4")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
REPORT_FILE = "export_report.json"

_README = """# Packed TetraJet-v2 checkpoint

The linear layers hold NVFP4 codes and scales, not weights. Load it with `import hf_models` done before
`AutoModel….from_pretrained(this_folder)`; transformers alone cannot read it. For inference engines export the layout
`compressed-tensors` or `modelopt` instead.
"""


def export_packed(
    model: nn.Module,
    directory: str | Path,
    layout: str = "compressed-tensors",
    scheme: str = "NVFP4A16",
    calibration_batches: Iterable[Any] | None = None,
    fuse: bool = True,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Write a 4-bit checkpoint of a converted transformers model. The model is not changed.

    Args:
        model (`PreTrainedModel`): The model, with master weights.
        directory (`str` or `Path`): Folder to write.
        layout (`str`, defaults to `"compressed-tensors"`): Or `"modelopt"`, `"tetrajet"`.
        scheme (`str`, defaults to `"NVFP4A16"`): `"NVFP4A16"` quantizes weights only; `"NVFP4"` also lets the engine
            quantize the inputs and needs `calibration_batches`. The layout `tetrajet` has no scheme.
        calibration_batches (`Iterable`, *optional*): Model inputs (dicts, or tensors of token ids) that show the
            inputs' range.
        fuse (`bool`, defaults to `True`): Share the outer scale among q/k/v and among gate/up, as engines that fuse
            them need.
        dtype (`torch.dtype`, *optional*): Dtype of embeddings, norms and head. Default: BF16 for the interop layouts
            (engines and the compressed-tensors loader compute in it), unchanged for `tetrajet`.

    Returns:
        `dict[str, Any]`: The report, also written to `export_report.json`: per layer the relative change ‖ŵ_export −
        ŵ_training‖/‖ŵ_training‖ and the share of changed codes, and their maximum and mean.

    Raises:
        ValueError: If an argument is not allowed, or weights are not finite (naming the layers); nothing is written
        then.

    Example:
        ```python
        >>> import tempfile
        >>> from transformers import AutoModelForCausalLM
        >>> import hf_models.tetrajet_v2 as tj
        >>> model = AutoModelForCausalLM.from_config(tj.olmo2_config("tiny"))
        >>> model = tj.prepare_model(model, tj.TetraJetConfig("nvfp4_rtn"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = tj.export_packed(model, folder, fuse=False)
        >>> report["codes_changed_percent"]  # one outer scale per tensor in training too: exact
        0.0

        ```
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {SCHEMES}, got {scheme!r}")
    if scheme == "NVFP4" and layout != "tetrajet" and calibration_batches is None:
        raise ValueError("calibration_batches must be given for scheme='NVFP4': it sets the inputs' scales")
    layers = dict(iter_layers(model))
    if not layers:
        raise ValueError("model has no quantized layers: call prepare_model(model, config) first")
    _check_finite(layers)
    if layout == "tetrajet":
        tensors = {name: layer.packed_tensors(name) for name, layer in layers.items()}
        report = _summary({name: {"relative_change": 0.0, "codes_changed_percent": 0.0} for name in layers})
        config = copy.deepcopy(next(iter(layers.values())).recipe)
        config.weights = "packed"
        config.out_control.selected = any(layer._has_outliers for layer in layers.values())
        quantization = config.to_dict()
    else:
        layers = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
        inputs = _input_amax(model, layers, calibration_batches) if scheme == "NVFP4" else {}
        tensors, report = _interop_tensors(layers, layout, inputs, fuse)
        quantization = _interop_config(model, set(layers), layout, scheme)
    dtype = dtype or (model.dtype if layout == "tetrajet" else torch.bfloat16)
    _write(model, Path(directory), layout, tensors, quantization, report, dtype)
    return report


def _check_finite(layers: dict[str, TetraJetLayer]) -> None:
    bad = {}
    for name, layer in layers.items():
        count = int((~layer.weight.detach().isfinite()).sum())
        if count:
            bad[name] = count
    if bad:
        listed = ", ".join(f"{name} ({count})" for name, count in bad.items())
        raise ValueError(f"{len(bad)} layers hold non-finite weights, nothing was written: {listed}")


def _groups(names: Iterable[str], fuse: bool) -> dict[str, tuple[str, ...]]:
    """Layers whose outer scale each layer shares, itself included."""
    names = list(names)
    groups = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        siblings = next((group for group in FUSED if leaf in group), (leaf,)) if fuse else (leaf,)
        groups[name] = tuple(n for n in (f"{parent}.{s}" if parent else s for s in siblings) if n in set(names))
    return groups


def _interop_tensors(
    layers: dict[str, TetraJetLayer], layout: str, inputs: dict[str, float], fuse: bool
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    groups = _groups(layers, fuse)
    weights = {name: layer.matrix().detach().to(torch.float32) for name, layer in layers.items()}
    amax = {name: float(w.abs().amax()) for name, w in weights.items()}
    tensors, changes = {}, {}
    for name, w in weights.items():
        if w.shape[1] % INNER:
            raise ValueError(f"{name}.weight: {layout} needs a multiple of 16 input channels, got {w.shape[1]}")
        largest = max(amax[n] for n in groups[name])
        q = nvfp4_quantize(w, -1, tensor_amax=largest).pack()
        outer = q.outer.reshape(1)
        if layout == "compressed-tensors":
            entry = {"weight_packed": q.codes, "weight_scale": q.inner, "weight_global_scale": outer.reciprocal()}
            if largest:
                entry["weight_global_scale"] = (OUTER_DIVISOR / torch.full_like(outer, largest)).to(torch.float32)
        else:
            entry = {"weight": q.codes, "weight_scale": q.inner, "weight_scale_2": outer.reshape(())}
        if inputs:
            peak = torch.tensor(max(inputs[n] for n in groups[name]) or OUTER_DIVISOR, dtype=torch.float32)
            if layout == "compressed-tensors":
                entry["input_global_scale"] = (OUTER_DIVISOR / peak).reshape(1)
            else:
                entry["input_scale"] = peak / OUTER_DIVISOR
        tensors[name] = entry
        changes[name] = _change(layers[name], q)
    return tensors, _summary(changes)


def _change(layer: TetraJetLayer, exported: NVFP4Tensor) -> dict[str, float]:
    """How the exported weight differs from the one training ran on."""
    trained = layer.dequantized_matrix()
    norm = float(trained.norm())
    relative = float((exported.dequantize() - trained).norm()) / norm if norm else 0.0
    w, outliers = layer.matrix().detach().to(torch.float32), layer.outliers
    codes = exported.unpacked_codes()
    if outliers is not None:
        w, codes = w.index_select(1, outliers.lo), codes.index_select(1, outliers.lo)
    changed = quantize_weight_codes(w, layer.recipe).unpacked_codes() != codes
    return {"relative_change": relative, "codes_changed_percent": 100 * float(changed.float().mean())}


def _summary(layers: dict[str, dict[str, float]]) -> dict[str, Any]:
    relative = [v["relative_change"] for v in layers.values()]
    changed = [v["codes_changed_percent"] for v in layers.values()]
    return {
        "max_relative_change": max(relative),
        "mean_relative_change": sum(relative) / len(relative),
        "codes_changed_percent": sum(changed) / len(changed),
        "layers": layers,
    }


@torch.no_grad()
def _input_amax(model: nn.Module, layers: dict[str, TetraJetLayer], batches: Iterable[Any]) -> dict[str, float]:
    """Largest magnitude each layer's input takes."""
    amax = dict.fromkeys(layers, 0.0)

    def watch(name: str):
        def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0].numel():
                amax[name] = max(amax[name], float(inputs[0].abs().amax()))

        return hook

    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    training = model.training
    model.eval()
    try:
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    unseen = [name for name, value in amax.items() if value == 0.0]
    if unseen:
        logger.warning("calibration never reached %s: their input scale is 1", ", ".join(unseen))
    return amax


def _interop_config(model: nn.Module, exported: set[str], layout: str, scheme: str) -> dict[str, Any]:
    ignore = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in exported]
    if layout == "modelopt":
        algorithm = "NVFP4" if scheme == "NVFP4" else "W4A16_NVFP4"
        return {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ignore,
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
    }
    inputs = {**weights, "dynamic": "local"} if scheme == "NVFP4" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ignore,
        "config_groups": {"group_0": {**group, "format": "nvfp4-pack-quantized"}},
    }


def _write(
    model: nn.Module,
    directory: Path,
    layout: str,
    tensors: dict[str, dict[str, torch.Tensor]],
    quantization: dict[str, Any],
    report: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    from huggingface_hub import save_torch_state_dict

    layers = dict(iter_layers(model))
    replaced = {f"{name}.{key}" for name in tensors for key in ("weight", *PACKED_BUFFERS)}
    if layout != "tetrajet" or not quantization["out_control"]["selected"]:
        replaced |= {f"{name}.{key}" for name in layers for key in OUTLIER_BUFFERS}
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    state = {k: v for k, v in model.state_dict().items() if k not in replaced and k not in tied}
    state = {k: (v.to(dtype) if v.is_floating_point() else v).contiguous() for k, v in state.items()}
    state.update(
        {f"{name}.{key}": value.contiguous() for name, entry in tensors.items() for key, value in entry.items()}
    )
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, directory, metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    config.quantization_config = quantization
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
    if layout == "modelopt":
        keys = ("quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules")
        content = {"producer": {"name": "closedloop"}, "quantization": {key: quantization[key] for key in keys}}
        (directory / "hf_quant_config.json").write_text(json.dumps(content, indent=2) + "\n")
    if layout == "tetrajet":
        (directory / "README.md").write_text(_README)
    (directory / REPORT_FILE).write_text(json.dumps({"layout": layout, **report}, indent=2) + "\n")


# ----------------------------------------------------------------------------------------------------------- reading


def read_packed(directory: str | Path) -> dict[str, torch.Tensor]:
    """State dict of a plain model from an exported folder, whatever its layout: FP32 weights instead of codes.

    Args:
        directory (`str` or `Path`): The folder.

    Returns:
        `dict[str, torch.Tensor]`: Tensors by name.

    Raises:
        ValueError: If the folder's format is unknown, or a tensor has a wrong shape or a NaN scale; the message names
        it.
    """
    from safetensors.torch import load_file

    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method not in ("tetrajet_v2", "compressed-tensors", "modelopt"):
        raise ValueError(f"{directory}: quant_method must be one of {LAYOUTS} or 'tetrajet_v2', got {method!r}")
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    names = [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]
    for name in names:
        part = {key.removeprefix(f"{name}."): tensors[key] for key in list(tensors) if key.startswith(f"{name}.")}
        weight = _decode(name, part, method, quantization)
        for key in part:
            if key != "bias":
                del tensors[f"{name}.{key}"]
        tensors[f"{name}.weight"] = weight
    return tensors


def _decode(name: str, part: dict[str, torch.Tensor], method: str, quantization: dict[str, Any]) -> torch.Tensor:
    codes_key = "weight" if method == "modelopt" else "weight_packed"
    outer_key = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}.get(
        method, "weight_outer_scale"
    )
    for key in (codes_key, outer_key):
        if key not in part:
            raise ValueError(f"{name}.{key} is missing")
    codes, inner, outer = part[codes_key], part["weight_scale"], part[outer_key].to(torch.float32)
    rows, columns = codes.shape[0], 2 * codes.shape[-1]
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"{name}.{codes_key} must be a uint8 matrix, got {codes.dtype} of shape {tuple(codes.shape)}")
    expected = (rows, -(-columns // 16))
    if tuple(inner.shape) != expected:
        raise ValueError(f"{name}.weight_scale: shape {expected} is expected, got {tuple(inner.shape)}")
    if bool((inner.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ValueError(f"{name}.weight_scale holds a NaN byte")
    size = quantization.get("outer_block_size", -1) if method == "tetrajet_v2" else -1
    if method == "compressed-tensors":
        outer = 1 / outer
    outer_shape = (1,) if size == -1 else (rows, -(-columns // size))
    if outer.numel() != torch.Size(outer_shape).numel():
        raise ValueError(f"{name}.{outer_key}: shape {outer_shape} is expected, got {tuple(outer.shape)}")
    if not bool(outer.isfinite().all()):
        raise ValueError(f"{name}.{outer_key} is not finite")
    q = NVFP4Tensor(codes, inner, outer.reshape(outer_shape), torch.Size((rows, columns)), size, True)
    weight = q.dequantize()
    if "weight_hi" not in part:
        return weight
    full = weight.new_empty(rows, columns + part["weight_hi"].shape[1])
    index = torch.cat([part["lo_idx"], part["hi_idx"]]).long()
    if index.sort().values.tolist() != list(range(full.shape[1])):
        raise ValueError(
            f"{name}.hi_idx and {name}.lo_idx are not a permutation of the {full.shape[1]} input channels"
        )
    full[:, index] = torch.cat([weight, from_mxfp8(part["weight_hi"], part["weight_hi_scale"])], dim=1)
    return full


def import_packed(directory: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Load an exported folder into a plain model with dequantized FP32 weights.

    Args:
        directory (`str` or `Path`): Folder that `export_packed` wrote.
        model (`nn.Module`, *optional*): Plain model to load into; by default made from the folder's config.

    Returns:
        `nn.Module`: The model.

    Raises:
        ValueError: If a tensor has a wrong shape, a NaN scale, or is missing.
    """
    state = read_packed(directory)
    if model is None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(directory)
        del config.quantization_config
        model = getattr(transformers, config.architectures[0])(config).to(torch.float32)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, value in state.items():
        if name in expected and expected[name] != tuple(value.shape):
            raise ValueError(f"{name}: shape {expected[name]} is expected, the folder has {tuple(value.shape)}")
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    if set(missing) - tied or unexpected:
        raise ValueError(f"missing tensors: {sorted(set(missing) - tied)}; unexpected tensors: {unexpected}")
    return model
