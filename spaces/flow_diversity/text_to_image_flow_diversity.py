"""Spread the images of one prompt of a text-to-image flow model: the third tab, shown only where there is a GPU."""

import functools
import os
import time
from dataclasses import dataclass

import gradio as gr
import PIL.Image
import torch
from checks_flow_diversity import (
    GAMMA_RANGE,
    MAX_SEED,
    check_choice,
    check_number,
    choices,
    readable,
)
from diffusers.utils import is_bitsandbytes_available

from hf_models import ImageFeatureEncoder
from hf_pipelines import FlowDiversityPipeline
from hf_pipelines.flow_control.metrics import vendi_score
from hf_pipelines.flow_diversity.controller_flow_diversity import log_volume, prepare_features

SIDE = 512  # of an image in pixels
IMAGES_RANGE, STEPS_RANGE, GUIDANCE_RANGE = (2, 8), (2, 50), (0.0, 20.0)
MAX_PROMPT = 1000
OWN = "own"  # key of what the environment names: visitors read neither its path nor its Hub id
HEADERS = ["", "Plain", "Controlled"]
NO_CONTROL_NOTE = "**Strength 0: nothing is controlled.** Both sets are the plain one, bit for bit."
EMPTY_GATE_NOTE = "**The spread's gate covers none of the steps: only noise was added.** Take more steps."
GUIDE = """
*Vendi score*: how many different images the set is worth, 1 if all are alike. *Log-volume*: what the method enlarges.
Both are taken in the features of the encoder that steers, which flatters the controlled set: look at the images too.
One set is an anecdote; large strengths cost fidelity.
"""


@dataclass(frozen=True)
class Model:
    """A model on offer.

    Args:
        label (`str`): What people read.
        path (`str`): Hub id or folder.
        steps (`int`, defaults to 28): Steps that suit a base.
        guidance (`float`, defaults to 4.0): Guidance scale that suits a base.
    """

    label: str
    path: str
    steps: int = 28
    guidance: float = 4.0


def _offer(variable: str, label: str, *models: Model) -> dict[str, Model]:
    """Models by Hub id, in front the one that the environment names: a visitor may not name any."""
    own = os.environ.get(variable)
    return {**({OWN: Model(label, own)} if own else {}), **{model.path: model for model in models}}


BASES = _offer(
    "FLOW_DIVERSITY_BASE",
    "Model of this machine",
    Model("Stable Diffusion 3.5 medium", "stabilityai/stable-diffusion-3.5-medium", guidance=4.5),
    Model("FLUX.1-schnell", "black-forest-labs/FLUX.1-schnell", steps=4, guidance=0.0),
    Model("FLUX.2-dev, 4-bit (24 GB)", "diffusers/FLUX.2-dev-bnb-4bit"),
    Model("Z-Image-Turbo", "Tongyi-MAI/Z-Image-Turbo", steps=9, guidance=0.0),
)
ENCODERS = _offer(
    "FLOW_DIVERSITY_ENCODER",
    "Encoder of this machine",
    Model("CLIP ViT-B/32", "openai/clip-vit-base-patch32"),
    Model("CLIP ViT-L/14", "openai/clip-vit-large-patch14"),
    Model("DINOv2 base", "facebook/dinov2-base"),
)
FIRST_BASE, FIRST_ENCODER = next(iter(BASES)), next(iter(ENCODERS))


@dataclass
class ImageSet:
    """One set and its scores.

    Args:
        images (`list[PIL.Image.Image]`): The images.
        vendi (`float`): Vendi score of the encoder's features.
        volume (`float`): Log-volume of the final set.
        seconds (`float`): Wall-clock time of the sampling.
        spread (`bool`): Whether the spread acted at any step.
    """

    images: list[PIL.Image.Image]
    vendi: float
    volume: float
    seconds: float
    spread: bool


