"""Samples of a two-dimensional mixture under control: what stands behind the second tab. No gradio in here."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_models import GaussianMixtureFlowModel
from hf_pipelines import FlowDiversityController
from hf_pipelines.flow_control.controller_flow import FlowControl, FlowController, FlowState, run_controller

NUM_SETS = 40  # further sets of the averages


@dataclass(frozen=True)
class Density:
    """A mixture of isotropic Gaussians: label, means, and the standard deviation of each."""

    label: str
    means: tuple[tuple[float, float], ...]
    std: float


DENSITIES = {
    "two_modes": Density("Two modes, (±2, 0)", ((2.0, 0.0), (-2.0, 0.0)), 0.5),
    "ring": Density(
        "Ring of six modes",
        tuple((2.5 * math.cos(k * math.pi / 3), 2.5 * math.sin(k * math.pi / 3)) for k in range(6)),
        0.35,
    ),
}


@dataclass
class Paths:
    """States (N + 1, m, 2) of the samples of one set, over time."""

    states: np.ndarray

    @property
    def ends(self) -> np.ndarray:
        """End points, (m, 2)."""
        return self.states[-1]


class _StateRecorder(FlowController):
    """Hands every step on to another controller and keeps the states that it saw."""

    def __init__(self, inner: FlowDiversityController | None):
        super().__init__()
        self.inner = inner
        self.states: list[torch.Tensor] = []

    def reset(self, num_steps: int, batch: int, device: torch.device) -> None:
        super().reset(num_steps, batch, device)
        if self.inner is not None:
            self.inner.generator = self.generator
            self.inner.reset(num_steps, batch, device)

    def control(self, state: FlowState) -> FlowControl:
        self.states.append(state.x)
        return FlowControl(state.v, state.x) if self.inner is None else self.inner.control(state)


@functools.cache
def flow(density: str) -> GaussianMixtureFlowModel:
    """The exact flow of a density."""
    chosen = DENSITIES[density]
    means = [list(mean) for mean in chosen.means]
    return GaussianMixtureFlowModel(means=means, stds=[chosen.std] * len(means)).double()


def starts(count: int, seed: int) -> torch.Tensor:
    """Starting points (count, 2): standard normal noise."""
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(
    density: str, settings: dict | None, num_samples: int, steps: int, seed: int, num_sets: int = 1
) -> tuple[Paths, bool]:
    """Sample sets of points.

    Args:
        density (`str`): A key of `DENSITIES`.
        settings (`dict`, *optional*): Settings of [`FlowDiversityController`]; `None` samples plainly.
        num_samples (`int`): m, points of one set.
        steps (`int`): N.
        seed (`int`): Seed of the starting points, and of the noise.
        num_sets (`int`, defaults to 1): Sets, sampled in one batch and controlled on their own.

    Returns:
        `tuple[Paths, bool]`: the paths of all sets, and whether the controller changed anything.
    """
    total = num_samples * num_sets
    controller = None
    if settings is not None:
        controller = FlowDiversityController(
            feature_space="latent", feature_norm="none", group_size=num_samples, chunk=total, **settings
        )
    recorder = _StateRecorder(controller)
    end = run_controller(
        lambda x, sigma: flow(density)(x, timestep=sigma).sample,
        recorder,
        starts(total, seed),
        torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist(),
        generator=torch.Generator().manual_seed(seed + 1),
    )
    acted = controller is not None and any(entry["gamma"] != 0 or entry["beta"] > 0 for entry in controller.log)
    return Paths(torch.stack([*recorder.states, end]).numpy()), acted


def assign(density: str, points: np.ndarray) -> np.ndarray:
    """Mode of each point (m, 2), −1 where none is near: within std (√2 + 2), as the benchmark counts."""
    chosen = DENSITIES[density]
    distance = np.linalg.norm(points[:, None] - np.array(chosen.means), axis=-1)  # (m, modes)
    return np.where(distance.min(1) <= chosen.std * (math.sqrt(2) + 2), distance.argmin(1), -1)


def modes_reached(density: str, points: np.ndarray) -> int:
    """Number of modes that points (m, 2) reach."""
    return len(set(assign(density, points).tolist()) - {-1})


def averages(density: str, settings: dict | None, num_samples: int, steps: int, seed: int) -> tuple[float, float]:
    """Modes reached by a set and share of the points in a mode, means over `NUM_SETS` sets."""
    paths, _ = run(density, settings, num_samples, steps, seed, NUM_SETS)
    sets = np.split(paths.ends, NUM_SETS)
    reached = float(np.mean([modes_reached(density, points) for points in sets]))
    return reached, float((assign(density, paths.ends) >= 0).mean())


def draw(density: str, plain: Paths, controlled: Paths) -> Figure:
    """Plain and controlled paths from the same starts over the contours of the density, side by side."""
    figure = Figure(figsize=(11.0, 6.2), dpi=110, layout="constrained")
    both = np.concatenate([plain.states, controlled.states])
    reach = max(4.0, float(np.abs(both).max()) + 0.3)
    total = len(DENSITIES[density].means)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name, paths in zip(panels, ("Plain", "Controlled"), (plain, controlled), strict=True):
        _draw_density(axes, density, reach)
        colours = colormaps["tab20"].resampled(20)
        for index in range(paths.states.shape[1]):
            path = paths.states[:, index]
            colour = colours(2 * index % 20 + index // 10)
            axes.plot(*path.T, "-", color=colour, linewidth=1.5)
            axes.plot(*path[0], "x", color=colour, markersize=7, markeredgewidth=1.8)
            axes.plot(*path[-1], "o", color=colour, markersize=8, markeredgecolor="black")
        axes.set_title(f"{name}: {modes_reached(density, paths.ends)} of {total} modes", fontsize=12)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel="$x_1$")
    panels[0].set_ylabel("$x_2$")
    return figure


def _draw_density(axes: Axes, density: str, reach: float) -> None:
    chosen = DENSITIES[density]
    line = np.linspace(-reach, reach, 161)
    points = np.stack(np.meshgrid(line, line), -1)  # (161, 161, 2)
    squares = ((points[..., None, :] - np.array(chosen.means)) ** 2).sum(-1)  # (161, 161, modes)
    values = np.exp(-squares / (2 * chosen.std**2)).sum(-1)
    axes.contourf(line, line, values, levels=[0.02, 0.1, 0.3, 0.6, 0.9, 2.0], cmap="Greens", alpha=0.6)
