"""A tiny Llama trained with several recipes at once: what stands behind the fourth tab. No gradio in here."""

import functools
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from figures_tetrajet_v2 import COLOURS, dress, new_figure
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_models  # noqa: F401  (puts the NVFP4 layers behind `from_pretrained`)
from datasets_scripts.tetrajet_corpora import load_corpus
from hf_models.tetrajet_v2 import OscillationWindow, OsciReset, OutControl, oscillation_report, prepare_model
from hf_models.tetrajet_v2.train_tetrajet_v2 import tiny_llama_config
from hf_pipelines import hub
from hf_pipelines.tetrajet_v2 import METHODS
from hf_pipelines.tetrajet_v2.experiments_tetrajet_v2 import make_config

RECIPES = tuple(name for name in METHODS if name != "base + strict_unbiased")
STARTS = {"scratch": "random weights", "shipped": "the shipped model"}
BATCH, BLOCK, HELD_OUT = 8, 64, 64  # sequences a step, characters of one, sequences evaluated
PERIOD = 20  # of OsciReset
WATCHED = 20  # steps of a window of the oscillation share
RECORDED = 10  # steps that OutControl records
SHOW_EVERY = 1.2  # seconds
LONGEST = 180.0  # seconds of a run
_making = threading.Lock()


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The shipped model's characters."""
    return AutoTokenizer.from_pretrained(hub.repo("tetrajet-v2-tiny-lm"))


@functools.cache
def shipped_model() -> PreTrainedModel:
    """The shipped model, with master weights. Copy it before you change it."""
    return AutoModelForCausalLM.from_pretrained(hub.repo("tetrajet-v2-tiny-lm")).eval()


@functools.cache
def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens to train on, `(n,)`, and held-out sequences, `(64, 64)`."""
    rows = load_corpus("pydoc", tokenizer(), BLOCK, "train", shuffle=False)
    held_out = load_corpus("pydoc", tokenizer(), BLOCK, "test")["input_ids"][:HELD_OUT]
    return rows["input_ids"][:].reshape(-1), held_out


def batch(seed: int, step: int) -> torch.Tensor:
    """Eight random sequences, by seed and step alone: all recipes read the same."""
    tokens, _ = texts()
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    starts = torch.randint(0, len(tokens) - BLOCK + 1, (BATCH, 1), generator=generator)
    return tokens[starts + torch.arange(BLOCK)]


@torch.no_grad()
def held_out_loss(model: PreTrainedModel) -> float:
    """Nats per character on the held-out sequences, with the model's own forward pass."""
    _, ids = texts()
    return float(model(ids, labels=ids).loss)


def plain_model(start: str, seed: int) -> PreTrainedModel:
    """The model before it is converted: random weights of a seed, or the master weights of the shipped one."""
    with _making, torch.random.fork_rng(devices=[]):  # the initialization draws from torch's one global generator
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_llama_config())
    if start == "shipped":
        weights = shipped_model().state_dict()
        model.load_state_dict({key: weights[key] for key in model.state_dict()})
    return model


@dataclass
class Run:
    """One recipe's model in training.

    Args:
        model (`PreTrainedModel`): The converted model.
        optimizer (`torch.optim.Optimizer`, *optional*): Its optimizer, until the training ends.
        control (`OutControl`): Its outlier channels.
        reset (`OsciReset`): Its oscillating weights.
        is_watched (`bool`): Whether it has 4-bit weights.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer | None
    control: OutControl
    reset: OsciReset
    is_watched: bool
    losses: list[float] = field(default_factory=list)
    shares: list[tuple[int, float]] = field(default_factory=list)  # step, share of weights with ρ ≥ 8
    distance_ratio: float | None = None
    held_out: float | None = None
    seconds: float = 0.0
    windows: list[OscillationWindow] = field(default_factory=list)


@dataclass
class Training:
    """One visitor's training: the same batches for every recipe.

    Args:
        runs (`dict[str, Run]`): Recipe → its run.
        steps (`int`): Steps to go.
        learning_rate (`float`): Peak of the schedule.
        seed (`int`): Seed of weights, batches and noise.
        start (`str`): A key of `STARTS`.
    """

    runs: dict[str, Run]
    steps: int
    learning_rate: float
    seed: int
    start: str
    done: int = 0
    out_of_time: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done and evaluated."""
        return self.done >= self.steps and all(run.held_out is not None for run in self.runs.values())


