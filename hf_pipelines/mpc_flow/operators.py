"""Measurement operators for images in [−1, 1], shape (B, C, H, W).

    >>> import torch
    >>> from hf_pipelines import operators
    >>> blur = operators.GaussianBlur(kernel_size=9, sigma=1.0)
    >>> y = blur.measure(torch.zeros(1, 1, 16, 16), noise_std=0.05, generator=torch.Generator().manual_seed(0))
    >>> y.shape
    torch.Size([1, 1, 16, 16])

A linear operator has its adjoint `At`, its proximal map `prox` and a back-projection `pinv`; a nonlinear one has `A`
and `pinv`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import SchedulerMixin  # noqa: F401  (the loader of diffusers looks for the base in this module)
from diffusers.configuration_utils import register_to_config

from hf_pipelines.mpc_flow.noise_mpc_flow import GaussianNoise, LaplaceNoise, PoissonNoise, Quantization
from hf_pipelines.mpc_flow.operator_base import (
    LinearOperator,
    NonlinearOperator,
    Operator,
    check_images,
    operator_from_config,
    preprocess,
)
from hf_pipelines.mpc_flow.operator_blur import GaussianBlur, MotionBlur

__all__ = [
    "HDR",
    "BoxInpaint",
    "Colorize",
    "Compose",
    "Denoise",
    "FreeformInpaint",
    "GaussianBlur",
    "GaussianNoise",
    "LaplaceNoise",
    "LinearOperator",
    "MotionBlur",
    "NonlinearBlur",
    "NonlinearOperator",
    "Operator",
    "PhaseRetrieval",
    "PoissonNoise",
    "Quantization",
    "RandomInpaint",
    "SuperResolution",
    "check_images",
    "operator_from_config",
    "preprocess",
]

MaskLike = torch.Tensor | list


class Denoise(LinearOperator):
    """The identity: y is the image plus noise."""

    @register_to_config
    def __init__(self):
        super().__init__()

    def A(self, x):
        """Return x."""
        return x

    def At(self, y):
        """Return y."""
        return y

    def prox(self, z, y, c):
        """Closed form (z + c y) / (1 + c)."""
        return (z + c * y) / (1 + c)

    def pinv(self, y):
        """Return y."""
        return y


class _MaskOperator(LinearOperator):
    """Observed pixels stay, missing ones become 0. The mask is 1 where a pixel is observed."""

    def mask(self, like: torch.Tensor) -> torch.Tensor:
        """The mask, broadcastable to `like` (B, C, H, W)."""
        raise NotImplementedError

    def A(self, x):
        """Blank the missing pixels."""
        return self.mask(x) * x

    def At(self, y):
        """The mask is its own adjoint."""
        return self.mask(y) * y

    def prox(self, z, y, c):
        """Closed form, pixel by pixel: (z + c m y) / (1 + c m)."""
        weight = c * self.mask(z)
        return (z + weight * y) / (1 + weight)

    def pinv(self, y):
        """Missing pixels stay mid-grey."""
        return self.At(y)


class BoxInpaint(_MaskOperator):
    """A square of pixels is missing.

    Args:
        size (`int`): Side of the square in pixels.
        centre (`tuple[int, int]`, *optional*): Row and column of its centre; the image's centre when `None`.
    """

    @register_to_config
    def __init__(self, size: int = 6, centre: tuple[int, int] | None = None):
        super().__init__()
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"`size` must be a non-negative integer, got {size!r}.")

    def mask(self, like):
        """0 in the square."""
        height, width = like.shape[-2:]
        row, column = self.config.centre or (height // 2, width // 2)
        top, left = row - self.config.size // 2, column - self.config.size // 2
        mask = like.new_ones(1, 1, height, width)
        mask[..., max(top, 0) : max(top + self.config.size, 0), max(left, 0) : max(left + self.config.size, 0)] = 0
        return mask


class RandomInpaint(_MaskOperator):
    """Each pixel is missing with probability `p`, all channels of it together.

    The masks are drawn once per shape from the operator's own seed, image by image, and kept: A, Aᵀ and every later
    call see the same ones, and image i has the same mask in any batch.

    Args:
        p (`float`): Probability that a pixel is missing.
        seed (`int`): Seed of the masks.
    """

    @register_to_config
    def __init__(self, p: float = 0.7, seed: int = 0):
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"`p` must lie in [0, 1], got {p!r}.")
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def mask(self, like):
        """One mask per image (B, 1, H, W)."""
        batch, _, height, width = like.shape
        key = (batch, height, width)
        if key not in self._masks:
            generator = torch.Generator().manual_seed(self.config.seed)
            self._masks[key] = (torch.rand(batch, 1, height, width, generator=generator) >= self.config.p).float()
        return self._masks[key].to(like)


class FreeformInpaint(_MaskOperator):
    """Any mask, or one mask per image.

    Args:
        mask (`torch.Tensor` or nested lists of shape `(H, W)`, `(1, H, W)` or `(B, 1, H, W)`):
            1 where a pixel is observed, 0 where it is missing. Saved as rows of "0" and "1".
    """

    @register_to_config
    def __init__(self, mask: MaskLike = ("1",)):
        super().__init__()
        rows = _mask_to_rows(mask)
        self.register_to_config(mask=rows)
        self._mask = torch.tensor([[[float(bit) for bit in row] for row in image] for image in rows])[:, None]

    def mask(self, like):
        """The given mask."""
        if self._mask.shape[-2:] != like.shape[-2:] or self._mask.shape[0] not in (1, like.shape[0]):
            raise ValueError(f"`mask` has shape {tuple(self._mask.shape)}, the images {tuple(like.shape)}.")
        return self._mask.to(like)


def _mask_to_rows(mask: MaskLike) -> list[list[str]]:
    """(B, H, W) masks as B lists of H strings of "0" and "1"; strings pass through."""
    if isinstance(mask, (list, tuple)) and mask and isinstance(mask[0], str):
        mask = [list(mask)]
    if isinstance(mask, (list, tuple)) and mask and isinstance(mask[0], (list, tuple)) and isinstance(mask[0][0], str):
        return [list(image) for image in mask]
    values = torch.as_tensor(mask).float()
    if values.ndim == 4 and values.shape[1] == 1:
        values = values[:, 0]
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or not bool(((values == 0) | (values == 1)).all()):
        raise ValueError(f"`mask` must hold 0 and 1 in shape (H, W) or (B, 1, H, W), got {tuple(values.shape)}.")
    return [["".join("1" if v else "0" for v in row) for row in image] for image in values.tolist()]


class SuperResolution(LinearOperator):
    """Lower resolution by a whole factor.

    Args:
        factor (`int`): Ratio of the sides.
        kind (`str`): `"subsample"` keeps every `factor`-th pixel, `"average"` takes block means, `"bicubic"` is the
            antialiased bicubic filter of torch.
    """

    @register_to_config
    def __init__(self, factor: int = 2, kind: str = "subsample"):
        super().__init__()
        if not isinstance(factor, int) or factor < 1:
            raise ValueError(f"`factor` must be a positive integer, got {factor!r}.")
        if kind not in ("subsample", "average", "bicubic"):
            raise ValueError(f"`kind` must be 'subsample', 'average' or 'bicubic', got {kind!r}.")

    def image_shape(self, y_shape):
        """`factor` times the sides of the measurement."""
        return (*y_shape[:-2], y_shape[-2] * self.config.factor, y_shape[-1] * self.config.factor)

    def A(self, x):
        """Shrink."""
        factor = self.config.factor
        if x.shape[-2] % factor or x.shape[-1] % factor:
            raise ValueError(f"`factor` {factor} does not divide the image sides {tuple(x.shape[-2:])}.")
        if self.config.kind == "subsample":
            return x[..., ::factor, ::factor]
        if self.config.kind == "average":
            return F.avg_pool2d(x, factor)
        size = (x.shape[-2] // factor, x.shape[-1] // factor)
        return F.interpolate(x, size, mode="bicubic", antialias=True, align_corners=False)

    def prox(self, z, y, c):
        """Closed form where A Aᵀ is a multiple of the identity, else conjugate gradients."""
        scale = {"subsample": 1.0, "average": 1 / self.config.factor**2}.get(self.config.kind)
        return super().prox(z, y, c) if scale is None else _prox_with_scaled_gram(self, z, y, c, scale)

    def pinv(self, y):
        """Enlarge by repeating pixels."""
        return y.repeat_interleave(self.config.factor, -2).repeat_interleave(self.config.factor, -1)


def _prox_with_scaled_gram(operator: LinearOperator, z, y, c: float, scale: float):
    """prox where A Aᵀ = scale · I: (I + c AᵀA)⁻¹ (z + c Aᵀy) = z + c/(1 + c scale) Aᵀ (y − A z)."""
    return z + c / (1 + c * scale) * operator.At(y - operator.A(z))


class Colorize(LinearOperator):
    """Only the luminance 0.299 R + 0.587 G + 0.114 B is seen."""

    weights = (0.299, 0.587, 0.114)

    @register_to_config
    def __init__(self):
        super().__init__()

    def image_shape(self, y_shape):
        """Three channels."""
        return (y_shape[0], 3, *y_shape[2:])

    def _weights(self, like):
        return torch.tensor(self.weights, dtype=like.dtype, device=like.device).view(1, 3, 1, 1)

    def A(self, x):
        """Weigh the channels, (B, 3, H, W) → (B, 1, H, W)."""
        if x.shape[1] != 3:
            raise ValueError(f"`x` must have 3 channels, got {x.shape[1]}.")
        return (self._weights(x) * x).sum(1, keepdim=True)

    def At(self, y):
        """Spread the luminance over the channels."""
        return self._weights(y) * y

    def prox(self, z, y, c):
        """Closed form: A Aᵀ = Σ w²."""
        return _prox_with_scaled_gram(self, z, y, c, sum(weight**2 for weight in self.weights))

    def pinv(self, y):
        """The grey image."""
        return y.expand(-1, 3, -1, -1)


class HDR(NonlinearOperator):
    """Overexposure: clip(2 x, −1, 1)."""

    @register_to_config
    def __init__(self):
        super().__init__()

    def A(self, x):
        """Double and clip."""
        return (2 * x).clamp(-1, 1)

    def pinv(self, y):
        """Halve."""
        return y / 2


class NonlinearBlur(NonlinearOperator):
    """tanh(2 · blur(x)): a smooth nonlinear blur that needs no network weights.

    Args:
        kernel_size (`int`): Side of the Gaussian kernel in pixels, odd.
        sigma (`float`): Standard deviation of the kernel in pixels.
    """

    @register_to_config
    def __init__(self, kernel_size: int = 9, sigma: float = 1.0):
        super().__init__()
        self._blur = GaussianBlur(kernel_size, sigma)

    def A(self, x):
        """Blur, double, squash."""
        return torch.tanh(2 * self._blur.A(x))

    def pinv(self, y):
        """Undo the squashing, not the blur."""
        return torch.atanh(y.clamp(-0.999, 0.999)) / 2


class PhaseRetrieval(NonlinearOperator):
    """Magnitudes of the Fourier transform of the zero-padded image (x + 1)/2, orthonormal scaling.

    Args:
        oversample (`float`): Ratio of the padded to the image's side.
    """

    measures_images = False

    @register_to_config
    def __init__(self, oversample: float = 2.0):
        super().__init__()
        if not oversample >= 1:
            raise ValueError(f"`oversample` must be at least 1, got {oversample!r}.")

    def _padded(self, side: int) -> int:
        return round(side * self.config.oversample)

    def image_shape(self, y_shape):
        """The measurement's sides divided by `oversample`."""
        return (*y_shape[:-2], *(round(side / self.config.oversample) for side in y_shape[-2:]))

    def A(self, x):
        """Fourier magnitudes."""
        extra = [self._padded(side) - side for side in x.shape[-2:]]
        padded = F.pad((x + 1) / 2, (0, extra[1], 0, extra[0]))
        spectrum = torch.fft.fft2(padded, norm="ortho")
        return torch.sqrt(spectrum.real**2 + spectrum.imag**2 + 1e-12)  # differentiable at 0

    def pinv(self, y):
        """The zero-phase image, scaled to [−1, 1]: a picture of the data, not an estimate."""
        height, width = self.image_shape(tuple(y.shape))[-2:]
        x = torch.fft.ifft2(y, norm="ortho").real[..., :height, :width]
        low, high = x.amin((-2, -1), keepdim=True), x.amax((-2, -1), keepdim=True)
        return 2 * (x - low) / (high - low).clamp_min(1e-12) - 1


