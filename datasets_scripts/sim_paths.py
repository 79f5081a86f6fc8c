"""Simulated paths of the benchmark markets of optimal stopping, and of a linear-quadratic control problem."""

import math
from dataclasses import dataclass

import datasets
import numpy as np

_DESCRIPTION = (
    "Paths of N + 1 dates: correlated geometric Brownian motions (`paper_*`, `dividend_*`, `put`), Heston's model "
    "(`heston`, columns price and variance, 8 Euler steps a date) and a linear system under random controls (`lqr`). "
    "Row i depends on the seed and on i alone, so that more rows extend fewer."
)
_CITATION = """@misc{dellavecchia2025error,
  title = {Error Propagation in Dynamic Programming: From Stochastic Control to (American) Option Pricing},
  author = {Della Vecchia, A. and Filipović, D.},
  year = {2025},
  eprint = {2509.20239}
}"""
DEFAULT_PATHS = 1000
HESTON_SUBSTEPS = 8


@dataclass
class SimPathsConfig(datasets.BuilderConfig):
    """Config of [`SimPathsBuilder`].

    Args:
        process (`str`, defaults to `"black_scholes"`): `"black_scholes"`, `"heston"` or `"linear"`.
        dim (`int`, defaults to 1): Assets.
        spot (`float`, defaults to 100): S₀ of each; the initial state of the linear system.
        rate, dividend, volatility, correlation, maturity (`float`): r, δ, σ, ρ and T.
        n_steps (`int`, defaults to 9): N.
        n_paths (`int`, defaults to 1,000): Rows.
        seed (`int`, defaults to 0): Of all of them.
    """

    process: str = "black_scholes"
    dim: int = 1
    spot: float = 100.0
    rate: float = 0.05
    dividend: float = 0.0
    volatility: float = 0.2
    correlation: float = 0.0
    maturity: float = 1.0
    n_steps: int = 9
    n_paths: int = DEFAULT_PATHS
    seed: int = 0

    @property
    def width(self) -> int:
        """Columns of a path."""
        return 2 if self.process == "heston" else self.dim


def black_scholes_path(config: SimPathsConfig, rng: np.random.Generator) -> np.ndarray:
    """(N + 1, d) of geometric Brownian motions with equal correlations, exact at the dates."""
    dt = config.maturity / config.n_steps
    correlation = np.full((config.dim, config.dim), config.correlation)
    np.fill_diagonal(correlation, 1.0)
    z = rng.standard_normal((config.n_steps, config.dim)) @ np.linalg.cholesky(correlation).T
    drift = (config.rate - config.dividend - config.volatility**2 / 2) * dt
    logs = np.cumsum(drift + config.volatility * math.sqrt(dt) * z, axis=0)
    return config.spot * np.exp(np.vstack([np.zeros((1, config.dim)), logs]))


def heston_path(
    config: SimPathsConfig,
    rng: np.random.Generator,
    v0: float = 0.04,
    kappa: float = 2.0,
    theta: float = 0.04,
    xi: float = 0.3,
    rho: float = -0.6,
) -> np.ndarray:
    """(N + 1, 2) of price and variance by full-truncation Euler."""
    h = config.maturity / config.n_steps / HESTON_SUBSTEPS
    log_s, v, path = math.log(config.spot), v0, [(config.spot, v0)]
    for z in rng.standard_normal((config.n_steps, HESTON_SUBSTEPS, 2)):
        for first, second in z:
            positive = max(v, 0.0)
            root = math.sqrt(positive * h)
            log_s += (config.rate - config.dividend - positive / 2) * h + root * first
            shock = rho * first + math.sqrt(1 - rho**2) * second
            v += kappa * (theta - positive) * h + xi * root * shock
        path.append((math.exp(log_s), v))
    return np.array(path)


def linear_path(config: SimPathsConfig, rng: np.random.Generator) -> np.ndarray:
    """(N + 1, 1) of x' = 0.9 x + 0.5 u + 0.3 z from x₀ ~ N(0, 1.2²) under controls u ~ N(0, 1)."""
    x, path = 1.2 * rng.standard_normal(), []
    for u, z in rng.standard_normal((config.n_steps, 2)):
        path.append(x)
        x = 0.9 * x + 0.5 * u + 0.3 * z
    return np.array([*path, x])[:, None]


SIMULATORS = {"black_scholes": black_scholes_path, "heston": heston_path, "linear": linear_path}


def _configs() -> list[SimPathsConfig]:
    version = datasets.Version("1.0.0")
    configs = [SimPathsConfig("put", version, description="one asset, T = 1")]
    configs += [
        SimPathsConfig(f"paper_d{d}", version, description="ρ = 0.2, T = 1", dim=d, correlation=0.2)
        for d in (2, 5, 10, 20)
    ]
    configs += [
        SimPathsConfig(
            f"dividend_d{d}_s{spot}", version, description="δ = 0.1, T = 3", dim=d, spot=float(spot), dividend=0.1,
            maturity=3.0,
        )
        for d in (2, 3, 5)
        for spot in (90, 100, 110)
    ]  # fmt: skip
    configs.append(SimPathsConfig("heston", version, description="price and variance", process="heston"))
    return [*configs, SimPathsConfig("lqr", version, description="linear system", process="linear", n_steps=5)]


class SimPathsBuilder(datasets.GeneratorBasedBuilder):
    """Simulated paths.

    Features: `idx` and `path`, (N + 1, columns) float64. Ask for double precision when you set a format:
    `with_format("torch", dtype=torch.float64)`; without it the library gives float32.

    Example:
        >>> from datasets_scripts.sim_paths import SimPathsBuilder
        >>> builder = SimPathsBuilder(config_name="put", n_paths=10)
        >>> builder.download_and_prepare()
        >>> builder.as_dataset(split="train").num_rows
        10
    """

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = SimPathsConfig
    BUILDER_CONFIGS = _configs()
    DEFAULT_CONFIG_NAME = "put"

    def _info(self) -> datasets.DatasetInfo:
        config = self.config
        if config.process not in SIMULATORS:
            raise ValueError(f"`process` must be one of {', '.join(SIMULATORS)}, got {config.process!r}.")
        for name in ("dim", "n_steps", "n_paths"):
            if not isinstance(getattr(config, name), int) or getattr(config, name) < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {getattr(config, name)!r}.")
        for name in ("spot", "volatility", "maturity"):
            if not getattr(config, name) > 0:
                raise ValueError(f"`{name}` must be positive, got {getattr(config, name)!r}.")
        return datasets.DatasetInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            homepage="https://arxiv.org/abs/2509.20239",
            license="apache-2.0",
            features=datasets.Features(
                {
                    "idx": datasets.Value("int64"),
                    "path": datasets.Array2D((config.n_steps + 1, config.width), "float64"),
                }
            ),
        )

    def _split_generators(self, dl_manager):
        return [datasets.SplitGenerator(datasets.Split.TRAIN, gen_kwargs={"count": self.config.n_paths})]

    def _generate_examples(self, count: int):
        simulate = SIMULATORS[self.config.process]
        for index in range(count):
            rng = np.random.default_rng(np.random.SeedSequence([self.config.seed, index]))
            yield index, {"idx": index, "path": simulate(self.config, rng)}
