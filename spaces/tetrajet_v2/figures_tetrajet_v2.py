"""How the page's figures look: dark ink without a background; the page inverts them on a dark one, hues kept."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#4b4b55"
BLUE, ORANGE, GREEN, RED = "#3f78dc", "#cf7410", "#3f964d", "#d9404a"
COLOURS = {  # of the recipes
    "bf16": INK,
    "nvfp4_rtn": ORANGE,
    "nvidia_nvfp4": GREEN,
    "fp4_all_the_way": "#c46bb0",
    "tetrajet_v2_base": BLUE,
    "base + strict_unbiased": "#2fa8b8",
    "base + OsciReset": "#b0853a",
    "base + OutControl": "#8f7de8",
    "tetrajet_v2": RED,
    "own": "#a9a21c",
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches.

    Args:
        width (`float`): Inches.
        height (`float`): Inches.

    Returns:
        `Figure`: without a background.
    """
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def dress(axes: Axes, title: str = "", x: str = "", y: str = "", legend: bool = True) -> None:
    """Put titles, grid and neutral colours on finished axes.

    Args:
        axes (`Axes`): The axes, everything drawn.
        title (`str`): Above them.
        x (`str`): Below them.
        y (`str`): At their left.
        legend (`bool`, defaults to `True`): Show the labels of what was drawn.
    """
    axes.set_facecolor("none")
    axes.set_title(title, color=INK, fontsize=10.5, loc="left")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(which="both", colors=INK, labelcolor=INK)
    axes.grid(color=INK, alpha=0.18, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in ("left", "bottom"))
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)