def begin(recipes: list[str], start: str, steps: int, learning_rate: float, seed: int) -> Training:
    """Make a model, an optimizer and the two engines for every recipe.

    Args:
        recipes (`list[str]`): Of `RECIPES`.
        start (`str`): A key of `STARTS`.
        steps (`int`): Optimizer steps.
        learning_rate (`float`): Peak learning rate.
        seed (`int`): Seed of everything.

    Returns:
        [`Training`].
    """
    record = {"record_start": 0, "record_steps": RECORDED}
    osci = {"start": steps // 3, "period": PERIOD, "window": PERIOD // 2, "threshold": 8.0}
    runs = {}
    for name in recipes:
        config = make_config(METHODS[name], seed, record, osci)
        model = prepare_model(plain_model(start, seed), config).train()
        optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        control, reset = OutControl(model, config), OsciReset(model, config, steps)
        # OutControl regroups the columns at the end of its recording; its windows open then
        windows = [] if config.out_control.enabled or not config.is_on("Q2") else [OscillationWindow(model)]
        runs[name] = Run(model, optimizer, control, reset, config.is_on("Q2"), windows=windows)
    return Training(runs, steps, learning_rate, seed, start)


def rate(training: Training) -> float:
    """Learning rate of the coming step: a third of the steps (20 at most) of warm-up, then a cosine down to 5 %."""
    warmup = min(20, training.steps // 3)
    progress = max(0, training.done - warmup) / max(1, training.steps - warmup)
    share = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
    return training.learning_rate * min(1.0, (training.done + 1) / warmup) * share


def step(training: Training, run: Run) -> None:
    """One optimizer step of one recipe."""
    started = time.perf_counter()
    i, ids = training.done, batch(training.seed, training.done)
    run.optimizer.param_groups[0]["lr"] = rate(training)
    run.control.begin(i)
    run.optimizer.zero_grad()
    loss = run.model(ids, labels=ids).loss
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ValueError(f"The loss became {value} at step {i + 1}: take a smaller learning rate.")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.control.step(i)
    run.reset.step(i)
    run.losses.append(value)
    run.seconds += time.perf_counter() - started
    if run.is_watched:
        _watch(run, i)


def _watch(run: Run, i: int) -> None:
    """Share of oscillating weights over the last 20 steps, every 10 steps: two windows run at a time."""
    for window in run.windows:
        window.update()
    if run.windows and run.windows[0].steps == WATCHED:
        report = oscillation_report(run.model, run.windows.pop(0))
        run.shares.append((i + 1, report["share"]))
        run.distance_ratio = report["distance_ratio"]
    if (i + 1) % (WATCHED // 2) == 0:
        run.windows.append(OscillationWindow(run.model))


def train(training: Training) -> Iterator[None]:
    """Train all recipes side by side, then evaluate them.

    Args:
        training ([`Training`]): Changed in place; a stopped one keeps its models.

    Yields:
        `None`, at the start, about once a second and at the end.

    Raises:
        ValueError: A loss is not finite any more.
    """
    started = shown = time.monotonic()
    try:
        yield
        while training.done < training.steps and not training.out_of_time:
            for run in training.runs.values():
                step(training, run)
                if time.monotonic() - shown > 3 * SHOW_EVERY:  # a slow machine must not look dead
                    shown = time.monotonic()
                    yield
            training.done += 1
            training.out_of_time = time.monotonic() - started > LONGEST
            if training.done == 1 or time.monotonic() - shown > SHOW_EVERY:
                shown = time.monotonic()
                yield
        for run in training.runs.values():
            run.held_out = held_out_loss(run.model.eval())
        yield
    finally:  # stopped or done: models stay, their optimizers need not
        for run in training.runs.values():
            run.optimizer, run.windows = None, []
            run.model.eval()


def rows(training: Training) -> list[list[str]]:
    """Per recipe: mean loss of the last steps, held-out loss, its distance to bf16, oscillation, resets, seconds."""
    reference = training.runs["bf16"].held_out if "bf16" in training.runs else None
    table = []
    for name, run in training.runs.items():
        recent = run.losses[-10:]
        gap = "–" if None in (run.held_out, reference) or name == "bf16" else f"{run.held_out - reference:+.3f}"
        table.append(
            [
                name,
                f"{sum(recent) / len(recent):.3f}" if recent else "–",
                "–" if run.held_out is None else f"{run.held_out:.3f}",
                gap,
                f"{100 * run.shares[-1][1]:.1f} %" if run.shares else "–",
                "–" if run.distance_ratio is None else f"{run.distance_ratio:.2f}",
                f"{run.reset.num_resets:,}" if run.reset.config.enabled else "–",
                f"{1000 * run.seconds / max(1, len(run.losses)):.0f}",
            ]
        )
    return table


def draw(training: Training) -> Figure:
    """Training loss, raw and smoothed, above the share of oscillating weights."""
    figure = new_figure(10, 6.0)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    for name, run in training.runs.items():
        colour, times = COLOURS[name], range(1, len(run.losses) + 1)
        top.plot(times, run.losses, color=colour, linewidth=0.8, alpha=0.35)
        top.plot(times, smooth(run.losses), color=colour, linewidth=2.0, label=name)
        if run.shares:
            steps, shares = zip(*run.shares, strict=True)
            bottom.plot(steps, [100 * share for share in shares], "o-", color=colour, markersize=4, clip_on=False)
    if any(run.reset.config.enabled for run in training.runs.values()):
        start = next(run.reset.start for run in training.runs.values())
        first = -(-start // PERIOD) * PERIOD
        bottom.axvline(first, color=COLOURS["bf16"], linewidth=1, linestyle=":")
    bottom.set_ylim(bottom=0)
    top.set_xlim(0, training.steps)
    top.xaxis.set_major_locator(MaxNLocator(integer=True))
    dress(top, "training loss, nats per character (thin: each step; thick: smoothed)")
    dress(bottom, f"% of 4-bit weights with ρ ≥ 8 over {WATCHED} steps; dotted: OsciReset starts", x="step")
    return figure


def smooth(values: list[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average without the pull of its start."""
    mean, mass, out = 0.0, 0.0, []
    for value in values:
        mean, mass = weight * mean + (1 - weight) * value, weight * mass + (1 - weight)
        out.append(mean / mass)
    return out


def models(training: Training | None) -> dict[str, Any]:
    """Recipe → model of a training that has begun."""
    return {} if training is None else {name: run.model for name, run in training.runs.items() if run.losses}
