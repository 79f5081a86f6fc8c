"""The mathematics of Attention with Routed Memory (arXiv 2609.24417) as pure functions.

Shapes: B batch, T new tokens, H query heads, K kv heads, r = H/K, d head dimension, b branching, L router levels,
G = bᴸ buckets, S slots per bucket, M = G·S slots, W exact window, n_s sinks, C tokens per chunk. All in float32 (or
the state's type), whatever the model computes in.
"""

from typing import NamedTuple

import torch

MASS_FLOOR = 1e-6  # a slot with less mass holds nothing


class ArmState(NamedTuple):
    """What one layer remembers; constant in size."""

    N: torch.Tensor  # (B, K, M, d) key accumulators, before rotation
    U: torch.Tensor  # (B, K, M, d_v) value accumulators
    c: torch.Tensor  # (B, K, M) mass of the slots in [0, 1]; number of merged tokens in the training-free mode
    ev: torch.Tensor  # (B, K, G) int64, write events per bucket
    wk: torch.Tensor  # (B, K, W, d) rotated keys of the window, a ring: token i sits at i mod W
    wv: torch.Tensor  # (B, K, W, d_v)
    wvalid: torch.Tensor  # (B, W) bool
    sk: torch.Tensor  # (B, K, n_s, d) rotated keys of the first tokens
    sv: torch.Tensor  # (B, K, n_s, d_v)
    sn: torch.Tensor  # (B,) int64, real tokens seen
    wraw: torch.Tensor | None = None  # (B, K, W, d) keys of the window before rotation, training-free mode only


class Writes(NamedTuple):
    """What the new tokens write."""

    k: torch.Tensor  # (B, K, T, d) keys before rotation
    v: torch.Tensor  # (B, K, T, d_v)
    k_rot: torch.Tensor  # (B, K, T, d) rotated keys
    gate: torch.Tensor | None  # (B, K, T) γ after the threshold, 0 for padding; None in the training-free mode
    slot: torch.Tensor | None  # (B, K, T) int64, y
    bucket: torch.Tensor | None  # (B, K, T) int64, g
    valid: torch.Tensor  # (B, T) bool, False for padding


# ---- the tree router -----------------------------------------------------------------------------


def one_hot(index: torch.Tensor, size: int) -> torch.Tensor:
    """(…) int64 → (…, size) bool, without the look at the values that `torch.nn.functional.one_hot` takes."""
    return index[..., None] == torch.arange(size, device=index.device)


def unit_direction(x: torch.Tensor) -> torch.Tensor:
    """x̂ = √d·x/‖x‖; zero stays zero."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-12)
    return x * (x.shape[-1] ** 0.5 / length)


def child_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """Scores z = R x̂ of every child of every node, x̂ = √d·x/‖x‖.

    Args:
        x (`torch.Tensor`): Keys or queries before rotation, (B, K, T, d).
        router (`torch.Tensor`): Child vectors in breadth-first order, (K, b·(bᴸ−1)/(b−1), d).

    Returns:
        `torch.Tensor`: (B, K, T, b·(bᴸ−1)/(b−1)).
    """
    return unit_direction(x.to(router.dtype)) @ router.transpose(-1, -2)


def leaf_log_probs(z: torch.Tensor, branching: int, levels: int) -> torch.Tensor:
    """log p(leaf) = Σ over the path of log softmax(z_n): (…, nodes·b) → (…, G)."""
    choices = z.unflatten(-1, (-1, branching)).log_softmax(-1)  # (…, nodes, b)
    log_p, first = choices[..., 0, :], 1
    for level in range(1, levels):
        width = branching**level
        log_p = (log_p[..., None] + choices[..., first : first + width, :]).flatten(-2)
        first += width
    return log_p


def greedy_descent(z: torch.Tensor, branching: int, levels: int) -> torch.Tensor:
    """Leaf reached by taking the best child at each level, the first of a tie: (…, nodes·b) → (…) int64."""
    node = torch.zeros(z.shape[:-1], dtype=torch.long, device=z.device)
    first = 0
    for level in range(levels):
        width = branching**level
        z_level = z[..., first : first + width * branching].unflatten(-1, (width, branching))
        z_node = z_level.gather(-2, node[..., None, None].expand(*node.shape, 1, branching)).squeeze(-2)
        node = node * branching + z_node.argmax(-1)
        first += width * branching
    return node


def tree_log_probs(x: torch.Tensor, router: torch.Tensor, branching: int, levels: int) -> torch.Tensor:
    """Joint log-probabilities ℓ of the leaves for keys or queries (B, K, T, d): (B, K, T, G)."""
    return leaf_log_probs(child_logits(x, router), branching, levels)


def greedy_leaf(x: torch.Tensor, router: torch.Tensor, branching: int, levels: int) -> torch.Tensor:
    """Write bucket g by greedy descent, which may differ from the best joint leaf: (B, K, T) int64."""
    return greedy_descent(child_logits(x, router), branching, levels)


# ---- what to write -------------------------------------------------------------------------------


def threshold_gate(gate: torch.Tensor, threshold: float) -> torch.Tensor:
    """γ below the threshold becomes exactly 0; the gradient passes straight through."""
    return gate + torch.where(gate < threshold, -gate, torch.zeros_like(gate)).detach()


def write_pointers(
    bucket: torch.Tensor, event: torch.Tensor, counters: torch.Tensor, slots_per_bucket: int
) -> torch.Tensor:
    """Round-robin pointer ev_t[g_t] mod S of every token, ev_t counting the earlier write events of its bucket.

    Args:
        bucket (`torch.Tensor`): g, (B, K, T).
        event (`torch.Tensor`): Whether a token writes, (B, K, T) bool.
        counters (`torch.Tensor`): Events before the first token, (B, K, G).
        slots_per_bucket (`int`): S.

    Returns:
        `torch.Tensor`: (B, K, T) int64.
    """
    if bucket.shape[-1] == 1:
        return counters.gather(-1, bucket) % slots_per_bucket
    hits = (one_hot(bucket, counters.shape[-1]) & event[..., None]).long()
    earlier = hits.cumsum(-2) - hits + counters[..., None, :]
    return earlier.gather(-1, bucket[..., None]).squeeze(-1) % slots_per_bucket


def count_events(bucket: torch.Tensor, event: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Counters after the tokens: (B, K, G)."""
    return counters.scatter_add(-1, bucket, event.to(counters.dtype))


