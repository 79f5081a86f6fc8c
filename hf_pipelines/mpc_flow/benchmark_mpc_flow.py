"""MPC-Flow against its baselines on handwritten digits: seven inverse problems, one shipped unconditional flow.

Every method's free parameter is chosen by PSNR on 12 images, then all restore 24 other test images from the same
noise.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from datasets_scripts import load_digit_tensors
from hf_pipelines import hub
from hf_pipelines.benchmark import (
    Bar,
    BenchmarkResult,
    Comparison,
    Row,
    least_cpu_seconds,
    markdown_table,
    measured,
    memory_growth,
)
from hf_pipelines.flow_control.metrics import masked_psnr, nearest_neighbour_distance, psnr, ssim
from hf_pipelines.flow_control.pipeline_small_flow import SmallFlowPipeline
from hf_pipelines.mpc_flow import operators as ops
from hf_pipelines.mpc_flow.baselines_mpc_flow import (
    OTODE,
    BackProjection,
    CountingVelocity,
    DFlow,
    FlowChef,
    FlowDPS,
    FlowGrad,
    FlowPriors,
    MPCFlow,
    PlainFlow,
    PnPFlow,
)
from hf_pipelines.mpc_flow.pipeline_mpc_flow import MPCFlowPipeline

BASE_REPO = "digits-16x16"
REPO = "mpc-flow-digits-16x16"
NUM_TEST, NUM_TUNE = 24, 12


@dataclass
class Task:
    """One inverse problem: name, operator, noise, and the bar that Δt must reach in dB."""

    name: str
    operator: ops.Operator
    noise_std: float
    bar: float


TASKS = [
    Task("denoise σ .2", ops.Denoise(), 0.2, 27.0),
    Task("box 6×6", ops.BoxInpaint(6), 0.05, 25.0),
    Task("random 70 %", ops.RandomInpaint(0.7), 0.01, 27.0),
    Task("Gaussian blur", ops.GaussianBlur(9, 1.0), 0.05, 29.5),
    Task("SR ×2", ops.SuperResolution(2, "subsample"), 0.05, 30.5),
    Task("HDR clip", ops.HDR(), 0.05, 30.0),
    Task("tanh(2·blur)", ops.NonlinearBlur(9, 1.0), 0.05, 29.0),
]
K1, CHURN, K3, DT = "MPC-Flow K=1", "MPC-Flow K=1 + churn", "MPC-Flow K=3", "MPC-Flow Δt"
LAMBDAS = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def candidates(name: str, quick: bool) -> list[Any]:
    """The settings among which a method may choose; the middle one alone in a quick run."""
    grids = {
        K1: [MPCFlow(100, {"horizon_steps": 1}, lam) for lam in (*LAMBDAS, 3000.0)],
        CHURN: [MPCFlow(100, {"churn": 1.0}, lam) for lam in (*LAMBDAS, 3000.0, "auto")],
        K3: [MPCFlow(25, {"horizon_steps": 3, "lr": 0.05}, lam) for lam in LAMBDAS],
        DT: [MPCFlow(25, {"mode": "dt"}, lam) for lam in LAMBDAS],
        "PnP-Flow": [PnPFlow(gamma=gamma, alpha=alpha) for gamma in (0.5, 1.0, 1.9) for alpha in (0.01, 0.3, 0.8)],
        "D-Flow": [DFlow(lam=lam) for lam in LAMBDAS],
        "FlowGrad": [FlowGrad(lam=lam) for lam in LAMBDAS],
        "Flow-Priors": [FlowPriors(lam=lam) for lam in LAMBDAS],
        "FlowChef": [FlowChef(step_size=size) for size in (0.02, 0.05, 0.1, 0.2, 0.5)],
        "FlowDPS": [FlowDPS(step_size=size) for size in (0.05, 0.1, 0.2, 0.5, 1.0)],
        "OT-ODE": [OTODE(start=start) for start in (0.1, 0.2, 0.4)],
        "plain flow": [PlainFlow()],
        "degraded": [BackProjection()],
    }
    grid = grids[name]
    return [grid[len(grid) // 2]] if quick else grid


METHODS = (
    *(K1, CHURN, K3, DT),
    *("PnP-Flow", "D-Flow", "FlowGrad", "Flow-Priors", "FlowChef", "FlowDPS", "OT-ODE", "plain flow", "degraded"),
)
LINEAR_ONLY = (CHURN, "OT-ODE")


class Bench:
    """The prior, the images and the noise that all methods share.

    Args:
        seed (`int`): Seed of noise and starting points.
        device (`str`): Where to run.
    """

    def __init__(self, seed: int, device: str):
        self.seed, self.device = seed, device
        pipe = SmallFlowPipeline.from_pretrained(hub.repo(BASE_REPO)).to(device)
        self.model = pipe.model.eval().requires_grad_(False)
        self.test, _ = load_digit_tensors(16, "test")
        self.train, _ = load_digit_tensors(16, "train")

    def velocity(self) -> CountingVelocity:
        """A fresh counter around the unconditional network."""
        return CountingVelocity(lambda x, sigma: self.model(x, timestep=sigma).sample)

    def _generator(self, offset: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + offset)

    def restore(self, task: Task, solver: Any, first: int, count: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Restore test images `first`, …, `first + count − 1`; returns them clamped to [−1, 1] and what it cost."""
        truth = self.test[first : first + count].to(self.device)
        y = task.operator.measure(truth, noise_std=task.noise_std, generator=self._generator(1))
        x0 = torch.randn(truth.shape, generator=self._generator(0)).to(self.device)
        velocity = self.velocity()
        start = time.process_time()
        images = solver.solve(
            velocity, task.operator, y, x0, noise_std=task.noise_std, generator=self._generator(2)
        ).clamp(-1, 1)
        seconds = time.process_time() - start
        residual = task.operator.A(images) - y
        metrics = {
            "psnr": float(psnr(images.cpu(), truth.cpu()).mean()),
            "ssim": float(ssim(images.cpu(), truth.cpu()).mean()),
            "data_rmse": float(residual.square().flatten(1).mean(1).sqrt().mean()),
            "forward": velocity.nfe,
            "backward": velocity.nbp,
            "cpu_seconds": round(seconds, 3),
        }
        if hasattr(task.operator, "mask"):
            missing = (1 - task.operator.mask(truth)).cpu()
            metrics["psnr_missing"] = float(masked_psnr(images.cpu(), truth.cpu(), missing).mean())
        return images.cpu(), metrics

    def choose(self, task: Task, solvers: Sequence[Any], count: int) -> Any:
        """The setting with the highest PSNR on the tuning images, which follow the test images."""
        if len(solvers) == 1:
            return solvers[0]
        return max(solvers, key=lambda solver: self.restore(task, solver, NUM_TEST, count)[1]["psnr"])


