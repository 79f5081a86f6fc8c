"""Packing of a quantized layer: its forward weight as codes and scales, in place of the master weight."""

from typing import Any

import torch
from torch import nn

from .formats import from_mxfp8, to_mxfp8
from .functional import ForwardWeight, quantize_weight, quantize_weight_codes
from .quantize import NVFP4Tensor

__all__ = ["OUTLIER_BUFFERS", "PACKED_BUFFERS", "PackableLayer"]

PACKED_BUFFERS = ("weight_packed", "weight_scale", "weight_outer_scale", "weight_hi", "weight_hi_scale")
OUTLIER_BUFFERS = ("hi_idx", "lo_idx", "selected")


class _ReadOnlyWeight(torch.Tensor):
    """Dequantized numbers of a packed layer; writing to them (merging an adapter) would be lost, so it is refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise ValueError("packed 4-bit weights cannot be changed: load the master checkpoint to merge an adapter")


class PackableLayer(nn.Module):
    """The weight side of a quantized layer, in both modes. The attributes are those of `TetraJetLayer`."""

    def quantized_weight(self) -> ForwardWeight:
        """The weight of the forward pass, Q2(W), or Q2(W_lo) and M(W_hi).

        Returns:
            `ForwardWeight`: FP32 values.
        """
        if self.mode == "master":
            return quantize_weight(self.matrix(), self.recipe, self.outliers)
        out_features, in_features = self.size()
        lo_features = self.lo_idx.numel() if self._has_outliers else in_features
        lo = NVFP4Tensor(
            self.weight_packed,
            self.weight_scale,
            self.weight_outer_scale,
            torch.Size((out_features, lo_features)),
            self.recipe.outer_block_size,
            True,
        ).dequantize()
        return ForwardWeight(lo, from_mxfp8(self.weight_hi, self.weight_hi_scale) if self._has_outliers else None)

    def dequantized_matrix(self) -> torch.Tensor:
        """The weight of the forward pass in the original channel order.

        Returns:
            `torch.Tensor`: FP32, `(out, in)`.
        """
        if not self.recipe.enabled:
            return self.matrix().detach().to(torch.float32)
        w = self.quantized_weight()
        return w.lo if w.hi is None else self.outliers.merge(w.lo, w.hi)

    def packed_tensors(self, name: str = "layer") -> dict[str, torch.Tensor]:
        """Codes and scales of the forward weight.

        Args:
            name (`str`, defaults to `"layer"`): Name of the layer, for messages.

        Returns:
            `dict[str, torch.Tensor]`: `weight_packed`, `weight_scale`, `weight_outer_scale`, and `weight_hi`,
            `weight_hi_scale` of outlier channels.

        Raises:
            ValueError: If the number of input channels is odd, or the weight is not finite.
        """
        if self.mode == "packed":
            return {key: self._buffers[key] for key in PACKED_BUFFERS if key in self._buffers}
        if not self.recipe.is_on("Q2"):
            raise ValueError(f"{name}: recipe {self.recipe.recipe!r} leaves the weight unquantized, nothing to pack")
        w = self.matrix().detach().to(torch.float32)
        if not bool(w.isfinite().all()):
            raise ValueError(f"{name}.weight holds {int((~w.isfinite()).sum())} non-finite numbers, nothing packed")
        outliers = self.outliers
        lo, hi = outliers.split(w) if outliers is not None else (w, None)
        if lo.shape[1] % 2:
            raise ValueError(f"{name}.weight_packed: an even number of channels is needed, got {lo.shape[1]}")
        q = quantize_weight_codes(lo, self.recipe)
        tensors = {"weight_packed": q.codes, "weight_scale": q.inner, "weight_outer_scale": q.outer}
        if hi is not None:
            tensors["weight_hi"], tensors["weight_hi_scale"] = to_mxfp8(hi)
        return tensors

    def packed_shapes(self, name: str = "layer") -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the packed tensors of this layer under its recipe.

        Args:
            name (`str`, defaults to `"layer"`): Name of the layer, for messages.

        Returns:
            `dict`: Name → (shape, dtype).

        Raises:
            ValueError: If the number of packed channels is odd.
        """
        n, k = self.size()
        oc = self.recipe.out_control
        hi = oc.num_outliers(k) if oc.selected else 0
        lo, outer = k - hi, self.recipe.outer_block_size
        if lo % 2:
            raise ValueError(f"{name}.weight_packed: an even number of channels is needed, got {lo}")
        outer_columns = -(-lo // outer)
        shapes = {
            "weight_packed": ((n, lo // 2), torch.uint8),
            "weight_scale": ((n, -(-lo // 16)), torch.float8_e4m3fn),
            "weight_outer_scale": ((1,) if outer == -1 else (n, outer_columns), torch.float32),
        }
        if hi:
            shapes["weight_hi"] = ((n, hi), torch.float8_e4m3fn)
            shapes["weight_hi_scale"] = ((n, -(-hi // 32)), torch.uint8)
        return shapes

    def pack_(self, name: str = "layer", empty: bool = False) -> None:
        """Replace the weight by its codes and scales.

        Args:
            name (`str`, defaults to `"layer"`): Name of the layer, for messages.
            empty (`bool`, defaults to `False`): Only make room for tensors that will be loaded.
        """
        if self.mode == "packed":
            return
        if empty:
            tensors = {
                key: torch.empty(shape, dtype=torch.float32 if dtype.is_floating_point else dtype, device="meta").to(
                    dtype
                )
                for key, (shape, dtype) in self.packed_shapes(name).items()
            }
            keep = "weight_hi" in tensors
        else:
            tensors = self.packed_tensors(name)
            keep = self._has_outliers
        self._has_outliers = keep
        if not keep:
            for key in OUTLIER_BUFFERS:
                self._buffers.pop(key, None)
        del self.weight
        self.mode = "packed"
        for key, value in tensors.items():
            self.register_buffer(key, value)

    def __getattr__(self, name: str) -> Any:
        # a packed layer has no weight parameter; whoever asks (adapters, reports) gets the numbers it stands for
        if name == "weight" and self.__dict__.get("mode") == "packed":
            return self._from_matrix(self.dequantized_matrix()).as_subclass(_ReadOnlyWeight)
        return super().__getattr__(name)

    def _from_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix

    def _apply(self, fn, recurse: bool = True):
        """Move the packed scales as plain bytes, so that `.half()` or `.to(dtype)` never rounds them."""
        protected = {"weight_scale": torch.uint8, "weight_hi": torch.uint8, "weight_outer_scale": torch.int32}
        if self.__dict__.get("mode") != "packed":
            return super()._apply(fn, recurse)
        original = {key: self._buffers[key] for key in protected if key in self._buffers}
        for key, value in original.items():
            self._buffers[key] = value.view(protected[key])
        super()._apply(fn, recurse)
        for key, value in original.items():
            self._buffers[key] = self._buffers[key].view(value.dtype)
        return self
