"""`TetraJetConv1D`: the quantized twin of transformers' `Conv1D` (GPT-2), a linear layer with a transposed weight."""

import torch
from transformers.pytorch_utils import Conv1D

from .configuration_tetrajet_v2 import TetraJetConfig
from .linear import TetraJetLayer
from .rng import TetraJetState

__all__ = ["TetraJetConv1D"]


class TetraJetConv1D(TetraJetLayer, Conv1D):
    """Quantized `Conv1D`: the weight is `(in, out)` and is quantized as its transpose.

    Args:
        nf (`int`): Output channels.
        nx (`int`): Input channels.
        recipe (`TetraJetConfig` or `str`, defaults to `"tetrajet_v2"`): What is quantized and how.
    """

    def __init__(self, nf: int, nx: int, recipe: TetraJetConfig | str = "tetrajet_v2") -> None:
        Conv1D.__init__(self, nf, nx)
        self._init_layer(TetraJetConfig(recipe) if isinstance(recipe, str) else recipe, None, 0)

    @classmethod
    def from_conv1d(
        cls, conv: Conv1D, recipe: TetraJetConfig, state: TetraJetState | None = None, layer_id: int = 0
    ) -> "TetraJetConv1D":
        """Quantized layer that takes over the parameters of a plain one.

        Args:
            conv (`Conv1D`): The layer.
            recipe (`TetraJetConfig`): What is quantized and how.
            state (`TetraJetState`, *optional*): Counters shared with other layers.
            layer_id (`int`, defaults to 0): Number of the layer.

        Returns:
            `TetraJetConv1D`: The new layer.
        """
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.nf, layer.nx = conv.nf, conv.nx
        layer.weight, layer.bias = conv.weight, conv.bias
        layer.training = conv.training
        layer._init_layer(recipe, state, layer_id)
        return layer

    @property
    def in_features(self) -> int:
        """Input channels."""
        return self.nx

    @property
    def out_features(self) -> int:
        """Output channels."""
        return self.nf

    def matrix(self) -> torch.Tensor:
        """The weight as a matrix.

        Returns:
            `torch.Tensor`: `(out, in)`, a transposed view.
        """
        return self.weight.t()

    def size(self) -> tuple[int, int]:
        """Shape of the weight matrix.

        Returns:
            `tuple[int, int]`: `(out, in)`.
        """
        return self.nf, self.nx

    def _from_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantized linear map.

        Args:
            x (`torch.Tensor`): Input `(..., in)`.

        Returns:
            `torch.Tensor`: `(..., out)`.
        """
        return self.apply_quantized(x)
