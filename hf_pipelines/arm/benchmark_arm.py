"""Attention with Routed Memory against its baselines at an equal number of cache entries per head.

Associative recall: facts among fillers, then questions about them; chance is 1/8. Every bounded method may keep 24
entries per kv head: ARM 16 slots and a window of 8, a sliding window 24, StreamingLLM 4 sinks and 20, H2O 24 of which
the 8 most recent are protected, TOVA 24. Models train on contexts of 48 tokens and are tested at 48 and 240.
"""

from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from datasets_scripts.recall_tasks import (
    FILLER_OFFSET,
    GET_OFFSET,
    associative_recall,
    associative_recall_overwrite,
    persistence,
)
from hf_models.arm.train_recall_arm import RECALL_MEMORY, recall_accuracy, recall_model, train_recall, window_mask
from hf_pipelines import hub
from hf_pipelines.arm.baselines_arm import BudgetCache
from hf_pipelines.arm.dense_slots_arm import dense_slot_model
from hf_pipelines.arm.performance_arm import run_performance
from hf_pipelines.benchmark import Bar, BenchmarkResult, Comparison, Row, markdown_table, measured

REPO = "arm-recall"
BUDGET = 24
STEPS = 800
LENGTHS = (48, 240)
ADAPTIVE = {"arm_read_policy": "adaptive", "arm_read_coef": 0.2}
ABLATIONS = {
    "γ ≡ 1 (hard FIFO)": {"arm_gate": False},
    "slot prior 0": {"arm_slot_prior": 0.0},
    "one bucket of 16": {"arm_branching": 1, "arm_slots_per_bucket": 16},
    "16 buckets of one slot": {"arm_branching": 16, "arm_slots_per_bucket": 1},
    "2 levels, 16 buckets of one slot": {"arm_levels": 2, "arm_slots_per_bucket": 1},
    "balance 0.02": {"arm_balance_coef": 0.02},
    "balance 0": {"arm_balance_coef": 0.0},
    "no debias": {"arm_debias": False},
    "write threshold 0": {"arm_write_threshold": 0.0},
    "reads the best bucket only": {"arm_read_policy": "fixed", "arm_read_buckets": 1},
    "reads half of the buckets": {"arm_read_policy": "fixed", "arm_read_buckets": 2},
    "4 sinks": {"arm_sinks": 4},
    "window 1": {"arm_window": 1},
}

Logits = Callable[[torch.Tensor], torch.Tensor]


def train_memory(seed: int, steps: int = STEPS, **fields: object) -> PreTrainedModel:
    """An ARM recall model."""
    return train_recall(recall_model(seed, RECALL_MEMORY | fields), steps, seed, progress=False)


def train_full(seed: int, mask: torch.Tensor | None = None, steps: int = STEPS) -> PreTrainedModel:
    """A recall model with full attention, or under a mask for the 64 columns of its training sequences."""
    return train_recall(recall_model(seed), steps, seed, mask=mask, progress=False)


def masked_logits(model: PreTrainedModel, window: int, sinks: int) -> Logits:
    """Logits of a full-attention model under a window."""
    return lambda ids: model(ids, attention_mask=window_mask(ids.shape[1], window, sinks), use_cache=False).logits


def budget_logits(model: PreTrainedModel, policy: str, **settings: object) -> Logits:
    """Logits of a full-attention model that keeps 24 entries by a policy."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        before = model.config._attn_implementation
        model.set_attn_implementation("budgeted")
        try:
            return model(ids, cache=BudgetCache(model.config, policy, budget=BUDGET, **settings)).logits
        finally:
            model.set_attn_implementation(before)

    return logits


def accuracies(model: PreTrainedModel, logits: Logits | None = None, num_sequences: int = 256) -> dict[str, float]:
    """Accuracy at the length of training and at five times that."""
    return {f"T = {length}": recall_accuracy(model, length, num_sequences, logits=logits) for length in LENGTHS}


@torch.no_grad()
def reads_by_kind(model: PreTrainedModel, seed: int = 999) -> dict[str, float]:
    """Mean number of buckets read per token, for facts, questions and fillers."""
    ids, _ = associative_recall(128, 48, 8, generator=torch.Generator().manual_seed(seed))
    read = model(ids, use_cache=False).read_buckets
    kinds = {
        "SET": ids < GET_OFFSET,
        "GET": (ids >= GET_OFFSET) & (ids < GET_OFFSET + 16),
        "filler": ids >= FILLER_OFFSET,
    }
    return {f"{name} reads": float(read[mask].mean()) for name, mask in kinds.items()}


def keeps(model: PreTrainedModel, fillers: int) -> float:
    """Accuracy after one fact and `fillers` fillers."""
    return recall_accuracy(model, fillers, num_sequences=64, task=persistence)


def run(quick: bool = False, seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Compare methods on associative recall.

    Args:
        quick (`bool`, defaults to `False`): The shipped models, without training: what `closedloop demo` shows.
        seed (`int`, defaults to 0): The full run trains with this seed and the two after it.
        device (`str`, defaults to `"cpu"`): Where to run.

    Returns:
        [`BenchmarkResult`]: accuracies as means over three seeds, the policy's reads, persistence, the spec's bars.
    """
    result = BenchmarkResult("arm", seed, quick, repo=REPO, dataset="closedloop/recall_tasks")
    with measured(result, device):
        if quick:
            _run_quick(result)
        else:
            _run_full(result, seed)
    return result


