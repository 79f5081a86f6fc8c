"""Write a pipeline object as a folder that loads without this package."""

import tempfile
from pathlib import Path

from diffusers import DiffusionPipeline

from hf_pipelines import hub


def export_to_hub_folder(pipe: DiffusionPipeline, path: str | Path) -> Path:
    """Save a pipeline together with the code it needs.

    Args:
        pipe ([`~diffusers.DiffusionPipeline`]): One of ours, or a wrapper around any other.
        path (`str`): Folder to write; missing, empty, or an earlier export.

    Returns:
        `Path`: the folder; `DiffusionPipeline.from_pretrained(path, trust_remote_code=True)` loads it anywhere.

    Raises:
        ValueError: The folder holds files of yours, or the code cannot be carried.
    """
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch) / "pipeline"
        pipe.save_pretrained(saved)
        return hub.export(saved, path, kind="model")
