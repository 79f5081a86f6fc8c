"""KRR-DP against reference prices, its own bounds, and least-squares methods (see `references_krr_soc`)."""

from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from hf_models.krr_soc import KrrSocConfig, KrrSocModel, LinearQuadratic, stopping_problem
from hf_models.krr_soc.bounds_krr_soc import interval, lower_bound
from hf_pipelines.benchmark import Bar, BenchmarkResult, Comparison, Row, markdown_table, measured
from hf_pipelines.krr_soc.baselines_krr_soc import BASELINES, european_price
from hf_pipelines.krr_soc.convergence_krr_soc import draw, measure
from hf_pipelines.krr_soc.performance_krr_soc import run_performance
from hf_pipelines.krr_soc.references_krr_soc import CASES, PAPER_RESULTS

REPO, DATASET = "krr-maxcall-5d", "closedloop/sim_paths"
ACCEPTANCE = (
    "dividend max-call d2 S100",
    "dividend max-call d5 S100",
    "geometric put d2",
    "geometric put d5",
    "geometric put d10",
    "geometric put d20",
    "max-call d2",
    "max-call d5",
    "max-call d10",
    "max-call d20",
)
OTHERS = ("put S90", "put S100", "put S110", "put S36 K40, 50 dates", "dividend max-call d3 S100")
CONTESTED = ("dividend max-call d2 S100", "dividend max-call d5 S100")
SEEDS, COVERAGE_RUNS = 5, 20
SMALL_BOUNDS = {"n_lower": 20_000, "n_upper": 300, "n_upper_inner": 64}
HESTON = {"n_states": 600, "n_inner": 100, "n_centers": 150}
LQR_STATES, LQR_VALUES = (-1.5, 0.0, 1.0), (-4.77422, -0.81887, -2.57680)
PAPER_PRESET = {"geometric put d2": "upward", "max-call d2": "", "max-call d20": ""}


def fit(name: str, seed: int, device: str = "cpu", **fields: Any) -> KrrSocModel:
    """The model of a case of the reference table."""
    return KrrSocModel(KrrSocConfig(**CASES[name].fields | {"seed": seed} | fields)).to(device).fit()


