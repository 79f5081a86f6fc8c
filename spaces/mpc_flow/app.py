"""MPC-Flow as a Space: restore small images, look at paths in two dimensions, guide a text-to-image model."""

import sys
from pathlib import Path
from typing import Any

import gradio as gr
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this file, however it was started

import tab_paths_mpc_flow as tab_paths
import tab_restore_mpc_flow as tab_restore

CSS = """
/* enlarged pixels keep their borders */
.pixels img { image-rendering: pixelated; }
.thumbnails .grid-container {
  grid-template-columns: repeat(7, minmax(0, 1fr)) !important;
  grid-template-rows: none !important;
  grid-auto-rows: max-content !important;
  gap: 4px;
  padding: 6px;
}
.thumbnails .thumbnail-item { width: 100%; min-width: 0; height: auto; aspect-ratio: 1; }
"""
LAUNCH_KWARGS: dict[str, Any] = {
    "theme": gr.themes.Soft(primary_hue="indigo", font=["system-ui", "sans-serif"], font_mono=["monospace"]),
    "css": CSS,
    "max_file_size": "20mb",
}


def build() -> gr.Blocks:
    """Build the page; it is not launched."""
    with gr.Blocks(title="MPC-Flow", fill_width=True, delete_cache=(3600, 3600)) as page:
        gr.Markdown(
            "# MPC-Flow: restore images by steering a flow model\n"
            "A small flow model of handwritten digits, steered by model predictive control towards the measurement "
            "([arXiv 2601.23231](https://arxiv.org/abs/2601.23231)): nothing is trained, and with K = 1 nothing is "
            "backpropagated through the model."
        )
        with gr.Tab("Restore an image"):
            tab_restore.build_tab(page)
        with gr.Tab("Paths in two dimensions"):
            tab_paths.build_tab()
        if torch.cuda.is_available():
            import text_to_image_mpc_flow as text_to_image

            with gr.Tab("Guide a text-to-image model"):
                text_to_image.build_tab()
    return page.queue(max_size=64)


demo = build()

if __name__ == "__main__":
    demo.launch(**LAUNCH_KWARGS)
