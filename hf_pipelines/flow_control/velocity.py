"""Re-evaluate a pipeline's network under the same prompt, guidance and sign rules: `adapter(x, sigma) -> v`.

Only controllers that plan with the network need this. While attached, hooks record how the pipeline calls its denoiser
in the current step; the adapter replays those calls with new latents and a new noise level, differentiably. At the
first use in a step it checks that its rule turns the recorded outputs into the velocity the scheduler was given, so an
option it does not know (skip-layer guidance, say) is an error and never a silently different velocity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_pipelines.flow_control.controller_flow import FlowState

_ADAPTERS: dict[str, type["VelocityAdapter"]] = {}


@dataclass
class _DenoiserCall:
    args: tuple
    kwargs: dict[str, Any]
    output: Any


def register_velocity_adapter(*names: str) -> Callable[[type["VelocityAdapter"]], type["VelocityAdapter"]]:
    """Class decorator: use the adapter for pipelines whose class, or a parent of it, has one of `names`."""

    def register(adapter: type["VelocityAdapter"]) -> type["VelocityAdapter"]:
        _ADAPTERS.update(dict.fromkeys(names, adapter))
        return adapter

    return register


def get_velocity_adapter(pipe: Any) -> "VelocityAdapter":
    """The adapter of a pipeline.

    Args:
        pipe (`DiffusionPipeline`): The flow pipeline.

    Returns:
        [`VelocityAdapter`]: (x, σ) → v.

    Raises:
        NotImplementedError: The pipeline's class is not registered.
    """
    for parent in type(pipe).__mro__:
        if parent.__name__ in _ADAPTERS:
            return _ADAPTERS[parent.__name__](pipe)
    raise NotImplementedError(
        f"no velocity adapter for {type(pipe).__name__}, so its network cannot be evaluated again inside a step. "
        'MPC-Flow with mode="rhc", horizon_steps=1 and flow diversity with endpoint="euler" need none. '
        f"Known: {', '.join(sorted(_ADAPTERS))}."
    )


def _for_autograd(value: Any) -> Any:
    """The value with every tensor made under `torch.inference_mode()` cloned, so that autograd accepts it."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, dict):
        return {key: _for_autograd(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_for_autograd(item) for item in value)
    return value


def _prediction(output: Any) -> torch.Tensor | list[torch.Tensor]:
    """What the denoiser predicted, from its output object or tuple."""
    return output.sample if hasattr(output, "sample") else output[0]


class VelocityAdapter:
    """Base of the adapters: records, replays, checks and counts.

    Args:
        pipe (`DiffusionPipeline`): The flow pipeline.

    Attributes:
        nfe (`int`): Velocity evaluations so far.
        nbp (`int`): Those that carried a graph for a backward pass.
    """

    denoiser_name = "transformer"
    tolerance = 2e-2  # of the check, relative; bf16 rounding stays below it, a missed option does not

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.nfe = 0
        self.nbp = 0
        self._calls: list[_DenoiserCall] = []
        self._state: FlowState | None = None
        self._checked = False
        self._replaying = False
        self._hook = None

    @property
    def denoiser(self) -> torch.nn.Module:
        """The network that predicts the velocity."""
        return getattr(self.pipe, self.denoiser_name)

    def attach(self) -> None:
        """Start recording the denoiser's calls."""
        self._hook = self.denoiser.register_forward_hook(self._record, with_kwargs=True)

    def detach(self) -> None:
        """Stop recording and drop what was recorded."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        self._calls, self._state = [], None

    def _record(self, module, args, kwargs, output) -> None:
        if self._replaying:
            return
        if self._state is not None:  # a new step begins
            self._calls, self._state = [], None
        self._calls.append(_DenoiserCall(args, kwargs, _prediction(output)))

    def begin_step(self, state: FlowState) -> None:
        """Called by the scheduler before it asks the controller."""
        self._state = state
        self._checked = False
        for call in self._calls:
            call.args, call.kwargs, call.output = map(_for_autograd, (call.args, call.kwargs, call.output))

    def __call__(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """Evaluate the velocity.

        Args:
            x (`torch.Tensor` of shape `(batch, ...)`): Latents.
            sigma (`float`): Their noise level σ.

        Returns:
            `torch.Tensor`: v = dx/dσ in the dtype of `x`, with a graph where `x` requires one.

        Raises:
            RuntimeError: Called outside a step of an attached pipeline.
            NotImplementedError: The pipeline combines its network calls in a way the adapter does not know.
        """
        if self._state is None or not self._calls:
            raise RuntimeError("the velocity adapter works inside a sampling step of an attached pipeline only.")
        if not self._checked:
            self._check()
        self.nfe += 1
        self.nbp += int(torch.is_grad_enabled() and x.requires_grad)
        self._replaying = True
        try:
            outputs = []
            for call in self._calls:
                args, kwargs = self.replay(call, x, sigma)
                outputs.append(_prediction(self.denoiser(*args, **kwargs)))
            return self.combine(outputs, x).to(x.dtype)
        finally:
            self._replaying = False

    def _check(self) -> None:
        recorded = self.combine([call.output for call in self._calls], self._state.x).to(self._state.v.dtype)
        error = (recorded - self._state.v).norm() / self._state.v.norm().clamp_min(1e-12)
        if not error <= self.tolerance:
            raise NotImplementedError(
                f"{type(self.pipe).__name__} combines {len(self._calls)} network call(s) per step in a way that "
                f"{type(self).__name__} does not reproduce (relative error {float(error):.2g}). Switch off options "
                'such as skip-layer guidance, or use mode="rhc", horizon_steps=1, which needs no adapter.'
            )
        self._checked = True

    def replay(self, call: _DenoiserCall, x: torch.Tensor, sigma: float) -> tuple[tuple, dict[str, Any]]:
        """The recorded call's arguments with new latents and noise level."""
        raise NotImplementedError

    def combine(self, outputs: list[Any], x: torch.Tensor) -> torch.Tensor:
        """Turn the denoiser's predictions of one step into the velocity the scheduler receives."""
        raise NotImplementedError


def _like_recorded(x: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """`x` in the recorded tensor's dtype, repeated to its batch size (guidance in one batch)."""
    x = x.to(recorded.dtype)
    return x.repeat(recorded.shape[0] // x.shape[0], *[1] * (x.ndim - 1))


def guide(unconditional: torch.Tensor, conditional: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance u + s (c − u)."""
    return unconditional + scale * (conditional - unconditional)


@register_velocity_adapter("SmallFlowPipeline")
class SmallFlowVelocity(VelocityAdapter):
    """Embedded flow models: σ is the time, guidance is two halves of one batch."""

    denoiser_name = "model"

    def replay(self, call: _DenoiserCall, x: torch.Tensor, sigma: float) -> tuple[tuple, dict[str, Any]]:
        """New sample and σ, recorded labels."""
        return (_like_recorded(x, call.args[0]),), {**call.kwargs, "timestep": sigma}

    def combine(self, outputs: list[Any], x: torch.Tensor) -> torch.Tensor:
        """The velocity, guided where the batch was doubled."""
        velocity = outputs[0]
        if velocity.shape[0] == x.shape[0]:
            return velocity
        return guide(*velocity.chunk(2), self.pipe.guidance_scale)


@register_velocity_adapter("StableDiffusion3Pipeline")
class SD3Velocity(VelocityAdapter):
    """SD3: time is 1000 σ, guidance is two halves of one batch, unconditional first."""

    def replay(self, call: _DenoiserCall, x: torch.Tensor, sigma: float) -> tuple[tuple, dict[str, Any]]:
        """New latents and time, recorded embeddings."""
        timestep = torch.full_like(call.kwargs["timestep"], 1000 * sigma)
        hidden_states = _like_recorded(x, call.kwargs["hidden_states"])
        return call.args, {**call.kwargs, "hidden_states": hidden_states, "timestep": timestep}

    def combine(self, outputs: list[Any], x: torch.Tensor) -> torch.Tensor:
        """The velocity, guided where the batch was doubled."""
        velocity = outputs[0]
        if velocity.shape[0] == x.shape[0]:
            return velocity
        return guide(*velocity.chunk(2), self.pipe.guidance_scale)


@register_velocity_adapter("FluxPipeline")
class FluxVelocity(VelocityAdapter):
    """FLUX.1: time is σ, guidance is distilled; true guidance is a second call with the negative prompt.

    The pipeline keeps `true_cfg_scale` to itself, so it is read off the recorded outputs: v = n + s (c − n) gives
    s = ⟨v − n, c − n⟩ / ‖c − n‖², and the check of the base class confirms that this is the rule in use.
    """

    def replay(self, call: _DenoiserCall, x: torch.Tensor, sigma: float) -> tuple[tuple, dict[str, Any]]:
        """New latents and time, recorded embeddings, guidance and ids."""
        timestep = torch.full_like(call.kwargs["timestep"], sigma)
        hidden_states = x.to(call.kwargs["hidden_states"].dtype)
        return call.args, {**call.kwargs, "hidden_states": hidden_states, "timestep": timestep}

    def begin_step(self, state: FlowState) -> None:
        """Measure the scale of true guidance, if there is any."""
        super().begin_step(state)
        self._scale = 1.0
        if len(self._calls) == 2:
            conditional, negative = (self._tokens(call.output, state.x).double() for call in self._calls)
            direction = conditional - negative
            projection = ((state.v.double() - negative) * direction).sum()
            self._scale = float(projection / direction.square().sum().clamp_min(1e-30))

    def combine(self, outputs: list[Any], x: torch.Tensor) -> torch.Tensor:
        """The conditional velocity, truly guided where there was a second call."""
        velocities = [self._tokens(output, x) for output in outputs]
        if len(velocities) == 1:
            return velocities[0]
        return guide(velocities[1], velocities[0], self._scale)

    def _tokens(self, output: Any, x: torch.Tensor) -> torch.Tensor:
        return output


@register_velocity_adapter("Flux2Pipeline", "Flux2KleinPipeline")
class Flux2Velocity(FluxVelocity):
    """FLUX.2: as FLUX.1; reference-image tokens behind the latents are fed along and dropped from the output."""

    def replay(self, call: _DenoiserCall, x: torch.Tensor, sigma: float) -> tuple[tuple, dict[str, Any]]:
        """New latents in front of the recorded reference tokens."""
        args, kwargs = super().replay(call, x, sigma)
        references = call.kwargs["hidden_states"][:, x.shape[1] :]
        return args, {**kwargs, "hidden_states": torch.cat([kwargs["hidden_states"], references], dim=1)}

    def _tokens(self, output: Any, x: torch.Tensor) -> torch.Tensor:
        return output[:, : x.shape[1]]


@register_velocity_adapter("ZImagePipeline")
class ZImageVelocity(VelocityAdapter):
    """Z-Image: lists of images, time 1 − σ, output negated; guidance is two halves of one list, conditional first."""

    def replay(self, call: _DenoiserCall, x: torch.Tensor, sigma: float) -> tuple[tuple, dict[str, Any]]:
        """New latents and time, recorded prompt embeddings."""
        images, timestep, *rest = call.args
        copies = len(images) // x.shape[0]
        latents = x.to(images[0].dtype).repeat(copies, 1, 1, 1).unsqueeze(2)  # (copies B, C, 1, h, w)
        return (list(latents.unbind(0)), torch.full_like(timestep, 1 - sigma), *rest), call.kwargs

    def combine(self, outputs: list[Any], x: torch.Tensor) -> torch.Tensor:
        """The negated output, guided and renormalised as the pipeline does."""
        images = torch.stack([image.float() for image in outputs[0]])
        if images.shape[0] != x.shape[0]:
            positive, negative = images.chunk(2)
            images = positive + self.pipe.guidance_scale * (positive - negative)
            limit = float(getattr(self.pipe, "_cfg_normalization", 0.0) or 0.0)
            if limit > 0:
                norms = images.flatten(1).norm(dim=1).clamp_min(1e-12)
                scale = (limit * positive.flatten(1).norm(dim=1) / norms).clamp_max(1.0)
                images = images * scale.view(-1, *[1] * (images.ndim - 1))
        return -images.squeeze(2)
