"""The recurrence of Attention with Routed Memory: exact parallel scan and single step.

Each slot m is a scalar-gated linear recurrence, for the one token t that picks it (y_t = m):

    N_m ← (1−γ_t) N_m + γ_t k_t,   U_m ← (1−γ_t) U_m + γ_t v_t,   c_m ← (1−γ_t) c_m + γ_t

and neither y_t nor γ_t reads the state, so chunks of C tokens are computed at once. Reads come after writes:

    p = softmax([s·q^m·N_m/c_m over slots ; s·q·k_i over sinks and the last W tokens]),  o = Σ p_m U_m/c_m + Σ p_i v_i

Shapes as in `ops_arm`; real tokens come first in a row, padding last.
"""

import torch
import torch.nn.functional as F

from .ops_arm import MASS_FLOOR, ArmState, Writes, count_events, one_hot

BLOCK = 64  # queries that share one span of local keys


def empty_state(
    batch_size: int,
    num_heads: int,
    head_dim: int,
    value_dim: int,
    buckets: int,
    slots_per_bucket: int,
    window: int,
    sinks: int,
    dtype: torch.dtype,
    device: torch.device | str,
    state_dtype: torch.dtype = torch.float32,
    raw_keys: bool = False,
) -> ArmState:
    """A memory that has seen nothing; arguments are the sizes B, K, d, d_v, G, S, W, n_s and the types."""
    slots = buckets * slots_per_bucket

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(batch_size, *shape, dtype=dtype, device=device)

    return ArmState(
        N=zeros(num_heads, slots, head_dim, dtype=state_dtype),
        U=zeros(num_heads, slots, value_dim, dtype=state_dtype),
        c=zeros(num_heads, slots, dtype=state_dtype),
        ev=zeros(num_heads, buckets, dtype=torch.long),
        wk=zeros(num_heads, window, head_dim),
        wv=zeros(num_heads, window, value_dim),
        wvalid=zeros(window, dtype=torch.bool),
        sk=zeros(num_heads, sinks, head_dim),
        sv=zeros(num_heads, sinks, value_dim),
        sn=zeros(dtype=torch.long),
        wraw=zeros(num_heads, window, head_dim) if raw_keys else None,
    )


# ---- parallel form -------------------------------------------------------------------------------


