"""Keeps the keys and values of conversations, so that a turn computes only what is new in it."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache


@dataclass
class Entry:
    """A cache and the tokens it holds."""

    tokens: list[int]
    cache: Any


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many tokens two sequences share at the start."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    low, high = 0, limit  # the largest n with left[:n] == right[:n]
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixCache:
    """The caches of the last conversations.

    Args:
        config (`PreTrainedConfig`): The model's, which says what layers its cache has.
        conversations (`int`, defaults to 2): How many to keep; an agent and a customer that share a model need two.

    Raises:
        ValueError: If `conversations` is less than 1.
    """

    def __init__(self, config: Any, conversations: int = 2) -> None:
        if conversations < 1:
            raise ValueError(f"conversations={conversations} must be at least 1")
        self.config, self.conversations = config, conversations
        self._entries: list[Entry] = []  # the least recently used first

    def take(self, tokens: list[int]) -> Any:
        """A cache that holds a true prefix of `tokens`, as long as there is; it is the caller's until `give`."""
        best, shared = None, 0
        for entry in self._entries:
            length = min(common_prefix(entry.tokens, tokens), len(tokens) - 1)
            if length > shared and 2 * length >= len(entry.tokens):
                best, shared = entry, length
        if best is None:
            return DynamicCache(config=self.config)
        self._entries.remove(best)
        surplus = best.cache.get_seq_length() - shared
        if surplus > 0:
            try:
                best.cache.crop(-surplus)
            except RuntimeError:  # a sliding window that has forgotten what lies before
                return DynamicCache(config=self.config)
        return best.cache

    def give(self, tokens: list[int], cache: Any) -> None:
        """Keep a cache that holds the first of `tokens`."""
        self._entries.append(Entry(tokens[: cache.get_seq_length()], cache))
        del self._entries[: -self.conversations]

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()


def ones(length: int, device: Any) -> torch.Tensor:
    """An attention mask over everything, shape (1, length)."""
    return torch.ones((1, length), dtype=torch.long, device=device)