@functools.lru_cache(maxsize=1)
def load_base(path: str) -> FlowDiversityPipeline:
    """Load a base in bfloat16, its models on the GPU when they are needed; one at a time is kept."""
    if "bnb-4bit" in path and not is_bitsandbytes_available():
        raise ValueError("This model is stored in 4 bits: it needs `pip install bitsandbytes` on the machine.")
    pipe = FlowDiversityPipeline.from_pretrained(path, feature_encoder=None, torch_dtype=torch.bfloat16)
    pipe.enable_model_cpu_offload()
    return pipe


@functools.lru_cache(maxsize=1)
def load_encoder(path: str) -> ImageFeatureEncoder:
    """Load a vision tower; one at a time is kept."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ImageFeatureEncoder.from_transformers(path).to(device).requires_grad_(False)


def load(base: Model, encoder: Model) -> FlowDiversityPipeline:
    """The pipeline of a base and an encoder, or `ValueError` that names the one that cannot be had."""
    loaded = []
    for loader, model in ((load_base, base), (load_encoder, encoder)):
        try:
            loaded.append(loader(model.path))
        except OSError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].replace(model.path, model.label)
            raise ValueError(f"{model.label} could not be loaded: {reason}") from error
    return FlowDiversityPipeline(loaded[0].base, loaded[1])


def sample(pipe: FlowDiversityPipeline, gamma0: float, num_images: int, seed: int, **base_arguments) -> ImageSet:
    """Sample one set and score it.

    Args:
        pipe ([`FlowDiversityPipeline`]): A text-to-image flow pipeline and an encoder.
        gamma0 (`float`): Strength of the spread; 0 is the base, bit for bit.
        num_images (`int`): m, images of the set.
        seed (`int`): Seed of the starting noise.
        base_arguments: Arguments of the base: `prompt`, `guidance_scale`, ….

    Returns:
        [`ImageSet`]: the set.
    """
    start = time.perf_counter()
    output = pipe(
        num_images_per_prompt=num_images,
        diversity={"gamma0": gamma0} if gamma0 else False,
        generator=torch.Generator().manual_seed(seed),
        height=SIDE,
        width=SIDE,
        output_type="pt",
        **base_arguments,
    )
    seconds = time.perf_counter() - start
    images = output.images.float().clamp(0, 1)
    with torch.no_grad():
        features = pipe.feature_encoder(2 * images.to(pipe.feature_encoder.device) - 1).double().cpu()
    pixels = (255 * images).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return ImageSet(
        images=[PIL.Image.fromarray(image) for image in pixels],
        vendi=vendi_score(features),
        volume=float(log_volume(prepare_features(features), pipe.config.tau)),
        seconds=seconds,
        spread=any(entry["gamma"] != 0 for entry in output.log),
    )


@readable
def spread_text_to_image(
    base: str = FIRST_BASE,
    encoder: str = FIRST_ENCODER,
    prompt: str = "a house by the sea",
    num_images: int = 4,
    steps: int = BASES[FIRST_BASE].steps,
    guidance: float = BASES[FIRST_BASE].guidance,
    gamma0: float = 4.0,
    seed: int = 0,
    progress: gr.Progress = gr.Progress(track_tqdm=True),  # noqa: B008  (gradio finds it by its default)
) -> tuple:
    """Sample images of a text twice from the same starting noise: plainly, and kept apart.

    Args:
        base: The text-to-image model, one of those offered: a Hub id, or "own" for that of the machine.
        encoder: The encoder in whose features the images are kept apart, one of those offered, likewise.
        prompt: The text, 1 to 1000 characters.
        num_images: Images in the set, 2 to 8.
        steps: Sampling steps, 2 to 50.
        guidance: Weight of the text, 0 to 20.
        gamma0: Strength of the spread, 0 to 12; 0 turns spread and noise off.
        seed: Seed of the starting noise and of the noise, 0 to 2147483647.
        progress: Supplied by gradio.

    Returns:
        The plain images, the controlled images, a table of Vendi score, log-volume and seconds, a note.
    """
    models = check_choice("The model", base, BASES), check_choice("The encoder", encoder, ENCODERS)
    if not isinstance(prompt, str) or not prompt.strip() or len(prompt) > MAX_PROMPT:
        raise ValueError(f"The prompt must be a text of 1 to {MAX_PROMPT} characters.")
    num_images = check_number("The number of images", num_images, *IMAGES_RANGE, whole=True)
    steps = check_number("The number of steps", steps, *STEPS_RANGE, whole=True)
    guidance = check_number("The guidance", guidance, *GUIDANCE_RANGE)
    gamma0 = check_number("The strength γ₀", gamma0, *GAMMA_RANGE)
    seed = check_number("The seed", seed, 0, MAX_SEED, whole=True)
    run = {"prompt": prompt, "num_inference_steps": steps, "guidance_scale": guidance}
    progress(0, desc="loading the models")
    try:
        pipe = load(*models)
        plain, controlled = (sample(pipe, strength, num_images, seed, **run) for strength in (0.0, gamma0))
    except torch.OutOfMemoryError as error:
        raise ValueError("The memory of the GPU does not suffice: take fewer images or a smaller model.") from error
    if gamma0 == 0:
        note = NO_CONTROL_NOTE
    elif not controlled.spread:
        note = EMPTY_GATE_NOTE
    else:
        gain = 100 * (controlled.vendi / plain.vendi - 1)
        note = (
            f"**Vendi score {plain.vendi:.2f} → {controlled.vendi:.2f} ({gain:+.0f} %)** in the features of "
            f"{models[1].label}, from the same starting noise."
        )
    rows = [
        [f"Vendi score, of {num_images}", f"{plain.vendi:.3f}", f"{controlled.vendi:.3f}"],
        ["Log-volume of the final set", f"{plain.volume:.3f}", f"{controlled.volume:.3f}"],
        ["Seconds", f"{plain.seconds:.1f}", f"{controlled.seconds:.1f}"],
    ]
    return plain.images, controlled.images, rows, note


def _suit(base: str) -> tuple[int, float]:
    return BASES[base].steps, BASES[base].guidance


def build_tab() -> None:
    """Lay out the tab inside the current `gr.Tab`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            base = gr.Dropdown(choices(BASES), value=FIRST_BASE, label="Text-to-image model")
            encoder = gr.Dropdown(choices(ENCODERS), value=FIRST_ENCODER, label="Encoder: what different means")
            prompt = gr.Textbox("a house by the sea", label="Prompt", max_length=MAX_PROMPT, lines=2)
            num_images = gr.Slider(*IMAGES_RANGE, value=4, step=1, label="Images m")
            gamma0 = gr.Slider(*GAMMA_RANGE, value=4, step=0.5, label="Strength γ₀", info="0 turns the control off")
            guidance = gr.Slider(*GUIDANCE_RANGE, value=BASES[FIRST_BASE].guidance, step=0.5, label="Guidance scale")
            steps = gr.Slider(*STEPS_RANGE, value=BASES[FIRST_BASE].steps, step=1, label="Steps N")
            seed = gr.Number(value=0, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            button = gr.Button("Sample images", variant="primary")
        with gr.Column(scale=5, min_width=620):
            note = gr.Markdown(min_height=28)
            with gr.Row():
                plain, controlled = (
                    gr.Gallery(label=label, columns=2, format="png", interactive=False, min_width=290)
                    for label in ("Plain", "Controlled, from the same starting noise")
                )
            table = gr.Dataframe(headers=HEADERS, interactive=False, wrap=True, column_widths=["56%", "22%", "22%"])
            gr.Markdown(GUIDE)
    button.click(
        spread_text_to_image,
        [base, encoder, prompt, num_images, steps, guidance, gamma0, seed],
        [plain, controlled, table, note],
        api_name="spread_text_to_image",
        show_progress_on=controlled,
        concurrency_id="text_to_image",  # one at a time: attaching a controller swaps the base's scheduler
        concurrency_limit=1,
    )
    base.input(_suit, base, [steps, guidance], api_visibility="private", show_progress="hidden", queue=False)
