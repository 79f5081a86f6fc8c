"""Fit a model: `accelerate launch -m hf_models.krr_soc.train_krr_soc --config option.json --output_dir out`.

`option.json` holds arguments of `KrrSocConfig`, such as `{"payoff": "max_call", "dim": 5, "dividend": 0.1}`; the same
text may stand on the command line. Processes share the averages over the next state; the result does not depend on
their number. Each date is a checkpoint, and `--resume_from_checkpoint` goes on from the last one, exactly as if
nothing had happened.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import HfArgumentParser

from hf_models.krr_soc.configuration_krr_soc import KrrSocConfig
from hf_models.krr_soc.dynamic_programming_krr_soc import Stage
from hf_models.krr_soc.modeling_krr_soc import KrrSocModel

logger = logging.getLogger(__name__)
CHECKPOINTS, SETTINGS = "checkpoints", "settings.json"
SCALARS = ("lengthscale", "lam", "shrink")


@dataclass
class FitArguments:
    """What is fitted, and where it goes."""

    config: str = field(metadata={"help": "JSON file of KrrSocConfig's arguments, or the JSON itself."})
    output_dir: str = field(metadata={"help": "Folder of the model and of the checkpoints."})
    seed: int | None = field(default=None, metadata={"help": "Seed of everything (default: the configuration's)."})
    resume_from_checkpoint: bool = field(default=False, metadata={"help": "Go on from the dates done before."})
    bounds: bool = field(default=True, metadata={"help": "Also compute bounds and write certificate.json."})
    alpha: float = field(default=0.05, metadata={"help": "1 - confidence of the interval."})
    n_lower: int = field(default=100_000, metadata={"help": "Paths of the lower bound."})
    n_upper: int = field(default=1500, metadata={"help": "Paths of the upper bound."})
    n_upper_inner: int = field(default=256, metadata={"help": "Samples of the upper bound's inner averages."})
    cpu: bool = field(default=False, metadata={"help": "Stay on the CPU."})


def load_config(text: str, seed: int | None = None) -> KrrSocConfig:
    """Read a configuration.

    Args:
        text (`str`): JSON, or the path of a file that holds it.
        seed (`int`, *optional*): Takes the place of the configuration's.

    Raises:
        ValueError: It is no JSON object, or a value in it is wrong.
    """
    source = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
    try:
        fields = json.loads(source)
    except json.JSONDecodeError as error:
        raise ValueError(f"--config {text[:60]!r} is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--config must be a JSON object of KrrSocConfig's arguments, got {type(fields).__name__}.")
    return KrrSocConfig(**fields | ({} if seed is None else {"seed": seed}))


def fingerprint(config: KrrSocConfig) -> str:
    """Of all settings on which the regressions depend."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in ("progress", "fitted")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def save_stage(folder: Path, t: int, stage: Stage) -> None:
    """Write the regression of a date; a killed process leaves the file whole or not at all."""
    tensors = {name: getattr(stage, name).contiguous().cpu() for name in ("centers", "alpha", "low", "high")}
    tensors |= {name: torch.tensor(getattr(stage, name), dtype=torch.float64) for name in SCALARS}
    temporary = folder / f"stage-{t:05d}.tmp"
    save_file(tensors, temporary)
    os.replace(temporary, folder / f"stage-{t:05d}.safetensors")


def load_stages(folder: Path, device: torch.device) -> dict[int, Stage]:
    """The regressions of all dates written so far."""
    stages = {}
    for path in sorted(folder.glob("stage-*.safetensors")):
        tensors = load_file(path, device=str(device))
        scalars = {name: float(tensors.pop(name)) for name in SCALARS}
        stages[int(path.stem.removeprefix("stage-"))] = Stage(**tensors, **scalars)
    return stages


def prepare_checkpoints(folder: Path, config: KrrSocConfig, resume: bool) -> None:
    """Make the folder of checkpoints, empty unless the run resumes one with the same settings.

    Raises:
        ValueError: It resumes one with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / SETTINGS
    if not resume:
        settings.unlink(missing_ok=True)
        for path in folder.glob("stage-*"):
            path.unlink()
    known = json.loads(settings.read_text(encoding="utf-8"))["fingerprint"] if settings.is_file() else None
    if known is not None and known != fingerprint(config):
        raise ValueError(f"--resume_from_checkpoint: {folder} belongs to a run with another --config or --seed.")
    temporary = settings.with_suffix(".tmp")
    temporary.write_text(json.dumps({"fingerprint": fingerprint(config)}), encoding="utf-8")
    os.replace(temporary, settings)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Parse, build, fit, save.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line; `sys.argv` by default.

    Returns:
        `Path`: the folder of the fitted model.
    """
    parser = HfArgumentParser(FitArguments, description=__doc__.split("\n\n")[0])
    (options,) = parser.parse_args_into_dataclasses(arguments)
    accelerator = Accelerator(cpu=options.cpu)
    is_main = accelerator.is_main_process
    logging.basicConfig(level=logging.INFO if is_main else logging.WARNING, format="%(message)s")
    config = load_config(options.config, options.seed)
    out = Path(options.output_dir)
    folder = out / CHECKPOINTS
    if is_main:
        prepare_checkpoints(folder, config, options.resume_from_checkpoint)
    accelerator.wait_for_everyone()
    model = KrrSocModel(config).to(accelerator.device)
    stages = load_stages(folder, accelerator.device)
    if stages:
        logger.info("going on after date %d", min(stages))
    accelerator.wait_for_everyone()  # nobody writes before all have read

    def on_stage(t: int, stage: Stage) -> None:
        if is_main:
            save_stage(folder, t, stage)
        logger.info("date %d: lengthscale %.3g, lambda %.1e", t, stage.lengthscale, stage.lam)

    model.fit(accelerator=accelerator, on_stage=on_stage, stages=stages)
    if is_main:
        price = model.price(options.bounds, options.alpha, options.n_lower, options.n_upper, options.n_upper_inner)
        model.save_pretrained(out)
        logger.info("%s", json.dumps(price.to_dict()))
    accelerator.wait_for_everyone()
    return out


if __name__ == "__main__":
    main()
