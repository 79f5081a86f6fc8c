"""ARM without training: fixed random buckets, merging of similar keys, running means.

Nothing here comes from the paper; it lets a model that was never trained with a memory run at constant size. A token
is
written only when it leaves the window, so that recent tokens are not counted twice. Slot choice reads the slots, so a
long input is processed token by token.
"""

import torch
import torch.nn.functional as F

from .ops_arm import ArmState, Writes
from .scan_arm import read_one, write_local_

SAME_KEY = 0.98  # cosine from which a key counts as one already stored


def random_directions(num_heads: int, buckets: int, head_dim: int, seed: int) -> torch.Tensor:
    """Fixed unit vectors (K, G, d); a key goes to the bucket whose direction is closest."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(num_heads, buckets, head_dim, generator=generator), dim=-1)


def write_leaving_(state: ArmState, directions: torch.Tensor, valid: torch.Tensor) -> None:
    """Move the token that the next one pushes out of the window into its slot, in place.

    Args:
        state (`ArmState`): Memory before the next token; N and U hold means, c the number of tokens merged.
        directions (`torch.Tensor`): (K, G, d).
        valid (`torch.Tensor`): Whether the next token is real, (B, 1) bool.
    """
    dtype = state.N.dtype
    batch, heads, window, d = state.wk.shape
    buckets = directions.shape[1]
    place = (state.sn % window)[:, None, None, None].expand(batch, heads, 1, 1)
    key = state.wraw.gather(2, place.expand(-1, -1, 1, d))[:, :, 0].to(dtype)  # (B, K, d)
    value = state.wv.gather(2, place.expand(-1, -1, 1, state.wv.shape[-1]))[:, :, 0].to(dtype)
    index = state.sn - window  # the leaving token's place in the text; sinks stay exact anyway
    leaves = (valid[:, 0] & (index >= state.sk.shape[2]))[:, None].expand(batch, heads)

    unit = F.normalize(key, dim=-1)
    bucket = (unit[:, :, None] @ directions.to(dtype).transpose(-1, -2)).squeeze(2).argmax(-1)  # (B, K)
    slots = torch.arange(state.c.shape[-1] // buckets, device=key.device) + bucket[..., None] * (
        state.c.shape[-1] // buckets
    )  # (B, K, S)
    stored = state.N.gather(2, slots[..., None].expand(-1, -1, -1, d))
    count = state.c.gather(2, slots)
    cosine = (F.normalize(stored, dim=-1) @ unit[..., None]).squeeze(-1).masked_fill(count == 0, -2.0)
    best, nearest = cosine.max(-1)
    empty = count == 0
    merge = (best >= SAME_KEY) | ~empty.any(-1)
    choice = torch.where(merge, nearest, empty.long().argmax(-1))
    slot = slots.gather(-1, choice[..., None])  # (B, K, 1)

    n = state.c.gather(2, slot)
    state.c.scatter_(2, slot, torch.where(leaves[..., None], n + 1, n))
    for memory, new in ((state.N, key), (state.U, value)):
        at = slot[..., None].expand(-1, -1, 1, memory.shape[-1])
        old = memory.gather(2, at)
        mean = old + (new[:, :, None] - old) / (n + 1)[..., None]
        memory.scatter_(2, at, torch.where(leaves[..., None, None], mean, old))
    state.ev.scatter_add_(2, bucket[..., None], leaves[..., None].long())


def training_free_step(
    state: ArmState,
    q_mem: torch.Tensor,
    q_rot: torch.Tensor,
    writes: Writes,
    directions: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write one token in place and read for it; a slot that holds n tokens counts n times (logit + log n).

    Args:
        state (`ArmState`): Memory, changed in place.
        q_mem (`torch.Tensor`): Queries rotated by the constant distance, (B, K, r, 1, d).
        q_rot (`torch.Tensor`): Queries rotated by their position, (B, K, r, 1, d).
        writes (`Writes`): The token, T = 1, without gate and slot.
        directions (`torch.Tensor`): (K, G, d).
        scaling (`float`): s.

    Returns:
        Output (B, K, r, 1, d_v) and probabilities (B, K, r, M + n_s + W).
    """
    training_free_write_(state, writes, directions)
    bias = state.c.clamp_min(1).log()
    out, p = read_one(state, q_mem[..., 0, :], q_rot[..., 0, :], scaling, debias=False, bias=bias)
    out = torch.where(writes.valid[:, None, None], out, writes.v[:, :, 0, None].to(out.dtype))
    return out[..., None, :], p


def training_free_write_(state: ArmState, writes: Writes, directions: torch.Tensor) -> None:
    """The writing half of [`training_free_step`], in place."""
    write_leaving_(state, directions, writes.valid)
    write_local_(state, writes)
