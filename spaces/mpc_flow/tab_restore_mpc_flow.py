"""The first tab: degrade an image, restore it, look at what happened."""

from typing import Any

import gradio as gr
import numpy as np
import pictures_mpc_flow as pictures
import restore_mpc_flow as restoring
import torch
from checks_mpc_flow import LOG10_LAM_RANGE, MAX_SEED, check_choice, check_number, choices, readable
from restore_mpc_flow import METHODS, PROBLEMS

SOURCES = {"digit": "Test digit", "upload": "Upload", "draw": "Draw"}
NUM_THUMBNAILS = 14
CANVAS = 320  # pixels a side
TABLE_HEADERS = ["", "Truth", "Degraded", "Restored"]
PRIOR_NOTE = (
    "**Your own picture.** It was shrunk to 16×16 grey pixels. The model has only seen handwritten digits: anything "
    "else is pulled towards one."
)
READING_GUIDE = """
**How to read this**

*Measurement*: y projected back to an image, for people; the method sees y itself.

*Endpoint estimate*: what the model expects the final image to be, step by step.

*Nearest training digit*: a model that only remembers would restore exactly this.

*Residual, error*: blue below zero, red above; full colour at the value in the title. A good residual looks like
the noise.
"""


def _truth(source: str, digit: int, file: str | None, drawing: dict | None) -> torch.Tensor:
    check_choice("The source", source, SOURCES)
    if source == "digit":
        return restoring.digit_image(digit)
    return restoring.uploaded_image(file) if source == "upload" else restoring.drawn_image(drawing)


@readable
def degrade(
    source: str = "digit",
    digit: int = 8,
    file: str | None = None,
    drawing: dict | None = None,
    problem: str = "random",
    noise_std: float = 0.01,
    seed: int = 0,
) -> tuple:
    """Simulate a measurement of an image.

    Args:
        source: Where the image comes from: "digit", "upload" or "draw".
        digit: Number of the test digit, 0 to 199, for "digit".
        file: A PNG, JPEG, WebP, BMP or GIF picture of 8 pixels a side to 16 megapixels, for "upload".
        drawing: A sketch with dark strokes on a light canvas, for "draw".
        problem: Degradation: denoise, box, random, freeform, blur, motion, super_resolution, hdr, tanh_blur, phase.
        noise_std: Standard deviation of the noise, 0 to 0.5; images span [-1, 1].
        seed: Seed of mask, blur path and noise, 0 to 2147483647.

    Returns:
        Picture of the truth, picture of the measurement, a note.
    """
    measured = restoring.measure(_truth(source, digit, file, drawing), problem, noise_std, seed)
    note = "" if source == "digit" else PRIOR_NOTE
    return pictures.to_picture(measured.truth), pictures.to_picture(measured.degraded), note


@readable
def restore(
    source: str = "digit",
    digit: int = 8,
    file: str | None = None,
    drawing: dict | None = None,
    problem: str = "random",
    noise_std: float = 0.01,
    method: str = "k1_churn",
    log10_lam: float = 2.0,
    auto_lam: bool = True,
    steps: int = 50,
    seed: int = 0,
    progress: gr.Progress = gr.Progress(),  # noqa: B008  (gradio finds it by its default)
) -> tuple:
    """Simulate a measurement of an image and restore the image from it.

    Args:
        source: Where the image comes from: "digit", "upload" or "draw".
        digit: Number of the test digit, 0 to 199, for "digit".
        file: A PNG, JPEG, WebP, BMP or GIF picture of 8 pixels a side to 16 megapixels, for "upload".
        drawing: A sketch with dark strokes on a light canvas, for "draw".
        problem: Degradation: denoise, box, random, freeform, blur, motion, super_resolution, hdr, tanh_blur, phase.
        noise_std: Standard deviation of the noise, 0 to 0.5; images span [-1, 1].
        method: How to restore: k1, k1_churn, k3, dt, pnp_flow or flowgrad.
        log10_lam: log10 of the weight of the data, -1 to 3; without meaning for pnp_flow.
        auto_lam: Take the weight of the data from noise_std instead; for k1 and k1_churn only.
        steps: Sampling steps, 1 to 100 (k1, k1_churn, pnp_flow), to 30 (dt) or to 25 (k3, flowgrad).
        seed: Seed of mask, noise and starting noise, 0 to 2147483647.
        progress: Supplied by gradio.

    Returns:
        Pictures of truth, measurement and result, the pair of the last two, the last endpoint estimate, the step it
        belongs to, data residual, error, nearest training digit, table of scores, a note.
    """
    chosen = check_choice("The method", method, METHODS)
    lam: float | str = 10 ** check_number("log₁₀ λ", log10_lam, *LOG10_LAM_RANGE)
    if auto_lam and chosen.baseline is None:
        lam = "auto"
    measured = restoring.measure(_truth(source, digit, file, drawing), problem, noise_std, seed)
    progress(0.1, desc=f"{chosen.label}, {steps:g} steps")
    restored = restoring.restore(measured, method, lam, steps, seed)
    progress(0.95, desc="pictures")
    truth, degraded, image = map(pictures.to_picture, (measured.truth, measured.degraded, restored.image))
    rows = restoring.scores(measured, restored)
    data, data_scale = pictures.to_signed_picture(restoring.residual(measured, restored.image))
    error, error_scale = pictures.to_signed_picture(restored.image - measured.truth)
    count = len(restored.endpoints)
    return (
        truth,
        degraded,
        image,
        (degraded, image),
        pictures.to_picture(restored.endpoints[-1]),
        gr.Slider(1, count, value=count, step=1, interactive=count > 1),
        gr.Image(data, label=f"Data residual A(x) − y, ±{data_scale:.2f}"),
        gr.Image(error, label=f"Error x − truth, ±{error_scale:.2f}"),
        pictures.to_picture(restoring.nearest_training_digit(restored.image)),
        rows,
        _summary(rows, chosen, lam, [PROBLEMS[problem].note, PRIOR_NOTE if source != "digit" else ""]),
        restored.endpoints,
    )


