"""Noise models of measurements, and the data term Φ that each implies."""

from dataclasses import dataclass

import torch


def _draw(like: torch.Tensor, generator: torch.Generator | None, sampler) -> torch.Tensor:
    """Draw on the generator's device, so that the same seed gives the same noise wherever `like` lives."""
    device = generator.device if generator is not None else like.device
    return sampler(like.shape, generator=generator, device=device, dtype=like.dtype).to(like.device)


@dataclass
class GaussianNoise:
    """y + std · N(0, 1).

    Args:
        std (`float`): Standard deviation, in units of the measurement.
    """

    std: float = 0.0

    def __post_init__(self):
        if not self.std >= 0:
            raise ValueError(f"`noise_std` must be at least 0, got {self.std!r}.")

    def __call__(self, y: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return a noisy copy of `y`."""
        return y + self.std * _draw(y, generator, torch.randn)

    def data_term(self, residual: torch.Tensor) -> torch.Tensor:
        """Φ = ½‖r‖² per image, (B,)."""
        return 0.5 * residual.square().flatten(1).sum(1)


@dataclass
class LaplaceNoise:
    """y + Laplace(0, b).

    Args:
        scale (`float`): The parameter b, in units of the measurement.
    """

    scale: float = 0.1

    def __post_init__(self):
        if not self.scale > 0:
            raise ValueError(f"`scale` must be positive, got {self.scale!r}.")

    def __call__(self, y: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return a noisy copy of `y`."""
        uniform = _draw(y, generator, torch.rand) - 0.5
        return y - self.scale * uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_max(0.5 - 1e-7))

    def data_term(self, residual: torch.Tensor) -> torch.Tensor:
        """Φ = ‖r‖₁ / b per image, (B,)."""
        return residual.abs().flatten(1).sum(1) / self.scale


@dataclass
class PoissonNoise:
    """Photon counts: y in [−1, 1] is a rate (y + 1)/2, of which `scale` photons make full white.

    Args:
        scale (`float`): Photons at full white; more photons, less noise.
    """

    scale: float = 50.0

    def __post_init__(self):
        if not self.scale > 0:
            raise ValueError(f"`scale` must be positive, got {self.scale!r}.")

    def __call__(self, y: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return a noisy copy of `y`."""
        rate = ((y + 1) / 2).clamp_min(0) * self.scale
        device = generator.device if generator is not None else y.device
        counts = torch.poisson(rate.to(device), generator=generator).to(y.device)
        return counts / self.scale * 2 - 1

    def data_term(self, residual: torch.Tensor) -> torch.Tensor:
        """Gaussian approximation Φ = ½‖r‖² per image, (B,)."""
        return GaussianNoise().data_term(residual)


@dataclass
class Quantization:
    """Round y in [−1, 1] to a number of grey levels.

    Args:
        levels (`int`): Number of levels.
    """

    levels: int = 16

    def __post_init__(self):
        if not isinstance(self.levels, int) or self.levels < 2:
            raise ValueError(f"`levels` must be an integer of at least 2, got {self.levels!r}.")

    def __call__(self, y: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return the rounded `y`; nothing is drawn."""
        steps = self.levels - 1
        return torch.round((y.clamp(-1, 1) + 1) / 2 * steps) / steps * 2 - 1

    def data_term(self, residual: torch.Tensor) -> torch.Tensor:
        """Φ = ½‖r‖² per image, (B,)."""
        return GaussianNoise().data_term(residual)
