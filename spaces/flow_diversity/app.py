"""Flow diversity as a Space: sets of digits and of points in two dimensions, sampled plainly and kept apart."""

import sys
from pathlib import Path
from typing import Any

import gradio as gr
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this file, however it was started

import tab_digits_flow_diversity as tab_digits
import tab_mixture_flow_diversity as tab_mixture

CSS = """
/* enlarged pixels keep their borders */
.pixels img { image-rendering: pixelated; }
"""
LAUNCH_KWARGS: dict[str, Any] = {
    "theme": gr.themes.Soft(primary_hue="indigo", font=["system-ui", "sans-serif"], font_mono=["monospace"]),
    "css": CSS,
    "max_file_size": "1mb",  # nothing is uploaded here
}


def build() -> gr.Blocks:
    """Build the page; it is not launched."""
    with gr.Blocks(title="Flow diversity", fill_width=True, delete_cache=(3600, 3600)) as page:
        gr.Markdown(
            "# Flow diversity: eight images of one prompt that are not eight near-copies\n"
            "The images of a set are sampled together, and what the model expects each of them to become is pushed "
            "away from the others, at right angles to the model's own motion "
            "([arXiv 2510.09060](https://arxiv.org/abs/2510.09060)): nothing is trained."
        )
        with gr.Tab("Digits"):
            tab_digits.build_tab(page)
        with gr.Tab("2-D mixture"):
            tab_mixture.build_tab(page)
        if torch.cuda.is_available():
            import text_to_image_flow_diversity as text_to_image

            with gr.Tab("Text to image"):
                text_to_image.build_tab()
    return page.queue(max_size=64)


demo = build()

if __name__ == "__main__":
    demo.launch(**LAUNCH_KWARGS)
