"""Train the embedded flow model on handwritten digits.

    python -m hf_pipelines.flow_control.train_small_flow --size 16 --output_dir runs/digits-16x16
    accelerate launch -m hf_pipelines.flow_control.train_small_flow --size 8 --output_dir runs/digits-8x8

Every random draw depends only on the seed and the step, and each process takes its slice of the global batch, so
the number of processes and an interruption change nothing but rounding. What is saved is a [`SmallFlowPipeline`].
"""

import argparse
import json
import logging
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from datasets_scripts import load_digit_tensors
from hf_models.small_flow.modeling_small_flow import SmallFlowModel
from hf_pipelines.flow_control.pipeline_small_flow import SmallFlowPipeline

logger = get_logger(__name__)
HIDDEN_SIZES = {8: 256, 16: 384}
EMA_FILE = "ema.safetensors"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="where checkpoints and the pipeline go")
    parser.add_argument("--size", type=int, default=16, choices=sorted(HIDDEN_SIZES), help="side of the images")
    parser.add_argument("--max_train_steps", type=int, default=None, help="default: 2500 for 16×16, 3000 for 8×8")
    parser.add_argument("--train_batch_size", type=int, default=128, help="images per step over all processes")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="peak of the one-cycle schedule")
    parser.add_argument("--weight_decay", type=float, default=1e-4, help="of AdamW")
    parser.add_argument("--label_dropout", type=float, default=0.2, help="share of labels replaced by 'none'")
    parser.add_argument("--ema_decay", type=float, default=0.995, help="decay of the weight average that is saved")
    parser.add_argument("--seed", type=int, default=0, help="fixes initialisation, order and noise")
    parser.add_argument("--checkpointing_steps", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--logging_steps", type=int, default=100, help="steps between log lines")
    parser.add_argument("--resume_from_checkpoint", default=None, help="a checkpoint folder, or 'latest'")
    parser.add_argument("--save_dtype", default="float16", choices=["float16", "float32"], help="of the saved weights")
    args = parser.parse_args(argv)
    if args.max_train_steps is None:
        args.max_train_steps = {8: 3000, 16: 2500}[args.size]
    for name in ("max_train_steps", "train_batch_size", "checkpointing_steps", "logging_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if not 0 < args.learning_rate < math.inf:
        parser.error(f"--learning_rate must be positive, got {args.learning_rate}")
    if not 0 <= args.weight_decay < math.inf:
        parser.error(f"--weight_decay must not be negative, got {args.weight_decay}")
    for name in ("label_dropout", "ema_decay"):
        if not 0 <= getattr(args, name) <= 1:
            parser.error(f"--{name} must lie in [0, 1], got {getattr(args, name)}")
    return args


def sample_sigma(batch: int, generator: torch.Generator) -> torch.Tensor:
    """Noise levels (batch,): the first half uniform on [0, 1], the second sigmoid(N(0, 1)), shuffled by the data."""
    uniform = torch.rand(batch - batch // 2, generator=generator)
    logit_normal = torch.sigmoid(torch.randn(batch // 2, generator=generator))
    return torch.cat([uniform, logit_normal])


def draw_batch(step: int, images: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace) -> dict:
    """The global batch of one step: clean images, noise, σ and labels, a function of the seed and the step alone."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    steps_per_epoch = max(1, len(images) // args.train_batch_size)
    epoch, position = divmod(step, steps_per_epoch)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed * 7_919 + epoch))
    index = order[position * args.train_batch_size : (position + 1) * args.train_batch_size]
    dropped = torch.rand(len(index), generator=generator) < args.label_dropout
    return {
        "clean": images[index],
        "noise": torch.randn(images[index].shape, generator=generator),
        "sigma": sample_sigma(len(index), generator),
        "labels": labels[index].masked_fill(dropped, 10),
    }


def flow_matching_loss(model, clean, noise, sigma, labels) -> torch.Tensor:
    """Mean squared error of the velocity at x_σ = (1 − σ) x₀ + σ ε, whose target is ε − x₀."""
    s = sigma.view(-1, *[1] * (clean.ndim - 1))
    predicted = model((1 - s) * clean + s * noise, timestep=sigma, class_labels=labels).sample
    return F.mse_loss(predicted, noise - clean)


@torch.no_grad()
def evaluate(model, images: torch.Tensor, labels: torch.Tensor, repeats: int = 8) -> dict[str, float]:
    """Loss with and without labels over `repeats` fixed draws of noise and uniform σ."""
    generator = torch.Generator().manual_seed(1234)
    losses = {"conditional": 0.0, "unconditional": 0.0}
    for _ in range(repeats):
        noise = torch.randn(images.shape, generator=generator)
        sigma = torch.rand(len(images), generator=generator)
        for name, given in (("conditional", labels), ("unconditional", torch.full_like(labels, 10))):
            losses[name] += flow_matching_loss(model, images, noise, sigma, given).item() / repeats
    return losses


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint below `folder`, or `None`; one cut short by a crash is passed over."""
    done = [path for path in folder.glob("checkpoints/checkpoint_*") if (path / "complete.json").is_file()]
    return max(done, key=lambda path: int(path.name.rsplit("_", 1)[1]), default=None)


def save_checkpoint(folder: Path, step: int, accelerator: Accelerator, ema: EMAModel) -> None:
    """Write everything an exact resume needs; `complete.json` comes last, so that a torn folder is never resumed.

    No objects are pickled for `register_for_checkpointing`, whose loader would run whatever code the file holds.
    """
    if accelerator.is_main_process:
        (folder / "complete.json").unlink(missing_ok=True)  # an earlier run may have written the same folder
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        save_file({str(i): weight.contiguous() for i, weight in enumerate(ema.shadow_params)}, folder / EMA_FILE)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / "complete.tmp").write_text(json.dumps({"step": step}))
        (folder / "complete.tmp").replace(folder / "complete.json")


def load_checkpoint(folder: Path, accelerator: Accelerator, ema: EMAModel) -> int:
    """Restore what [`save_checkpoint`] wrote and return the number of finished steps.

    Raises:
        ValueError: The folder is not a complete checkpoint.
    """
    if not (folder / "complete.json").is_file():
        raise ValueError(f"--resume_from_checkpoint: {str(folder)!r} is not the folder of a complete checkpoint.")
    step = json.loads((folder / "complete.json").read_text())["step"]
    accelerator.load_state(str(folder))
    weights = load_file(folder / EMA_FILE, device=str(accelerator.device))
    ema.load_state_dict({"shadow_params": [weights[str(i)] for i in range(len(weights))], "optimization_step": step})
    return step


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, checkpoint, save the averaged weights as a pipeline and return the losses on both splits."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    project = ProjectConfiguration(project_dir=str(args.output_dir))
    accelerator = Accelerator(project_config=project, step_scheduler_with_optimizer=False)
    processes = accelerator.num_processes
    if args.train_batch_size % processes:
        raise ValueError(f"--train_batch_size {args.train_batch_size} is not a multiple of the {processes} processes.")
    set_seed(args.seed)

    images, labels = load_digit_tensors(args.size, "train")
    if args.train_batch_size > len(images):
        raise ValueError(f"--train_batch_size {args.train_batch_size} exceeds the {len(images)} training images.")
    model = SmallFlowModel(sample_shape=(1, args.size, args.size), hidden_size=HIDDEN_SIZES[args.size])
    ema = EMAModel(model.parameters(), decay=args.ema_decay)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    warm_up = 0.1 if args.max_train_steps > 10 else 0.0  # a tenth of ten steps or fewer leaves none to warm up
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.learning_rate, total_steps=args.max_train_steps, pct_start=warm_up
    )
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    ema.to(accelerator.device)

    checkpoint = args.resume_from_checkpoint
    if checkpoint == "latest":
        checkpoint = latest_checkpoint(args.output_dir)
    step = 0
    if checkpoint is not None:
        step = load_checkpoint(Path(checkpoint), accelerator, ema)
        logger.info("resumed %s at step %d", checkpoint, step)

    local = args.train_batch_size // processes
    mine = slice(accelerator.process_index * local, (accelerator.process_index + 1) * local)
    bar = tqdm(total=args.max_train_steps, initial=step, disable=not accelerator.is_local_main_process, desc="train")
    while step < args.max_train_steps:
        batch = {k: v[mine].to(accelerator.device) for k, v in draw_batch(step, images, labels, args).items()}
        loss = flow_matching_loss(model, **batch)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
        step += 1
        bar.update()
        if step % args.logging_steps == 0:
            mean_loss = accelerator.reduce(loss.detach(), "mean").item()
            if not math.isfinite(mean_loss):
                raise FloatingPointError(f"the loss is {mean_loss} at step {step}; lower --learning_rate")
            bar.set_postfix(loss=f"{mean_loss:.4f}")
            logger.info("step %d loss %.5f lr %.2e", step, mean_loss, schedule.get_last_lr()[0])
        if step % args.checkpointing_steps == 0:
            save_checkpoint(args.output_dir / "checkpoints" / f"checkpoint_{step}", step, accelerator, ema)
    bar.close()

    model = accelerator.unwrap_model(model).cpu()
    ema.copy_to(model.parameters())
    metrics = {}
    for split in ("train", "test"):
        for name, value in evaluate(model.eval(), *load_digit_tensors(args.size, split)).items():
            metrics[f"{split}_{name}"] = value
    if accelerator.is_main_process:
        pipe = SmallFlowPipeline(model.to(getattr(torch, args.save_dtype)), FlowMatchEulerDiscreteScheduler(shift=1.0))
        pipe.save_pretrained(args.output_dir / "pipeline")
        (args.output_dir / "pipeline" / "training_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        logger.info("losses %s", {name: round(value, 4) for name, value in metrics.items()})
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return metrics


if __name__ == "__main__":
    main()
