"""Other ways to solve inverse problems with a flow model, behind one interface.

    solve(velocity, operator, y, x0, noise_std=…, generator=…) -> images

`velocity(x, σ)` is dx/dσ, `x0` the starting noise (B, C, H, W). Paper time t = 1 − σ and b(x, t) = −velocity(x, 1 − t)
throughout. Every method sums over pixels and keeps the images of a batch apart, but for D-Flow, whose L-BFGS sees the
batch as one vector.

| class | paper | gradient through the network |
| --- | --- | --- |
| `FlowGrad` | FlowGrad (Liu et al., CVPR 2023); OC-Flow (arXiv 2410.18070) with `update="costate"` | all steps |
| `DFlow` | arXiv 2402.14017 | all steps |
| `PnPFlow` | arXiv 2410.02423 | none |
| `OTODE` | Pokle et al., arXiv 2310.04432 | one step |
| `FlowPriors` | arXiv 2405.18816 | one step |
| `FlowDPS` | arXiv 2503.08136 | none |
| `FlowChef` | arXiv 2412.00100 | none |
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from hf_pipelines.flow_control.controller_flow import Velocity, draw_noise, run_controller
from hf_pipelines.mpc_flow.controller_mpc_flow import (
    MPCFlowController,
    minimise_with_adam,
    receding_horizon_cost,
    squared_norm,
)
from hf_pipelines.mpc_flow.objective_mpc_flow import MeasurementObjective
from hf_pipelines.mpc_flow.operator_base import Operator

Generator = torch.Generator | None


class CountingVelocity:
    """Wrap a velocity and count its calls.

    Attributes:
        nfe (`int`): Calls so far.
        nbp (`int`): Calls with a graph for a backward pass.
    """

    def __init__(self, velocity: Velocity):
        self.velocity, self.nfe, self.nbp = velocity, 0, 0

    def __call__(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        """Evaluate and count."""
        self.nfe += 1
        self.nbp += int(torch.is_grad_enabled() and x.requires_grad)
        return self.velocity(x, sigma)


def data_gradient(objective: MeasurementObjective, x: torch.Tensor) -> torch.Tensor:
    """∇Φ(x), of the shape of x."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(objective(x).sum(), [x])[0]


def _euler(velocity: Velocity, x: torch.Tensor, num_steps: int) -> torch.Tensor:
    return run_controller(velocity, None, x, torch.linspace(1, 0, num_steps + 1).tolist())


@dataclass
class PlainFlow:
    """The flow without any regard for y.

    Args:
        num_steps (`int`): Euler steps.
    """

    num_steps: int = 100

    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Sample; `y` is ignored."""
        return _euler(velocity, x0, self.num_steps)


@dataclass
class BackProjection:
    """`operator.pinv(y)`: the degraded image as a person would look at it; no model at all."""

    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Project back."""
        return operator.pinv(y).expand_as(x0).clamp(-1, 1)


@dataclass
class MPCFlow:
    """MPC-Flow behind the interface of the baselines.

    Args:
        num_steps (`int`): N.
        settings (`dict`): Arguments of [`MPCFlowController`].
        lam (`float` or `"auto"`): λ.
    """

    num_steps: int
    settings: dict
    lam: float | str = 100.0

    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Sample under control."""
        settings = {**self.settings, "noise_std": noise_std} if self.lam == "auto" else self.settings
        controller = MPCFlowController(lam=self.lam, **settings)
        controller.with_objective(MeasurementObjective(operator, y))
        sigmas = torch.linspace(1, 0, self.num_steps + 1).tolist()
        return run_controller(velocity, controller, x0, sigmas, generator=generator)


@dataclass
class FlowGrad:
    """Global control: all N controls at once, min Δ Σ‖u_k‖² + λ Φ(x(1)).

    Args:
        num_steps (`int`): N.
        iterations (`int`): Sweeps over the whole trajectory.
        lam (`float`): λ.
        lr (`float`): Step size.
        update (`str`): `"adam"` differentiates the trajectory; `"costate"` (OC-Flow) integrates the co-state
            backwards,
            p_k = p_{k+1} + Δ (∂b/∂x)ᵀ p_{k+1}, one network graph at a time, and steps along −(2u_k + p_{k+1}).
    """

    num_steps: int = 20
    iterations: int = 60
    lam: float = 100.0
    lr: float = 0.1
    update: str = "adam"

    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Optimise the controls, then simulate once more."""
        objective = MeasurementObjective(operator, y)
        u = x0.new_zeros(x0.shape[0], self.num_steps, *x0.shape[1:])
        if self.update == "costate":
            for _ in range(self.iterations):
                u = u - self.lr * self._costate_gradient(velocity, objective, u, x0)
        else:

            def cost(u):
                return receding_horizon_cost(u, x0, -velocity(x0, 1.0), 0.0, velocity, objective, self.lam)

            u = minimise_with_adam(cost, u, self.iterations, self.lr)[0]
        return self._simulate(velocity, u, x0)[-1]

    @torch.no_grad()
    def _simulate(self, velocity: Velocity, u: torch.Tensor, x0: torch.Tensor) -> list[torch.Tensor]:
        states = [x0]
        for k in range(self.num_steps):
            x = states[-1]
            states.append(x + (u[:, k] - velocity(x, 1 - k / self.num_steps)) / self.num_steps)
        return states

    def _costate_gradient(self, velocity, objective, u, x0) -> torch.Tensor:
        states = self._simulate(velocity, u, x0)
        p = self.lam * data_gradient(objective, states[-1])
        gradient = torch.empty_like(u)
        for k in reversed(range(self.num_steps)):
            gradient[:, k] = 2 * u[:, k] + p
            with torch.enable_grad():
                x = states[k].detach().requires_grad_(True)
                b = -velocity(x, 1 - k / self.num_steps)
                p = p + torch.autograd.grad(b, [x], p)[0] / self.num_steps
        return gradient


