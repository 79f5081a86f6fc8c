"""The experiments on an exact mixture: how many modes a set reaches, and what the control does to the marginal."""

import time
from collections.abc import Callable

import torch

from hf_models.small_flow.modeling_small_flow import GaussianMixtureFlowModel
from hf_pipelines.flow_control.controller_flow import run_controller
from hf_pipelines.flow_diversity.baselines_flow_diversity import DPPGuidance, ParticleGuidance, PlainODE, SDENoise
from hf_pipelines.flow_diversity.controller_flow_diversity import FlowDiversityController

NUM_STEPS = 30
SIGMAS = [1 - k / NUM_STEPS for k in range(NUM_STEPS + 1)]
STD = 0.3
Make = Callable[..., FlowDiversityController]


def mixture() -> tuple[GaussianMixtureFlowModel, torch.Tensor]:
    """The mixture of experiment A and its means (8, 16)."""
    rotation = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
    means = 4 * rotation[:8]
    return GaussianMixtureFlowModel(16, means.tolist(), [STD] * 8), means


def ours(tau: float = 10.0, **settings) -> Make:
    """The method with γ₀ = 10 and without noise, as experiment A has it."""
    arguments = {"gamma0": 10.0, "tau": tau, "beta0": 0.0, **settings}
    return lambda **common: FlowDiversityController(**{**arguments, **common})


MIXTURE_METHODS: dict[str, Make] = {
    "ODE": lambda **common: PlainODE(**common),
    "SDE β .2": lambda **common: SDENoise(0.2, gamma_schedule="sin2", **common),
    "SDE β .2 + score": lambda **common: SDENoise(0.2, True, gamma_schedule="sin2", **common),
    "Particle Guidance γ 3": lambda **common: ParticleGuidance(gamma=3.0, **common),
    "DPP γ 1": lambda **common: DPPGuidance(gamma=1.0, **common),
    "DPP γ 3": lambda **common: DPPGuidance(gamma=3.0, **common),
    "DPP γ 3, early gate": lambda **common: DPPGuidance(gamma=3.0, gate=(0.6, 1.0), **common),
    "ours τ 1": ours(1.0),
    "ours τ 1, no projection": ours(1.0, ortho=0.0),
    "ours τ 10": ours(10.0),
    "ours τ 1, Heun endpoint": ours(1.0, endpoint="heun"),
    "published constants": ours(1.0, gamma0=0.12, gate=(0.85, 0.95), cap_mode="cap"),
    "wrong sign γ₀ −3": ours(1.0, gamma0=-3.0),
}


def run_mixture(make: Make, seed: int, num_sets: int, size: int = 8) -> dict[str, float]:
    """Experiment A for one method: modes of 8, share in a mode, spread within the modes over the true one."""
    model, means = mixture()
    x = torch.randn(num_sets * size, 16, generator=torch.Generator().manual_seed(seed))
    controller = make(group_size=size, feature_space="latent", chunk=len(x))
    start = time.process_time()
    samples = run_controller(
        lambda x, s: model(x, s).sample, controller, x, SIGMAS, generator=torch.Generator().manual_seed(seed + 1)
    )
    distance, mode = torch.cdist(samples, means).min(1)
    modes = torch.tensor([len(set(rows.tolist())) for rows in mode.split(size)]).float()
    return {
        "modes of 8": float(modes.mean()),
        "s.e.": float(modes.std() / num_sets**0.5),
        "in mode": float((distance < STD * (16**0.5 + 2)).float().mean()),
        "spread": float(distance.square().mean().sqrt() / STD / 4),
        "CPU s": round(time.process_time() - start, 2),
    }


MARGINAL_METHODS: dict[str, Make] = {
    "ODE": MIXTURE_METHODS["ODE"],
    "spread": ours(1.0),
    "spread, no projection": ours(1.0, ortho=0.0),
    "noise β .3": ours(gamma0=0.0, beta0=0.3, noise_ratio=1e9, noise_ortho=False, score_correction=False),
    "noise β .3, projected": ours(gamma0=0.0, beta0=0.3, noise_ratio=1e9, score_correction=False),
    "noise β .3 + score": ours(gamma0=0.0, beta0=0.3, noise_ratio=1e9, noise_ortho=False),
    "noise β .3 + score, projected": ours(gamma0=0.0, beta0=0.3, noise_ratio=1e9),
}


def run_marginal(make: Make, seed: int) -> dict[str, float]:
    """How far 150 sets of eight move the marginal: sliced Wasserstein-1 distance to exact samples, and the spread."""
    model, means = mixture()
    generator = torch.Generator().manual_seed(seed)
    exact = means[torch.randint(8, (1200,), generator=generator)]
    exact = exact + STD * torch.randn(1200, 16, generator=generator)
    x = torch.randn(1200, 16, generator=generator)
    controller = make(group_size=8, feature_space="latent", chunk=len(x))
    samples = run_controller(lambda x, s: model(x, s).sample, controller, x, SIGMAS, generator=generator)
    directions = torch.nn.functional.normalize(torch.randn(16, 256, generator=generator), dim=0)
    sorted_pair = [(points @ directions).sort(0).values for points in (samples, exact)]
    spread = [torch.cdist(points, means).min(1).values.square().mean().sqrt() for points in (samples, exact)]
    residuals = [entry["orthogonality"] for entry in controller.log if "orthogonality" in entry]
    return {
        "sliced W1": float((sorted_pair[0] - sorted_pair[1]).abs().mean()),
        "spread change, %": float(100 * (spread[0] / spread[1] - 1)),
        "largest ⟨u, b⟩/‖u‖‖b‖": max(residuals, default=0.0),
    }
