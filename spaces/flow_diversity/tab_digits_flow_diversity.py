"""The first tab: one set of digits, sampled plainly and kept apart, from the same starting noise."""

from typing import Any

import figures_flow_diversity as figures
import gradio as gr
import sets_flow_diversity as sets
from checks_flow_diversity import (
    BETA_RANGE,
    GAMMA_RANGE,
    LOG10_TAU_RANGE,
    MAX_IMAGES,
    MAX_SEED,
    STEPS_RANGE,
    check_choice,
    check_control,
    check_number,
    check_sampling,
    choices,
    readable,
)
from sets_flow_diversity import ANY, CLASSES, NUM_CLUSTERS, Scores

GUIDANCE_RANGE = (1.0, 8.0)
SCORE_HEADERS = ["", "Plain", "Controlled"]
SWEEP_HEADERS = ["Method", "Strength", "Vendi", "Reached", "Precision"]
ONE_IMAGE_NOTE = "**One image: there is nothing to spread.** Both pictures are the plain one; take two or more."
NO_CONTROL_NOTE = "**Strength 0 and no noise: nothing is controlled.** Both sets are the plain one, bit for bit."
EMPTY_GATE_NOTE = "**The gates cover none of the steps: nothing was controlled.** Widen the gate or take more steps."
GUIDE = f"""
**How to read this**

*Frames*: digits in frames of one colour fall into the same of {NUM_CLUSTERS} clusters of real training images of that
digit (with any digit: into the same class).

*Vendi score*: how many different images the set is worth, 1 if all are alike. A small dense network steers; another,
convolutional and trained apart, judges clusters, precision and the first Vendi score. In its own features the guide
looks better than it is.

*Precision*: share of the images that lie among real ones. Strength buys diversity with it.

*Log-volume*: what the method enlarges, in the guide's features. With guidance above 1 the controlled line can run
below the plain one inside the gate, because guidance pulls back what is pushed; what counts is where it ends.

*One set is an anecdote*: the sweep averages {sets.SWEEP_SETS} of them. DPP and Particle Guidance are strong rivals on
digits: at an equal Vendi score they often reach more clusters, at some cost of precision. Noise alone does little.
"""


@readable
def spread(
    label: str = "3",
    num_images: int = 8,
    steps: int = 30,
    guidance: float = 3.0,
    gamma0: float = 4.0,
    gate_low: float = 0.6,
    gate_high: float = 1.0,
    log10_tau: float = 1.0,
    beta0: float = 0.1,
    project: bool = True,
    seed: int = 0,
) -> tuple:
    """Sample a set of digits twice from the same starting noise: plainly, and kept apart.

    Args:
        label: The digit, "0" to "9", or "any" for unconditional sampling.
        num_images: Images in the set, 1 to 16; one alone cannot be spread.
        steps: Sampling steps, 2 to 60.
        guidance: Weight of classifier-free guidance, 1 to 8; without meaning for "any".
        gamma0: Strength of the spread, 0 to 12; 0 turns it off.
        gate_low: Lower end of the noise levels at which the spread acts, 0 to 1.
        gate_high: Upper end of the noise levels at which the spread acts, 0 to 1.
        log10_tau: log10 of tau, the scale of the log-volume, -1 to 3.
        beta0: Strength of the noise, 0 to 1; 0 turns it off.
        project: Whether spread and noise keep at right angles to the model's velocity.
        seed: Seed of the starting noise and of the noise, 0 to 2147483647.

    Returns:
        Picture of the plain set, picture of the controlled set, a caption of each, table of scores, figure of the
        log-volume over the noise level, a note.
    """
    check_choice("The digit", label, CLASSES)
    num_images, steps, seed = check_sampling(num_images, steps, seed)
    guidance = check_number("The guidance", guidance, *GUIDANCE_RANGE)
    settings = check_control(gamma0, gate_low, gate_high, log10_tau, beta0, project)
    run = {"steps": steps, "guidance": guidance, "seed": seed, "tau": settings["tau"]}
    plain = sets.sample(None, label, num_images, **run)
    controller = sets.spread_controller(num_images, **settings)
    controlled = sets.sample(controller, label, num_images, **run)
    before, after = sets.score(plain.images, label), sets.score(controlled.images, label)
    if num_images == 1:
        note = ONE_IMAGE_NOTE
    elif controller is None:
        note = NO_CONTROL_NOTE
    elif not controlled.acted:
        note = EMPTY_GATE_NOTE
    else:
        note = _summary(before, after, label)
    return (
        figures.grid(plain.images, before.groups),
        figures.grid(controlled.images, after.groups),
        _caption(before, label),
        _caption(after, label),
        _rows(before, after, label, plain, controlled),
        figures.draw_volumes(plain, controlled, settings["gate"]),
        note,
    )


