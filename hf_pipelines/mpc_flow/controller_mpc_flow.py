"""MPC-Flow: steer a flow model by model predictive control (Webber, Denker, Barbano, Reader, arXiv 2601.23231).

Control problem in paper time t = 1 − σ with velocity b = −v:

    min_u ∫₀¹ ‖u(t)‖² dt + λ Φ(x(1)),    dx/dt = b(x, t) + u(t),    x(0) ~ N(0, I).

At each sampling step a short problem is solved from the current latents, its first control is applied, and the rest is
planned anew:

    rhc, K = 1   d = argmin ‖d‖²/h + λ Φ(D(x̂ + d)),             u = d/h      no gradient through the network
    rhc, K > 1   u₀… = argmin δ Σ‖u_j‖² + λ Φ(D(z_K)),           u = u₀       K − 1 network calls with a graph
    dt           u = argmin Δ‖u‖² + λ Φ(D(x' + (1−t') b(x',t'))), x' = x + Δ(b+u)   one network call with a graph

| paper | argument | default |
| --- | --- | --- |
| λ | `lam` | 100 |
| K | `horizon_steps` | 1 |
| N | the pipeline's `num_inference_steps` | |
| inner iterations, step size | `n_ctrl`, `lr` | 20, 0.1 |

All costs are sums over pixels, one value per image, so that no image's result depends on its batch.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config

from hf_pipelines.flow_control.controller_flow import FlowControl, FlowController, FlowState, Velocity, draw_noise
from hf_pipelines.mpc_flow.objective_mpc_flow import CallableObjective, MeasurementObjective

Objective = Callable[[torch.Tensor], torch.Tensor]
MODES = ("rhc", "dt")
SOLVERS = ("auto", "prox", "adam")
CONTROL_WEIGHTS = ("paper", "release", "bayes")
MAX_DATA_WEIGHT = 1e12  # "release" weighs the control with 0 at the first step; the data term then rules alone


def squared_norm(control: torch.Tensor) -> torch.Tensor:
    """‖u‖² per image, (B,)."""
    return control.square().flatten(1).sum(1)


def endpoint_cost(d: torch.Tensor, endpoint: torch.Tensor, phi: Objective, w: float, lam: float) -> torch.Tensor:
    """K = 1: J(d) = w ‖d‖² + λ Φ(x̂ + d) per image; the paper has w = 1/h."""
    return w * squared_norm(d) + lam * phi(endpoint + d)


def receding_horizon_cost(
    u: torch.Tensor, x: torch.Tensor, b0: torch.Tensor, t: float, velocity: Velocity, phi: Objective, lam: float
) -> torch.Tensor:
    """K > 1: J(u) = δ Σ_j ‖u_j‖² + λ Φ(z_K) per image, z_{j+1} = z_j + δ (b(z_j, t + jδ) + u_j), δ = (1 − t)/K.

    Args:
        u (`torch.Tensor` of shape `(batch, K, ...)`): The plan.
        x (`torch.Tensor` of shape `(batch, ...)`): z_0.
        b0 (`torch.Tensor` of shape `(batch, ...)`): b(z_0, t), known already.
        t (`float`): Paper time of x.
        velocity (`Callable`): (x, σ) → v = −b.
        phi (`Callable`): Latents → Φ, (B,).
        lam (`float`): λ.
    """
    num_steps = u.shape[1]
    delta = (1 - t) / num_steps
    z = x
    for j in range(num_steps):
        b = b0 if j == 0 else -velocity(z, 1 - (t + j * delta))
        z = z + delta * (b + u[:, j])
    return delta * squared_norm(u) + lam * phi(z)


def one_step_value(x: torch.Tensor, t: float, velocity: Velocity, phi: Objective) -> torch.Tensor:
    """V(x, t) ≈ Φ(x + (1 − t) b(x, t)): the value of the rest of the run after one Euler step to its end."""
    if t >= 1:
        return phi(x)
    return phi(x - (1 - t) * velocity(x, 1 - t))


def delta_t_cost(
    u: torch.Tensor, x: torch.Tensor, b: torch.Tensor, t: float, t_next: float, lam: float, value: Callable
) -> torch.Tensor:
    """Δt horizon: J(u) = Δ ‖u‖² + λ V(x + Δ (b + u), t_next) per image."""
    delta = t_next - t
    return delta * squared_norm(u) + lam * value(x + delta * (b + u), t_next)


def minimise_with_adam(
    cost: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, n_ctrl: int, lr: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`n_ctrl` Adam iterations on a batch of independent problems.

    An image whose cost or gradient is not finite keeps its last finite iterate. Gradients come from
    `torch.autograd.grad` with respect to the control alone, so no parameter of a network gathers a `.grad`.

    Args:
        cost (`Callable`): (B, ...) → (B,).
        start (`torch.Tensor` of shape `(batch, ...)`): First iterate.
        n_ctrl (`int`): Iterations.
        lr (`float`): Step size.

    Returns:
        `tuple`: the control (B, ...), the cost at the last iterate evaluated (B,), and which images met a value that
        was not finite (B,).
    """
    control = start.detach().clone().requires_grad_(True)
    optimizer = torch.optim.Adam([control], lr=lr)
    broken = torch.zeros(start.shape[0], dtype=torch.bool, device=start.device)
    for _ in range(n_ctrl):
        values = cost(control)
        total = values.sum()
        (gradient,) = torch.autograd.grad(total, [control])
        if bool(torch.isfinite(total + gradient.sum())):  # one check for the whole batch, the usual case
            control.grad = gradient
            optimizer.step()
            continue
        finite = torch.isfinite(values) & torch.isfinite(gradient).flatten(1).all(1)
        rows = finite.view(-1, *[1] * (start.ndim - 1))
        before = control.detach().clone()
        control.grad = torch.where(rows, gradient, 0.0)
        optimizer.step()
        with torch.no_grad():
            control.copy_(torch.where(rows, control, before))
        broken |= ~finite
    return control.detach(), values.detach(), broken


