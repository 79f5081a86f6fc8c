"""Checkpoints of transformers' `Trainer` that a killed process may have left behind."""

import json
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def last_complete_checkpoint(output_dir: str | Path, *also: str) -> str | None:
    """The newest checkpoint of a folder that was written to its end.

    `Trainer` writes the trainer's state last, so a checkpoint whose state is whole JSON is whole.

    Args:
        output_dir (`str` or `Path`): Folder of the run; it need not exist.
        *also (`str`): Names of files that are written after the trainer's state and must be there too.

    Returns:
        `str`, *optional*: path of the checkpoint, or `None` if there is none.
    """
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    numbered = [(int(f.name.rpartition("-")[2]), f) for f in folders if f.name.rpartition("-")[2].isdigit()]
    for _, folder in sorted(numbered, reverse=True):
        try:
            json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if all((folder / name).is_file() for name in also):
            return str(folder)
    return None
