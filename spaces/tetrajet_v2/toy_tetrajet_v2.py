"""Eight weights that are pulled to targets between two 4-bit values: what stands behind the third tab. No gradio here.

The row of 128 holds two large numbers that pin the scales of the block with the eight weights to 1. Gradient descent
runs on Q(w) − target, so a weight whose target lies between two codes flips from one to the other for ever.
"""

from dataclasses import dataclass, field

import torch
from figures_tetrajet_v2 import BLUE, INK, ORANGE, RED, dress, new_figure
from matplotlib.figure import Figure
from torch import nn

from hf_models.tetrajet_v2 import (
    OscillationWindow,
    OsciReset,
    OsciResetConfig,
    TetraJetConfig,
    nvfp4_quantize,
    prepare_model,
)

STARTS = (0.26, 0.74, 1.26, 2.49, 0.1, 0.3, 3.49, -0.26)
TARGETS = (0.25, 0.75, 1.25, 2.5, 0.5, 1.0, 3.5, -0.25)
FIRST = 17  # column of the first of the eight
EIGHT = slice(FIRST, FIRST + len(STARTS))
DETECTS = {
    "distance_ratio": "ratio of distances (paper)",
    "distance_ratio_mem_eff": "the same, 10 % nearest an edge only",
    "bin_edge": "closeness to the edge alone",
}


@dataclass
class Path:
    """What the eight weights did in one run.

    Args:
        w (`torch.Tensor`): Master weights after each step, and before the first, `(steps + 1, 8)`.
        q (`torch.Tensor`): Their 4-bit values, `(steps + 1, 8)`.
        flips (`list[int]`): Changes of the code of each.
        resets (`list[tuple[int, torch.Tensor]]`): Step index of each reset, and which of the eight were reset.
        rho (`torch.Tensor`, *optional*): D_q/D_w of each at the end of the first window.
    """

    w: torch.Tensor
    q: torch.Tensor
    flips: list[int]
    resets: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    rho: torch.Tensor | None = None


def toy_model(config: OsciResetConfig) -> nn.Module:
    """One converted linear layer that holds the row."""
    model = nn.Sequential(nn.Linear(128, 1, bias=False))
    row = torch.zeros(1, 128)
    row[0, 0], row[0, 16] = 2688.0, 6.0  # s_o = 1, and s_i = 1 in the second block
    row[0, EIGHT] = torch.tensor(STARTS)
    model[0].weight.data = row
    return prepare_model(model, TetraJetConfig("tetrajet_v2_base", osci_reset=config))


def descend(config: OsciResetConfig, learning_rate: float, steps: int, reset: bool) -> Path:
    """Gradient descent on (Q(w) − target)²/2.

    Args:
        config (`OsciResetConfig`): Windows and threshold.
        learning_rate (`float`): Step length.
        steps (`int`): Steps.
        reset (`bool`): Whether OsciReset runs.

    Returns:
        [`Path`].
    """
    model = toy_model(config)
    w, target = model[0].weight.data, torch.tensor(TARGETS)
    engine = OsciReset(model) if reset else None
    quantized = nvfp4_quantize(w)
    codes, value = quantized.codes[0, EIGHT], quantized.dequantize()[0, EIGHT]
    weights, values, flips = [w[0, EIGHT].clone()], [value], torch.zeros(len(STARTS))
    path = Path(w, w, [])
    window = None
    for i in range(steps):
        w[0, EIGHT] -= learning_rate * (value - target)
        quantized = nvfp4_quantize(w)  # a reset changes no code: Q(Q(w)) = Q(w)
        value = quantized.dequantize()[0, EIGHT]
        flips += quantized.codes[0, EIGHT] != codes
        codes = quantized.codes[0, EIGHT]
        if engine is not None and path.rho is None:
            window = _watch(window, model, config, i)
            if window is not None and window.steps == config.window:
                d_w, d_q = (distance[0, EIGHT] for distance in window.distances()["0"])
                path.rho = torch.where(d_w > 0, d_q / d_w, 0.0)
        if engine is not None:
            before = w[0, EIGHT].clone()
            if engine.step(i) is not None:
                path.resets.append((i, w[0, EIGHT] != before))
        weights.append(w[0, EIGHT].clone())
        values.append(value)
    path.w, path.q, path.flips = torch.stack(weights), torch.stack(values), flips.int().tolist()
    return path


def _watch(window: OscillationWindow | None, model: nn.Module, config: OsciResetConfig, i: int):
    """The monitor beside OsciReset's own first window."""
    if i % config.period == 0:
        return OscillationWindow(model)
    if window is not None:
        window.update()
    return window


def name(index: int) -> str:
    """What people read for one of the eight: where it starts and where it is pulled."""
    return f"{STARTS[index]:g} → {TARGETS[index]:g}"


def rows(without: Path, with_reset: Path) -> list[list[str]]:
    """Per weight: start, target, flips without and with OsciReset, ρ in the first window, resets."""
    times = [sum(int(mask[index]) for _, mask in with_reset.resets) for index in range(len(STARTS))]
    return [
        [
            f"{STARTS[index]:g}",
            f"{TARGETS[index]:g}",
            str(without.flips[index]),
            str(with_reset.flips[index]),
            "–" if with_reset.rho is None else f"{float(with_reset.rho[index]):.1f}",
            str(times[index]),
        ]
        for index in range(len(STARTS))
    ]


def draw(without: Path, with_reset: Path, config: OsciResetConfig, index: int, shown: int) -> Figure:
    """One weight over the first steps without and with OsciReset, and the flips of all eight."""
    figure = new_figure(10, 5.6)
    grid = figure.add_gridspec(2, 2, width_ratios=(5, 3))
    left = [figure.add_subplot(grid[row, 0]) for row in range(2)]
    right = figure.add_subplot(grid[:, 1])
    times = range(shown + 1)
    for axes, path, title in zip(left, (without, with_reset), ("without", "with OsciReset"), strict=True):
        axes.step(times, path.q[: shown + 1, index], where="post", color=ORANGE, linewidth=1.1, label="Q(w)")
        axes.plot(times, path.w[: shown + 1, index], color=BLUE, linewidth=1.8, label="w")
        axes.axhline(TARGETS[index], color=INK, linewidth=0.9, linestyle=":", label="target")
        axes.set_xlim(0, shown)
        dress(axes, f"weight {name(index)}, {title}", x="step" if path is with_reset else "", legend=False)
    if config.detect != "bin_edge":
        for first in range(0, shown, config.period):
            end = min(shown, first + config.window)
            left[1].axvspan(first, end, color=INK, alpha=0.16, linewidth=0, label="window" if first == 0 else None)
    steps = [step + 1 for step, mask in with_reset.resets if bool(mask[index]) and step < shown]
    for step in steps:
        label = "reset" if step == steps[0] else None
        left[1].axvline(step, color=RED, linewidth=1.3, label=label)
    handles, labels = left[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, labelcolor=INK, fontsize=9)
    places = torch.arange(len(STARTS)).double()
    right.barh(places - 0.2, without.flips, height=0.38, color=INK, label="without")
    right.barh(places + 0.2, with_reset.flips, height=0.38, color=RED, label="with OsciReset")
    right.set_yticks(places.tolist(), [name(i) for i in range(len(STARTS))])
    right.invert_yaxis()
    dress(right, "flips of the 4-bit value", x="flips", legend=False)
    right.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    return figure
