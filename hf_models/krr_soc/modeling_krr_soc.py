"""A value function fitted by KRR-DP: price, bounds, and the decision for a new state (arXiv 2509.20239)."""

import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .bounds_krr_soc import Bound, continuation, interval, is_consistent, lower_bound, upper_bound
from .configuration_krr_soc import KrrSocConfig
from .dynamic_programming_krr_soc import Stage, ValueFunction, fit_value_function, generator_of
from .features_krr_soc import FeatureMap
from .problems_krr_soc import ControlProblem, OptimalStopping
from .processes_krr_soc import PROCESSES, BlackScholes
from .samplers_krr_soc import InnerSampler

CERTIFICATE = "certificate.json"
EXERCISE, HOLD = 0, 1


@dataclass
class KrrSocOutput(ModelOutput):
    """Values at a date.

    Args:
        value (`torch.Tensor`): V_t, (B,).
        continuation (`torch.Tensor`): Value of holding (B,), or of each control (B, |U|).
        action (`torch.Tensor`): 0 exercise and 1 hold; for a control problem the index of the control, (B,).
    """

    value: torch.Tensor | None = None
    continuation: torch.Tensor | None = None
    action: torch.Tensor | None = None


@dataclass
class Price:
    """A price with its certificates.

    Args:
        price (`float`): Of the backward induction.
        lower, upper (`Bound`, *optional*): Bounds with standard errors.
        interval (`tuple[float, float]`, *optional*): Contains the true price with probability 1 − α.
        alpha (`float`): α.
        consistent (`bool`): Whether the bounds are in order up to three standard errors.
        seconds (`float`): Wall time of all this.
    """

    price: float
    lower: Bound | None = None
    upper: Bound | None = None
    interval: tuple[float, float] | None = None
    alpha: float = 0.05
    consistent: bool = True
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {"price": self.price, "alpha": self.alpha, "consistent": self.consistent, "seconds": self.seconds}
        if self.lower is not None and self.upper is not None and self.interval is not None:
            parts |= {"lower": self.lower.to_dict(), "upper": self.upper.to_dict(), "interval": list(self.interval)}
        return parts


