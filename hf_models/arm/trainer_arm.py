"""Training a routed memory with transformers' `Trainer`."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

from .convert_arm import full_attention
from .memory_arm import ArmStats
from .modeling_arm import ArmForCausalLM

TRAIN_MODES = ("memory", "memory+lora", "full")
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass
class ArmTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the settings of a memory's training.

    Args:
        train_mode (`str`, defaults to `"memory"`): `"memory"` trains the memory only, `"memory+lora"` also LoRA
            adapters on the attention projections (needs peft), `"full"` everything.
        read_coef, balance_coef, distill_coef (`float`, *optional*): Weights of read cost, balance loss and
            distillation; by default those of the model's configuration.
        read_cost_start (`float`, defaults to 0.375): Share of the steps before the read cost begins to ramp up.
        lora_rank (`int`, defaults to 8): Rank of the LoRA adapters.
    """

    train_mode: str = field(default="memory", metadata={"help": f"What to train: {', '.join(TRAIN_MODES)}."})
    read_coef: float | None = field(default=None, metadata={"help": "Weight of the read cost (default: the model's)."})
    balance_coef: float | None = field(
        default=None, metadata={"help": "Weight of the balance loss (default: the model's)."}
    )
    distill_coef: float | None = field(
        default=None, metadata={"help": "Weight of KL(full attention || memory) (default: the model's)."}
    )
    read_cost_start: float = field(
        default=0.375, metadata={"help": "Share of the steps before the read cost begins to ramp up."}
    )
    lora_rank: int = field(default=8, metadata={"help": "Rank of the LoRA adapters."})

    def __post_init__(self):
        super().__post_init__()
        if self.train_mode not in TRAIN_MODES:
            raise ValueError(f"train_mode={self.train_mode!r} must be one of {', '.join(TRAIN_MODES)}.")
        if not 0 <= self.read_cost_start < 1:
            raise ValueError(f"read_cost_start={self.read_cost_start} must be in [0, 1).")


def read_cost_share(step: int, max_steps: int, start: float) -> float:
    """0 for the first share `start` of training, then a linear ramp to 1.

    A policy that is charged from the first step stops reading before the memory holds anything worth reading.
    """
    first = start * max_steps
    return min(1.0, max(0.0, (step - first) / max(1.0, max_steps - first)))


def prepare_for_training(model: ArmForCausalLM, args: ArmTrainingArguments) -> nn.Module:
    """Freeze what `train_mode` does not train, and add adapters where it asks for them.

    Args:
        model ([`ArmForCausalLM`]): The model, changed in place.
        args ([`ArmTrainingArguments`]): `train_mode` and `lora_rank` count.

    Returns:
        `nn.Module`: the model, or a `PeftModel` around it.
    """
    if args.train_mode == "memory+lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(
            model,
            LoraConfig(
                r=args.lora_rank,
                lora_alpha=2 * args.lora_rank,
                target_modules=LORA_TARGETS,
                modules_to_save=["arm"],
                task_type="CAUSAL_LM",
            ),
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(args.train_mode == "full" or ".arm." in name)
    return model


