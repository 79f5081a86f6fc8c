"""Guide a text-to-image flow model by a reference picture: the third tab, shown only where there is a GPU.

K = 1 throughout: the control needs the decoder's gradient, never the network's. The settings are those of the FLUX.2
release of arXiv 2601.23231.
"""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr
import PIL.Image
import torch
from checks_mpc_flow import MAX_SEED, check_choice, check_number, readable
from diffusers.utils import is_bitsandbytes_available
from pictures_mpc_flow import open_picture

from hf_pipelines import MPCFlowPipeline, operators
from hf_pipelines.mpc_flow import RELEASE_SETTINGS, GramStyle

logger = logging.getLogger(__name__)

# Label by what the API takes: a Hub id, or "own" for the folder or Hub id that whoever runs the Space has named. A
# visitor may name none, since each base takes tens of gigabytes, and does not see the machine's path.
BASES = {
    "diffusers/FLUX.2-dev-bnb-4bit": "FLUX.2-dev, 4-bit (24 GB)",
    "black-forest-labs/FLUX.1-schnell": "FLUX.1-schnell",
    "stabilityai/stable-diffusion-3.5-medium": "Stable Diffusion 3.5 medium",
    "Tongyi-MAI/Z-Image-Turbo": "Z-Image-Turbo",
}
OWN_BASE = os.environ.get("MPC_FLOW_BASE")
if OWN_BASE:
    BASES = {"own": "Model of this machine", **BASES}
CLIP = os.environ.get("MPC_FLOW_CLIP", "openai/clip-vit-base-patch16")
MAX_STEPS, MAX_PROMPT = 50, 1000


@dataclass(frozen=True)
class Task:
    """What the reference picture asks for.

    Args:
        label (`str`): What people read.
        side (`int`): Sides of the image in pixels.
        operator (`Callable`, *optional*): Makes the measurement operator; `None` for the style.
    """

    label: str
    side: int
    operator: Callable[[], operators.Operator] | None = None


TASKS = {
    "style": Task("Style: Gram matrix of CLIP features", 448),
    "luminance": Task("Luminance: keep light and shade, invent the colours", 256, operators.Colorize),
    "super_resolution": Task("Super-resolution ×4", 512, lambda: operators.SuperResolution(4, kind="bicubic")),
}


@functools.lru_cache(maxsize=1)
def load_base(path: str) -> MPCFlowPipeline:
    """Load a base pipeline in bfloat16, its models on the GPU when they are needed; one at a time is kept."""
    if "bnb-4bit" in path and not is_bitsandbytes_available():
        raise ValueError("This base is stored in 4 bits: it needs `pip install bitsandbytes` on the machine.")
    pipe = MPCFlowPipeline.from_pretrained(path, torch_dtype=torch.bfloat16)
    pipe.enable_model_cpu_offload()
    return pipe


@functools.lru_cache(maxsize=1)
def load_clip() -> torch.nn.Module:
    """Load the vision tower of the style objective."""
    from transformers import CLIPVisionModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return CLIPVisionModel.from_pretrained(CLIP).to(device).eval().requires_grad_(False)