@dataclass
class DFlow:
    """Optimise the starting noise by L-BFGS through the whole flow (midpoint rule).

    The cost is λΦ(x(1)) + ½‖z‖² − (d − 1) log‖z‖, the negative log density of the norm of Gaussian noise. The first
    iterate blends the noise that the flow inverts the back-projection to with fresh noise: √α z + √(1−α) ξ.

    Args:
        num_steps (`int`): Midpoint steps, two network calls each.
        max_evaluations (`int`): Evaluations of the cost.
        alpha (`float`): α of the blend.
        lam (`float`): λ.
    """

    num_steps: int = 6
    max_evaluations: int = 33
    alpha: float = 0.1
    lam: float = 100.0

    def _integrate(self, velocity: Velocity, x: torch.Tensor, start: float, end: float) -> torch.Tensor:
        step = (end - start) / self.num_steps  # in σ
        for k in range(self.num_steps):
            sigma = start + k * step
            middle = x + step / 2 * velocity(x, sigma)
            x = x + step * velocity(middle, sigma + step / 2)
        return x

    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Optimise the noise, then sample from it."""
        objective = MeasurementObjective(operator, y)
        dim = x0[0].numel()
        with torch.no_grad():
            inverted = self._integrate(velocity, operator.pinv(y).expand_as(x0).clamp(-1, 1), 0.0, 1.0)
        z = (self.alpha**0.5 * inverted + (1 - self.alpha) ** 0.5 * x0).requires_grad_(True)
        optimizer = torch.optim.LBFGS(
            [z], max_iter=self.max_evaluations, max_eval=self.max_evaluations, line_search_fn="strong_wolfe"
        )

        def closure():
            norm = squared_norm(z).sqrt().clamp_min(1e-12)
            prior = 0.5 * norm**2 - (dim - 1) * norm.log()
            cost = (self.lam * objective(self._integrate(velocity, z, 1.0, 0.0)) + prior).sum()
            (z.grad,) = torch.autograd.grad(cost, [z])
            return cost

        optimizer.step(closure)
        with torch.no_grad():
            return self._integrate(velocity, z.detach(), 1.0, 0.0)


@dataclass
class PnPFlow:
    """Plug-and-play: gradient step on Φ, re-noise to level t, denoise by one step to the end; average over draws.

    Args:
        num_steps (`int`): Outer steps.
        num_draws (`int`): S, noise draws that are averaged.
        gamma (`float`): Step size γ.
        alpha (`float`): The step is γ (1 − t)^α.
    """

    num_steps: int = 100
    num_draws: int = 5
    gamma: float = 1.0
    alpha: float = 0.5

    @torch.no_grad()
    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Alternate data step and denoiser."""
        objective = MeasurementObjective(operator, y)
        x = operator.pinv(y).expand_as(x0).clone()
        for k in range(self.num_steps):
            t = k / self.num_steps
            z = x - self.gamma * (1 - t) ** self.alpha * data_gradient(objective, x)
            x = torch.zeros_like(z)
            for _ in range(self.num_draws):
                noisy = t * z + (1 - t) * draw_noise(z, generator)
                x += (noisy - (1 - t) * velocity(noisy, 1 - t)) / self.num_draws
        return x


