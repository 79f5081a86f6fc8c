"""What each choice of MPC-Flow is worth: horizon, solver, warm start, control weight, churn, steps, iterations, λ.

Everything but the named choice stays at the setting of the main benchmark; λ is that of the spec, 10 for denoising
and 100 otherwise, so that a row differs from its neighbour in one thing.
"""

from typing import Any

from tqdm.auto import tqdm

from hf_pipelines.benchmark import BenchmarkResult, Row, markdown_table, measured
from hf_pipelines.mpc_flow.baselines_mpc_flow import MPCFlow
from hf_pipelines.mpc_flow.benchmark_mpc_flow import NUM_TEST, REPO, TASKS, Bench

TASK_INDICES = (0, 2, 3)  # denoising, random pixels, blur: small null space, large one, ill-conditioned


def variants() -> dict[str, dict[str, Any]]:
    """Arguments of [`MPCFlow`] by name; `lam` is filled in where it is missing."""
    rows: dict[str, dict[str, Any]] = {
        "λ = 0 (plain sampling)": {"num_steps": 100, "settings": {}, "lam": 0.0},
        "K=1 prox": {"num_steps": 100, "settings": {}},
        "K=1 Adam on u": {"num_steps": 100, "settings": {"solver": "adam"}},
        "K=1 Adam on d": {"num_steps": 100, "settings": {"solver": "adam", "control_param": "d"}},
        "K=1 weight release, ρ .01": {"num_steps": 100, "settings": {"control_weight": "release", "rho": 0.01}},
        "K=1 weight bayes": {"num_steps": 100, "settings": {}, "lam": "auto"},
    }
    for churn in (0.25, 0.5, 1.0):
        rows[f"K=1 churn {churn}"] = {"num_steps": 100, "settings": {"churn": churn}}
    for steps in (10, 25, 50):
        rows[f"K=1 N={steps}"] = {"num_steps": steps, "settings": {}}
    for horizon in (2, 3, 5):
        settings = {"horizon_steps": horizon, "lr": 0.05}
        rows[f"K={horizon} warm"] = {"num_steps": 25, "settings": settings}
    rows["K=3 cold"] = {"num_steps": 25, "settings": {"horizon_steps": 3, "lr": 0.05, "warm_start": False}}
    for steps in (10, 25, 50):
        rows[f"Δt N={steps}"] = {"num_steps": steps, "settings": {"mode": "dt"}}
    for iterations in (5, 10, 40):
        rows[f"Δt n_ctrl={iterations}"] = {"num_steps": 25, "settings": {"mode": "dt", "n_ctrl": iterations}}
    return rows


def run_ablations(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Run every variant on three tasks.

    Args:
        seed (`int`, defaults to 0): Seed of noise and starting points.
        device (`str`, defaults to `"cpu"`): Where to run.

    Returns:
        [`BenchmarkResult`]: PSNR in dB of each variant and task, network calls and CPU seconds of the last task.
    """
    result = BenchmarkResult("mpc_flow", seed, False, repo=REPO, dataset="closedloop/digits")
    with measured(result, device):
        bench = Bench(seed, device)
        tasks = [TASKS[index] for index in TASK_INDICES]
        for name, arguments in tqdm(variants().items(), desc="ablations"):
            values: dict[str, Any] = {}
            for task in tasks:
                lam = arguments.get("lam", 10.0 if task is TASKS[0] else 100.0)
                solver = MPCFlow(arguments["num_steps"], arguments["settings"], lam)
                metrics = bench.restore(task, solver, 0, NUM_TEST)[1]
                values[task.name] = round(metrics["psnr"], 2)
            values["calls fwd/bwd"] = f"{metrics['forward']}/{metrics['backward']}"
            values["CPU s"] = metrics["cpu_seconds"]
            result.rows.append(Row(name, values, ours=True))
    columns = list(result.rows[0].metrics)
    rows = [[row.name, *(str(row.metrics[column]) for column in columns)] for row in result.rows]
    result.card_tables["ablations"] = markdown_table(["variant", *columns], rows)
    return result