class Compose(LinearOperator):
    """Several operators in a row; linear if all of them are.

    Args:
        operators (`list` of operators, or of their configs): Applied from first to last.
    """

    @register_to_config
    def __init__(self, operators: list[Any] = ()):
        super().__init__()
        if not operators:
            raise ValueError("`operators` must name at least one operator.")
        self.operators = [o if isinstance(o, Operator) else operator_from_config(dict(o)) for o in operators]
        configs = [
            {"_class_name": type(operator).__name__, **{k: v for k, v in operator.config.items() if k[0] != "_"}}
            for operator in self.operators
        ]
        self.register_to_config(operators=configs)

    @property
    def linear(self) -> bool:
        """Whether every part is linear."""
        return all(operator.linear for operator in self.operators)

    def image_shape(self, y_shape):
        """Through the parts, last to first."""
        for operator in reversed(self.operators):
            y_shape = operator.image_shape(y_shape)
        return y_shape

    def A(self, x):
        """First to last."""
        for operator in self.operators:
            x = operator.A(x)
        return x

    def At(self, y):
        """Adjoints, last to first."""
        for operator in reversed(self.operators):
            y = operator.At(y)
        return y

    def pinv(self, y):
        """Back-projections, last to first."""
        for operator in reversed(self.operators):
            y = operator.pinv(y)
        return y
