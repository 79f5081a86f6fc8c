"""Train a language model in NVFP4: `accelerate launch -m hf_models.tetrajet_v2.train_tetrajet_v2 --output_dir model`.

Without further arguments it trains the tiny Llama on the embedded text in minutes. The paper's 150M run:

    accelerate launch -m hf_models.tetrajet_v2.train_tetrajet_v2 --model_config olmo2-150M --train_file tokens/ \
        --block_size 4096 --recipe tetrajet_v2 --max_steps 25500 --learning_rate 3e-4 --z_loss 1e-5 --bf16 \
        --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' --output_dir olmo2-150M

`--model_name_or_path` goes on from a checkpoint with the recipe given here, `--recipe bf16` is the baseline, and
`--resume_from_checkpoint true` continues the last checkpoint in `--output_dir` exactly as if nothing had happened.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from datasets_scripts.tetrajet_corpora import EMBEDDED, corpus_tokenizer, load_corpus
from hf_models._checkpoints import last_complete_checkpoint
from hf_models.tetrajet_v2.configuration_tetrajet_v2 import RECIPES, TetraJetConfig
from hf_models.tetrajet_v2.quantizer_tetrajet_v2 import OLMO2_SIZES, olmo2_config, prepare_model, set_recipe
from hf_models.tetrajet_v2.trainer_tetrajet_v2 import STATE_FILE, TetraJetTrainer

TINY_LLAMA = "tiny-llama"
MODEL_CONFIGS = (TINY_LLAMA, *(f"olmo2-{size}" for size in OLMO2_SIZES))
TINY_BLOCK, TINY_VOCABULARY = 64, 128


# option of the command line → field of `TetraJetConfig`
RECIPE_FIELDS = {
    "recipe": "recipe",
    "outer_block_size": "outer_block_size",
    "align_backward": "align_backward",
    "rht_dx": "rht_dx",
    "rht_dw": "rht_dw",
    "weight_block_2d": "weight_block_2d",
    "scale_rounding": "scale_rounding",
    "strict_unbiased": "strict_unbiased",
    "gemm": "gemm",
    "save_packed_activations": "save_packed_activations",
    "out_control": "out_control.enabled",
    "outlier_ratio": "out_control.ratio",
    "record_start": "out_control.record_start",
    "record_steps": "out_control.record_steps",
    "osci_reset": "osci_reset.enabled",
    "osci_detect": "osci_reset.detect",
    "osci_start": "osci_reset.start",
    "osci_period": "osci_reset.period",
    "osci_window": "osci_reset.window",
    "osci_threshold": "osci_reset.threshold",
}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class TetraJetArguments:
    """What is trained, on what, and with which recipe. Recipe options left out are the preset's."""

    model_config: str = _option(TINY_LLAMA, f"Model to train from scratch: {', '.join(MODEL_CONFIGS)}.")
    model_name_or_path: str | None = _option(None, "Folder or Hub id of a checkpoint to go on from instead.")
    tokenizer: str | None = _option(None, "Folder or Hub id (default: the checkpoint's, else the corpus' characters).")
    train_file: str = _option("pydoc", "File or folder of .txt, .jsonl, .parquet or .npy; Hub id; pydoc; or markov.")
    block_size: int | None = _option(None, "Tokens per sequence (default: 64 for tiny models, else 4096 at most).")
    eval_blocks: int = _option(512, "Held-out sequences on which to measure the perplexity after training; 0: none.")
    z_loss: float = _option(0.0, "Weight of the squared log-partition function of the logits (paper: 1e-5).")
    decay_embeddings: bool = _option(False, "Apply weight decay to the embeddings too.")
    recipe: str = _option("tetrajet_v2", f"Recipe of the linear layers: {', '.join(RECIPES)}.")
    outer_block_size: int | None = _option(None, "Elements under one outer scale; -1: the tensor.")
    align_backward: bool | None = _option(None, "Backward re-quantizes the forward operands.")
    rht_dx: bool | None = _option(None, "Random Hadamard transform in the input gradient.")
    rht_dw: bool | None = _option(None, "Random Hadamard transform in the weight gradient.")
    weight_block_2d: bool | None = _option(None, "16x16 weight blocks.")
    scale_rounding: str = _option("nearest", "Rounding of the inner scales: nearest, up.")
    strict_unbiased: bool = _option(False, "Round the backward's inner scales up.")
    gemm: str = _option("fp32", "fp32 (exact emulation), bf16 or native (FP4 tensor cores).")
    save_packed_activations: bool = _option(False, "Keep codes for the backward pass.")
    modules_to_not_convert: list[str] = field(
        default_factory=list, metadata={"help": "Modules in high precision besides embeddings and head."}
    )
    out_control: bool | None = _option(None, "Keep outlier channels in MXFP8.")
    outlier_ratio: float = _option(0.1, "Share of outlier channels.")
    record_start: int = _option(501, "Step at which recording of the channels begins.")
    record_steps: int = _option(50, "Steps of recording.")
    osci_reset: bool | None = _option(None, "Reset oscillating weights.")
    osci_detect: str = _option("distance_ratio", "distance_ratio, distance_ratio_mem_eff or bin_edge.")
    osci_start: float = _option(0.64, "First step, or share of all steps if at most 1.")
    osci_period: int = _option(200, "Steps from window to window.")
    osci_window: int = _option(50, "Steps of a window.")
    osci_threshold: float = _option(8.0, "Reset where the distance ratio reaches it.")

    def __post_init__(self) -> None:
        if self.model_config not in MODEL_CONFIGS:
            raise ValueError(f"model_config={self.model_config!r} must be one of {', '.join(MODEL_CONFIGS)}.")
        if self.eval_blocks < 0:
            raise ValueError(f"eval_blocks={self.eval_blocks} must be at least 0.")
        if self.z_loss < 0:
            raise ValueError(f"z_loss={self.z_loss} must be at least 0.")
        if self.block_size is not None and self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2.")
        if self.osci_start > 1 and self.osci_start != int(self.osci_start):
            raise ValueError(f"osci_start={self.osci_start} must be a share of at most 1 or a whole step.")

    def recipe_fields(self, seed: int) -> dict[str, Any]:
        """The arguments of `TetraJetConfig`.

        Args:
            seed (`int`): Seed of the noise.

        Returns:
            `dict`: nested for OutControl and OsciReset.
        """
        fields: dict[str, Any] = {"seed": seed, "out_control": {}, "osci_reset": {}}
        for option, path in RECIPE_FIELDS.items():
            value = getattr(self, option)
            group, _, name = path.rpartition(".")
            if value is not None:
                (fields[group] if group else fields)[name] = value
        if self.osci_start > 1:
            fields["osci_reset"]["start"] = int(self.osci_start)
        return fields


