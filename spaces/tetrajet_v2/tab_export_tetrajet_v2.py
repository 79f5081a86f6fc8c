"""The fifth tab: a 4-bit checkpoint of the trained model, its size, and what the export changed."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import lm_tetrajet_v2 as lm
import packing_tetrajet_v2 as packing
from checks_tetrajet_v2 import check_choice, check_switch, choices, readable, shown
from lm_tetrajet_v2 import Training

SHIPPED = "shipped"
SHIPPED_LABEL = "the shipped model (tetrajet_v2)"
LAYER_HEADERS = ["Layer", "Change of weights", "Codes changed"]
FILE_HEADERS = ["File", "Bytes"]
CHECK_HEADERS = ["Check", "Found", ""]
GUIDE = """
A weight takes 4 bits and its share of the scales. *tetrajet* keeps the outer scales of 128 weights and the 8-bit
outlier channels, so that the folder computes bit for bit what training computed; only this package reads it.

The two layouts for inference engines have one outer scale for a whole matrix, so the master weights are rounded again.
Outlier channels become 4-bit too, and where OutControl had sorted the channels by size other weights share a scale:
about half of the codes change, the loss hardly. A model trained with one outer scale per matrix (*nvfp4_rtn*) exports
without any change if q, k, v and gate, up need not share theirs.

With *weights only* engines keep the inputs in high precision; *weights and inputs* also writes the inputs' scales.
The loss of a folder for engines is computed here with inputs in high precision. A model trained in *bf16* is rounded
for the first time. Embedding and head stay in high precision, so a model this small shrinks less than a large one.
"""


@readable
def export(
    source: str = SHIPPED,
    layout: str = "compressed-tensors",
    scheme: str = "NVFP4A16",
    fuse: bool = True,
    state: Training | None = None,
) -> Iterator[tuple]:
    """Write a 4-bit checkpoint of the shipped model or of one trained in this session, load it again and compare.

    Args:
        source: shipped, or the recipe of a model that `train` made in this session.
        layout: compressed-tensors, modelopt or tetrajet.
        scheme: NVFP4A16 quantizes weights only, NVFP4 inputs too; the layout tetrajet ignores it.
        fuse: Share the outer scale among q, k, v and among gate, up, as engines that fuse them need.
        state: The session's training, supplied by gradio.

    Returns:
        A note, a table of checks, a table of files, a table of layers, what both models write, the quantization
        config, the folder as a zip file.
    """
    check_choice("The layout", layout, packing.LAYOUTS)
    check_choice("The scheme", scheme, packing.SCHEMES)
    check_switch("The switch for fused layers", fuse)
    model = source_model(source, state)
    with tempfile.TemporaryDirectory() as space:
        folder, archive = Path(space) / "checkpoint", Path(space) / f"tetrajet-v2-{layout}.zip"
        checkpoint = packing.write(model, folder, layout, scheme, fuse)
        packing.pack_folder(folder, archive)
        checks = [[what, found, "✓" if good else "✗"] for what, found, good in checkpoint.checks]
        written = "the model:  {!r}\nthe folder: {!r}".format(*checkpoint.samples)
        yield (
            _note(checkpoint),
            checks,
            packing.file_rows(checkpoint),
            packing.layer_rows(checkpoint),
            written,
            packing.config_text(folder),
            str(archive),  # gradio copies it before the folder goes
        )


def source_model(source: Any, state: Training | None) -> Any:
    """The model that is meant, or `ValueError` that says which there are."""
    trained = lm.models(state)
    if source == SHIPPED:
        return lm.shipped_model()
    if not isinstance(source, str) or source not in trained:
        known = ", ".join(f"{name!r}" for name in (SHIPPED, *trained))
        raise ValueError(
            f"The model must be one of {known}; got {shown(source)}. Train another recipe in the tab before."
        )
    return trained[source]


def _note(checkpoint: packing.Checkpoint) -> str:
    report = checkpoint.report
    bits = 8 * checkpoint.packed_bytes / checkpoint.packed_weights
    before, after = checkpoint.losses
    good = all(fine for *_, fine in checkpoint.checks)
    codes = ""
    if checkpoint.is_quantized:
        codes = f" {report['codes_changed_percent']:.1f} % of the codes changed."
    size = f"{checkpoint.packed_weights:,} weights in {checkpoint.packed_bytes:,} bytes: {bits:.2f} bits each."
    change = f"Weights changed by {100 * report['mean_relative_change']:.2f} % on average."
    return (
        f"**{size}**{codes} {change} Held-out loss {before:.4f} before, {after:.4f} from the folder. "
        f"{'Every check holds.' if good else '**A check fails.**'}"
    )


def refresh_sources(state: Training | None) -> Any:
    """Offer the session's models."""
    trained = lm.models(state)
    offered = [(SHIPPED_LABEL, SHIPPED), *((f"trained here: {name}", name) for name in trained)]
    return gr.Dropdown(choices=offered, value=list(trained)[-1] if trained else SHIPPED)


def build_tab(state: gr.State, trained: list) -> None:
    """Lay out the tab inside the current `gr.Tab`.

    Args:
        state (`gr.State`): The session's training.
        trained (`list`): Events after which its models may be exported.
    """
    with gr.Row(elem_classes="lab"):
        with gr.Column(elem_classes="controls"):
            source = gr.Dropdown(
                [(SHIPPED_LABEL, SHIPPED)],
                value=SHIPPED,
                label="Model",
                info="models that you train in the tab before appear here",
                allow_custom_value=True,  # an API client names a model that its own session trained
            )
            layout = gr.Radio(choices(packing.LAYOUTS), value="compressed-tensors", label="Layout")
            scheme = gr.Radio(choices(packing.SCHEMES), value="NVFP4A16", label="What engines quantize")
            fuse = gr.Checkbox(value=True, label="q, k, v and gate, up share their outer scale")
            button = gr.Button("Write checkpoint", variant="primary")
        with gr.Column(elem_classes="guide"):
            gr.Markdown(GUIDE, container=True)
        with gr.Column(elem_classes="results"):
            note = gr.Markdown("Press *Write checkpoint*.", min_height=28)
            checks = gr.Dataframe(headers=CHECK_HEADERS, interactive=False)
            written = gr.Textbox(label=f"Both go on after “{packing.PROMPT}”", lines=2, interactive=False)
            files = gr.Dataframe(headers=FILE_HEADERS, interactive=False)
            archive = gr.File(label="The folder", interactive=False)
            layers = gr.Dataframe(headers=LAYER_HEADERS, interactive=False, max_height=640)
            with gr.Accordion("quantization_config of config.json", open=False):
                config = gr.Code(language="json", show_label=False, interactive=False)
    button.click(
        export,
        [source, layout, scheme, fuse, state],
        [note, checks, files, layers, written, config, archive],
        api_name="export",
        show_progress_on=note,
        concurrency_id="export",
        concurrency_limit=2,
    )
    for event in trained:
        event.then(refresh_sources, state, source, api_visibility="private", show_progress="hidden", queue=False)
