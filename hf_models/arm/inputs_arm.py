"""Checks and packing of a model's inputs."""

import torch
from transformers.cache_utils import Cache

from .cache_arm import ArmCache, cache_signature
from .configuration_arm import ArmConfig


def check_inputs(
    config: ArmConfig,
    source: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    kwargs: dict,
) -> None:
    """Refuse inputs that a memory cannot take; costs nothing inside a compiled graph.

    Raises:
        ValueError: Naming the argument, what it is and what is allowed.
    """
    batch, length = source.shape[:2]  # tokens or embeddings
    if cache is not None and not isinstance(cache, ArmCache):
        raise ValueError(
            f"cache is a {type(cache).__name__}, but an ARM model keeps its context in an ArmCache: "
            "pass ArmCache(model.config) or leave cache unset."
        )
    if cache is not None and cache.config is not config and cache.signature != cache_signature(config):
        raise ValueError(f"the cache was made for {cache.signature}, but this model needs {cache_signature(config)}.")
    if cache is not None and cache.batch_size not in (-1, batch):
        raise ValueError(f"the cache holds a batch of {cache.batch_size}, but the input has a batch of {batch}.")
    if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2):
        kind = (
            f"{attention_mask.ndim}-D" if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        )
        raise ValueError(f"attention_mask is {kind}; an ARM model needs the 2-D mask of real tokens (batch, columns).")
    if torch.compiler.is_compiling():
        return
    seen = 0 if cache is None else int(cache.get_seq_length())
    if attention_mask is not None and tuple(attention_mask.shape) != (batch, seen + length):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but {seen} tokens seen and {length} new ones in "
            f"a batch of {batch} need {(batch, seen + length)}."
        )
    if attention_mask is None and position_ids is not None and length > 1:
        restarts = (position_ids[:, 1:] < position_ids[:, :-1]).any()
        if restarts:
            raise ValueError(
                "position_ids restart inside a row: packed sequences would leak from one document into the next "
                "through the memory. Give each document its own row."
            )
    attentions = kwargs.get("output_attentions") or getattr(config, "output_attentions", False)
    if attentions and (length != 1 or cache is None):
        raise ValueError(
            f"output_attentions needs a single new token and a cache, got {length} tokens; its columns are slots, "
            "sinks and window of that token."
        )


def real_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions that count real tokens only, (B, columns); padding repeats its neighbour's."""
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)


class PackedRows:
    """Moves the real tokens of every row to the front, keeping their order, and back.

    Args:
        attention_mask (`torch.Tensor`, *optional*): 1 for real tokens, (B, columns); its last `length` columns count.
        length (`int`): New columns T.
    """

    def __init__(self, attention_mask: torch.Tensor | None, length: int):
        self.valid: torch.Tensor | None = None
        self.order: torch.Tensor | None = None
        if attention_mask is None or length == 0:
            return
        valid = attention_mask[:, -length:].bool()
        self.valid = valid
        if length == 1:
            return
        compiling = torch.compiler.is_compiling()  # a graph cannot look at values: it packs in any case
        if not compiling and valid.all():
            self.valid = None
        elif compiling or (valid[:, 1:] & ~valid[:, :-1]).any():
            self.order = (~valid).long().argsort(dim=-1, stable=True)
            self.valid = valid.gather(1, self.order)

    @property
    def moved(self) -> bool:
        """Whether any token changes its place."""
        return self.order is not None

    def pack(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """(B, T, …) in packed order."""
        return x if x is None or self.order is None else _along(x, self.order)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, …) in the input's order."""
        return x if self.order is None else _along(x, self.order.argsort(-1))


def _along(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    x = x.expand(index.shape[0], *x.shape[1:])
    return x.gather(1, index.reshape(*index.shape, *[1] * (x.ndim - 2)).expand(*index.shape, *x.shape[2:]))