def _run_quick(result: BenchmarkResult) -> None:
    repo = hub.repo(REPO)
    model = AutoModelForCausalLM.from_pretrained(repo).eval()
    full = AutoModelForCausalLM.from_pretrained(repo, subfolder="full-attention").eval()
    methods = {
        "ARM": (model, None),
        "full attention (unbounded)": (full, None),
        "StreamingLLM": (full, masked_logits(full, BUDGET - 4, 4)),
        "H2O": (full, budget_logits(full, "h2o", recent=8)),
    }
    table = {name: accuracies(model, logits, 64) for name, (model, logits) in methods.items()}
    result.rows = [Row(name, metrics, ours=name == "ARM") for name, metrics in table.items()]
    ours = table["ARM"]
    result.comparisons = [
        Comparison(name, "facts recalled at T = 240, 24 entries", ours["T = 240"], table[name]["T = 240"])
        for name in ("StreamingLLM", "H2O", "full attention (unbounded)")
    ]
    result.figures["recall"] = draw_recall({"ARM": [ours], **{n: [table[n]] for n in table if n != "ARM"}})


def _run_full(result: BenchmarkResult, seed: int) -> None:
    seeds = (seed, seed + 1, seed + 2)
    length = LENGTHS[0] + 16
    runs: dict[str, list[dict[str, float]]] = {}
    bar = tqdm(total=3 * 10 + 4, desc="arm")

    def add(name: str, metrics: dict[str, float]) -> None:
        runs.setdefault(name, []).append(metrics)
        bar.update()

    for s in seeds:
        model = train_memory(s)
        add("ARM", accuracies(model))
        full = train_full(s)
        add("full attention (unbounded)", accuracies(full))
        add("H2O on full attention", accuracies(full, budget_logits(full, "h2o", recent=8)))
        add("TOVA on full attention", accuracies(full, budget_logits(full, "tova")))
        for name, window, sinks in (("sliding window", BUDGET, 0), ("StreamingLLM", BUDGET - 4, 4)):
            trained = train_full(s, window_mask(length, window, sinks))
            add(f"{name}, trained", accuracies(trained, masked_logits(trained, window, sinks)))
        adaptive = train_memory(s, **ADAPTIVE)
        add("ARM adaptive", accuracies(adaptive) | reads_by_kind(adaptive))
        kept = {f"{n} fillers": keeps(adaptive, n) for n in (40, 400, 4000)}
        add("persistence", kept)
    for kind in ("abc", "gsa"):
        for s in seeds:
            dense = dense_slot_model(recall_model(s, RECALL_MEMORY), kind)
            add(f"{kind.upper()} writes", accuracies(train_recall(dense, STEPS, s, progress=False)))
    hard = accuracies(train_memory(seed, **ABLATIONS["γ ≡ 1 (hard FIFO)"]))
    add("γ ≡ 1 (hard FIFO)", hard)
    overwrite = {}
    for name, make in (
        ("ARM", lambda: recall_model(seed, RECALL_MEMORY)),
        ("ABC writes", lambda: dense_slot_model(recall_model(seed, RECALL_MEMORY), "abc")),
        ("GSA writes", lambda: dense_slot_model(recall_model(seed, RECALL_MEMORY), "gsa")),
    ):
        task = associative_recall_overwrite
        model = train_recall(make(), STEPS, seed, task=task, progress=False)
        overwrite[name] = {f"T = {n}": recall_accuracy(model, n, task=task) for n in LENGTHS}
        bar.update()
    bar.close()

    means = {name: _mean(metrics) for name, metrics in runs.items()}
    result.rows = [Row(name, metrics, ours=name.startswith("ARM")) for name, metrics in means.items()]
    result.rows += [Row(f"overwrite / {name}", m, ours=name == "ARM") for name, m in overwrite.items()]
    ours, adaptive, kept = means["ARM"], means["ARM adaptive"], means["persistence"]
    bounded = [
        name for name in means if name not in ("ARM", "ARM adaptive", "persistence", "full attention (unbounded)")
    ]
    rivals = [name for name in bounded if "writes" not in name and "FIFO" not in name]
    best = {key: max(means[name][key] for name in rivals) for key in ours}
    first = runs["ARM"][0]
    result.bars = [
        Bar("accuracy at T = 48", ours["T = 48"], 0.70),
        Bar("accuracy at T = 240", ours["T = 240"], 0.70),
        Bar("above the best bounded baseline at T = 48", ours["T = 48"] - best["T = 48"], 0.20),
        Bar("above the best bounded baseline at T = 240", ours["T = 240"] - best["T = 240"], 0.45),
        Bar("lost from T = 48 to T = 240", ours["T = 48"] - ours["T = 240"], 0.10, at_least=False),
        Bar("γ ≡ 1 below ARM at T = 48, same seed", first["T = 48"] - hard["T = 48"], 0.25),
        Bar("adaptive: buckets read by a filler", adaptive["filler reads"], 0.5, at_least=False),
        Bar("adaptive: reads of a GET above a filler's", adaptive["GET reads"] - adaptive["filler reads"], 1.0),
        Bar("adaptive: accuracy over read-all", adaptive["T = 48"] / ours["T = 48"], 0.8),
        Bar("adaptive: lost from 400 to 4,000 fillers", kept["400 fillers"] - kept["4000 fillers"], 0.05, False),
    ]
    table = [name for name in means if name != "persistence"]
    result.card_tables["recall"] = markdown_table(
        ["method, 24 entries per head", *(f"T = {n} (each seed)" for n in LENGTHS)],
        [[name, *(_with_seeds(means[name], runs[name], f"T = {n}") for n in LENGTHS)] for name in table],
    )
    result.card_tables["overwrite"] = markdown_table(
        ["facts that change, seed " + str(seed), *overwrite],
        [[f"T = {n}", *(f"{m[f'T = {n}']:.2f}" for m in overwrite.values())] for n in LENGTHS],
    )
    result.card_tables["policy"] = markdown_table(
        ["buckets read of 4", *(name.removesuffix(" reads") for name in adaptive if "reads" in name)],
        [["adaptive", *(f"{adaptive[name]:.2f}" for name in adaptive if "reads" in name)]],
    )
    result.card_tables["persistence"] = markdown_table(
        ["fillers after the fact", *(name.split()[0] for name in kept)],
        [["accuracy", *(f"{value:.2f}" for value in kept.values())]],
    )
    columns = {
        "ARM": "ARM",
        "H2O": "H2O on full attention",
        "StreamingLLM": "StreamingLLM, trained",
        "ABC": "ABC writes",
        "full attention (unbounded)": "full attention (unbounded)",
    }
    rows = [
        [f"facts recalled, context of {n}", *(f"{means[name][f'T = {n}']:.2f}" for name in columns.values())]
        for n in LENGTHS
    ]
    result.card_tables["summary arm"] = markdown_table(["24 entries per head", *columns], rows)
    result.figures["recall"] = draw_recall({name: runs[name] for name in table if "ARM adaptive" not in name})


