"""Choose λ on held-out images: published values depend on the scale of Φ and on the grid, so none fits every task."""

from dataclasses import dataclass, field
from typing import Any

import torch

from hf_pipelines.flow_control.metrics import psnr
from hf_pipelines.mpc_flow.operator_base import Operator
from hf_pipelines.mpc_flow.pipeline_mpc_flow import MPCFlowPipeline


@dataclass
class InverseProblem:
    """A pipeline, a measurement and the settings that stay fixed while λ is tuned.

    Args:
        pipe ([`MPCFlowPipeline`]): The solver.
        operator ([`Operator`]): A.
        noise_std (`float`, defaults to 0.0): Standard deviation of the Gaussian noise.
        settings (`dict`): Further arguments of the pipeline's call, such as `mode` and `num_inference_steps`.
    """

    pipe: MPCFlowPipeline
    operator: Operator
    noise_std: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class LambdaTuning:
    """What [`tune_lambda`] found.

    Args:
        best (`float`): The λ with the highest PSNR.
        psnr (`dict[float, float]`): Mean PSNR in dB for each λ of the grid.
    """

    best: float
    psnr: dict[float, float]


def tune_lambda(problem: InverseProblem, images: torch.Tensor, grid: list[float], seed: int = 0) -> LambdaTuning:
    """Restore simulated measurements of held-out images with each λ and keep the best.

    Args:
        problem ([`InverseProblem`]): What to solve.
        images (`torch.Tensor` of shape `(batch, channels, height, width)`): Held-out images in [−1, 1].
        grid (`list[float]`): Values of λ to try.
        seed (`int`, defaults to 0): The same noise and starting latents serve every λ.

    Returns:
        [`LambdaTuning`]: the best λ and the table.

    Raises:
        ValueError: The grid is empty.
    """
    if not grid:
        raise ValueError("`grid` must hold at least one value of λ.")
    y = problem.operator.measure(
        images, noise_std=problem.noise_std, generator=torch.Generator().manual_seed(seed + 1)
    )
    table = {}
    for lam in grid:
        generator = torch.Generator().manual_seed(seed)
        arguments = {**problem.settings, "lam": lam, "generator": generator, "output_type": "pt"}
        restored = problem.pipe(y, problem.operator, **arguments).images * 2 - 1
        table[lam] = float(psnr(restored.cpu(), images.cpu()).mean())
    return LambdaTuning(best=max(table, key=table.get), psnr=table)
