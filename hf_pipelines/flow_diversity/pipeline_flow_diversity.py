"""Sample a more diverse set of images with any flow pipeline."""

import inspect
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput

from hf_models.flow_diversity.modeling_flow_diversity import ImageFeatureEncoder
from hf_pipelines.flow_control.attach import attach_controller
from hf_pipelines.flow_control.controller_flow import fork_generator
from hf_pipelines.flow_control.pipeline_controlled import ControlledPipeline
from hf_pipelines.flow_diversity.controller_flow_diversity import FlowDiversityController


@dataclass
class FlowDiversityOutput(BaseOutput):
    """Output of [`FlowDiversityPipeline`].

    Args:
        images (`list[PIL.Image.Image]`, `np.ndarray` or `torch.Tensor`): The images.
        features (`torch.Tensor` of shape `(batch, features)` or `None`): Features of the final images.
        log (`list[dict]`): One entry per step; the last one holds `log_volume` of the final set.
        nfe (`int`): Network evaluations, one per velocity.
    """

    images: list[PIL.Image.Image] | np.ndarray | torch.Tensor
    features: torch.Tensor | None
    log: list[dict[str, Any]]
    nfe: int


class FlowDiversityPipeline(ControlledPipeline):
    """Any flow pipeline, whose samples of one prompt keep apart (arXiv 2510.09060).

    Args:
        base ([`~diffusers.DiffusionPipeline`]): Any flow-matching pipeline.
        feature_encoder ([`ImageFeatureEncoder`], *optional*):
            What "different" means. Without one, latents are spread, which varies texture rather than content.
        gamma0, gate, tau, max_ratio, ortho, beta0, noise_gate, score_correction:
            Defaults of every call, saved with the pipeline; see [`FlowDiversityController`].

    Example:
        >>> import torch
        >>> from hf_pipelines import FlowDiversityPipeline, hub
        >>> pipe = FlowDiversityPipeline.from_pretrained(hub.repo("flow-diversity-digits-8x8"))
        >>> out = pipe(class_labels=[3] * 8, guidance_scale=3.0, generator=torch.Generator().manual_seed(0))
        >>> len(out.images)
        8
    """

    _optional_components = ["feature_encoder"]  # noqa: RUF012  (as in diffusers)

    def __init__(
        self,
        base: DiffusionPipeline,
        feature_encoder: ImageFeatureEncoder | None = None,
        gamma0: float = 4.0,
        gate: tuple[float, float] = (0.6, 1.0),
        tau: float = 10.0,
        max_ratio: float = 0.3,
        ortho: float = 1.0,
        beta0: float = 0.1,
        noise_gate: tuple[float, float] = (0.0, 0.7),
        score_correction: bool = True,
    ):
        super().__init__()
        self._check_base(base)
        self.register_modules(base=base, feature_encoder=feature_encoder)
        self.register_to_config(
            gamma0=gamma0,
            gate=tuple(gate),
            tau=tau,
            max_ratio=max_ratio,
            ortho=ortho,
            beta0=beta0,
            noise_gate=tuple(noise_gate),
            score_correction=score_correction,
        )
        FlowDiversityController(self._encode, **self._settings())  # an impossible setting is an error here already

    @classmethod
    def _load_component(cls, name: str, folder: Path) -> ImageFeatureEncoder:
        return ImageFeatureEncoder.from_pretrained(folder)

    def _settings(self) -> dict[str, Any]:
        names = inspect.signature(type(self).__init__).parameters
        return {name: self.config[name] for name in names if name not in ("self", "base", "feature_encoder")}

    def _encode(self, images: torch.Tensor) -> torch.Tensor:
        return self.feature_encoder(images)

    def to(self, *args, **kwargs):
        """Move the wrapped pipeline and the encoder; a dtype reaches the wrapped pipeline alone."""
        super().to(*args, **kwargs)
        if self.feature_encoder is not None:
            self.feature_encoder.to(self.base.device)
        return self

    def __call__(
        self,
        *args,
        diversity: dict[str, Any] | bool | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
        **kwargs,
    ) -> FlowDiversityOutput | tuple:
        """Generate a set of images.

        Args:
            args: Arguments of the wrapped pipeline, forwarded unchanged.
            diversity (`dict` or `False`, *optional*):
                Settings of [`FlowDiversityController`] for this call, over those of the pipeline; `False` is the
                wrapped pipeline bit for bit.
            generator (`torch.Generator` or one per image, *optional*):
                Forwarded too; the controller draws from a fork of it, so that the starting latents stay the same.
            return_dict (`bool`, defaults to `True`): Return an output object, else a tuple.
            kwargs: Arguments of the wrapped pipeline, forwarded unchanged.

        Returns:
            [`FlowDiversityOutput`] or `tuple`: images, features, log and number of network evaluations.

        Raises:
            ValueError: A setting is out of range, or `group_size` does not divide the batch.
            TypeError: `diversity` is neither a dictionary, `None` nor `False`.
        """
        if diversity is True or not isinstance(diversity, (dict, bool, type(None))):
            raise TypeError(f"`diversity` must be a dictionary of settings, None or False, got {diversity!r}.")
        off = {"gamma0": 0.0, "beta0": 0.0}
        settings = {**self._settings(), **(off if diversity is False else diversity or {})}
        if self.feature_encoder is None and "feature_space" not in settings:
            settings["feature_space"] = "latent"
            if settings["gamma0"]:
                warnings.warn("no feature encoder: spreading latents varies texture, not semantics.", stacklevel=2)
        if getattr(self.base, "vae", None) is None:
            settings.setdefault("chunk", 4096)  # no decoder graph whose memory would have to be bounded
        settings.setdefault("group_size", self._group_size(kwargs))
        controller = FlowDiversityController(self._encode if self.feature_encoder is not None else None, **settings)
        with attach_controller(self.base, controller, generator=fork_generator(generator)) as base:
            images = base(*args, generator=generator, return_dict=False, **kwargs)[0]
            adapter = base.scheduler.velocity_adapter
            nfe = len(base.scheduler.timesteps) + (adapter.nfe if adapter is not None else 0)
        output = FlowDiversityOutput(images=images, features=controller.features, log=controller.log, nfe=nfe)
        return output if return_dict else output.to_tuple()

    def _group_size(self, arguments: dict[str, Any]) -> int | None:
        """Samples of one prompt, which diffusers puts next to each other; `None` is the whole batch."""
        prompt, labels = arguments.get("prompt"), arguments.get("class_labels")
        if isinstance(prompt, list) and len(prompt) > 1:
            return arguments.get("num_images_per_prompt", 1)
        if labels is None or isinstance(labels, int):
            return None
        labels = torch.as_tensor(labels).tolist()
        sizes = {labels.count(label) for label in labels}
        size = sizes.pop()
        if sizes or any(len(set(labels[i : i + size])) > 1 for i in range(0, len(labels), size)):
            raise ValueError(
                f"`class_labels` {labels} are no groups of equal size, one label after the other; give `group_size`."
            )
        return size