def _reached(label: str) -> tuple[str, int]:
    """What is counted, and of how many."""
    return ("classes", 10) if label == ANY else ("clusters", NUM_CLUSTERS)


def _caption(scores: Scores, label: str) -> str:
    name, total = _reached(label)
    return (
        f"Vendi **{scores.vendi_judge:.2f}** (pixels {scores.vendi_pixels:.2f}) · "
        f"**{scores.reached}** of {total} {name} · precision **{scores.precision:.2f}**"
    )


def _summary(before: Scores, after: Scores, label: str) -> str:
    name, total = _reached(label)
    gain = 100 * (after.vendi_judge / before.vendi_judge - 1)
    return (
        f"**Vendi score {before.vendi_judge:.2f} → {after.vendi_judge:.2f} ({gain:+.0f} %)** from the same starting "
        f"noise: {before.reached} → {after.reached} of {total} {name}, precision {before.precision:.2f} → "
        f"{after.precision:.2f}."
    )


def _rows(before: Scores, after: Scores, label: str, plain: sets.DigitSet, controlled: sets.DigitSet) -> list:
    name, total = _reached(label)
    return [
        ["Vendi, independent classifier", f"{before.vendi_judge:.3f}", f"{after.vendi_judge:.3f}"],
        ["Vendi, pixels", f"{before.vendi_pixels:.3f}", f"{after.vendi_pixels:.3f}"],
        ["Vendi, the encoder that guides", f"{before.vendi_guide:.3f}", f"{after.vendi_guide:.3f}"],
        [f"{name.capitalize()} reached, of {total}", str(before.reached), str(after.reached)],
        ["Precision", f"{before.precision:.3f}", f"{after.precision:.3f}"],
        ["Seconds", f"{plain.seconds:.2f}", f"{controlled.seconds:.2f}"],
    ]


@readable
def sweep(
    label: str = "3",
    num_images: int = 8,
    steps: int = 30,
    guidance: float = 3.0,
    gate_low: float = 0.6,
    gate_high: float = 1.0,
    log10_tau: float = 1.0,
    beta0: float = 0.1,
    project: bool = True,
    seed: int = 0,
    progress: gr.Progress = gr.Progress(),  # noqa: B008  (gradio finds it by its default)
) -> tuple:
    """Trace diversity against fidelity for plain sampling, SDE noise, Particle Guidance, DPP and this method.

    Args:
        label: The digit, "0" to "9", or "any" for unconditional sampling.
        num_images: Images in a set, 2 to 16.
        steps: Sampling steps, 2 to 60.
        guidance: Weight of classifier-free guidance, 1 to 8; without meaning for "any".
        gate_low: Lower end of the noise levels at which this method's spread acts, 0 to 1.
        gate_high: Upper end of the noise levels at which this method's spread acts, 0 to 1.
        log10_tau: log10 of tau of this method, -1 to 3.
        beta0: Strength of this method's noise, 0 to 1.
        project: Whether this method keeps at right angles to the model's velocity.
        seed: Seed of the starting noise, the same for all methods, 0 to 2147483647.
        progress: Supplied by gradio.

    Returns:
        The figure, a table of the means over the sets.
    """
    check_choice("The digit", label, CLASSES)
    num_images, steps, seed = check_sampling(num_images, steps, seed)
    if num_images < 2:
        raise ValueError("One image has no diversity to sweep: take 2 images or more.")
    guidance = check_number("The guidance", guidance, *GUIDANCE_RANGE)
    settings = check_control(1.0, gate_low, gate_high, log10_tau, beta0, project)
    points = [
        sets.sweep_point(name, strength, label, num_images, steps, guidance, seed, settings)
        for name, strength in progress.tqdm(sets.sweep_runs(), desc="sampling")
    ]
    rows = [
        [
            sets.METHODS[point.method].label,
            f"{sets.METHODS[point.method].symbol} = {point.strength:g}" if point.method != "plain" else "–",
            f"{point.vendi:.2f}",
            f"{point.reached:.2f}",
            f"{point.precision:.3f}",
        ]
        for point in points
    ]
    return figures.draw_sweep(points, label, num_images), rows


