"""Train the small feature encoder of 8×8 digits that guides diversity offline.

    python -m hf_models.flow_diversity.train_flow_diversity --output_dir runs/digit-encoder

A classifier whose 32-dimensional last hidden layer is the feature. Another seed and architecture (`--seed 1
--convolutional`) gives the independent classifier that scores diversity in the benchmark. It takes seconds, so there
is nothing to resume.
"""

import argparse
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from tqdm.auto import tqdm

from datasets_scripts import load_digit_tensors
from hf_models.flow_diversity.modeling_flow_diversity import ImageFeatureEncoder

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="where the encoder goes")
    parser.add_argument("--num_epochs", type=int, default=40, help="passes over the 1,597 training images")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="of AdamW, with a one-cycle schedule")
    parser.add_argument("--train_batch_size", type=int, default=128, help="images per step")
    parser.add_argument("--noise", type=float, default=0.2, help="deviation of the noise added to images")
    parser.add_argument("--seed", type=int, default=0, help="fixes initialisation, order and noise")
    parser.add_argument("--convolutional", action="store_true", help="convolutions instead of the first dense layer")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("num_epochs", "train_batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def train_digit_encoder(args: argparse.Namespace) -> tuple[ImageFeatureEncoder, float]:
    """Train and return the encoder, in evaluation mode, and its test accuracy."""
    set_seed(args.seed)
    images, labels = load_digit_tensors(8, "train")
    encoder = ImageFeatureEncoder("DigitTrunk", {"convolutional": args.convolutional}, image_size=8)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=args.learning_rate, weight_decay=1e-2)
    steps = args.num_epochs * (len(images) // args.train_batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.learning_rate, total_steps=steps)
    for step in tqdm(range(steps), desc="encoder"):
        index = torch.randint(len(images), (args.train_batch_size,))
        noisy = images[index] + args.noise * torch.randn_like(images[index])
        loss = F.cross_entropy(encoder.vision_tower(noisy)[1], labels[index], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            logger.info("step %d loss %.4f", step + 1, loss.item())
    test_images, test_labels = load_digit_tensors(8, "test")
    with torch.no_grad():
        accuracy = (encoder.eval().vision_tower(test_images)[1].argmax(1) == test_labels).float().mean().item()
    return encoder, accuracy


def main(argv: list[str] | None = None) -> float:
    """Train, save and return the accuracy on the test images."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    args = parse_args(argv)
    encoder, accuracy = train_digit_encoder(args)
    encoder.save_pretrained(args.output_dir)
    logger.info("test accuracy %.4f", accuracy)
    return accuracy


if __name__ == "__main__":
    main()
