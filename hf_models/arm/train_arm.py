"""Train a memory: `accelerate launch -m hf_models.arm.train_arm --output_dir my-arm`.

Without further arguments it trains the small recall model from scratch. With `--model` and `--data` it gives a Llama,
Qwen2, Qwen3 or Mistral checkpoint a memory and trains it on text:

    accelerate launch -m hf_models.arm.train_arm --model my-base --train_mode memory+lora --data texts/ \
        --block_size 2048 --learning_rate 1e-3 --read_coef 0.05 --distill_coef 0.5 --max_steps 2000 --output_dir my-arm

Steps depend on the seed alone. `--resume_from_checkpoint true` goes on from the last checkpoint in `--output_dir`,
exactly as if nothing had happened.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, default_data_collator, set_seed

from datasets_scripts import recall_tasks, text_blocks
from hf_models._checkpoints import last_complete_checkpoint
from hf_models.arm.configuration_arm import ArmConfig
from hf_models.arm.convert_arm import convert_to_arm
from hf_models.arm.train_recall_arm import RECALL_MEMORY, recall_model
from hf_models.arm.trainer_arm import ArmTrainer, ArmTrainingArguments, find_arm, prepare_for_training

RECALL = "recall"
RECALL_TASKS = ("associative_recall", "associative_recall_overwrite", "multi_query_recall")


@dataclass
class ArmArguments:
    """What is trained, and on what."""

    model: str = field(
        default=RECALL, metadata={"help": "Folder or Hub id of a backbone or ARM model; 'recall' is the small one."}
    )
    data: str = field(
        default="associative_recall",
        metadata={
            "help": "Folder or file of .txt, .jsonl or .parquet, a Hub id, 'packaged' (installed prose), or a "
            f"recall task: {', '.join(RECALL_TASKS)}."
        },
    )
    block_size: int = field(default=512, metadata={"help": "Tokens per training sequence of text."})
    context_length: int = field(default=48, metadata={"help": "Context tokens of a recall sequence."})
    num_facts: int = field(default=8, metadata={"help": "Facts of a recall sequence."})
    branching: int | None = field(default=None, metadata={"help": "Children per router node (default 4)."})
    levels: int | None = field(default=None, metadata={"help": "Router levels (default 3; recall model 1)."})
    slots_per_bucket: int | None = field(default=None, metadata={"help": "Slots per bucket (default 4)."})
    window: int | None = field(default=None, metadata={"help": "Exact window (default 64; recall model 8)."})
    sinks: int | None = field(
        default=None, metadata={"help": "First tokens kept exactly (default 4; recall model 0)."}
    )
    read_policy: str | None = field(
        default=None, metadata={"help": "all, fixed or adaptive (default adaptive; recall all)."}
    )
    gate_bias: float | None = field(default=None, metadata={"help": "Initial bias of the write gate (default 0)."})
    merge: bool = field(default=True, metadata={"help": "Merge LoRA adapters into the saved weights."})


MEMORY_FIELDS = ("branching", "levels", "slots_per_bucket", "window", "sinks", "read_policy", "gate_bias")


def load_model(options: ArmArguments, seed: int):
    """The model to train and its tokenizer (`None` for the recall model)."""
    memory = {name: getattr(options, name) for name in MEMORY_FIELDS if getattr(options, name) is not None}
    if options.model == RECALL:
        return recall_model(seed, RECALL_MEMORY | {f"arm_{name}": value for name, value in memory.items()}), None
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if isinstance(model.config, ArmConfig):
        if memory:
            raise ValueError(f"{options.model} has a memory already; leave out {', '.join('--' + m for m in memory)}.")
        return model, tokenizer
    return convert_to_arm(model, **memory), tokenizer


def load_data(options: ArmArguments, args: ArmTrainingArguments, tokenizer) -> Dataset:
    """Training rows of `input_ids` and `labels`."""
    if options.data in RECALL_TASKS:
        rows = max(1, args.max_steps) * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        task = getattr(recall_tasks, options.data)
        generator = torch.Generator().manual_seed(args.seed)
        input_ids, labels = task(rows, options.context_length, options.num_facts, generator=generator)
        labels = recall_tasks.shift_labels(labels)
        return Dataset.from_dict({"input_ids": input_ids.numpy(), "labels": labels.numpy()}).with_format("torch")
    if tokenizer is None:
        raise ValueError(
            f"--data {options.data} is text, but --model recall reads recall tasks: {', '.join(RECALL_TASKS)}."
        )
    documents = text_blocks.load_text_documents(options.data, split="train")
    return text_blocks.blocks(documents, tokenizer, options.block_size).with_format("torch")


def main(arguments: Sequence[str] | None = None) -> Path:
    """Parse, build, train, save.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line; `sys.argv` by default.

    Returns:
        `Path`: the folder of the trained model.
    """
    parser = HfArgumentParser((ArmArguments, ArmTrainingArguments), description=__doc__.split("\n\n")[0])
    options, args = parser.parse_args_into_dataclasses(arguments)
    if args.max_steps < 1:
        args.max_steps = 800
    if options.model == RECALL:
        args.train_mode = "full"
    set_seed(args.seed)
    model, tokenizer = load_model(options, args.seed)
    data = load_data(options, args, tokenizer)
    trainer = ArmTrainer(
        model=prepare_for_training(model, args),
        args=args,
        train_dataset=data,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    wanted = args.resume_from_checkpoint
    if wanted is not None and wanted.lower() in ("true", "1", "yes"):
        wanted = last_complete_checkpoint(args.output_dir)
    trainer.train(resume_from_checkpoint=wanted)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        trained = trainer.accelerator.unwrap_model(trainer.model)
        if args.train_mode == "memory+lora" and options.merge:
            trained = trained.merge_and_unload()
        trained = find_arm(trained) if options.merge or args.train_mode != "memory+lora" else trained
        trained.save_pretrained(args.output_dir)
        if tokenizer is not None:
            tokenizer.save_pretrained(args.output_dir)
    return Path(args.output_dir)


if __name__ == "__main__":
    main()
