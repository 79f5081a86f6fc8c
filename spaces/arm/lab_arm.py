"""Recall at equal budget: what stands behind the first tab. No gradio in here."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_models  # noqa: F401  (puts the ARM classes behind the Auto classes)
from hf_models.arm.train_recall_arm import recall_accuracy
from hf_pipelines import hub
from hf_pipelines.arm import BudgetCache

SUBFOLDERS = {4: "slots-4", 8: "slots-8", 16: "", 32: "slots-32"}
TRAINED_WINDOW = 8  # of the shipped models, and the rotary distance at which they see their slots
SHORTEST = 48  # tokens of context; what the models were trained on
CHANCE = 1 / 8


@dataclass(frozen=True)
class Method:
    """One line of the plot.

    Args:
        label (`str`): What people read.
        colour (`str`): Of its line.
        style (`str`): Of its line.
    """

    label: str
    colour: str
    style: str = "-"


METHODS = {
    "arm": Method("ARM", "#4338ca"),
    "full": Method("full attention", "#7f7f7f", "--"),
    "h2o": Method("H2O", "#d97706"),
    "streaming_llm": Method("StreamingLLM", "#059669"),
    "swa": Method("sliding window", "#db2777"),
}


@functools.lru_cache(maxsize=32)
def arm_model(
    slots: int, window: int = TRAINED_WINDOW, policy: str = "adaptive", read_buckets: int = 4
) -> PreTrainedModel:
    """A shipped ARM model, with another window or read policy over the same weights."""
    return AutoModelForCausalLM.from_pretrained(
        hub.repo("arm-recall"),
        subfolder=SUBFOLDERS[slots],
        arm_window=window,
        arm_memory_distance=TRAINED_WINDOW,
        arm_read_policy=policy,
        arm_read_buckets=read_buckets,
    ).eval()


@functools.cache
def full_model(attention: str = "sdpa") -> PreTrainedModel:
    """The shipped full-attention model; `"budgeted"` reads a [`BudgetCache`]."""
    return AutoModelForCausalLM.from_pretrained(
        hub.repo("arm-recall"), subfolder="full-attention", attn_implementation=attention
    ).eval()


def lengths(longest: int) -> list[int]:
    """Context lengths of the plot: doubling from 48 up to `longest`."""
    points = [SHORTEST]
    while 2 * points[-1] < longest:
        points.append(2 * points[-1])
    if len(points) > 1 and longest < 1.3 * points[-1]:
        points.pop()  # too close to the last one
    return points if longest == SHORTEST else [*points, longest]


def budget_logits(policy: str, entries: int) -> Callable:
    """Logits of the full-attention model that keeps `entries` entries per head by a policy."""
    settings = {"h2o": {"recent": min(8, entries)}, "streaming_llm": {"sinks": min(4, entries - 1)}}.get(policy, {})
    model = full_model("budgeted")
    return lambda ids: model(ids, cache=BudgetCache(model.config, policy, budget=entries, **settings)).logits


def accuracies(
    model: PreTrainedModel, entries: int, contexts: list[int], facts: int, sequences: int, seed: int
) -> Iterator[tuple[str, int, float]]:
    """Facts recalled by every method at every context length, all on the same sequences.

    Args:
        model (`PreTrainedModel`): The ARM model.
        entries (`int`): Entries per head that every bounded method keeps.
        contexts (`list[int]`): Context lengths.
        facts (`int`): Facts in a sequence.
        sequences (`int`): Test sequences per length.
        seed (`int`): Their seed.

    Yields:
        Method, context length, accuracy.
    """
    for context in contexts:
        for name in METHODS:
            tested = model if name == "arm" else full_model()
            logits = None if name in ("arm", "full") else budget_logits(name, entries)
            yield name, context, recall_accuracy(tested, context, sequences, seed, logits=logits, num_facts=facts)


def draw(table: dict[str, dict[int, float]], entries: int, facts: int) -> Figure:
    """Accuracy against context length, one line a method."""
    figure = Figure(figsize=(9.0, 4.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for name, method in METHODS.items():
        points = table[name]
        label = f"{method.label}, {'unbounded' if name == 'full' else f'{entries} entries'}"
        width = 2.6 if name == "arm" else 1.6
        axes.plot(points.keys(), points.values(), method.style, color=method.colour, marker="o", lw=width, label=label)
    contexts = list(table["arm"])
    axes.axhline(CHANCE, color="black", linewidth=0.8, linestyle=":", label="chance, 1/8")
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.minorticks_off()
    axes.set(ylim=(0, 1.02), xlabel="context length, tokens (trained on 48)", ylabel="share of facts recalled")
    axes.set_title(f"{facts} facts among fillers, then one question about each", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0, frameon=False, fontsize=10)
    return figure
