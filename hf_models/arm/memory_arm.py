"""The routed memory of one attention layer: its parameters, and how new tokens write and read."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .cache_arm import ArmCacheLayer
from .configuration_arm import ArmConfig
from .ops_arm import (
    ArmState,
    ReadPlan,
    Writes,
    balance_loss,
    bucket_ranks,
    child_logits,
    greedy_descent,
    interpolate_reads,
    leaf_log_probs,
    one_hot,
    proceed_at,
    read_cost,
    read_width,
    rotate,
    threshold_gate,
    unit_direction,
    write_pointers,
)
from .scan_arm import arm_scan, arm_step, empty_state
from .training_free_arm import random_directions, training_free_step


class ArmStats(NamedTuple):
    """What a layer did with the tokens of its last call; the two losses carry a gradient."""

    balance_loss: torch.Tensor | None  # scalar, 1 for even routing; None for a single token
    read_cost: torch.Tensor | None  # scalar, mean (M + c_M)/G; None for a single token
    read_buckets: torch.Tensor  # (B, K, T) buckets read
    gate: torch.Tensor  # (B, K, T) γ after the threshold
    slot: torch.Tensor  # (B, K, T) slot written
    valid: torch.Tensor  # (B, T) real tokens


class ArmMemory(nn.Module):
    """Router, slot keys, write gate and read policy of one layer (arXiv 2609.24417).

    Args:
        config (`ArmConfig`): The model's configuration.
    """

    def __init__(self, config: ArmConfig):
        super().__init__()
        self.config = config
        self.num_heads = config.num_key_value_heads  # K
        self.head_dim = config.arm_head_dim
        b, L = config.arm_branching, config.arm_levels
        G, S = config.arm_buckets, config.arm_slots_per_bucket
        self.stats: ArmStats | None = None
        if config.arm_mode == "training_free":
            directions = random_directions(self.num_heads, G, self.head_dim, config.arm_seed)
            self.register_buffer("directions", directions)
            return
        children = sum(b**level for level in range(1, L + 1))
        self.router = nn.Parameter(torch.empty(self.num_heads, children, self.head_dim))  # R
        self.slot_keys = nn.Parameter(torch.empty(self.num_heads, G, S, self.head_dim))  # Z
        self.gate = nn.Linear(config.hidden_size, self.num_heads)  # w_γ, b_γ
        self.policy = nn.Linear(config.hidden_size, self.num_heads)  # w_π, b_π
        self.policy_scale = nn.Parameter(torch.empty(self.num_heads))  # ρ
        self.policy_bias = nn.Parameter(torch.empty(self.num_heads, G))  # β^π
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values: slot keys zero, gate at its bias, policy that reads everything."""
        config = self.config
        if config.arm_mode == "training_free":
            if self.directions.device.type != "meta":
                directions = random_directions(self.num_heads, config.arm_buckets, self.head_dim, config.arm_seed)
                self.directions.copy_(directions)
            return
        nn.init.normal_(self.router, std=2 / self.head_dim**0.5)
        nn.init.zeros_(self.slot_keys)
        nn.init.normal_(self.gate.weight, std=config.initializer_range)
        nn.init.constant_(self.gate.bias, config.arm_gate_bias)
        nn.init.normal_(self.policy.weight, std=config.initializer_range)
        nn.init.zeros_(self.policy.bias)
        nn.init.zeros_(self.policy_scale)
        nn.init.constant_(self.policy_bias, 2.0)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the memory's arithmetic."""
        return getattr(torch, self.config.arm_state_dtype)

    # ---- planning: what the tokens write and how much they read ----

    def plan_writes(
        self,
        hidden: torch.Tensor,
        k: torch.Tensor,
        valid: torch.Tensor,
        counters: torch.Tensor,
        probabilities: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Bucket, slot and gate of every token; none of them depends on what the slots hold.

        Args:
            hidden (`torch.Tensor`): Normed hidden states h, (B, T, D).
            k (`torch.Tensor`): Keys before rotation, (B, K, T, d).
            valid (`torch.Tensor`): Real tokens, (B, T) bool.
            counters (`torch.Tensor`): Write events so far, (B, K, G).
            probabilities (`bool`, defaults to `True`): Compute those of the leaves, which training and losses need.

        Returns:
            Bucket g (B, K, T), slot y (B, K, T), gate γ (B, K, T), leaf log-probabilities (B, K, T, G) or `None`.
        """
        config, dtype = self.config, self.dtype
        z = child_logits(k.to(dtype), self.router.to(dtype))
        log_p = leaf_log_probs(z, config.arm_branching, config.arm_levels) if probabilities else None
        bucket = greedy_descent(z, config.arm_branching, config.arm_levels)
        if config.arm_gate:
            gate = F.linear(hidden.to(dtype), self.gate.weight.to(dtype), self.gate.bias.to(dtype))
            gate = threshold_gate(gate.sigmoid().transpose(1, 2), config.arm_write_threshold)
        else:
            gate = torch.ones_like(bucket, dtype=dtype)
        gate = torch.where(valid[:, None], gate, 0.0)

        pointer = write_pointers(bucket, gate > 0, counters, config.arm_slots_per_bucket)
        keys = self.slot_keys.to(dtype)  # ζ = ⟨Z_g, k̂⟩ + β·1[j = pointer]
        scores = _slot_scores(keys, bucket, unit_direction(k.to(dtype)))
        scores = scores + config.arm_slot_prior * one_hot(pointer, config.arm_slots_per_bucket)
        if self.training:
            gumbel = -torch.empty_like(scores).exponential_().log()
            scores = (scores + gumbel) / config.arm_tau
        choice = scores.argmax(-1)
        if self.training:
            # single-path straight-through: the probability of the path taken scales the gate, forward by exactly 1
            p_slot = scores.softmax(-1).gather(-1, choice[..., None]).squeeze(-1)
            p = log_p.gather(-1, bucket[..., None]).squeeze(-1).exp() * p_slot
            gate = gate * (1 + (p - p.detach()))
        return bucket, bucket * config.arm_slots_per_bucket + choice, gate, log_p

    def plan_reads(self, hidden: torch.Tensor, q: torch.Tensor) -> ReadPlan:
        """How many buckets every token reads, best first.

        Args:
            hidden (`torch.Tensor`): Normed hidden states, (B, T, D).
            q (`torch.Tensor`): Queries before rotation, (B, K, r, T, d).

        Returns:
            [`ReadPlan`].
        """
        config, dtype = self.config, self.dtype
        if config.arm_read_policy == "all":
            return ReadPlan(None, None, None)
        z = child_logits(q.to(dtype), self.router.to(dtype)[:, None])
        scores = leaf_log_probs(z, config.arm_branching, config.arm_levels)
        scores = scores.mean(2) if scores.shape[2] > 1 else scores[:, :, 0]  # ℓ, (B, K, T, G)
        ordered, rank = bucket_ranks(scores)
        if config.arm_read_policy == "fixed":
            return ReadPlan(rank, torch.full_like(rank[..., 0], config.arm_read_buckets), None)
        logit = F.linear(hidden.to(dtype), self.policy.weight.to(dtype), self.policy.bias.to(dtype)).transpose(1, 2)
        evidence = ordered + math.log(config.arm_buckets)
        proceed = logit[..., None] + self.policy_scale.to(dtype)[:, None, None] * evidence
        proceed = (proceed + self.policy_bias.to(dtype)[:, None]).sigmoid()  # c_j
        width = read_width(proceed, config.arm_min_read, config.arm_epsilon if self.training else 0.0)
        return ReadPlan(rank, width, proceed_at(proceed, width) if self.training else None)

    def slot_mask(self, plan: ReadPlan, extra: int = 0) -> torch.Tensor | None:
        """Slots of the first M + `extra` buckets by rank, (B, K, T, M) bool; `None` for all."""
        if plan.rank is None:
            return None
        mask = plan.rank < plan.width[..., None] + extra
        return mask[..., None].expand(*mask.shape, self.config.arm_slots_per_bucket).flatten(-2)

    # ---- attention ----

    def forward(
        self,
        hidden: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries_rotated: torch.Tensor,
        keys_rotated: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        valid: torch.Tensor,
        scaling: float,
        layer: ArmCacheLayer | None = None,
        dropout: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over slots, sinks and window.

        Args:
            hidden (`torch.Tensor`): Normed hidden states, (B, T, D).
            queries (`torch.Tensor`): Before rotation, (B, H, T, d).
            keys (`torch.Tensor`): Before rotation, (B, K, T, d).
            values (`torch.Tensor`): (B, K, T, d_v).
            queries_rotated (`torch.Tensor`): After rotation, (B, H, T, d).
            keys_rotated (`torch.Tensor`): After rotation, (B, K, T, d).
            rotation (`tuple`): cos and sin (d,) of the constant distance Δ.
            valid (`torch.Tensor`): Real tokens, (B, T) bool; padding last.
            scaling (`float`): s.
            layer (`ArmCacheLayer`, *optional*): Memory to go on with, changed in place; a fresh one by default.
            dropout (`float`, defaults to 0): Dropout of the probabilities.

        Returns:
            Output (B, T, H, d_v), and for a single token with a cache its probabilities over slots, sinks and the
            places of the ring (B, H, 1, M + n_s + W).
        """
        queries_rotated = queries_rotated.unflatten(1, (self.num_heads, -1))
        queries = queries.unflatten(1, (self.num_heads, -1))  # (B, K, r, T, d)
        q_mem = rotate(queries.to(self.dtype), *(x.to(self.dtype) for x in rotation))
        if layer is not None and not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        state = layer.state if layer is not None else self._fresh(keys, values)

        def part(start: int, stop: int) -> tuple:
            plan = (x[..., start:stop, :] for x in (queries, q_mem, queries_rotated))
            writes = (x[:, :, start:stop] for x in (keys, values, keys_rotated))
            return (hidden[:, start:stop], *plan, Writes(*writes, None, None, None, valid[:, start:stop]))

        length = hidden.shape[1]
        if self.config.arm_mode == "training_free":
            outputs, weights = [], None
            if layer is not None:
                layer.directions = self.directions
                layer.note(part(0, length)[-1])
            for t in range(length):
                _, _, q_far, q_near, writes = part(t, t + 1)
                output, weights = training_free_step(state, q_far, q_near, writes, self.directions, scaling)
                outputs.append(output)
            return self._merge(outputs, values.dtype), weights if length == 1 else None
        if length == 1 and layer is not None:
            output, weights = self._decode(*part(0, 1), layer, scaling)
            return self._merge([output], values.dtype), weights

        outputs, stats = [], []
        for start in range(0, length, self.config.arm_segment):
            output, state, stat = self._scan(
                *part(start, start + self.config.arm_segment), state, layer, scaling, dropout
            )
            outputs.append(output)
            stats.append(stat)
        if layer is not None:
            layer.assign(state)
        self.stats = _join(stats)
        return self._merge(outputs, values.dtype), None

    def _fresh(self, keys: torch.Tensor, values: torch.Tensor) -> ArmState:
        config = self.config
        sizes = (config.arm_buckets, config.arm_slots_per_bucket, config.arm_window, config.arm_sinks)
        raw = config.arm_mode == "training_free"
        shape = (*keys.shape[:2], keys.shape[-1], values.shape[-1])
        return empty_state(*shape, *sizes, keys.dtype, keys.device, self.dtype, raw)

    def _merge(self, outputs: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """(B, K, r, t, d_v) pieces to (B, T, H, d_v)."""
        return torch.cat(outputs, 3).flatten(1, 2).transpose(1, 2).to(dtype)

    def _decode(
        self,
        hidden: torch.Tensor,
        q: torch.Tensor,
        q_mem: torch.Tensor,
        q_rot: torch.Tensor,
        writes: Writes,
        layer: ArmCacheLayer,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counters, noisy = layer.state.ev, self.training
        bucket, slot, gate, _ = self.plan_writes(hidden, writes.k, writes.valid, counters, probabilities=noisy)
        reads = self.plan_reads(hidden, q)
        writes = writes._replace(gate=gate, slot=slot, bucket=bucket)
        layer.note(writes)
        output, p = arm_step(layer.state, q_mem, q_rot, writes, scaling, self.slot_mask(reads), self.config.arm_debias)
        if not torch.compiler.is_compiling():
            width = reads.width if reads.width is not None else torch.full_like(bucket, self.config.arm_buckets)
            self.stats = ArmStats(None, None, width, gate, slot, writes.valid)
        return output, p.flatten(1, 2)[:, :, None]

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
        bucket, slot, gate, log_p = self.plan_writes(hidden, writes.k, writes.valid, state.ev)
        reads = self.plan_reads(hidden, q)
        writes = writes._replace(gate=gate, slot=slot, bucket=bucket)
        if layer is not None:
            layer.note(writes)
        masks = (self.slot_mask(reads),)
        if reads.proceed is not None:
            masks = (*masks, self.slot_mask(reads, extra=1))
        chunk, debias = self.config.arm_chunk, self.config.arm_debias
        outputs, state = arm_scan(state, q_mem, q_rot, writes, scaling, masks, chunk, debias, dropout)
        output = outputs[0]
        if reads.proceed is not None:
            output = interpolate_reads(*outputs, reads.proceed[:, :, None])
        return output, state, self._statistics(writes, log_p, reads)

    def _statistics(self, writes: Writes, log_p: torch.Tensor, reads: ReadPlan) -> ArmStats:
        G, gate = self.config.arm_buckets, writes.gate
        valid = writes.valid[:, None].to(gate.dtype)
        width = reads.width if reads.width is not None else torch.full_like(writes.bucket, G)
        proceed = reads.proceed if reads.proceed is not None else torch.zeros_like(gate)
        cost = (read_cost(width, proceed) * valid).sum() / (valid.sum() * gate.shape[1]).clamp_min(1) / G
        balance = balance_loss(writes.bucket, log_p.exp(), gate)
        return ArmStats(balance, cost, width.detach(), gate.detach(), writes.slot, writes.valid)


def _slot_scores(keys: torch.Tensor, bucket: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """⟨Z_{g,j}, k̂⟩ for the bucket g of every token: keys (K, G, S, d), bucket (B, K, T), unit (B, K, T, d)."""
    scores = (unit @ keys.flatten(1, 2).transpose(-1, -2)).unflatten(-1, keys.shape[1:3])  # (B, K, T, G, S)
    index = bucket[..., None, None].expand(*bucket.shape, 1, keys.shape[2])
    return scores.gather(-2, index).squeeze(-2)


def _join(stats: list[ArmStats]) -> ArmStats:
    """The statistics of several segments as one."""
    if len(stats) == 1:
        return stats[0]
    counts = torch.stack([stat.valid.sum() for stat in stats]).clamp_min(1)
    share = counts / counts.sum()
    means = [
        sum(w * getattr(stat, name) for w, stat in zip(share, stats, strict=True)) for name in ArmStats._fields[:2]
    ]
    return ArmStats(*means, *(torch.cat([getattr(s, name) for s in stats], -1) for name in ArmStats._fields[2:]))
