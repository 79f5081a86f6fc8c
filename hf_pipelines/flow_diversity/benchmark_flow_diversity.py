"""Flow diversity against its baselines at equal numbers of network evaluations, in three experiments.

A. An exact mixture of eight Gaussians in 16 dimensions, features the identity: how many modes does a set reach?
B. Class-conditional 8×8 digits with guidance 3: how different are eight images of one class?
C. Unconditional digits: how many classes does a set of ten show?

In B and C a small classifier guides and another one, of other architecture and seed, scores.
"""

import time

import torch
from diffusers.guiders.adaptive_projected_guidance import normalized_guidance
from matplotlib.figure import Figure
from sklearn.cluster import KMeans
from tqdm.auto import tqdm

from datasets_scripts import load_digit_tensors
from hf_models.flow_diversity.train_flow_diversity import parse_args, train_digit_encoder
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
from hf_pipelines.flow_control.controller_flow import run_controller
from hf_pipelines.flow_control.metrics import (
    cluster_coverage,
    frechet_distance,
    precision_recall_density_coverage,
    vendi_score,
)
from hf_pipelines.flow_diversity.baselines_flow_diversity import DPPGuidance, ParticleGuidance, PlainODE, SDENoise
from hf_pipelines.flow_diversity.controller_flow_diversity import FlowDiversityController
from hf_pipelines.flow_diversity.mixture_flow_diversity import (
    MARGINAL_METHODS,
    MIXTURE_METHODS,
    SIGMAS,
    Make,
    run_marginal,
    run_mixture,
)
from hf_pipelines.flow_diversity.pipeline_flow_diversity import FlowDiversityPipeline

REPO = "flow-diversity-digits-8x8"


DIGIT_METHODS: dict[str, Make] = {
    "ODE": lambda encoder, **common: PlainODE(encoder=encoder, **common),
    "SDE β .3": lambda encoder, **common: SDENoise(0.3, True, feature_space="latent", **common),
    "Particle Guidance γ 3": lambda encoder, **common: ParticleGuidance(encoder, 3.0, **common),
    "DPP γ 1": lambda encoder, **common: DPPGuidance(encoder, 1.0, **common),
    "DPP γ 3": lambda encoder, **common: DPPGuidance(encoder, 3.0, **common),
    "APG": lambda encoder, **common: PlainODE(encoder=encoder, **common),
    "ours": lambda encoder, **common: FlowDiversityController(encoder, beta0=0.0, **common),
    "ours + noise": lambda encoder, **common: FlowDiversityController(encoder, **common),
    "wrong sign": lambda encoder, **common: FlowDiversityController(
        encoder, gamma0=-4.0, tau=100.0, center=False, beta0=0.0, **common
    ),
}


