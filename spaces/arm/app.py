"""ARM as a Space: recall at equal budget, a look into the slots, what a token costs, an endless stream."""

import sys
from pathlib import Path
from typing import Any

import gradio as gr

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this file, however it was started

import tab_cost_arm as tab_cost
import tab_inside_arm as tab_inside
import tab_recall_arm as tab_recall
import tab_stream_arm as tab_stream

CSS = """
.token { display: inline-block; margin: 1px; padding: 0 4px; border-radius: 4px; border: 1px solid #d4d4d8;
  color: #18181b; background-color: #ffffff; font: 12px/20px monospace; white-space: nowrap; }
.token.filler { border-color: transparent; padding: 0 2px; color: #52525b; }
.token.question { border-color: #71717a; }
.token.right { border: 2px solid #15803d; }
.token.wrong { border: 2px solid #b91c1c; }
.buckets { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 8px; margin: 4px 0 12px; }
.bucket { border: 1px solid var(--border-color-primary); border-radius: 6px; padding: 6px; }
.bucket b { font-size: 12px; }
.slot { display: flex; flex-wrap: wrap; align-items: center; min-height: 24px; font-size: 12px;
  border-top: 1px dotted var(--border-color-primary); }
.slot > i { width: 24px; color: var(--body-text-color-subdued); font-style: normal; }
"""
LAUNCH_KWARGS: dict[str, Any] = {
    "theme": gr.themes.Soft(primary_hue="indigo", font=["system-ui", "sans-serif"], font_mono=["monospace"]),
    "css": CSS,
    "max_file_size": "1mb",  # nothing is uploaded here
}


def build() -> gr.Blocks:
    """Build the page; it is not launched."""
    with gr.Blocks(title="ARM", fill_width=True, delete_cache=(3600, 3600)) as page:
        gr.Markdown(
            "# ARM: a cache that does not grow with the context\n"
            "Instead of one entry per token, attention keeps a fixed number of slots. A router picks the slot of "
            "every token, a gate blends it in, and a policy decides how many buckets of slots to read "
            "([arXiv 2609.24417](https://arxiv.org/abs/2609.24417))."
        )
        with gr.Tab("Recall lab"):
            tab_recall.build_tab(page)
        with gr.Tab("Look inside"):
            tab_inside.build_tab(page)
        with gr.Tab("Flat cost"):
            tab_cost.build_tab()
        with gr.Tab("Stream"):
            tab_stream.build_tab()
    return page.queue(max_size=64)


demo = build()

if __name__ == "__main__":
    demo.launch(**LAUNCH_KWARGS)
