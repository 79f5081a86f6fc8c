"""Earlier ways to write a fixed number of slots, inside ARM's own reader: same window, sinks and joint softmax.

| kind | paper | a token writes |
| --- | --- | --- |
| `"abc"` | ABC, arXiv 2110.02488 | to all M, φ_t = softmax(W h_t): N_m ← N_m + φ_tm k_t, c_m ← c_m + φ_tm |
| `"gsa"` | GSA, arXiv 2409.07146 | to all M, forget gate α_t = σ(W h_t): N_m ← α_tm N_m + (1 − α_tm) k_t |

Both read N_m / c_m as ARM does (`arm_debias`), so that a slot hardly written is not a vector near zero; published GSA
has no mass. `damping` is the τ of its α = σ(W h)^(1/τ), 8 as published: with 1, an untrained slot forgets half of what
it holds at every token, and the recall task is not learned at all.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from hf_models.arm.cache_arm import ArmCacheLayer
from hf_models.arm.configuration_arm import ArmConfig
from hf_models.arm.memory_arm import ArmMemory, ArmStats
from hf_models.arm.ops_arm import ArmState, Writes

from .dense_oracle_arm import scan_dense_writes

KINDS = ("abc", "gsa")


class DenseSlotMemory(ArmMemory):
    """The memory of one layer whose tokens write to all slots, in the place of ARM's router, slot choice and gate.

    Args:
        config (`ArmConfig`): The model's configuration; its M, window, sinks, chunk and `arm_debias` are used.
        kind (`str`): `"abc"` or `"gsa"`.
        damping (`float`, defaults to 8): GSA's α is σ(W h)^(1/damping).

    Raises:
        ValueError: An unknown kind, or a damping that is not positive.
    """

    def __init__(self, config: ArmConfig, kind: str, damping: float = 8.0):
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}, but must be one of {KINDS}.")
        if damping <= 0:
            raise ValueError(f"damping is {damping}, but must be positive.")
        nn.Module.__init__(self)  # none of ARM's own parameters
        self.config, self.kind, self.damping = config, kind, damping
        self.num_heads = config.num_key_value_heads
        self.head_dim = config.arm_head_dim
        self.stats: ArmStats | None = None
        self.control = nn.Linear(config.hidden_size, self.num_heads * config.arm_slots)  # W, one row per head and slot
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values: weights as the model's, bias zero."""
        nn.init.normal_(self.control.weight, std=self.config.initializer_range)
        nn.init.zeros_(self.control.bias)

    def write_weights(self, hidden: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decay δ and weight w of every token and slot.

        Args:
            hidden (`torch.Tensor`): Normed hidden states h, (B, T, D).
            valid (`torch.Tensor`): Real tokens, (B, T) bool; padding leaves every slot as it is.

        Returns:
            `tuple`: δ and w, (B, K, T, M).
        """
        control = F.linear(hidden.to(self.dtype), self.control.weight.to(self.dtype), self.control.bias.to(self.dtype))
        control = control.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, K, T, M)
        real = valid[:, None, :, None]
        if self.kind == "abc":
            weight = torch.where(real, control.softmax(-1), 0.0)
            return torch.ones_like(weight), weight
        decay = torch.where(real, (F.logsigmoid(control) / self.damping).exp(), 1.0)
        return decay, 1 - decay

    def _scan(
        self,
        hidden: torch.Tensor,
        q: torch.Tensor,
        q_mem: torch.Tensor,
        q_rot: torch.Tensor,
        writes: Writes,
        state: ArmState,
        layer: ArmCacheLayer | None,
        scaling: float,
        dropout: float,
    ) -> tuple[torch.Tensor, ArmState, ArmStats]:
        if layer is not None:
            if layer.record_past:
                raise ValueError(
                    "a model with densely written slots cannot take tokens back: decode without assistant."
                )
            layer.note(writes)
        decay, weight = self.write_weights(hidden, writes.valid)
        chunk, debias = self.config.arm_chunk, self.config.arm_debias
        (output,), state = scan_dense_writes(
            state, q_mem, q_rot, writes, decay, weight, scaling, (None,), chunk, debias, dropout
        )
        none = weight.new_zeros(())  # no routing to balance, no reading to save
        buckets = torch.full(weight.shape[:3], self.config.arm_buckets, device=weight.device)
        stats = ArmStats(none, none, buckets, weight.detach().sum(-1), weight.argmax(-1), writes.valid)
        return output, state, stats

    def _decode(
        self,
        hidden: torch.Tensor,
        q: torch.Tensor,
        q_mem: torch.Tensor,
        q_rot: torch.Tensor,
        writes: Writes,
        layer: ArmCacheLayer,
        scaling: float,
    ) -> tuple[torch.Tensor, None]:
        output, state, _ = self._scan(hidden, q, q_mem, q_rot, writes, layer.state, layer, scaling, 0.0)
        layer.assign(state)
        return output, None


def dense_slot_model(model: PreTrainedModel, kind: str, damping: float = 8.0, seed: int = 0) -> PreTrainedModel:
    """Replace the memories of an ARM model by densely written slots.

    Args:
        model (`PreTrainedModel`): An ARM model; changed in place. Its other weights stay.
        kind (`str`): `"abc"` or `"gsa"`.
        damping (`float`, defaults to 8): GSA's α is σ(W h)^(1/damping).
        seed (`int`, defaults to 0): Seed of the new weights.

    Returns:
        The same model.

    Raises:
        ValueError: The model has no memory to replace, or `kind` is unknown.

    Example:
        ```python
        from hf_models.arm.train_recall_arm import RECALL_MEMORY, recall_model, train_recall
        from hf_pipelines.arm import dense_slot_model

        model = train_recall(dense_slot_model(recall_model(0, RECALL_MEMORY), "abc"), max_steps=800, seed=0)
        ```
    """
    holders = [module for module in model.modules() if isinstance(getattr(module, "arm", None), ArmMemory)]
    if not holders:
        raise ValueError(f"{type(model).__name__} has no memory to replace; make one with convert_to_arm first.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for holder in holders:
            weight = next(holder.parameters())
            memory = DenseSlotMemory(model.config, kind, damping).to(weight.device)
            holder.arm = memory.train(holder.training)
    return model
