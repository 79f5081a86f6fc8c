"""The second tab: gates, slots and reads of one sequence."""

from typing import Any

import gradio as gr
import inside_arm as inside
from checks_arm import (
    BUCKETS_RANGE,
    FACTS_RANGE,
    INSIDE_RANGE,
    MAX_SEED,
    POLICIES,
    SLOTS,
    check_number,
    check_reading,
    choices,
    readable,
)

HEADERS = ["Question", "Right", "The model says", "Fact in head 1", "Fact in head 2"]
LEGEND = """
Letters are fillers, `SET k=v` a fact, `GET k` a question, `VAL v` the right answer: green if the model gave it, red if
not. The upper half of a token is coloured by the gate of head 1 (indigo), the lower by that of head 2 (amber); a white
token is not written at all. Point at a token for its numbers.
"""
MAP_GUIDE = """
### What sits in the slots when the first question comes
A token is as opaque as the mass it still has in its slot; later tokens of the same slot push it out. Reads divide by
the mass of the slot, so a token alone in its slot is read exactly however pale it is. The two heads share the work:
often one of them keeps a fact and the other does not.
"""


@readable
def look_inside(
    slots: str = "16",
    context_length: int = 48,
    facts: int = 8,
    policy: str = "adaptive",
    buckets: int = 2,
    seed: int = 0,
) -> tuple:
    """Show what one sequence does to the memory: gates, slots, buckets read, answers.

    Args:
        slots: Memory slots per head: 4, 8, 16 or 32.
        context_length: Tokens before the questions, 16 to 240.
        facts: Facts among them, 1 to 16.
        policy: How many buckets of slots are read: all, fixed or adaptive.
        buckets: Buckets that the fixed policy reads, 1 to 4.
        seed: Seed of the sequence, 0 to 2147483647.

    Returns:
        A note, the tokens as HTML, the slots as HTML, a figure of writes and reads, a table of the answers.
    """
    slots, policy, buckets = check_reading(slots, policy, buckets)
    context_length = check_number("The context length", context_length, *INSIDE_RANGE, whole=True)
    facts = check_number("The number of facts", facts, *FACTS_RANGE, whole=True)
    seed = check_number("The seed", seed, 0, MAX_SEED, whole=True)
    read_buckets = buckets if policy == "fixed" else BUCKETS_RANGE[1]
    seen = inside.look(slots, context_length, facts, policy, read_buckets, seed)
    written = int((seen.gate[:, :context_length] > 0).any(0).sum())
    fillers = seen.reads[:, [token >= inside.FILLER_OFFSET for token in seen.ids]].float()
    questions = seen.reads[:, list(seen.answers)].float()
    filler_reads = f"{fillers.mean():.2f}" if fillers.numel() else "–"  # a context may hold facts only
    note = (
        f"**{seen.right} of {facts} answers are right.** {written} of {context_length} tokens were written; a "
        f"question read {questions.mean():.1f} of {seen.buckets} buckets, a filler {filler_reads}."
    )
    return note, inside.strip(seen), inside.slot_map(seen), inside.draw(seen), inside.rows(seen)


def toggle_buckets(policy: str) -> Any:
    """The number of buckets counts for the fixed policy only."""
    return gr.Slider(interactive=policy == "fixed")


def build_tab(page: gr.Blocks) -> None:
    """Lay out the tab inside the current `gr.Tab` of `page`."""
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            slots = gr.Radio(list(SLOTS), value="16", label="Memory slots per head")
            context_length = gr.Slider(*INSIDE_RANGE, value=48, step=8, label="Context length")
            facts = gr.Slider(*FACTS_RANGE, value=8, step=1, label="Facts", info="8 in training")
            policy = gr.Radio(choices(POLICIES), value="adaptive", label="Read policy")
            buckets = gr.Slider(*BUCKETS_RANGE, value=2, step=1, label="Buckets read, of 4", interactive=False)
            seed = gr.Number(value=0, precision=0, minimum=0, maximum=MAX_SEED, label="Seed")
            button = gr.Button("Look", variant="primary")
            gr.Markdown(LEGEND, container=True)
        with gr.Column(scale=5, min_width=620):
            note = gr.Markdown(min_height=28)
            tokens = gr.HTML()
            table = gr.Dataframe(headers=HEADERS, interactive=False, max_height=400)
            figure = gr.Plot(label="Writes and reads", format="png", show_label=False)
            gr.Markdown(MAP_GUIDE)
            slot_map = gr.HTML()
    inputs = [slots, context_length, facts, policy, buckets, seed]
    shown = [note, tokens, slot_map, figure, table]
    one: dict[str, Any] = {"concurrency_id": "recall", "concurrency_limit": 1}  # a model notes its last call
    button.click(look_inside, inputs, shown, api_name="look_inside", show_progress_on=figure, **one)
    page.load(look_inside, inputs, shown, api_visibility="private", show_progress_on=figure, **one)
    policy.input(toggle_buckets, policy, buckets, api_visibility="private", show_progress="hidden", queue=False)
