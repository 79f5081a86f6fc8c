"""Configuration of NVFP4 fully-quantized training, and the presets of the recipes it is compared with.

| paper's symbol or switch (arXiv 2510.27527)   | argument                                     | default          |
|------------------------------------------------|----------------------------------------------|------------------|
| outer block, 128                               | `outer_block_size`                           | 128              |
| Q4, Q6 act on Q2(W), Q1(X)                     | `align_backward`                             | `True`           |
| SR of dY, W, X in the backward pass            | `stochastic_grad`, `_weight`, `_act`         | `True`           |
| H_a, H_b                                       | `rht_dx`, `rht_dw`, `hadamard_size`          | `True`, 16       |
| outlier ratio                                  | `out_control.ratio`                          | 0.1              |
| OsciReset P, W, τ                              | `osci_reset.period`, `.window`, `.threshold` | 200, 50, 8       |
"""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .native import native_available

__all__ = ["RECIPES", "OsciResetConfig", "OutControlConfig", "TetraJetConfig"]

DETECT_VARIANTS = ("distance_ratio", "distance_ratio_mem_eff", "bin_edge")
QUANTIZERS = ("Q1", "Q2", "Q3", "Q4", "Q5", "Q6")

_BASE = {
    "outer_block_size": 128,
    "weight_block_2d": False,
    "align_backward": True,
    "stochastic_grad": True,
    "stochastic_weight": True,
    "stochastic_act": True,
    "rht_dx": True,
    "rht_dw": True,
    "disabled_quantizers": [],
    "out_control": {"enabled": False},
    "osci_reset": {"enabled": False},
}
_ROUND_TO_NEAREST = {
    **_BASE,
    "outer_block_size": -1,
    "align_backward": False,
    "stochastic_grad": False,
    "stochastic_weight": False,
    "stochastic_act": False,
    "rht_dx": False,
    "rht_dw": False,
}
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {**_BASE, "disabled_quantizers": list(QUANTIZERS)},
    "nvfp4_rtn": _ROUND_TO_NEAREST,
    "nvidia_nvfp4": {
        **_ROUND_TO_NEAREST,
        "weight_block_2d": True,
        "stochastic_grad": True,
        "rht_dw": True,
    },  # 2509.25149
    "fp4_all_the_way": {**_ROUND_TO_NEAREST, "stochastic_grad": True, "stochastic_act": True},  # 2505.19115
    "tetrajet_v2_base": _BASE,
    "tetrajet_v2": {**_BASE, "out_control": {"enabled": True}, "osci_reset": {"enabled": True}},
}