def run(quick: bool = False, seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Price options of which the price is known.

    Args:
        quick (`bool`, defaults to `False`): One put and one max-call, with small bounds: what `closedloop demo` shows.
        seed (`int`, defaults to 0): First of the seeds.
        device (`str`, defaults to `"cpu"`): Where to fit.

    Returns:
        [`BenchmarkResult`]: errors and bounds of every case, baselines, and the method's bars.
    """
    result = BenchmarkResult("krr_soc", seed, quick, repo=REPO, dataset=DATASET)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with measured(result, device):
            (_run_quick if quick else _run_full)(result, seed, device)
    finally:
        torch.set_num_threads(threads)
    return result


def price_case(name: str, seed: int, seeds: int, device: str, **sizes: int) -> dict[str, Any]:
    """Prices of several seeds, and the bounds of the first."""
    reference = CASES[name].value
    models = [fit(name, seed + s, device) for s in range(seeds)]
    errors = [model.price().price / reference - 1 for model in models]
    out = models[0].price(bounds=True, **sizes)
    return {
        "reference": reference,
        "price": reference * (1 + sum(errors) / seeds),
        "worst error %": 100 * max(map(abs, errors)),
        "mean error %": 100 * abs(sum(errors) / seeds),
        "lower": out.lower.value,
        "lower s.e.": out.lower.standard_error,
        "upper": out.upper.value,
        "upper s.e.": out.upper.standard_error,
        "upper skewness": out.upper.skewness,
        "width %": 100 * (out.upper.value - out.lower.value) / reference,
        "covers": float(out.interval[0] <= reference <= out.interval[1]),
        "covers at 99.9 %": float(_within(out, reference)),
    }


def _within(out: Any, reference: float) -> bool:
    low, high = interval(out.lower, out.upper, 0.001)
    return low <= reference <= high


def lower_bounds(name: str, seed: int, device: str = "cpu", count: int = 200_000) -> dict[str, float]:
    """Out-of-sample values of every method's policy on the same paths."""
    model = fit(name, seed, device)
    problem = stopping_problem(model.config, device)
    values = {"KRR-DP": model.lower_bound(count, seed).value}
    for method, train in BASELINES.items():
        policy = train(problem, seed=seed)
        values[method] = lower_bound(policy, count, policy.held, seed).value
    return values | {"European": european_price(problem, count, seed).value}


def _run_quick(result: BenchmarkResult, seed: int, device: str) -> None:
    for name in ("put S100", "dividend max-call d2 S100"):
        result.rows.append(Row(name, price_case(name, seed, 1, device, **SMALL_BOUNDS), ours=True))
    name = "dividend max-call d2 S100"
    values, reference = lower_bounds(name, seed, device, 50_000), CASES[name].value
    price = result.rows[-1].metrics["price"]
    policy = BASELINES["TvR"](stopping_problem(KrrSocConfig(**CASES[name].fields), device), seed=seed)
    errors = [100 * abs(p / reference - 1) for p in (price, policy.price)]
    result.comparisons = [
        Comparison("RLSM", "value of the policy, 2-D max-call", values["KRR-DP"], values["RLSM"]),
        Comparison("Tsitsiklis–Van Roy", "price error, %", *errors, higher_is_better=False),
    ]
    result.figures["prices"] = draw_prices({row.name: row.metrics for row in result.rows})


def _run_full(result: BenchmarkResult, seed: int, device: str) -> None:
    cases = {
        name: price_case(name, seed, SEEDS, device)
        if name in ACCEPTANCE
        else price_case(name, seed, 1, device, **SMALL_BOUNDS)
        for name in tqdm(ACCEPTANCE + OTHERS, desc="krr_soc")
    }
    result.rows = [Row(name, metrics, ours=True) for name, metrics in cases.items()]
    contest = {name: lower_bounds(name, seed, device) for name in CONTESTED}
    result.rows += [
        Row(f"policies / {name}", values | {"reference": CASES[name].value}) for name, values in contest.items()
    ]
    heston = [fit("Heston put", seed + s, device, **HESTON).price().price for s in range(3)]
    heston_error = 100 * max(abs(price / CASES["Heston put"].value - 1) for price in heston)
    control = linear_quadratic(seed, device)
    preset = {
        name: [fit(name, seed + s, device, preset="paper").price().price for s in range(3)] for name in PAPER_PRESET
    }
    coverage = covered_share(seed, device)
    convergence = measure(seed)
    slopes = convergence.slopes()
    result.rows += [
        Row("Heston put", {"price": sum(heston) / 3, "worst error %": heston_error}, ours=True),
        Row("linear-quadratic control", {"worst error": max(map(abs, control))}, ours=True),
        Row("coverage, put S100", {"share": coverage, "runs": COVERAGE_RUNS}, ours=True),
        Row("slopes", slopes, ours=True),
    ]
    result.rows += [
        Row(f"paper's settings / {name}", {"price": sum(p) / 3, "reference": CASES[name].value})
        for name, p in preset.items()
    ]
    accepted = [cases[name] for name in ACCEPTANCE]
    five = contest["dividend max-call d5 S100"]
    value_bias = sum(preset["geometric put d2"]) / 3 - cases["geometric put d2"]["price"]
    result.bars = [
        Bar("worst error of a seed, 10 cases, %", max(c["worst error %"] for c in accepted), 1.0, False),
        Bar("worst error of a mean over 5 seeds, %", max(c["mean error %"] for c in accepted), 0.4, False),
        Bar("cases within their interval at 99.9 %", sum(c["covers at 99.9 %"] for c in cases.values()), len(cases)),
        Bar("widest bracket, % of the price", max(c["width %"] for c in accepted), 2.0, False),
        Bar("share of 95 % intervals that cover, 20 runs", coverage, 0.85),
        Bar("policy over RLSM at d = 5, %", 100 * (five["KRR-DP"] / five["RLSM"] - 1), 0.5),
        Bar("policy over TvR at d = 5, %", 100 * (five["KRR-DP"] / five["TvR"] - 1), 0.0),
        Bar("policy over LSM at d = 5, %", 100 * (five["KRR-DP"] / five["LSM"] - 1), 0.0),
        Bar("Heston put, worst error, %", heston_error, 1.5, False),
        Bar("linear-quadratic control, worst error", max(map(abs, control)), 0.005, False),
        Bar("paper's target over ours, geometric put d2", value_bias, 0.02),
        Bar("slope of E in n, theory's budget", slopes["E in n, theory's λ and M"], -0.5, False),
        Bar("slope of II in M, plain Monte Carlo", slopes["II in M, mc"], -0.8, False),
    ]
    _tables(result, cases, contest, preset, slopes)
    result.figures = {"prices": draw_prices(cases), "convergence": draw(convergence)}


def linear_quadratic(seed: int, device: str = "cpu") -> list[float]:
    """Errors of V_0 at three states, with 121 controls on [−3, 3]."""
    config = KrrSocConfig(
        process="custom", n_steps=5, n_states=300, n_centers=100, n_inner=16, sampler="gauss_hermite",
        features="raw", lengthscale=2.0, target="value", seed=seed,
    )  # fmt: skip
    grid = torch.linspace(-3, 3, 121, dtype=torch.float64, device=device)[:, None]
    model = KrrSocModel(config).to(device).fit(LinearQuadratic(grid))
    value = model(torch.tensor(LQR_STATES, dtype=torch.float64)[:, None]).value
    return [float(v) - exact for v, exact in zip(value, LQR_VALUES, strict=True)]


def covered_share(seed: int, device: str = "cpu") -> float:
    """Share of repeated runs of the put whose 95 % interval contains the price."""
    inside = 0
    for s in range(COVERAGE_RUNS):
        model = fit("put S100", 1000 + seed + s, device, lengthscale=0.75, shrink=1.0, n_states=300, n_centers=80)
        low, high = model.price(bounds=True, n_lower=20_000, n_upper=400, n_upper_inner=64).interval
        inside += low <= CASES["put S100"].value <= high
    return inside / COVERAGE_RUNS


def _tables(result: BenchmarkResult, cases: dict, contest: dict, preset: dict, slopes: dict[str, float]) -> None:
    rows = []
    for name, c in cases.items():
        bounds = [f"{c[side]:.3f} ± {c[f'{side} s.e.']:.3f}" for side in ("lower", "upper")]
        runs = SEEDS if name in ACCEPTANCE else 1
        price = f"{c['price']:.4f} ({runs})"
        rows.append([name, f"{c['reference']:.4f}", price, f"{c['worst error %']:.2f} %", *bounds])
    columns = ["option", "reference", "KRR-DP, mean (seeds)", "worst seed", "lower bound", "upper bound"]
    result.card_tables["prices"] = markdown_table(columns, rows)
    methods = list(next(iter(contest.values())))
    result.card_tables["policies"] = markdown_table(
        ["value of the policy, 200,000 paths", "reference", *methods],
        [[n, f"{CASES[n].value:.3f}", *(f"{v[m]:.3f}" for m in methods)] for n, v in contest.items()],
    )
    result.card_tables["paper"] = markdown_table(
        ["option, 9 dates", "reference", "paper, Table 1", "paper's settings here (3 seeds)", "our defaults"],
        [
            [
                name,
                f"{CASES[name].value:.3f}",
                f"{value:.2f}",
                f"{sum(preset[name]) / 3:.3f}" if name in preset else "",
                f"{cases[name]['price']:.3f}",
            ]
            for name, value in PAPER_RESULTS.items()
        ],
    )
    result.card_tables["slopes"] = markdown_table(
        ["measured exponent", ""], [[name, f"{value:.2f}"] for name, value in slopes.items()]
    )
    five = contest["dividend max-call d5 S100"]
    result.card_tables["summary krr_soc"] = markdown_table(
        ["max-call on 5 assets, price 26.159", *methods],
        [["value of the policy on new paths", *(f"{five[m]:.2f}" for m in methods)]],
    )


def draw_prices(cases: dict[str, dict[str, Any]]) -> Figure:
    """Price and bounds of each case, relative to the reference."""
    figure = Figure(figsize=(8, 0.36 * len(cases) + 1.2))
    axis = figure.subplots()
    names = list(cases)[::-1]
    for row, name in enumerate(names):
        c = cases[name]
        low, high = (100 * (c[side] / c["reference"] - 1) for side in ("lower", "upper"))
        margin = [196 * c[f"{side} s.e."] / c["reference"] for side in ("lower", "upper")]
        axis.plot([low - margin[0], high + margin[1]], [row, row], color="tab:gray", linewidth=1)
        axis.plot([low, high], [row, row], color="tab:blue", linewidth=5, alpha=0.6, solid_capstyle="butt")
        axis.plot(100 * (c["price"] / c["reference"] - 1), row, "o", color="black", markersize=4)
    axis.axvline(0, color="tab:red", linewidth=1, label="reference")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("% from the reference: price (dot), lower to upper bound (bar), 95 % interval (line)")
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    return figure


def run_ablations(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Vary one choice of the method at a time.

    Args:
        seed (`int`, defaults to 0): First of the seeds.
        device (`str`, defaults to `"cpu"`): Where to fit.

    Returns:
        [`BenchmarkResult`]: mean errors per variant.
    """
    result = BenchmarkResult("krr_soc", seed, False, repo=REPO, dataset=DATASET)
    with measured(result, device):
        targets = target_bias(seed, device)
        rows = []
        for name, case, fields, seeds in tqdm(_variants(), desc="krr_soc ablations"):
            prices = [fit(case, seed + s, device, **fields).price().price for s in range(seeds)]
            error = 100 * (sum(prices) / seeds / CASES[case].value - 1)
            spread = float(torch.tensor(prices).std() / CASES[case].value * 100) if seeds > 1 else 0.0
            result.rows.append(Row(f"{case} / {name}", {"error %": error, "sd %": spread}, ours=name == "default"))
            rows.append([case, name, f"{error:+.2f} %", f"{spread:.2f} %"])
    for (n, m), biases in targets.items():
        result.rows.append(Row(f"put S100 / n = {n}, M = {m}", biases))
    result.card_tables["targets"] = markdown_table(
        ["put, mean error over 8 seeds", "value (paper)", "continuation (default)"],
        [[f"n = {n}, M = {m}", *(f"{v:+.3f}" for v in b.values())] for (n, m), b in targets.items()],
    )
    result.card_tables["ablations"] = markdown_table(["option", "variant", "mean error", "spread of seeds"], rows)
    return result


def target_bias(seed: int, device: str = "cpu") -> dict[tuple[int, int], dict[str, float]]:
    """Mean error of both regression targets on the put, 8 seeds, plain Monte Carlo, λ = 10⁻⁶."""
    biases = {}
    for n, m in ((200, 16), (800, 32), (200, 64)):
        biases[n, m] = {}
        for target in ("value", "continuation"):
            fields = {"n_states": n, "n_inner": m, "n_centers": 200, "target": target, "sampler": "mc", "lam": 1e-6}
            prices = [
                fit("put S100", seed + s, device, lengthscale=1.0, shrink=1.0, **fields).price().price
                for s in range(8)
            ]
            biases[n, m][target] = sum(prices) / 8 - CASES["put S100"].value
    return biases


def _variants() -> list[tuple[str, str, dict[str, Any], int]]:
    call, put, high = "dividend max-call d2 S100", "geometric put d20", "max-call d10"
    variants = {
        "default": {},
        "target value": {"target": "value"},
        "no clipping": {"clip": "none"},
        "plain Monte Carlo": {"sampler": "mc"},
        "antithetic": {"sampler": "antithetic"},
        "monomial rule": {"sampler": "monomial3"},
        "Gauss–Hermite": {"sampler": "gauss_hermite"},
        "noise shared by all states": {"shared_noise": True},
        "λ = 10⁻⁶": {"lam": 1e-6},
        "Matérn 3/2": {"kernel": "matern32"},
        "Matérn 5/2": {"kernel": "matern52"},
        "Laplacian": {"kernel": "laplacian"},
        "paper's settings": {"preset": "paper"},
    }
    rows = [(name, call, fields, 2) for name, fields in variants.items()]
    for case in (high, put):
        rows += [(name, case, f, 1) for name, f in (("default", {}), ("log prices alone", {"features": "log"}))]
    return rows


__all__ = ["run", "run_ablations", "run_performance"]
