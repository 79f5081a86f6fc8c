"""Other ways to spread the samples of one prompt, as controllers with one interface.

| class | idea | source |
| --- | --- | --- |
| `PlainODE` | nothing | |
| `SDENoise` | independent noise, with or without its score correction | |
| `ParticleGuidance` | repulsion by a Gaussian kernel with the median bandwidth | arXiv 2310.13102 |
| `DPPGuidance` | likelihood of a determinantal point process | arXiv 2504.07894 (DiverseFlow) |
| `CADS` | anneal the prompt embedding | arXiv 2310.17347 |

APG (arXiv 2410.02416) is a rule for guidance: `diffusers.AdaptiveProjectedGuidance` in modular pipelines, whose
function the
benchmark calls. CADS acts on prompt embeddings, which the digits do not have. All force-based methods share the
endpoint,
the pull-back and the size ρ‖b‖ of the control with [`FlowDiversityController`], so that they differ in the energy, the
projection and the schedule alone.
"""

import math
from typing import Any

import torch

from hf_pipelines.flow_diversity.controller_flow_diversity import FlowDiversityController


class PlainODE(FlowDiversityController):
    """Plain sampling."""

    def __init__(self, **kwargs):
        super().__init__(gamma0=0.0, beta0=0.0, **kwargs)


class SDENoise(FlowDiversityController):
    """Independent noise √(2βΔ) ξ at every step of the gate.

    Args:
        beta (`float`): β.
        score_correction (`bool`): Add β Δ s, which keeps the marginal.
        kwargs: Further arguments of [`FlowDiversityController`].
    """

    def __init__(self, beta: float = 0.2, score_correction: bool = False, **kwargs):
        settings = {"noise_gate": (0.2, 0.95), "gamma_schedule": "const", "noise_ratio": 1e9, **kwargs}
        super().__init__(gamma0=0.0, beta0=beta, noise_ortho=False, score_correction=score_correction, **settings)


class _ForceBaseline(FlowDiversityController):
    """A force from an energy of the raw features, without projection and noise, at all noise levels."""

    def __init__(self, encoder: Any = None, gamma: float = 1.0, **kwargs):
        settings = {"gate": (0.0, 1.0), "gamma_schedule": "sin2", "feature_norm": "none", "center": False, **kwargs}
        super().__init__(encoder, gamma0=gamma, ortho=0.0, beta0=0.0, **settings)


def _squared_distances(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """‖z_i − z_j‖² (m, m) and the median over pairs, held constant."""
    distance = (z[:, None] - z[None]).square().sum(-1)
    first, second = torch.triu_indices(len(z), len(z), offset=1)
    return distance, distance.detach()[first, second].median().clamp_min(1e-12)


class ParticleGuidance(_ForceBaseline):
    """Ascend −Σ_{i≠j} exp(−‖z_i − z_j‖²/h) with h = median/log m.

    Args:
        encoder (`Callable`, *optional*): As in [`FlowDiversityController`].
        gamma (`float`): γ, in units of ρ‖b‖.
        kwargs: Further arguments of [`FlowDiversityController`].
    """

    def energy(self, z: torch.Tensor) -> torch.Tensor:
        """The negative repulsion of one set."""
        distance, median = _squared_distances(z)
        return len(z) - torch.exp(-distance * math.log(max(len(z), 2)) / median).sum()


class DPPGuidance(_ForceBaseline):
    """Ascend log det L − log det(L + I), L = exp(−κ ‖z_i − z_j‖²/median).

    Args:
        encoder (`Callable`, *optional*): As in [`FlowDiversityController`].
        gamma (`float`): γ, in units of ρ‖b‖.
        kappa (`float`): κ.
        kwargs: Further arguments of [`FlowDiversityController`].
    """

    def __init__(self, encoder: Any = None, gamma: float = 1.0, kappa: float = 3.0, **kwargs):
        super().__init__(encoder, gamma, **kwargs)
        self.kappa = kappa

    def energy(self, z: torch.Tensor) -> torch.Tensor:
        """Log-likelihood of one set."""
        distance, median = _squared_distances(z)
        kernel = torch.exp(-self.kappa * distance / median)
        identity = torch.eye(len(z), dtype=z.dtype, device=z.device)
        return torch.logdet(kernel + 1e-9 * identity) - torch.logdet(kernel + identity)


class CADS:
    """Condition-annealed sampling, as a `callback_on_step_end` of any text-to-image pipeline.

    At paper time t = step/N the prompt embedding y becomes √γ y + s √(1−γ) ε, rescaled to the mean and deviation of y
    and mixed by ψ; γ = 1 once t' = 1 − t has fallen to τ₁, 0 while it is above τ₂, linear in between.

    Args:
        tau1 (`float`): τ₁.
        tau2 (`float`): τ₂, above τ₁.
        scale (`float`): s.
        mix (`float`): ψ in [0, 1], share of the rescaled embedding.
        generator (`torch.Generator`, *optional*): Randomness.
        names (`tuple[str, ...]`): Which of the callback's tensors to anneal.

    Raises:
        ValueError: τ₁ is not below τ₂.
    """

    def __init__(
        self,
        tau1: float = 0.6,
        tau2: float = 0.9,
        scale: float = 0.1,
        mix: float = 1.0,
        generator: torch.Generator | None = None,
        names: tuple[str, ...] = ("prompt_embeds",),
    ):
        if not tau1 < tau2:
            raise ValueError(f"`tau1` must be below `tau2`, got {tau1} and {tau2}.")
        self.tau1, self.tau2, self.scale, self.mix = tau1, tau2, scale, mix
        self.generator, self.names = generator, names
        self._clean: dict[str, torch.Tensor] = {}

    def gamma(self, noise_level: float) -> float:
        """γ at noise level t' = 1 − t."""
        return min(max((self.tau2 - noise_level) / (self.tau2 - self.tau1), 0.0), 1.0)

    def anneal(self, embedding: torch.Tensor, noise_level: float) -> torch.Tensor:
        """The annealed embedding, of the shape of `embedding`."""
        gamma = self.gamma(noise_level)
        if gamma == 1.0:
            return embedding
        noise = torch.randn(embedding.shape, generator=self.generator, dtype=embedding.dtype).to(embedding.device)
        noisy = gamma**0.5 * embedding + self.scale * (1 - gamma) ** 0.5 * noise
        rescaled = (noisy - noisy.mean()) / noisy.std() * embedding.std() + embedding.mean()
        return self.mix * rescaled + (1 - self.mix) * noisy

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Replace the embeddings for the next step."""
        if step == 0:
            self._clean = {name: tensors[name] for name in self.names}
        noise_level = 1 - (step + 1) / pipe.num_timesteps
        return {**tensors, **{name: self.anneal(clean, noise_level) for name, clean in self._clean.items()}}
