"""Sample small images from an embedded flow model."""

import math

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor

from hf_models.small_flow.modeling_small_flow import GaussianMixtureFlowModel, SmallFlowModel

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
MODEL_CLASSES = {model.__name__: model for model in (SmallFlowModel, GaussianMixtureFlowModel)}


def hub_arguments(kwargs: dict) -> dict:
    """Those of `kwargs` that say where on the Hub, or in the cache, a file is found."""
    names = ("cache_dir", "force_download", "token", "revision", "local_files_only", "proxies")
    return {name: kwargs[name] for name in names if name in kwargs}


class SmallFlowPipeline(DiffusionPipeline):
    """Unconditional or class-conditional sampling from a small flow model.

    Args:
        model ([`SmallFlowModel`] or [`GaussianMixtureFlowModel`]): Predicts the velocity v = dx/dσ.
        scheduler ([`~diffusers.FlowMatchEulerDiscreteScheduler`]): The flow-matching scheduler, shift 1.

    Example:
        >>> import torch
        >>> from hf_pipelines import SmallFlowPipeline, hub
        >>> pipe = SmallFlowPipeline.from_pretrained(hub.repo("digits-16x16"))
        >>> pipe([3, 3, 8], generator=torch.Generator().manual_seed(0)).images[0].size
        (16, 16)
    """

    model_cpu_offload_seq = "model"
    _callback_tensor_inputs = ["latents"]  # noqa: RUF012  (as in diffusers)

    def __init__(self, model: SmallFlowModel, scheduler: FlowMatchEulerDiscreteScheduler):
        super().__init__()
        self.register_modules(model=model, scheduler=scheduler)
        self.image_processor = VaeImageProcessor(do_normalize=True, do_resize=False)
        self._guidance_scale = 1.0

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """Load the pipeline; arguments are those of [`~diffusers.DiffusionPipeline.from_pretrained`].

        A repo that carries code (a Hub export) is loaded with this class and the model class it was imported with, so
        none of the repo's code runs and no `trust_remote_code` is needed.
        """
        path = str(pretrained_model_name_or_path)
        config = cls.load_config(path, **hub_arguments(kwargs))
        if isinstance(config["_class_name"], str):
            return super().from_pretrained(path, **kwargs)
        model_class = MODEL_CLASSES.get(config["model"][1])
        if model_class is None:
            raise ValueError(f"`model` of {path} is a {config['model'][1]}; known: {', '.join(MODEL_CLASSES)}.")
        dtype = kwargs.get("dtype") or kwargs.get("torch_dtype") or torch.float32
        hub = hub_arguments(kwargs)
        model = kwargs.get("model") or model_class.from_pretrained(path, subfolder="model", torch_dtype=dtype, **hub)
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(path, subfolder="scheduler", **hub)
        return cls(model, kwargs.get("scheduler") or scheduler)

    @property
    def guidance_scale(self) -> float:
        """Weight of classifier-free guidance during the current or last call."""
        return self._guidance_scale

    def check_inputs(
        self, class_labels, num_images, num_inference_steps, guidance_scale, latents, output_type, generator=None
    ):
        """Raise `ValueError` for arguments that `__call__` cannot serve."""
        if not isinstance(num_images, int) or num_images < 1:
            raise ValueError(f"`num_images` must be a positive integer, got {num_images!r}.")
        if not isinstance(num_inference_steps, int) or num_inference_steps < 1:
            raise ValueError(f"`num_inference_steps` must be a positive integer, got {num_inference_steps!r}.")
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"`output_type` must be one of {OUTPUT_TYPES}, got {output_type!r}.")
        if output_type in ("pil", "np") and len(self.sample_shape) != 3:
            raise ValueError(f"`output_type` must be 'pt' or 'latent' for samples of shape {self.sample_shape}.")
        num_classes = getattr(self.model.config, "num_classes", None)
        if not isinstance(guidance_scale, (int, float)) or not math.isfinite(guidance_scale):
            raise ValueError(f"`guidance_scale` must be a finite number, got {guidance_scale!r}.")
        if guidance_scale != 1.0 and (class_labels is None or num_classes is None):
            raise ValueError(
                f"`guidance_scale` = {guidance_scale} needs `class_labels` and a class-conditional model."
            )
        if class_labels is not None and num_classes is None:
            raise ValueError(f"`class_labels` need a class-conditional model, not {type(self.model).__name__}.")
        if class_labels is not None:
            wrong = [label for label in class_labels.tolist() if not 0 <= label <= num_classes]
            if wrong:
                raise ValueError(f"`class_labels` must lie in 0..{num_classes} ({num_classes} = none), got {wrong}.")
        shape = (num_images, *self.sample_shape)
        if latents is not None and (not isinstance(latents, torch.Tensor) or tuple(latents.shape) != shape):
            got = tuple(latents.shape) if isinstance(latents, torch.Tensor) else type(latents).__name__
            raise ValueError(f"`latents` must have shape {shape}, got {got}.")
        if isinstance(generator, list) and len(generator) != num_images:
            raise ValueError(f"`generator` must hold one generator per image ({num_images}), got {len(generator)}.")

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample, without the batch dimension."""
        return tuple(self.model.config.sample_shape or (self.model.config.dim,))

    def prepare_latents(self, batch_size, dtype, device, generator, latents=None) -> torch.Tensor:
        """Draw the starting noise (batch, *sample_shape), or check in the given one."""
        if latents is None:
            latents = randn_tensor((batch_size, *self.sample_shape), generator=generator, device=device, dtype=dtype)
        return latents.to(device=device, dtype=dtype)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: list[int] | torch.Tensor | int | None = None,
        num_images: int | None = None,
        num_inference_steps: int = 30,
        guidance_scale: float = 1.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        callback_on_step_end=None,
        callback_on_step_end_tensor_inputs: list[str] = ("latents",),
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        """Generate images.

        Args:
            class_labels (`int`, `list[int]` or `torch.Tensor` of shape `(n,)`, *optional*):
                One label per image, or one label for all; `None` samples without condition.
            num_images (`int`, *optional*): How many images; defaults to the number of labels or latents, else 8.
            num_inference_steps (`int`, defaults to 30): Euler steps on the grid σ = 1, 1 − 1/N, …, 1/N, 0.
            guidance_scale (`float`, defaults to 1.0): Classifier-free guidance weight; 1 turns it off.
            generator (`torch.Generator` or one per image, *optional*): Makes the result reproducible.
            latents (`torch.Tensor` of shape `(num_images, *sample_shape)`, *optional*): The starting noise.
            output_type (`str`, defaults to `"pil"`):
                `"pil"`, `"np"` (B, H, W, C in [0, 1]), `"pt"` (B, C, H, W in [0, 1]) or `"latent"` (unclamped, [−1,
                1]).
            callback_on_step_end (`Callable`, *optional*):
                Called as `callback(pipe, step, timestep, {"latents": …})` after each step.
            callback_on_step_end_tensor_inputs (`list[str]`, *optional*): Tensors handed to the callback.
            return_dict (`bool`, defaults to `True`): Return an output object, else a tuple.

        Returns:
            [`~diffusers.ImagePipelineOutput`] or `tuple`: the images.

        Raises:
            ValueError: An argument is out of range or shapes disagree; the message names it.
        """
        device = self._execution_device
        class_labels = self._as_labels(class_labels, device)
        if num_images is None:
            given = class_labels if class_labels is not None and len(class_labels) > 1 else latents
            num_images = len(given) if given is not None else 1 if class_labels is not None else 8
        self.check_inputs(
            class_labels, num_images, num_inference_steps, guidance_scale, latents, output_type, generator
        )
        unknown = set(callback_on_step_end_tensor_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise ValueError(f"`callback_on_step_end_tensor_inputs` may hold 'latents' only, got {sorted(unknown)}.")
        if class_labels is not None and class_labels.shape[0] == 1:
            class_labels = class_labels.expand(num_images)
        if class_labels is not None and class_labels.shape[0] != num_images:
            raise ValueError(f"`class_labels` holds {class_labels.shape[0]} labels for {num_images} images.")
        self._guidance_scale = guidance_scale

        latents = self.prepare_latents(num_images, self.model.dtype, device, generator, latents)
        # the scheduler's own default grid ends at σ = 0.001 and then jumps to 0
        sigmas = np.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps)
        self.scheduler.set_timesteps(sigmas=sigmas, device=device)
        for step, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            velocity = self._predict_velocity(latents, self.scheduler.sigmas[step].to(device), class_labels)
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
            if callback_on_step_end is not None:
                tensors = {"latents": latents} if "latents" in callback_on_step_end_tensor_inputs else {}
                latents = callback_on_step_end(self, step, timestep, tensors).pop("latents", latents)

        images = latents
        if output_type != "latent":
            images = self.image_processor.postprocess(latents.float(), output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @staticmethod
    def _as_labels(class_labels, device) -> torch.Tensor | None:
        """Labels as a vector (n,) of integers; one label becomes a vector of length 1."""
        if class_labels is None:
            return None
        try:
            labels = torch.as_tensor(class_labels, device=device)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`class_labels` must be integers, got {class_labels!r}.") from error
        whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        if labels.ndim > 1 or (labels.numel() and not whole):
            raise ValueError(f"`class_labels` must be integers of shape (n,), got {class_labels!r}.")
        return labels.view(-1).long()

    def _predict_velocity(self, latents, sigma, class_labels):
        if self._guidance_scale == 1.0:
            return self.model(latents, timestep=sigma, class_labels=class_labels).sample
        null_labels = torch.full_like(class_labels, self.model.config.num_classes)
        both = self.model(
            torch.cat([latents, latents]), timestep=sigma, class_labels=torch.cat([null_labels, class_labels])
        ).sample
        unconditional, conditional = both.chunk(2)
        return unconditional + self._guidance_scale * (conditional - unconditional)
