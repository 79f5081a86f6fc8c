"""A value function fitted by KRR-DP: price, bounds, and the decision for a new state (arXiv 2509.20239)."""

import json
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
from transformers.utils import ModelOutput, cached_file

from .boundary_krr_soc import exercise_boundary
from .bounds_krr_soc import Bound, Price, continuation, interval, is_consistent, lower_bound, upper_bound
from .configuration_krr_soc import KrrSocConfig
from .dynamic_programming_krr_soc import Stage, ValueFunction, fit_value_function, generator_of
from .features_krr_soc import FeatureMap
from .payoffs_krr_soc import register_payoff
from .problems_krr_soc import ControlProblem, OptimalStopping, natural_unit, stopping_problem
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
        self._scaled: Any = None  # the same problem in units of the first spot, in which everything is computed
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

    @property
    def device(self) -> torch.device:
        """Where the buffers are; there are no parameters."""
        return self.centers.device

    # ---- the problem ----

    @property
    def problem(self) -> Any:
        """The decision problem, built from the configuration unless one was given."""
        if self._problem is None:
            if self.config.process == "custom":
                raise ValueError("process='custom': give the problem, `model.problem = problem` or fit(problem).")
            self._problem = stopping_problem(self.config, self.centers.device)
            self._scaled = stopping_problem(self.config, self.centers.device, self.unit)
        return self._problem

    @property
    def unit(self) -> float:
        """Currency in one unit of the fitted values: they are computed in multiples of the first spot."""
        is_given = self._problem is not None and self._scaled is self._problem
        return 1.0 if is_given else natural_unit(self.config)

    def scale(self, states: torch.Tensor) -> torch.Tensor:
        """States in currency → states in units, in which [`value_function`] works."""
        return states / self._units(states)

    def unscale(self, states: torch.Tensor) -> torch.Tensor:
        """The reverse of [`scale`]."""
        return states * self._units(states)

    def _units(self, states: torch.Tensor) -> torch.Tensor:
        units = torch.ones_like(states[0] if states.ndim > 1 else states)
        if isinstance(self.problem, OptimalStopping):
            units[: self.problem.process.num_assets] = self.unit  # a variance, for one, has no currency
        return units

    @problem.setter
    def problem(self, problem: Any) -> None:
        if not isinstance(problem, ControlProblem):
            raise TypeError(f"problem must follow ControlProblem, got {type(problem).__name__}.")
        if problem.n_steps != self.config.n_steps:
            raise ValueError(f"the problem has {problem.n_steps} steps, but config.n_steps={self.config.n_steps}.")
        self._problem = self._scaled = problem

    @staticmethod
    def register_payoff(name: str, value: Callable[..., torch.Tensor], **options: Any) -> None:
        """[`register_payoff`] for a model that came with its own code, where nothing of ours can be imported."""
        register_payoff(name, value, **options)

    # ---- fitting ----

    def fit(
        self,
        problem: Any = None,
        accelerator: Any = None,
        on_stage: Callable[[int, Stage], None] | None = None,
        stages: dict[int, Stage] | None = None,
    ) -> "KrrSocModel":
        """Walk backward through time and keep the regressions.

        Args:
            problem (`ControlProblem`, *optional*): For `process="custom"`.
            accelerator (`Accelerator`, *optional*): Shares the averages among processes; the result is the same.
            on_stage (`Callable`, *optional*): Called with (t, stage) after each date.
            stages (`dict`, *optional*): Dates done before, to go on from.

        Returns:
            `KrrSocModel`: itself.
        """
        if problem is not None:
            self.problem = problem
        elif self._scaled is not self._problem:
            self._problem = None  # built anew: the configuration may have changed
        config, like = self.config, torch.zeros((), dtype=torch.float64, device=self.centers.device)
        self._check_custom()
        rank, ranks, gather = 0, 1, None
        if accelerator is not None:
            rank, ranks = accelerator.process_index, accelerator.num_processes
            gather = lambda y: accelerator.reduce(y, reduction="sum")  # noqa: E731
        function = fit_value_function(self._scaled, config, like, gather, rank, ranks, on_stage, stages)
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
        self.initial = torch.zeros(2, **double)  # a refit must not read the old price
        if isinstance(self.problem, OptimalStopping):
            start = self._scaled.process.initial()[None]
            held = self._initial_continuation(start)
            price = torch.maximum(held, self._scaled.exercise(0, start))
            self.initial = torch.cat([price, held])

    def value_function(self) -> ValueFunction:
        """Ŵ_t as an object.

        Raises:
            ValueError: The model was not fitted.
        """
        if not self.config.fitted:
            raise ValueError("the model is not fitted: call fit(), or load a fitted one with from_pretrained.")
        mean, sd, shrink = self.feature_stats.tolist()
        _ = self.problem  # builds the scaled one too
        problem = self._scaled
        features = FeatureMap(self.config.features, problem, mean, sd, shrink)
        stages = {
            t: Stage(
                self.centers[t],
                self.alpha[t],
                self.clip[t, 0],
                self.clip[t, 1],
                float(self.lengthscale[t]),
                float(self.lam[t]),
                shrink,
            )
            for t in range(1, self.config.n_steps)
        }
        return ValueFunction(problem, self.config, features, stages)

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
        problem, is_stopping, scaled = self.problem, function.is_stopping, self.scale(x)
        if t == self.config.n_steps:
            value = problem.terminal(x)
            held, action = torch.zeros_like(value), (value <= 0).long()
        else:
            if t == 0:
                held = self._initial_continuation(scaled) if is_stopping else self._action_averages(function, 0, x)
            elif is_stopping:
                held = continuation(function, t, scaled, self.config.seed)
            elif self.config.target == "continuation":
                held = function.fitted(t, x)
            else:
                held = self._action_averages(function, t, x)
            if is_stopping:
                held = self.unit * held
                payoff = problem.exercise(t, x)
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
        start = self._scaled.process.initial()
        stored = float(self.initial[1])
        if stored and not x.requires_grad and bool((x == start).all()):
            return self.initial[1].expand(len(x)).clone()
        return self._action_averages(self.value_function(), 0, x)[:, 0]

    def _action_averages(self, function: ValueFunction, t: int, x: torch.Tensor) -> torch.Tensor:
        """Fresh averages q_t(x, u) with many samples, the same for every state: (B, |U|) or (B, 1)."""
        config = self.config
        name = "qmc" if config.sampler in ("exact", "antithetic") else config.sampler
        count = config.n_initial if name in ("qmc", "mc") else config.n_inner
        sampler = InnerSampler(name, count, function.problem.noise_dim, config.seed + 2, x, shared=True)
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
        held = self.unit * float(self.initial[1])
        out = Price(max(held, float(self.problem.exercise(0, self._start(None)))), alpha=alpha)
        if bounds:
            out.lower = self.lower_bound(n_lower, seed)
            out.upper = self.upper_bound(n_upper, n_upper_inner, seed)
            out.interval = interval(out.lower, out.upper, alpha)
            out.consistent = is_consistent(out.lower, out.upper)
            out.seconds = time.perf_counter() - start
            self.certificate = self._certify(out, n_lower, n_upper, n_upper_inner, seed)
        out.seconds = time.perf_counter() - start
        return out

    @torch.no_grad()
    def lower_bound(
        self, n_lower: int = 100_000, seed: int | None = None, state: torch.Tensor | None = None, t: int = 0
    ) -> Bound:
        """L: the policy on new paths; see [`Price`].

        Args:
            n_lower (`int`, defaults to 100,000): Paths.
            seed (`int`, *optional*): Of the paths; default: the configuration's.
            state (`torch.Tensor`, *optional*): State (state_dim,) from which they start; default: the initial one.
            t (`int`, defaults to 0): Its date, 0 … N.
        """
        if n_lower < 2:
            raise ValueError(f"n_lower={n_lower} must be at least 2.")
        seed = self.config.seed if seed is None else seed
        start = self._start(state)
        held = float(self(start[None], t).continuation[0]) / self.unit
        return lower_bound(self.value_function(), n_lower, held, seed, self.scale(start), t).times(self.unit)

    def upper_bound(
        self,
        n_upper: int = 1500,
        n_upper_inner: int = 256,
        seed: int | None = None,
        state: torch.Tensor | None = None,
        t: int = 0,
    ) -> Bound:
        """U: the dual martingale; see [`Price`].

        Args:
            n_upper (`int`, defaults to 1,500): Paths.
            n_upper_inner (`int`, defaults to 256): Samples of each inner average.
            seed (`int`, *optional*): Of the paths; default: the configuration's.
            state (`torch.Tensor`, *optional*): State (state_dim,) from which they start; default: the initial one.
            t (`int`, defaults to 0): Its date, 0 … N.
        """
        if n_upper < 2 or n_upper_inner < 1:
            raise ValueError(f"n_upper={n_upper} must be at least 2 and n_upper_inner={n_upper_inner} at least 1.")
        seed = self.config.seed if seed is None else seed
        start = self._start(state)
        self._check_states(start[None], t)
        function, show = self.value_function(), self.config.progress
        bound = upper_bound(function, n_upper, n_upper_inner, seed, show, self.scale(start), t)
        return bound.times(self.unit)

    def _start(self, state: torch.Tensor | None) -> torch.Tensor:
        if state is None:
            return self.problem.process.initial()
        return torch.as_tensor(state).to(self.centers.device, torch.float64)

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
            held = self.unit * self._action_averages(self.value_function(), 0, self.scale(x))[:, 0]
            payoff = self.problem.exercise(0, x)
            value = torch.where(payoff >= held, payoff, held)
            (delta,) = torch.autograd.grad(value.sum(), x)
        return {"value": value.detach(), "delta": delta}

    def exercise_boundary(self, t: int, axis: int = 0, points: int = 801, width: float = 4.0) -> torch.Tensor:
        """Prices of one asset at which exercising becomes, or stops being, the better choice; the others at the spot.

        Args:
            t (`int`): Date, 1 … N − 1.
            axis (`int`, defaults to 0): Asset.
            points (`int`, defaults to 801): Grid of the search.
            width (`float`, defaults to 4): Its half width in standard deviations of the log price at maturity.

        Returns:
            `torch.Tensor`: boundaries in ascending order, refined by bisection; empty if there is none.

        Raises:
            ValueError: There is no such date or asset.
        """
        if not 1 <= t < self.config.n_steps:
            raise ValueError(f"t={t} must be a date 1 … {self.config.n_steps - 1}.")
        if not 0 <= axis < self.problem.process.num_assets:
            raise ValueError(f"axis={axis} must be an asset 0 … {self.problem.process.num_assets - 1}.")
        return exercise_boundary(self, t, axis, points, width)

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
        where = {name: kwargs[name] for name in ("subfolder", "revision", "cache_dir", "token") if kwargs.get(name)}
        file = cached_file(
            pretrained_model_name_or_path,
            CERTIFICATE,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **where,
        )
        if file is not None:
            model.certificate = json.loads(Path(file).read_text(encoding="utf-8"))
        return loaded


__all__ = ["KrrSocModel", "KrrSocOutput", "Price"]
