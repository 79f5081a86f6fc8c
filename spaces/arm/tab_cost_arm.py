"""The third tab: bytes of the cache and milliseconds per token against the context, measured while you watch."""

import functools
import statistics
import time
from collections.abc import Iterator

import gradio as gr
import torch
from checks_arm import check_choice, readable
from matplotlib.figure import Figure
from transformers import DynamicCache, PreTrainedModel

from hf_models import ArmCache
from hf_pipelines.arm.performance_arm import models, tokens

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
LONGEST = tuple(str(context) for context in CONTEXTS[2:])
PART, REPEATS = 512, 12  # tokens fed at once while filling; tokens timed at each context
HEADERS = ["Context", "Cache, full: MB", "Cache, ARM: MB", "ms/token, full", "ms/token, ARM"]
GREY, INDIGO = "#7f7f7f", "#4338ca"
GUIDE = """
A random Llama of 2 layers and 4 heads of 32, with full attention (`DynamicCache`) and with 256 slots, a window of 64
and 4 first tokens (`ArmCache`): what counts here is size, not sense. Both are fed the same tokens, and single tokens
are timed.

**Below about 8,000 tokens full attention is faster** per token, and its prefill is faster even beyond: an ARM token
costs some twenty small operations more per layer. The gain is that bytes and time per token stay flat. Times depend on
this machine and on who else uses it: compare the two lines, not the numbers. A converted model must be trained before
its memory is worth anything.
"""


@functools.cache
def both_models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model with full attention and the one with memory."""
    return models()


@torch.no_grad()
def measure(longest: int) -> Iterator[list[float]]:
    """Fill both caches up to `longest` tokens and measure on the way.

    Args:
        longest (`int`): Tokens; one of `CONTEXTS`.

    Yields:
        Context length, bytes of both caches, seconds per token of both (medians).
    """
    full, arm = both_models()
    dynamic, memory = DynamicCache(config=full.config), ArmCache(arm.config)
    ids, seen = tokens(longest), 0
    for context in (c for c in CONTEXTS if c <= longest):
        for part in ids[:, seen : context - REPEATS].split(PART, 1):
            full(part, cache=dynamic, logits_to_keep=1)
            arm(part, cache=memory, logits_to_keep=1)
        seconds: tuple[list[float], list[float]] = ([], [])
        for t in range(context - REPEATS, context):
            for timed, model, cache in zip(seconds, (full, arm), (dynamic, memory), strict=True):
                start = time.perf_counter()
                model(ids[:, t : t + 1], cache=cache)
                timed.append(time.perf_counter() - start)
        seen = context
        grown = sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers)
        yield [context, grown, memory.nbytes(), *map(statistics.median, seconds)]


def draw(points: list[list[float]]) -> Figure:
    """Two plots over the context: megabytes, milliseconds per token."""
    figure = Figure(figsize=(10.5, 4.4), dpi=110, layout="constrained")
    contexts, full_bytes, arm_bytes, full_seconds, arm_seconds = zip(*points, strict=True)
    panels = (("cache, MB", 1e-6, full_bytes, arm_bytes), ("milliseconds per token", 1e3, full_seconds, arm_seconds))
    for axes, (label, unit, full, arm) in zip(figure.subplots(1, 2), panels, strict=True):
        axes.plot(contexts, [unit * y for y in full], "--o", color=GREY, label="full attention, DynamicCache")
        axes.plot(contexts, [unit * y for y in arm], "-o", color=INDIGO, linewidth=2.4, label="ARM, ArmCache")
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.minorticks_off()
        axes.set(xlabel="context, tokens", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    axes.legend(loc="best", frameon=False)
    return figure


@readable
def cost(
    longest: str = "16384",
    progress: gr.Progress = gr.Progress(),  # noqa: B008  (gradio finds it by its default)
) -> Iterator[tuple]:
    """Measure cache bytes and milliseconds per token of full attention and of ARM against the context length.

    Args:
        longest: The longest context in tokens: 2048, 4096, 8192 or 16384.
        progress: Supplied by gradio.

    Returns:
        The figure, a table, a note; renewed after each context length.
    """
    last = int(check_choice("The longest context", longest, LONGEST))
    points: list[list[float]] = []
    progress(0, desc="filling the caches")
    for point in measure(last):
        points.append(point)
        progress(point[0] / last, desc=f"{point[0]:,} tokens")
        rows = [
            [f"{n:,}", f"{full / 1e6:.3f}", f"{arm / 1e6:.3f}", f"{1e3 * slow:.1f}", f"{1e3 * flat:.1f}"]
            for n, full, arm, slow, flat in points
        ]
        yield draw(points), rows, _note(points)


def _note(points: list[list[float]]) -> str:
    context, full_bytes, arm_bytes, full_seconds, arm_seconds = points[-1]
    faster, ratio = "ARM", full_seconds / arm_seconds
    if ratio < 1:
        faster, ratio = "full attention", 1 / ratio
    return (
        f"**At {context:,} tokens: {full_bytes / 1e6:.2f} MB against {arm_bytes / 1e6:.2f} MB for ARM, which does not "
        f"change.** Per token {faster} is {ratio:.1f} times as fast here."
    )


def build_tab() -> None:
    """Lay out the tab inside the current `gr.Tab`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            longest = gr.Radio(
                list(LONGEST), value="16384", label="Longest context", info="16384 takes ten seconds or more"
            )
            button = gr.Button("Measure", variant="primary")
            gr.Markdown(GUIDE, container=True)
        with gr.Column(scale=5, min_width=620):
            note = gr.Markdown(min_height=28)
            figure = gr.Plot(label="Cost", format="png", show_label=False)
            table = gr.Dataframe(headers=HEADERS, interactive=False)
    button.click(
        cost,
        longest,
        [figure, table, note],
        api_name="cost",
        show_progress_on=figure,
        concurrency_id="cost",
        concurrency_limit=1,  # a second measurement would slow the first
    )