def _mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}


def _with_seeds(mean: dict[str, float], runs: list[dict[str, float]], key: str) -> str:
    seeds = " / ".join(f"{run[key]:.2f}" for run in runs)
    return f"{mean[key]:.2f} ({seeds})" if len(runs) > 1 else f"{mean[key]:.2f}"


def draw_recall(runs: dict[str, list[dict[str, float]]]) -> Figure:
    """Accuracy of every method at both lengths, the seeds as points."""
    figure = Figure(figsize=(7.5, 0.42 * len(runs) + 1.2))
    axis = figure.subplots()
    names = list(runs)[::-1]
    for offset, length, color in ((0.2, LENGTHS[0], "tab:blue"), (-0.2, LENGTHS[1], "tab:orange")):
        for row, name in enumerate(names):
            values = [run[f"T = {length}"] for run in runs[name]]
            label = f"context of {length} tokens" if row == 0 else None
            axis.barh(row + offset, sum(values) / len(values), height=0.36, color=color, alpha=0.6, label=label)
            axis.plot(values, [row + offset] * len(values), ".", color="black", markersize=4)
    axis.axvline(1 / 8, color="gray", linestyle=":", label="chance")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlim(0, 1)
    axis.set_xlabel("facts recalled")
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    return figure


def run_ablations(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Switch one choice of the method at a time, 400 steps each.

    Args:
        seed (`int`, defaults to 0): Seed of weights, data and noise.
        device (`str`, defaults to `"cpu"`): Where to run.

    Returns:
        [`BenchmarkResult`]: accuracies per variant.
    """
    result = BenchmarkResult("arm", seed, False, repo=REPO, dataset="closedloop/recall_tasks")
    with measured(result, device):
        for name, fields in tqdm({"ARM, 400 steps": {}, **ABLATIONS}.items(), desc="arm ablations"):
            metrics = accuracies(train_memory(seed, 400, **fields))
            result.rows.append(Row(name, metrics, ours=name.startswith("ARM")))
    rows = [[row.name, *(f"{value:.2f}" for value in row.metrics.values())] for row in result.rows]
    result.card_tables["ablations"] = markdown_table(["variant, 400 steps", *(f"T = {n}" for n in LENGTHS)], rows)
    return result


__all__ = ["run", "run_ablations", "run_performance"]
