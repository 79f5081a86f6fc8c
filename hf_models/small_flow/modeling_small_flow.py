"""Two small flow-matching models that run anywhere: a trained residual MLP and an exact Gaussian mixture.

Conventions are those of diffusers' flow-matching schedulers: σ = 1 is pure noise, σ = 0 is data,
x_σ = (1 − σ) x₀ + σ ε, and the model predicts the velocity v = dx/dσ = ε − x₀.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput


@dataclass
class SmallFlowModelOutput(BaseOutput):
    """Output of the small flow models.

    Args:
        sample (`torch.Tensor` of shape `(batch, *sample_shape)`):
            Predicted velocity v = dx/dσ.
    """

    sample: torch.Tensor


def _batch_sigma(timestep: torch.Tensor | float, sample: torch.Tensor) -> torch.Tensor:
    """Bring a scalar or per-image σ to shape (B,) on the device and in the dtype of `sample`."""
    sigma = torch.as_tensor(timestep, device=sample.device, dtype=sample.dtype)
    if sigma.ndim > 1 or (sigma.ndim == 1 and sigma.shape[0] not in (1, sample.shape[0])):
        raise ValueError(
            f"`timestep` must be a scalar or hold one σ per image ({sample.shape[0]}), got shape {tuple(sigma.shape)}."
        )
    return sigma.expand(sample.shape[0])


def _check_sample(sample: torch.Tensor, sample_shape: tuple[int, ...] | list[int]) -> None:
    if tuple(sample.shape[1:]) != tuple(sample_shape):
        raise ValueError(
            f"`sample` must have shape (batch, {', '.join(map(str, sample_shape))}), got {tuple(sample.shape)}."
        )


class _FiLMBlock(nn.Module):
    """Residual MLP block whose normalised input is scaled and shifted by the condition."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.film = nn.Linear(hidden_size, 2 * hidden_size)
        self.linear_1 = nn.Linear(hidden_size, hidden_size)
        self.linear_2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.film(condition).chunk(2, dim=-1)  # (B, h) each
        residual = self.norm(hidden) * (1 + scale) + shift
        return hidden + self.linear_2(F.silu(self.linear_1(residual)))


