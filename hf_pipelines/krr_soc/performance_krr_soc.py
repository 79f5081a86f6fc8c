"""Time and memory of KRR-DP beside least-squares methods and scikit-learn's kernel ridge regression."""

import subprocess
import sys
import time

import torch
from sklearn.kernel_ridge import KernelRidge
from tqdm.auto import tqdm

from hf_models.krr_soc import KrrSocConfig, KrrSocModel, stopping_problem
from hf_models.krr_soc.kernels_krr_soc import kernel_matrix
from hf_models.krr_soc.regression_krr_soc import solve_dense
from hf_pipelines.benchmark import (
    Bar,
    BenchmarkResult,
    Row,
    least_cpu_seconds,
    markdown_table,
    measured,
    peak_process_megabytes,
)
from hf_pipelines.krr_soc.baselines_krr_soc import BASELINES, kernel_ridge_stopping
from hf_pipelines.krr_soc.references_krr_soc import CASES

CASE = "dividend max-call d5 S100"
SEEDS = 4
DENSE = 1500  # points of the dense solve


def peak_growth() -> float:
    """Megabytes by which a fresh process's peak memory grows while the default model is fitted and bounded."""
    code = "from hf_pipelines.krr_soc.performance_krr_soc import print_peak_growth; print_peak_growth()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def print_peak_growth() -> None:
    """Run inside a fresh process."""
    torch.set_num_threads(1)
    before = peak_process_megabytes()
    KrrSocModel(KrrSocConfig(**CASES[CASE].fields)).fit().price(bounds=True)
    print(peak_process_megabytes() - before)


def _timed(job) -> tuple[float, float]:
    """CPU seconds and result."""
    start = time.process_time()
    value = job()
    return time.process_time() - start, value


def run_performance(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Measure seconds, accuracy and memory on one thread.

    Args:
        seed (`int`, defaults to 0): First of the seeds.
        device (`str`, defaults to `"cpu"`): The CPU; ratios on a GPU differ.

    Returns:
        [`BenchmarkResult`]: seconds and errors by method and size, and the spec's bars.
    """
    result = BenchmarkResult("krr_soc", seed, False, repo="krr-maxcall-5d", dataset="closedloop/sim_paths")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with measured(result, device):
            _measure(result, seed)
    finally:
        torch.set_num_threads(threads)
    return result


def _measure(result: BenchmarkResult, seed: int) -> None:
    reference, fields = CASES[CASE].value, CASES[CASE].fields
    problem = stopping_problem(KrrSocConfig(**fields))

    def krr(n: int, m: int, s: int) -> float:
        config = KrrSocConfig(**fields, n_states=n, n_centers=m, seed=s)
        return KrrSocModel(config).fit().price().price

    jobs = {
        f"KRR-DP, n = {n}": lambda s, n=n, m=m: krr(n, m, s)
        for n, m in ((100, 100), (200, 100), (400, 200), (800, 200))
    }
    for name, train in BASELINES.items():
        for paths in (5_000, 20_000, 80_000):
            jobs[f"{name}, {paths:,} paths"] = lambda s, f=train, p=paths: f(problem, p, s).price
    jobs["scikit-learn KernelRidge, 2,000 paths"] = lambda s: kernel_ridge_stopping(problem, 2000, s).price
    krr(100, 50, 0)  # warm
    table, seconds = [], {}
    for name, job in tqdm(jobs.items(), desc="krr_soc performance"):
        runs = [_timed(lambda s=s, job=job: job(seed + s)) for s in range(SEEDS)]
        errors = torch.tensor([100 * (price / reference - 1) for _, price in runs], dtype=torch.float64)
        seconds[name] = min(run[0] for run in runs)
        metrics = {
            "CPU s": round(seconds[name], 3),
            "mean error %": float(errors.mean()),
            "rms error %": float(errors.square().mean().sqrt()),
        }
        result.rows.append(Row(name, metrics, ours=name.startswith("KRR")))
        table.append(
            [name, f"{metrics['CPU s']:.2f}", f"{metrics['mean error %']:+.2f}", f"{metrics['rms error %']:.2f}"]
        )
    model = KrrSocModel(KrrSocConfig(**fields, seed=seed)).fit()
    lower, _ = _timed(model.lower_bound)
    upper, _ = _timed(model.upper_bound)
    ours, scikit = dense_seconds()
    memory = peak_growth()
    costs = {"lower bound, CPU s": lower, "upper bound, CPU s": upper, "dense solve / scikit-learn": ours / scikit}
    costs["peak memory of fit and bounds, MB"] = memory
    result.rows.append(Row("costs", {name: round(value, 3) for name, value in costs.items()}, ours=True))
    result.card_tables["performance"] = markdown_table(
        ["max-call, 5 assets", "CPU s", "mean error, %", "rms error, % (4 seeds)"], table
    )
    result.card_tables["costs"] = markdown_table(["", ""], [[name, f"{value:.2f}"] for name, value in costs.items()])
    result.bars = [
        Bar("default fit with tuning, CPU s", seconds["KRR-DP, n = 800"], 1.5 * 2.3, False),
        Bar("lower bound, 100,000 paths, CPU s", lower, 1.5 * 5, False),
        Bar("upper bound, 1,500 × 256, CPU s", upper, 1.5 * 8, False),
        Bar("dense solve over scikit-learn's KernelRidge, CPU s", ours / scikit, 1.0, False),
        Bar("peak memory of fit and bounds, MB", memory, 1024, False),
    ]


def dense_seconds(n: int = DENSE) -> tuple[float, float]:
    """Least CPU seconds of our dense regression and of scikit-learn's on the same points."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=g, dtype=torch.float64)
    y = torch.randn(n, 1, generator=g, dtype=torch.float64)
    scikit = KernelRidge(alpha=1e-6 * n, kernel="rbf", gamma=0.5)
    ours, theirs = least_cpu_seconds(
        lambda: solve_dense(kernel_matrix("rbf", x, x, 1.0), y, 1e-6),
        lambda: scikit.fit(x.numpy(), y.numpy()),
        repeats=5,
    )
    return ours, theirs
