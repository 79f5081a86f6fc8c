"""CelebA and AFHQ from folders that you downloaded: the benchmarks of the paper, whose licences forbid shipping them.

    >>> from datasets_scripts import CelebA
    >>> builder = CelebA(data_dir="celeba")  # doctest: +SKIP
    >>> builder.download_and_prepare()  # doctest: +SKIP

CelebA is for non-commercial research; AFHQ is CC BY-NC 4.0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
from PIL import Image

from datasets_scripts.sample_photos import centre_crop


@dataclass
class PhotosConfig(datasets.BuilderConfig):
    """Config of the builders of this file.

    Args:
        size (`int`): Side of the images in pixels, after a centre crop.
        seed (`int`, defaults to 0): Nothing is drawn; kept so that all builders take one.
    """

    size: int = 128
    seed: int = 0


class _LocalPhotos(datasets.GeneratorBasedBuilder):
    """Base: photographs below `data_dir`, cropped to the centre and resized."""

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = PhotosConfig
    layout = ""

    def _check_config(self) -> None:  # here, because the library sets a config's fields after its `__init__`
        if not isinstance(self.config.size, int) or self.config.size < 1:
            raise ValueError(f"`size` must be a positive integer, got {self.config.size!r}.")

    def _root(self) -> Path:
        if self.config.data_dir is None or not Path(self.config.data_dir).is_dir():
            raise ValueError(
                f"`data_dir` must be the folder of your {type(self).__name__} download ({self.layout}), got "
                f"{self.config.data_dir!r}."
            )
        return Path(self.config.data_dir)

    def _missing(self, path: Path) -> ValueError:
        return ValueError(f"`data_dir` lacks {path}; expected layout: {self.layout}.")

    def _photo(self, path: Path) -> Image.Image:
        with Image.open(path) as image:
            return centre_crop(image.convert("RGB"), self.config.size)


class CelebA(_LocalPhotos):
    """Aligned celebrity faces (Liu et al., ICCV 2015), columns `image` and `name`, the official three splits."""

    BUILDER_CONFIGS = [PhotosConfig(name="128x128", size=128, version=_LocalPhotos.VERSION)]  # noqa: RUF012
    DEFAULT_CONFIG_NAME = "128x128"
    layout = "img_align_celeba/000001.jpg … and list_eval_partition.txt"

    def _info(self) -> datasets.DatasetInfo:
        self._check_config()
        return datasets.DatasetInfo(
            description="Celebrity faces, aligned and cropped.",
            homepage="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
            license="other",
            citation="@inproceedings{liu2015faceattributes, title={Deep Learning Face Attributes in the Wild}, "
            "author={Liu, Ziwei and Luo, Ping and Wang, Xiaogang and Tang, Xiaoou}, booktitle={ICCV}, year={2015}}",
            features=datasets.Features({"image": datasets.Image(), "name": datasets.Value("string")}),
        )

    def _split_generators(self, dl_manager):
        partition = self._root() / "list_eval_partition.txt"
        if not partition.is_file():
            raise self._missing(partition)
        names: dict[str, list[str]] = {"0": [], "1": [], "2": []}
        for line in partition.read_text().splitlines():
            if line.strip():
                name, part = line.split()
                names[part].append(name)
        splits = (datasets.Split.TRAIN, datasets.Split.VALIDATION, datasets.Split.TEST)
        return [
            datasets.SplitGenerator(split, gen_kwargs={"names": names[str(part)]})
            for part, split in enumerate(splits)
            if names[str(part)]
        ]

    def _generate_examples(self, names: list[str]) -> Iterator[tuple[int, dict]]:
        for index, name in enumerate(names):
            path = self._root() / "img_align_celeba" / name
            if not path.is_file():
                raise self._missing(path)
            yield index, {"image": self._photo(path), "name": name}


class AFHQ(_LocalPhotos):
    """Animal faces (Choi et al., CVPR 2020), columns `image` and `label` (cat, dog, wild), splits train and test."""

    BUILDER_CONFIGS = [PhotosConfig(name="256x256", size=256, version=_LocalPhotos.VERSION)]  # noqa: RUF012
    DEFAULT_CONFIG_NAME = "256x256"
    layout = "train/{cat,dog,wild}/*.jpg and test/… or val/…"
    classes = ("cat", "dog", "wild")

    def _info(self) -> datasets.DatasetInfo:
        self._check_config()
        return datasets.DatasetInfo(
            description="Faces of cats, dogs and wild animals.",
            homepage="https://github.com/clovaai/stargan-v2",
            license="cc-by-nc-4.0",
            citation="@inproceedings{choi2020starganv2, title={StarGAN v2: Diverse Image Synthesis for Multiple "
            "Domains}, author={Choi, Yunjey and Uh, Youngjung and Yoo, Jaejun and Ha, Jung-Woo}, "
            "booktitle={CVPR}, year={2020}}",
            features=datasets.Features(
                {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(self.classes))}
            ),
        )

    def _split_generators(self, dl_manager):
        root = self._root()
        test = root / "test" if (root / "test").is_dir() else root / "val"
        for folder in (root / "train", test):
            if not folder.is_dir():
                raise self._missing(folder)
        return [
            datasets.SplitGenerator(datasets.Split.TRAIN, gen_kwargs={"folder": str(root / "train")}),
            datasets.SplitGenerator(datasets.Split.TEST, gen_kwargs={"folder": str(test)}),
        ]

    def _generate_examples(self, folder: str) -> Iterator[tuple[str, dict]]:
        for label in self.classes:
            files = sorted(path for suffix in ("jpg", "png") for path in Path(folder, label).glob(f"*.{suffix}"))
            for path in files:
                yield f"{label}/{path.name}", {"image": self._photo(path), "label": label}