class SmallFlowModel(ModelMixin, ConfigMixin):
    """Residual MLP with FiLM conditioning that predicts the flow velocity of small images.

    Args:
        sample_shape (`tuple[int, ...]`, defaults to `(1, 16, 16)`):
            Shape of one image, channels first.
        hidden_size (`int`, defaults to 384):
            Width of the residual stream.
        num_blocks (`int`, defaults to 3):
            Number of residual blocks.
        num_classes (`int`, defaults to 10):
            Number of class labels; label `num_classes` means "unconditional".
        time_embedding_size (`int`, defaults to 64):
            Number of sine and cosine features of 1000 σ.
    """

    @register_to_config
    def __init__(
        self,
        sample_shape: tuple[int, ...] = (1, 16, 16),
        hidden_size: int = 384,
        num_blocks: int = 3,
        num_classes: int = 10,
        time_embedding_size: int = 64,
    ):
        super().__init__()
        dim = math.prod(sample_shape)
        self.proj_in = nn.Linear(dim, hidden_size)
        self.time_mlp = nn.Sequential(
            nn.Linear(time_embedding_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.class_embedding = nn.Embedding(num_classes + 1, hidden_size)
        self.blocks = nn.ModuleList(_FiLMBlock(hidden_size) for _ in range(num_blocks))
        self.norm_out = nn.LayerNorm(hidden_size)
        self.proj_out = nn.Linear(hidden_size, dim)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        class_labels: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> SmallFlowModelOutput | tuple[torch.Tensor]:
        """Predict the velocity.

        Args:
            sample (`torch.Tensor` of shape `(batch, *sample_shape)`): The noisy images x_σ.
            timestep (`float` or `torch.Tensor` of shape `()` or `(batch,)`): The noise level σ in [0, 1].
            class_labels (`torch.Tensor` of shape `(batch,)`, *optional*):
                Integer labels; `None` or `num_classes` means unconditional.
            return_dict (`bool`, defaults to `True`): Return an output object, else a tuple.

        Returns:
            [`SmallFlowModelOutput`] or `tuple`: the velocity v, of the shape of `sample`.

        Raises:
            ValueError: `sample`, `timestep` or `class_labels` has the wrong shape.
        """
        _check_sample(sample, self.config.sample_shape)
        batch = sample.shape[0]
        sigma = _batch_sigma(timestep, sample)
        if class_labels is None:
            class_labels = torch.full((batch,), self.config.num_classes, device=sample.device)
        elif class_labels.shape != (batch,):
            raise ValueError(
                f"`class_labels` must hold one label per image ({batch}), got {tuple(class_labels.shape)}."
            )
        features = get_timestep_embedding(1000 * sigma, self.config.time_embedding_size).to(sample.dtype)
        condition = F.silu(self.time_mlp(features) + self.class_embedding(class_labels))  # (B, h)
        hidden = self.proj_in(sample.flatten(1))  # (B, h)
        for block in self.blocks:
            hidden = block(hidden, condition)
        velocity = self.proj_out(self.norm_out(hidden)).view_as(sample)
        return SmallFlowModelOutput(sample=velocity) if return_dict else (velocity,)


class GaussianMixtureFlowModel(ModelMixin, ConfigMixin):
    """Exact flow velocity of a mixture of isotropic Gaussians; nothing to train.

    With a = 1 − σ, var_k = a² s_k² + σ² and responsibilities r_k ∝ w_k N(x; a μ_k, var_k I),

        v(x, σ) = Σ_k r_k [ (σ − a s_k²) / var_k · (x − a μ_k) − μ_k ].

    Args:
        dim (`int`, defaults to 2): Number of elements of one sample.
        means (`list[list[float]]`): K mean vectors of length `dim`.
        stds (`list[float]`): K standard deviations, all positive.
        weights (`list[float]`, *optional*): K mixture weights; equal when `None`.
        sample_shape (`tuple[int, ...]`, *optional*): Shape of one sample; `(dim,)` when `None`.

    Raises:
        ValueError: The lengths of `means`, `stds`, `weights` and `dim` disagree, or a standard deviation or a weight
            is not positive.
    """

    @register_to_config
    def __init__(
        self,
        dim: int = 2,
        means: list[list[float]] = ((2.0, 2.0), (-2.0, -2.0)),
        stds: list[float] = (0.5, 0.5),
        weights: list[float] | None = None,
        sample_shape: tuple[int, ...] | None = None,
    ):
        super().__init__()
        num_modes = len(means)
        if any(len(mean) != dim for mean in means):
            raise ValueError(f"every row of `means` must have `dim` = {dim} entries, got {[len(m) for m in means]}.")
        if len(stds) != num_modes or any(std <= 0 for std in stds):
            raise ValueError(f"`stds` must hold {num_modes} positive numbers, got {list(stds)}.")
        if weights is not None and (len(weights) != num_modes or any(weight <= 0 for weight in weights)):
            raise ValueError(f"`weights` must hold {num_modes} positive numbers, got {list(weights)}.")
        if sample_shape is not None and math.prod(sample_shape) != dim:
            raise ValueError(f"`sample_shape` {tuple(sample_shape)} does not hold `dim` = {dim} elements.")
        # The mixture lives in the config. The buffer gives the module a device and a dtype, and its file something
        # to hold; the numbers themselves are read in float64 so that no cast of the module can round them.
        self.register_buffer("num_modes", torch.tensor(float(num_modes)))

    def _mixture(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = self.config.weights or [1.0] * len(self.config.means)
        values = (self.config.means, self.config.stds, weights)
        means, stds, weights = (torch.tensor(v, dtype=torch.float64).to(like.dtype).to(like.device) for v in values)
        return means, stds, torch.log(weights / weights.sum())

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        class_labels: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> SmallFlowModelOutput | tuple[torch.Tensor]:
        """Compute the exact velocity.

        Args:
            sample (`torch.Tensor` of shape `(batch, *sample_shape)`): The noisy samples x_σ.
            timestep (`float` or `torch.Tensor` of shape `()` or `(batch,)`): The noise level σ in [0, 1].
            class_labels (`torch.Tensor`, *optional*): Ignored; the mixture has no classes.
            return_dict (`bool`, defaults to `True`): Return an output object, else a tuple.

        Returns:
            [`SmallFlowModelOutput`] or `tuple`: the velocity v, of the shape of `sample`.

        Raises:
            ValueError: `sample` or `timestep` has the wrong shape.
        """
        _check_sample(sample, self.config.sample_shape or (self.config.dim,))
        means, stds, log_weights = self._mixture(sample)  # (K, d), (K,), (K,)
        sigma = _batch_sigma(timestep, sample)[:, None]  # (B, 1)
        a = 1 - sigma
        variances = a**2 * stds**2 + sigma**2  # (B, K)
        offsets = sample.flatten(1)[:, None] - a[..., None] * means  # (B, K, d)
        log_density = -0.5 * offsets.square().sum(-1) / variances - 0.5 * self.config.dim * variances.log()
        responsibilities = torch.softmax(log_weights + log_density, dim=-1)  # (B, K)
        slopes = (sigma - a * stds**2) / variances  # (B, K)
        velocities = slopes[..., None] * offsets - means  # (B, K, d)
        velocity = (responsibilities[..., None] * velocities).sum(1).view_as(sample)
        return SmallFlowModelOutput(sample=velocity) if return_dict else (velocity,)
