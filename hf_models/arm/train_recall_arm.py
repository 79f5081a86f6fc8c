"""The small models of the recall experiments: one page from data to weights.

A one-layer Llama with 160 tokens learns associative recall: facts among fillers, then questions about them. With a
memory (`ArmConfig` fields) it becomes the method, without it the full-attention model, and with a mask any window.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from datasets_scripts.recall_tasks import VOCAB_SIZE, associative_recall
from hf_models.arm.configuration_arm import ArmLlamaConfig
from hf_models.arm.modeling_arm import ArmLlamaForCausalLM
from hf_models.arm.trainer_arm import read_cost_share

LEARNING_RATE, WARMUP_STEPS, FINAL_SHARE = 1e-2, 30, 0.05
BATCH_SIZE, CONTEXT_LENGTH, NUM_FACTS = 32, 48, 8
CURRICULUM = 0.1875  # share of the steps before the read cost begins to ramp up: 150 of 800

RECALL_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 8192,
    "initializer_range": 0.18,
}
RECALL_MEMORY: dict[str, Any] = {
    "arm_branching": 4,
    "arm_levels": 1,
    "arm_slots_per_bucket": 4,
    "arm_window": 8,
    "arm_sinks": 0,
    "arm_read_policy": "all",
}


def recall_model(seed: int, memory: dict[str, Any] | None = None, num_hidden_layers: int = 1) -> PreTrainedModel:
    """An untrained recall model.

    Args:
        seed (`int`): Seed of the initial weights.
        memory (`dict`, *optional*): Fields of [`ArmConfig`]; full attention without.
        num_hidden_layers (`int`, defaults to 1): Layers.

    Returns:
        `PreTrainedModel`.
    """
    sizes = RECALL_SIZES | {"num_hidden_layers": num_hidden_layers}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if memory is None:
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        else:
            model = ArmLlamaForCausalLM(ArmLlamaConfig(**sizes, **memory))
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.3)
    return model


def learning_rate_share(step: int, max_steps: int) -> float:
    """Linear warm-up, then a cosine to 5 %."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, max_steps - WARMUP_STEPS)
    return FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * progress)) / 2


def train_recall(
    model: PreTrainedModel,
    max_steps: int,
    seed: int,
    task: Callable = associative_recall,
    mask: torch.Tensor | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> PreTrainedModel:
    """Train on fresh sequences of every step; the steps depend on the seed alone.

    Args:
        model (`PreTrainedModel`): Changed in place.
        max_steps (`int`): Optimizer steps of 32 sequences.
        seed (`int`): Seed of the data and of the noise.
        task (`Callable`, defaults to `associative_recall`): Generator of `(input_ids, labels)`.
        mask (`torch.Tensor`, *optional*): 4-D mask for a full-attention model, (1, 1, T, T) bool.
        device (`str`, defaults to `"cpu"`): Where to train.
        progress (`bool`, defaults to `True`): Show a bar.

    Returns:
        The model in evaluation mode.
    """
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, max_steps))
    data = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step in (bar := tqdm(range(max_steps), desc="recall", disable=not progress)):
            input_ids, labels = task(BATCH_SIZE, CONTEXT_LENGTH, NUM_FACTS, generator=data)
            model.read_cost_scale = read_cost_share(step, max_steps, CURRICULUM)
            loss = recall_loss(model, input_ids.to(device), labels.to(device), mask)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 50 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval()


def recall_loss(
    model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Cross-entropy at the questions, plus balance loss and read cost of a model with memory."""
    out = model(input_ids, attention_mask=mask, use_cache=False)
    loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    if getattr(out, "balance_loss", None) is not None:
        loss = loss + model.config.arm_balance_coef * out.balance_loss
        loss = loss + model.config.arm_read_coef * model.read_cost_scale * out.read_cost
    return loss


@torch.no_grad()
def recall_accuracy(
    model: PreTrainedModel,
    context_length: int,
    num_sequences: int = 256,
    seed: int = 999,
    task: Callable[..., tuple[torch.Tensor, torch.Tensor]] = associative_recall,
    logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **task_arguments: Any,
) -> float:
    """Share of the questions answered rightly; 1/8 is chance.

    Args:
        model (`PreTrainedModel`): Any causal language model over the 160 tokens.
        context_length (`int`): Tokens before the questions.
        num_sequences (`int`, defaults to 256): Test sequences.
        seed (`int`, defaults to 999): Their seed.
        task (`Callable`, defaults to `associative_recall`): Generator of `(input_ids, labels)`.
        logits (`Callable`, *optional*): How to get logits from tokens; by default one call of the model.
        **task_arguments: Passed to the task.

    Returns:
        `float`.
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids, labels = task(num_sequences, context_length, generator=generator, **task_arguments)
    right = total = 0
    for ids, wanted in zip(input_ids.split(64), labels.split(64), strict=True):
        ids, wanted = ids.to(model.device), wanted.to(model.device)
        predicted = (logits(ids) if logits is not None else model(ids, use_cache=False).logits).argmax(-1)
        asked = wanted != -100
        right += int((predicted[asked] == wanted[asked]).sum())
        total += int(asked.sum())
    return right / total


def window_mask(length: int, window: int, sinks: int = 0) -> torch.Tensor:
    """Mask (1, 1, T, T) bool of a sliding window and the first `sinks` tokens (StreamingLLM, 2309.17453)."""
    position = torch.arange(length)
    age = position[:, None] - position
    return ((age >= 0) & ((age < window) | (position < sinks)))[None, None]


def main(arguments: Sequence[str] | None = None) -> Path:
    """Train the full-attention recall model that the baselines share, and save it.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line; `sys.argv` by default.

    Returns:
        `Path`: the folder.
    """
    parser = argparse.ArgumentParser(description=main.__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True, help="Folder of the trained model.")
    parser.add_argument("--max_steps", type=int, default=800, help="Optimizer steps of 32 sequences.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of weights and data.")
    options = parser.parse_args(arguments)
    train_recall(recall_model(options.seed), options.max_steps, options.seed).save_pretrained(options.output_dir)
    return options.output_dir


if __name__ == "__main__":
    main()
