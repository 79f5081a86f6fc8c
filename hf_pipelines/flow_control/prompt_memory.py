"""Encode a prompt once, then drop the text encoders: half of the memory of a large text-to-image pipeline.

Recipe for FLUX.2-dev (32B) on a 24 GB card: load with a 4-bit transformer and text encoder, encode, free, then guide.

    quantization = PipelineQuantizationConfig(
        quant_backend="bitsandbytes_4bit",
        quant_kwargs={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
        components_to_quantize=["transformer", "text_encoder"],
    )
    flux = DiffusionPipeline.from_pretrained(path, quantization_config=quantization, dtype=torch.bfloat16)
    prompt = encode_then_free(flux, "a house")
    pipe = MPCFlowPipeline(flux)
    pipe.enable_model_cpu_offload()
    images = pipe(y, operator, horizon_steps=1, num_inference_steps=28, **prompt).images
"""

import gc
import inspect
from typing import Any

import torch

# what `encode_prompt` returns, in the names of the pipeline's call; None is not needed there
_ENCODED = {
    "StableDiffusion3Pipeline": (
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    ),
    "FluxPipeline": ("prompt_embeds", "pooled_prompt_embeds", None),
    "Flux2Pipeline": ("prompt_embeds", None),
    "Flux2KleinPipeline": ("prompt_embeds", None),
    "QwenImagePipeline": ("prompt_embeds", "prompt_embeds_mask"),
    "ZImagePipeline": ("prompt_embeds", "negative_prompt_embeds"),
    "Lumina2Pipeline": (
        "prompt_embeds",
        "prompt_attention_mask",
        "negative_prompt_embeds",
        "negative_prompt_attention_mask",
    ),
}


def encode_then_free(
    pipe: Any,
    prompt: str | list[str],
    negative_prompt: str | list[str] | None = None,
    num_images_per_prompt: int = 1,
    **arguments,
) -> dict[str, Any]:
    """Encode the prompts of a text-to-image pipeline and drop its text encoders.

    Args:
        pipe (`DiffusionPipeline`): The pipeline; its `text_encoder*` components become `None`.
        prompt (`str` or `list[str]`): What to generate.
        negative_prompt (`str` or `list[str]`, *optional*): What to avoid.
        num_images_per_prompt (`int`, defaults to 1): Copies of each embedding, one prompt's together.
        arguments: Further arguments of the pipeline's `encode_prompt`, such as `max_sequence_length`.

    Returns:
        `dict`: arguments for the pipeline's call in the place of `prompt` and `num_images_per_prompt`.

    Raises:
        NotImplementedError: The pipeline's class is not known.
        RuntimeError: CPU offload is on already (its hooks would keep the encoders alive) or the encoders are gone.
    """
    names = next((_ENCODED[c.__name__] for c in type(pipe).__mro__ if c.__name__ in _ENCODED), None)
    if names is None:
        raise NotImplementedError(f"{type(pipe).__name__} is not known; known: {', '.join(sorted(_ENCODED))}.")
    encoders = [name for name, component in pipe.components.items() if name.startswith("text_encoder") and component]
    if not encoders:
        raise RuntimeError("the pipeline has no text encoder (any more).")
    if getattr(pipe, "_all_hooks", None):
        raise RuntimeError("call `encode_then_free` before `enable_model_cpu_offload()`.")

    parameters = inspect.signature(pipe.encode_prompt).parameters
    settings = {"device": pipe._execution_device, "num_images_per_prompt": num_images_per_prompt, **arguments}
    settings.update({name: None for name in ("prompt_2", "prompt_3") if name in parameters and name not in settings})

    def encode(text: str | list[str], **extra: Any) -> dict[str, Any]:
        given = {name: value for name, value in {**settings, **extra}.items() if name in parameters}
        with torch.no_grad():
            values = pipe.encode_prompt(prompt=text, **given)
        return {name: value for name, value in zip(names, values, strict=True) if name is not None}

    if "negative_prompt" in parameters:
        encoded = encode(prompt, negative_prompt=negative_prompt)
    else:
        encoded = encode(prompt)
        if negative_prompt is not None:
            encoded.update({f"negative_{name}": value for name, value in encode(negative_prompt).items()})
    for name, value in encoded.items():
        if isinstance(value, list):  # Z-Image: one tensor per prompt, which `encode_prompt` does not repeat
            encoded[name] = [item for item in value for _ in range(num_images_per_prompt)]

    for name in encoders:
        setattr(pipe, name, None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {name: value for name, value in encoded.items() if value is not None}
