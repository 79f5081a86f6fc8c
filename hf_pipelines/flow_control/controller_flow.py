"""The base of all controllers that steer the sampling of a flow model.

One scheduler step hands the controller the final velocity and the current latents; the controller answers with the
velocity and the latents to use, and noise to add afterwards:

    network ──v──▶ scheduler.step ──FlowState──▶ controller.control ──FlowControl──▶ Euler step + noise ──▶ x'

Conventions: σ = 1 is noise, σ = 0 is data, v = dx/dσ = ε − x₀, paper time t = 1 − σ, paper velocity b = −v. A control
u in paper time (dx/dt = b + u) is applied as v − u; a displacement δ of the endpoint x̂₀ = x − σ v as v − δ/σ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.utils.torch_utils import randn_tensor

Velocity = Callable[[torch.Tensor, float], torch.Tensor]


@dataclass
class FlowState:
    """What a controller sees at one sampling step.

    Args:
        v (`torch.Tensor` of shape `(batch, ...)`): Velocity dx/dσ after guidance, detached, at least float32.
        x (`torch.Tensor` of shape `(batch, ...)`): Current latents x_σ, detached, at least float32.
        sigma (`float`): Noise level σ of `x`.
        sigma_next (`float`): Noise level σ' after the step.
        step (`int`): Index of the step, from 0.
        num_steps (`int`): Number of steps of the run.
        generator (`torch.Generator`, one per image, or `None`): The controller's own source of randomness.
        decode (`Callable`, *optional*): Latents → images (batch, channels, H, W) in [−1, 1], unclamped.
        velocity (`Callable`, *optional*): (x, σ) → v under the pipeline's prompt and guidance, differentiable.
        sigma_min (`float`, defaults to 0.0): Last positive noise level of the run.
    """

    v: torch.Tensor
    x: torch.Tensor
    sigma: float
    sigma_next: float
    step: int
    num_steps: int
    generator: torch.Generator | list[torch.Generator] | None = None
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None
    velocity: Velocity | None = None
    sigma_min: float = 0.0

    @property
    def endpoint(self) -> torch.Tensor:
        """One-step estimate of the clean latents, x̂₀ = x − σ v."""
        return self.x - self.sigma * self.v


@dataclass
class FlowControl:
    """What a controller answers.

    Args:
        velocity (`torch.Tensor`): Velocity of the Euler step.
        sample (`torch.Tensor`): Latents that the Euler step starts from.
        noise (`torch.Tensor`, *optional*): Added to the result of the step, in float32.
    """

    velocity: torch.Tensor
    sample: torch.Tensor
    noise: torch.Tensor | None = None


class FlowController(ConfigMixin):
    """Base class: settings that save and load, a log, and a random generator of its own.

    A subclass registers its settings with `@register_to_config` and implements [`control`].

    Attributes:
        log (`list[dict]`): One dictionary of plain numbers per step of the last run.
        generator (`torch.Generator`, *optional*): Source of the controller's randomness, set by `attach_controller`.
    """

    config_name = "flow_controller_config.json"

    def __init__(self):
        self.register_to_config()  # a subclass without settings has an empty config
        self.log: list[dict[str, Any]] = []
        self.generator: torch.Generator | list[torch.Generator] | None = None

    @property
    def requires_velocity(self) -> bool:
        """Whether [`control`] evaluates the network again through `state.velocity`."""
        return False

    @property
    def requires_decode(self) -> bool:
        """Whether [`control`] decodes latents through `state.decode`."""
        return False

    def reset(self, num_steps: int, batch: int, device: torch.device) -> None:
        """Forget the last run. Called at step 0. Without a generator, one is made from the setting `seed`, if any.

        Args:
            num_steps (`int`): Number of steps of the coming run.
            batch (`int`): Number of images.
            device (`torch.device`): Where the latents live.
        """
        self.log = []
        seed = self.config.get("seed")
        if self.generator is None and seed is not None:
            self.generator = torch.Generator(device).manual_seed(seed)

    def control(self, state: FlowState) -> FlowControl:
        """Answer one step.

        Args:
            state ([`FlowState`]): What is known at this step.

        Returns:
            [`FlowControl`]: What the scheduler shall do.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `control`.")

    def save_pretrained(self, save_directory: str) -> None:
        """Write the settings to `flow_controller_config.json` in `save_directory`."""
        self.save_config(save_directory)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, **kwargs) -> "FlowController":
        """Read the settings from a folder or a Hub repo; `kwargs` override single settings."""
        return cls.from_config(cls.load_config(pretrained_model_name_or_path), **kwargs)


def draw_noise(like: torch.Tensor, generator: torch.Generator | list[torch.Generator] | None) -> torch.Tensor:
    """Standard normal noise of the shape, device and dtype of `like`, one generator for all or one per image."""
    return randn_tensor(tuple(like.shape), generator=generator, device=like.device, dtype=like.dtype)


def fork_generator(generator: torch.Generator | list[torch.Generator] | None):
    """A generator derived from the seed of `generator` without consuming a draw of it (`None` stays `None`)."""
    if generator is None:
        return None
    if isinstance(generator, list):
        return [fork_generator(one) for one in generator]
    return torch.Generator(generator.device).manual_seed(generator.initial_seed() ^ 0x5DEECE66D)


def identity_decode(z: torch.Tensor) -> torch.Tensor:
    """The decoder of a pixel-space flow."""
    return z


identity_decode.is_identity = True


def run_controller(
    velocity: Velocity,
    controller: FlowController | None,
    x: torch.Tensor,
    sigmas: torch.Tensor | list[float],
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Sample without a pipeline: Euler steps of `velocity` along `sigmas` under `controller`, in the dtype of `x`.

    Args:
        velocity (`Callable`): (x, σ) → v.
        controller ([`FlowController`], *optional*): `None` samples without control.
        x (`torch.Tensor` of shape `(batch, ...)`): Starting noise.
        sigmas (`torch.Tensor` or `list[float]` of N + 1 entries): Falling noise levels, the last one 0.
        decode (`Callable`, *optional*): Latents → images; the identity when `None`.
        generator (`torch.Generator`, *optional*): For the controller's noise.

    Returns:
        `torch.Tensor`: the samples, of the shape of `x`.
    """
    sigmas = [float(sigma) for sigma in sigmas]
    num_steps = len(sigmas) - 1
    if controller is not None:
        controller.generator = generator
        controller.reset(num_steps, x.shape[0], x.device)
    for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        with torch.no_grad():
            answer = FlowControl(velocity(x, sigma), x)
        if controller is not None:
            state = FlowState(
                v=answer.velocity,
                x=x,
                sigma=sigma,
                sigma_next=sigma_next,
                step=step,
                num_steps=num_steps,
                generator=generator,
                decode=decode or identity_decode,
                velocity=velocity,
                sigma_min=sigmas[-2],
            )
            with torch.enable_grad():
                answer = controller.control(state)
        x = answer.sample + (sigma_next - sigma) * answer.velocity
        if answer.noise is not None:
            x = x + answer.noise
        x = x.detach()
    return x
