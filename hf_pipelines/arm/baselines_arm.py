"""Caches that keep a fixed number of entries of a full-attention model, without training it.

    model.set_attn_implementation("budgeted")
    model(input_ids, cache=BudgetCache(model.config, "h2o", budget=24, recent=8))

| name | paper | who makes way |
| --- | --- | --- |
| `"swa"` | sliding window | the oldest entry |
| `"streaming_llm"` | StreamingLLM, arXiv 2309.17453 | the oldest entry but the first `sinks` |
| `"h2o"` | H2O, arXiv 2306.14048 | the least attention ever received, per kv head; the last `recent` are safe |
| `"tova"` | TOVA, arXiv 2401.06104 | the least attention of the last query, over the heads of a layer |
| `"snapkv"` | SnapKV, arXiv 2404.14469 | what the prompt's last queries attend to least, once after the prompt |

Tokens are fed one after the other whatever the call's length: write, make room, read at most `budget` entries (the
token itself is one of them), note the attention. So one call equals many, and padding may stand anywhere. Keys stay
rotated as they were written.

Shapes: B batch, T new tokens, K kv heads, r query heads per kv head, d head dimension, n entries.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from .policies_arm import PADDING, POLICIES, BudgetPolicy, SnapKV, check_range

# ---- the cache ------------------------------------------------------------------------------------------------------


class Entries(NamedTuple):
    """What one layer keeps, in order of arrival."""

    keys: torch.Tensor  # (B, K, n, d), rotated as they were written
    values: torch.Tensor  # (B, K, n, d_v)
    position: torch.Tensor  # (B, K, n) int64, number of the real token in its row, or PADDING
    score: torch.Tensor  # (B, K, n) float32, the policy's


class BudgetLayer(CacheLayerMixin):
    """Entries of one layer, at most `policy.budget` per kv head between calls.

    Args:
        policy (`BudgetPolicy`): Who makes way.
        segment (`int`, defaults to 256): Tokens read at once by policies that look at positions only.
    """

    def __init__(self, policy: BudgetPolicy, segment: int = 256):
        super().__init__()
        self.policy, self.segment = policy, segment
        self.cumulative_length = 0  # columns seen, padding included

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Start empty, for keys (B, K, T, d) and values (B, K, T, d_v)."""
        self.device, self.batch_size = key_states.device, key_states.shape[0]
        none = key_states.new_zeros(*key_states.shape[:2], 0)
        self.entries = Entries(key_states[:, :, :0], value_states[:, :, :0], none.long(), none.float())
        self.seen = torch.zeros(self.batch_size, dtype=torch.long, device=self.device)  # real tokens
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand this layer to the attention function through its keyword arguments, which transformers passes here.

        Args:
            key_states (`torch.Tensor`): Keys of the new tokens, (B, K, T, d); returned as they are.
            value_states (`torch.Tensor`): Their values, (B, K, T, d_v); returned as they are.
            *args: Ignored.
            kwargs (`dict`): Keyword arguments of the attention function, updated in place as by the library's caches.

        Raises:
            ValueError: The batch size changed, or the model's attention passes no keyword arguments to its cache.
        """
        if kwargs is None:
            raise ValueError("this model's attention does not pass its keyword arguments to cache.update.")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise ValueError(f"the cache holds a batch of {self.batch_size}, but the input has {key_states.shape[0]}.")
        kwargs["budget_layer"] = self
        self.cumulative_length += key_states.shape[2]
        return key_states, value_states

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        """Write and read the new tokens.

        Args:
            queries (`torch.Tensor`): (B, H, T, d).
            keys (`torch.Tensor`): (B, K, T, d).
            values (`torch.Tensor`): (B, K, T, d_v).
            valid (`torch.Tensor`, *optional*): Real tokens, (B, T) bool.
            scaling (`float`): Factor of the logits.

        Returns:
            `torch.Tensor`: (B, T, H, d_v); a padding token gets its own value.
        """
        batch, heads, length = keys.shape[:3]
        queries = queries.unflatten(1, (heads, -1))  # (B, K, r, T, d)
        if valid is None:
            valid = torch.ones(batch, length, dtype=torch.bool, device=keys.device)
        newest = self.seen[:, None] + valid.cumsum(1) - 1  # (B, T)
        position = torch.where(valid, newest, PADDING)[:, None].expand(-1, heads, -1)
        new = Entries(keys, values, position, torch.zeros_like(position, dtype=torch.float32))
        prompt = isinstance(self.policy, SnapKV) and self.entries.position.shape[2] == 0
        read, step = self._read_one, 1
        if prompt:
            read, step = self._read_prompt, max(length, 1)
        elif self.policy.band is not None and self.segment > 1:
            read, step = self._read_band, self.segment
        outputs = [values.new_zeros(*queries.shape[:3], 0, values.shape[-1])]
        for start in range(0, length, step):
            part = slice(start, start + step)
            latest = newest[:, part][:, -1, None, None]  # (B, 1, 1)
            outputs.append(read(queries[..., part, :], Entries(*(x[:, :, part] for x in new)), latest, scaling))
        self.seen = self.seen + valid.sum(1)
        output = torch.where(valid[:, None, None, :, None], torch.cat(outputs, 3), values[:, :, None])
        return output.flatten(1, 2).transpose(1, 2)

    def _read_one(self, query: torch.Tensor, new: Entries, newest: torch.Tensor, scaling: float) -> torch.Tensor:
        """One token: make room, write, read, observe."""
        self._append(new)
        self._make_room(newest)
        entries = self.entries
        visible = (entries.position >= 0)[..., None, :]  # (B, K, 1, n)
        weights, output = attention(query, entries.keys, entries.values, visible, scaling)
        real = new.position >= 0  # (B, K, 1)
        score = torch.where(real, self.policy.observe(entries.score, weights[..., 0, :]), entries.score)
        self.entries = entries._replace(score=score)
        return output

    def _read_band(self, query: torch.Tensor, new: Entries, newest: torch.Tensor, scaling: float) -> torch.Tensor:
        """A segment at once, each query behind a mask that shows what the budget would have left."""
        self._append(new)
        window, sinks = self.policy.band
        entries = self.entries
        position = entries.position[..., None, :]
        age = new.position[..., None] - position  # (B, K, t, n)
        visible = (position >= 0) & (age >= 0) & ((age < window) | (position < sinks))
        _, output = attention(query, entries.keys, entries.values, visible, scaling)
        self._make_room(newest)
        return output

    def _read_prompt(self, query: torch.Tensor, new: Entries, newest: torch.Tensor, scaling: float) -> torch.Tensor:
        """The whole prompt with full attention, then the vote."""
        position = new.position
        visible = (position[..., None, :] >= 0) & (position[..., None, :] <= position[..., None])
        weights, output = attention(query, new.keys, new.values, visible, scaling)
        self._append(new._replace(score=self.policy.votes(weights, position, newest)))
        self._make_room(newest)
        return output

    def _append(self, new: Entries) -> None:
        self.entries = Entries(*(torch.cat(pair, 2) for pair in zip(self.entries, new, strict=True)))

    def _make_room(self, newest: torch.Tensor) -> None:
        """Keep the best `budget` entries, in order; padding goes first, the newest token stays."""
        position, budget = self.entries.position, self.policy.budget
        if position.shape[2] <= budget:
            return
        priority = self.policy.priority(position, self.entries.score, newest)
        priority = priority.masked_fill(position == newest, torch.inf).masked_fill(position < 0, -torch.inf)
        kept = priority.topk(budget, dim=-1).indices.sort(-1).values  # (B, K, budget)
        self.entries = Entries(*(_take(x, kept) for x in self.entries))

    # ---- what transformers asks of a cache layer ----

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the new tokens only; the entries know which of them are real."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Columns seen, padding included: what the positions of the next tokens follow on."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """-1: there is no longest context."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what made way for a token is gone."""
        raise ValueError("a BudgetCache cannot take tokens back; decode without an assistant or prompt lookup.")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self._move(lambda x: x.index_select(0, indices.to(x.device)))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes the old row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._move(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Move the entries to the CPU."""
        self._move(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the entries back to their device."""
        self._move(lambda x: x.to(self.device, non_blocking=True))

    def _move(self, move) -> None:
        if self.is_initialized:
            self.entries, self.seen = Entries(*map(move, self.entries)), move(self.seen)
            self.batch_size = self.seen.shape[0]

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized, self.cumulative_length = False, 0

    def nbytes(self) -> int:
        """Bytes of keys, values, positions, scores and counts; 0 before the first token."""
        tensors = (*self.entries, self.seen) if self.is_initialized else ()
        return sum(x.numel() * x.element_size() for x in tensors)


class BudgetCache(Cache):
    """A cache of fixed size for a full-attention Llama, Qwen2, Qwen3 or Mistral, in the place of `DynamicCache`.

    Args:
        config (`PreTrainedConfig`): `model.config`.
        policy (`str`): Name in `POLICIES`: `"swa"`, `"streaming_llm"`, `"h2o"`, `"tova"` or `"snapkv"`.
        budget (`int`, defaults to 256): Entries per kv head.
        segment (`int`, defaults to 256): Tokens that `"swa"` and `"streaming_llm"` read at once, behind a banded mask;
            the result is the same for any, and 1 feeds them one by one as the others.
        **settings: Further fields of the policy: `sinks`, `recent`, `window`, `kernel_size`.

    Raises:
        ValueError: An unknown policy or setting, a value out of range, or a model with sliding-window layers.

    Example:
        ```python
        model.set_attn_implementation("budgeted")
        cache = BudgetCache(model.config, "streaming_llm", budget=64, sinks=4)
        model.generate(**inputs, cache=cache, max_new_tokens=100)
        ```
    """

    def __init__(
        self, config: PreTrainedConfig, policy: str = "h2o", budget: int = 256, segment: int = 256, **settings: int
    ):
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}, but must be one of {tuple(POLICIES)}.")
        known = [field.name for field in fields(POLICIES[policy]) if field.name != "budget"]
        if unknown := sorted(set(settings) - set(known)):
            raise ValueError(f"policy {policy!r} has no setting {unknown}; it has {known}.")
        check_range("segment", segment, 1)
        sliding = getattr(config, "sliding_window", None) is not None
        types = getattr(config, "layer_types", None) or (["sliding_attention"] if sliding else ["full_attention"])
        if set(types) != {"full_attention"}:
            raise ValueError(f"a BudgetCache needs full attention in every layer, but this model has {set(types)}.")
        self.config = config
        self.policy = POLICIES[policy](budget, **settings)
        super().__init__([BudgetLayer(self.policy, segment) for _ in range(config.num_hidden_layers)])

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As the library's; the model must use the attention function `"budgeted"`.

        Raises:
            ValueError: It does not, so nothing would be read from this cache.
        """
        if self.config._attn_implementation != "budgeted":
            raise ValueError(
                f"the model's attention is {self.config._attn_implementation!r}, which does not read a BudgetCache: "
                'call model.set_attn_implementation("budgeted").'
            )
        return super().update(*args, **kwargs)

    def nbytes(self) -> int:
        """Bytes of all layers; at most those of `budget` entries per kv head."""
        return sum(layer.nbytes() for layer in self.layers)


# ---- attention ------------------------------------------------------------------------------------------------------


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of grouped queries.

    Args:
        query (`torch.Tensor`): (B, K, r, t, d).
        keys (`torch.Tensor`): (B, K, n, d).
        values (`torch.Tensor`): (B, K, n, d_v).
        visible (`torch.Tensor`): (B, K, t, n) bool; a query that sees nothing gets the mean.
        scaling (`float`): Factor of the logits.

    Returns:
        Weights (B, K, r, t, n) in float32 and output (B, K, r, t, d_v).
    """
    logits = ((query @ keys[:, :, None].transpose(-1, -2)) * scaling).float()
    logits = logits.masked_fill(~visible[:, :, None], torch.finfo(torch.float32).min)
    weights = logits.softmax(-1)
    return weights, weights.to(values.dtype) @ values[:, :, None]


def budgeted_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    budget_layer: BudgetLayer | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function `"budgeted"`: queries (B, H, T, d), keys and values (B, K, T, d) of the new tokens.

    Made for inference: there is no dropout, and no attention weights are returned.

    Raises:
        ValueError: There is no [`BudgetCache`], or the mask is not of the kind (B, columns).
    """
    if budget_layer is None:
        raise ValueError(
            'attn_implementation="budgeted" reads a BudgetCache: pass cache=BudgetCache(model.config, policy, budget).'
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask is {attention_mask.ndim}-D, but a BudgetCache needs the 2-D mask of real tokens."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return budget_layer.attend(query, key, value, attention_mask, scaling), None


def budgeted_mask(
    batch_size: int, q_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """The mask function `"budgeted"`: which of the new tokens are real, (B, T) bool, or `None` for all."""
    return None if attention_mask is None else attention_mask[:, -q_length:]


AttentionInterface.register("budgeted", budgeted_attention_forward)
AttentionMaskInterface.register("budgeted", budgeted_mask)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Entries of (B, K, n, …) at (B, K, j)."""
    index = index if x.ndim == 3 else index[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, index)
