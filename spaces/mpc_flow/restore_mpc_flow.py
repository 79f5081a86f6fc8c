"""Degrade a small image and restore it: what stands behind the first tab. Nothing here lays out a page."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from checks_mpc_flow import MAX_SEED, check_choice, check_number
from pictures_mpc_flow import open_picture

from datasets_scripts.digits import load_digit_tensors
from hf_pipelines import MPCFlowPipeline, hub, operators
from hf_pipelines.flow_control.metrics import masked_psnr, nearest_neighbour_distance, psnr, ssim
from hf_pipelines.mpc_flow.baselines_mpc_flow import CountingVelocity, FlowGrad, PnPFlow

SIDE = 16  # of the shipped digits model
MAX_NOISE = 0.5
STRIPES = [[0.0 if (row + column) % 8 < 3 else 1.0 for column in range(SIDE)] for row in range(SIDE)]


@dataclass(frozen=True)
class Problem:
    """A measurement operator with the noise and the λ that suit it.

    Args:
        label (`str`): What people read.
        operator (`Callable`): Seed → operator.
        noise_std (`float`): σ_y to start with.
        log10_lam (`float`): log₁₀ λ to start with, as tuned on digits.
        note (`str`): What people should know of it.
    """

    label: str
    operator: Callable[[int], operators.Operator]
    noise_std: float = 0.05
    log10_lam: float = 2.0
    note: str = ""


PROBLEMS = {
    "denoise": Problem("Noise only", lambda seed: operators.Denoise(), 0.2, 1.0),
    "box": Problem("Box of 6×6 pixels missing", lambda seed: operators.BoxInpaint(6)),
    "random": Problem("70 % of the pixels missing", lambda seed: operators.RandomInpaint(0.7, seed), 0.01),
    "freeform": Problem("Stripes missing", lambda seed: operators.FreeformInpaint(STRIPES)),
    "blur": Problem("Gaussian blur", lambda seed: operators.GaussianBlur(9, 1.0)),
    "motion": Problem("Motion blur", lambda seed: operators.MotionBlur(9, 0.5, seed)),
    "super_resolution": Problem("Low resolution, 8×8", lambda seed: operators.SuperResolution(2)),
    "hdr": Problem("Overexposure (HDR), nonlinear", lambda seed: operators.HDR()),
    "tanh_blur": Problem("tanh of a blur, nonlinear", lambda seed: operators.NonlinearBlur(9, 1.0)),
    "phase": Problem(
        "Fourier magnitudes only (phase retrieval)",
        lambda seed: operators.PhaseRetrieval(2.0),
        note="An image and the same one turned by 180° have the same Fourier magnitudes: either may come out.",
    ),
}


@dataclass(frozen=True)
class Method:
    """A way to restore.

    Args:
        label (`str`): What people read.
        steps (`int`): Steps to start with.
        max_steps (`int`): Most steps, so that a click takes about three seconds at most.
        settings (`dict`): Arguments of [`MPCFlowPipeline`], or of the baseline.
        baseline (`type`, *optional*): A class of `baselines_mpc_flow`; MPC-Flow when `None`.
        knows_auto (`bool`): Whether λ can follow from the noise level.
        uses_lam (`bool`): Whether λ has a meaning.
    """

    label: str
    steps: int
    max_steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    baseline: type | None = None
    knows_auto: bool = False
    uses_lam: bool = True


METHODS = {
    "k1": Method("MPC, K = 1: no backpropagation", 50, 100, knows_auto=True),
    "k1_churn": Method("MPC, K = 1 + churn: no backpropagation", 50, 100, {"churn": 1.0}, knows_auto=True),
    "k3": Method("MPC, K = 3", 15, 25, {"horizon_steps": 3, "lr": 0.05}),
    "dt": Method("MPC, Δt horizon: best, slower", 20, 30, {"mode": "dt"}),
    "pnp_flow": Method("Baseline: PnP-Flow", 50, 100, baseline=PnPFlow, uses_lam=False),
    "flowgrad": Method("Baseline: FlowGrad, global control", 15, 25, {"iterations": 40}, baseline=FlowGrad),
}


@dataclass
class Measured:
    """A simulated measurement: `truth` and `degraded` are images (1, 1, 16, 16) in [−1, 1]."""

    truth: torch.Tensor
    operator: operators.Operator
    y: torch.Tensor
    noise_std: float

    @property
    def degraded(self) -> torch.Tensor:
        """The back-projection of y: the measurement as a picture."""
        return self.operator.pinv(self.y).expand_as(self.truth).clamp(-1, 1)


@dataclass
class Restored:
    """A restored image (1, 1, 16, 16), endpoint estimates (N, 16, 16) over time, and what they cost."""

    image: torch.Tensor
    endpoints: torch.Tensor
    nfe: int
    nbp: int
    seconds: float


@functools.cache
def pipeline() -> MPCFlowPipeline:
    """The shipped pipeline, loaded once."""
    pipe = MPCFlowPipeline.from_pretrained(hub.repo("mpc-flow-digits-16x16"))
    pipe.set_progress_bar_config(disable=True)
    pipe.base.model.requires_grad_(False)
    return pipe


@functools.cache
def digits(split: str) -> torch.Tensor:
    """All digits of a split, (n, 1, 16, 16) in [−1, 1]."""
    return load_digit_tensors(SIDE, split)[0]


def digit_image(index: Any) -> torch.Tensor:
    """Test digit number `index`, (1, 1, 16, 16)."""
    index = check_number("The number of the test digit", index, 0, len(digits("test")) - 1, whole=True)
    return digits("test")[index : index + 1]


def uploaded_image(path: str | None) -> torch.Tensor:
    """A user's picture as the model takes it, (1, 1, 16, 16) in [−1, 1]."""
    return operators.preprocess(open_picture(path), size=SIDE)


