"""UCI handwritten digits as images: 1,797 real scans that ship inside scikit-learn, so nothing is downloaded."""

from dataclasses import dataclass

import datasets
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

_DESCRIPTION = "Handwritten digits (UCI optical recognition, 1,797 scans), 8×8 or 16×16, with a fixed split."
_CITATION = """@misc{alpaydin1998optical,
  title = {Optical Recognition of Handwritten Digits},
  author = {Alpaydin, E. and Kaynak, C.},
  year = {1998},
  howpublished = {UCI Machine Learning Repository},
  doi = {10.24432/C50P49}
}"""
NUM_TEST_IMAGES = 200


@dataclass
class DigitsConfig(datasets.BuilderConfig):
    """Config of [`Digits`].

    Args:
        size (`int`, defaults to 16): Side of the images in pixels, 8 (as scanned) or 16 (bicubic).
        seed (`int`, defaults to 0): Seed of the permutation whose first 200 images are the test split.
    """

    size: int = 16
    seed: int = 0


class Digits(datasets.GeneratorBasedBuilder):
    """Handwritten digits with exact pixel values in [−1, 1].

    Features: `image` (8-bit grayscale, for people and viewers), `pixel_values` ((1, size, size) float32 in [−1, 1],
    unrounded, for models) and `label`. Splits: `train` (1,597) and `test` (200).

    Example:
        >>> from datasets_scripts import Digits
        >>> builder = Digits(config_name="16x16")
        >>> builder.download_and_prepare()
        >>> builder.as_dataset(split="test").num_rows
        200
    """

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = DigitsConfig
    BUILDER_CONFIGS = [  # noqa: RUF012  (the base class defines it as a plain list)
        DigitsConfig(name="16x16", size=16, version=VERSION, description="bicubic, 16×16"),
        DigitsConfig(name="8x8", size=8, version=VERSION, description="as scanned, 8×8"),
    ]
    DEFAULT_CONFIG_NAME = "16x16"

    def _info(self) -> datasets.DatasetInfo:
        size = self.config.size
        if size not in (8, 16):  # here, because the library sets a config's fields after its `__init__`
            raise ValueError(f"`size` must be 8 or 16, got {size!r}.")
        return datasets.DatasetInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            homepage="https://archive.ics.uci.edu/dataset/80",
            license="cc-by-4.0",
            features=datasets.Features(
                {
                    "image": datasets.Image(),
                    "pixel_values": datasets.Array3D((1, size, size), "float32"),
                    "label": datasets.ClassLabel(names=[str(digit) for digit in range(10)]),
                }
            ),
        )

    def _split_generators(self, dl_manager):
        order = torch.randperm(1797, generator=torch.Generator().manual_seed(self.config.seed)).numpy()
        return [
            datasets.SplitGenerator(datasets.Split.TRAIN, gen_kwargs={"indices": order[NUM_TEST_IMAGES:]}),
            datasets.SplitGenerator(datasets.Split.TEST, gen_kwargs={"indices": order[:NUM_TEST_IMAGES]}),
        ]

    def _generate_examples(self, indices: np.ndarray):
        scans, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(scans, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1  # 0..16 → [−1, 1]
        if self.config.size != 8:
            size = (self.config.size, self.config.size)
            pixels = torch.nn.functional.interpolate(pixels, size, mode="bicubic", align_corners=False).clamp(-1, 1)
        for index in indices.tolist():
            values = pixels[index].numpy()
            gray = np.rint((values[0] + 1) * 127.5).astype(np.uint8)
            yield index, {"image": Image.fromarray(gray), "pixel_values": values, "label": int(labels[index])}


def load_digit_tensors(size: int, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Build the data set if needed and return one split as tensors.

    Args:
        size (`int`): 8 or 16.
        split (`str`): `"train"` or `"test"`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: images (n, 1, size, size) float32 in [−1, 1] and labels (n,) int64.

    Raises:
        ValueError: `size` or `split` is not one of the above.
    """
    if size not in (8, 16):
        raise ValueError(f"`size` must be 8 or 16, got {size!r}.")
    if split not in ("train", "test"):
        raise ValueError(f"`split` must be 'train' or 'test', got {split!r}.")
    builder = Digits(config_name=f"{size}x{size}")
    builder.download_and_prepare()
    columns = builder.as_dataset(split=split).with_format("numpy")
    pixels = np.stack(columns["pixel_values"][:]).astype(np.float32)
    return torch.from_numpy(pixels), torch.from_numpy(np.asarray(columns["label"][:], dtype=np.int64))
