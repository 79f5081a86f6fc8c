"""Solve inverse problems with any flow pipeline."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput

from hf_pipelines.flow_control.attach import attach_controller
from hf_pipelines.flow_control.controller_flow import fork_generator
from hf_pipelines.flow_control.pipeline_controlled import ControlledPipeline
from hf_pipelines.mpc_flow.controller_mpc_flow import MPCFlowController
from hf_pipelines.mpc_flow.objective_mpc_flow import CallableObjective, MeasurementObjective
from hf_pipelines.mpc_flow.operator_base import check_images
from hf_pipelines.mpc_flow.operators import Operator


@dataclass
class MPCFlowOutput(BaseOutput):
    """Output of [`MPCFlowPipeline`].

    Args:
        images (`list[PIL.Image.Image]`, `np.ndarray` or `torch.Tensor`): The restored images.
        log (`list[dict]`): One entry per step: `step`, `sigma`, `objective`, `control_norm`, `nonfinite_images`; with
            a `reference` the last one also holds `psnr` and `degraded_psnr`.
        nfe (`int`): Network evaluations, one per velocity.
        nbp (`int`): Those that carried a graph for a backward pass; 0 for K = 1.
        data_rmse (`torch.Tensor` of shape `(batch,)` or `None`): ‖A(x) − y‖/√n of the result.
        endpoints (`list[torch.Tensor]`): Controlled endpoint estimates of each step, if recorded.
    """

    images: list[PIL.Image.Image] | np.ndarray | torch.Tensor
    log: list[dict[str, Any]]
    nfe: int
    nbp: int
    data_rmse: torch.Tensor | None
    endpoints: list[torch.Tensor]


class MPCFlowPipeline(ControlledPipeline):
    """Restore images from measurements y = A(x) + noise with a pretrained flow model, without training (arXiv
    2601.23231).

    Args:
        base ([`~diffusers.DiffusionPipeline`]): Any flow-matching pipeline: FLUX, FLUX.2, SD3, Z-Image, the embedded
            ones.
        operator ([`Operator`], *optional*): The default measurement operator; saved with the pipeline.

    Example:
        >>> import torch
        >>> from hf_pipelines import MPCFlowPipeline, hub, operators
        >>> pipe = MPCFlowPipeline.from_pretrained(hub.repo("digits-16x16"))
        >>> A = operators.SuperResolution(2)
        >>> y = torch.zeros(1, 1, 8, 8)
        >>> pipe(y, A, num_inference_steps=10, generator=torch.Generator().manual_seed(0)).images[0].size
        (16, 16)
    """

    _optional_components = ["operator"]  # noqa: RUF012  (as in diffusers)

    def __init__(self, base: DiffusionPipeline, operator: Operator | None = None):
        super().__init__()
        self._check_base(base)
        self.register_modules(base=base, operator=operator)

    @classmethod
    def _load_component(cls, name: str, folder: Path) -> Operator:
        return Operator.from_pretrained(folder)

    def __call__(
        self,
        y: torch.Tensor | None = None,
        operator: Operator | None = None,
        *,
        objective: Callable[[torch.Tensor], torch.Tensor] | None = None,
        mode: str = "rhc",
        horizon_steps: int | str | None = None,
        lam: float | str = 100.0,
        n_ctrl: int = 20,
        lr: float = 0.1,
        solver: str = "auto",
        control_param: str = "u",
        control_weight: str | None = None,
        rho: float = 64.0,
        noise: Any = None,
        noise_std: float | None = None,
        phi_scale: str = "sum",
        churn: float = 0.0,
        warm_start: bool = True,
        lambda_scaling: str = "none",
        record_endpoints: bool = False,
        reference: torch.Tensor | None = None,
        decode_chunk: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        **base_arguments,
    ) -> MPCFlowOutput | tuple:
        """Restore images.

        Args:
            y (`torch.Tensor`, *optional*): Measurement, its first axis the batch; see `operators.preprocess` for
                pictures.
            operator ([`Operator`], *optional*): A; the pipeline's own when `None`.
            objective (`Callable`, *optional*):
                Instead of `y` and `operator`: images (B, C, H, W) in [0, 1] → one differentiable value per image,
                smaller is better.
            mode (`str`, defaults to `"rhc"`): `"rhc"` or `"dt"`; this and the next twelve as in [`MPCFlowController`].
            horizon_steps (`int` or `"full"`, *optional*): K, planning steps of `"rhc"`.
            lam (`float` or `"auto"`, defaults to 100.0): λ, weight of the data.
            n_ctrl (`int`, defaults to 20): Adam iterations per step.
            lr (`float`, defaults to 0.1): Adam step size.
            solver (`str`, defaults to `"auto"`): `"prox"`, `"adam"` or `"auto"`.
            control_param (`str`, defaults to `"u"`): Variable of Adam, `"u"` or `"d"`.
            control_weight (`str`, *optional*): `"paper"`, `"release"` or `"bayes"`.
            rho (`float`, defaults to 64.0): ρ of `control_weight="release"`.
            churn (`float`, defaults to 0.0): Share of the implied noise that is renewed at each step.
            warm_start (`bool`, defaults to `True`): Start from the last plan.
            lambda_scaling (`str`, defaults to `"none"`): `"none"` or `"inverse_dt"`.
            record_endpoints (`bool`, defaults to `False`): Keep the endpoint estimate of each step.
            noise (noise model, *optional*): Chooses the data term Φ; Gaussian when `None`.
            noise_std (`float`, *optional*): σ_y; with `lam="auto"` it replaces tuning.
            phi_scale (`str`, defaults to `"sum"`): `"sum"`, `"noise"` or `"mean"`, see [`MeasurementObjective`].
            reference (`torch.Tensor`, *optional*): True images in [−1, 1]; the last log entry then holds PSNR values.
            decode_chunk (`int`, defaults to 1): Images per decoder graph of latent models; bounds the memory.
            generator (`torch.Generator` or one per image, *optional*): Makes the result reproducible.
            output_type (`str`, defaults to `"pil"`): As the wrapped pipeline has it.
            return_dict (`bool`, defaults to `True`): Return an output object, else a tuple.
            base_arguments: All other arguments go to the wrapped pipeline: `prompt`, `num_inference_steps`,
                `class_labels`, `latents`, …

        Returns:
            [`MPCFlowOutput`] or `tuple`: images, log, counts of network calls, data error.

        Raises:
            ValueError: A setting is out of range, or y and A(x) differ in shape; the message names both.
            NotImplementedError: K > 1 or `"dt"` with a pipeline whose network cannot be called again; K = 1 works.
        """
        if reference is not None and output_type == "latent":
            raise ValueError("`reference` needs images: `output_type` must not be 'latent'.")
        controller = MPCFlowController(
            mode=mode,
            horizon_steps=horizon_steps,
            lam=lam,
            n_ctrl=n_ctrl,
            lr=lr,
            solver=solver,
            control_param=control_param,
            control_weight=control_weight,
            rho=rho,
            noise_std=noise_std,
            churn=churn,
            warm_start=warm_start,
            lambda_scaling=lambda_scaling,
            record_endpoints=record_endpoints,
        )
        operator = operator if operator is not None else self.operator
        target = self._target(y, operator, objective, noise, noise_std, phi_scale)
        controller.with_objective(target)
        if controller.requires_velocity:
            self._warn_if_quantized()
        arguments = self._base_arguments(base_arguments, y if objective is None else None, operator)
        arguments.update(generator=generator, output_type=output_type, return_dict=False)

        churn_generator = fork_generator(generator)
        with attach_controller(self.base, controller, generator=churn_generator, decode_chunk=decode_chunk) as base:
            images = base(**arguments)[0]
            adapter = base.scheduler.velocity_adapter
            num_steps = len(base.scheduler.timesteps)
        log = controller.log
        if reference is not None:
            self._log_reference(log, images, output_type, reference, target)
        output = MPCFlowOutput(
            images=images,
            log=log,
            nfe=num_steps + (adapter.nfe if adapter is not None else 0),
            nbp=adapter.nbp if adapter is not None else 0,
            data_rmse=controller.data_rmse,
            endpoints=controller.endpoints,
        )
        return output if return_dict else output.to_tuple()

    def _target(self, y, operator, objective, noise, noise_std, phi_scale) -> MeasurementObjective | CallableObjective:
        if objective is not None:
            if y is not None:
                raise ValueError("give `y` with an operator, or `objective`, not both.")
            return CallableObjective(objective)
        if y is None or operator is None:
            missing = "`y`" if y is None else "`operator`"
            raise ValueError(f"{missing} is missing: give `y` and an `operator`, or an `objective`.")
        target = MeasurementObjective(operator, y, noise=noise, noise_std=noise_std, phi_scale=phi_scale)
        if operator.measures_images:
            check_images(y, "y")
        return target

    def _base_arguments(self, given: dict[str, Any], y: torch.Tensor | None, operator) -> dict[str, Any]:
        """The wrapped pipeline's arguments, with batch size and image size filled in from the measurement."""
        known = inspect.signature(self.base.__call__).parameters
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(
                f"{', '.join(map(repr, unknown))}: no argument of {type(self.base).__name__} or of MPC-Flow."
            )
        arguments = dict(given)
        if y is None:
            return arguments
        batch, _, height, width = operator.image_shape(tuple(y.shape))
        sizes = {"num_images": batch, "height": height, "width": width}
        if not isinstance(given.get("prompt"), list):
            sizes["num_images_per_prompt"] = batch
        for name, value in sizes.items():
            if name in known and name not in arguments and not (name == "num_images_per_prompt" and _embeds(given)):
                arguments[name] = value
        return arguments

    def _warn_if_quantized(self) -> None:
        denoiser = getattr(self.base, "transformer", None)
        if getattr(denoiser, "hf_quantizer", None) is not None:
            warnings.warn(
                "this mode differentiates through a quantized denoiser, whose gradients are unreliable and slow; "
                'mode="rhc" with horizon_steps=1 needs none.',
                stacklevel=3,
            )

    def _log_reference(self, log, images, output_type, reference, target) -> None:
        """PSNR of the result and of the back-projection, over the batch's images, into the last log entry."""
        from hf_pipelines.flow_control.metrics import psnr  # scikit-image, only where it is asked for

        pixels = self.base.image_processor.preprocess(images) if output_type == "pil" else torch.as_tensor(images)
        if output_type != "pil":
            pixels = (pixels if output_type == "pt" else pixels.permute(0, 3, 1, 2)) * 2 - 1
        reference = reference.cpu().float()
        if reference.shape[1] == 1 and pixels.shape[1] == 3:
            pixels = pixels.mean(1, keepdim=True)
        log[-1]["psnr"] = float(psnr(pixels.cpu().float(), reference).mean())
        if isinstance(target, MeasurementObjective):
            degraded = target.operator.pinv(target.y).cpu().float().expand_as(reference).clamp(-1, 1)
            log[-1]["degraded_psnr"] = float(psnr(degraded, reference).mean())


def _embeds(arguments: dict[str, Any]) -> bool:
    """Whether prompt embeddings are given, whose batch size is the caller's business."""
    return arguments.get("prompt_embeds") is not None
