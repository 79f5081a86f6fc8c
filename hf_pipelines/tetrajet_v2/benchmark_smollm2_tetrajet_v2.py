"""Fine-tune SmolLM2-135M-Instruct for a few steps: in high precision, with TetraJet-v2, with LoRA over 4-bit codes.

    python -m hf_pipelines.tetrajet_v2.benchmark_smollm2_tetrajet_v2 --card

The curves show that the recipe trains a real model and what it costs. They rank nothing: the differences of a run this
short are smaller than those between two orders of the data.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import peft
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainingArguments, set_seed

from datasets_scripts.tetrajet_corpora import load_corpus
from hf_models.packaged_llm import packaged_llm
from hf_models.tetrajet_v2.configuration_tetrajet_v2 import TetraJetConfig
from hf_models.tetrajet_v2.export import export_packed
from hf_models.tetrajet_v2.trainer_tetrajet_v2 import TetraJetTrainer
from hf_pipelines import hub
from hf_pipelines.benchmark import BenchmarkResult, markdown_table

REPO = "tetrajet-v2-tiny-lm"
CORPUS = "pydoc"
BEFORE, PLAIN, FULL, LORA = "before training", "bf16", "tetrajet_v2", "LoRA over the packed base"
SCHEDULE = {  # the paper's, shortened to 30 steps
    "out_control": {"record_start": 1, "record_steps": 5},
    "osci_reset": {"start": 10, "period": 10, "window": 5},
}
LEARNING_RATES = {PLAIN: 2e-5, FULL: 2e-5, LORA: 2e-4}


def load(name: str, base: Path, scratch: Path) -> PreTrainedModel:
    """The model that `name` trains.

    Args:
        name (`str`): `"bf16"`, `"tetrajet_v2"`, or LoRA.
        base (`Path`): Folder of the high-precision model.
        scratch (`Path`): Where the packed base is written.

    Returns:
        `PreTrainedModel`: in float32; for LoRA a `peft` model whose base holds 4-bit codes.
    """
    recipe = FULL if name == LORA else name
    config = TetraJetConfig(recipe=recipe, **SCHEDULE)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    if name != LORA:
        return model
    export_packed(model, scratch, layout="tetrajet")
    packed = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)
    adapters = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(packed, adapters)


def finetune(
    model: PreTrainedModel, learning_rate: float, steps: int, batch_size: int, block_size: int, eval_blocks: int
) -> tuple[list[float], float]:
    """Train on the packaged text.

    Args:
        model (`PreTrainedModel`): The model.
        learning_rate (`float`): Of AdamW, constant.
        steps (`int`): Optimizer steps; 0 only measures.
        batch_size (`int`): Sequences a step.
        block_size (`int`): Tokens a sequence.
        eval_blocks (`int`): Held-out sequences.

    Returns:
        `tuple[list[float], float]`: training loss of every step, held-out loss afterwards (nats per token).
    """
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(packaged_llm())
    rows = {split: load_corpus(CORPUS, tokenizer, block_size, split, seed=0) for split in ("train", "test")}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=max(steps, 1),
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        trainer = TetraJetTrainer(model=model, args=arguments, train_dataset=rows["train"])
        if steps:
            trainer.train()
        curve = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        held_out = rows["test"].select(range(min(eval_blocks, len(rows["test"]))))
        return curve, trainer.evaluate(held_out)["eval_loss"]


def measure(steps: int = 30, batch_size: int = 2, block_size: int = 128, eval_blocks: int = 24) -> dict[str, dict]:
    """Curves and held-out losses of every run.

    Args:
        steps (`int`, defaults to 30): Optimizer steps.
        batch_size (`int`, defaults to 2): Sequences a step.
        block_size (`int`, defaults to 128): Tokens a sequence.
        eval_blocks (`int`, defaults to 24): Held-out sequences.

    Returns:
        `dict`: name to `{"train": [...], "held_out": float}`.
    """
    base = packaged_llm()
    results = {}
    for name in (BEFORE, PLAIN, FULL, LORA):
        with tempfile.TemporaryDirectory() as scratch:
            model = load(PLAIN if name == BEFORE else name, base, Path(scratch))
            count = 0 if name == BEFORE else steps
            curve, held_out = finetune(
                model, LEARNING_RATES.get(name, 0.0), count, batch_size, block_size, eval_blocks
            )
        results[name] = {"train": curve, "held_out": held_out}
        print(f"{name}: held out {held_out:.4f}", flush=True)
    return results


def table(results: dict[str, dict]) -> str:
    """Markdown table, one row a run: mean training loss of every five steps and the held-out loss.

    Args:
        results (`dict`): Of [`measure`].

    Returns:
        `str`: Markdown.
    """
    steps = max(len(result["train"]) for result in results.values())
    starts = range(0, steps, 5)
    rows = []
    for name, result in results.items():
        parts = [result["train"][start : start + 5] for start in starts]
        means = [f"{sum(part) / len(part):.3f}" if part else "" for part in parts]
        rows.append([name, *means, f"{result['held_out']:.4f}"])
    spans = [f"steps {start + 1}–{min(start + 5, steps)}" for start in starts]
    return markdown_table(["training loss, nats per token", *spans, "held out, afterwards"], rows)


def draw(results: dict[str, dict]) -> Figure:
    """Training loss over steps.

    Args:
        results (`dict`): Of [`measure`].

    Returns:
        `Figure`.
    """
    figure = Figure(figsize=(7, 4))
    axis = figure.subplots()
    for name, style in ((PLAIN, "k--"), (FULL, "C0-"), (LORA, "C1-")):
        curve = results[name]["train"]
        axis.plot(range(1, len(curve) + 1), curve, style, label=name)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("training loss (nats per token)")
    axis.set_title("SmolLM2-135M-Instruct on Python's help texts")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--card` write into the card of `tetrajet-v2-tiny-lm`.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line; `sys.argv` by default.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="Optimizer steps.")
    parser.add_argument("--batch_size", type=int, default=2, help="Sequences a step.")
    parser.add_argument("--block_size", type=int, default=128, help="Tokens a sequence.")
    parser.add_argument("--eval_blocks", type=int, default=24, help="Held-out sequences.")
    parser.add_argument("--card", action="store_true", help="Write table and figure into the model card.")
    options = parser.parse_args(arguments)
    results = measure(options.steps, options.batch_size, options.block_size, options.eval_blocks)
    print(table(results))
    if options.card:
        folder = Path(hub.repo(REPO))
        result = BenchmarkResult("tetrajet_v2", 0, False, card_tables={"smollm2": table(results)})
        result.figures["smollm2"] = draw(results)
        result.save_figures(folder)
        result.update_card(folder / "README.md")
        (folder / ".eval_results").mkdir(exist_ok=True)
        (folder / ".eval_results" / "tetrajet_v2_smollm2.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
