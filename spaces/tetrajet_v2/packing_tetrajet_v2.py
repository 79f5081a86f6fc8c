"""A 4-bit checkpoint written, read again and compared: what stands behind the fifth tab. No gradio in here."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_tetrajet_v2 import batch, held_out_loss, tokenizer
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_models.tetrajet_v2 import export_packed, import_packed, iter_layers

LAYOUTS = {
    "compressed-tensors": "compressed-tensors (vLLM, transformers)",
    "modelopt": "modelopt (TensorRT-LLM, SGLang)",
    "tetrajet": "tetrajet (this package; exact)",
}
SCHEMES = {"NVFP4A16": "weights only", "NVFP4": "weights and inputs"}
PROMPT = "The import statement"


@dataclass
class Checkpoint:
    """A written folder and what was found when it was read again.

    Args:
        report (`dict`): What `export_packed` says.
        files (`list[tuple[str, int]]`): Name and bytes.
        packed_bytes (`int`): Bytes of codes and scales of the quantized layers.
        packed_weights (`int`): Their weights.
        parameters (`int`): All parameters of the model.
        checks (`list[tuple[str, str, bool]]`): What was checked, what was found, whether it is as it must be.
        losses (`tuple[float, float]`): Held-out loss of the model and of the folder.
        samples (`tuple[str, str]`): What both write after the prompt.
        is_quantized (`bool`): Whether training ran on 4-bit weights.
    """

    report: dict[str, Any]
    files: list[tuple[str, int]]
    packed_bytes: int
    packed_weights: int
    parameters: int
    checks: list[tuple[str, str, bool]]
    losses: tuple[float, float]
    samples: tuple[str, str]
    is_quantized: bool


def write(model: PreTrainedModel, folder: Path, layout: str, scheme: str, fuse: bool) -> Checkpoint:
    """Export a model, load the folder again and compare.

    Args:
        model (`PreTrainedModel`): A converted model; it is not changed.
        folder (`Path`): Where to write.
        layout (`str`): A key of `LAYOUTS`.
        scheme (`str`): A key of `SCHEMES`.
        fuse (`bool`): One outer scale for q, k, v and for gate, up.

    Returns:
        [`Checkpoint`].

    Raises:
        ValueError: The weights are not finite, or the layout cannot hold them.
    """
    layers = dict(iter_layers(model))
    is_quantized = next(iter(layers.values())).recipe.is_on("Q2")
    if layout == "tetrajet" and not is_quantized:
        raise ValueError(
            "The layout tetrajet needs a model trained with 4-bit weights, not bf16: take another layout."
        )
    calibration = [batch(0, 0)] if scheme == "NVFP4" else None
    report = export_packed(model, folder, layout, scheme, calibration, fuse)
    tokenizer().save_pretrained(folder)
    if layout == "tetrajet":
        again = AutoModelForCausalLM.from_pretrained(folder).eval()
        checks = [_bit_equal(model, again)]
    else:
        again = import_packed(folder).eval()
        checks = [_as_reported(layers, again, report)]
    weights = sum(n * k for n, k in (layer.size() for layer in layers.values()))
    packed, not_a_number = _packed(folder, set(layers))
    checks.append(("no scale byte is NaN", f"{not_a_number} of them", not_a_number == 0))
    return Checkpoint(
        report,
        sorted((path.name, path.stat().st_size) for path in folder.iterdir()),
        packed,
        weights,
        sum(parameter.numel() for parameter in model.parameters()),
        checks,
        (held_out_loss(model), held_out_loss(again)),
        (sample(model), sample(again)),
        is_quantized,
    )


@torch.no_grad()
def _bit_equal(model: PreTrainedModel, again: PreTrainedModel) -> tuple[str, str, bool]:
    ids = tokenizer()(PROMPT, return_tensors="pt").input_ids
    difference = float((model(ids).logits - again(ids).logits).abs().max())
    return "logits, model against folder", f"largest difference {difference:g}", difference == 0


@torch.no_grad()
def _as_reported(layers: dict, again: PreTrainedModel, report: dict[str, Any]) -> tuple[str, str, bool]:
    largest, furthest = 0.0, 0.0
    for name, layer in layers.items():
        trained, read = layer.dequantized_matrix(), again.get_submodule(name).weight
        change = float((read - trained).norm() / trained.norm().clamp_min(1e-30))
        largest = max(largest, change)
        furthest = max(furthest, abs(change - report["layers"][name]["relative_change"]))
    found = f"largest change {100 * largest:.2f} %, off the report by {furthest:.0e}"
    return f"{len(layers)} layers read again", found, furthest < 1e-5


def _packed(folder: Path, layers: set[str]) -> tuple[int, int]:
    """Bytes of the quantized layers in the folder's safetensors, and E4M3 scales that are NaN."""
    size = broken = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (no mapping)
                owner, _, name = key.rpartition(".")
                if owner in layers:
                    tensor = tensors.get_tensor(key)
                    size += tensor.nbytes
                    if name == "weight_scale":
                        broken += int((tensor.view(torch.uint8) & 0x7F == 0x7F).sum())
    return size, broken


@torch.no_grad()
def sample(model: PreTrainedModel, length: int = 30) -> str:
    """What a model writes after the prompt, always the likeliest character."""
    ids = tokenizer()(PROMPT, return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=length, do_sample=False, use_cache=True)
    return tokenizer().decode(written[0], skip_special_tokens=True)


def pack_folder(folder: Path, target: Path) -> None:
    """Write all files of a folder into a zip file."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)


def layer_rows(checkpoint: Checkpoint) -> list[list[str]]:
    """Per layer: relative change of the weights, and changed codes."""
    return [
        [
            name.removeprefix("model."),
            f"{100 * entry['relative_change']:.2f} %",
            f"{entry['codes_changed_percent']:.1f} %" if checkpoint.is_quantized else "–",
        ]
        for name, entry in checkpoint.report["layers"].items()
    ]


def file_rows(checkpoint: Checkpoint) -> list[list[str]]:
    """Files of the folder, and the same parameters in two common formats for comparison."""
    rows = [[name, f"{size:,}"] for name, size in checkpoint.files]
    total = sum(size for _, size in checkpoint.files)
    return [
        *rows,
        ["all files", f"{total:,}"],
        ["for comparison: all parameters in float32", f"{4 * checkpoint.parameters:,}"],
        ["for comparison: all parameters in bfloat16", f"{2 * checkpoint.parameters:,}"],
    ]


def config_text(folder: Path) -> str:
    """The quantization config that engines read, as JSON."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return json.dumps(config["quantization_config"], indent=1)