def _summary(rows: list[list[str]], method: restoring.Method, lam: float | str, notes: list[str]) -> str:
    cells = {name: values for name, *values in rows}
    _, before, after = rows[0][1:]
    weight = "λ from the noise level" if lam == "auto" else f"λ = {lam:.3g}"
    text = (
        f"**{before} → {after} dB** with {method.label.partition(':')[0] if method.baseline is None else method.label}"
        f"{f', {weight}' if method.uses_lam else ''}: {cells['Network calls, forward'][2]} network calls, "
        f"{cells['Network calls, backward'][2]} of them with a backward pass, {cells['Seconds'][2]} s."
    )
    return "\n\n".join([text, *filter(None, notes)])


@readable
def show_endpoint(step: int, endpoints: torch.Tensor | None) -> Any:
    """Show what the model expected the final image to be at a step of the last restoration.

    Args:
        step: The step, from 1.
        endpoints: The session's own; clients leave it out.

    Returns:
        Picture of the endpoint estimate.
    """
    if endpoints is None:
        raise ValueError("There are no estimates yet: restore an image first.")
    return pictures.to_picture(endpoints[check_number("The step", step, 1, len(endpoints), whole=True) - 1])


@readable
def problem_defaults(problem: str) -> tuple:
    """Say which noise level and weight of the data suit a degradation.

    Args:
        problem: Degradation: denoise, box, random, freeform, blur, motion, super_resolution, hdr, tanh_blur, phase.

    Returns:
        noise_std, log10_lam.
    """
    chosen = check_choice("The degradation", problem, PROBLEMS)
    return chosen.noise_std, chosen.log10_lam


@readable
def method_defaults(method: str) -> tuple:
    """Say which settings a method has.

    Args:
        method: How to restore: k1, k1_churn, k3, dt, pnp_flow or flowgrad.

    Returns:
        Steps, whether the weight of the data comes from the noise level, the slider of the weight.
    """
    chosen = check_choice("The method", method, METHODS)
    return (
        gr.Slider(1, chosen.max_steps, value=chosen.steps, step=1),
        gr.Checkbox(value=chosen.knows_auto, interactive=chosen.knows_auto),
        gr.Slider(interactive=chosen.uses_lam and not chosen.knows_auto),
    )


def _toggle_lam(auto_lam: bool) -> Any:
    return gr.Slider(interactive=not auto_lam)


def _show_source(source: str) -> tuple:
    return tuple(gr.Column(visible=source == key) for key in SOURCES)


def _pick_digit(event: gr.SelectData) -> int:
    return event.index


def _picture(label: str) -> gr.Image:
    return gr.Image(
        label=label, format="png", interactive=False, buttons=["fullscreen"], min_width=200, elem_classes="pixels"
    )