def describe(solver: Any) -> str:
    """The chosen setting in a few characters."""
    names = {"lam": "λ", "gamma": "γ", "alpha": "α", "step_size": "step", "start": "start"}
    parts = [f"{short}={getattr(solver, name)}" for name, short in names.items() if hasattr(solver, name)]
    return " ".join(parts)


def run(quick: bool = False, seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Run the benchmark.

    Args:
        quick (`bool`, defaults to `False`): Two tasks, eight images, no tuning: what `closedloop demo` shows.
        seed (`int`, defaults to 0): Seed of noise and starting points.
        device (`str`, defaults to `"cpu"`): Where to run.

    Returns:
        [`BenchmarkResult`]: rows named "task / method", the claims of the spec, a figure.
    """
    result = BenchmarkResult("mpc_flow", seed, quick, repo=REPO, dataset="closedloop/digits")
    with measured(result, device):
        bench = Bench(seed, device)
        tasks = [TASKS[1], TASKS[4]] if quick else TASKS
        methods = (CHURN, DT, "PnP-Flow", "FlowGrad", "plain flow", "degraded") if quick else METHODS
        count = 8 if quick else NUM_TEST
        restored: dict[tuple[str, str], torch.Tensor] = {}
        table: dict[tuple[str, str], dict[str, Any]] = {}
        jobs = [
            (task, method) for task in tasks for method in methods if task.operator.linear or method not in LINEAR_ONLY
        ]
        for task, method in tqdm(jobs, desc="mpc_flow"):
            solver = bench.choose(task, candidates(method, quick), NUM_TUNE)
            key = (task.name, method)
            restored[key], table[key] = bench.restore(task, solver, 0, count)
            setting = describe(solver)
            metrics = {**table[key], "setting": setting} if setting else table[key]
            result.rows.append(Row(f"{task.name} / {method}", metrics, ours=method.startswith("MPC-Flow")))
        for task in tasks:
            for baseline in ("degraded", "FlowGrad", "PnP-Flow"):
                value, other = table[(task.name, DT)]["psnr"], table[(task.name, baseline)]["psnr"]
                result.comparisons.append(Comparison(baseline, f"PSNR dB, {task.name}", value, other))
        result.figures["restored"] = draw(bench.test[:count], tasks, methods, restored, table)
        memorised = nearest_neighbour_distance(restored[(tasks[0].name, DT)], bench.train)
        natural = nearest_neighbour_distance(bench.test[:count], bench.train)
        result.rows.append(
            Row(
                "nearest training image, rms distance",
                {"restored": float(memorised.mean()), "true test images": float(natural.mean())},
            )
        )
        # a model that remembers would restore its training images: the distance must not fall below that of real ones
        metric = "rms distance to the nearest training image"
        result.comparisons.append(
            Comparison("true test images", metric, float(memorised.mean()), float(natural.mean()))
        )
        if not quick:
            result.bars = check_claims(table)
            result.card_tables["results"] = card_table(table)
            result.card_tables["summary mpc_flow"] = summary_table(table)
    return result


def check_claims(table: dict[tuple[str, str], dict[str, Any]]) -> list[Bar]:
    """The bars of the acceptance section."""
    bars = [Bar(f"{DT}, {task.name}: PSNR", table[(task.name, DT)]["psnr"], task.bar) for task in TASKS]
    margins = [table[(task.name, DT)]["psnr"] - table[(task.name, "FlowGrad")]["psnr"] for task in TASKS]
    bars.append(Bar(f"{DT}: smallest margin over FlowGrad, dB", min(margins), 0.0))
    seconds = {name: sum(table[(task.name, name)]["cpu_seconds"] for task in TASKS) for name in (DT, "FlowGrad")}
    bars.append(Bar(f"{DT}: CPU time / FlowGrad's", seconds[DT] / seconds["FlowGrad"], 0.6, at_least=False))
    for index, limit in ((0, 24.0), (3, 28.0)):
        bars.append(Bar(f"{K1}, {TASKS[index].name}: PSNR", table[(TASKS[index].name, K1)]["psnr"], limit))
    backward = max(table[(task.name, K1)]["backward"] for task in TASKS)
    bars.append(Bar(f"{K1}: backward calls through the network", backward, 0, at_least=False))
    for index, limit in ((1, 25.0), (2, 25.0), (3, 30.0), (4, 28.0)):
        bars.append(Bar(f"{CHURN}, {TASKS[index].name}: PSNR", table[(TASKS[index].name, CHURN)]["psnr"], limit))
    return bars


def card_table(table: dict[tuple[str, str], dict[str, Any]]) -> str:
    """PSNR/SSIM of every method and task in Markdown, the best PSNR of a task in bold."""
    rows = []
    best = {task.name: max(v["psnr"] for (name, _), v in table.items() if name == task.name) for task in TASKS}
    for method in METHODS:
        cells, seconds, calls = [], 0.0, ""
        for task in TASKS:
            value = table.get((task.name, method))
            if value is None:
                cells.append("–")
                continue
            number = f"{value['psnr']:.1f}"
            number = f"**{number}**" if value["psnr"] == best[task.name] else number
            cells.append(f"{number}/{value['ssim']:.2f}")
            seconds += value["cpu_seconds"] / sum((task.name, method) in table for task in TASKS)
            calls = f"{value['forward']}/{value['backward']}"
        rows.append([method, *cells, f"{seconds:.1f}", calls])
    return markdown_table(["PSNR dB / SSIM", *(task.name for task in TASKS), "CPU s", "calls fwd/bwd"], rows)


def summary_table(table: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Δt beside what costs as much (FlowGrad), what is best without gradients (PnP-Flow), and the degraded image."""
    shown = (DT, "FlowGrad", "PnP-Flow", "degraded")
    rows = [[task.name, *(f"{table[(task.name, method)]['psnr']:.1f}" for method in shown)] for task in TASKS]
    return markdown_table(["PSNR dB", *shown], rows)


def draw(truth, tasks, methods, restored, table) -> Figure:
    """One row of pictures per task and image: truth, degraded, and what each method made of it."""
    shown = ["degraded", *[method for method in methods if method != "degraded"]]
    images_per_task = 2
    rows = len(tasks) * images_per_task
    figure = Figure(figsize=(1.35 * (len(shown) + 1), 1.5 * rows + 0.4))
    axes = figure.subplots(rows, len(shown) + 1)
    for index, task in enumerate(tasks):
        for image in range(images_per_task):
            row = axes[index * images_per_task + image]
            pictures = [("truth", truth[image])]
            pictures += [(m, restored[(task.name, m)][image] if (task.name, m) in restored else None) for m in shown]
            for axis, (name, picture) in zip(row, pictures, strict=True):
                axis.set_xticks([])
                axis.set_yticks([])
                if picture is None:
                    axis.axis("off")
                    continue
                axis.imshow(picture[0], cmap="gray", vmin=-1, vmax=1)
                if index == 0 and image == 0:
                    axis.set_title(name.replace("MPC-Flow ", "MPC-Flow\n"), fontsize=8)
                if image == 0 and name != "truth":
                    axis.set_xlabel(f"mean {table[(task.name, name)]['psnr']:.1f} dB", fontsize=7, labelpad=1)
            if image == 0:
                row[0].set_ylabel(task.name, fontsize=8)
    figure.tight_layout(pad=0.3)
    return figure


def run_ablations(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """See `ablations_mpc_flow.py`."""
    from hf_pipelines.mpc_flow.ablations_mpc_flow import run_ablations as run_all

    return run_all(seed, device)


def run_performance(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Measure the spec's ratios of time and memory, each against its baseline in the same run.

    Args:
        seed (`int`, defaults to 0): Seed of noise and starting points.
        device (`str`, defaults to `"cpu"`): Where to run.

    Returns:
        [`BenchmarkResult`]: one row per setting, and the bars of the spec.
    """
    result = BenchmarkResult("mpc_flow", seed, False, repo=REPO, dataset="closedloop/digits")
    with measured(result, device):
        bench = Bench(seed, device)
        task = TASKS[3]
        solvers = {
            "plain sampling, 100 steps": PlainFlow(100),
            "K=1 prox, 100 steps": MPCFlow(100, {"solver": "prox"}, 100.0),
            "K=1 Adam, 100 steps": MPCFlow(100, {"solver": "adam"}, 100.0),
            "Δt, 25 steps": MPCFlow(25, {"mode": "dt"}, 100.0),
            "FlowGrad, 20 steps, 60 sweeps": FlowGrad(lam=100.0),
        }
        jobs = [lambda solver=solver: bench.restore(task, solver, 0, NUM_TEST) for solver in solvers.values()]
        seconds = dict(zip(solvers, least_cpu_seconds(*jobs), strict=True))
        plain, prox, adam, dt, flowgrad = seconds.values()
        for name, value in seconds.items():
            result.rows.append(Row(name, {"time / plain sampling": round(value / plain, 2)}, ours=name[0] in "KΔ"))

        base = SmallFlowPipeline.from_pretrained(hub.repo(BASE_REPO)).to(device)
        base.set_progress_bar_config(disable=True)
        pipe = MPCFlowPipeline(base)
        y = task.operator.measure(bench.test[:4].to(device), noise_std=task.noise_std)
        regimes = {"K=1": {}, "K=3": {"horizon_steps": 3}, "Δt": {"mode": "dt"}}
        growth = {}
        for name, settings in regimes.items():

            def sample(note, settings=settings):
                pipe(y, task.operator, num_inference_steps=20, callback_on_step_end=note, **settings)

            growth[name] = memory_growth(sample, device)
        for name, value in growth.items():
            result.rows.append(Row(f"{name}: memory after step 20 / after step 2", {"ratio": value}, ours=True))
    ratios = [[name, f"{value / plain:.1f}"] for name, value in seconds.items()]
    result.card_tables["performance"] = markdown_table(["setting", "CPU time / plain sampling"], ratios)
    result.bars = [
        Bar("K=1: time of prox / Adam", prox / adam, 0.4, at_least=False),
        Bar("Δt: time / FlowGrad's", dt / flowgrad, 0.6, at_least=False),
        Bar("K=1 prox: time / plain sampling", prox / plain, 1.5, at_least=False),
        Bar("memory growth from step 2 to the last, worst regime", max(growth.values()), 1.01, at_least=False),
    ]
    return result