@dataclass
class TetraJetTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults of the tiny model."""

    output_dir: str = field(default="tetrajet-v2", metadata={"help": "Folder of checkpoints and of the model."})
    max_steps: int = field(default=500, metadata={"help": "Optimizer steps."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Sequences per device and step."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Sequences per device when evaluating."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate."})
    weight_decay: float = field(default=0.1, metadata={"help": "Weight decay of matrices."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Second beta of AdamW."})
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "Schedule of the rate."})
    warmup_steps: float = field(default=20, metadata={"help": "Steps of warm-up (a share if below 1)."})
    logging_steps: float = field(default=50, metadata={"help": "Steps between log lines."})
    use_cache: bool = field(default=True, metadata={"help": "What the saved model's `config.use_cache` says."})


class PretrainingTrainer(TetraJetTrainer):
    """`TetraJetTrainer` with z-loss, and without weight decay on embeddings unless asked for.

    Args:
        *args: Of `TetraJetTrainer`.
        z_loss (`float`, defaults to 0): Weight of mean (log Σ exp logits)².
        decay_embeddings (`bool`, defaults to `False`): Apply weight decay to embeddings.
        **kwargs: Of `TetraJetTrainer`.
    """

    def __init__(self, *args: Any, z_loss: float = 0.0, decay_embeddings: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.z_loss, self.decay_embeddings = z_loss, decay_embeddings

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters with weight decay.

        Args:
            model (`nn.Module`): The model.

        Returns:
            `list[str]`: matrices, without embeddings unless asked for.
        """
        names = super().get_decay_parameter_names(model)
        embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        return names if self.decay_embeddings else [name for name in names if name not in embeddings]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Cross-entropy, plus the z-loss while training.

        Args:
            model (`nn.Module`): The model.
            inputs (`dict[str, torch.Tensor]`): A batch.
            return_outputs (`bool`, defaults to `False`): Also return the outputs.
            num_items_in_batch (`int`, *optional*): Labels of all micro-steps together.

        Returns:
            `torch.Tensor`, or with the outputs a tuple.
        """
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.z_loss and model.training:
            partition = outputs.logits[:, :-1].float().logsumexp(-1).square()  # the last token predicts nothing
            penalty = partition.mean()
            if num_items_in_batch is not None:  # all micro-steps' labels; DDP averages over the processes
                share = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
                penalty = share * partition.sum() / num_items_in_batch
            loss = loss + self.z_loss * penalty
        return (loss, outputs) if return_outputs else loss


def tiny_llama_config(vocab_size: int = TINY_VOCABULARY) -> LlamaConfig:
    """The tiny Llama of the experiments: 2 layers, 4 heads, width 128, MLP 384.

    Args:
        vocab_size (`int`, defaults to 128): Tokens.

    Returns:
        `LlamaConfig`.
    """
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def load_tokenizer(options: TetraJetArguments) -> PreTrainedTokenizerBase | None:
    """The tokenizer of `--tokenizer`, of the checkpoint, or of the corpus' characters; `None` for tokens."""
    folder = Path(options.train_file)
    if folder.is_dir() and any(folder.glob("*.npy")) and options.tokenizer is None:
        return None
    name = options.tokenizer or options.model_name_or_path
    if name is not None:
        return AutoTokenizer.from_pretrained(name)
    if options.model_config != TINY_LLAMA and options.train_file not in EMBEDDED:
        raise ValueError(f"--tokenizer is needed for --model_config {options.model_config} on text.")
    return corpus_tokenizer(options.train_file, TINY_VOCABULARY)


