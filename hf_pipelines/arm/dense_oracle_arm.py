"""Slots written densely: every token may change all M slots, and the weights of all of them are computed.

    N_m ← δ_tm N_m + w_tm k_t,   U_m ← δ_tm U_m + w_tm v_t,   c_m ← δ_tm c_m + w_tm

with a decay δ and a weight w for every token and slot, neither reading the state. ARM is the case where one slot y_t
has w = γ_t, δ = 1 − γ_t and all others w = 0, δ = 1: [`dense_scan`] computes it this way, C·C·M weights per chunk, as
an oracle for the index form of [`~hf_models.arm.scan_arm.arm_scan`] and as what that form is faster than. ABC and GSA
(`dense_slots_arm`) are other choices of δ and w.

Shapes as in `hf_models.arm.ops_arm`.
"""

import torch
import torch.nn.functional as F

from hf_models.arm.ops_arm import MASS_FLOOR, ArmState, Writes, count_events
from hf_models.arm.scan_arm import BLOCK, local_part, move_window


def dense_scan(
    state: ArmState,
    q_mem: torch.Tensor,
    q_rot: torch.Tensor,
    writes: Writes,
    scaling: float,
    read_masks: tuple[torch.Tensor | None, ...] = (None,),
    chunk: int = 16,
    debias: bool = True,
    dropout: float = 0.0,
) -> tuple[list[torch.Tensor], ArmState]:
    """The scan of ARM with the write weights of all slots; arguments and results are those of `arm_scan`.

    Args:
        state (`ArmState`): Memory before the tokens; not changed.
        q_mem (`torch.Tensor`): Queries rotated by the constant distance Δ, (B, K, r, T, d).
        q_rot (`torch.Tensor`): Queries rotated by their position, (B, K, r, T, d).
        writes (`Writes`): What the tokens write; padding has γ = 0 and comes last.
        scaling (`float`): s.
        read_masks (`tuple`): For each output, which slots a token may read, (B, K, T, M) bool, or `None` for all.
        chunk (`int`, defaults to 16): C.
        debias (`bool`, defaults to `True`): Divide by the mass of a slot.
        dropout (`float`, defaults to 0): Dropout of the probabilities.

    Returns:
        One output (B, K, r, T, d_v) per mask, and the state after the tokens.
    """
    gate = writes.gate.to(state.N.dtype)
    weight = gate[..., None] * F.one_hot(writes.slot, state.c.shape[-1]).to(gate.dtype)  # (B, K, T, M)
    outputs, moved = scan_dense_writes(
        state, q_mem, q_rot, writes, 1 - weight, weight, scaling, read_masks, chunk, debias, dropout
    )
    event = (writes.gate > 0) & writes.valid[:, None]
    return outputs, moved._replace(ev=count_events(writes.bucket, event, state.ev))


