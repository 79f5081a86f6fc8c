"""The second tab: whether the mean of many noisy 4-bit gradients goes to the gradient, or stops at a bias."""

from collections.abc import Iterator
from typing import Any

import gradio as gr
from checks_tetrajet_v2 import MAX_SEED, check_choice, check_choices, check_seed, readable
from figures_tetrajet_v2 import COLOURS, INK, dress, new_figure
from matplotlib.figure import Figure

from hf_pipelines.tetrajet_v2 import METHODS, gradient_concentration

OWN = "own"
LABELS = {
    "nvfp4_rtn": "nvfp4_rtn: everything to nearest",
    "nvidia_nvfp4": "nvidia_nvfp4",
    "fp4_all_the_way": "fp4_all_the_way",
    "tetrajet_v2_base": "tetrajet_v2_base",
    "base + strict_unbiased": "base + strict_unbiased: backward scales rounded up",
    OWN: "your own recipe, by the switches below",
}
DEFAULT = ["nvfp4_rtn", "nvidia_nvfp4", "fp4_all_the_way", "tetrajet_v2_base", "base + strict_unbiased"]
SWITCHES = {
    "align_backward": "re-quantize Q(W), Q(X)",
    "stochastic_grad": "dY stochastic",
    "stochastic_weight": "W stochastic in dX",
    "stochastic_act": "X stochastic in dW",
    "rht_dx": "Hadamard in dX",
    "rht_dw": "Hadamard in dW",
    "outer_128": "outer scale per 128",
    "weight_block_2d": "16×16 weight blocks",
    "strict_unbiased": "backward scales up",
}
BASE = [name for name in SWITCHES if name not in ("weight_block_2d", "strict_unbiased")]
DRAWS = ("16", "64", "256", "1024")
TITLES = {"dx": "input gradient dX", "dw": "weight gradient dW"}
FALLING = 2.0  # largest n·e(n)/e(1) that still counts as falling like 1/n
HEADERS = ["Recipe", "dX: e(1)", "dX: e(n)", "dX: n·e(n)/e(1)", "dW: e(1)", "dW: e(n)", "dW: n·e(n)/e(1)"]
GUIDE = """
The backward pass rounds at random, so one gradient is noisy. That is harmless if the *mean* of many is right: the
error e(n) = ‖mean of n draws − gradient‖²/‖gradient‖² then falls like 1/n (dotted). A curve that turns flat shows a
bias, which no number of steps averages out. The layer is 128×128, with 256 tokens; two of its input channels are 20
and 8 times larger than the others.

Each recipe is compared with the straight-through gradient of *its own* quantized forward pass. Against the gradient
in full precision it is the other way round: NVIDIA's weight gradient, which does not re-quantize, is nearly unbiased
there, and TetraJet-v2's is not.

**Try** your own recipe: switch one thing off at a time. Without *re-quantize*, both turn flat at once. With
the paper's scales (to nearest) a few clipped numbers leave a bias that shows beyond some hundred draws; *backward
scales up* removes it, for a little more noise. OutControl and OsciReset change nothing here.
"""


def own_recipe(switches: list[str]) -> dict[str, Any]:
    """Arguments of `TetraJetConfig` for the switches that are on."""
    fields: dict[str, Any] = {name: name in switches for name in SWITCHES if name != "outer_128"}
    return {"recipe": "tetrajet_v2_base", "outer_block_size": 128 if "outer_128" in switches else -1, **fields}


@readable
def measure_bias(
    recipes: list[str] = DEFAULT,
    draws: str = "64",
    switches: list[str] = BASE,
    seed: int = 0,
    progress: gr.Progress = gr.Progress(),  # noqa: B008  (gradio finds it by its default)
) -> Iterator[tuple]:
    """Measure how the error of the mean of n 4-bit gradients falls with n, for several recipes.

    Args:
        recipes: Of nvfp4_rtn, nvidia_nvfp4, fp4_all_the_way, tetrajet_v2_base, base + strict_unbiased and own.
        draws: Number of gradient draws: 16, 64, 256 or 1024.
        switches: What is on in the recipe own: align_backward, stochastic_grad, stochastic_weight, stochastic_act,
            rht_dx, rht_dw, outer_128, weight_block_2d, strict_unbiased.
        seed: Seed of data and noise, 0 to 2147483647.
        progress: Supplied by gradio.

    Returns:
        A note, the figure, a table; renewed after each recipe.
    """
    names = check_choices("The recipes", recipes, LABELS, least=1)
    switches = check_choices("The switches", switches, SWITCHES)
    count = int(check_choice("The number of draws", draws, DRAWS))
    seed = check_seed(seed)
    marks = [2**k for k in range(count.bit_length())]
    errors: dict[str, dict[str, dict[int, float]]] = {}
    for done, name in enumerate(names):
        progress(done / len(names), desc=name)
        fields = own_recipe(switches) if name == OWN else METHODS[name]
        errors[name] = gradient_concentration(fields, marks, seed)
        yield _note(errors, count), draw(errors), rows(errors)


