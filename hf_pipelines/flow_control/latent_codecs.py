"""Latents → images, differentiable, for every family of flow pipelines.

`codec(z)` returns float32 images (B, C, H, W) in [−1, 1], not clamped: a clamp has zero gradient where it bites.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_CODECS: dict[str, type["LatentCodec"]] = {}


def register_latent_codec(*names: str) -> Callable[[type["LatentCodec"]], type["LatentCodec"]]:
    """Class decorator: use the codec for pipelines whose class, or a parent of it, has one of `names`."""

    def register(codec: type["LatentCodec"]) -> type["LatentCodec"]:
        _CODECS.update(dict.fromkeys(names, codec))
        return codec

    return register


def get_latent_codec(pipe: Any, decode_chunk: int = 1) -> "LatentCodec":
    """The codec of a pipeline.

    Args:
        pipe (`DiffusionPipeline` or `ModularPipeline`): The flow pipeline.
        decode_chunk (`int`, defaults to 1): Images per decoder graph; bounds the memory, does not change the result.

    Returns:
        [`LatentCodec`]: latents → images.

    Raises:
        NotImplementedError: The pipeline has a VAE and its class is not registered.
        ValueError: `decode_chunk` is not positive.
    """
    if decode_chunk < 1:
        raise ValueError(f"`decode_chunk` must be at least 1, got {decode_chunk}.")
    for parent in type(pipe).__mro__:
        if parent.__name__ in _CODECS:
            return _CODECS[parent.__name__](pipe, decode_chunk)
    if getattr(pipe, "vae", None) is None:
        return LatentCodec(pipe, decode_chunk)
    raise NotImplementedError(
        f"no latent codec for {type(pipe).__name__}; pass `decode=` or register one with "
        f"`register_latent_codec({type(pipe).__name__!r})`. Known: {', '.join(sorted(_CODECS))}."
    )


class LatentCodec:
    """The identity: the latents of a pixel-space flow are its images.

    Args:
        pipe (`DiffusionPipeline`): The pipeline whose VAE decodes.
        decode_chunk (`int`): Images per decoder graph.

    Attributes:
        grid (`tuple[int, int]`, *optional*): Rows and columns of a packed latent sequence, noted by
            `attach_controller` when the pipeline prepares its latents.
        position_ids (`torch.Tensor`, *optional*): Position ids (B, L, 4) of packed latents.
    """

    def __init__(self, pipe: Any, decode_chunk: int = 1):
        self.pipe = pipe
        self.decode_chunk = decode_chunk
        self.grid: tuple[int, int] | None = None
        self.position_ids: torch.Tensor | None = None
        self._float32_vae = None

    @property
    def is_identity(self) -> bool:
        """Whether latents are images already."""
        return type(self).decode is LatentCodec.decode

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """Decode latents; with more images than `decode_chunk`, one decoder graph at a time is held in memory."""
        if self.is_identity or z.shape[0] <= self.decode_chunk:
            return self.decode(z)
        chunks = []
        for start in range(0, z.shape[0], self.decode_chunk):
            part = z[start : start + self.decode_chunk]
            if z.requires_grad:
                chunks.append(checkpoint(self.decode, part, use_reentrant=False))
            else:
                chunks.append(self.decode(part))
        return torch.cat(chunks)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Decode one chunk of the batch."""
        return z

    def note_latents(self, prepared: Any, arguments: dict[str, Any]) -> None:
        """Learn the geometry from what `prepare_latents` returned and the arguments it was called with."""

    def _vae(self):
        """The VAE, or a float32 copy of its decoder half: gradients through a bf16 decoder are rounding noise."""
        vae = self.pipe.vae
        if vae.dtype == torch.float32:
            return vae
        if self._float32_vae is None:
            encoder, vae.encoder = vae.encoder, None  # not needed, so not copied
            try:
                self._float32_vae = copy.deepcopy(vae).float()
            finally:
                vae.encoder = encoder
        return self._float32_vae

    def _vae_decode(self, z: torch.Tensor) -> torch.Tensor:
        with torch.autocast(z.device.type, enabled=False):
            return self._vae().decode(z.float(), return_dict=False)[0].float()

    def _unscale(self, z: torch.Tensor) -> torch.Tensor:
        config = self.pipe.vae.config
        return z / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)