class ArmTrainer(Trainer):
    """`Trainer` that adds distillation, ramps the read cost and logs what the memory does.

    Logged beside the loss, as means since the last log: `gate_mean`, `read_fraction` (buckets read over all),
    `balance_loss`, `slot_entropy` (entropy of the writes over slots by log M; below 0.5 the router is collapsing),
    `dead_slots` (share of slots without a write).

    Args:
        model ([`ArmForCausalLM`] or a PEFT model around one): What to train.
        args ([`ArmTrainingArguments`]): Settings.
        **kwargs: As for `Trainer`.

    Raises:
        ValueError: There is no ARM model inside `model`.
    """

    def __init__(self, model: nn.Module | None = None, args: ArmTrainingArguments | None = None, **kwargs: Any):
        super().__init__(model=model, args=args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the memory's losses are means too: all are divided alike
        self.arm = find_arm(self.model)
        for name in ("read_coef", "balance_coef", "distill_coef"):
            value = getattr(args, name, None)
            if value is not None:
                setattr(self.arm.config, f"arm_{name}", value)
        self._reset_record()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ):
        """Cross-entropy with balance loss and read cost (inside the model), plus distillation while training."""
        self.arm.read_cost_scale = read_cost_share(
            self.state.global_step, self.state.max_steps, self.args.read_cost_start
        )
        outputs = model(**inputs, use_cache=False)
        loss = outputs.loss
        if model.training:
            coefficient = self.arm.config.arm_distill_coef
            if coefficient > 0:
                divergence = distillation_loss(model, inputs, outputs.logits)
                self._record["distillation"] = self._record.get("distillation", 0.0) + float(divergence.detach())
                loss = loss + coefficient * divergence
            self._observe(outputs)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None, *args: Any, **kwargs: Any) -> None:
        """Add the memory's figures to a training log."""
        if "loss" in logs and self._calls:
            logs = logs | {name: value / self._calls for name, value in self._record.items()}
            if self._writes is not None:
                entropy, dead = slot_use(self._writes)
                logs |= {"slot_entropy": entropy, "dead_slots": dead}
            self._reset_record()
        super().log(logs, start_time, *args, **kwargs)

    def _reset_record(self) -> None:
        self._record: dict[str, float] = {}
        self._calls = 0
        self._writes: torch.Tensor | None = None

    @torch.no_grad()
    def _observe(self, outputs: Any) -> None:
        if outputs.gate_mean is None:
            return
        buckets = self.arm.config.arm_buckets
        figures = {
            "gate_mean": outputs.gate_mean,
            "read_fraction": outputs.read_buckets.mean() / buckets,
            "balance_loss": outputs.balance_loss,
        }
        for name, value in figures.items():
            self._record[name] = self._record.get(name, 0.0) + float(value)
        self._calls += 1
        writes = slot_writes(self.arm.arm_stats(), self.arm.config.arm_slots)
        self._writes = writes if self._writes is None else self._writes + writes


def find_arm(model: nn.Module) -> ArmForCausalLM:
    """The ARM model inside a wrapper (PEFT, DDP).

    Raises:
        ValueError: There is none.
    """
    for module in model.modules():
        if isinstance(module, ArmForCausalLM):
            return module
    raise ValueError(f"{type(model).__name__} holds no ARM model; make one with convert_to_arm(model).")


def distillation_loss(model: nn.Module, inputs: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) per predicted token; the teacher is the same backbone with exact attention and no adapter.

    Args:
        model (`nn.Module`): The student, possibly wrapped.
        inputs (`dict`): Its inputs; tokens with label −100 do not count.
        logits (`torch.Tensor`): The student's logits, (B, T, V).

    Returns:
        `torch.Tensor`: a scalar.
    """
    plain = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad(), ExitStack() as stack:
        adapter = next((m.disable_adapter for m in model.modules() if hasattr(m, "disable_adapter")), nullcontext)
        stack.enter_context(adapter())
        stack.enter_context(full_attention(model))
        teacher = find_arm(model)(**plain, use_cache=False).logits
    divergence = F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    counted = (inputs["labels"][:, 1:] != -100).to(divergence.dtype)  # logits t predict label t + 1
    return (divergence[:, :-1] * counted).sum() / counted.sum().clamp_min(1)


def slot_writes(stats: list[ArmStats], slots: int) -> torch.Tensor:
    """Number of writes into every slot, (layers, K, M)."""
    counts = []
    for stat in stats:
        written = (stat.gate > 0).double().transpose(0, 1).flatten(1)  # (K, B·T)
        slot = stat.slot.transpose(0, 1).flatten(1)
        counts.append(
            torch.zeros(slot.shape[0], slots, dtype=torch.double, device=slot.device).scatter_add_(1, slot, written)
        )
    return torch.stack(counts).cpu()


def slot_use(writes: torch.Tensor) -> tuple[float, float]:
    """Entropy of the writes over slots by log M, and the share of slots without a write; means over layers, heads."""
    share = writes / writes.sum(-1, keepdim=True).clamp_min(1)
    entropy = -(share * share.clamp_min(1e-12).log()).sum(-1) / torch.tensor(float(max(2, writes.shape[-1]))).log()
    return float(entropy.mean()), float((writes == 0).double().mean())
