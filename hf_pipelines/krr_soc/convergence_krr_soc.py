"""How the error falls with the samples, on the one-dimensional put whose value is known at every date."""

from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from hf_models.krr_soc import KrrSocConfig, KrrSocModel
from hf_models.krr_soc.diagnostics_krr_soc import ErrorDecomposition, error_decomposition, slope, suggest_budget
from hf_pipelines.krr_soc.references_krr_soc import BermudanLattice

SIZES = (50, 100, 200, 400, 800, 1600)
INNER = (4, 16, 64, 256)
BASE = {"features": "log", "lengthscale": 1.0, "n_initial": 4096, "n_centers": 200}


@dataclass
class Convergence:
    """Errors of the put.

    Args:
        by_states (`dict[str, list[float]]`): E_1 of each setting for each of [`SIZES`].
        by_inner (`dict[str, list[float]]`): II of each sampler for each of [`INNER`].
        by_date (`dict[int, ErrorDecomposition]`): Terms of the default settings at every date.
    """

    by_states: dict[str, list[float]] = field(default_factory=dict)
    by_inner: dict[str, list[float]] = field(default_factory=dict)
    by_date: dict[int, ErrorDecomposition] = field(default_factory=dict)

    def slopes(self) -> dict[str, float]:
        """Measured exponents."""
        rates = {f"E in n, {name}": slope(SIZES, errors) for name, errors in self.by_states.items()}
        return rates | {f"II in M, {name}": slope(INNER, errors) for name, errors in self.by_inner.items()}


def _fit(seed: int, **fields: Any) -> KrrSocModel:
    n = fields.get("n_states", 800)
    return KrrSocModel(KrrSocConfig(seed=seed, **BASE | fields | {"n_centers": min(n, 200)})).fit()


def measure(seed: int = 0, repeats: int = 4, n_eval: int = 400) -> Convergence:
    """Fit the put at growing sizes.

    Args:
        seed (`int`, defaults to 0): First of the repeats' seeds.
        repeats (`int`, defaults to 4): Fits of a size.
        n_eval (`int`, defaults to 400): States at which errors are measured.
    """
    reference, out = BermudanLattice(), Convergence()

    def budget(n: int) -> dict[str, Any]:
        lam, inner = suggest_budget(n)
        return {"n_states": n, "lam": lam, "n_inner": inner, "sampler": "mc"}

    settings = {
        "theory's λ and M, target value": lambda n: budget(n) | {"target": "value"},
        "theory's λ and M": budget,
        "cross-validated λ, M = 64": lambda n: {"n_states": n},
    }
    for name, fields in settings.items():
        out.by_states[name] = []
        for n in SIZES:
            models = [_fit(seed + s, **fields(n)) for s in range(repeats)]
            parts = [error_decomposition(model, 1, n_eval, reference, seed + s) for s, model in enumerate(models)]
            out.by_states[name].append(sum(part.total for part in parts) / repeats)
    for sampler in ("mc", "qmc"):
        models = [_fit(seed, n_states=400, n_inner=m, sampler=sampler) for m in INNER]
        out.by_inner[sampler] = [error_decomposition(model, 5, 2000, seed=seed).monte_carlo for model in models]
    default = _fit(seed)
    out.by_date = {t: error_decomposition(default, t, n_eval, reference, seed) for t in range(1, 9)}
    return out


def draw(convergence: Convergence) -> Figure:
    """Errors against states, against inner samples, and by date."""
    figure = Figure(figsize=(12.5, 3.8))
    left, middle, right = figure.subplots(1, 3)
    rates = convergence.slopes()
    for name, errors in convergence.by_states.items():
        left.loglog(SIZES, errors, "o-", label=f"{name}: slope {rates[f'E in n, {name}']:.2f}")
    first = next(iter(convergence.by_states.values()))[0]
    left.loglog(SIZES, [first * (SIZES[0] / n) ** 0.5 for n in SIZES], "k:", label="bound for β = 1: slope −0.5")
    left.set(xlabel="states n", ylabel="E₁, squared currency", title="error of the value")
    for name, errors in convergence.by_inner.items():
        middle.loglog(INNER, errors, "o-", label=f"{name}: slope {rates[f'II in M, {name}']:.2f}")
    middle.set(xlabel="samples M of an average", title="term II, date 5")
    dates = list(convergence.by_date)
    for name in ("regression", "monte_carlo", "propagation", "total"):
        values = [getattr(part, name) for part in convergence.by_date.values()]
        right.semilogy(dates, values, "o-", label=name.replace("_", " "))
    right.set(xlabel="date", title="terms of the error, default settings")
    for axis in (left, middle, right):
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    return figure
