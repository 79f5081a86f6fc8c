"""The first tab: a row of numbers, its 4-bit codes and the two scales above them."""

import math
from typing import Any

import gradio as gr
import microscope_tetrajet_v2 as microscope
from checks_tetrajet_v2 import MAX_SEED, check_choice, check_number, check_seed, choices, readable

SIZE_RANGE, OUTLIER_RANGE, DRAWS_RANGE = (8, 512), (0, 10**9), (1, 1000)
OWN = "6 0.25 0.75 1.25 1.75 2.5 3.5 5 -0.25 -0.75 -5 0 0.2499 -6 0.001 3"
SCALES = ["Values", "s_o, FP32", "s_i, E4M3", "Byte", "s_i · s_o", "largest |t|", "Relative error"]
CODES = ["#", "x", "t", "Code", "Value", "x̂", "x̂ − x"]
OTHERS = ["Format of this row", "Relative error", "Without the largest number", "Bits per number"]
GUIDE = """
A number takes 4 bits: a sign and one of 0, ½, 1, 1½, 2, 3, 4, 6. Sixteen of them share an 8-bit scale s_i, 128 of
these numbers a 32-bit scale s_o; t = x/(s_i · s_o) is what gets rounded.

**Try.** *An outlier* of 50: only its own block of 16 gets coarse, because s_i still has room. *100,000,000 with one
scale for the whole row*: the other blocks would need an s_i below the smallest, 2⁻⁹, and all become 0; with outer
blocks of 128 the second half of the row does not notice. *Stochastic* rounding doubles the error of one draw, but the
mean of many draws goes to x. Where |t| is above 6 it is clipped and does not: scales rounded *up* avoid that.
*Numbers of your own* may be nan or inf: the whole outer block then becomes NaN, never a wrong number.
"""


@readable
def inspect_format(
    distribution: str = "normal",
    size: int = 256,
    outlier: float = 0,
    outer_block: str = "128",
    rounding: str = "nearest",
    scale_rounding: str = "nearest",
    draws: int = 1,
    seed: int = 0,
    own: str = OWN,
) -> tuple:
    """Quantize a row of numbers to NVFP4 and show its codes, its scales and the error.

    Args:
        distribution: What the numbers are: normal, laplace, student, uniform, ties or own.
        size: How many random numbers, 8 to 512.
        outlier: Value of one number after the first third of the row, 0 to 1000000000; 0 for none.
        outer_block: Values under one FP32 scale: 128, 64, 32, or -1 for the whole row.
        rounding: Rounding of the numbers: nearest or stochastic.
        scale_rounding: Rounding of the inner scales: nearest or up.
        draws: Stochastic draws that are averaged, 1 to 1000.
        seed: Seed of numbers and noise, 0 to 2147483647.
        own: Up to 512 numbers for the distribution own; nan and inf are allowed.

    Returns:
        A note, the figure, a table of scales, a table of codes, a table of the error in other formats.
    """
    check_choice("The distribution", distribution, microscope.DISTRIBUTIONS)
    size = check_number("The number of values", size, *SIZE_RANGE, whole=True)
    outlier = check_number("The outlier", outlier, *OUTLIER_RANGE)
    outer = int(check_choice("The outer block", outer_block, microscope.OUTERS))
    check_choice("The rounding", rounding, microscope.ROUNDINGS)
    check_choice("The rounding of the scales", scale_rounding, microscope.SCALE_ROUNDINGS)
    draws = check_number("The number of draws", draws, *DRAWS_RANGE, whole=True)
    seed = check_seed(seed)
    x = microscope.parse(own) if distribution == "own" else microscope.sample(distribution, size, outlier, seed)
    seen = microscope.view(x, outer, rounding, scale_rounding, draws, seed)
    tables = microscope.scale_rows(seen), microscope.code_rows(seen), microscope.other_rows(seen, seed)
    return _note(seen, draws if rounding == "stochastic" else 1), microscope.draw(seen), *tables


