"""Watch a quantized training: oscillation of 4-bit weights, what is quantized, whether the gradient is unbiased."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .functional import q2, quantize_weight_codes
from .linear import TetraJetLayer, iter_layers
from .osci_reset import lo_weight, trainable_layers
from .quantizer_tetrajet_v2 import unconverted_experts
from .rng import TetraJetState

__all__ = ["OscillationWindow", "QuantizationReport", "gradient_bias", "oscillation_report", "quantization_report"]


class OscillationWindow:
    """Accumulates how far the weights and their 4-bit values move: D_w = Σ|Δw|, D_q = Σ|ΔQ2(w)|.

    Args:
        model (`nn.Module`): A converted model.

    Example:
        ```python
        >>> import torch
        >>> import hf_models.tetrajet_v2 as tj
        >>> model = tj.prepare_model(torch.nn.Sequential(torch.nn.Linear(32, 16)), "tetrajet_v2_base")
        >>> window = tj.OscillationWindow(model)
        >>> window.update()  # after each optimizer step
        >>> tj.oscillation_report(model, window)["share"]
        0.0

        ```
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0
        self._tracked: dict[str, list[torch.Tensor]] = {}  # w, Q2(w), D_w, D_q
        for name, layer in trainable_layers(model):
            w = lo_weight(layer, name)
            self._tracked[name] = [w, q2(w, layer.recipe), torch.zeros_like(w), torch.zeros_like(w)]

    @torch.no_grad()
    def update(self) -> None:
        """Account for one optimizer step."""
        self.steps += 1
        for name, layer in trainable_layers(self.model):
            previous = self._tracked.get(name)
            w = lo_weight(layer, name)
            q = q2(w, layer.recipe)
            if previous is None or previous[0].shape != w.shape:  # outlier channels were selected: start anew
                self._tracked[name] = [w, q, torch.zeros_like(w), torch.zeros_like(w)]
                continue
            previous[2].add_((w - previous[0]).abs_())
            previous[3].add_((q - previous[1]).abs_())
            previous[0], previous[1] = w, q

    def distances(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """D_w and D_q of every layer.

        Returns:
            `dict[str, tuple[torch.Tensor, torch.Tensor]]`: Name → (D_w, D_q).
        """
        return {name: (d_w, d_q) for name, (_, _, d_w, d_q) in self._tracked.items()}


def oscillation_report(model: nn.Module, window: OscillationWindow, threshold: float = 8.0) -> dict[str, Any]:
    """How much the 4-bit weights oscillate.

    Args:
        model (`nn.Module`): The model of the window.
        window (`OscillationWindow`): Updated after each of the last steps (20 are usual).
        threshold (`float`, defaults to 8.0): ρ = D_q/D_w from which a weight counts as oscillating.

    Returns:
        `dict[str, Any]`: `share` of weights with ρ ≥ threshold, `distance_ratio` = ΣD_q/ΣD_w, `steps`, and the same
        per layer under `layers`.

    Raises:
        ValueError: If the window belongs to another model.
    """
    if window.model is not model:
        raise ValueError("window must be an OscillationWindow of this model")
    layers, total, flipping, sum_w, sum_q = {}, 0, 0, 0.0, 0.0
    for name, (d_w, d_q) in window.distances().items():
        rho = torch.where(d_w > 0, d_q / d_w, 0.0)
        count, w, q = int((rho >= threshold).sum()), float(d_w.double().sum()), float(d_q.double().sum())
        layers[name] = {"share": count / d_w.numel(), "distance_ratio": q / w if w else 0.0}
        total, flipping, sum_w, sum_q = total + d_w.numel(), flipping + count, sum_w + w, sum_q + q
    return {
        "share": flipping / total if total else 0.0,
        "distance_ratio": sum_q / sum_w if sum_w else 0.0,
        "steps": window.steps,
        "layers": layers,
    }


@dataclass
class QuantizationReport:
    """What of a model is quantized; `print` shows it as text.

    Args:
        layers (`dict[str, dict]`): Layer → shape, mode, numbers of FP4 and of MXFP8 input channels.
        fp4_parameters (`int`): Weights in NVFP4.
        mxfp8_parameters (`int`): Weights in MXFP8 (outlier channels).
        total_parameters (`int`): All parameters.
        code_histogram (`list[int]`): Number of weights with each of the 16 codes.
        unquantized (`dict[str, int]`): Other weight matrices → elements.
        experts (`dict[str, int]`): Fused 3-D expert weights, left in high precision → elements.
    """

    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    fp4_parameters: int = 0
    mxfp8_parameters: int = 0
    total_parameters: int = 0
    code_histogram: list[int] = field(default_factory=lambda: [0] * 16)
    unquantized: dict[str, int] = field(default_factory=dict)
    experts: dict[str, int] = field(default_factory=dict)

    @property
    def fp4_share(self) -> float:
        """Share of the parameters in NVFP4."""
        return self.fp4_parameters / self.total_parameters if self.total_parameters else 0.0

    def __str__(self) -> str:
        lines = [
            f"{len(self.layers)} quantized layers: {self.fp4_parameters:,} weights in NVFP4 "
            f"({100 * self.fp4_share:.1f} %), "
            f"{self.mxfp8_parameters:,} in MXFP8, of {self.total_parameters:,} parameters"
        ]
        lines += [f"  {name}: {info}" for name, info in self.layers.items()]
        total = max(1, sum(self.code_histogram))
        lines.append("codes 0 … 15, %: " + " ".join(f"{100 * n / total:.1f}" for n in self.code_histogram))
        for title, group in (("not quantized", self.unquantized), ("fused experts, not quantized", self.experts)):
            if group:
                lines.append(f"{title}: " + ", ".join(f"{name} ({n:,})" for name, n in group.items()))
        return "\n".join(lines)


@torch.no_grad()
def quantization_report(model: nn.Module) -> QuantizationReport:
    """List what of a model is quantized.

    Args:
        model (`nn.Module`): A converted model.

    Returns:
        `QuantizationReport`: Layers, shares, histogram of the codes, and what stays in high precision.
    """
    report = QuantizationReport(experts=unconverted_experts(model))
    seen: set[int] = set()
    packed = 0
    for name, layer in iter_layers(model):
        n, k = layer.size()
        outliers = layer.outliers
        hi = 0 if outliers is None else outliers.hi.numel()
        shape = {"shape": (n, k), "mode": layer.mode, "nvfp4_channels": k - hi, "mxfp8_channels": hi}
        report.layers[name] = shape
        if layer.mode == "packed":
            packed += n * k
            codes = _packed_codes(layer)
        else:
            if id(layer.weight) in seen or not layer.recipe.is_on("Q2"):
                continue
            seen.add(id(layer.weight))
            codes = quantize_weight_codes(lo_weight(layer, name), layer.recipe).unpacked_codes()
        report.fp4_parameters += n * (k - hi)
        report.mxfp8_parameters += n * hi
        counts = torch.bincount(codes.reshape(-1).long(), minlength=16).tolist()
        report.code_histogram = [a + b for a, b in zip(report.code_histogram, counts, strict=True)]
    report.total_parameters = sum(p.numel() for p in model.parameters()) + packed
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and id(parameter) not in seen:
            report.unquantized[name] = parameter.numel()
    return report


def _packed_codes(layer: TetraJetLayer) -> torch.Tensor:
    packed = layer.weight_packed
    return torch.cat([packed & 0xF, packed >> 4])


def gradient_bias(
    layer: TetraJetLayer, x: torch.Tensor, dy: torch.Tensor, n: int | list[int] = 1024
) -> dict[str, dict[int, float]]:
    """Gradient concentration: e(n) = ‖mean of n gradient draws − STE gradient‖²/‖STE gradient‖².

    Unbiased means e(n) ≈ e(1)/n. For n = 1 the error of a single draw is averaged over all draws made.
    The reference is the straight-through gradient of the layer's own quantized forward pass, dY·Wq and dYᵀ·Xq.

    Args:
        layer (`TetraJetLayer`): Layer in master mode.
        x (`torch.Tensor`): Input `(T, K)`.
        dy (`torch.Tensor`): Gradient of the output `(T, N)`.
        n (`int` or `list[int]`, defaults to 1024): Number of draws, or several at which to report.

    Returns:
        `dict[str, dict[int, float]]`: `"dx"` and `"dw"`, each n → e(n).
    """
    from .functional import _m1, _q1

    marks = sorted({1, n} if isinstance(n, int) else set(n))
    recipe, outliers = layer.recipe, layer.outliers
    x = x.detach().to(torch.float32)
    with torch.no_grad():
        if outliers is None:
            xq = _q1(x, recipe)
        else:
            lo, hi = outliers.split(x)
            xq = outliers.merge(_q1(lo, recipe), _m1(hi, recipe))
        reference = {"dx": (dy @ layer.dequantized_matrix()).double(), "dw": (dy.t() @ xq).double()}
    total = {key: torch.zeros_like(value) for key, value in reference.items()}
    result: dict[str, dict[int, float]] = {"dx": {}, "dw": {}}
    single = dict.fromkeys(reference, 0.0)
    state, layer.state = layer.state, TetraJetState(layer.state.seed, rank=0)
    try:
        for draw in range(marks[-1]):
            layer.state.set_step(draw)
            leaf = x.requires_grad_()
            dx, dw = torch.autograd.grad(layer(leaf), (leaf, layer.weight), dy)
            if dw.shape != reference["dw"].shape:
                dw = dw.t()
            for key, gradient in (("dx", dx), ("dw", dw)):
                total[key] += gradient
                single[key] += float((gradient - reference[key]).square().sum() / reference[key].square().sum())
                if draw + 1 in marks:
                    error = total[key] / (draw + 1) - reference[key]
                    result[key][draw + 1] = float(error.square().sum() / reference[key].square().sum())
    finally:
        layer.state = state
    for key in result:
        if 1 in marks:
            result[key][1] = single[key] / marks[-1]
    return result