def chunk_weights(gate: torch.Tensor, slot: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay of what a chunk found and weight of what it wrote.

    Args:
        gate (`torch.Tensor`): γ, (…, C).
        slot (`torch.Tensor`): y, (…, C).
        slots (`int`): M.

    Returns:
        P[t, m] = Π_{u≤t} (1 − γ_u·1[y_u = m]), (…, C, M), and a[s, t] = γ_s Π_{s<u≤t, y_u=y_s} (1 − γ_u), the weight
        of token s in its own slot at time t, (…, C, C), 0 for t < s.
    """
    later = torch.ones(gate.shape[-1], gate.shape[-1], dtype=torch.bool, device=gate.device).triu(1)
    same = (slot[..., :, None] == slot[..., None, :]) & later  # [s, u], u > s
    keep = torch.where(same, 1 - gate[..., None, :], 1.0)  # F[s, u]
    weight = (gate[..., :, None] * keep.cumprod(-1)).triu()  # a[s, t]
    decay = torch.where(one_hot(slot, slots), 1 - gate[..., None], 1.0).cumprod(-2)  # P[t, m]
    return decay, weight


def arm_scan(
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
    """Write and read T tokens at once; equal to T single steps.

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
    length, d = writes.k.shape[2:]
    slots = state.c.shape[-1]
    block = chunk * max(1, min(BLOCK, length) // chunk)
    pad = -length % block
    q_mem = F.pad(q_mem.to(state.N.dtype), (0, 0, 0, pad))
    q_rot = F.pad(q_rot.to(state.N.dtype), (0, 0, 0, pad))
    kv1, slot, P, a, starts, moved = scan_writes(state, writes, chunk, pad)
    N0, U0, c0 = torch.stack(starts, 2).split((d, state.U.shape[-1], 1), -1)

    # step 4: inside all chunks at once; s runs over the writers, t over the readers
    k, v, _ = kv1.split((d, state.U.shape[-1], 1), -1)  # (B, K, n, C, ·)
    a_ts = a.transpose(-1, -2)  # (B, K, n, C_t, C_s)
    y_s = slot[..., None, :].expand(a_ts.shape)
    mass = (P * c0.transpose(-1, -2)).scatter_add(-1, y_s, a_ts)  # (B, K, n, C, M)
    q = q_mem.unflatten(3, (-1, chunk))  # (B, K, r, n, C, d)
    found = P[:, :, None] * (q @ N0[:, :, None].transpose(-1, -2))
    fresh = (q @ k[:, :, None].transpose(-1, -2)) * a_ts[:, :, None]
    y_s = y_s[:, :, None].expand(fresh.shape)
    memory_logits = found.scatter_add(-1, y_s, fresh)
    holds = mass > MASS_FLOOR
    norm = torch.where(holds, mass, 1.0) if debias else torch.ones_like(mass)
    memory_logits = (memory_logits * (scaling / norm[:, :, None])).flatten(3, 4)  # (B, K, r, T, M)

    # step 5: sinks and the last W tokens
    local_logits, sink_values, span_values = local_part(state, moved, q_rot, writes, block, scaling)

    outputs = []
    real = writes.valid[:, None, None, :, None]
    for mask in read_masks:
        visible = holds.flatten(2, 3)
        if mask is not None:
            visible = visible & F.pad(mask, (0, 0, 0, pad))
        logits = torch.cat((memory_logits.masked_fill(~visible[:, :, None], -torch.inf), local_logits), -1)
        p = logits.softmax(-1)
        if dropout > 0:
            p = F.dropout(p, dropout)
        p_slots, p_sinks, p_span = p.split((slots, sink_values.shape[2], span_values.shape[3]), -1)
        w = p_slots.unflatten(3, (-1, chunk)) / norm[:, :, None]
        out = (w * P[:, :, None]) @ U0[:, :, None] + (w.gather(-1, y_s) * a_ts[:, :, None]) @ v[:, :, None]
        out = out.flatten(3, 4) + p_sinks @ sink_values[:, :, None]
        out = out + (p_span.unflatten(3, (-1, block)) @ span_values[:, :, None]).flatten(3, 4)
        # padding attends to itself alone
        outputs.append(torch.where(real, out[..., :length, :], writes.v[:, :, None].to(out.dtype)))
    return outputs, moved


def scan_writes(
    state: ArmState, writes: Writes, chunk: int, pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor], ArmState]:
    """Steps 1 to 3 of the parallel form: everything that writing needs.

    Args:
        state (`ArmState`): Memory before the tokens.
        writes (`Writes`): The tokens.
        chunk (`int`): C.
        pad (`int`): Padding that makes T a multiple of C, T' = T + pad.

    Returns:
        The inputs [k | v | 1] (B, K, T'/C, C, d + d_v + 1), their slots (B, K, T'/C, C), P, a, the accumulators
        [N | U | c] at the start of each chunk, and the state after the tokens.
    """
    dtype, slots = state.N.dtype, state.c.shape[-1]
    # [k | v | 1]: the three accumulators of a slot obey one recurrence
    kv1 = torch.cat((writes.k.to(dtype), writes.v.to(dtype)), -1)
    kv1 = F.pad(torch.where(writes.valid[:, None, :, None], kv1, 0.0), (0, 1), value=1.0)
    kv1 = F.pad(kv1, (0, 0, 0, pad)).unflatten(2, (-1, chunk))
    gate = F.pad(writes.gate.to(dtype), (0, pad)).unflatten(-1, (-1, chunk))
    slot = F.pad(writes.slot, (0, pad)).unflatten(-1, (-1, chunk))
    # steps 1 and 2: weights inside a chunk
    P, a = chunk_weights(gate, slot, slots)
    # step 3: states at the start of each chunk, the only sequential part
    written = kv1.new_zeros(*kv1.shape[:3], slots, kv1.shape[-1])
    written = written.scatter_add(3, slot[..., None].expand(kv1.shape), a[..., -1, None] * kv1)
    carry = torch.cat((state.N, state.U, state.c[..., None]), -1)
    starts = []
    # unbound once: an index per chunk would make the backward pass fill a whole gradient per chunk
    for keep, new in zip(P[:, :, :, -1, :, None].unbind(2), written.unbind(2), strict=True):
        starts.append(carry)
        carry = keep * carry + new
    N, U, c = carry.split((state.N.shape[-1], state.U.shape[-1], 1), -1)
    event = (writes.gate > 0) & writes.valid[:, None]
    moved = move_window(state, writes)._replace(
        N=N, U=U, c=c.squeeze(-1), ev=count_events(writes.bucket, event, state.ev)
    )
    return kv1, slot, P, a, starts, moved


def advance(state: ArmState, writes: Writes, chunk: int = 16) -> ArmState:
    """The state after the tokens, without reading."""
    return scan_writes(state, writes, chunk, -writes.k.shape[2] % chunk)[-1]


def _arrivals(state: ArmState, writes: Writes) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated keys and values in order of arrival, (B, K, W + T, ·): position p holds real token sn − W + p."""
    window = state.wk.shape[2]
    order = (state.sn[:, None] + torch.arange(window, device=state.sn.device)) % window
    keys = torch.cat((_take(state.wk, order), writes.k_rot), 2)
    return keys, torch.cat((_take(state.wv, order), writes.v), 2)


def move_window(state: ArmState, writes: Writes) -> ArmState:
    """The state with window, sinks and the number of tokens seen moved past the tokens."""
    window, sinks, length = state.wk.shape[2], state.sk.shape[2], writes.k.shape[2]
    keys, values = _arrivals(state, writes)
    seen = state.sn[:, None]  # (B, 1)
    after = seen + writes.valid.sum(1, keepdim=True)
    sink = torch.arange(sinks, device=keys.device)
    place = (sink - seen + window).clamp(0, window + length - 1)
    fresh = ((sink >= seen) & (sink < after))[:, None, :, None]
    sk = torch.where(fresh, _take(keys, place), state.sk)
    sv = torch.where(fresh, _take(values, place), state.sv)
    # the newest real token that belongs to each place of the ring
    newest = after - 1 - (after - 1 - torch.arange(window, device=keys.device)) % window
    place = (newest - seen + window).clamp(min=0)
    wk, wv = _take(keys, place), _take(values, place)
    return state._replace(wk=wk, wv=wv, wvalid=newest >= 0, sk=sk, sv=sv, sn=after.squeeze(1))


def local_part(
    state: ArmState, moved: ArmState, q_rot: torch.Tensor, writes: Writes, block: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits over the sinks and the last W tokens, in blocks of Q queries that share a span of W + Q keys.

    Args:
        state (`ArmState`): Memory before the tokens.
        moved (`ArmState`): Memory after them, for the sinks.
        q_rot (`torch.Tensor`): Rotated queries, padded to a multiple of `block`, (B, K, r, T', d).
        writes (`Writes`): The tokens.
        block (`int`): Queries that share one span of keys, Q.
        scaling (`float`): s.

    Returns:
        Logits (B, K, r, T', n_s + W + Q) with −inf where a key is out of reach, the sinks' values (B, K, n_s, d_v),
        the spans' values (B, K, T'/Q, W + Q, d_v).
    """
    dtype, device = q_rot.dtype, q_rot.device
    window, total = state.wk.shape[2], q_rot.shape[3]
    keys, values = _arrivals(state, writes)
    seen = state.sn[:, None]
    pad = (0, 0, 0, total - writes.k.shape[2])
    span = window + block
    k_span = F.pad(keys.to(dtype), pad).unfold(2, span, block)  # (B, K, T'/Q, d, W + Q)
    v_span = F.pad(values.to(dtype), pad).unfold(2, span, block).transpose(-1, -2)
    logits = (q_rot.unflatten(3, (-1, block)) @ k_span[:, :, None]).flatten(3, 4) * scaling
    position = torch.arange(span, device=device)
    age = window + torch.arange(block, device=device)[:, None] - position  # (Q, W + Q)
    starts = torch.arange(0, total, block, device=device)[:, None]
    exists = seen[:, :, None] - window + starts + position >= 0  # (B, T'/Q, W + Q)
    reach = ((age >= 0) & (age < window)) & exists[:, :, None]  # (B, T'/Q, Q, W + Q)
    logits = logits.masked_fill(~reach.flatten(1, 2)[:, None, None], -torch.inf)

    sink_logits = q_rot @ moved.sk.to(dtype)[:, :, None].transpose(-1, -2) * scaling
    sink = torch.arange(moved.sk.shape[2], device=device)
    ages = seen[:, :, None] + torch.arange(total, device=device)[:, None] - sink  # (B, T', n_s)
    sink_logits = sink_logits.masked_fill((ages < window)[:, None, None], -torch.inf)
    return torch.cat((sink_logits, logits), -1), moved.sv.to(dtype), v_span


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of (B, K, L, d) at positions (B, J): (B, K, J, d)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


# ---- one token -----------------------------------------------------------------------------------


def write_slots_(state: ArmState, writes: Writes) -> None:
    """Write one token (T = 1) into its slot and counters, in place; a closed gate leaves every bit as it was."""
    gate = writes.gate.to(state.N.dtype)  # (B, K, 1), 0 for padding
    for memory, new in ((state.N, writes.k), (state.U, writes.v)):
        index = writes.slot[..., None].expand(-1, -1, -1, memory.shape[-1])
        # lerp: (1 − γ) old + γ new, exactly `old` for γ = 0 and `new` for γ = 1
        memory.scatter_(2, index, memory.gather(2, index).lerp(new.to(gate.dtype), gate[..., None]))
    mass = state.c.gather(2, writes.slot)
    state.c.scatter_(2, writes.slot, mass.lerp(torch.ones_like(mass), gate))
    state.ev.scatter_add_(2, writes.bucket, (gate > 0).long())


def write_local_(state: ArmState, writes: Writes) -> None:
    """Write one token (T = 1) into the ring and the sinks, in place; padding writes nothing."""
    window, sinks = state.wk.shape[2], state.sk.shape[2]
    valid = writes.valid  # (B, 1)
    place = (state.sn % window)[:, None]
    _put(state.wk, place, writes.k_rot, valid)
    _put(state.wv, place, writes.v, valid)
    if state.wraw is not None:
        _put(state.wraw, place, writes.k, valid)
    state.wvalid.scatter_(1, place, state.wvalid.gather(1, place) | valid)
    if sinks > 0:
        early = valid & (state.sn < sinks)[:, None]
        place = state.sn.clamp(max=sinks - 1)[:, None]
        _put(state.sk, place, writes.k_rot, early)
        _put(state.sv, place, writes.v, early)
    state.sn.add_(valid[:, 0].long())


def _put(ring: torch.Tensor, place: torch.Tensor, new: torch.Tensor, write: torch.Tensor) -> None:
    index = place[:, None, :, None].expand(-1, ring.shape[1], -1, ring.shape[-1])
    ring.scatter_(2, index, torch.where(write[:, None, :, None], new.to(ring.dtype), ring.gather(2, index)))


def read_one(
    state: ArmState,
    q_mem: torch.Tensor,
    q_rot: torch.Tensor,
    scaling: float,
    read_mask: torch.Tensor | None = None,
    debias: bool = True,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read for one token after it was written.

    Args:
        state (`ArmState`): Memory after the write.
        q_mem (`torch.Tensor`): Query rotated by the constant distance, (B, K, r, d).
        q_rot (`torch.Tensor`): Query rotated by its position, (B, K, r, d).
        scaling (`float`): s.
        read_mask (`torch.Tensor`, *optional*): Slots that may be read, (B, K, M) bool.
        debias (`bool`, defaults to `True`): Divide by the mass of a slot.
        bias (`torch.Tensor`, *optional*): Added to the slots' logits, (B, K, M).

    Returns:
        Output (B, K, r, d_v) and probabilities (B, K, r, M + n_s + W) in order of slots, sinks, places of the ring.
    """
    dtype, window = state.N.dtype, state.wk.shape[2]
    q_mem, q_rot = q_mem.to(dtype), q_rot.to(dtype)
    visible = state.c > MASS_FLOOR
    norm = torch.where(visible, state.c, 1.0)[:, :, None] if debias else 1.0
    if read_mask is not None:
        visible = visible & read_mask
    slots = (q_mem @ state.N.transpose(-1, -2)) * scaling / norm
    if bias is not None:
        slots = slots + bias[:, :, None]
    slots = slots.masked_fill(~visible[:, :, None], -torch.inf)
    age = state.sn[:, None] - 1 - torch.arange(state.sk.shape[2], device=q_rot.device)
    sinks = (q_rot @ state.sk.to(dtype).transpose(-1, -2)) * scaling
    sinks = sinks.masked_fill((age < window)[:, None, None], -torch.inf)
    ring = (q_rot @ state.wk.to(dtype).transpose(-1, -2)) * scaling
    ring = ring.masked_fill(~state.wvalid[:, None, None], -torch.inf)
    p = torch.cat((slots, sinks, ring), -1).softmax(-1)
    p_slots, p_sinks, p_ring = p.split((slots.shape[-1], sinks.shape[-1], window), -1)
    out = (p_slots / norm) @ state.U + p_sinks @ state.sv.to(dtype) + p_ring @ state.wv.to(dtype)
    return out, p


def arm_step(
    state: ArmState,
    q_mem: torch.Tensor,
    q_rot: torch.Tensor,
    writes: Writes,
    scaling: float,
    read_mask: torch.Tensor | None = None,
    debias: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write one token in place and read for it: one gather and one scatter per state tensor, one softmax.

    Args:
        state (`ArmState`): Memory, changed in place.
        q_mem (`torch.Tensor`): Query rotated by the constant distance, (B, K, r, 1, d).
        q_rot (`torch.Tensor`): Query rotated by its position, (B, K, r, 1, d).
        writes (`Writes`): The token, T = 1.
        scaling (`float`): s.
        read_mask (`torch.Tensor`, *optional*): (B, K, 1, M) bool.
        debias (`bool`, defaults to `True`): Divide by the mass of a slot.

    Returns:
        Output (B, K, r, 1, d_v) and probabilities (B, K, r, M + n_s + W), zero for padding.
    """
    write_slots_(state, writes)
    write_local_(state, writes)
    mask = None if read_mask is None else read_mask[:, :, 0]
    out, p = read_one(state, q_mem[..., 0, :], q_rot[..., 0, :], scaling, mask, debias)
    # padding attends to itself alone
    real = writes.valid[:, None, None]
    out = torch.where(real, out, writes.v[:, :, 0, None].to(out.dtype))
    return out[..., None, :], torch.where(real, p, 0.0)