class MPCFlowController(FlowController):
    """Model predictive control of a flow model; one object for the paper's regimes.

    Args:
        mode (`str`, defaults to `"rhc"`): `"rhc"` plans to the end of the run, `"dt"` one step ahead.
        horizon_steps (`int` or `"full"`, *optional*):
            K, planning steps of `"rhc"`, on a grid uniform in t over [t_k, 1]; `"full"` is the number of remaining
            steps. 1 when `None`.
        lam (`float` or `"auto"`, defaults to 100.0):
            λ, weight of the data. 0 is plain sampling. `"auto"` needs `noise_std`, K = 1, and chooses
            `control_weight="bayes"`.
        n_ctrl (`int`, defaults to 20): Adam iterations per step.
        lr (`float`, defaults to 0.1): Adam step size (the paper takes 0.05 for K = 3).
        solver (`str`, defaults to `"auto"`):
            K = 1 only. `"prox"` is the closed form for linear operators on pixels, `"adam"` works always; `"auto"`
            takes the closed form where there is one.
        control_param (`str`, defaults to `"u"`): K = 1 with Adam: whether it acts on u (paper) or d = h u (`"d"`,
            release).
        control_weight (`str`, *optional*):
            K = 1: weight of the control. `"paper"`: ‖d‖²/h against λΦ. `"release"`: ρ(1−σ)‖d‖² against Φ. `"bayes"`:
            σ_y²‖d‖²/(2r²) against Φ, r² = h²/(h²+(1−h)²). `"paper"` when `None`.
        rho (`float`, defaults to 64.0): ρ of `control_weight="release"`.
        noise_std (`float`, *optional*): σ_y, standard deviation of the measurement's noise.
        churn (`float`, defaults to 0.0):
            η in [0, 1], K = 1 only: replaces that share of the implied noise by fresh noise, which lets an operator
            with a large null space forget the first draw. 0 is exactly the paper's method.
        warm_start (`bool`, defaults to `True`): K > 1: start from the last plan, shifted by one step.
        lambda_scaling (`str`, defaults to `"none"`): `"dt"` mode: `"inverse_dt"` uses λ/Δ.
        record_endpoints (`bool`, defaults to `False`): Keep the controlled endpoint of each step in `endpoints`.
        seed (`int`, *optional*): Seed of the churn noise where no generator is given.

    Attributes:
        endpoints (`list[torch.Tensor]`): Controlled endpoint estimates, if recorded.
        data_rmse (`torch.Tensor` of shape `(batch,)`, *optional*): ‖A(x) − y‖/√n of the result.

    Raises:
        ValueError: A setting is out of range or contradicts another; the message names it.
    """

    @register_to_config
    def __init__(
        self,
        mode: str = "rhc",
        horizon_steps: int | str | None = None,
        lam: float | str = 100.0,
        n_ctrl: int = 20,
        lr: float = 0.1,
        solver: str = "auto",
        control_param: str = "u",
        control_weight: str | None = None,
        rho: float = 64.0,
        noise_std: float | None = None,
        churn: float = 0.0,
        warm_start: bool = True,
        lambda_scaling: str = "none",
        record_endpoints: bool = False,
        seed: int | None = None,
    ):
        super().__init__()
        check_settings(self.config)
        if lam == "auto":
            control_weight = "bayes"
        self.register_to_config(control_weight=control_weight or "paper")
        self.objective: MeasurementObjective | CallableObjective | None = None
        self.endpoints: list[torch.Tensor] = []
        self.data_rmse: torch.Tensor | None = None
        self._plan: torch.Tensor | None = None

    def with_objective(self, objective: Any) -> "MPCFlowController":
        """Set what the control shall achieve.

        Args:
            objective ([`MeasurementObjective`] or `Callable`):
                A measurement, or a function of images (B, C, H, W) in [0, 1] that returns one value per image.

        Returns:
            [`MPCFlowController`]: itself.
        """
        known = isinstance(objective, (MeasurementObjective, CallableObjective))
        self.objective = objective if known else CallableObjective(objective)
        return self

    @property
    def horizon(self) -> int | str:
        """K, or `"full"`."""
        return self.config.horizon_steps or 1

    @property
    def requires_velocity(self) -> bool:
        """Every regime but K = 1 evaluates the network inside the plan."""
        return self.config.lam != 0 and not (self.config.mode == "rhc" and self.horizon == 1)

    @property
    def requires_decode(self) -> bool:
        """The objective looks at images."""
        return self.config.lam != 0

    def reset(self, num_steps: int, batch: int, device: torch.device) -> None:
        """Forget plan, log and endpoints of the last run."""
        super().reset(num_steps, batch, device)
        self.endpoints, self._plan, self.data_rmse = [], None, None

    def control(self, state: FlowState) -> FlowControl:
        """Solve the problem of this step and answer with its first control."""
        if self.config.lam == 0:
            return FlowControl(state.v, state.x)
        if self.objective is None:
            raise ValueError("no objective: call `with_objective(...)`, or use `MPCFlowPipeline`.")

        def phi(z: torch.Tensor) -> torch.Tensor:  # Φ(D(z)), (B,)
            return self.objective(state.decode(z))

        if self.config.mode == "dt":
            u, entry = self._plan_delta_t(state, phi)
        elif self.horizon == 1:
            u, entry = self._plan_endpoint(state, phi)
        else:
            u, entry = self._plan_receding_horizon(state, phi)

        answer = FlowControl(state.v - u, state.x)
        z = state.x - state.sigma * answer.velocity  # controlled endpoint, x̂ + h u
        if self.config.churn > 0:
            answer.noise = self._churn(state, z)
        self._write_log(state, u, z, entry)
        return answer

    def _plan_endpoint(self, state: FlowState, phi: Objective) -> tuple[torch.Tensor, dict]:
        h, endpoint = state.sigma, state.endpoint  # x̂ = x + h b
        w, lam = self._endpoint_weights(h)
        if self._use_prox(state):
            # (I + c AᵀA) z = x̂ + c Aᵀy with c = λ s / (2 w); s is the scale of Φ
            c = min(lam * self.objective.scale / (2 * w) if w > 0 else MAX_DATA_WEIGHT, MAX_DATA_WEIGHT)
            if state.step == 0:
                self.objective.residual(endpoint)  # checks the shapes
            z = self.objective.operator.prox(endpoint, self.objective.measurement(endpoint), c)
            return (z - endpoint) / h, {"objective": phi(z)}
        scale = h if self.config.control_param == "u" else 1.0  # d = scale · variable
        variable, values, broken = minimise_with_adam(
            lambda variable: endpoint_cost(scale * variable, endpoint, phi, w, lam),
            torch.zeros_like(state.x),
            self.config.n_ctrl,
            self.config.lr,
        )
        return variable * (scale / h), {"objective": values, "broken": broken}

    def _endpoint_weights(self, h: float) -> tuple[float, float]:
        """(w, λ) of J(d) = w ‖d‖² + λ Φ."""
        if self.config.control_weight == "paper":
            return 1 / h, self.config.lam
        if self.config.control_weight == "release":
            return self.config.rho * (1 - h), 1.0
        r2 = h**2 / (h**2 + (1 - h) ** 2)
        # the weight holds the noise already: undo `phi_scale`, so that Φ is the plain sum of squares
        return self.config.noise_std**2 / (2 * r2), 1.0 / getattr(self.objective, "scale", 1.0)

    def _use_prox(self, state: FlowState) -> bool:
        possible = self.objective.quadratic and getattr(state.decode, "is_identity", False)
        if self.config.solver == "prox" and not possible and state.step == 0:
            reason = "a nonlinear objective" if not self.objective.quadratic else "a latent-space model"
            warnings.warn(f'solver="prox" has no closed form for {reason}; using "adam".', stacklevel=2)
        return possible and self.config.solver != "adam"

    def _plan_receding_horizon(self, state: FlowState, phi: Objective) -> tuple[torch.Tensor, dict]:
        num_steps = state.num_steps - state.step if self.horizon == "full" else self.horizon
        start = self._first_iterate(state.x, num_steps)
        plan, values, broken = minimise_with_adam(
            lambda u: receding_horizon_cost(
                u, state.x, -state.v, 1 - state.sigma, state.velocity, phi, self.config.lam
            ),
            start,
            self.config.n_ctrl,
            self.config.lr,
        )
        self._plan = plan
        return plan[:, 0], {"objective": values, "broken": broken}

    def _first_iterate(self, x: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Zeros (B, K, ...), or the last plan without its first control, filled up with zeros."""
        start = x.new_zeros(x.shape[0], num_steps, *x.shape[1:])
        if self.config.warm_start and self._plan is not None:
            rest = self._plan[:, 1 : num_steps + 1]
            start[:, : rest.shape[1]] = rest
        return start

    def _plan_delta_t(self, state: FlowState, phi: Objective) -> tuple[torch.Tensor, dict]:
        t, t_next = 1 - state.sigma, 1 - state.sigma_next
        lam = self.config.lam
        if self.config.lambda_scaling == "inverse_dt":
            lam = lam / (t_next - t)
        u, values, broken = minimise_with_adam(
            lambda u: delta_t_cost(
                u, state.x, -state.v, t, t_next, lam, lambda x, t: one_step_value(x, t, state.velocity, phi)
            ),
            torch.zeros_like(state.x),
            self.config.n_ctrl,
            self.config.lr,
        )
        return u, {"objective": values, "broken": broken}

    def _churn(self, state: FlowState, z: torch.Tensor) -> torch.Tensor:
        """σ' [(√(1−η²) − 1) e + η ξ] with the implied noise e = (x − t z)/h."""
        h, eta = state.sigma, self.config.churn
        e = (state.x - (1 - h) * z) / h
        xi = draw_noise(state.x, self.generator)
        return state.sigma_next * (((1 - eta**2) ** 0.5 - 1) * e + eta * xi)

    def _write_log(self, state: FlowState, u: torch.Tensor, z: torch.Tensor, entry: dict) -> None:
        broken = entry.get("broken")
        self.log.append(
            {
                "step": state.step,
                "sigma": state.sigma,
                "objective": float(entry["objective"].mean()),
                "control_norm": float(squared_norm(u).sqrt().mean()),
                "nonfinite_images": int(broken.sum()) if broken is not None else 0,
            }
        )
        if self.config.record_endpoints:
            self.endpoints.append(state.decode(z).detach().cpu())
        if state.step == state.num_steps - 1 and isinstance(self.objective, MeasurementObjective):
            with torch.no_grad():
                self.data_rmse = self.objective.data_rmse(state.decode(z))


def check_settings(settings: Any) -> None:
    """Raise `ValueError` for settings of [`MPCFlowController`] that are out of range or contradict each other."""
    for name, allowed in (
        ("mode", MODES),
        ("solver", SOLVERS),
        ("control_param", ("u", "d")),
        ("control_weight", (None, *CONTROL_WEIGHTS)),
        ("lambda_scaling", ("none", "inverse_dt")),
    ):
        if settings[name] not in allowed:
            raise ValueError(f"`{name}` must be one of {allowed}, got {settings[name]!r}.")
    lam, horizon, churn = settings["lam"], settings["horizon_steps"], settings["churn"]
    if lam != "auto" and not (isinstance(lam, (int, float)) and 0 <= lam < float("inf")):
        raise ValueError(f"`lam` must be a non-negative number or 'auto', got {lam!r}.")
    if horizon is not None and settings["mode"] == "dt":
        raise ValueError(f"`horizon_steps` has no meaning with mode='dt', got {horizon!r}.")
    if horizon not in (None, "full") and (not isinstance(horizon, int) or horizon < 1):
        raise ValueError(f"`horizon_steps` must be a positive integer or 'full', got {horizon!r}.")
    if not isinstance(settings["n_ctrl"], int) or settings["n_ctrl"] < 1:
        raise ValueError(f"`n_ctrl` must be a positive integer, got {settings['n_ctrl']!r}.")
    for name in ("lr", "rho"):
        if not settings[name] > 0:
            raise ValueError(f"`{name}` must be positive, got {settings[name]!r}.")
    noise_std = settings["noise_std"]
    if noise_std is not None and not noise_std >= 0:
        raise ValueError(f"`noise_std` must be at least 0, got {noise_std!r}.")
    if not 0 <= churn <= 1:
        raise ValueError(f"`churn` must lie in [0, 1], got {churn!r}.")
    endpoint_only = settings["mode"] == "rhc" and horizon in (None, 1)
    if churn > 0 and not endpoint_only:
        raise ValueError("`churn` works with mode='rhc' and horizon_steps=1 only.")
    if (lam == "auto" or settings["control_weight"] == "bayes") and not noise_std:
        raise ValueError("`lam='auto'` and `control_weight='bayes'` need a positive `noise_std`.")
    if lam == "auto" and not endpoint_only:
        raise ValueError("`lam='auto'` is known for horizon_steps=1 only; see `tune_lambda` for the other regimes.")
