"""The bases of measurement operators, and what every operator needs: checks, preprocessing, conjugate gradients."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import SchedulerMixin
from diffusers.configuration_utils import ConfigMixin
from huggingface_hub import hf_hub_download

from hf_pipelines.mpc_flow.noise_mpc_flow import GaussianNoise


class Operator(SchedulerMixin, ConfigMixin):
    """Base of all measurement operators y = A(x) + noise.

    `SchedulerMixin` is what diffusers calls a pipeline component that is a config and nothing else: with it an
    operator saves and loads with its pipeline, as `operator/operator_config.json`.
    """

    config_name = "operator_config.json"
    linear = False
    measures_images = True  # whether y has the range of an image, [−1, 1]

    def A(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the operator without noise.

        Args:
            x (`torch.Tensor` of shape `(batch, channels, height, width)`): Images in [−1, 1].

        Returns:
            `torch.Tensor`: the clean measurement, its first axis the batch.
        """
        raise NotImplementedError

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Same as [`A`]."""
        return self.A(x)

    def pinv(self, y: torch.Tensor) -> torch.Tensor:
        """A picture of the measurement: an image in the space of x that reproduces `y` as far as that is simple."""
        raise NotImplementedError(f"{type(self).__name__} has no back-projection.")

    def image_shape(self, y_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape (batch, channels, height, width) of the images whose measurement has shape `y_shape`."""
        return tuple(y_shape)

    def measure(
        self,
        x: torch.Tensor,
        noise_std: float | None = None,
        noise: Any = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Simulate a noisy measurement.

        Args:
            x (`torch.Tensor` of shape `(batch, channels, height, width)`): True images in [−1, 1].
            noise_std (`float`, *optional*): Standard deviation of Gaussian noise; short for
                `noise=GaussianNoise(std)`.
            noise (a noise model of this package, *optional*): For example `PoissonNoise(50)`.
            generator (`torch.Generator`, *optional*): Makes the noise reproducible.

        Returns:
            `torch.Tensor`: y = A(x) + noise.

        Raises:
            ValueError: `x` looks like an image in [0, 255] or both kinds of noise are given.
        """
        check_images(x, "x")
        if noise is not None and noise_std is not None:
            raise ValueError("give `noise_std` or `noise`, not both.")
        y = self.A(x)
        if noise is None:
            noise = GaussianNoise(noise_std or 0.0)
        return noise(y, generator=generator)

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={_brief(v)}" for k, v in self.config.items() if not k.startswith("_"))
        return f"{type(self).__name__}({settings})"

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> "Operator":
        """Load an operator of whatever class `operator_config.json` names.

        Args:
            pretrained_model_name_or_path (`str`): A folder or a Hub repo with `operator_config.json`.
            kwargs: Overrides of single settings.

        Raises:
            ValueError: The file names no operator of this module.
        """
        folder = Path(pretrained_model_name_or_path)
        path = folder / cls.config_name
        if not folder.is_dir():
            path = Path(hf_hub_download(str(pretrained_model_name_or_path), cls.config_name))
        config = json.loads(path.read_text())
        return operator_from_config({**config, **kwargs})


def operator_from_config(config: dict[str, Any]) -> Operator:
    """Build the operator that `config["_class_name"]` names.

    Raises:
        ValueError: No operator has that name, or a setting is out of range.
    """
    known = {operator.__name__: operator for operator in _subclasses(Operator)}
    name = config.get("_class_name")
    if name not in known:
        raise ValueError(f"`_class_name` {name!r} is no measurement operator; known: {', '.join(sorted(known))}.")
    return known[name].from_config(config)


def _subclasses(parent: type) -> Iterator[type]:
    for child in parent.__subclasses__():
        if not child.__name__.startswith("_"):
            yield child
        yield from _subclasses(child)


class NonlinearOperator(Operator):
    """Base of operators without an adjoint."""


class LinearOperator(Operator):
    """Base of linear operators: adjoint, proximal map and normal equations."""

    linear = True

    def At(self, y: torch.Tensor) -> torch.Tensor:
        """Apply the adjoint: ⟨A x, q⟩ = ⟨x, Aᵀ q⟩. For `y` of shape `A(x).shape`, returns the shape of x.

        The base does it by automatic differentiation: the gradient of ⟨A x, y⟩ in x.
        """
        with torch.enable_grad():
            x = torch.zeros(self.image_shape(tuple(y.shape)), dtype=y.dtype, device=y.device, requires_grad=True)
            return torch.autograd.grad(self.A(x), [x], y)[0]

    def prox(self, z: torch.Tensor, y: torch.Tensor, c: float) -> torch.Tensor:
        """Minimise ½‖x − z‖² + (c/2)‖A x − y‖² over x, that is solve (I + c AᵀA) x = z + c Aᵀ y.

        Args:
            z (`torch.Tensor` of shape `(batch, channels, height, width)`): Centre.
            y (`torch.Tensor`): Measurement.
            c (`float`): Weight of the measurement, at least 0.

        Returns:
            `torch.Tensor`: the minimiser, of the shape of `z`.
        """
        return conjugate_gradient(lambda x: x + c * self.At(self.A(x)), z + c * self.At(y), z)

    def pinv(self, y: torch.Tensor) -> torch.Tensor:
        """Least-squares back-projection: the minimum-norm x with A x ≈ y, by conjugate gradients on AᵀA."""
        right = self.At(y)
        return conjugate_gradient(lambda x: self.At(self.A(x)) + 1e-6 * x, right, torch.zeros_like(right))


def conjugate_gradient(
    apply: Callable[[torch.Tensor], torch.Tensor],
    right: torch.Tensor,
    start: torch.Tensor,
    max_iterations: int = 30,
    tolerance: float = 1e-8,
) -> torch.Tensor:
    """Solve `apply(x) = right` for a symmetric positive definite map, each image of the batch on its own.

    Args:
        apply (`Callable`): The linear map on tensors of the shape of `right`.
        right (`torch.Tensor` of shape `(batch, ...)`): Right-hand side.
        start (`torch.Tensor`): First iterate.
        max_iterations (`int`, defaults to 30): Iterations at most.
        tolerance (`float`, defaults to 1e-8): Relative residual at which an image stops.

    Returns:
        `torch.Tensor`: the solution, of the shape of `right`.
    """

    def dot(a, b):  # (B, 1, 1, …)
        return (a * b).flatten(1).sum(1).view(-1, *[1] * (a.ndim - 1))

    x = start.clone()
    residual = right - apply(x)
    direction = residual.clone()
    norm = dot(residual, residual)
    goal = tolerance**2 * dot(right, right).clamp_min(1e-30)
    for _ in range(max_iterations):
        active = norm > goal
        if not bool(active.any()):
            break
        mapped = apply(direction)
        step = torch.where(active, norm / dot(direction, mapped).clamp_min(1e-30), 0.0)
        x = x + step * direction
        residual = residual - step * mapped
        new_norm = dot(residual, residual)
        direction = residual + torch.where(active, new_norm / norm.clamp_min(1e-30), 0.0) * direction
        norm = new_norm
    return x


def check_images(x: torch.Tensor, name: str) -> None:
    """Raise `TypeError` or `ValueError` unless `x` is a floating-point batch that can be images in [−1, 1]."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"`{name}` must be a float tensor of images in [-1, 1], got {kind}; see `preprocess`.")
    if x.numel() and float(x.min()) >= 0 and float(x.max()) > 1.5:
        raise ValueError(
            f"`{name}` spans [{float(x.min()):.3g}, {float(x.max()):.3g}]; images must be in [-1, 1], see "
            "`operators.preprocess`."
        )


def preprocess(images: Any, size: int | None = None) -> torch.Tensor:
    """Bring pictures to what operators and pipelines take: float32 (B, C, H, W) in [−1, 1].

    Args:
        images (PIL image, `np.ndarray`, `torch.Tensor`, or a list of them):
            8-bit values in [0, 255] or floats in [0, 1]; arrays are (H, W), (H, W, C) or (B, H, W, C), tensors
            (C, H, W) or (B, C, H, W).
        size (`int`, *optional*): Resize the short side to `size` and crop the centre.

    Returns:
        `torch.Tensor`: the batch.

    Raises:
        ValueError: A float picture leaves [0, 1], or the shapes of a list differ.
    """
    if isinstance(images, list):
        batch = [preprocess(image, size) for image in images]
        if len({tuple(image.shape[1:]) for image in batch}) != 1:
            raise ValueError(f"pictures of one batch must share a shape, got {[tuple(i.shape[1:]) for i in batch]}.")
        return torch.cat(batch)
    if isinstance(images, torch.Tensor):
        x = images[None] if images.ndim == 3 else images
    else:
        array = torch.from_numpy(np.array(images))
        array = array[..., None] if array.ndim == 2 else array
        array = array[None] if array.ndim == 3 else array
        x = array.permute(0, 3, 1, 2)
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"`images` must be pictures, got shape {tuple(x.shape)}.")
    if x.is_floating_point():
        if float(x.min()) < -1e-6 or float(x.max()) > 1 + 1e-6:
            raise ValueError(f"float pictures must lie in [0, 1], got [{float(x.min()):.3g}, {float(x.max()):.3g}].")
        x = x.float()
    else:
        x = x.float() / 255
    if size is not None:
        scale = size / min(x.shape[-2:])
        shape = [max(size, round(side * scale)) for side in x.shape[-2:]]
        x = F.interpolate(x, shape, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        top, left = ((side - size) // 2 for side in shape)
        x = x[..., top : top + size, left : left + size]
    return x * 2 - 1


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)"
