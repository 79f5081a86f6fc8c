"""Flow-matching Euler scheduler whose step asks a controller first."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SchedulerMixin  # noqa: F401  (the loader looks for the mixin here)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput

from hf_pipelines.flow_control.controller_flow import FlowController, FlowState


def _leave_inference_mode(tensor: torch.Tensor) -> torch.Tensor:
    """Detached copy in at least float32 that autograd accepts, also when made under `torch.inference_mode()`."""
    tensor = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    return tensor.clone() if tensor.is_inference() else tensor


class ControlledFlowMatchEulerScheduler(FlowMatchEulerDiscreteScheduler):
    """[`~diffusers.FlowMatchEulerDiscreteScheduler`] with one more runtime attribute, `controller`.

    Every flow-matching pipeline of diffusers ends a step with `scheduler.step(velocity, t, latents)`: there the final
    velocity and the current latents meet, so this one hook serves them all. Config and behaviour are the parent's;
    with `controller = None` the output is bit-identical. The controller is never serialised.

    Attributes:
        controller ([`FlowController`], *optional*): Asked at each step.
        codec (`Callable`, *optional*): Latents → images, handed to the controller.
        velocity_adapter ([`VelocityAdapter`], *optional*): Re-evaluates the network, handed to the controller.
    """

    controller: FlowController | None = None
    codec = None
    velocity_adapter = None

    @classmethod
    def from_scheduler(cls, scheduler) -> "ControlledFlowMatchEulerScheduler":
        """Convert a pipeline's scheduler, keeping all of its config.

        Args:
            scheduler (`SchedulerMixin`): The scheduler of a flow pipeline.

        Returns:
            [`ControlledFlowMatchEulerScheduler`]: the new scheduler, without a controller.

        Raises:
            ValueError: `scheduler` is no [`~diffusers.FlowMatchEulerDiscreteScheduler`]. A multistep scheduler would
                carry the control into its history and apply it again.
        """
        if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            raise ValueError(
                f"`scheduler` is a {type(scheduler).__name__}; only FlowMatchEulerDiscreteScheduler can be controlled."
                " Use `pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)`."
            )
        converted = cls.from_config(scheduler.config)
        converted.set_shift(scheduler.shift)
        return converted

    def step(
        self,
        model_output: torch.FloatTensor,
        timestep: float | torch.FloatTensor,
        sample: torch.FloatTensor,
        *args,
        generator: torch.Generator | None = None,
        per_token_timesteps: torch.Tensor | None = None,
        return_dict: bool = True,
        **kwargs,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple:
        """Take one step from `sample` to the next noise level; arguments and result are the parent's.

        Raises:
            NotImplementedError: A controller is set together with `per_token_timesteps` or `invert_sigmas`.
        """
        options = {"generator": generator, "per_token_timesteps": per_token_timesteps, **kwargs}
        if self.controller is None:
            return super().step(model_output, timestep, sample, *args, return_dict=return_dict, **options)
        if per_token_timesteps is not None or self.config.invert_sigmas:
            option = "per_token_timesteps" if per_token_timesteps is not None else "invert_sigmas"
            raise NotImplementedError(f"`{option}` cannot be combined with a controller.")

        if self.step_index is None:
            self._init_step_index(timestep)
        step = self.step_index
        num_steps = len(self.sigmas) - 1
        first = step == (self.begin_index or 0)
        if first:
            self.controller.reset(num_steps, sample.shape[0], sample.device)
        state = FlowState(
            v=_leave_inference_mode(model_output),
            x=_leave_inference_mode(sample),
            sigma=float(self.sigmas[step]),
            sigma_next=float(self.sigmas[step + 1]),
            step=step,
            num_steps=num_steps,
            generator=self.controller.generator,
            decode=self.codec,
            velocity=self.velocity_adapter,
            sigma_min=float(self.sigmas[-2]),
        )
        with torch.inference_mode(False), torch.enable_grad():  # pipelines sample without gradients
            if self.velocity_adapter is not None:
                self.velocity_adapter.begin_step(state)
            answer = self.controller.control(state)
        # the parent does the Euler (or stochastic) rule and moves the step index on; a control that leaves the step
        # alone must not even change the rounding, so the pipeline's own tensors go in where nothing was changed
        velocity = model_output if answer.velocity is state.v else answer.velocity.detach()
        latents = sample if answer.sample is state.x else answer.sample.detach()
        result = super().step(velocity, timestep, latents, *args, return_dict=False, **options)[0]
        if answer.noise is not None:
            result = result + answer.noise.detach()
        result = result.to(model_output.dtype)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=result) if return_dict else (result,)
