"""Paths of a two-dimensional flow under control: what stands behind the second tab. Nothing here knows of gradio."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from hf_models import GaussianMixtureFlowModel
from hf_pipelines import MPCFlowController, operators
from hf_pipelines.flow_control.controller_flow import FlowControl, FlowController, FlowState, run_controller
from hf_pipelines.mpc_flow.baselines_mpc_flow import FlowGrad
from hf_pipelines.mpc_flow.objective_mpc_flow import MeasurementObjective

SHAPE = (1, 1, 1, 2)  # one image of one row with two pixels: the two coordinates
HEXAGON = [[2.5 * math.cos(k * math.pi / 3), 2.5 * math.sin(k * math.pi / 3)] for k in range(6)]
DENSITIES = {
    "two_modes": ("Two modes, ±(2, 2)", [[2.0, 2.0], [-2.0, -2.0]], 0.5),
    "hexagon": ("Hexagon of six modes", HEXAGON, 0.35),
}


@dataclass(frozen=True)
class Planner:
    """A way to plan, its label and the look of its path.

    Args:
        label (`str`): What people read.
        colour (`str`): Of the path.
        settings (`dict`, *optional*): Arguments of [`MPCFlowController`]; `None` for the other two.
        dashed (`bool`): Whether the path is dashed: the references, which are not MPC.
    """

    label: str
    colour: str
    settings: dict[str, Any] | None = None
    dashed: bool = False


PLANNERS = {
    "none": Planner("No control", "#7f7f7f", dashed=True),
    "global": Planner("Global control (FlowGrad)", "#000000", dashed=True),
    "k1": Planner("MPC, K = 1", "#fdae61", {"horizon_steps": 1}),
    "k2": Planner("MPC, K = 2", "#f46d43", {"horizon_steps": 2, "lr": 0.05}),
    "k3": Planner("MPC, K = 3", "#d73027", {"horizon_steps": 3, "lr": 0.05}),
    "k4": Planner("MPC, K = 4", "#a50f5e", {"horizon_steps": 4, "lr": 0.05}),
    "k5": Planner("MPC, K = 5", "#5e2a84", {"horizon_steps": 5, "lr": 0.05}),
    "dt": Planner("MPC, Δt horizon", "#2166ac", {"mode": "dt"}),
}


@dataclass
class Path:
    """States (N + 1, 2) of one run, and its cost: ∫‖u‖², Φ at the end, and J = ∫‖u‖² + λΦ."""

    states: np.ndarray
    energy: float
    phi: float
    total: float


class _StateRecorder(FlowController):
    """Hands every step on to another controller and keeps the states that it saw."""

    def __init__(self, inner: FlowController | None):
        super().__init__()
        self.inner = inner
        self.states: list[torch.Tensor] = []

    def reset(self, num_steps: int, batch: int, device: torch.device) -> None:
        super().reset(num_steps, batch, device)
        if self.inner is not None:
            self.inner.reset(num_steps, batch, device)

    def control(self, state: FlowState) -> FlowControl:
        self.states.append(state.x)
        return FlowControl(state.v, state.x) if self.inner is None else self.inner.control(state)


@functools.cache
def flow(density: str) -> GaussianMixtureFlowModel:
    """The exact flow of a density."""
    _, means, std = DENSITIES[density]
    return GaussianMixtureFlowModel(means=means, stds=[std] * len(means), sample_shape=SHAPE[1:]).double()


def plan(density: str, start: tuple[float, float], observed: float, lam: float, steps: int, planner: str) -> Path:
    """Run the flow from a point under one planner. Only the first coordinate of the end is observed.

    Args:
        density (`str`): A key of `DENSITIES`.
        start (`tuple[float, float]`): x(0).
        observed (`float`): The value y that the first coordinate shall have at the end.
        lam (`float`): λ.
        steps (`int`): N.
        planner (`str`): A key of `PLANNERS`.

    Returns:
        [`Path`]: states and cost.
    """
    x0 = torch.tensor(start, dtype=torch.float64).view(SHAPE)
    y = torch.tensor([observed, 0.0], dtype=torch.float64).view(SHAPE)
    operator = operators.FreeformInpaint([[1, 0]])
    objective = MeasurementObjective(operator, y)

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return flow(density)(x, timestep=sigma).sample

    if planner == "global":
        states = _global_optimum(velocity, objective, x0, lam, steps)
    else:
        settings = PLANNERS[planner].settings
        inner = None if settings is None else MPCFlowController(lam=lam, **settings).with_objective(objective)
        recorder = _StateRecorder(inner)
        end = run_controller(velocity, recorder, x0, torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist())
        states = [*recorder.states, end]
    return _measure_path(velocity, objective, states, lam)


def _global_optimum(velocity: Callable, objective: MeasurementObjective, x0, lam: float, steps: int) -> list:
    """All controls at once; the solver's own simulation of its plan is the path."""
    path: list[torch.Tensor] = []

    def recording(x, sigma):
        if not x.requires_grad and not torch.is_grad_enabled():
            path.append(x)
        return velocity(x, sigma)

    solver = FlowGrad(num_steps=steps, iterations=150, lam=lam, lr=0.2)
    end = solver.solve(recording, objective.operator, objective.y, x0)
    return [*path[-steps:], end]


