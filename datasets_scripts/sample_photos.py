"""The two photographs that ship inside scikit-learn, for smoke tests of latent pipelines."""

from dataclasses import dataclass

import datasets
from PIL import Image
from sklearn.datasets import load_sample_images


@dataclass
class SamplePhotosConfig(datasets.BuilderConfig):
    """Config of [`SamplePhotos`].

    Args:
        size (`int`, *optional*): Side after a centre crop; the full 640×427 pictures when `None`.
        seed (`int`, defaults to 0): Nothing is drawn; kept so that all builders take one.
    """

    size: int | None = None
    seed: int = 0


class SamplePhotos(datasets.GeneratorBasedBuilder):
    """`china.jpg` and `flower.jpg` of scikit-learn as one test split with the columns `image` and `name`."""

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = SamplePhotosConfig
    BUILDER_CONFIGS = [  # noqa: RUF012  (the base class defines it as a plain list)
        SamplePhotosConfig(name="full", version=VERSION, description="640×427"),
        SamplePhotosConfig(name="256x256", size=256, version=VERSION, description="centre crop, 256×256"),
    ]
    DEFAULT_CONFIG_NAME = "full"

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            description="Two photographs: a Chinese temple and a dahlia.",
            citation="@article{scikit-learn, title={Scikit-learn: Machine Learning in Python}, author={Pedregosa, F. "
            "and others}, journal={JMLR}, volume={12}, pages={2825--2830}, year={2011}}",
            homepage="https://scikit-learn.org/stable/datasets/loading_other_datasets.html",
            license="cc-by-2.0",
            features=datasets.Features({"image": datasets.Image(), "name": datasets.Value("string")}),
        )

    def _split_generators(self, dl_manager):
        return [datasets.SplitGenerator(datasets.Split.TEST)]

    def _generate_examples(self):
        photos = load_sample_images()
        for index, (pixels, path) in enumerate(zip(photos.images, photos.filenames, strict=True)):
            image = Image.fromarray(pixels)
            if self.config.size is not None:
                image = centre_crop(image, self.config.size)
            yield index, {"image": image, "name": path.replace("\\", "/").rsplit("/", 1)[-1]}


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Scale the short side to `size` pixels and cut out the centre."""
    scale = size / min(image.size)
    image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))