def _require(condition: bool, field: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{field} must be {allowed}, got {value!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass
class OutControlConfig:
    """Outlier channels kept in MXFP8.

    Args:
        enabled (`bool`, defaults to `True`): Record, select and use outlier channels.
        ratio (`float`, defaults to 0.1): Share of a layer's input channels that become outlier channels.
        record_start (`int`, defaults to 501): Optimizer steps done when recording begins.
        record_steps (`int`, defaults to 50): Optimizer steps of recording.
        align (`int`, defaults to 16): The number of outlier channels is rounded up to a multiple of it (1, 16, 128 are
            usual).
        selected (`bool`, defaults to `False`): Set by packing: the packed layers hold outlier channels.
    """

    enabled: bool = True
    ratio: float = 0.1
    record_start: int = 501
    record_steps: int = 50
    align: int = 16
    selected: bool = False

    def __post_init__(self) -> None:
        _require(_is_number(self.ratio) and 0 <= self.ratio < 1, "out_control.ratio", self.ratio, "in [0, 1)")
        for name, least in (("record_start", 0), ("record_steps", 1), ("align", 1)):
            value = getattr(self, name)
            _require(_is_integer(value) and value >= least, f"out_control.{name}", value, f"an integer ≥ {least}")

    def num_outliers(self, in_features: int) -> int:
        """Number k of outlier channels of a layer; 0 where the layer stays pure FP4.

        Args:
            in_features (`int`): K, the layer's input channels.

        Returns:
            `int`: k = ceil_align(ratio·K), at most K − 16; 0 for fewer than 32 channels.
        """
        if not self.enabled or self.ratio == 0 or in_features < 32:
            return 0
        wanted = round(self.ratio * in_features, 0 if self.align == 1 else 6)  # 0.1·K may be a hair above an integer
        k = int(-(-wanted // self.align) * self.align)
        return min(k, in_features - 16)


@dataclass
class OsciResetConfig:
    """Detection and reset of oscillating weights.

    Args:
        enabled (`bool`, defaults to `True`): Run OsciReset.
        detect (`str`, defaults to `"distance_ratio"`): Or `"distance_ratio_mem_eff"` (track only the weights nearest a
            bin edge) or `"bin_edge"` (reset by closeness to the edge alone).
        start (`int` or `float`, defaults to 0.64): First step, or the share of all steps after which it starts.
        period (`int`, defaults to 200): P, steps from one window's start to the next.
        window (`int`, defaults to 50): W, steps of a window.
        threshold (`float`, defaults to 8.0): τ, reset where D_q/D_w ≥ τ.
        sample_percent (`float`, defaults to 10): Share of weights tracked by the memory-efficient variant, in percent.
        edge_threshold (`float`, defaults to 0.495): Reset above this closeness (`"bin_edge"`); 0.5 is the edge.
    """

    enabled: bool = True
    detect: str = "distance_ratio"
    start: int | float = 0.64
    period: int = 200
    window: int = 50
    threshold: float = 8.0
    sample_percent: float = 10
    edge_threshold: float = 0.495

    def __post_init__(self) -> None:
        _require(self.detect in DETECT_VARIANTS, "osci_reset.detect", self.detect, f"one of {DETECT_VARIANTS}")
        share = isinstance(self.start, float) and 0 <= self.start <= 1
        step = _is_integer(self.start) and self.start >= 0
        _require(share or step, "osci_reset.start", self.start, "a step (integer ≥ 0) or a share (float in [0, 1])")
        for name in ("period", "window"):
            value = getattr(self, name)
            _require(_is_integer(value) and value >= 1, f"osci_reset.{name}", value, "a positive integer")
        allowed = f"less than period − 1 = {self.period - 1} (window + 1 < period)"
        _require(self.window + 1 < self.period, "osci_reset.window", self.window, allowed)
        _require(_is_number(self.threshold) and self.threshold > 0, "osci_reset.threshold", self.threshold, "positive")
        percent = self.sample_percent
        _require(_is_number(percent) and 0 < percent <= 100, "osci_reset.sample_percent", percent, "in (0, 100]")
        edge = self.edge_threshold
        _require(_is_number(edge) and 0 < edge <= 0.5, "osci_reset.edge_threshold", edge, "in (0, 0.5]")


def _nested(cls: type, value: Any, preset: dict[str, Any], field: str) -> Any:
    """Build a nested config from an instance, a dict laid over the preset, or nothing."""
    if isinstance(value, cls):
        return dataclasses.replace(value)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{field} must be a dict or {cls.__name__}, got {value!r}")
    values = {**preset, **(value or {})}
    known = {f.name for f in dataclasses.fields(cls)}
    _warn_unknown(sorted(set(values) - known), field)
    return cls(**{name: v for name, v in values.items() if name in known})


def _warn_unknown(names: list[str], where: str) -> None:
    if names:
        warnings.warn(f"{where}: ignoring unknown keys {names}", UserWarning, stacklevel=4)


class TetraJetConfig(QuantizationConfigMixin):
    """How the linear layers of a model are trained on NVFP4 operands.

    Arguments left out take the value of the preset `recipe`.

    Args:
        recipe (`str`, defaults to `"tetrajet_v2"`): One of `RECIPES`.
        outer_block_size (`int`, *optional*): Elements under one FP32 outer scale; -1 for one per tensor.
        weight_block_2d (`bool`, *optional*): 16×16 weight blocks; the input gradient reuses their codes where it can.
        align_backward (`bool`, *optional*): The backward pass re-quantizes the quantized forward operands.
        stochastic_grad (`bool`, *optional*): Stochastic rounding of dY (Q3, Q5).
        stochastic_weight (`bool`, *optional*): Stochastic rounding of the weight in dX (Q4).
        stochastic_act (`bool`, *optional*): Stochastic rounding of the input in dW (Q6).
        rht_dx (`bool`, *optional*): Random Hadamard transform in the product for dX.
        rht_dw (`bool`, *optional*): Random Hadamard transform in the product for dW.
        disabled_quantizers (`list[str]`, *optional*): Quantizers switched off, of `"Q1"` … `"Q6"` (Q1 X, Q2 W in the
            forward pass; Q3 dY, Q4 W for dX; Q5 dY, Q6 X for dW).
        hadamard_size (`int`, defaults to 16): Group of the transform, a power of two up to 128.
        scale_rounding (`str`, defaults to `"nearest"`): Rounding of the inner scale: `"nearest"` (paper) or `"up"`.
        strict_unbiased (`bool`, defaults to `False`): Round the inner scales of Q3 … Q6 up, so that no element is
            clipped.
        modules_to_not_convert (`list[str]`, *optional*): Names or patterns of modules that stay in high precision,
            besides embeddings and output head.
        weights (`str`, defaults to `"master"`): `"master"` keeps trainable weights; `"packed"` keeps only codes and
            scales.
        save_packed_activations (`bool`, defaults to `False`): Save codes and scales of X for the backward pass instead
            of X.
        gemm (`str`, defaults to `"fp32"`): `"fp32"` (exact emulation), `"bf16"` (operands rounded to BF16) or
            `"native"` (FP4 tensor cores).
        seed (`int`, defaults to 0): Seed of all noise.
        out_control (`dict` or `OutControlConfig`, *optional*): Outlier control.
        osci_reset (`dict` or `OsciResetConfig`, *optional*): Oscillation reset.
        **kwargs: Keys of newer versions: named in one warning and ignored.

    Raises:
        ValueError: If a field has a value that is not allowed; the message names field and allowed values.

    Example:
        ```python
        >>> from hf_models.tetrajet_v2 import TetraJetConfig
        >>> config = TetraJetConfig(recipe="tetrajet_v2", osci_reset={"period": 400})
        >>> config.osci_reset.period, config.osci_reset.enabled, config.outer_block_size
        (400, True, 128)

        ```
    """

    def __init__(
        self,
        recipe: str = "tetrajet_v2",
        outer_block_size: int | None = None,
        weight_block_2d: bool | None = None,
        align_backward: bool | None = None,
        stochastic_grad: bool | None = None,
        stochastic_weight: bool | None = None,
        stochastic_act: bool | None = None,
        rht_dx: bool | None = None,
        rht_dw: bool | None = None,
        disabled_quantizers: list[str] | None = None,
        hadamard_size: int = 16,
        scale_rounding: str = "nearest",
        strict_unbiased: bool = False,
        modules_to_not_convert: list[str] | None = None,
        weights: str = "master",
        save_packed_activations: bool = False,
        gemm: str = "fp32",
        seed: int = 0,
        out_control: dict[str, Any] | OutControlConfig | None = None,
        osci_reset: dict[str, Any] | OsciResetConfig | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("quant_method", None)
        _warn_unknown(sorted(kwargs), "TetraJetConfig")
        _require(recipe in RECIPES, "recipe", recipe, f"one of {sorted(RECIPES)}")
        preset = RECIPES[recipe]

        def pick(value: Any, name: str) -> Any:
            return preset[name] if value is None else value

        self.quant_method = "tetrajet_v2"
        self.recipe = recipe
        self.outer_block_size = pick(outer_block_size, "outer_block_size")
        self.weight_block_2d = pick(weight_block_2d, "weight_block_2d")
        self.align_backward = pick(align_backward, "align_backward")
        self.stochastic_grad = pick(stochastic_grad, "stochastic_grad")
        self.stochastic_weight = pick(stochastic_weight, "stochastic_weight")
        self.stochastic_act = pick(stochastic_act, "stochastic_act")
        self.rht_dx = pick(rht_dx, "rht_dx")
        self.rht_dw = pick(rht_dw, "rht_dw")
        self.disabled_quantizers = sorted(pick(disabled_quantizers, "disabled_quantizers"))
        self.hadamard_size = hadamard_size
        self.scale_rounding = scale_rounding
        self.strict_unbiased = strict_unbiased
        self.modules_to_not_convert = modules_to_not_convert
        self.weights = weights
        self.save_packed_activations = save_packed_activations
        self.gemm = gemm
        self.seed = seed
        self.out_control = _nested(OutControlConfig, out_control, preset["out_control"], "out_control")
        self.osci_reset = _nested(OsciResetConfig, osci_reset, preset["osci_reset"], "osci_reset")
        self.validate()

    def validate(self) -> None:
        """Check every field.

        Raises:
            ValueError: Naming the field, its value and what is allowed.
        """
        size = self.outer_block_size
        valid = _is_integer(size) and (size == -1 or (size > 0 and size % 16 == 0))
        _require(valid, "outer_block_size", size, "-1 or a positive multiple of 16")
        group = self.hadamard_size
        power = _is_integer(group) and 2 <= group <= 128 and not group & (group - 1)
        _require(power, "hadamard_size", group, "a power of two in [2, 128]")
        _require(self.scale_rounding in ("nearest", "up"), "scale_rounding", self.scale_rounding, "'nearest' or 'up'")
        _require(self.weights in ("master", "packed"), "weights", self.weights, "'master' or 'packed'")
        _require(self.gemm in ("fp32", "bf16", "native"), "gemm", self.gemm, "'fp32', 'bf16' or 'native'")
        _require(_is_integer(self.seed), "seed", self.seed, "an integer")
        off = self.disabled_quantizers
        _require(set(off) <= set(QUANTIZERS), "disabled_quantizers", off, f"a list of {QUANTIZERS}")
        if self.gemm == "native":
            _require(size == -1, "outer_block_size", size, "-1 with gemm='native' (one outer scale per tensor)")
            if not native_available():
                raise ValueError(
                    "gemm must be 'fp32' or 'bf16' here: 'native' needs FP4 tensor cores (CUDA capability ≥ (10, 0))"
                )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Read a saved config. A checkpoint trained on FP4 tensor cores also loads without them, emulated, with a
        warning.

        Args:
            config_dict (`dict[str, Any]`): What `to_dict` gave.
            return_unused_kwargs (`bool`, defaults to `False`): Also return what of `kwargs` is no field.
            **kwargs: Fields to change.

        Returns:
            `TetraJetConfig`: The config, and the unused keyword arguments if asked for.
        """
        if config_dict.get("gemm") == "native" and not native_available():
            warnings.warn("gemm='native' needs FP4 tensor cores; the products are emulated here", stacklevel=2)
            config_dict = {**config_dict, "gemm": "fp32"}
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)

    @property
    def enabled(self) -> bool:
        """Whether anything is quantized at all (`recipe="bf16"` is not)."""
        return set(self.disabled_quantizers) != set(QUANTIZERS)

    def is_on(self, quantizer: str) -> bool:
        """Whether a quantizer is switched on.

        Args:
            quantizer (`str`): `"Q1"` … `"Q6"`.

        Returns:
            `bool`: `True` when it quantizes.
        """
        return quantizer not in self.disabled_quantizers

    def to_dict(self) -> dict[str, Any]:
        """Plain dict from which the constructor builds an equal config.

        Returns:
            `dict[str, Any]`: Fields, the nested configs as dicts.
        """
        values = {name: list(v) if isinstance(v, list) else v for name, v in self.__dict__.items()}
        values["out_control"] = dataclasses.asdict(self.out_control)
        values["osci_reset"] = dataclasses.asdict(self.osci_reset)
        return values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TetraJetConfig) and self.to_dict() == other.to_dict()

    __hash__ = None

    def replace(self, **changes: Any) -> "TetraJetConfig":
        """A copy with some fields changed; a change of `recipe` also brings that preset's values.

        Args:
            **changes: Fields of the constructor; nested configs may be dicts of the fields to change.

        Returns:
            `TetraJetConfig`: The new config.

        Raises:
            ValueError: If a name is not a field, or a value is not allowed.
        """
        values = self.to_dict()
        unknown = sorted(set(changes) - set(values))
        if unknown:
            raise ValueError(f"{unknown} must be fields of TetraJetConfig: {sorted(values)}")
        nested = {"out_control": self.out_control, "osci_reset": self.osci_reset}
        if "recipe" in changes:
            _require(changes["recipe"] in RECIPES, "recipe", changes["recipe"], f"one of {sorted(RECIPES)}")
            preset = RECIPES[changes["recipe"]]
            values.update({name: v for name, v in preset.items() if name not in nested})
            for name in nested:
                values[name] = {**values[name], **preset[name]}
        for name, value in changes.items():
            if name in nested and isinstance(value, dict):
                values[name] = {**values[name], **value}
            else:
                values[name] = value
        return TetraJetConfig(**values)