def _note(seen: microscope.View, draws: int) -> str:
    bits = f"{microscope.bits(len(seen.x), seen.outer_block):.2f} bits per number"
    broken = int((~seen.x.isfinite()).sum())
    if broken:
        lost = int((~seen.mean.isfinite()).sum())
        return (
            f"**{broken} of {len(seen.x)} numbers {'is' if broken == 1 else 'are'} NaN or infinite: {lost} become "
            f"NaN**, the whole outer {'block' if seen.outer_block > 0 else 'row'}. {bits}."
        )
    error = microscope.relative_error(seen.x, seen.mean)
    decibel = f" ({-10 * math.log10(error):.1f} dB)" if error else ", exact"
    mean = f" of the mean of {draws} draws" if draws > 1 else ""
    clipped = int(((seen.x / seen.scale).abs() > 6.0005).sum())
    text = f"**Relative squared error{mean} {error:.2e}{decibel}** at {bits}."
    if clipped:
        text += f" {clipped} of {len(seen.x)} numbers {'is' if clipped == 1 else 'are'} clipped: |t| > 6."
    return text


def toggle_inputs(distribution: str, rounding: str) -> tuple[Any, ...]:
    """Own numbers count for their choice only, draws for stochastic rounding."""
    own = distribution == "own"
    return (
        gr.Textbox(visible=own),
        gr.Slider(interactive=not own),
        gr.Number(interactive=not own),
        gr.Slider(interactive=rounding == "stochastic"),
    )


def build_tab(page: gr.Blocks) -> None:
    """Lay out the tab inside the current `gr.Tab` of `page`."""
    with gr.Row(elem_classes="lab"):
        with gr.Column(elem_classes="controls"):
            distribution = gr.Dropdown(choices(microscope.DISTRIBUTIONS), value="normal", label="Numbers")
            own = gr.Textbox(OWN, label="Numbers of your own", lines=3, visible=False)
            size = gr.Slider(*SIZE_RANGE, value=256, step=8, label="How many")
            outlier = gr.Number(
                value=0, minimum=0, maximum=OUTLIER_RANGE[1], label="Outlier", info="value of one number; 0: none"
            )
            outer_block = gr.Radio(choices(microscope.OUTERS), value="128", label="One outer scale for")
            rounding = gr.Radio(choices(microscope.ROUNDINGS), value="nearest", label="Rounding")
            scale_rounding = gr.Radio(
                choices(microscope.SCALE_ROUNDINGS), value="nearest", label="Rounding of the inner scales"
            )
            draws = gr.Slider(*DRAWS_RANGE, value=1, step=1, label="Draws to average", interactive=False)
            seed = gr.Number(value=0, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            button = gr.Button("Quantize", variant="primary")
        with gr.Column(elem_classes="guide"):
            gr.Markdown(GUIDE, container=True)
        with gr.Column(elem_classes="results"):
            note = gr.Markdown(min_height=28)
            figure = gr.Plot(label="Row", format="png", show_label=False, elem_classes="figure")
            others = gr.Dataframe(headers=OTHERS, interactive=False)
            gr.Markdown("### Scales of every inner block")
            scales = gr.Dataframe(headers=SCALES, interactive=False, max_height=330)
            gr.Markdown("### Codes")
            codes = gr.Dataframe(headers=CODES, interactive=False, max_height=380)
    inputs = [distribution, size, outlier, outer_block, rounding, scale_rounding, draws, seed, own]
    shown = [note, figure, scales, codes, others]
    button.click(inspect_format, inputs, shown, api_name="inspect_format", show_progress_on=figure)
    page.load(inspect_format, inputs, shown, api_visibility="private", show_progress_on=figure)
    gr.on(
        [distribution.input, rounding.input],
        toggle_inputs,
        [distribution, rounding],
        [own, size, outlier, draws],
        api_visibility="private",
        show_progress="hidden",
        queue=False,
    )