def growth(error: dict[int, float]) -> float:
    """n·e(n)/e(1) at the last n: 1 without a bias, n where averaging does not help."""
    last = max(error)
    return last * error[last] / error[1]


def rows(errors: dict[str, dict[str, dict[int, float]]]) -> list[list[str]]:
    """A row per recipe: e(1), e(n) and n·e(n)/e(1) of both gradients."""
    table = []
    for name, error in errors.items():
        cells = [name]
        for key in TITLES:
            cells += [f"{error[key][1]:.1e}", f"{error[key][max(error[key])]:.1e}", f"{growth(error[key]):.1f}"]
        table.append(cells)
    return table


def _note(errors: dict[str, dict[str, dict[int, float]]], count: int) -> str:
    falling = [name for name, error in errors.items() if max(map(growth, error.values())) <= FALLING]
    stopped = [name for name in errors if name not in falling]
    parts = []
    if falling:
        parts.append(f"**Both gradients still fall like 1/n after {count} draws: {', '.join(falling)}.**")
    if stopped:
        parts.append(f"At least one turns flat: {', '.join(stopped)}.")
    return " ".join(parts)


def draw(errors: dict[str, dict[str, dict[int, float]]]) -> Figure:
    """e(n) of both gradients on logarithmic axes."""
    figure = new_figure(10, 4.9)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (key, title) in zip(panels, TITLES.items(), strict=True):
        for name, error in errors.items():
            style = {"color": COLOURS[name], "linewidth": 2.0, "marker": "o", "markersize": 3.5}
            axes.loglog(error[key].keys(), error[key].values(), label=name, **style)
        first = max(error[key][1] for error in errors.values())
        marks = list(next(iter(errors.values()))[key])
        axes.loglog(marks, [1.5 * first / n for n in marks], ":", color=INK, label="slope 1/n")
        dress(axes, title, "draws n", "e(n)" if key == "dx" else "", legend=False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, labelcolor=INK, fontsize=9)
    return figure


def toggle_switches(recipes: list[str]) -> Any:
    """The switches count for your own recipe only."""
    return gr.CheckboxGroup(visible=OWN in recipes)


def build_tab() -> None:
    """Lay out the tab inside the current `gr.Tab`."""
    with gr.Row(elem_classes="lab"):
        with gr.Column(elem_classes="controls"):
            recipes = gr.CheckboxGroup(
                [(label, name) for name, label in LABELS.items()], value=DEFAULT, label="Recipes"
            )
            switches = gr.CheckboxGroup(
                [(label, name) for name, label in SWITCHES.items()],
                value=BASE,
                label="Switches of your own recipe",
                info="as they stand: tetrajet_v2_base",
                visible=False,
            )
            draws = gr.Radio(list(DRAWS), value="64", label="Draws", info="1024 takes half a minute or more")
            seed = gr.Number(value=0, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            button = gr.Button("Measure", variant="primary")
        with gr.Column(elem_classes="guide"):
            gr.Markdown(GUIDE, container=True)
        with gr.Column(elem_classes="results"):
            note = gr.Markdown("Press *Measure*: some seconds for the five recipes.", min_height=28)
            figure = gr.Plot(label="Concentration", format="png", show_label=False, elem_classes="figure")
            table = gr.Dataframe(headers=HEADERS, interactive=False)
    button.click(
        measure_bias,
        [recipes, draws, switches, seed],
        [note, figure, table],
        api_name="measure_bias",
        show_progress_on=figure,
        concurrency_id="gradient",
        concurrency_limit=2,
    )
    recipes.input(toggle_switches, recipes, switches, api_visibility="private", show_progress="hidden", queue=False)