@dataclass
class OTODE:
    """ΠGDM guidance of the flow: b + (1−t)/t · (∂x̂/∂x)ᵀ Aᵀ (r² A Aᵀ + σ_y² I)⁻¹ (y − A x̂), r² = (1−t)²/((1−t)²+t²).

    Linear operators only.

    Args:
        num_steps (`int`): N of the full grid.
        start (`float`): Paper time to start from, at start · pinv(y) + (1 − start) · noise.
    """

    num_steps: int = 100
    start: float = 0.1

    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Integrate the guided flow.

        Raises:
            ValueError: The operator is not linear.
        """
        if not operator.linear:
            raise ValueError(f"OT-ODE needs a linear operator, got {type(operator).__name__}.")
        first = round(self.start * self.num_steps)
        x = self.start * operator.pinv(y).expand_as(x0) + (1 - self.start) * x0
        variance = max(noise_std or 0.0, 1e-3) ** 2
        for k in range(first, self.num_steps):
            t = k / self.num_steps
            r2 = (1 - t) ** 2 / ((1 - t) ** 2 + t**2)
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                b = -velocity(x, 1 - t)
                endpoint = x + (1 - t) * b
                centre = endpoint.detach()
                # Aᵀ (r² A Aᵀ + σ² I)⁻¹ (y − A x̂) = (prox(x̂) − x̂)/r² with c = r²/σ²
                direction = (operator.prox(centre, y.to(centre), r2 / variance) - centre) / r2
                (guidance,) = torch.autograd.grad(endpoint, [x], direction)
            x = x.detach() + (b.detach() + (1 - t) / t * guidance) / self.num_steps
        return x


@dataclass
class FlowPriors:
    """MAP estimate interval by interval: match the measurement's own path y_t = t y + (1−t) A x(0).

    In each interval x is moved by Adam on λ Φ_t(x + Δ b(x, t)) + Δ div b(x, t), the divergence by Hutchinson's
    estimator, and −log p(x) = ½‖x‖² in the first.

    Args:
        num_steps (`int`): Intervals.
        iterations (`int`): Adam iterations per interval.
        lam (`float`): λ.
        lr (`float`): Step size.
        start (`float`): First paper time, just off 0.
    """

    num_steps: int = 100
    iterations: int = 3
    lam: float = 100.0
    lr: float = 0.03
    start: float = 1e-3

    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Walk through the intervals."""
        y0 = operator.A(x0)
        x = x0
        times = torch.linspace(self.start, 1, self.num_steps + 1).tolist()
        for k, (t, t_next) in enumerate(pairwise(times)):
            delta = t_next - t
            objective = MeasurementObjective(operator, t_next * y + (1 - t_next) * y0)
            probe = draw_noise(x, generator).sign()
            first = k == 0

            def cost(x, t=t, delta=delta, objective=objective, probe=probe, first=first):
                b = -velocity(x, 1 - t)
                (pulled,) = torch.autograd.grad(b, [x], probe, create_graph=True)  # (∂b/∂x)ᵀ probe
                divergence = (pulled * probe).flatten(1).sum(1)
                prior = 0.5 * squared_norm(x) if first else 0.0
                return self.lam * objective(x + delta * b) + delta * divergence + prior

            x = minimise_with_adam(cost, x, self.iterations, self.lr)[0]
            with torch.no_grad():
                x = x - delta * velocity(x, 1 - t)
        return x


@dataclass
class FlowDPS:
    """Gradient steps on the endpoint estimate, blended in as σ falls; the noise estimate is renewed in part.

    Args:
        num_steps (`int`): N.
        iterations (`int`): Gradient steps on x̂₀ per sampling step.
        step_size (`float`): Their size.
    """

    num_steps: int = 100
    iterations: int = 3
    step_size: float = 0.5

    @torch.no_grad()
    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Sample with corrected endpoints."""
        objective = MeasurementObjective(operator, y)
        x = x0
        for k in range(self.num_steps):
            sigma, sigma_next = 1 - k / self.num_steps, 1 - (k + 1) / self.num_steps
            v = velocity(x, sigma)
            clean, noise = x - sigma * v, x + (1 - sigma) * v
            corrected = clean
            for _ in range(self.iterations):
                corrected = corrected - self.step_size * data_gradient(objective, corrected)
            clean = sigma * clean + (1 - sigma) * corrected
            noise = sigma_next**0.5 * noise + (1 - sigma_next) ** 0.5 * draw_noise(x, generator)
            x = (1 - sigma_next) * clean + sigma_next * noise
        return x


@dataclass
class FlowChef:
    """Gradient of Φ at the endpoint, through a constant velocity, applied to the current state.

    Args:
        num_steps (`int`): N.
        step_size (`float`): Size of the gradient step.
    """

    num_steps: int = 100
    step_size: float = 0.1

    @torch.no_grad()
    def solve(self, velocity: Velocity, operator: Operator, y, x0, noise_std=None, generator: Generator = None):
        """Sample with a gradient step each."""
        objective = MeasurementObjective(operator, y)
        x = x0
        for k in range(self.num_steps):
            sigma = 1 - k / self.num_steps
            v = velocity(x, sigma)
            x = x - v / self.num_steps - self.step_size * data_gradient(objective, x - sigma * v)
        return x