def guide(
    pipe: MPCFlowPipeline,
    task: str,
    reference: PIL.Image.Image,
    steps: int,
    seed: int,
    style_model: Callable[[], torch.nn.Module] = load_clip,
    side: int | None = None,
    **base_arguments,
) -> tuple[PIL.Image.Image, PIL.Image.Image, list[list[str]]]:
    """Generate an image under the control of a reference picture.

    Args:
        pipe ([`MPCFlowPipeline`]): A text-to-image flow pipeline, wrapped.
        task (`str`): A key of `TASKS`.
        reference (`PIL.Image.Image`): The picture, a square.
        steps (`int`): Sampling steps.
        seed (`int`): Seed of the starting noise.
        style_model (`Callable`): Loads the model of the style objective.
        side (`int`, *optional*): Sides of the image; the task's own when `None`.
        base_arguments: Arguments of the wrapped pipeline: `prompt`, `guidance_scale`, ….

    Returns:
        `tuple`: what the reference asks for as a picture, the image, rows of step, σ, objective, ‖u‖.
    """
    chosen, side = TASKS[task], side or TASKS[task].side
    picture = operators.preprocess(reference.convert("RGB"), size=side)
    settings: dict[str, Any] = {
        **RELEASE_SETTINGS[task],
        "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(seed),
        **base_arguments,
    }
    if chosen.operator is None:
        seen = picture
        objective = GramStyle(style_model(), (picture + 1) / 2)
        output = pipe(objective=objective, height=side, width=side, **settings)
    else:
        operator = chosen.operator()
        y = operator.measure(picture)
        seen = operator.pinv(y).expand_as(picture)
        output = pipe(y, operator, phi_scale="mean", **settings)
    rows = [
        [str(e["step"] + 1), f"{e['sigma']:.3f}", f"{e['objective']:.4g}", f"{e['control_norm']:.3g}"]
        for e in output.log
    ]
    pixels = ((seen[0].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return PIL.Image.fromarray(pixels), output.images[0], rows


@readable
def generate(
    base: str,
    task: str,
    prompt: str,
    file: str | None,
    guidance_scale: float,
    steps: int,
    seed: int,
    progress: gr.Progress = gr.Progress(track_tqdm=True),  # noqa: B008  (gradio finds it by its default)
) -> tuple:
    """Generate an image from a text under the control of a reference picture.

    Args:
        base: The text-to-image model, one of those offered: a Hub id, or "own" for that of the machine.
        task: What the picture asks for: style, luminance or super_resolution.
        prompt: The text, at most 1000 characters.
        file: The reference picture: PNG, JPEG, WebP, BMP or GIF, at most 16 megapixels.
        guidance_scale: Weight of the text, 0 to 20.
        steps: Sampling steps, 1 to 50.
        seed: Seed of the starting noise, 0 to 2147483647.
        progress: Supplied by gradio.

    Returns:
        What the reference asks for, the image, a table of objective and control over the steps.
    """
    if base not in BASES:
        raise ValueError(f"The base must be one of {', '.join(BASES)}; got {base!r}.")
    check_choice("The task", task, TASKS)
    if not isinstance(prompt, str) or len(prompt) > MAX_PROMPT:
        raise ValueError(f"The prompt must be a text of at most {MAX_PROMPT} characters.")
    guidance_scale = check_number("The guidance scale", guidance_scale, 0, 20)
    steps = check_number("The number of steps", steps, 1, MAX_STEPS, whole=True)
    seed = check_number("The seed", seed, 0, MAX_SEED, whole=True)
    reference = open_picture(file, colour=True)
    progress(0, desc="loading the model")
    try:
        pipe = load_base(OWN_BASE if base == "own" else base)
    except OSError as error:
        logger.warning("loading %s failed: %s", OWN_BASE if base == "own" else base, error)
        reason = "see the log of the Space" if base == "own" else str(error).splitlines()[0]
        raise ValueError(f"The model {base} could not be loaded: {reason}") from error
    return guide(pipe, task, reference, steps, seed, prompt=prompt, guidance_scale=guidance_scale)


def build_tab() -> None:
    """Lay out the tab inside the current `gr.Tab`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            base = gr.Dropdown(
                [(label, base) for base, label in BASES.items()], value=next(iter(BASES)), label="Text-to-image model"
            )
            task = gr.Radio(
                [(task.label, key) for key, task in TASKS.items()], value="style", label="Reference asks for"
            )
            file = gr.File(label="Reference picture, at most 16 megapixels", height=130)
            prompt = gr.Textbox("a house by the sea", label="Prompt", max_length=MAX_PROMPT, lines=2)
            guidance_scale = gr.Slider(0, 20, value=4, step=0.5, label="Guidance scale")
            steps = gr.Slider(1, MAX_STEPS, value=28, step=1, label="Steps N")
            seed = gr.Number(value=0, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            button = gr.Button("Generate", variant="primary")
        with gr.Column(scale=5, min_width=560):
            with gr.Row():
                seen = gr.Image(label="What the reference asks for", interactive=False, format="png")
                image = gr.Image(label="Image", interactive=False, format="png")
            table = gr.Dataframe(headers=["Step", "σ", "Objective", "‖u‖"], interactive=False)
    button.click(
        generate,
        [base, task, prompt, file, guidance_scale, steps, seed],
        [seen, image, table],
        api_name="generate",
        concurrency_limit=1,
    )
