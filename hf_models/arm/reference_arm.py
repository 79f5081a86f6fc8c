"""The slow sequential oracle of Attention with Routed Memory: the definition, token after token."""

import torch

from .ops_arm import MASS_FLOOR, Writes


def arm_reference(
    q_mem: torch.Tensor,
    q_rot: torch.Tensor,
    writes: Writes,
    slots: int,
    window: int,
    sinks: int,
    scaling: float,
    read_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token after token and row after row, straight from the definition; slow, for tests.

    Args:
        q_mem (`torch.Tensor`): Queries rotated by the constant distance, (B, K, r, T, d).
        q_rot (`torch.Tensor`): Queries rotated by their position, (B, K, r, T, d).
        writes (`Writes`): The tokens; padding may stand anywhere.
        slots (`int`): M.
        window (`int`): W.
        sinks (`int`): n_s.
        scaling (`float`): s.
        read_mask (`torch.Tensor`, *optional*): (B, K, T, M) bool.

    Returns:
        Output (B, K, r, T, d_v), attention mass on the memory (B, K, r, T), and N, U, c at the end.
    """
    batch, heads, length, d = writes.k.shape
    N = torch.zeros(batch, heads, slots, d)
    U = torch.zeros(batch, heads, slots, writes.v.shape[-1])
    c = torch.zeros(batch, heads, slots)
    out = writes.v[:, :, None].expand(-1, -1, q_mem.shape[2], -1, -1).clone()
    mass = torch.zeros(out.shape[:-1])
    for b in range(batch):
        real = [t for t in range(length) if writes.valid[b, t]]
        for h in range(heads):
            for n, t in enumerate(real):
                gamma, m = writes.gate[b, h, t], writes.slot[b, h, t]
                if gamma > 0:
                    N[b, h, m] = (1 - gamma) * N[b, h, m] + gamma * writes.k[b, h, t]
                    U[b, h, m] = (1 - gamma) * U[b, h, m] + gamma * writes.v[b, h, t]
                    c[b, h, m] = (1 - gamma) * c[b, h, m] + gamma
                allowed = [m for m in range(slots) if c[b, h, m] > MASS_FLOOR]
                if read_mask is not None:
                    allowed = [m for m in allowed if read_mask[b, h, t, m]]
                near = [i for j, i in enumerate(real[: n + 1]) if n - j < window or j < sinks]
                keys = N[b, h, allowed] / c[b, h, allowed, None]
                values = torch.cat((U[b, h, allowed] / c[b, h, allowed, None], writes.v[b, h, near]))
                far = q_mem[b, h, :, t] @ keys.T
                logits = torch.cat((far, q_rot[b, h, :, t] @ writes.k_rot[b, h, near].T), -1) * scaling
                p = logits.softmax(-1)
                out[b, h, :, t] = p @ values
                mass[b, h, :, t] = p[:, : len(allowed)].sum(-1)
    return out, mass, N, U, c