# ---- how much to read ----------------------------------------------------------------------------


class ReadPlan(NamedTuple):
    """How many buckets each token reads."""

    rank: torch.Tensor | None  # (B, K, T, G) rank of every bucket for the query; None where all are read
    width: torch.Tensor | None  # (B, K, T) int64, buckets read, M_t
    proceed: torch.Tensor | None  # (B, K, T) c_M, probability of reading one more; None outside training


def read_width(proceed: torch.Tensor, min_read: int = 0, epsilon: float = 0.0) -> torch.Tensor:
    """Number of leading ranks whose continue probability reaches 0.5, each decision flipped with probability ε.

    Args:
        proceed (`torch.Tensor`): c_j for ranks j = 0 … G−1, (…, G).
        min_read (`int`, defaults to 0): Ranks that are always read.
        epsilon (`float`, defaults to 0): Exploration, drawn from the global generator as dropout is.

    Returns:
        `torch.Tensor`: M, (…) int64.
    """
    go = proceed >= 0.5
    if epsilon > 0:
        go = go ^ (torch.rand_like(proceed) < epsilon)
    if min_read > 0:
        go = go | (torch.arange(proceed.shape[-1], device=proceed.device) < min_read)
    return go.long().cumprod(-1).sum(-1)


def proceed_at(proceed: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """c_M, the continue probability at the first rank not read; 0 where everything is read: (…)."""
    last = proceed.shape[-1]
    at_width = proceed.gather(-1, width.clamp(max=last - 1)[..., None]).squeeze(-1)
    return torch.where(width < last, at_width, torch.zeros_like(at_width))


def read_cost(width: torch.Tensor, proceed: torch.Tensor) -> torch.Tensor:
    """Expected buckets read, M + c_M, differentiable through c_M."""
    return width + proceed


def interpolate_reads(output: torch.Tensor, output_next: torch.Tensor, proceed: torch.Tensor) -> torch.Tensor:
    """o = (1 − c_M)·o_M + c_M·o_{M+1}; `proceed` broadcasts over the last dimension."""
    return (1 - proceed)[..., None] * output + proceed[..., None] * output_next


def bucket_ranks(log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Buckets by falling log-probability ℓ, ties in order of index.

    Args:
        log_probs (`torch.Tensor`): (…, G).

    Returns:
        Sorted log-probabilities ℓ_(j) (…, G) and the rank of every bucket (…, G) int64, 0 the most probable.
    """
    buckets = torch.arange(log_probs.shape[-1], device=log_probs.device)
    if log_probs.shape[-2] == 1:  # one token: counting who comes before costs less than sorting
        mine, other = log_probs[..., :, None], log_probs[..., None, :]
        before = (other > mine) | ((other == mine) & (buckets < buckets[:, None]))
        rank = before.sum(-1)
        return torch.empty_like(log_probs).scatter_(-1, rank, log_probs), rank
    ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
    return ordered, torch.empty_like(order).scatter_(-1, order, buckets.expand_as(order))


# ---- balance -------------------------------------------------------------------------------------


def balance_loss(bucket: torch.Tensor, probs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """L_bal = G·Σ_g f_g·p̄_g per kv head, averaged; 1 for uniform routing.

    Args:
        bucket (`torch.Tensor`): Hard bucket g, (B, K, T).
        probs (`torch.Tensor`): Leaf probabilities, (B, K, T, G).
        weight (`torch.Tensor`): γ, (B, K, T); no gradient flows into it.

    Returns:
        `torch.Tensor`: a scalar; 0 where nothing is written.
    """
    weight = weight.detach()
    total = weight.sum((0, 2)).clamp_min(1e-9)  # (K,)
    hard = one_hot(bucket, probs.shape[-1]).to(probs.dtype)
    f = torch.einsum("bkt,bktg->kg", weight, hard) / total[:, None]
    p = torch.einsum("bkt,bktg->kg", weight, probs) / total[:, None]
    return probs.shape[-1] * (f * p).sum(-1).mean()


# ---- rotation ------------------------------------------------------------------------------------


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (…, d) by angles given as cos, sin (…, d), the two halves of d forming the pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
