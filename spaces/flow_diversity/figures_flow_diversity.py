"""Pictures and figures of the first tab."""

import numpy as np
import PIL.Image
import sets_flow_diversity as sets
import torch
from matplotlib.figure import Figure
from sets_flow_diversity import DigitSet, SweepPoint

DIGIT = 96  # pixels a side of an enlarged digit
FRAME, GAP, COLUMNS = 6, 6, 4
PLAIN, SPREAD = "#7f7f7f", "#4338ca"
COLOURS = (  # of clusters and classes
    (31, 119, 180),
    (255, 127, 14),
    (44, 160, 44),
    (214, 39, 40),
    (148, 103, 189),
    (140, 86, 75),
    (227, 119, 194),
    (160, 160, 160),
    (188, 189, 34),
    (23, 190, 207),
)


def grid(images: torch.Tensor, groups: list[int]) -> PIL.Image.Image:
    """Images (m, 1, 8, 8) in [−1, 1] side by side, four a row, sharply enlarged, in frames of their group's colour."""
    cell = DIGIT + 2 * FRAME
    rows = -(-len(images) // COLUMNS)
    size = (COLUMNS * (cell + GAP) - GAP, rows * (cell + GAP) - GAP)
    canvas = PIL.Image.new("RGBA", size, (0, 0, 0, 0))
    grey = ((images.squeeze(1).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()
    for index, (pixels, group) in enumerate(zip(grey, groups, strict=True)):
        row, column = divmod(index, COLUMNS)
        left, top = column * (cell + GAP), row * (cell + GAP)
        canvas.paste((*COLOURS[group], 255), (left, top, left + cell, top + cell))
        digit = PIL.Image.fromarray(pixels).resize((DIGIT, DIGIT), PIL.Image.Resampling.NEAREST)
        canvas.paste(digit.convert("RGBA"), (left + FRAME, top + FRAME))
    return canvas


def draw_volumes(plain: DigitSet, spread: DigitSet, gate: tuple[float, float]) -> Figure:
    """Log-volume of what the model expects the images to become, over the noise level."""
    figure = Figure(figsize=(6.0, 3.9), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(*gate, color=SPREAD, alpha=0.08, label="gate of the control")
    axes.plot(plain.sigmas, plain.volumes, "--", color=PLAIN, marker=".", label="plain")
    axes.plot(spread.sigmas, spread.volumes, "-", color=SPREAD, marker=".", label="controlled")
    axes.set(xlim=(1.02, -0.02), xlabel="noise level σ: sampling goes to the right", ylabel="log-volume V")
    axes.set_title("How far apart the expected images are", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", frameon=False, fontsize=10)
    return figure


def draw_sweep(points: list[SweepPoint], label: str, num_images: int) -> Figure:
    """Diversity and fidelity of every method at every strength."""
    figure = Figure(figsize=(10.0, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    offsets = {"sde": (-4, -14), "dpp": (-4, -14), "particle": (5, -12), "ours": (5, 5)}  # crowded near the start
    (start,) = [point for point in points if point.method == "plain"]
    for name, method in sets.METHODS.items():
        mine = [point for point in points if point.method == name]
        if name == "plain":
            axes.plot(
                start.vendi, start.precision, "*", markersize=17, color=method.colour, label=method.label, zorder=5
            )
            continue
        path = np.array([(point.vendi, point.precision) for point in [start, *mine]])
        width = 2.4 if name == "ours" else 1.4
        axes.plot(*path.T, "-", color=method.colour, linewidth=width, alpha=0.8)
        axes.plot(*path[1:].T, "o", color=method.colour, label=f"{method.label}, {method.symbol}")
        for point in mine:
            axes.annotate(
                f"{point.strength:g}",
                (point.vendi, point.precision),
                xytext=offsets[name],
                textcoords="offset points",
                fontsize=9,
                color=method.colour,
            )
    axes.set(xlabel="diversity: Vendi score, independent classifier", ylabel="fidelity: precision")
    title = f"{sets.CLASSES[label]}: means of {sets.SWEEP_SETS} sets of {num_images}; the numbers are strengths"
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.margins(0.08)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0, frameon=False, fontsize=10)
    return figure
