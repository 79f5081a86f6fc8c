"""What the control shall achieve: a data term Φ or any differentiable function of the images."""

from collections.abc import Callable
from typing import Any

import torch

from hf_pipelines.mpc_flow.noise_mpc_flow import GaussianNoise
from hf_pipelines.mpc_flow.operator_base import Operator

PHI_SCALES = ("sum", "noise", "mean")


class MeasurementObjective:
    """Φ(x) = ½‖A(x) − y‖² per image, or the data term of another noise model.

    Args:
        operator ([`Operator`]): The measurement operator A.
        y (`torch.Tensor`): The measurement; its first axis is the batch.
        noise (noise model, *optional*): Chooses the data term; Gaussian when `None`.
        noise_std (`float`, *optional*): σ_y, for `phi_scale="noise"`.
        phi_scale (`str`, defaults to `"sum"`):
            `"sum"`: Φ as above. `"noise"`: divided by σ_y². `"mean"`: mean squared residual, so that the weight does
            not depend on the image's size (the scale of the FLUX.2 release).

    Raises:
        ValueError: `phi_scale` is unknown, or needs a `noise_std` that is missing; `y` cannot be a measurement.
        TypeError: `operator` is no [`Operator`].
    """

    def __init__(
        self,
        operator: Operator,
        y: torch.Tensor,
        noise: Any = None,
        noise_std: float | None = None,
        phi_scale: str = "sum",
    ):
        if not isinstance(operator, Operator):
            raise TypeError(f"`operator` must be a measurement operator, got {type(operator).__name__}.")
        if phi_scale not in PHI_SCALES:
            raise ValueError(f"`phi_scale` must be one of {PHI_SCALES}, got {phi_scale!r}.")
        if phi_scale == "noise" and not (noise_std is not None and noise_std > 0):
            raise ValueError(f"`phi_scale='noise'` needs a positive `noise_std`, got {noise_std!r}.")
        if not isinstance(y, torch.Tensor) or not y.is_floating_point():
            kind = y.dtype if isinstance(y, torch.Tensor) else type(y).__name__
            raise ValueError(f"`y` must be a float tensor, got {kind}; see `operators.preprocess`.")
        if not bool(torch.isfinite(y).all()):
            raise ValueError("`y` contains NaN or infinite values.")
        self.operator, self.y, self.phi_scale = operator, y, phi_scale
        self.noise = noise or GaussianNoise()
        size = y[0].numel()
        self.scale = {"sum": 1.0, "noise": 1.0 / (noise_std or 1.0) ** 2, "mean": 2.0 / size}[phi_scale]

    @property
    def quadratic(self) -> bool:
        """Whether Φ is quadratic in the image, so that the endpoint problem has a closed form."""
        return self.operator.linear and isinstance(self.noise, GaussianNoise)

    def measurement(self, like: torch.Tensor) -> torch.Tensor:
        """y on the device and in the dtype of `like`."""
        return self.y.to(like)

    def residual(self, images: torch.Tensor) -> torch.Tensor:
        """A(x) − y.

        Raises:
            ValueError: A(x) and y differ in shape.
        """
        predicted = self.operator.A(images)
        if predicted.shape != self.y.shape:
            raise ValueError(
                f"`y` has shape {tuple(self.y.shape)}, but {type(self.operator).__name__} maps images of shape "
                f"{tuple(images.shape)} to {tuple(predicted.shape)}."
            )
        return predicted - self.measurement(predicted)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Φ per image.

        Args:
            images (`torch.Tensor` of shape `(batch, channels, height, width)`): Images in [−1, 1].

        Returns:
            `torch.Tensor` of shape `(batch,)`.
        """
        return self.scale * self.noise.data_term(self.residual(images))

    @torch.no_grad()
    def data_rmse(self, images: torch.Tensor) -> torch.Tensor:
        """‖A(x) − y‖ / √n per image, (B,). Approaches σ_y; far below it, the noise itself was fitted."""
        return self.residual(images).square().flatten(1).mean(1).sqrt()


class CallableObjective:
    """Any differentiable function of the images.

    Args:
        function (`Callable`): Takes images (B, C, H, W) in [0, 1], not clamped, returns one value per image (B,).
    """

    quadratic = False

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        if not callable(function):
            raise TypeError(f"`objective` must be callable, got {type(function).__name__}.")
        self.function = function

    @property
    def name(self) -> str:
        """How messages call it."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """The objective per image, (B,).

        Raises:
            ValueError: The function returns no value per image, or one without a gradient.
        """
        values = self.function((images + 1) / 2)
        shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        if shape != (images.shape[0],):
            raise ValueError(
                f"`objective` {self.name} must return one value per image, shape ({images.shape[0]},), got {shape}."
            )
        if images.requires_grad and not values.requires_grad:
            raise ValueError(f"`objective` {self.name} is not differentiable: its result carries no gradient.")
        return values