@torch.no_grad()
def _measure_path(velocity: Callable, objective: MeasurementObjective, states: list, lam: float) -> Path:
    steps = len(states) - 1
    energy = 0.0
    for k in range(steps):
        b = -velocity(states[k], 1 - k / steps)
        u = (states[k + 1] - states[k]) * steps - b
        energy += float(u.square().sum()) / steps
    phi = float(objective(states[-1]))
    points = torch.stack(states).view(-1, 2).numpy()
    return Path(points, energy, phi, energy + lam * phi)


def table(paths: dict[str, Path]) -> list[list[str]]:
    """Rows: planner, end point, control energy, Φ, J."""
    return [
        [
            PLANNERS[name].label,
            "({:.2f}, {:.2f})".format(*(path.states[-1].round(2) + 0.0)),  # no minus zero
            f"{path.energy:.2f}",
            f"{path.phi:.3f}",
            f"{path.total:.2f}",
        ]
        for name, path in paths.items()
    ]


def draw(density: str, observed: float, paths: dict[str, Path]) -> Figure:
    """The paths over the contours of the data density, with the line on which the measurement lies."""
    _, means, std = DENSITIES[density]
    figure = Figure(figsize=(9.0, 6.4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    points = np.concatenate([path.states for path in paths.values()])
    reach = max(4.0, float(np.abs(points).max()) + 0.4)
    line = np.linspace(-reach, reach, 161)
    grid = np.stack(np.meshgrid(line, line), -1)  # (161, 161, 2)
    squares = ((grid[..., None, :] - np.array(means)) ** 2).sum(-1)  # (161, 161, modes)
    density_values = np.exp(-squares / (2 * std**2)).sum(-1)
    axes.contourf(line, line, density_values, levels=[0.02, 0.1, 0.3, 0.6, 0.9, 2.0], cmap="Greens", alpha=0.6)
    axes.axvline(observed, color="#2166ac", linewidth=1.2, linestyle=":", label=f"measured: $x_1$ = {observed:g}")
    for name, path in paths.items():
        look = PLANNERS[name]
        style = "--" if look.dashed else "-"
        axes.plot(*path.states.T, style, color=look.colour, linewidth=1.8, marker=".", markersize=5, label=look.label)
        axes.plot(*path.states[-1], marker="o", markersize=9, color=look.colour, markeredgecolor="white")
    if paths:
        first = next(iter(paths.values()))
        axes.plot(*first.states[0], marker="X", markersize=11, color="black", markeredgecolor="white", linestyle="")
        axes.annotate("start", first.states[0], xytext=(8, -14), textcoords="offset points")
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel="$x_1$ (measured)", ylabel="$x_2$")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0, frameon=False, fontsize=10)
    return figure
