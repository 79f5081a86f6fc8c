"""The first tab: facts recalled by ARM and its rivals at an equal number of cache entries."""

from typing import Any

import gradio as gr
import lab_arm as lab
from checks_arm import (
    BUCKETS_RANGE,
    CONTEXT_RANGE,
    FACTS_RANGE,
    MAX_SEED,
    POLICIES,
    SEQUENCES_RANGE,
    SLOTS,
    WINDOW_RANGE,
    check_number,
    check_reading,
    choices,
    readable,
)

HEADERS = ["Context", *(method.label for method in lab.METHODS.values())]
GUIDE = """
Every bounded method keeps the same number of *entries* (pairs of key and value) per head: ARM its slots and its
window, the others that many tokens. H2O protects the last 8, StreamingLLM the first 4. The three evict from the
full-attention model without any training; a sliding window or StreamingLLM trained for 24 entries reaches 0.36 at 48
tokens and 0.17 at 240. Full attention keeps everything, and fails on long contexts because it was trained on 48 tokens
only.

**To be fair to others.** Writing densely into all 16 slots (ABC, [2110.02488](https://arxiv.org/abs/2110.02488)) does
*better* than ARM on this toy at an equal number of entries: 0.99 against 0.86 at 48 tokens, 0.97 against 0.84 at 240.
Learning to read less costs accuracy: 0.80 against 0.86 for models trained to read everything (means of three seeds).
The models here were all trained with adaptive reading, so reading everything changes little. 32 slots are not better
than 16 in these models, and 4 are near chance. The window can be changed without training only because the slots stay
at the rotary distance of training. Each point is some hundred questions: differences of 0.03 are noise.
"""


@readable
def recall(
    slots: str = "16",
    window: int = 8,
    context_length: int = 512,
    facts: int = 8,
    policy: str = "adaptive",
    buckets: int = 2,
    sequences: int = 32,
    seed: int = 999,
    progress: gr.Progress = gr.Progress(),  # noqa: B008  (gradio finds it by its default)
) -> tuple:
    """Compare how many facts ARM, full attention and three bounded caches recall, over the context length.

    Args:
        slots: Memory slots per head of ARM: 4, 8, 16 or 32.
        window: Last tokens that ARM keeps exactly, 1 to 64.
        context_length: The longest context in tokens, 48 to 2048; shorter ones are tested too.
        facts: Facts in the context, 1 to 16.
        policy: How many buckets of slots ARM reads: all, fixed or adaptive.
        buckets: Buckets that the fixed policy reads, 1 to 4.
        sequences: Test sequences per length, 8 to 64.
        seed: Seed of the sequences, 0 to 2147483647.
        progress: Supplied by gradio.

    Returns:
        The figure, a table of accuracies, a note.
    """
    slots, policy, buckets = check_reading(slots, policy, buckets)
    window = check_number("The window", window, *WINDOW_RANGE, whole=True)
    context_length = check_number("The context length", context_length, *CONTEXT_RANGE, whole=True)
    facts = check_number("The number of facts", facts, *FACTS_RANGE, whole=True)
    sequences = check_number("The number of sequences", sequences, *SEQUENCES_RANGE, whole=True)
    seed = check_number("The seed", seed, 0, MAX_SEED, whole=True)
    entries = slots + window
    contexts = lab.lengths(context_length)
    model = lab.arm_model(slots, window, policy, buckets if policy == "fixed" else BUCKETS_RANGE[1])
    table: dict[str, dict[int, float]] = {name: {} for name in lab.METHODS}
    done, total = 0, sum(contexts) * len(lab.METHODS)
    progress(0, desc="asking")
    for name, context, accuracy in lab.accuracies(model, entries, contexts, facts, sequences, seed):
        table[name][context] = accuracy
        done += context
        progress(done / total, desc=f"{lab.METHODS[name].label} at {context} tokens")
    last = contexts[-1]
    rivals = {name: table[name][last] for name in ("h2o", "streaming_llm", "swa")}
    best = max(rivals, key=rivals.get)
    note = (
        f"**At {last} tokens and {entries} entries per head ({slots} slots + window {window}) ARM recalls "
        f"{table['arm'][last]:.2f}** of the facts; the best other bounded cache, {lab.METHODS[best].label}, "
        f"{rivals[best]:.2f}; full attention with all {last + 2 * facts} entries {table['full'][last]:.2f}. "
        "Chance is 0.125."
    )
    rows = [[context, *(f"{table[name][context]:.2f}" for name in lab.METHODS)] for context in contexts]
    return lab.draw(table, entries, facts), rows, note


def toggle_buckets(policy: str) -> Any:
    """The number of buckets counts for the fixed policy only."""
    return gr.Slider(interactive=policy == "fixed")


def build_tab(page: gr.Blocks) -> None:
    """Lay out the tab inside the current `gr.Tab` of `page`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            slots = gr.Radio(list(SLOTS), value="16", label="Memory slots per head")
            window = gr.Slider(*WINDOW_RANGE, value=8, step=1, label="Exact window", info="8 in training")
            context_length = gr.Slider(*CONTEXT_RANGE, value=512, step=16, label="Longest context")
            facts = gr.Slider(*FACTS_RANGE, value=8, step=1, label="Facts", info="8 in training")
            policy = gr.Radio(choices(POLICIES), value="adaptive", label="Read policy")
            buckets = gr.Slider(*BUCKETS_RANGE, value=2, step=1, label="Buckets read, of 4", interactive=False)
            sequences = gr.Slider(*SEQUENCES_RANGE, value=32, step=8, label="Test sequences per length")
            seed = gr.Number(value=999, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            button = gr.Button("Compare", variant="primary")
        with gr.Column(scale=5, min_width=620):
            note = gr.Markdown(min_height=28)
            figure = gr.Plot(label="Recall", format="png", show_label=False)
            table = gr.Dataframe(headers=HEADERS, interactive=False)
            gr.Markdown(GUIDE, container=True)
    inputs = [slots, window, context_length, facts, policy, buckets, sequences, seed]
    shown = [figure, table, note]
    one: dict[str, Any] = {"concurrency_id": "recall", "concurrency_limit": 1}  # a model notes its last call
    button.click(recall, inputs, shown, api_name="recall", show_progress_on=figure, **one)
    page.load(recall, inputs, shown, api_visibility="private", show_progress_on=figure, **one)
    policy.input(toggle_buckets, policy, buckets, api_visibility="private", show_progress="hidden", queue=False)