def _toggle_guidance(label: str) -> Any:
    return gr.Slider(interactive=label != ANY)


def _show_sweep() -> Any:
    return gr.Column(visible=True)


def _picture(label: str) -> gr.Image:
    return gr.Image(
        label=label,
        show_label=False,  # it would cover the first digits
        format="png",
        image_mode="RGBA",
        interactive=False,
        buttons=[],
        min_width=280,
        elem_classes="pixels",
    )


def build_tab(page: gr.Blocks) -> None:
    """Lay out the tab inside the current `gr.Tab` of `page`."""
    sets.judge()  # seconds of training, now rather than at the first click
    defaults = sets.pipeline().config
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            label = gr.Dropdown(choices(CLASSES), value="3", label="Prompt")
            num_images = gr.Slider(1, MAX_IMAGES, value=8, step=1, label="Images m")
            gamma0 = gr.Slider(
                *GAMMA_RANGE,
                value=defaults["gamma0"],
                step=0.5,
                label="Strength γ₀",
                info="0 turns the spread off; large values cost fidelity",
            )
            gate_low = gr.Slider(
                0,
                1,
                value=defaults["gate"][0],
                step=0.05,
                label="Gate: from σ",
                info="noise levels at which the spread acts",
            )
            gate_high = gr.Slider(0, 1, value=defaults["gate"][1], step=0.05, label="Gate: to σ")
            log10_tau = gr.Slider(
                *LOG10_TAU_RANGE, value=1, step=0.5, label="Scale of the volume: log₁₀ τ", info="1 means τ = 10"
            )
            beta0 = gr.Slider(*BETA_RANGE, value=defaults["beta0"], step=0.05, label="Noise β₀")
            project = gr.Checkbox(value=True, label="Keep at right angles to the flow (projection)")
            guidance = gr.Slider(*GUIDANCE_RANGE, value=3, step=0.5, label="Guidance scale")
            steps = gr.Slider(*STEPS_RANGE, value=30, step=1, label="Steps N")
            seed = gr.Number(value=0, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            with gr.Row():
                sweep_button = gr.Button("Sweep strength")
                spread_button = gr.Button("Sample", variant="primary")
        with gr.Column(scale=5, min_width=620):
            note = gr.Markdown(min_height=28)
            with gr.Row():
                with gr.Column(min_width=290):
                    gr.Markdown("### Plain")
                    plain = _picture("Plain")
                    plain_caption = gr.Markdown(min_height=24)
                with gr.Column(min_width=290):
                    gr.Markdown("### Controlled, from the same starting noise")
                    controlled = _picture("Controlled")
                    controlled_caption = gr.Markdown(min_height=24)
            with gr.Row():
                with gr.Column(min_width=290):
                    volumes = gr.Plot(label="Log-volume", format="png", show_label=False)
                with gr.Column(min_width=290):
                    table = gr.Dataframe(
                        headers=SCORE_HEADERS, interactive=False, wrap=True, column_widths=["56%", "22%", "22%"]
                    )
            with gr.Column(visible=False) as sweep_column:
                sweep_figure = gr.Plot(label="Sweep", format="png", show_label=False)
                sweep_table = gr.Dataframe(headers=SWEEP_HEADERS, interactive=False, wrap=True, max_height=300)
            gr.Markdown(GUIDE, container=True)

    settings = [label, num_images, steps, guidance, gamma0, gate_low, gate_high, log10_tau, beta0, project, seed]
    shown = [plain, controlled, plain_caption, controlled_caption, table, volumes, note]
    # one at a time: attaching a controller swaps the scheduler of the one shared pipeline
    network: dict[str, Any] = {"concurrency_id": "network", "concurrency_limit": 1}
    private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}

    spread_button.click(spread, settings, shown, api_name="spread", show_progress_on=controlled, **network)
    page.load(spread, settings, shown, api_visibility="private", show_progress_on=controlled, **network)
    sweep_button.click(_show_sweep, None, sweep_column, **private).then(
        sweep,
        [entry for entry in settings if entry is not gamma0],
        [sweep_figure, sweep_table],
        api_name="sweep",
        show_progress_on=sweep_figure,
        **network,
    )
    label.input(_toggle_guidance, label, guidance, **private)
