"""Objectives for guiding text-to-image models, and the settings that the public FLUX.2 runner uses with them.

    style = GramStyle(CLIPVisionModel.from_pretrained("openai/clip-vit-base-patch16"), reference)
    images = MPCFlowPipeline(flux)(objective=style, prompt="a house", **RELEASE_SETTINGS["style"]).images

Each takes images (B, 3, H, W) in [0, 1], not clamped, and returns one value per image.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from hf_pipelines.mpc_flow.operators import Colorize

# the control acts on the endpoint displacement d and costs ρ(1−σ)‖d‖²; for "luminance" and "super_resolution" the data
# term is a mean over pixels (`phi_scale="mean"` with an operator)
RELEASE_SETTINGS: dict[str, dict[str, Any]] = {
    "style": {"lr": 0.5, "rho": 64.0, "n_ctrl": 20, "num_inference_steps": 28, "guidance_scale": 4.0},
    "luminance": {"lr": 0.2, "rho": 1e-6, "n_ctrl": 20, "num_inference_steps": 28, "guidance_scale": 4.0},
    "super_resolution": {"lr": 0.5, "rho": 2.5e-6, "n_ctrl": 20, "num_inference_steps": 28, "guidance_scale": 4.0},
}
for _settings in RELEASE_SETTINGS.values():
    _settings.update(mode="rhc", horizon_steps=1, solver="adam", control_param="d", control_weight="release")


class GramStyle:
    """‖Gram(φ(x)) − Gram(φ(reference))‖² with the patch features φ of one block of a CLIP image tower.

    Args:
        vision_model ([`~transformers.CLIPVisionModel`]): The tower; the release takes ViT-B/16.
        reference (`torch.Tensor` of shape `(1, 3, height, width)`): Style image in [0, 1].
        block (`int`, defaults to 3): Index into the tower's hidden states.

    Raises:
        ValueError: `reference` is not one RGB image, or the tower has no such block.
    """

    def __init__(self, vision_model: torch.nn.Module, reference: torch.Tensor, block: int = 3):
        if reference.ndim != 4 or reference.shape[:2] != (1, 3):
            raise ValueError(f"`reference` must have shape (1, 3, H, W), got {tuple(reference.shape)}.")
        layers = vision_model.config.num_hidden_layers
        if not 0 <= block <= layers:
            raise ValueError(f"`block` must lie in 0..{layers}, got {block}.")
        self.vision_model = vision_model.eval().requires_grad_(False)
        self.block = block
        with torch.no_grad():
            self.target = self._gram(reference)

    def _gram(self, images: torch.Tensor) -> torch.Tensor:
        side = self.vision_model.config.image_size
        images = images.to(self.vision_model.device, torch.float32)
        images = F.interpolate(images, (side, side), mode="bicubic", antialias=True, align_corners=False)
        mean, std = (images.new_tensor(values).view(1, 3, 1, 1) for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
        pixels = ((images - mean) / std).to(self.vision_model.dtype)
        features = self.vision_model(pixels, output_hidden_states=True).hidden_states[self.block]
        features = features[:, 1:].float()  # patches, without the class token
        return features.transpose(1, 2) @ features / features.shape[1]  # (B, q, q)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Squared Frobenius distance of the Gram matrices, (B,)."""
        return (self._gram(images) - self.target).square().flatten(1).sum(1).to(images.device)


class LuminanceTarget:
    """Mean squared difference of the luminance to a map.

    Args:
        target (`torch.Tensor` of shape `(1 or batch, 1, height, width)`): Luminance in [0, 1].

    Raises:
        ValueError: `target` is no luminance map.
    """

    def __init__(self, target: torch.Tensor):
        if target.ndim != 4 or target.shape[1] != 1:
            raise ValueError(f"`target` must have shape (B, 1, H, W), got {tuple(target.shape)}.")
        self.target = target

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Mean over pixels, (B,).

        Raises:
            ValueError: The images' size is not that of the target.
        """
        if images.shape[-2:] != self.target.shape[-2:]:
            raise ValueError(f"images are {tuple(images.shape[-2:])}, the target is {tuple(self.target.shape[-2:])}.")
        weights = images.new_tensor(Colorize.weights).view(1, 3, 1, 1)
        luminance = (weights * images).sum(1, keepdim=True)
        return (luminance - self.target.to(images)).square().flatten(1).mean(1)