class DigitBench:
    """Prior, guiding encoder, scoring encoder and real features of experiments B and C.

    Args:
        device (`str`): Where to run.
    """

    def __init__(self, device: str):
        self.pipe = FlowDiversityPipeline.from_pretrained(hub.repo(REPO)).to(device)
        self.model = self.pipe.base.model.eval().requires_grad_(False)
        self.guide = self.pipe.feature_encoder.eval().requires_grad_(False)
        arguments = parse_args(["--output_dir", ".", "--seed", "1", "--convolutional"])
        with torch.random.fork_rng():
            self.scorer, self.accuracy = train_digit_encoder(arguments)
        self.scorer = self.scorer.to(device).eval()
        images, self.labels = load_digit_tensors(8, "train")
        self.device = device
        self.real, _ = self.score(images.to(device))
        self.clusters = [
            KMeans(8, n_init=4, random_state=0).fit(self.real[self.labels == label].numpy()) for label in range(10)
        ]

    def score(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and predicted classes by the scoring classifier, on the CPU."""
        with torch.no_grad():
            features, logits = self.scorer.vision_tower(images)
        return features.cpu(), logits.argmax(1).cpu()

    def sample(
        self, make: Make, labels: torch.Tensor | None, count: int, size: int, seed: int, apg: bool = False
    ) -> torch.Tensor:
        """Images (count, 1, 8, 8), clamped, in sets of `size`; with labels, guidance 3, which `apg` projects."""
        x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).to(self.device)
        null = torch.full((count,), 10, device=self.device)

        def velocity(x, sigma):
            unconditional = self.model(x, sigma, null).sample
            if labels is None:
                return unconditional
            conditional = self.model(x, sigma, labels).sample
            if apg:  # its authors' choice: nothing along the conditional prediction, a bounded update
                return normalized_guidance(conditional, unconditional, 3.0, eta=0.0, norm_threshold=15.0)
            return unconditional + 3.0 * (conditional - unconditional)

        controller = make(encoder=self.guide, group_size=size, chunk=count)
        generator = torch.Generator().manual_seed(seed + 1)
        return run_controller(velocity, controller, x, SIGMAS, generator=generator).clamp(-1, 1)

    def conditional(self, name: str, seed: int, repeats: int) -> tuple[dict[str, float], torch.Tensor]:
        """Experiment B for one method, means over classes and repeats, and the images."""
        labels = torch.arange(10).repeat_interleave(8).repeat(repeats)
        start = time.process_time()
        make = DIGIT_METHODS[name]
        images = self.sample(make, labels.to(self.device), len(labels), 8, seed, apg=name == "APG")
        seconds = time.process_time() - start
        features, predicted = self.score(images)
        sets = list(zip(features.split(8), labels[::8].tolist(), strict=True))
        coverage = [cluster_coverage(rows, self.clusters[label]) for rows, label in sets]
        return {
            "Vendi": sum(vendi_score(rows) for rows, _ in sets) / len(sets),
            "clusters of 8": sum(c["clusters"] for c in coverage) / len(sets),
            "entropy": sum(c["entropy"] for c in coverage) / len(sets),
            "align": float((predicted == labels).float().mean()),
            "precision": precision_recall_density_coverage(features, self.real)["precision"],
            "FD": frechet_distance(features, self.real),
            "CPU s": round(seconds, 2),
        }, images.cpu()

    def unconditional(self, make: Make, seed: int, num_sets: int) -> dict[str, float]:
        """Experiment C for one method."""
        images = self.sample(make, None, 10 * num_sets, 10, seed)
        features, predicted = self.score(images)
        classes = torch.tensor([len(set(rows.tolist())) for rows in predicted.split(10)]).float()
        return {
            "classes of 10": float(classes.mean()),
            "s.e.": float(classes.std() / num_sets**0.5),
            "precision": precision_recall_density_coverage(features, self.real)["precision"],
            "FD": frechet_distance(features, self.real),
        }


def run(quick: bool = False, seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Run the three experiments.

    Args:
        quick (`bool`, defaults to `False`): A few methods on fewer sets: what `closedloop demo` shows.
        seed (`int`, defaults to 0): Seed of starting points and noise.
        device (`str`, defaults to `"cpu"`): Where the digits are sampled.

    Returns:
        [`BenchmarkResult`]: rows "A / method", "B / method" and "C / method", the spec's bars, figures.
    """
    result = BenchmarkResult("flow_diversity", seed, quick, repo=REPO, dataset="closedloop/digits")
    mixture_methods = ["ODE", "DPP γ 1", "ours τ 10"] if quick else list(MIXTURE_METHODS)
    digit_methods = ["ODE", "DPP γ 1", "ours"] if quick else list(DIGIT_METHODS)
    tables: dict[str, dict[str, dict[str, float]]] = {"A": {}, "B": {}, "C": {}, "marginal": {}}
    with measured(result, device):
        bench = DigitBench(device)
        pictures = {}
        bar = tqdm(total=len(mixture_methods) + 2 * len(digit_methods), desc="flow_diversity")
        for name in mixture_methods:
            tables["A"][name] = run_mixture(MIXTURE_METHODS[name], seed, 40 if quick else 120)
            bar.update()
        for name in digit_methods:
            tables["B"][name], pictures[name] = bench.conditional(name, seed, 1 if quick else 12)
            if name != "APG":  # a rule for guidance, and C has none
                tables["C"][name] = bench.unconditional(DIGIT_METHODS[name], seed, 10 if quick else 30)
            bar.update(2)
        bar.close()
        for name in () if quick else MARGINAL_METHODS:
            tables["marginal"][name] = run_marginal(MARGINAL_METHODS[name], seed)
        result.figures["digits"] = draw(pictures)
        result.figures["tradeoff"] = draw_tradeoff(bench, seed, 4 if quick else 40)
    for experiment, table in tables.items():
        for name, metrics in table.items():
            result.rows.append(Row(f"{experiment} / {name}", metrics, ours=name.startswith(("ours", "spread"))))
        if table:
            result.card_tables[experiment] = card_table(table)
    best = "ours τ 10"
    result.comparisons = [
        Comparison("ODE", "modes of 8, mixture", tables["A"][best]["modes of 8"], tables["A"]["ODE"]["modes of 8"]),
        Comparison(
            "DPP", "modes of 8, mixture", tables["A"][best]["modes of 8"], tables["A"]["DPP γ 1"]["modes of 8"]
        ),
        Comparison("ODE", "entropy, digits of a class", tables["B"]["ours"]["entropy"], tables["B"]["ODE"]["entropy"]),
        Comparison(
            "DPP",
            "classes of 10, digits",
            tables["C"]["ours"]["classes of 10"],
            tables["C"]["DPP γ 1"]["classes of 10"],
        ),
    ]
    if not quick:
        result.bars = check_claims(tables)
        result.card_tables["summary flow_diversity"] = summary_table(tables)
    return result


def check_claims(tables: dict[str, dict[str, dict[str, float]]]) -> list[Bar]:
    """The bars of the acceptance section."""
    a, b, c, marginal = tables["A"], tables["B"], tables["C"], tables["marginal"]
    residual = marginal["spread"]["largest ⟨u, b⟩/‖u‖‖b‖"]
    return [
        Bar("largest component of the control along the flow", residual, 1e-5, at_least=False),
        Bar("A, τ 1: modes of 8", a["ours τ 1"]["modes of 8"], 6.5),
        Bar("A, τ 1: share in a mode", a["ours τ 1"]["in mode"], 0.98),
        Bar("A, τ 10: modes of 8", a["ours τ 10"]["modes of 8"], 7.2),
        Bar(
            "A, wrong sign: modes below the ODE's", a["wrong sign γ₀ −3"]["modes of 8"], a["ODE"]["modes of 8"], False
        ),
        Bar("B: entropy above the ODE's", b["ours"]["entropy"] - b["ODE"]["entropy"], 0.05),
        Bar("B: agreement with the class", b["ours"]["align"], 0.99),
        Bar("B: precision", b["ours"]["precision"], 0.97),
        Bar("C: classes above the ODE's", c["ours"]["classes of 10"] - c["ODE"]["classes of 10"], 0.9),
        Bar("C: precision lost", c["ODE"]["precision"] - c["ours"]["precision"], 0.06, at_least=False),
    ]


def summary_table(tables: dict[str, dict[str, dict[str, float]]]) -> str:
    """Diversity and fidelity of the three experiments for ours, plain sampling and DPP."""
    rows = []
    for title, experiment, diversity, fidelity, name in (
        ("modes of 8, mixture (share in a mode)", "A", "modes of 8", "in mode", "ours τ 10"),
        ("entropy of 8 digits of a class (precision)", "B", "entropy", "precision", "ours"),
        ("classes in 10 digits (precision)", "C", "classes of 10", "precision", "ours"),
    ):
        values = [tables[experiment][method] for method in (name, "ODE", "DPP γ 1")]
        rows.append([title, *(f"{value[diversity]:.2f} ({value[fidelity]:.2f})" for value in values)])
    return markdown_table(["diversity (fidelity)", "ours", "plain flow", "DPP γ 1"], rows)


def card_table(table: dict[str, dict[str, float]]) -> str:
    """One experiment in Markdown."""
    columns = list(next(iter(table.values())))
    rows = [[name, *(f"{metrics[column]:.3g}" for column in columns)] for name, metrics in table.items()]
    return markdown_table(["method", *columns], rows)


def draw(pictures: dict[str, torch.Tensor], classes: tuple[int, ...] = (1, 3, 4, 7)) -> Figure:
    """Sets of eight of some classes, plain beside controlled, from the same starting noise."""
    shown = [name for name in ("ODE", "ours") if name in pictures]
    figure = Figure(figsize=(5.2 * len(shown), 0.62 * len(classes) + 0.5))
    for name, part in zip(shown, figure.subfigures(1, len(shown), wspace=0.04), strict=True):
        part.suptitle(name, fontsize=11)
        grid = part.subplots(len(classes), 8, gridspec_kw={"wspace": 0.05, "hspace": 0.05})
        for axes, label in zip(grid, classes, strict=True):
            for index, axis in enumerate(axes):
                axis.imshow(pictures[name][8 * label + index, 0], cmap="gray", vmin=-1, vmax=1)
                axis.axis("off")
    return figure


def draw_tradeoff(bench: DigitBench, seed: int, num_sets: int) -> Figure:
    """Classes reached against precision in experiment C, each method over its strength."""
    curves: dict[str, list[Make]] = {
        "ours": [
            lambda encoder, g=g, **common: FlowDiversityController(encoder, gamma0=g, beta0=0.0, **common)
            for g in (1.0, 2.0, 4.0, 8.0)
        ],
        "DPP": [lambda encoder, g=g, **common: DPPGuidance(encoder, g, **common) for g in (0.5, 1.0, 2.0, 3.0)],
        "Particle Guidance": [
            lambda encoder, g=g, **common: ParticleGuidance(encoder, g, **common) for g in (0.5, 1.0, 3.0)
        ],
        "SDE": [
            lambda encoder, b=b, **common: SDENoise(b, True, feature_space="latent", **common) for b in (0.1, 0.3, 1.0)
        ],
    }
    figure = Figure(figsize=(5.5, 4))
    axis = figure.subplots()
    plain = bench.unconditional(DIGIT_METHODS["ODE"], seed, num_sets)
    axis.plot(plain["precision"], plain["classes of 10"], "k*", markersize=12, label="ODE")
    for name, makes in curves.items():
        points = [bench.unconditional(make, seed, num_sets) for make in makes]
        axis.plot([p["precision"] for p in points], [p["classes of 10"] for p in points], "o-", label=name)
    axis.set_xlabel("precision (quality)")
    axis.set_ylabel("classes in a set of 10 (diversity)")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def run_performance(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Measure what the control costs on the digits, as ratios to plain sampling in the same run.

    Args:
        seed (`int`, defaults to 0): Seed of the starting points.
        device (`str`, defaults to `"cpu"`): Where to run.

    Returns:
        [`BenchmarkResult`]: time and memory ratios, and the spec's bars.
    """
    result = BenchmarkResult("flow_diversity", seed, False, repo=REPO, dataset="closedloop/digits")
    with measured(result, device):
        pipe = FlowDiversityPipeline.from_pretrained(hub.repo(REPO)).to(device)
        pipe.set_progress_bar_config(disable=True)

        def sample(diversity, callback=None):
            generator = torch.Generator().manual_seed(seed)
            arguments = {"class_labels": [3] * 8, "guidance_scale": 3.0, "output_type": "latent"}
            pipe(diversity=diversity, generator=generator, callback_on_step_end=callback, **arguments)

        settings = {"plain": False, "spread": {"beta0": 0.0}, "spread + noise": {}, "spread, chunk 1": {"chunk": 1}}
        jobs = [lambda setting=setting: sample(setting) for setting in settings.values()]
        seconds = dict(zip(settings, least_cpu_seconds(*jobs, repeats=7), strict=True))
        growth = memory_growth(lambda note: sample({}, note), device)
        features = torch.randn(64, 512, generator=torch.Generator().manual_seed(seed))
        controller = FlowDiversityController(lambda images: images)
        algebra = least_cpu_seconds(lambda: controller._feature_gradient(features), repeats=20)[0]
        for name, value in seconds.items():
            result.rows.append(Row(name, {"time / plain": round(value / seconds["plain"], 2)}, ours=name != "plain"))
        result.rows.append(Row("algebra of m = 64, q = 512", {"ms": round(1000 * algebra, 2)}, ours=True))
        result.rows.append(Row("memory after the last step / after the second", {"ratio": growth}, ours=True))
    ratios = [[name, f"{value / seconds['plain']:.2f}"] for name, value in seconds.items()]
    result.card_tables["performance"] = markdown_table(["setting", "CPU time / plain sampling"], ratios)
    result.bars = [
        Bar("spread: time / plain sampling", seconds["spread"] / seconds["plain"], 1.6, at_least=False),
        Bar("memory growth from step 2 to the last", growth, 1.01, at_least=False),
    ]
    return result
