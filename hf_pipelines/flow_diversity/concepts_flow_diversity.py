"""Sample the concepts of a prompt list with and without control, for evaluation of a text-to-image model.

The list is the JSON of the public evaluation, `{"truck": ["a photo of one truck"], …}`.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_pipelines.flow_diversity.pipeline_flow_diversity import FlowDiversityPipeline

SEEDS = (1111, 2222, 3333, 4444)  # of the public evaluation


def load_concepts(path: str | Path) -> dict[str, list[str]]:
    """Read a list of concepts and their prompts.

    Args:
        path (`str`): A JSON file `{concept: [prompt, …]}`.

    Returns:
        `dict[str, list[str]]`: the prompts of each concept.

    Raises:
        ValueError: The file is not such a JSON document; the message says where.
    """
    try:
        concepts = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(concepts, dict) or not concepts:
        raise ValueError(f"{path} must hold an object {{concept: [prompts]}}.")
    for name, prompts in concepts.items():
        if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) and p for p in prompts):
            raise ValueError(f"{path}: concept {name!r} must have a list of prompts, got {prompts!r}.")
        if not re.fullmatch(r"\w[\w \-]*", name):
            raise ValueError(f"{path}: concept {name!r} cannot be the name of a folder.")
    return concepts


def sample_concepts(
    pipe: FlowDiversityPipeline,
    concepts: dict[str, list[str]],
    out_dir: str | Path,
    images_per_prompt: int = 8,
    seeds: tuple[int, ...] = SEEDS,
    diversity: dict[str, Any] | bool | None = None,
    **arguments,
) -> list[Path]:
    """Write one folder of pictures per concept, prompt and seed; finished folders are passed over.

    Args:
        pipe ([`FlowDiversityPipeline`]): Around a text-to-image model.
        concepts (`dict[str, list[str]]`): As [`load_concepts`] returns them.
        out_dir (`str`): Where to write `<concept>/<prompt number>-<seed>/<image number>.png`.
        images_per_prompt (`int`, defaults to 8): Images that are sampled together.
        seeds (`tuple[int, ...]`): One set of images for each.
        diversity (`dict` or `False`, *optional*): As in the pipeline's call; `False` is the plain model.
        arguments: Further arguments of the pipeline, such as `num_inference_steps` and `guidance_scale`.

    Returns:
        `list[Path]`: the folders, in order.
    """
    jobs = [
        (prompt, seed, Path(out_dir) / concept / f"{index:03d}-{seed}")
        for concept, prompts in concepts.items()
        for index, prompt in enumerate(prompts)
        for seed in seeds
    ]
    for prompt, seed, folder in tqdm(jobs, desc="concepts"):
        done = folder / "prompt.json"  # written last
        if done.is_file():
            continue
        generator = torch.Generator().manual_seed(seed)
        images = pipe(
            prompt, num_images_per_prompt=images_per_prompt, generator=generator, diversity=diversity, **arguments
        ).images
        folder.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images):
            image.save(folder / f"{number:03d}.png")
        done.write_text(json.dumps({"prompt": prompt, "seed": seed, "diversity": diversity}, ensure_ascii=False))
    return [folder for _, _, folder in jobs]
