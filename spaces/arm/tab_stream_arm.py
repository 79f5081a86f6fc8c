"""The fourth tab: a stream without end into a cache of fixed size."""

from collections.abc import Iterator

import gradio as gr
import stream_arm as streams
from checks_arm import SECONDS_RANGE, check_choice, check_number, choices, readable
from stream_arm import Stream

MAX_TEXT, MAX_PATH = 20_000, 1_000
TEXT = (
    "The key of cabinet seven is under the green lamp. Nobody has asked for it in years, and yet every evening the "
    "porter looks whether it is still there. "
)
NOTHING = "Nothing was fed yet."
GUIDE = """
One click feeds for some seconds; the next goes on where the last ended. Every slot is as dark as its mass.

*8 facts at the start, then fillers*: fillers are hardly ever written, so the facts stay, however many follow. *Facts
that change*: the same 16 keys get new values again and again. The model was not trained for that, and old values stay
in other slots beside the new ones: about half of the answers are right; chance is 1/8. A fixed number of slots cannot
hold an unbounded number of facts.

Any folder that `save_pretrained` wrote after `convert_to_arm` can be fed; one with a tokenizer reads the text. Such a
model must be trained before its memory is worth anything; its bytes are constant from the start.
"""


@readable
def stream(
    path: str = "",
    feed: str = "change",
    text: str = TEXT,
    seconds: float = 4,
    state: Stream | None = None,
) -> Iterator[tuple]:
    """Feed a stream into the cache of an ARM model for some seconds; the next call of a session goes on with it.

    Args:
        path: A local folder with an ARM model; empty for the shipped recall model. Nothing is downloaded.
        feed: What the recall model reads: change or once. Folders with a tokenizer read the text.
        text: Text that a folder with a tokenizer reads over and over, 1 to 20000 characters.
        seconds: Time to feed, 1 to 20 seconds.
        state: The session's stream, supplied by gradio.

    Returns:
        A note, the figure, the occupancy of the slots as HTML; renewed while it runs.
    """
    check_choice("The feed", feed, streams.FEEDS)
    seconds = check_number("The time", seconds, *SECONDS_RANGE)
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_TEXT:
        raise ValueError(f"The text must have 1 to {MAX_TEXT} characters.")
    if state is None or state.key != streams.key_of(path, feed, text):
        state = streams.begin(path, feed, text)
    for _ in streams.run(state, seconds):
        yield _note(state), streams.draw(state), streams.occupancy(state), state


def _note(state: Stream) -> str:
    size, tokens = state.cache.nbytes(), state.tokens
    constant = state.loaded.model.config.arm_layers is None
    note = (
        f"**{tokens:,} tokens seen, {size:,} bytes{' at any length' * constant}.** A growing cache would hold "
        f"{tokens * state.full_bytes_per_token:,} bytes. {100 * state.occupied:.0f} % of the slots hold something."
    )
    if not constant:
        note += " Some layers of this model keep full attention (`arm_layers`): its cache grows."
    if state.answered:
        right, asked = map(sum, zip(*state.answered[-16:], strict=True))
        note += f" Last answers: {right} of {asked} right."
    return note


def stop_stream(state: Stream | None) -> str:
    """Say where a stopped stream stands."""
    return NOTHING if state is None else f"Stopped. {_note(state)}"


def reset_stream() -> tuple:
    """Forget the session's stream, so that the next one begins with an empty cache.

    Returns:
        A note, an empty figure, an empty occupancy.
    """
    return NOTHING, None, "", None


def build_tab() -> None:
    """Lay out the tab inside the current `gr.Tab`."""
    state = gr.State(None, time_to_live=3600)
    with gr.Row():
        with gr.Column(scale=2, min_width=340):
            path = gr.Textbox(
                "",
                label="ARM folder on this machine",
                placeholder="empty: the shipped recall model",
                max_length=MAX_PATH,
            )
            feed = gr.Radio(choices(streams.FEEDS), value="change", label="What goes in")
            text = gr.Textbox(TEXT, label="Text", lines=3, max_length=MAX_TEXT)
            seconds = gr.Slider(*SECONDS_RANGE, value=4, step=1, label="Seconds per click")
            with gr.Row():
                start = gr.Button("Start", variant="primary", min_width=80)
                stop = gr.Button("Stop", min_width=80)
                reset = gr.Button("Reset", min_width=80)
            gr.Markdown(GUIDE, container=True)
        with gr.Column(scale=5, min_width=620):
            note = gr.Markdown(NOTHING, min_height=28)
            figure = gr.Plot(label="Stream", format="png", show_label=False)
            gr.Markdown("### Slots")
            slots = gr.HTML()
    shown = [note, figure, slots, state]
    running = start.click(
        stream,
        [path, feed, text, seconds, state],
        shown,
        api_name="stream",
        show_progress="hidden",  # it renews itself
        concurrency_id="stream",
        concurrency_limit=2,
    )
    stop.click(stop_stream, state, note, cancels=[running], api_visibility="private", queue=False)
    reset.click(reset_stream, None, shown, cancels=[running], api_name="reset_stream", queue=False)
