"""Configuration of a KRR-DP model: the problem, and how it is solved."""

import functools
import math
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

PROCESS_NAMES = ("black_scholes", "heston", "custom")
KERNEL_NAMES = ("rbf", "matern32", "matern52", "laplacian")
CHOICES = {
    "target": ("continuation", "value"),
    "clip": ("auto", "symmetric", "nonnegative", "none"),
    "sampler": ("qmc", "mc", "antithetic", "gauss_hermite", "monomial3", "exact"),
    "features": ("indexed", "log", "raw"),
    "solver": ("auto", "dense", "eig", "cg"),
    "kernel": KERNEL_NAMES,
    "process": PROCESS_NAMES,
    "kernel_dtype": ("float64", "float32"),
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "features": "raw",
        "kernel": "rbf",
        "lam": 1e-6,
        "lengthscale": "holdout",
        "lengthscale_grid": [40.0, 80.0],
        "n_states": 500,
        "n_inner": 150,
        "n_centers": 250,
        "sampler": "mc",
        "target": "value",
        "clip": "symmetric",
    }
}


class KrrSocConfig(PreTrainedConfig):
    """Problem and settings of [`KrrSocModel`].

    Args:
        process (`str`, defaults to `"black_scholes"`): `"black_scholes"`, `"heston"`, or `"custom"` for a problem that
            you pass to `fit`.
        process_params (`dict`, *optional*): Of Heston: v0, kappa, theta, xi, rho, substeps.
        payoff (`str`, defaults to `"put"`): Registered name; see `register_payoff`.
        payoff_params (`dict`, *optional*): Further arguments of the payoff.
        dim (`int`, defaults to 1): Assets d.
        spot (`float` or list, defaults to 100): S₀, in currency.
        strike (`float`, defaults to 100): K, in currency.
        rate (`float`, defaults to 0.05): Yearly interest rate r; may be negative.
        dividend (`float` or list, defaults to 0): Yearly dividend yield δ.
        volatility (`float` or list, defaults to 0.2): Yearly σ.
        correlation (`float` or matrix, defaults to 0): One number for all pairs, or (d, d).
        maturity (`float`, defaults to 1): T, in years.
        n_steps (`int`, defaults to 9): N; the dates are 0, T/N, …, T.
        exercise_dates (`list[int]`, *optional*): Dates at which the payoff may be taken; default 0 … N.
        n_states (`int`, defaults to 800): n, training states a date.
        n_inner (`int`, defaults to 64): M, samples of the average over the next state.
        n_centers (`int`, defaults to 200): m, Nyström centres.
        n_initial (`int`, defaults to 16384): Samples of the average at the initial state.
        lam (`float` or `"gcv"`, defaults to `"gcv"`): λ of the regression; also accepted as `lambda`.
        lengthscale (`float`, `"gcv"` or `"holdout"`, defaults to `"gcv"`): ℓ.
        lengthscale_grid (`list[float]`, *optional*): Values that `"holdout"` tries.
        shrink (`float`, *optional*): ≥ 1 damps coordinates beside the index; default: by cross-validation.
        kernel (`str`, defaults to `"rbf"`): `"rbf"`, `"matern32"`, `"matern52"`, `"laplacian"`.
        target (`str`, defaults to `"continuation"`): What is regressed; `"value"` is the paper's.
        clip (`str`, defaults to `"auto"`): Bounds of fitted values: targets' range, `"symmetric"`, `"nonnegative"` or
            `"none"`.
        clip_bound (`float`, *optional*): B of `"symmetric"`; default: the largest payoff seen.
        sampler (`str`, defaults to `"qmc"`): Of the inner average.
        shared_noise (`bool`, defaults to `False`): The same noise for all states.
        features (`str`, defaults to `"indexed"`): `"indexed"`, `"log"` or `"raw"`.
        solver (`str`, defaults to `"auto"`): `"dense"`, `"eig"`, `"cg"`.
        kernel_dtype (`str`, defaults to `"float64"`): Precision of kernel evaluations; the solve stays in float64.
        seed (`int`, defaults to 0): Of everything.
        progress (`bool`, defaults to `False`): Show bars.
        preset (`str`, *optional*): `"paper"`: the paper's choices, which become the configuration's fields; what you
            give beside it wins.

    Raises:
        ValueError: A value is out of range; the message names the field.
    """

    model_type = "krr_soc"

    process: str = "black_scholes"
    process_params: dict[str, Any] | None = None
    payoff: str = "put"
    payoff_params: dict[str, Any] | None = None
    dim: int = 1
    spot: float | list[float] = 100.0
    strike: float | int = 100.0
    rate: float | int = 0.05
    dividend: float | list[float] = 0.0
    volatility: float | list[float] = 0.2
    correlation: float | list[list[float]] = 0.0
    maturity: float | int = 1.0
    n_steps: int = 9
    exercise_dates: list[int] | None = None
    n_states: int = 800
    n_inner: int = 64
    n_centers: int = 200
    n_initial: int = 16_384
    lam: float | str = "gcv"
    lengthscale: float | str = "gcv"
    lengthscale_grid: list[float] | None = None
    shrink: float | None = None
    kernel: str = "rbf"
    target: str = "continuation"
    clip: str = "auto"
    clip_bound: float | None = None
    sampler: str = "qmc"
    shared_noise: bool = False
    features: str = "indexed"
    solver: str = "auto"
    kernel_dtype: str = "float64"
    seed: int = 0
    progress: bool = False
    fitted: bool = False
    state_shape: list[int] | None = None  # [m, p, k] of a fitted model

    def __post_init__(self, **kwargs: Any):
        if "lambda" in kwargs:
            self.lam = kwargs.pop("lambda")
        self._check()
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}.")
        for name in ("n_steps", "n_states", "n_inner", "n_centers", "n_initial", "dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        for name in ("spot", "volatility", "dividend"):
            values = getattr(self, name)
            values = [values] * self.dim if isinstance(values, (int, float)) else list(values)
            if len(values) != self.dim:
                raise ValueError(f"{name} has {len(values)} values, but dim={self.dim}.")
            positive = name != "dividend"
            if not all(math.isfinite(v) and (v > 0 or not positive) for v in values):
                kind = "positive and finite" if positive else "finite"
                raise ValueError(f"{name}={getattr(self, name)!r} must be {kind}.")
        for name in ("maturity", "strike"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r} must be positive and finite.")
        if not math.isfinite(self.rate):
            raise ValueError(f"rate={self.rate!r} must be finite.")
        self._check_correlation()
        for name in ("lam", "lengthscale"):
            value = getattr(self, name)
            words = ("gcv",) if name == "lam" else ("gcv", "holdout")
            if not (value in words or (isinstance(value, (int, float)) and math.isfinite(value) and value > 0)):
                raise ValueError(f"{name}={value!r} must be positive or one of {', '.join(words)}.")
        if self.lengthscale == "holdout" and not self.lengthscale_grid:
            raise ValueError("lengthscale='holdout' needs lengthscale_grid, the values to try.")
        if self.shrink is not None and not self.shrink >= 1:
            raise ValueError(f"shrink={self.shrink!r} must be at least 1.")
        if self.exercise_dates is not None:
            dates = list(self.exercise_dates)
            if not dates or not all(isinstance(t, int) and 0 <= t <= self.n_steps for t in dates):
                raise ValueError(f"exercise_dates={dates} must be some of the dates 0 … {self.n_steps}.")
        if self.sampler == "antithetic" and self.n_inner % 2:
            raise ValueError(f"n_inner={self.n_inner} must be even for the antithetic sampler.")
        exact = {"process": "black_scholes", "features": "log", "target": "value", "clip": "none", "kernel": "rbf"}
        wrong = [f"{name}={value!r}" for name, value in exact.items() if getattr(self, name) != value]
        if self.sampler == "exact" and wrong:
            raise ValueError(f"sampler='exact' is a closed form that needs {', '.join(wrong)}.")

    def _check_correlation(self) -> None:
        rho = self.correlation
        if isinstance(rho, (int, float)):
            low = -1.0 if self.dim == 1 else -1 / (self.dim - 1)
            if not low - 1e-12 <= rho <= 1:
                raise ValueError(f"correlation={rho!r} must be in [{low:.4g}, 1] for dim={self.dim}.")
            return
        rows = [list(row) for row in rho]
        if len(rows) != self.dim or any(len(row) != self.dim for row in rows):
            raise ValueError(f"correlation must be {self.dim}×{self.dim}, one row an asset.")
        import numpy as np

        matrix = np.array(rows, dtype=float)
        if not np.isfinite(matrix).all() or not (matrix == matrix.T).all() or not (matrix.diagonal() == 1).all():
            raise ValueError("correlation must be finite and symmetric with ones on its diagonal.")
        smallest = float(np.linalg.eigvalsh(matrix)[0])
        if smallest < -1e-10:
            raise ValueError(f"correlation is not positive semidefinite: its smallest eigenvalue is {smallest:.3g}.")


def _with_presets(init: Callable[..., None]) -> Callable[..., None]:
    """Turn the argument `preset` into the fields it stands for, before defaults hide what was given."""

    @functools.wraps(init)
    def wrapped(self: KrrSocConfig, preset: str | None = None, **fields: Any) -> None:
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"preset={preset!r} must be one of {', '.join(PRESETS)}.")
        given = fields | ({"lam": fields["lambda"]} if "lambda" in fields else {})
        init(self, **PRESETS.get(preset, {}) | given)

    return wrapped


KrrSocConfig.__init__ = _with_presets(KrrSocConfig.__init__)