def _unpatchify(z: torch.Tensor) -> torch.Tensor:
    """(B, 4 C, h, w) → (B, C, 2 h, 2 w): channel c of the 2×2 patch at (p, q) stands at 4 c + 2 p + q."""
    batch, channels, height, width = z.shape
    z = z.reshape(batch, channels // 4, 2, 2, height, width).permute(0, 1, 4, 2, 5, 3)  # (B, C, h, 2, w, 2)
    return z.reshape(batch, channels // 4, 2 * height, 2 * width)


register_latent_codec("SmallFlowPipeline")(LatentCodec)


@register_latent_codec("StableDiffusion3Pipeline", "ZImagePipeline", "Lumina2Pipeline")
class ScaledLatentCodec(LatentCodec):
    """Spatial latents (B, C, h, w): divide by the scaling factor, add the shift factor, decode."""

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Decode one chunk."""
        return self._vae_decode(self._unscale(z))


class _PackedLatentCodec(LatentCodec):
    """Latents packed into a sequence (B, L, C) whose grid is not in the tensor."""

    def note_latents(self, prepared: Any, arguments: dict[str, Any]) -> None:
        """Read the grid off the position ids (…, axes), whose axes 1 and 2 are row and column."""
        ids = prepared[1]
        self.position_ids = ids if ids.ndim == 3 else None
        rows_and_columns = ids.reshape(-1, ids.shape[-1])[:, 1:3].max(dim=0).values
        self.grid = (int(rows_and_columns[0]) + 1, int(rows_and_columns[1]) + 1)

    def _check_grid(self, z: torch.Tensor) -> tuple[int, int]:
        if self.grid is None:
            raise ValueError(
                "the grid of the packed latents is unknown: run the pipeline inside `attach_controller`, or set "
                "`codec.grid`."
            )
        height, width = self.grid
        if z.shape[1] != height * width:
            raise ValueError(f"packed latents hold {z.shape[1]} tokens, the grid is {height}×{width}.")
        return height, width


@register_latent_codec("FluxPipeline", "ChromaPipeline")
class PackedLatentCodec(_PackedLatentCodec):
    """FLUX.1 and Chroma: unpack 2×2 patches, then as [`ScaledLatentCodec`]."""

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Decode one chunk."""
        height, width = self._check_grid(z)
        z = z.permute(0, 2, 1).reshape(z.shape[0], -1, height, width)  # (B, 4C, h, w)
        return self._vae_decode(self._unscale(_unpatchify(z)))


@register_latent_codec("Flux2Pipeline", "Flux2KleinPipeline")
class Flux2LatentCodec(_PackedLatentCodec):
    """FLUX.2: place tokens by their position ids, undo the batch norm, unpatchify, decode."""

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Decode one chunk."""
        height, width = self._check_grid(z)
        ids = self.position_ids[0].to(z.device, torch.int64)  # the images of a batch share their grid
        index = (ids[:, 1] * width + ids[:, 2])[None, :, None].expand_as(z)  # (B, L, C)
        z = torch.zeros_like(z).scatter(1, index, z)
        z = z.permute(0, 2, 1).reshape(z.shape[0], -1, height, width)
        vae = self.pipe.vae
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(z.device, torch.float32)
        variance = vae.bn.running_var.view(1, -1, 1, 1).to(z.device, torch.float32)
        z = z * torch.sqrt(variance + vae.config.batch_norm_eps) + mean
        return self._vae_decode(_unpatchify(z))


@register_latent_codec("QwenImagePipeline")
class QwenImageLatentCodec(_PackedLatentCodec):
    """Qwen-Image: packed latents with per-channel statistics and a video VAE, of which frame 0 is the image."""

    def note_latents(self, prepared: Any, arguments: dict[str, Any]) -> None:
        """Qwen-Image returns the packed latents alone; the grid follows from the call's height and width."""
        patch = 2 * self.pipe.vae_scale_factor
        self.grid = (int(arguments["height"]) // patch, int(arguments["width"]) // patch)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Decode one chunk."""
        height, width = self._check_grid(z)
        z = _unpatchify(z.permute(0, 2, 1).reshape(z.shape[0], -1, height, width))[:, :, None]  # (B, C, 1, H, W)
        config = self.pipe.vae.config
        mean = torch.tensor(config.latents_mean, device=z.device).view(1, -1, 1, 1, 1)
        std = torch.tensor(config.latents_std, device=z.device).view(1, -1, 1, 1, 1)
        return self._vae_decode(z * std + mean)[:, :, 0]
