"""`attach_controller`: put a controller into any flow pipeline for the length of a `with` block."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hf_pipelines.flow_control.controller_flow import FlowController
from hf_pipelines.flow_control.latent_codecs import LatentCodec, get_latent_codec
from hf_pipelines.flow_control.scheduling_controlled_flow_match import ControlledFlowMatchEulerScheduler
from hf_pipelines.flow_control.velocity import get_velocity_adapter


@contextmanager
def _component(pipe: Any, name: str, value: Any) -> Iterator[None]:
    """Swap a component of a `DiffusionPipeline` or `ModularPipeline`; the old one comes back whatever happens."""
    original = getattr(pipe, name)

    def put(component: Any) -> None:
        if hasattr(pipe, "update_components"):  # ModularPipeline
            pipe.update_components(**{name: component})
        else:
            setattr(pipe, name, component)

    put(value)
    try:
        yield
    finally:
        put(original)


@contextmanager
def _noting_latents(pipe: Any, codec: Any) -> Iterator[None]:
    """Let the codec see what `pipe.prepare_latents` returns: packed latents do not carry their grid."""
    prepare = getattr(pipe, "prepare_latents", None)
    if prepare is None or not isinstance(codec, LatentCodec):
        yield
        return
    signature = inspect.signature(prepare)
    outer = pipe.__dict__.get("prepare_latents")  # of an enclosing `attach_controller`

    def prepare_and_note(*args, **kwargs):
        prepared = prepare(*args, **kwargs)
        codec.note_latents(prepared, signature.bind(*args, **kwargs).arguments)
        return prepared

    pipe.prepare_latents = prepare_and_note
    try:
        yield
    finally:
        del pipe.prepare_latents
        if outer is not None:
            pipe.prepare_latents = outer


@contextmanager
def _frozen(*modules: Any) -> Iterator[None]:
    """Switch off the gradients of all parameters: only controls are optimised, and a graph without them is smaller."""
    parameters = [p for module in modules if module is not None for p in module.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _warn_if_vae_is_offloaded(pipe: Any) -> None:
    if hasattr(getattr(pipe, "vae", None), "_hf_hook"):
        warnings.warn(
            "this control decodes at every step, and the VAE is under CPU offload: each decode moves models between "
            'the devices. Add "vae" to `pipe._exclude_from_cpu_offload` before `enable_model_cpu_offload()`.',
            stacklevel=4,
        )


@contextmanager
def attach_controller(
    pipe: Any,
    controller: FlowController,
    *,
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None,
    generator: torch.Generator | list[torch.Generator] | None = None,
    decode_chunk: int = 1,
) -> Iterator[Any]:
    """Control everything that `pipe` samples inside the `with` block.

    The pipeline itself stays as it is: its scheduler is replaced for the time being, and comes back at the end of the
    block, also after an exception.

    Args:
        pipe (`DiffusionPipeline` or `ModularPipeline`):
            A flow-matching pipeline with a [`~diffusers.FlowMatchEulerDiscreteScheduler`].
        controller ([`FlowController`]): What steers the sampling.
        decode (`Callable`, *optional*):
            Latents → images (B, C, H, W) in [−1, 1]; by default the codec of the pipeline's class.
        generator (`torch.Generator` or one per image, *optional*): Randomness of the controller.
        decode_chunk (`int`, defaults to 1): Images per decoder graph; the result does not depend on it.

    Yields:
        the pipeline.

    Raises:
        TypeError: `controller` is no [`FlowController`].
        ValueError: The scheduler is not a flow-matching Euler scheduler.
        NotImplementedError: The controller needs a codec or a velocity adapter that the pipeline's class lacks.

    Example:
        >>> import torch
        >>> from hf_pipelines import MPCFlowController, SmallFlowPipeline, attach_controller, hub
        >>> pipe = SmallFlowPipeline.from_pretrained(hub.repo("digits-16x16"))
        >>> bright = MPCFlowController(lam=0.1, solver="adam").with_objective(lambda images: -images.sum((1, 2, 3)))
        >>> with attach_controller(pipe, bright):
        ...     images = pipe(num_images=2, generator=torch.Generator().manual_seed(0)).images
    """
    if not isinstance(controller, FlowController):
        raise TypeError(f"`controller` must be a FlowController, got {type(controller).__name__}.")
    scheduler = ControlledFlowMatchEulerScheduler.from_scheduler(pipe.scheduler)
    with ExitStack() as stack:
        if controller.requires_decode or decode is not None:
            if decode is None:
                decode = get_latent_codec(pipe, decode_chunk)
                _warn_if_vae_is_offloaded(pipe)
            stack.enter_context(_noting_latents(pipe, decode))
        if controller.requires_velocity:
            scheduler.velocity_adapter = get_velocity_adapter(pipe)
            scheduler.velocity_adapter.attach()
            stack.callback(scheduler.velocity_adapter.detach)
        # what an inactive controller does not touch stays unfrozen: frozen weights can take other CPU kernels, which
        # would change the rounding of a run that must equal the plain pipeline's
        denoiser = scheduler.velocity_adapter.denoiser if scheduler.velocity_adapter is not None else None
        stack.enter_context(_frozen(getattr(pipe, "vae", None) if controller.requires_decode else None, denoiser))
        controller.generator = generator
        scheduler.codec = decode
        scheduler.controller = controller
        stack.enter_context(_component(pipe, "scheduler", scheduler))
        yield pipe
