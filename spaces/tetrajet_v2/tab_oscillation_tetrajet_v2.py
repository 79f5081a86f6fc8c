"""The third tab: weights that flip between two 4-bit values, without and with OsciReset."""

import gradio as gr
import toy_tetrajet_v2 as toy
from checks_tetrajet_v2 import check_choice, check_number, choices, readable

from hf_models.tetrajet_v2 import OsciResetConfig

PERIOD_RANGE, WINDOW_RANGE, THRESHOLD_RANGE = (3, 200), (1, 198), (0.5, 200)
RATE_RANGE, STEPS_RANGE, SHOWN_RANGE = (0.001, 0.2), (10, 800), (10, 800)
WEIGHTS = {str(index): toy.name(index) for index in range(len(toy.STARTS))}
HEADERS = ["Start", "Target", "Flips without", "Flips with", "ρ, first window", "Resets"]
GUIDE = """
Eight weights are pulled to targets by gradient descent, but only their 4-bit values count. A target between two codes
cannot be met: the master weight w hangs at the edge of its bin, and Q(w) jumps from side to side at every step
although w hardly moves. ρ is the way that Q(w) went in a window, over the way that w went.

**OsciReset** watches W steps in every period P and puts the weights with ρ ≥ τ on the centre of their bin. The
optimizer keeps pushing, so they drift back to the edge: it re-centres, it does not freeze. Two of the eight have
targets that are codes; they are left alone.

**Try** a smaller learning rate: the way back from the centre takes longer, so that fewer flips are left. Or a τ above
2/rate, which resets nothing: a weight that flips at every step, its target halfway between two codes, has ρ = 2/rate.
"""


@readable
def oscillate(
    period: int = 50,
    window: int = 10,
    threshold: float = 8,
    learning_rate: float = 0.02,
    steps: int = 400,
    detect: str = "distance_ratio",
    weight: str = "0",
    shown: int = 120,
) -> tuple:
    """Train eight weights whose targets lie between 4-bit values, without and with OsciReset.

    Args:
        period: P, steps from one window's start to the next, 3 to 200.
        window: W, steps of a window, 1 to 198 and below P − 1.
        threshold: τ, reset where D_q/D_w reaches it, 0.5 to 200.
        learning_rate: Step length of the gradient descent, 0.001 to 0.2.
        steps: Steps, 10 to 800.
        detect: How oscillating weights are found: distance_ratio, distance_ratio_mem_eff or bin_edge.
        weight: Which of the eight weights the curves show, 0 to 7.
        shown: Steps that the curves show, 10 to 800.

    Returns:
        A note, the figure, a table of the eight weights.
    """
    period = check_number("The period P", period, *PERIOD_RANGE, whole=True)
    window = check_number("The window W", window, *WINDOW_RANGE, whole=True)
    threshold = check_number("The threshold τ", threshold, *THRESHOLD_RANGE)
    rate = check_number("The learning rate", learning_rate, *RATE_RANGE)
    steps = check_number("The number of steps", steps, *STEPS_RANGE, whole=True)
    shown = min(steps, check_number("The number of steps shown", shown, *SHOWN_RANGE, whole=True))
    check_choice("The detection", detect, toy.DETECTS)
    index = int(check_choice("The weight", weight, WEIGHTS))
    if window + 1 >= period:
        raise ValueError(f"The window W must be less than P − 1 = {period - 1}, got {window}.")
    config = OsciResetConfig(detect=detect, start=0, period=period, window=window, threshold=threshold)
    without, with_reset = (toy.descend(config, rate, steps, reset) for reset in (False, True))
    return (
        _note(without, with_reset, steps),
        toy.draw(without, with_reset, config, index, shown),
        toy.rows(without, with_reset),
    )


def _note(without: toy.Path, with_reset: toy.Path, steps: int) -> str:
    before, after = sum(without.flips), sum(with_reset.flips)
    resets = sum(int(mask.sum()) for _, mask in with_reset.resets)
    saved = f" ({100 * after / before:.0f} % of them)" if before else ""
    return (
        f"**{before:,} flips of the eight weights in {steps} steps without OsciReset, {after:,} with it{saved}**; "
        f"{resets} times a weight was put on its centre."
    )


def build_tab(page: gr.Blocks) -> None:
    """Lay out the tab inside the current `gr.Tab` of `page`."""
    with gr.Row(elem_classes="lab"):
        with gr.Column(elem_classes="controls"):
            period = gr.Slider(*PERIOD_RANGE, value=50, step=1, label="Period P")
            window = gr.Slider(*WINDOW_RANGE, value=10, step=1, label="Window W", info="below P − 1")
            threshold = gr.Slider(*THRESHOLD_RANGE, value=8, step=0.5, label="Threshold τ")
            rate = gr.Slider(*RATE_RANGE, value=0.02, step=0.001, label="Learning rate")
            steps = gr.Slider(*STEPS_RANGE, value=400, step=10, label="Steps")
            detect = gr.Radio(choices(toy.DETECTS), value="distance_ratio", label="Found by")
            weight = gr.Dropdown(choices(WEIGHTS), value="0", label="Weight of the curves")
            shown = gr.Slider(*SHOWN_RANGE, value=120, step=10, label="Steps shown")
            button = gr.Button("Run", variant="primary")
        with gr.Column(elem_classes="guide"):
            gr.Markdown(GUIDE, container=True)
        with gr.Column(elem_classes="results"):
            note = gr.Markdown(min_height=28)
            figure = gr.Plot(label="Oscillation", format="png", show_label=False, elem_classes="figure")
            table = gr.Dataframe(headers=HEADERS, interactive=False)
    inputs = [period, window, threshold, rate, steps, detect, weight, shown]
    outputs = [note, figure, table]
    button.click(oscillate, inputs, outputs, api_name="oscillate", show_progress_on=figure)
    page.load(oscillate, inputs, outputs, api_visibility="private", show_progress_on=figure)
