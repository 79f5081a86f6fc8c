"""The linear layer of TetraJet-v2: three matrix products on six quantized operands (arXiv 2510.27527).

    X [T, K], W [N, K], dY [T, N];  blocks always lie along the contraction dim

    Xq = Q1(X)   Wq = Q2(W)               Y  = Xq Wqᵀ (+ bias)
    dX = Q3(dY·H_a) · Q4(Wqᵀ·H_a)ᵀ        contraction over N
    dW = Q5(dYᵀ·H_b) · Q6(Xqᵀ·H_b)ᵀ       contraction over T

Q1, Q2 round to nearest; Q3 … Q6 stochastically with independent noise. Q4 and Q6 act on the quantized forward
operands, so that E[dX] = dY·Wq and E[dW] = dYᵀ·Xq: the straight-through gradient of the forward pass that was really
run.

With outlier channels (OutControl) the columns split: X = [X_lo | X_hi], M is MXFP8:

    Y     = Q1(X_lo) Q2(W_lo)ᵀ + M(X_hi) M(W_hi)ᵀ
    dX    as above with W̃ = [Q2(W_lo) | M(W_hi)] in the original channel order
    dW_lo as above with Q1(X_lo);   dW_hi = M(dYᵀ) · M(M(X_hi)ᵀ)ᵀ
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .blocks import INNER, Workspace
from .formats import from_mxfp8, mxfp8_fake_quant, to_mxfp8
from .hadamard import block_rht
from .native import native_available, native_matmul
from .quantize import NVFP4Tensor, nvfp4_fake_quant, nvfp4_quantize, nvfp4_quantize_2d
from .rng import TetraJetState, random_signs, stream_generator

__all__ = ["ForwardWeight", "Outliers", "fqt_linear", "q2", "quantize_weight", "quantize_weight_codes"]

# operand numbers of the random streams
_Q3, _Q4, _Q5, _Q6, _SIGNS_A, _SIGNS_B = 3, 4, 5, 6, 7, 8


@dataclass
class Outliers:
    """Split of a layer's input channels.

    Args:
        hi (`torch.Tensor`): Indices of the outlier channels (MXFP8), int32.
        lo (`torch.Tensor`): Indices of the other channels (NVFP4), by falling norm, int32.
    """

    hi: torch.Tensor
    lo: torch.Tensor

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the columns.

        Args:
            x (`torch.Tensor`): Matrix `(rows, K)`.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: x_lo and x_hi.
        """
        return x.index_select(1, self.lo), x.index_select(1, self.hi)

    def merge(self, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        """Undo `split`.

        Args:
            lo (`torch.Tensor`): Columns of the `lo` channels.
            hi (`torch.Tensor`): Columns of the `hi` channels.

        Returns:
            `torch.Tensor`: Matrix in the original channel order.
        """
        out = lo.new_empty(lo.shape[0], lo.shape[1] + hi.shape[1])
        out[:, self.lo.long()] = lo
        out[:, self.hi.long()] = hi
        return out


@dataclass
class ForwardWeight:
    """The quantized weight of the forward pass: Q2(W), or Q2(W_lo) and M(W_hi). FP32."""

    lo: torch.Tensor
    hi: torch.Tensor | None = None


def quantize_weight(weight: torch.Tensor, recipe, outliers: Outliers | None = None) -> ForwardWeight:
    """Q2 (and M) of a weight, exactly as the forward pass applies it.

    Args:
        weight (`torch.Tensor`): Master weight `(N, K)`.
        recipe (`TetraJetConfig`): The recipe.
        outliers (`Outliers`, *optional*): Split of the channels.

    Returns:
        `ForwardWeight`: FP32 values on the grid.
    """
    w = weight.detach().to(torch.float32)
    if outliers is None:
        return ForwardWeight(q2(w, recipe))
    lo, hi = outliers.split(w)
    return ForwardWeight(q2(lo, recipe), mxfp8_fake_quant(hi) if recipe.is_on("Q2") else hi)


def q2(w: torch.Tensor, recipe) -> torch.Tensor:
    """Q2 of a matrix whose outlier channels are already gone.

    Args:
        w (`torch.Tensor`): FP32 matrix `(N, K_lo)`.
        recipe (`TetraJetConfig`): The recipe.

    Returns:
        `torch.Tensor`: FP32 values on the grid.
    """
    if not recipe.is_on("Q2"):
        return w
    return nvfp4_fake_quant(
        w, recipe.outer_block_size, "nearest", recipe.scale_rounding, tile_2d=recipe.weight_block_2d
    )


def quantize_weight_codes(w: torch.Tensor, recipe) -> NVFP4Tensor:
    """Codes and scales of Q2(w).

    Args:
        w (`torch.Tensor`): FP32 matrix.
        recipe (`TetraJetConfig`): The recipe.

    Returns:
        `NVFP4Tensor`: Packed tensor.
    """
    quantize = nvfp4_quantize_2d if recipe.weight_block_2d else nvfp4_quantize
    return quantize(w, recipe.outer_block_size, "nearest", recipe.scale_rounding).pack()


class _Backward:
    """The four quantizers of one backward call, with the streams of this layer, step and rank."""

    def __init__(self, recipe, key: tuple[int, int, int, int, int], device: torch.device) -> None:
        self.recipe, self.key, self.device = recipe, key, device
        self.scale_rounding = "up" if recipe.strict_unbiased else recipe.scale_rounding
        self.group = max(INNER, recipe.hadamard_size)
        self.workspace = Workspace()

    def generator(self, operand: int) -> torch.Generator:
        seed, step, micro, layer, rank = self.key
        return stream_generator(seed, step, micro, layer, operand, rank, self.device)

    def signs(self, operand: int) -> torch.Tensor:
        return random_signs(self.recipe.hadamard_size, self.generator(operand), self.device)

    def pad(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Zero-pad the contraction dim to whole groups."""
        missing = -x.shape[dim] % self.group
        return x if not missing else F.pad(x, (0, missing) if dim == -1 else (0, 0, 0, missing))

    def quantize(
        self, x: torch.Tensor, dim: int, operand: int, stochastic: bool, signs: torch.Tensor | None
    ) -> "torch.Tensor | NVFP4Tensor":
        """Q_operand(x·H) with blocks along `dim`; for the native back end as codes, the contraction dim last."""
        given, x = x, self.pad(x, dim)
        if signs is not None:
            x = block_rht(x, signs, dim)
        if not self.recipe.is_on(f"Q{operand}"):
            return x
        rounding = "stochastic" if stochastic else "nearest"
        generator = self.generator(operand) if stochastic else None
        if self.recipe.gemm == "native":
            return nvfp4_quantize(x if dim == -1 else x.t(), -1, rounding, self.scale_rounding, generator)
        return nvfp4_fake_quant(
            x,
            self.recipe.outer_block_size,
            rounding,
            self.scale_rounding,
            generator,
            dim=dim,
            workspace=self.workspace,
            inplace=x is not given,  # padded or transformed: a copy of our own
        )

    def input_gradient(self, dy: torch.Tensor, weight: torch.Tensor, is_2d: bool) -> torch.Tensor:
        """dX = Q3(dY·H_a) · Q4(Wᵀ·H_a)ᵀ, `weight` [N, K] being Q2(W) when aligned."""
        r = self.recipe
        signs = self.signs(_SIGNS_A) if r.rht_dx else None
        left = self.quantize(dy, -1, _Q3, r.stochastic_grad, signs)  # (T, N)
        if is_2d and signs is None:  # 16×16 blocks: the transposed weight has the same codes
            right = self.pad(weight, 0)
            right = nvfp4_quantize_2d(right.t()) if r.gemm == "native" else right
        else:
            right = self.quantize(weight, 0, _Q4, r.stochastic_weight, signs)  # (N, K), blocks along N
        return _product(left, right, r)

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dW = Q5(dYᵀ·H_b) · Q6(Xᵀ·H_b)ᵀ, `x` [T, K] being Q1(X) when aligned."""
        r = self.recipe
        signs = self.signs(_SIGNS_B) if r.rht_dw else None
        left = self.quantize(dy, 0, _Q5, r.stochastic_grad, signs)  # (T, N), blocks along T
        right = self.quantize(x, 0, _Q6, r.stochastic_act, signs)  # (T, K), blocks along T
        return _product(left if isinstance(left, NVFP4Tensor) else left.t(), right, r)

    def outlier_weight_gradient(self, dy: torch.Tensor, x_hi: torch.Tensor) -> torch.Tensor:
        """dW_hi = M(dYᵀ) · M(X_hiᵀ)ᵀ, nearest, no transform."""
        left = mxfp8_fake_quant(dy, 0) if self.recipe.is_on("Q5") else dy
        right = mxfp8_fake_quant(x_hi, 0) if self.recipe.is_on("Q6") else x_hi
        return _matmul(left.t(), right, self.recipe)


def _matmul(a: torch.Tensor, b: torch.Tensor, recipe) -> torch.Tensor:
    """a @ b of dequantized operands, FP32 accumulation and result.

    Rows and columns are padded too: a BLAS may add up in another order for another shape, and the result of a layer
    must not depend on whether its caller pads.
    """
    rows, columns = a.shape[0], b.shape[1]
    if rows % INNER:
        a = F.pad(a, (0, 0, 0, -rows % INNER))
    if columns % INNER:
        b = F.pad(b, (0, -columns % INNER))
    if recipe.gemm == "fp32":
        y = a @ b
    elif a.is_cuda:
        y = torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)
    else:
        y = a.to(torch.bfloat16).to(torch.float32) @ b.to(torch.bfloat16).to(torch.float32)
    return y if y.shape == (rows, columns) else y[:rows, :columns].contiguous()


def _product(a: "torch.Tensor | NVFP4Tensor", b: "torch.Tensor | NVFP4Tensor", recipe) -> torch.Tensor:
    """Product of two operands. Codes have the contraction dim last; a plain `b` has it first."""
    if isinstance(a, NVFP4Tensor) and isinstance(b, NVFP4Tensor):
        return native_matmul(a, b)
    # one of the two quantizers is switched off: emulate
    a = a.dequantize() if isinstance(a, NVFP4Tensor) else a
    b = b.dequantize().t() if isinstance(b, NVFP4Tensor) else b
    return _matmul(a, b, recipe)


def _forward_product(x: torch.Tensor, weight: torch.Tensor, recipe) -> torch.Tensor:
    """Q1(x) · wᵀ, with the weight already on its grid (quantizing it again gives the same codes)."""
    if recipe.gemm == "native" and recipe.is_on("Q1") and recipe.is_on("Q2"):
        quantize = nvfp4_quantize_2d if recipe.weight_block_2d else nvfp4_quantize
        q = nvfp4_quantize(x, -1, "nearest", recipe.scale_rounding)
        return native_matmul(q, quantize(weight, -1, "nearest", recipe.scale_rounding))
    return _matmul(_pad_last(_q1(x, recipe)), _pad_last(weight).t(), recipe)


def _q1(x: torch.Tensor, recipe) -> torch.Tensor:
    if not recipe.is_on("Q1"):
        return x
    return nvfp4_fake_quant(x, recipe.outer_block_size, "nearest", recipe.scale_rounding)


def _m1(x: torch.Tensor, recipe) -> torch.Tensor:
    return mxfp8_fake_quant(x) if recipe.is_on("Q1") else x


def _pad_last(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[-1] % INNER
    return F.pad(x, (0, missing)) if missing else x


def _pack_input(x: torch.Tensor, recipe, outliers: Outliers | None) -> list[torch.Tensor]:
    """Codes and scales of Q1(X_lo), and of M(X_hi)."""
    lo, hi = outliers.split(x) if outliers is not None else (x, None)
    q = nvfp4_quantize(lo, recipe.outer_block_size, "nearest", recipe.scale_rounding).pack()
    return [q.codes, q.inner, q.outer, *(() if hi is None else to_mxfp8(hi))]


def _unpack_input(
    saved: tuple[torch.Tensor, ...], shape: torch.Size, recipe
) -> tuple[torch.Tensor, torch.Tensor | None]:
    codes, inner, outer, *hi = saved
    q = NVFP4Tensor(codes, inner, outer, shape, recipe.outer_block_size, True)
    return q.dequantize(), from_mxfp8(*hi) if hi else None


class _FQTLinear(torch.autograd.Function):
    """Y = Xq Wqᵀ + bias with the quantized gradients above.

    Saved for the backward pass: X and W as an `nn.Linear` saves them (Q1, Q2 are repeated), or X as codes and scales.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, recipe, key, outliers, frozen):
        ctx.recipe, ctx.key, ctx.outliers, ctx.frozen = recipe, key, outliers, frozen
        ctx.x_dtype, ctx.x_shape = x.dtype, x.shape
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        device = x.device.type
        out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        x2 = x.reshape(-1, x.shape[-1])
        with torch.autocast(device, enabled=False):
            xf = x2.to(torch.float32)
            w = quantize_weight(weight, recipe, outliers) if frozen is None else frozen()
            lo, hi = outliers.split(xf) if outliers is not None else (xf, None)
            y = _forward_product(lo, w.lo, recipe)
            if hi is not None:
                y += _matmul(_m1(hi, recipe), w.hi.t(), recipe)
            if bias is not None:
                y += bias.to(torch.float32)
            packed = recipe.save_packed_activations and recipe.is_on("Q1") and recipe.align_backward
            if packed and ctx.needs_input_grad[1]:
                saved = _pack_input(xf, recipe, outliers)
                ctx.packed_shape = lo.shape
            else:
                saved = [x2] if ctx.needs_input_grad[1] else []
                ctx.packed_shape = None
        ctx.save_for_backward(weight, *saved)
        return y.to(out_dtype).view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        recipe, outliers = ctx.recipe, ctx.outliers
        weight, *saved = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with torch.autocast(grad.device.type, enabled=False):
            dy = grad.reshape(-1, grad.shape[-1]).to(torch.float32)  # (T, N)
            quantizers = _Backward(recipe, ctx.key, grad.device)
            if need_x:
                if ctx.frozen is None and not recipe.align_backward and not recipe.weight_block_2d:
                    w = weight.to(torch.float32)
                else:
                    q = quantize_weight(weight, recipe, outliers) if ctx.frozen is None else ctx.frozen()
                    w = q.lo if q.hi is None else outliers.merge(q.lo, q.hi)  # W̃
                is_2d = recipe.weight_block_2d and outliers is None and recipe.is_on("Q2")
                dx = quantizers.input_gradient(dy, w, is_2d).to(ctx.x_dtype).view(ctx.x_shape)
            if need_w:
                lo, hi = _saved_input(saved, ctx.packed_shape, recipe, outliers)
                dw = quantizers.weight_gradient(dy, lo)
                if hi is not None:
                    dw = outliers.merge(dw, quantizers.outlier_weight_gradient(dy, hi))
                dw = dw.to(ctx.weight_dtype)
            if need_b:
                db = dy.sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None


def _saved_input(saved, packed_shape, recipe, outliers) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward operands Q1(X_lo), M(X_hi) when aligned, else X itself."""
    if packed_shape is not None:
        return _unpack_input(saved, packed_shape, recipe)
    x = saved[0].to(torch.float32)
    lo, hi = outliers.split(x) if outliers is not None else (x, None)
    if not recipe.align_backward:
        return lo, hi
    return _q1(lo, recipe), None if hi is None else _m1(hi, recipe)


@torch.compiler.disable
def fqt_linear(
    x: torch.Tensor,
    w: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    recipe=None,
    state: TetraJetState | None = None,
    layer_id: int = 0,
    outliers: Outliers | None = None,
    frozen_weight=None,
) -> torch.Tensor:
    """Fully-quantized linear layer, a drop-in for `torch.nn.functional.linear`.

    Args:
        x (`torch.Tensor`): Input `(..., K)` of a real floating dtype; quantized in FP32.
        w (`torch.Tensor`): Master weight `(N, K)`; `None` with `frozen_weight`.
        bias (`torch.Tensor`, *optional*): Bias `(N,)`, added in full precision.
        recipe (`TetraJetConfig` or `str`, *optional*): What is quantized and how; default `"tetrajet_v2_base"`.
        state (`TetraJetState`, *optional*): Counters that key the noise of the backward pass.
        layer_id (`int`, defaults to 0): Number of the layer, part of the key.
        outliers (`Outliers`, *optional*): Channels kept in MXFP8.
        frozen_weight (`Callable`, *optional*): Gives the `ForwardWeight` of packed codes instead of `w`.

    Returns:
        `torch.Tensor`: `(..., N)`, in the autocast dtype if autocast is on, else in the dtype of `x`.

    Raises:
        TypeError: If `x` is complex or integer.
        ValueError: If shapes do not fit.
        RuntimeError: If `gemm="native"` and there are no FP4 tensor cores.
    """
    if recipe is None or isinstance(recipe, str):
        from .configuration_tetrajet_v2 import TetraJetConfig

        recipe = TetraJetConfig(recipe or "tetrajet_v2_base")
    if not x.is_floating_point():
        raise TypeError(f"x must be a real floating-point tensor, got {x.dtype}")
    if w is not None and x.shape[-1:] != w.shape[-1:]:
        raise ValueError(f"x has {x.shape[-1]} channels, the weight takes {w.shape[-1]}")
    if not recipe.enabled and w is not None:
        return F.linear(x, w, bias)
    if recipe.gemm == "native" and not native_available():
        raise RuntimeError("gemm='native' needs FP4 tensor cores: change it with set_recipe(model, gemm='fp32')")
    key = (state or TetraJetState(recipe.seed)).key(layer_id)
    return _FQTLinear.apply(x, w, bias, recipe, key, outliers, frozen_weight)
