"""The fourth tab: a tiny language model trained with several recipes side by side, while you watch."""

from collections.abc import Iterator

import gradio as gr
import lm_tetrajet_v2 as lm
from checks_tetrajet_v2 import MAX_SEED, check_choice, check_choices, check_number, check_seed, choices, readable
from lm_tetrajet_v2 import Training

STEPS_RANGE, RATE_RANGE, MOST = (10, 200), (1e-4, 1e-2), 4
DEFAULT = ["bf16", "nvfp4_rtn", "tetrajet_v2"]
HEADERS = ["Recipe", "Loss, last 10", "Held out", "− bf16", "ρ ≥ 8", "ΣD_q/ΣD_w", "Resets", "ms/step"]
NOTHING = "Nothing was trained yet."
GUIDE = """
A Llama of 2 layers and 459,000 weights reads Python's `help()` texts, 8 × 64 characters a step. All recipes start
from the same weights and see the same batches. The three products of its 14 linear layers are computed on 4-bit
operands, bit by bit as hardware would; embedding and output head are not quantized.

*OutControl* records for 10 steps, then keeps a tenth of the channels in 8 bits. *OsciReset* starts at the first
multiple of 20 after a third of the steps, with P = 20, W = 10, τ = 8.

**Read it with care.** In so few steps the recipes differ by noise: try another seed before you rank any. What you see
is that 4 bits cost little here, and that OsciReset cuts the share of oscillating weights, from 60 steps on. Emulation
is slower than plain training; only FP4 tensor cores make it faster.
"""


@readable
def train(
    recipes: list[str] = DEFAULT,
    start: str = "scratch",
    steps: int = 60,
    learning_rate: float = 3e-3,
    seed: int = 0,
    state: Training | None = None,
) -> Iterator[tuple]:
    """Train a tiny language model with up to four recipes side by side; the session keeps the models for `export`.

    Args:
        recipes: Up to four of bf16, nvfp4_rtn, nvidia_nvfp4, fp4_all_the_way, tetrajet_v2_base, base + OsciReset, base
            + OutControl, tetrajet_v2.
        start: First weights: scratch or shipped.
        steps: Optimizer steps, 10 to 200.
        learning_rate: Peak learning rate, 0.0001 to 0.01.
        seed: Seed of weights, batches and noise, 0 to 2147483647.
        state: The session's training, supplied by gradio; a new one replaces it.

    Returns:
        A note, the figure, a table; renewed while it runs.
    """
    names = check_choices("The recipes", recipes, lm.RECIPES, least=1, most=MOST)
    check_choice("The start", start, lm.STARTS)
    steps = check_number("The number of steps", steps, *STEPS_RANGE, whole=True)
    learning_rate = check_number("The learning rate", learning_rate, *RATE_RANGE)
    state = lm.begin(names, start, steps, learning_rate, check_seed(seed))
    for _ in lm.train(state):
        yield _note(state), lm.draw(state), lm.rows(state), state


def _note(state: Training) -> str:
    if not state.is_finished:
        late = f" The time of {lm.LONGEST:.0f} seconds is over." if state.out_of_time else ""
        return f"**Step {state.done} of {state.steps}.**{late}"
    losses = {name: run.held_out for name, run in state.runs.items()}
    listed = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    return f"**{state.steps} steps done. Held-out nats per character: {listed}.** The models can be exported."


def stop_training(state: Training | None) -> str:
    """Say where a stopped training stands."""
    if state is None:
        return NOTHING
    if state.is_finished:
        return _note(state)
    return f"**Stopped after step {state.done} of {state.steps}.** The models can be exported as they are."


def build_tab() -> tuple[gr.State, list]:
    """Lay out the tab inside the current `gr.Tab`.

    Returns:
        The session's training, and the events after which its models may be exported.
    """
    state = gr.State(None, time_to_live=3600)
    with gr.Row(elem_classes="lab"):
        with gr.Column(elem_classes="controls"):
            recipes = gr.CheckboxGroup(
                list(lm.RECIPES), value=DEFAULT, label="Recipes", info=f"up to {MOST}, trained side by side"
            )
            start = gr.Radio(choices(lm.STARTS), value="scratch", label="Start from")
            steps = gr.Slider(*STEPS_RANGE, value=60, step=10, label="Steps")
            rate = gr.Slider(*RATE_RANGE, value=3e-3, step=1e-4, label="Learning rate")
            seed = gr.Number(value=0, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            with gr.Row():
                button = gr.Button("Train", variant="primary", min_width=80)
                stop = gr.Button("Stop", min_width=80)
        with gr.Column(elem_classes="guide"):
            gr.Markdown(GUIDE, container=True)
        with gr.Column(elem_classes="results"):
            note = gr.Markdown(NOTHING, min_height=28)
            figure = gr.Plot(label="Training", format="png", show_label=False, elem_classes="figure")
            table = gr.Dataframe(headers=HEADERS, interactive=False)
    running = button.click(
        train,
        [recipes, start, steps, rate, seed, state],
        [note, figure, table, state],
        api_name="train",
        show_progress="hidden",  # it renews itself
        concurrency_id="train",
        concurrency_limit=2,
    )
    stopped = stop.click(stop_training, state, note, cancels=[running], api_visibility="private", queue=False)
    return state, [running, stopped]