class KrrSocModel(PreTrainedModel):
    """KRR-DP for optimal stopping and finite-horizon control. All tensors are float64.

    Example:
        ```python
        from hf_models import KrrSocConfig, KrrSocModel

        config = KrrSocConfig(payoff="max_call", dim=2, dividend=0.1, maturity=3.0, seed=0)
        model = KrrSocModel(config).fit()
        out = model.price(bounds=True, n_lower=20_000, n_upper=500)
        print(out.price, out.interval)
        ```

    Args:
        config ([`KrrSocConfig`]): Problem and settings.
    """

    config_class = KrrSocConfig
    main_input_name = "states"
    base_model_prefix = "krr_soc"

    def __init__(self, config: KrrSocConfig):
        super().__init__(config)
        self.certificate: dict[str, Any] | None = None
        self._problem: Any = None
        m, p, k = config.state_shape or (1, 1, 1)
        n = config.n_steps
        shapes = {
            "centers": (n, m, p),
            "alpha": (n, m, k),
            "clip": (n, 2, k),
            "lengthscale": (n,),
            "lam": (n,),
            "feature_stats": (3,),  # mean and deviation of the index, shrink
            "initial": (2,),  # price and continuation at the initial state
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: what is fitted comes from `fit` or from a file."""

    @property
    def dtype(self) -> torch.dtype:
        """float64."""
        return torch.float64

    # ---- the problem ----

    @property
    def problem(self) -> Any:
        """The decision problem, built from the configuration unless one was given."""
        if self._problem is None:
            if self.config.process == "custom":
                raise ValueError("process='custom': give the problem, `model.problem = problem` or fit(problem).")
            self._problem = stopping_problem(self.config, self.centers.device)
        return self._problem

    @problem.setter
    def problem(self, problem: Any) -> None:
        if not isinstance(problem, ControlProblem):
            raise TypeError(f"problem must follow ControlProblem, got {type(problem).__name__}.")
        if problem.n_steps != self.config.n_steps:
            raise ValueError(f"the problem has {problem.n_steps} steps, but config.n_steps={self.config.n_steps}.")
        self._problem = problem

    # ---- fitting ----

    def fit(
        self,
        problem: Any = None,
        accelerator: Any = None,
        on_stage: Callable[[int, Stage], None] | None = None,
        stages: dict[int, Stage] | None = None,
        stats: tuple[float, float, float] | None = None,
    ) -> "KrrSocModel":
        """Walk backward through time and keep the regressions.

        Args:
            problem (`ControlProblem`, *optional*): For `process="custom"`.
            accelerator (`Accelerator`, *optional*): Shares the averages among processes; the result is the same.
            on_stage (`Callable`, *optional*): Called with (t, stage) after each date.
            stages (`dict`, *optional*): Dates done before, to go on from.
            stats (`tuple`, *optional*): Feature statistics belonging to `stages`.

        Returns:
            `KrrSocModel`: itself.
        """
        if problem is not None:
            self.problem = problem
        config, like = self.config, torch.zeros((), dtype=torch.float64, device=self.centers.device)
        self._check_custom()
        rank, ranks, gather = 0, 1, None
        if accelerator is not None:
            rank, ranks = accelerator.process_index, accelerator.num_processes
            gather = lambda y: accelerator.reduce(y, reduction="sum")  # noqa: E731
        function = fit_value_function(
            self.problem, config, like, gather, rank, ranks, on_stage, stages, None if stats is None else stats[2]
        )
        self._keep(function)
        return self

    def _check_custom(self) -> None:
        if not isinstance(self.problem, OptimalStopping) and self.config.features != "raw":
            raise ValueError(f"features={self.config.features!r} needs an option; a general problem takes 'raw'.")

    def _keep(self, function: ValueFunction) -> None:
        config, n = self.config, self.config.n_steps
        device = self.centers.device
        stages = function.stages
        m, p = next(iter(stages.values())).centers.shape if stages else (1, 1)
        k = next(iter(stages.values())).alpha.shape[1] if stages else 1
        config.state_shape = [m, p, k]
        double = {"dtype": torch.float64, "device": device}
        self.centers, self.alpha = torch.zeros(n, m, p, **double), torch.zeros(n, m, k, **double)
        self.clip = torch.zeros(n, 2, k, **double)
        self.lengthscale, self.lam = torch.ones(n, **double), torch.zeros(n, **double)
        for t, stage in stages.items():
            self.centers[t], self.alpha[t] = stage.centers, stage.alpha
            self.clip[t] = torch.stack([stage.low, stage.high])
            self.lengthscale[t], self.lam[t] = stage.lengthscale, stage.lam
        features = function.features
        self.feature_stats = torch.tensor([features.mean, features.sd, features.shrink], **double)
        config.fitted = True
        self.certificate = None
        if isinstance(self.problem, OptimalStopping):
            held = self._initial_continuation(self.problem.process.initial()[None])
            price = torch.maximum(held, self.problem.exercise(0, self.problem.process.initial()[None]))
            self.initial = torch.cat([price, held])

    def value_function(self) -> ValueFunction:
        """Ŵ_t as an object.

        Raises:
            ValueError: The model was not fitted.
        """
        if not self.config.fitted:
            raise ValueError("the model is not fitted: call fit(), or load a fitted one with from_pretrained.")
        mean, sd, shrink = self.feature_stats.tolist()
        features = FeatureMap(self.config.features, self.problem, mean, sd, shrink)
        stages = {
            t: Stage(
                self.centers[t],
                self.alpha[t],
                self.clip[t, 0],
                self.clip[t, 1],
                float(self.lengthscale[t]),
                float(self.lam[t]),
            )
            for t in range(1, self.config.n_steps)
        }
        return ValueFunction(self.problem, self.config, features, stages)

    # ---- using ----

    def forward(self, states: torch.Tensor, t: int = 0, return_dict: bool | None = None) -> KrrSocOutput:
        """Value, value of holding, and decision.

        Args:
            states (`torch.Tensor`): (B, state_dim); for Black–Scholes the prices. Any float dtype.
            t (`int`, defaults to 0): Date, 0 … N.
            return_dict (`bool`, *optional*): `False` for a tuple.

        Returns:
            [`KrrSocOutput`].

        Raises:
            ValueError: Wrong width, non-finite or non-positive prices, or no such date.
        """
        function = self.value_function()
        x = self._check_states(states, t)
        is_stopping, n = function.is_stopping, self.config.n_steps
        if t == n:
            value = self.problem.terminal(x)
            held, action = torch.zeros_like(value), (value <= 0).long()
        else:
            if t == 0:
                held = self._initial_continuation(x) if is_stopping else self._action_averages(function, 0, x)
            elif is_stopping:
                held = continuation(function, t, x, self.config.seed)
            elif self.config.target == "continuation":
                held = function.fitted(t, x)
            else:
                held = self._action_averages(function, t, x)
            if is_stopping:
                payoff = self.problem.exercise(t, x)
                stop = (payoff > 0) & (payoff >= held)
                value, action = torch.maximum(payoff, held), torch.where(stop, EXERCISE, HOLD)
            else:
                value, action = held.max(1)
        output = KrrSocOutput(value=value, continuation=held, action=action)
        return output if return_dict is not False else output.to_tuple()

    def _check_states(self, states: torch.Tensor, t: int) -> torch.Tensor:
        if not isinstance(t, int) or not 0 <= t <= self.config.n_steps:
            raise ValueError(f"t={t!r} must be a date 0 … {self.config.n_steps}.")
        x = torch.as_tensor(states).to(self.centers.device, torch.float64)
        if x.ndim != 2 or x.shape[1] != self.problem.state_dim:
            raise ValueError(f"states must be (B, {self.problem.state_dim}), got {tuple(x.shape)}.")
        if not torch.isfinite(x).all():
            raise ValueError("states must be finite; some are NaN or infinite.")
        if isinstance(self.problem, OptimalStopping) and not (self.problem.process.prices(x) > 0).all():
            raise ValueError("states must hold positive prices.")
        return x

    def _initial_continuation(self, x: torch.Tensor) -> torch.Tensor:
        """q_0 of each state by averaging over `n_initial` samples; the stored one for the stored state."""
        start = self.problem.process.initial()
        stored = float(self.initial[1])
        if stored and not x.requires_grad and bool((x == start).all()):
            return self.initial[1].expand(len(x)).clone()
        return self._action_averages(self.value_function(), 0, x)[:, 0]

    def _action_averages(self, function: ValueFunction, t: int, x: torch.Tensor) -> torch.Tensor:
        """Fresh averages q_t(x, u) with many samples, the same for every state: (B, |U|) or (B, 1)."""
        config = self.config
        name = "qmc" if config.sampler in ("exact", "antithetic") else config.sampler
        count = config.n_initial if name in ("qmc", "mc") else config.n_inner
        sampler = InnerSampler(name, count, self.problem.noise_dim, config.seed + 2, x, shared=True)
        parts = [
            function.action_values(t, row, sampler, generator_of(config.seed, "initial", t, device=x.device))
            for row in x.split(max(1, 65_536 // sampler.count))
        ]
        return torch.cat(parts)

    @torch.no_grad()
    def price(
        self,
        bounds: bool = False,
        alpha: float = 0.05,
        n_lower: int = 100_000,
        n_upper: int = 1500,
        n_upper_inner: int = 256,
        seed: int | None = None,
    ) -> Price:
        """The value of the initial state.

        Args:
            bounds (`bool`, defaults to `False`): Also compute lower and upper bound and their interval.
            alpha (`float`, defaults to 0.05): 1 − confidence of the interval.
            n_lower (`int`, defaults to 100,000): Paths of the lower bound.
            n_upper (`int`, defaults to 1,500): Paths of the upper bound.
            n_upper_inner (`int`, defaults to 256): Samples of its inner averages.
            seed (`int`, *optional*): Of the paths; default: the configuration's.

        Returns:
            [`Price`].

        Raises:
            ValueError: Not fitted, or an argument is out of range.
        """
        start = time.perf_counter()
        self.value_function()
        if not isinstance(self.problem, OptimalStopping):
            raise ValueError("price() is for options; for a control problem call the model with states and t=0.")
        if not 0 < alpha < 1:
            raise ValueError(f"alpha={alpha!r} must be between 0 and 1.")
        out = Price(float(self.initial[0]), alpha=alpha)
        if bounds:
            out.lower = self.lower_bound(n_lower, seed)
            out.upper = self.upper_bound(n_upper, n_upper_inner, seed)
            out.interval = interval(out.lower, out.upper, alpha)
            out.consistent = is_consistent(out.lower, out.upper)
            out.seconds = time.perf_counter() - start
            self.certificate = self._certify(out, n_lower, n_upper, n_upper_inner, seed)
        out.seconds = time.perf_counter() - start
        return out

    def lower_bound(self, n_lower: int = 100_000, seed: int | None = None) -> Bound:
        """L: the policy on new paths; see [`Price`]."""
        if n_lower < 2:
            raise ValueError(f"n_lower={n_lower} must be at least 2.")
        seed = self.config.seed if seed is None else seed
        return lower_bound(self.value_function(), n_lower, float(self.initial[1]), seed)

    def upper_bound(self, n_upper: int = 1500, n_upper_inner: int = 256, seed: int | None = None) -> Bound:
        """U: the dual martingale; see [`Price`]."""
        if n_upper < 2 or n_upper_inner < 1:
            raise ValueError(f"n_upper={n_upper} must be at least 2 and n_upper_inner={n_upper_inner} at least 1.")
        seed = self.config.seed if seed is None else seed
        return upper_bound(self.value_function(), n_upper, n_upper_inner, seed, self.config.progress)

    def _certify(self, out: Price, *sizes: int | None) -> dict[str, Any]:
        n_lower, n_upper, n_upper_inner, seed = sizes
        return out.to_dict() | {
            "n_lower": n_lower,
            "n_upper": n_upper,
            "n_upper_inner": n_upper_inner,
            "seed": self.config.seed,
            "path_seed": self.config.seed if seed is None else seed,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "numpy": np.__version__,
            },
        }

    def greeks(self, spot: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Approximate value and deltas at t = 0: the derivative of the fitted average, without its own error.

        Args:
            spot (`torch.Tensor`, *optional*): (B, state_dim); default: the initial state.

        Returns:
            `dict`: `value` (B,) and `delta` (B, state_dim).
        """
        x = self.problem.process.initial()[None] if spot is None else spot
        x = self._check_states(x, 0).clone().requires_grad_()
        with torch.enable_grad():
            held = self._action_averages(self.value_function(), 0, x)[:, 0]
            payoff = self.problem.exercise(0, x)
            value = torch.where(payoff >= held, payoff, held)
            (delta,) = torch.autograd.grad(value.sum(), x)
        return {"value": value.detach(), "delta": delta}

    @torch.no_grad()
    def exercise_boundary(self, t: int, axis: int = 0, points: int = 801, width: float = 4.0) -> torch.Tensor:
        """Prices of one asset at which exercising becomes, or stops being, the better choice; the others at the spot.

        Args:
            t (`int`): Date, 1 … N − 1.
            axis (`int`, defaults to 0): Asset.
            points (`int`, defaults to 801): Grid of the search.
            width (`float`, defaults to 4): Its half width in standard deviations of the log price at maturity.

        Returns:
            `torch.Tensor`: boundaries in ascending order, refined by bisection; empty if there is none.
        """
        if not 1 <= t < self.config.n_steps:
            raise ValueError(f"t={t} must be a date 1 … {self.config.n_steps - 1}.")
        start = self.problem.process.initial()
        if not 0 <= axis < self.problem.process.num_assets:
            raise ValueError(f"axis={axis} must be an asset 0 … {self.problem.process.num_assets - 1}.")
        volatility = getattr(self.problem.process, "volatility", start.new_full((len(start),), 0.2))
        spread = width * float(volatility[axis]) * math.sqrt(self.config.maturity)

        def gap(prices: torch.Tensor) -> torch.Tensor:
            x = start.repeat(len(prices), 1)
            x[:, axis] = prices
            out = self(x, t)
            payoff = self.problem.exercise(t, x)
            return torch.where(payoff > 0, payoff - out.continuation, -out.continuation.abs() - 1e-12)

        grid = float(start[axis]) * torch.linspace(-spread, spread, points, dtype=torch.float64).exp()
        grid = grid.to(start.device)
        sign = gap(grid) >= 0
        change = (sign[1:] != sign[:-1]).nonzero()[:, 0]
        low, high, low_sign = grid[change], grid[change + 1], sign[change]
        for _ in range(40):
            middle = (low + high) / 2
            same = (gap(middle) >= 0) == low_sign if len(middle) else low_sign
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        return (low + high) / 2

    # ---- files ----

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Also writes the certificate of the last `price(bounds=True)`."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.certificate is not None:
            text = json.dumps(self.certificate, indent=2) + "\n"
            (Path(save_directory) / CERTIFICATE).write_text(text, encoding="utf-8")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any):
        """Also reads the certificate, where there is one."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        file = Path(pretrained_model_name_or_path) / CERTIFICATE
        if file.is_file():
            model.certificate = json.loads(file.read_text(encoding="utf-8"))
        return loaded


def stopping_problem(config: KrrSocConfig, device: torch.device | str = "cpu") -> OptimalStopping:
    """The optimal-stopping problem of a configuration."""

    def vector(value: float | list[float]) -> torch.Tensor:
        x = torch.as_tensor(value, dtype=torch.float64, device=device)
        return x.expand(config.dim).clone() if x.ndim == 0 else x

    dt = config.maturity / config.n_steps
    spot, dividend = vector(config.spot), vector(config.dividend)
    if config.process == "black_scholes":
        rho = torch.as_tensor(config.correlation, dtype=torch.float64, device=device)
        if rho.ndim == 0:
            eye = torch.eye(config.dim, dtype=torch.float64, device=device)
            rho = rho.expand(config.dim, config.dim) * (1 - eye) + eye
        process: Any = BlackScholes(spot, config.rate, dividend, vector(config.volatility), rho, dt)
    else:
        parameters = config.process_params or {}
        try:
            process = PROCESSES[config.process](spot, config.rate, dividend, dt, **parameters)
        except TypeError as error:
            raise ValueError(f"process_params={parameters} do not fit {config.process!r}: {error}.") from None
    return OptimalStopping(
        process,
        config.payoff,
        config.strike,
        config.n_steps,
        config.maturity,
        config.rate,
        config.exercise_dates,
        config.payoff_params,
    )


__all__ = ["KrrSocModel", "KrrSocOutput", "Price", "stopping_problem"]