def build_tab(page: gr.Blocks) -> None:
    """Lay out the tab inside the current `gr.Tab` of `page`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            source = gr.Radio([(label, key) for key, label in SOURCES.items()], value="digit", label="Image")
            with gr.Column(visible=True) as digit_column:
                thumbnails = gr.Gallery(
                    [pictures.to_picture(image, 64) for image in restoring.digits("test")[:NUM_THUMBNAILS]],
                    columns=7,
                    height=120,
                    label="First test digits",
                    show_label=False,
                    allow_preview=False,
                    buttons=[],
                    interactive=False,
                    elem_classes=["pixels", "thumbnails"],
                )
                digit = gr.Slider(0, 199, value=8, step=1, label="Test digit", info="none of the 200 was trained on")
            with gr.Column(visible=False) as upload_column:
                file = gr.File(label="Picture, at most 16 megapixels", height=130)
            with gr.Column(visible=False) as draw_column:
                gr.Markdown("Draw one digit with the brush, as large as the canvas. Ink becomes white.")
                canvas = gr.ImageEditor(
                    value=np.full((CANVAS, CANVAS), 255, dtype=np.uint8),
                    label="Drawing",
                    show_label=False,
                    type="numpy",
                    image_mode="L",
                    sources=(),
                    transforms=(),
                    layers=False,
                    canvas_size=(CANVAS, CANVAS),
                    fixed_canvas=True,
                    brush=gr.Brush(default_size=32, colors=["#000000"], color_mode="fixed"),
                    height=400,
                )
                drawing = pictures.bound_canvas(canvas)
            problem = gr.Dropdown(choices(PROBLEMS), value="random", label="Degradation A")
            noise_std = gr.Slider(
                0,
                restoring.MAX_NOISE,
                value=PROBLEMS["random"].noise_std,
                step=0.01,
                label="Noise level σ",
                info="pixels span −1 … 1",
            )
            method = gr.Dropdown(choices(METHODS), value="k1_churn", label="Method")
            auto_lam = gr.Checkbox(value=True, label="λ from the noise level (K = 1 only)")
            log10_lam = gr.Slider(
                *LOG10_LAM_RANGE,
                value=PROBLEMS["random"].log10_lam,
                step=0.1,
                label="Weight of the data: log₁₀ λ",
                info="2 means λ = 100",
                interactive=False,
            )
            steps = gr.Slider(1, 100, value=METHODS["k1_churn"].steps, step=1, label="Steps N")
            seed = gr.Number(value=0, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            with gr.Row():
                degrade_button = gr.Button("Degrade")
                restore_button = gr.Button("Restore", variant="primary")
        with gr.Column(scale=5, min_width=560):
            note = gr.Markdown(min_height=28)
            with gr.Row():
                truth, degraded, restored = _picture("Truth"), _picture("Measurement"), _picture("Restored")
            with gr.Row():
                compare = gr.ImageSlider(
                    label="Measurement ↔ restored",
                    format="png",
                    interactive=False,
                    buttons=["fullscreen"],
                    elem_classes="pixels",
                )
                with gr.Column(min_width=200):
                    endpoint = _picture("Endpoint estimate")
                    step = gr.Slider(1, 100, value=1, step=1, label="Step", interactive=False)
                nearest = _picture("Nearest training digit")
            with gr.Row():
                data_residual, error = _picture("Data residual A(x) − y"), _picture("Error x − truth")
                gr.Markdown(READING_GUIDE, container=True)
            table = gr.Dataframe(
                headers=TABLE_HEADERS, interactive=False, wrap=True, column_widths=["46%", "18%", "18%", "18%"]
            )
    endpoints = gr.State(time_to_live=3600)  # (N, 16, 16), of this visitor

    measurement = [source, digit, file, drawing, problem, noise_std]
    settings = [*measurement, method, log10_lam, auto_lam, steps, seed]
    shown = [truth, degraded, restored, compare, endpoint, step, data_residual, error, nearest, table, note, endpoints]
    # one at a time: attaching a controller swaps the scheduler of the one shared pipeline
    network: dict[str, Any] = {"concurrency_id": "network", "concurrency_limit": 1}

    restore_button.click(restore, settings, shown, api_name="restore", show_progress_on=restored, **network)
    page.load(restore, settings, shown, api_visibility="private", show_progress_on=restored, **network)
    gr.on(
        [degrade_button.click, file.upload],
        degrade,
        [*measurement, seed],
        [truth, degraded, note],
        api_name="degrade",
        show_progress_on=degraded,
    )
    # a few milliseconds each: straight to the function, past the queue
    quick: dict[str, Any] = {"show_progress": "hidden", "queue": False}
    step.input(
        show_endpoint, [step, endpoints], endpoint, api_name="show_endpoint", trigger_mode="always_last", **quick
    )
    problem.input(problem_defaults, problem, [noise_std, log10_lam], api_name="problem_defaults", **quick)
    method.input(method_defaults, method, [steps, auto_lam, log10_lam], api_name="method_defaults", **quick)
    private: dict[str, Any] = {"api_visibility": "private", **quick}
    auto_lam.input(_toggle_lam, auto_lam, log10_lam, **private)
    source.input(_show_source, source, [digit_column, upload_column, draw_column], **private)
    thumbnails.select(_pick_digit, None, digit, **private)
