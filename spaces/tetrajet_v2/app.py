"""TetraJet-v2 as a Space: the 4-bit format, its gradients, oscillation, a training to watch, an export."""

import sys
from pathlib import Path
from typing import Any

import gradio as gr

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this file, however it was started

import tab_export_tetrajet_v2 as tab_export
import tab_gradient_tetrajet_v2 as tab_gradient
import tab_microscope_tetrajet_v2 as tab_microscope
import tab_oscillation_tetrajet_v2 as tab_oscillation
import tab_train_tetrajet_v2 as tab_train

CSS = """
.lab { display: grid !important; grid-template: "controls results" auto "guide results" 1fr / 2fr 5fr; }
.lab > * { min-width: 0 !important; }
.lab > .controls { grid-area: controls; }
.lab > .guide { grid-area: guide; }
.lab > .results { grid-area: results; }
.dark .figure img { filter: invert(1) hue-rotate(180deg) brightness(1.2); }  /* dark ink becomes light ink */
@media (max-width: 900px) {
  .lab { grid-template: "controls" "results" "guide" / minmax(0, 1fr); }
  .figure .matplotlib { display: block; overflow-x: auto; }
  .figure .matplotlib img { min-width: 640px; max-width: none; }
}
"""
LAUNCH_KWARGS: dict[str, Any] = {
    "theme": gr.themes.Soft(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["monospace"]),
    "css": CSS,
    "max_file_size": "1mb",  # nothing is uploaded here
}


def build() -> gr.Blocks:
    """Build the page; it is not launched."""
    with gr.Blocks(title="TetraJet-v2", fill_width=True, delete_cache=(3600, 3600)) as page:
        gr.Markdown(
            "# TetraJet-v2: training in 4 bits\n"
            "All three matrix products of a linear layer, forward and backward, on NVFP4 operands: unbiased "
            "gradients, OsciReset for weights that flip between two values, OutControl for outlier channels "
            "([arXiv 2510.27527](https://arxiv.org/abs/2510.27527)). Emulated here bit by bit."
        )
        with gr.Tab("Format microscope"):
            tab_microscope.build_tab(page)
        with gr.Tab("Is my gradient unbiased?"):
            tab_gradient.build_tab()
        with gr.Tab("Oscillation"):
            tab_oscillation.build_tab(page)
        with gr.Tab("Train a tiny LM"):
            state, trained = tab_train.build_tab()
        with gr.Tab("Export"):
            tab_export.build_tab(state, trained)
    return page.queue(max_size=64)


demo = build()

if __name__ == "__main__":
    demo.launch(**LAUNCH_KWARGS)