def drawn_image(drawing: dict[str, Any] | None) -> torch.Tensor:
    """Dark strokes on a light canvas as a light digit on black, (1, 1, 16, 16) in [−1, 1]."""
    canvas = (drawing or {}).get("composite")
    if canvas is None or canvas.min() == canvas.max():
        raise ValueError("The canvas is empty: draw a digit first.")
    return -operators.preprocess(canvas, size=SIDE)


def measure(truth: torch.Tensor, problem: str, noise_std: Any, seed: Any) -> Measured:
    """Simulate the measurement of an image.

    Args:
        truth (`torch.Tensor` of shape `(1, 1, 16, 16)`): The true image.
        problem (`str`): A key of `PROBLEMS`.
        noise_std (`float`): σ_y.
        seed (`int`): Seed of mask, blur path and noise.

    Returns:
        [`Measured`]: truth, operator and y.

    Raises:
        ValueError: An argument is out of range.
    """
    noise_std = check_number("The noise level", noise_std, 0, MAX_NOISE)
    seed = check_number("The seed", seed, 0, MAX_SEED, whole=True)
    operator = check_choice("The degradation", problem, PROBLEMS).operator(seed)
    y = operator.measure(truth, noise_std=noise_std, generator=torch.Generator().manual_seed(seed))
    return Measured(truth, operator, y, noise_std)


def restore(measured: Measured, method: str, lam: float | str, steps: Any, seed: Any) -> Restored:
    """Restore the image behind a measurement.

    Args:
        measured ([`Measured`]): The measurement.
        method (`str`): A key of `METHODS`.
        lam (`float` or `"auto"`): λ; ignored by PnP-Flow.
        steps (`int`): Sampling steps.
        seed (`int`): Seed of the starting noise.

    Returns:
        [`Restored`]: image, endpoint estimates, cost.

    Raises:
        ValueError: An argument is out of range.
    """
    chosen = check_choice("The method", method, METHODS)
    steps = check_number(f"The number of steps of {method}", steps, 1, chosen.max_steps, whole=True)
    # another stream than the measurement's, or the starting noise would be the measurement's own
    generator = torch.Generator().manual_seed(MAX_SEED - check_number("The seed", seed, 0, MAX_SEED, whole=True))
    start = time.perf_counter()
    run = _restore_with_mpc if chosen.baseline is None else _restore_with_baseline
    restored = run(measured, chosen, lam, steps, generator)
    restored.seconds = time.perf_counter() - start
    return restored