def scan_dense_writes(
    state: ArmState,
    q_mem: torch.Tensor,
    q_rot: torch.Tensor,
    writes: Writes,
    decay: torch.Tensor,
    weight: torch.Tensor,
    scaling: float,
    read_masks: tuple[torch.Tensor | None, ...] = (None,),
    chunk: int = 16,
    debias: bool = True,
    dropout: float = 0.0,
) -> tuple[list[torch.Tensor], ArmState]:
    """Write T tokens into all slots and read after each write, with ARM's window, sinks and joint softmax.

    Args:
        state (`ArmState`): Memory before the tokens; not changed.
        q_mem (`torch.Tensor`): Queries rotated by the constant distance Δ, (B, K, r, T, d).
        q_rot (`torch.Tensor`): Queries rotated by their position, (B, K, r, T, d).
        writes (`Writes`): Keys, values and which tokens are real; gate, slot and bucket are not read.
        decay (`torch.Tensor`): δ, (B, K, T, M); 1 for padding, which comes last.
        weight (`torch.Tensor`): w, (B, K, T, M); 0 for padding.
        scaling (`float`): s.
        read_masks (`tuple`): As in [`dense_scan`].
        chunk (`int`, defaults to 16): C.
        debias (`bool`, defaults to `True`): Divide by the mass of a slot.
        dropout (`float`, defaults to 0): Dropout of the probabilities.

    Returns:
        One output (B, K, r, T, d_v) per mask, and the state after the tokens, its counters as before.
    """
    dtype, (length, d) = state.N.dtype, writes.k.shape[2:]
    block = chunk * max(1, min(BLOCK, length) // chunk)
    pad = -length % block
    q_mem, q_rot = (F.pad(q.to(dtype), (0, 0, 0, pad)) for q in (q_mem, q_rot))
    moved = move_window(state, writes)
    local_logits, sink_values, span_values = local_part(state, moved, q_rot, writes, block, scaling)
    # [k | v | 1]: the three accumulators of a slot obey one recurrence
    kv1 = torch.cat((writes.k, writes.v), -1).to(dtype).masked_fill(~writes.valid[:, None, :, None], 0)
    kv1 = F.pad(F.pad(kv1, (0, 1), value=1.0), (0, 0, 0, pad))
    decay = F.pad(decay, (0, 0, 0, pad), value=1.0)
    weight = F.pad(weight, (0, 0, 0, pad))
    read_masks = [None if mask is None else F.pad(mask, (0, 0, 0, pad)) for mask in read_masks]

    # cut once: the gradient of a slice inside the loop would be as long as the text for every chunk
    cuts = (decay.split(chunk, 2), weight.split(chunk, 2), kv1.split(chunk, 2))
    queries, locals_ = q_mem.split(chunk, 3), local_logits.split(chunk, 3)
    span_values = span_values.unbind(2)
    carry = torch.cat((state.N, state.U, state.c[..., None]), -1)  # (B, K, M, d + d_v + 1)
    pieces: list[list[torch.Tensor]] = [[] for _ in read_masks]
    for i, (delta, w, x) in enumerate(zip(*cuts, strict=True)):
        P, a = dense_weights(delta, w)
        k, v, _ = x.split((d, state.U.shape[-1], 1), -1)
        N0, U0, c0 = carry.split((d, state.U.shape[-1], 1), -1)
        mass = P * c0.transpose(-1, -2) + a.sum(2)  # (B, K, C, M)
        holds = mass > MASS_FLOOR
        norm = torch.where(holds, mass, 1.0) if debias else torch.ones_like(mass)
        found = P[:, :, None] * (queries[i] @ N0[:, :, None].transpose(-1, -2))
        fresh = torch.einsum("bkrts,bkstm->bkrtm", queries[i] @ k[:, :, None].transpose(-1, -2), a)
        logits = (found + fresh) * (scaling / norm[:, :, None])
        near = span_values[i * chunk // block][:, :, None]
        for mask, piece in zip(read_masks, pieces, strict=True):
            visible = holds if mask is None else holds & mask[:, :, i * chunk : (i + 1) * chunk]
            slots = logits.masked_fill(~visible[:, :, None], -torch.inf)
            p = torch.cat((slots, locals_[i]), -1).softmax(-1)
            p = F.dropout(p, dropout) if dropout > 0 else p
            p_slots, p_sinks, p_span = p.split((P.shape[-1], sink_values.shape[2], near.shape[3]), -1)
            share = p_slots / norm[:, :, None]
            out = (share * P[:, :, None]) @ U0[:, :, None]
            out = out + torch.einsum("bkrtm,bkstm->bkrts", share, a) @ v[:, :, None]
            piece.append(out + p_sinks @ sink_values[:, :, None] + p_span @ near)
        carry = P[:, :, -1, :, None] * carry + a[:, :, :, -1].transpose(-1, -2) @ x
    N, U, c = carry.split((d, state.U.shape[-1], 1), -1)

    real = writes.valid[:, None, None, :, None]
    own = writes.v[:, :, None].to(dtype)  # padding attends to itself alone
    outputs = [torch.where(real, torch.cat(piece, 3)[..., :length, :], own) for piece in pieces]
    return outputs, moved._replace(N=N, U=U, c=c.squeeze(-1))


def dense_weights(decay: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay of what a chunk found, and weight in every slot of what it wrote.

    Args:
        decay (`torch.Tensor`): δ, (…, C, M).
        weight (`torch.Tensor`): w, (…, C, M).

    Returns:
        P[t, m] = Π_{u≤t} δ_um, (…, C, M), and a[s, t, m] = w_sm Π_{s<u≤t} δ_um, (…, C, C, M), 0 for t < s.
    """
    order = torch.arange(decay.shape[-2], device=decay.device)
    later = (order > order[:, None])[..., None]  # [s, u]
    kept = torch.where(later, decay[..., None, :, :], 1.0).cumprod(-2)
    a = weight[..., :, None, :] * kept * (order >= order[:, None])[..., None]
    return decay.cumprod(-2), a
