"""Images → features, differentiable, with a vision tower of transformers or a small trunk that ships."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from transformers.image_utils import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

# model_type of a vision config → class, mean and standard deviation of its image processor
_TOWERS = {
    "clip_vision_model": ("CLIPVisionModelWithProjection", OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "siglip_vision_model": ("SiglipVisionModel", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "dinov2": ("Dinov2Model", IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
}


class DigitTrunk(nn.Module):
    """Classifier of 8×8 digits whose last hidden layer, 32 numbers, is the feature.

    Args:
        hidden_size (`int`): Width of the first layer.
        feature_size (`int`): Width of the feature layer.
        convolutional (`bool`): Two convolutions in front instead of the first dense layer.
    """

    def __init__(self, hidden_size: int = 128, feature_size: int = 32, convolutional: bool = False):
        super().__init__()
        if convolutional:
            channels = hidden_size // 4
            self.stem = nn.Sequential(
                nn.Conv2d(1, channels, 3, padding=1),
                nn.SiLU(),
                nn.Conv2d(channels, channels, 3, padding=1, stride=2),
                nn.SiLU(),
                nn.Flatten(),
                nn.Linear(16 * channels, feature_size),
            )
        else:
            self.stem = nn.Sequential(
                nn.Flatten(), nn.Linear(64, hidden_size), nn.SiLU(), nn.Linear(hidden_size, feature_size)
            )
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(feature_size, 10))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (B, feature_size) and class logits (B, 10) of images (B, 1, 8, 8) in [−1, 1]."""
        features = self.stem(images)
        return features, self.head(features)


class ImageFeatureEncoder(ModelMixin, ConfigMixin):
    """Differentiable image features: resize, normalise and encode, all on tensors.

    Args:
        tower (`str`, defaults to `"DigitTrunk"`):
            Name of a vision class of transformers (`CLIPVisionModelWithProjection`, `SiglipVisionModel`,
            `Dinov2Model`), or `"DigitTrunk"`.
        tower_config (`dict`, *optional*): Its configuration.
        image_size (`int`, defaults to 8): Side that images are resized to (bicubic, antialiased).
        mean (`tuple[float, ...]`, defaults to `(0.5,)`): Mean that is subtracted from images in [0, 1].
        std (`tuple[float, ...]`, defaults to `(0.5,)`): Standard deviation they are divided by.

    Raises:
        ValueError: The tower is not known.

    Example:
        >>> from hf_models import ImageFeatureEncoder
        >>> encoder = ImageFeatureEncoder.from_transformers("openai/clip-vit-base-patch32")  # doctest: +SKIP
    """

    @register_to_config
    def __init__(
        self,
        tower: str = "DigitTrunk",
        tower_config: dict[str, Any] | None = None,
        image_size: int = 8,
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
    ):
        super().__init__()
        known = {name: model_type for model_type, (name, _, _) in _TOWERS.items()}
        if tower == "DigitTrunk":
            self.vision_tower = DigitTrunk(**(tower_config or {}))
        elif tower in known:
            tower_class = getattr(transformers, tower)
            self.vision_tower = tower_class(tower_class.config_class(**(tower_config or {})))
        else:
            raise ValueError(f"`tower` must be 'DigitTrunk' or one of {sorted(known)}, got {tower!r}.")

    @classmethod
    def from_transformers(cls, model: Any, **kwargs) -> "ImageFeatureEncoder":
        """Wrap a vision tower.

        Args:
            model (`str` or `PreTrainedModel`): A Hub id, a folder, or the tower itself.
            kwargs: Arguments of the tower's `from_pretrained`.

        Returns:
            [`ImageFeatureEncoder`]: the encoder, in evaluation mode.

        Raises:
            ValueError: The model is no CLIP, SigLIP or DINOv2 tower.
        """
        if isinstance(model, str):
            config = transformers.AutoConfig.from_pretrained(model)
            config = getattr(config, "vision_config", config)
            name, _, _ = cls._tower_of(config)
            model = getattr(transformers, name).from_pretrained(model, **kwargs)
        name, mean, std = cls._tower_of(model.config)
        if type(model).__name__ != name:
            raise ValueError(f"`model` must be a {name}, got {type(model).__name__}.")
        config = {key: value for key, value in model.config.to_diff_dict().items() if key != "transformers_version"}
        encoder = cls(name, config, image_size=model.config.image_size, mean=mean, std=std)
        encoder.vision_tower = model
        return encoder.eval()

    @staticmethod
    def _tower_of(config: Any) -> tuple[str, tuple, tuple]:
        model_type = getattr(config, "model_type", None)
        if model_type not in _TOWERS:
            raise ValueError(f"`model` has type {model_type!r}; known are {', '.join(sorted(_TOWERS))}.")
        return _TOWERS[model_type]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Encode.

        Args:
            images (`torch.Tensor` of shape `(batch, 1 or 3, height, width)`): Images in [−1, 1], not necessarily
                clamped.

        Returns:
            `torch.Tensor` of shape `(batch, features)`.

        Raises:
            ValueError: The number of channels does not fit.
        """
        channels = 1 if self.config.tower == "DigitTrunk" else 3
        if images.shape[1] == 1 and channels == 3:
            images = images.expand(-1, 3, -1, -1)
        if images.shape[1] != channels:
            raise ValueError(f"`images` must have {channels} channels, got {images.shape[1]}.")
        size = (self.config.image_size, self.config.image_size)
        if images.shape[-2:] != size:
            images = F.interpolate(images, size, mode="bicubic", antialias=True, align_corners=False)
        mean, std = (images.new_tensor(v).view(1, -1, 1, 1) for v in (self.config.mean, self.config.std))
        pixels = ((images / 2 + 0.5 - mean) / std).to(self.dtype)
        output = self.vision_tower(pixels)
        if self.config.tower == "DigitTrunk":
            return output[0]
        return output.image_embeds if hasattr(output, "image_embeds") else output.pooler_output