def load_model(options: TetraJetArguments, seed: int) -> PreTrainedModel:
    """The model to train, converted to the recipe; from scratch its weights depend on the seed alone."""
    fields = options.recipe_fields(seed)
    kept = options.modules_to_not_convert or None
    if options.model_name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(options.model_name_or_path, dtype=torch.float32)
        if getattr(model, "hf_quantizer", None) is not None:
            set_recipe(model, **fields, **({"modules_to_not_convert": kept} if kept else {}))
            return model
    else:
        size = options.model_config.removeprefix("olmo2-")
        config = tiny_llama_config() if options.model_config == TINY_LLAMA else olmo2_config(size)
        model = AutoModelForCausalLM.from_config(config)
    return prepare_model(model, TetraJetConfig(**fields, modules_to_not_convert=kept))


def default_block_size(model: PreTrainedModel) -> int:
    """64 tokens for a character model, else what the model reads, at most 4,096."""
    if model.config.vocab_size <= 256:
        return TINY_BLOCK
    return min(4096, model.config.max_position_embeddings)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Parse, build, train, measure, save.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line; `sys.argv` by default.

    Returns:
        `Path`: the folder of the trained model.
    """
    parser = HfArgumentParser((TetraJetArguments, TetraJetTrainingArguments), description=__doc__.split("\n\n")[0])
    options, args = parser.parse_args_into_dataclasses(arguments)
    set_seed(args.seed)
    tokenizer = load_tokenizer(options)
    model = load_model(options, args.seed)
    block_size = options.block_size or default_block_size(model)
    data = load_corpus(options.train_file, tokenizer, block_size, "train", seed=args.seed)
    trainer = PretrainingTrainer(
        model=model,
        args=args,
        train_dataset=data,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        z_loss=options.z_loss,
        decay_embeddings=options.decay_embeddings,
    )
    wanted = args.resume_from_checkpoint
    if wanted is not None and wanted.lower() in ("true", "1", "yes"):
        wanted = last_complete_checkpoint(args.output_dir, STATE_FILE)
    trainer.train(resume_from_checkpoint=wanted)
    trainer.save_model(args.output_dir)
    if options.eval_blocks:
        _evaluate(trainer, options, tokenizer, block_size)
    return Path(args.output_dir)


def _evaluate(trainer: TetraJetTrainer, options: TetraJetArguments, tokenizer: Any, block_size: int) -> None:
    """Print and write loss and perplexity of the quantized forward pass on held-out blocks."""
    held_out = load_corpus(options.train_file, tokenizer, block_size, "test")
    blocks = torch.utils.data.Subset(held_out, range(min(options.eval_blocks, len(held_out))))
    metrics = trainer.evaluate(blocks)
    metrics = {"eval_loss": metrics["eval_loss"], "perplexity": math.exp(metrics["eval_loss"])}
    if trainer.is_world_process_zero():
        text = json.dumps(metrics | {"blocks": len(blocks), "tokens_per_block": block_size}, indent=1)
        (Path(trainer.args.output_dir) / "training_metrics.json").write_text(text + "\n", encoding="utf-8")
        print(metrics)


if __name__ == "__main__":
    main()
