"""Held-out perplexity of a real model as a function of context length, at equal cache bytes.

    python -m hf_pipelines.arm.benchmark_perplexity_arm --trained smollm2-arm --trained_window smollm2-window \\
        --card

`--trained` is the folder that `hf_models.arm.train_arm` wrote for SmolLM2-135M-Instruct, `--trained_window` the
control: the same adapters trained for as many steps with sinks and window only. The text is held-out packaged prose.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from datasets_scripts.text_blocks import held_out_streams, load_text_documents
from hf_models.arm.convert_arm import cache_bytes, convert_to_arm, full_attention
from hf_models.arm.train_recall_arm import window_mask
from hf_models.packaged_llm import packaged_llm
from hf_pipelines import hub
from hf_pipelines.benchmark import markdown_table

EDGES = (0, 64, 128, 256, 512, 1024, 2048)
SINKS = 4
TRAINING_FREE = {"mode": "training_free", "levels": 2, "slots_per_bucket": 4, "window": 42, "sinks": SINKS}


@torch.no_grad()
def losses(
    model: PreTrainedModel, streams: torch.Tensor, mask: torch.Tensor | None = None, batch_size: int = 1
) -> torch.Tensor:
    """Negative log-likelihood of every token but the first, (streams, length − 1), in nats."""
    rows = []
    for batch in streams.split(batch_size):
        hidden = model.model(batch, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
        parts = zip(hidden.split(256, 1), batch[:, 1:].split(256, 1), strict=True)  # a head of 49,152 tokens is wide
        nats = [F.cross_entropy(model.lm_head(h).transpose(1, 2), target, reduction="none") for h, target in parts]
        rows.append(torch.cat(nats, 1))
    return torch.cat(rows)


def by_context(nats: torch.Tensor) -> list[float]:
    """Perplexity of the tokens whose context has between `EDGES[i]` and `EDGES[i + 1]` tokens."""
    spans = pairwise(EDGES)
    return [float(nats[:, low:high].mean().exp()) for low, high in spans if low < nats.shape[1]]


def measure(trained: Path, trained_window: Path | None, num_streams: int, length: int) -> dict[str, dict]:
    """Perplexities and cache bytes of every method.

    Args:
        trained (`Path`): ARM folder.
        trained_window (`Path`, *optional*): The control.
        num_streams (`int`): Held-out texts.
        length (`int`): Tokens of each.

    Returns:
        `dict`: name to `{"bytes", "perplexity": [...], "all"}`.
    """
    base_folder = packaged_llm()
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    documents = load_text_documents("packaged", split="test")
    streams = held_out_streams(documents, tokenizer, length, num_streams)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32).eval()
    arm = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    config = base.config
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    budget = cache_bytes(arm.config, torch.float32)
    entries = budget // entry
    free = convert_to_arm(base, **TRAINING_FREE)
    stream_mask = window_mask(length, entries - SINKS, SINKS)
    jobs = {
        "full attention (unbounded)": (lambda: losses(base, streams), entry * length),
        "sliding window": (lambda: losses(base, streams, window_mask(length, entries)), entries * entry),
        "StreamingLLM": (lambda: losses(base, streams, stream_mask), entries * entry),
        "ARM, training-free": (
            lambda: losses(free, streams, batch_size=len(streams)),
            cache_bytes(free.config, torch.float32),
        ),
        "ARM, trained": (lambda: losses(arm, streams), budget),
        "full attention over ARM's adapted weights": (lambda: _full(arm, streams), entry * length),
        "StreamingLLM over ARM's adapted weights": (lambda: _full(arm, streams, stream_mask), entries * entry),
    }
    if trained_window is not None:
        control = AutoModelForCausalLM.from_pretrained(trained_window, dtype=torch.float32).eval()
        jobs["StreamingLLM, trained"] = (lambda: losses(control, streams), cache_bytes(control.config, torch.float32))
    results = {}
    for name, (job, size) in tqdm(jobs.items(), desc="perplexity"):
        nats = job()
        results[name] = {"bytes": size, "perplexity": by_context(nats), "all": float(nats.mean().exp())}
        tqdm.write(f"{name}: {results[name]}")
    return results


def _full(model: PreTrainedModel, streams: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with full_attention(model):
        return losses(model, streams, mask)


def table(results: dict[str, dict]) -> str:
    """Markdown table, one row per method."""
    spans = [f"{low}–{high}" for low, high in pairwise(EDGES)]
    spans = spans[: len(next(iter(results.values()))["perplexity"])]
    rows = [
        [name, f"{r['bytes'] / 1e6:.1f}", *(f"{p:.2f}" for p in r["perplexity"]), f"{r['all']:.2f}"]
        for name, r in results.items()
    ]
    return markdown_table(["perplexity by context length", "cache MB", *spans, "all"], rows)


def draw(results: dict[str, dict]) -> Figure:
    """Perplexity over context length."""
    figure = Figure(figsize=(7.5, 4.6))
    axis = figure.subplots()
    for name, result in results.items():
        style = "--" if "full attention" in name else "-"
        axis.plot(
            EDGES[1 : 1 + len(result["perplexity"])], result["perplexity"], "o" + style, label=name, markersize=4
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(EDGES[1:], [str(edge) for edge in EDGES[1:]])
    axis.set_xlabel("tokens of context, up to")
    axis.set_ylabel("perplexity (held-out prose)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--card` write into the card of `arm-recall`.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line; `sys.argv` by default.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trained", type=Path, required=True, help="Folder written by hf_models.arm.train_arm.")
    parser.add_argument("--trained_window", type=Path, help="Folder of the control: sinks and window only.")
    parser.add_argument("--num_streams", type=int, default=4, help="Held-out texts.")
    parser.add_argument("--length", type=int, default=2048, help="Tokens of each text.")
    parser.add_argument("--card", action="store_true", help="Write table and figure into the model card.")
    options = parser.parse_args(arguments)
    results = measure(options.trained, options.trained_window, options.num_streams, options.length)
    print(table(results))
    if options.card:
        from hf_pipelines.benchmark import BenchmarkResult

        folder = Path(hub.repo("arm-recall"))
        result = BenchmarkResult("arm", 0, False, card_tables={"perplexity": table(results)})
        result.figures["perplexity"] = draw(results)
        result.save_figures(folder)
        result.update_card(folder / "README.md")
        (folder / ".eval_results").mkdir(exist_ok=True)
        (folder / ".eval_results" / "arm_perplexity.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