def _restore_with_mpc(measured: Measured, method: Method, lam: float | str, steps: int, generator) -> Restored:
    output = pipeline()(
        measured.y,
        measured.operator,
        lam=lam,
        noise_std=measured.noise_std if lam == "auto" else None,
        num_inference_steps=steps,
        record_endpoints=True,
        generator=generator,
        output_type="pt",
        **method.settings,
    )
    endpoints = torch.cat(output.endpoints)[:, 0] if output.endpoints else (output.images * 2 - 1)[:, 0]
    return Restored(output.images * 2 - 1, endpoints, output.nfe, output.nbp, 0.0)


class _EndpointRecorder(CountingVelocity):
    """Counts calls and keeps x̂₀ = x − σ v of each."""

    def __init__(self):
        super().__init__(lambda x, sigma: pipeline().base.model(x, timestep=sigma).sample)
        self.endpoints: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        v = super().__call__(x, sigma)
        self.endpoints.append((x - sigma * v).detach()[0, 0])
        return v


def _restore_with_baseline(measured: Measured, method: Method, lam: float | str, steps: int, generator) -> Restored:
    settings = {**method.settings, **({"lam": lam} if method.uses_lam else {})}
    velocity = _EndpointRecorder()
    x0 = torch.randn(measured.truth.shape, generator=generator)
    solver = method.baseline(num_steps=steps, **settings)
    image = solver.solve(velocity, measured.operator, measured.y, x0, measured.noise_std, generator)
    endpoints = torch.stack(velocity.endpoints)  # (calls, 16, 16)
    if method.baseline is PnPFlow:
        endpoints = endpoints.view(steps, solver.num_draws, SIDE, SIDE).mean(1)  # the average is the iterate
    return Restored(image.clamp(-1, 1), endpoints[-steps:], velocity.nfe, velocity.nbp, 0.0)


def nearest_training_digit(image: torch.Tensor) -> torch.Tensor:
    """The training digit that is closest to an image, (1, 1, 16, 16)."""
    training = digits("train")
    return training[torch.cdist(image.flatten(1), training.flatten(1)).argmin(1)]


def residual(measured: Measured, image: torch.Tensor) -> torch.Tensor:
    """A(x) − y, (1, 1, h, w)."""
    return measured.operator.A(image) - measured.y


def scores(measured: Measured, restored: Restored) -> list[list[str]]:
    """Rows of the table: quantity, truth, degraded, restored."""
    images = [measured.truth, measured.degraded, restored.image]
    pairs = [(image, measured.truth) for image in images]
    rows = [
        ["PSNR, dB (higher is better)", *_cells([float(psnr(*pair)) for pair in pairs], ".1f")],
        ["SSIM (higher is better)", *_cells([float(ssim(*pair)) for pair in pairs], ".3f")],
        [
            f"Data RMSE (best near the noise, {measured.noise_std:g})",
            *_cells([float(residual(measured, image).square().mean().sqrt()) for image in images], ".3f"),
        ],
        [
            "RMSE to the nearest training digit (0 = memorised)",
            *_cells([float(nearest_neighbour_distance(image, digits("train"))) for image in images], ".3f"),
        ],
    ]
    if hasattr(measured.operator, "mask"):
        missing = 1 - measured.operator.mask(measured.truth)
        rows.insert(
            1,
            ["PSNR of the missing pixels, dB", *_cells([float(masked_psnr(*pair, missing)) for pair in pairs], ".1f")],
        )
    rows.append(["Network calls, forward", "", "", str(restored.nfe)])
    rows.append(["Network calls, backward", "", "", str(restored.nbp)])
    rows.append(["Seconds", "", "", f"{restored.seconds:.2f}"])
    return rows


def _cells(values: list[float], form: str) -> list[str]:
    return ["exact" if math.isinf(value) else format(value, form) for value in values]
