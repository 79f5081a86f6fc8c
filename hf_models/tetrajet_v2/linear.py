"""`TetraJetLinear`: an `nn.Linear` whose three matrix products run on quantized operands.

Two modes. "master" holds the ordinary trainable weight. "packed" holds codes and scales only (0.594 bytes per weight),
gives bit for bit the same output, and passes gradients on to its input, for adapters.
"""

from typing import Any

import torch
from torch import nn

from .configuration_tetrajet_v2 import TetraJetConfig
from .functional import Outliers, fqt_linear
from .packing import OUTLIER_BUFFERS, PackableLayer
from .rng import TetraJetState

__all__ = ["TetraJetLayer", "TetraJetLinear", "iter_layers"]


class TetraJetLayer(PackableLayer):
    """What the quantized layers share: the recipe, the counters, the outlier channels and packing.

    A subclass says how its weight looks as a matrix `(out, in)`.

    Attributes:
        recipe (`TetraJetConfig`): What is quantized and how.
        state (`TetraJetState`): Counters shared with the other layers of the model.
        layer_id (`int`): Number of the layer, part of the noise's key.
        mode (`str`): `"master"` or `"packed"`.
        recorder (`Callable` or `None`): Called with every training input `(T, K)`; OutControl sets it while it
            records.
    """

    def _init_layer(self, recipe: TetraJetConfig, state: TetraJetState | None, layer_id: int) -> None:
        self.recipe = recipe
        self.state = TetraJetState(recipe.seed) if state is None else state
        self.layer_id = layer_id
        self.mode = "master"
        self.recorder = None
        self._has_outliers = False
        self.configure(recipe)

    def matrix(self) -> torch.Tensor:
        """The weight as a matrix.

        Returns:
            `torch.Tensor`: `(out, in)`; a view of the parameter in master mode.
        """
        return self.weight

    def size(self) -> tuple[int, int]:
        """Shape of the weight matrix.

        Returns:
            `tuple[int, int]`: `(out, in)`.
        """
        return self.out_features, self.in_features

    # ------------------------------------------------------------------------------------------------ configuration

    def configure(self, recipe: TetraJetConfig) -> None:
        """Change the recipe.

        Args:
            recipe (`TetraJetConfig`): The new recipe.

        Raises:
            ValueError: If the layer is packed and the recipe would need another packing.
        """
        if self.mode == "packed":
            old, new = self.recipe, recipe
            same = all(
                getattr(old, name) == getattr(new, name)
                for name in ("outer_block_size", "weight_block_2d", "scale_rounding")
            )
            if not same or not new.is_on("Q2") or old.out_control != new.out_control:
                raise ValueError("a packed layer keeps its weight format: load the master weights to change it")
        self.recipe = recipe
        if self.mode == "packed":
            return
        k = recipe.out_control.num_outliers(self.size()[1])
        current = self._buffers.get("hi_idx")
        if k and (current is None or current.numel() != k):
            self._register_outliers(k)
        elif not k and current is not None and recipe.enabled and not recipe.out_control.enabled:
            for name in OUTLIER_BUFFERS:
                delattr(self, name)
            self._has_outliers = False

    def _register_outliers(self, k: int) -> None:
        device = next(iter([*self.parameters(recurse=False), *self.buffers(recurse=False)])).device
        index = torch.arange(self.size()[1], dtype=torch.int32, device=device)
        self.register_buffer("hi_idx", index[:k].clone())
        self.register_buffer("lo_idx", index[k:].clone())
        self.register_buffer("selected", torch.zeros((), dtype=torch.bool, device=device))
        self._has_outliers = False

    # --------------------------------------------------------------------------------------------- outlier channels

    @property
    def outliers(self) -> Outliers | None:
        """Split of the input channels, or `None` before selection and without OutControl."""
        return Outliers(self.hi_idx, self.lo_idx) if self._has_outliers and self.recipe.enabled else None

    def select(self, order: torch.Tensor) -> None:
        """Fix the outlier channels.

        Args:
            order (`torch.Tensor`): All channels, the most important first; the first k become outlier channels.
        """
        order = order.to(device=self.hi_idx.device, dtype=torch.int32)
        k = self.hi_idx.numel()
        with torch.no_grad():
            self.hi_idx.copy_(order[:k])
            self.lo_idx.copy_(order[k:])
            self.selected.fill_(True)
        self._has_outliers = True

    def refresh(self, name: str = "layer", loaded: bool = True) -> None:
        """Re-read the buffers after a checkpoint was loaded into them.

        Args:
            name (`str`, defaults to `"layer"`): Name of the layer, for messages.
            loaded (`bool`, defaults to `True`): `False` if the checkpoint had no outlier buffers: start unselected.

        Raises:
            ValueError: If the indices are no permutation of the channels, or a packed scale is NaN.
        """
        if "selected" in self._buffers and not self.selected.is_meta:
            if not loaded and self.mode == "master":
                self._register_outliers(self.hi_idx.numel())
            self._has_outliers = bool(self.selected) or self.mode == "packed"
            if self._has_outliers:
                channels = torch.cat([self.hi_idx, self.lo_idx]).sort().values.tolist()
                if channels != list(range(self.size()[1])):
                    raise ValueError(f"{name}.hi_idx and {name}.lo_idx are not a permutation of the input channels")
        if self.mode == "packed" and not self.weight_scale.is_meta:
            if bool((self.weight_scale.view(torch.uint8) & 0x7F == 0x7F).any()):
                raise ValueError(f"{name}.weight_scale holds a NaN byte")
            if not bool(self.weight_outer_scale.isfinite().all()):
                raise ValueError(f"{name}.weight_outer_scale is not finite")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}selected" in state_dict or self.mode == "packed":
            self.refresh(prefix.removesuffix("."))

    # ------------------------------------------------------------------------------------------------------ forward

    def apply_quantized(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output.

        Args:
            x (`torch.Tensor`): Input `(..., in)`.

        Returns:
            `torch.Tensor`: `(..., out)`.
        """
        if self.recorder is not None and self.training and torch._C._current_graph_task_id() == -1:
            self.recorder(x.detach())  # not in a backward pass: a checkpointed layer counts its input once
        if self.mode == "packed":
            return fqt_linear(
                x, None, self.bias, self.recipe, self.state, self.layer_id, self.outliers, self.quantized_weight
            )
        return fqt_linear(x, self.matrix(), self.bias, self.recipe, self.state, self.layer_id, self.outliers)


class TetraJetLinear(TetraJetLayer, nn.Linear):
    """NVFP4 fully-quantized linear layer.

    Args:
        in_features (`int`): K, input channels.
        out_features (`int`): N, output channels.
        bias (`bool`, defaults to `True`): Add a bias, in full precision.
        device (`torch.device`, *optional*): Device of the parameters.
        dtype (`torch.dtype`, *optional*): Dtype of the parameters; FP32 is recommended for master weights.
        recipe (`TetraJetConfig` or `str`, defaults to `"tetrajet_v2"`): What is quantized and how.
        state (`TetraJetState`, *optional*): Counters shared with other layers.
        layer_id (`int`, defaults to 0): Number of the layer; must differ between the layers of a model.

    Example:
        ```python
        >>> import torch
        >>> from hf_models.tetrajet_v2 import TetraJetLinear
        >>> layer = TetraJetLinear(64, 32, recipe="tetrajet_v2_base")
        >>> layer(torch.randn(8, 64)).sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([32, 64])

        ```
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: TetraJetConfig | str = "tetrajet_v2",
        state: TetraJetState | None = None,
        layer_id: int = 0,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self._init_layer(TetraJetConfig(recipe) if isinstance(recipe, str) else recipe, state, layer_id)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, recipe: TetraJetConfig, state: TetraJetState | None = None, layer_id: int = 0
    ) -> "TetraJetLinear":
        """Quantized layer that takes over the parameters of a plain one (the same objects, so ties stay ties).

        Args:
            linear (`nn.Linear`): The layer.
            recipe (`TetraJetConfig`): What is quantized and how.
            state (`TetraJetState`, *optional*): Counters shared with other layers.
            layer_id (`int`, defaults to 0): Number of the layer.

        Returns:
            `TetraJetLinear`: The new layer.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.training = linear.training
        layer._init_layer(recipe, state, layer_id)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized linear map.

        Args:
            x (`torch.Tensor`): Input `(..., in_features)`.

        Returns:
            `torch.Tensor`: `(..., out_features)`.
        """
        return self.apply_quantized(x)

    def extra_repr(self) -> str:
        """Text in `print(model)`.

        Returns:
            `str`: Sizes, recipe and mode.
        """
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{text}, recipe={self.recipe.recipe}, mode={self.mode}"


def iter_layers(model: nn.Module):
    """All quantized layers of a model.

    Args:
        model (`nn.Module`): The model.

    Yields:
        `tuple[str, TetraJetLayer]`: Name and layer, in the model's order.
    """
    for name, module in model.named_modules():
        if isinstance(module, TetraJetLayer):
            yield name, module
