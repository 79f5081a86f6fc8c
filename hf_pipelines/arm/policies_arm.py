"""The policies of a [`BudgetCache`]: which entry of a full cache makes way for a new token. One idea each.

Shapes: B batch, K kv heads, r query heads per kv head, n entries.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

PADDING = -1  # position of an entry that is no token


@dataclass
class BudgetPolicy:
    """Which entry of a full cache makes way for a new token. The new token itself is always kept.

    Args:
        budget (`int`): Entries per kv head.
    """

    budget: int

    def __post_init__(self) -> None:
        check_range("budget", self.budget, 1)

    def priority(self, position: torch.Tensor, score: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """What each entry is worth; the least makes way.

        Args:
            position (`torch.Tensor`): Which real token of its row an entry is, from 0, (B, K, n).
            score (`torch.Tensor`): What `observe` made of the attention so far, 0 for a new token, (B, K, n).
            newest (`torch.Tensor`): Position of the newest real token, (B, 1, 1).

        Returns:
            `torch.Tensor`: (B, K, n).
        """
        raise NotImplementedError

    def observe(self, score: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Scores (B, K, n) after a query paid attention `weights` (B, K, r, n)."""
        return score

    @property
    def band(self) -> tuple[int, int] | None:
        """(window, sinks) where the position alone decides, so that many tokens can be read at once."""
        return None


@dataclass
class SlidingWindow(BudgetPolicy):
    """The last `budget` tokens.

    Args:
        budget (`int`): Entries per kv head.
    """

    def priority(self, position: torch.Tensor, score: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """The oldest makes way."""
        return (position - newest).float()

    @property
    def band(self) -> tuple[int, int]:
        """A window and no sinks."""
        return self.budget, 0


@dataclass
class StreamingLLM(BudgetPolicy):
    """The first `sinks` and the last `budget - sinks` tokens (arXiv 2309.17453), without its renumbering of positions.

    Args:
        budget (`int`): Entries per kv head.
        sinks (`int`, defaults to 4): First tokens, always kept.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("sinks", self.sinks, 0, self.budget - 1)

    def priority(self, position: torch.Tensor, score: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """The oldest that is no sink makes way."""
        return (position - newest).float().masked_fill(position < self.sinks, torch.inf)

    @property
    def band(self) -> tuple[int, int]:
        """The window beside the sinks."""
        return self.budget - self.sinks, self.sinks


@dataclass
class H2O(BudgetPolicy):
    """Heavy hitters: what received most attention so far, per kv head, and the last tokens (arXiv 2306.14048).

    Args:
        budget (`int`): Entries per kv head.
        recent (`int`, *optional*): Last tokens that are always kept; half of the budget by default, as in the paper.
    """

    recent: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recent = max(1, self.budget // 2) if self.recent is None else self.recent
        check_range("recent", self.recent, 1, self.budget)

    def priority(self, position: torch.Tensor, score: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """The least accumulated attention makes way."""
        return score.masked_fill(position > newest - self.recent, torch.inf)

    def observe(self, score: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Accumulate over queries, and over the query heads of a kv head."""
        return score + weights.sum(2)


@dataclass
class TOVA(BudgetPolicy):
    """Token omission via attention: what the last query cared for, one choice for all heads (arXiv 2401.06104).

    Args:
        budget (`int`): Entries per kv head.
    """

    def priority(self, position: torch.Tensor, score: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """The least attention of the last query makes way."""
        return score

    def observe(self, score: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Mean over all heads of the layer; earlier queries are forgotten."""
        return weights.mean((1, 2))[:, None].expand_as(score)


@dataclass
class SnapKV(BudgetPolicy):
    """What the last `window` tokens of the prompt attend to, pooled over neighbours, and these (arXiv 2404.14469).

    The first call is the prompt. It is read with full attention, so that the peak memory of prefill is O(T) entries
    (and T² attention weights); only then is the prompt reduced to the budget, once. In the paper the cache then grows
    with the answer; here the budget holds, the oldest of the window and the answer making way.

    Args:
        budget (`int`): Entries per kv head.
        window (`int`, defaults to 32): Last tokens of the prompt, which vote and are kept.
        kernel_size (`int`, defaults to 5): Width of the max pooling of the votes, odd; 1 for none.
    """

    window: int = 32
    kernel_size: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("window", self.window, 1, self.budget)
        check_range("kernel_size", self.kernel_size, 1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size is {self.kernel_size}, but must be odd.")

    def priority(self, position: torch.Tensor, score: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """Without a vote the oldest makes way, among those with votes the least; never one of the window."""
        worth = torch.where(score > 0, score, (position - newest).float())
        return worth.masked_fill(position > newest - self.window, torch.inf)

    def votes(self, weights: torch.Tensor, position: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """Pooled attention of the prompt's last queries.

        Args:
            weights (`torch.Tensor`): Attention of all queries of the prompt, (B, K, r, T, T).
            position (`torch.Tensor`): (B, K, T).
            newest (`torch.Tensor`): (B, 1, 1).

        Returns:
            `torch.Tensor`: Scores of the entries, 0 inside the window, (B, K, T).
        """
        inside = (position > newest - self.window) & (position >= 0)
        votes = (weights * inside[:, :, None, :, None]).sum((2, 3)).masked_fill(inside, 0)
        pooled = F.max_pool1d(votes, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return pooled.masked_fill(inside, 0)


POLICIES: dict[str, type[BudgetPolicy]] = {
    "swa": SlidingWindow,
    "streaming_llm": StreamingLLM,
    "h2o": H2O,
    "tova": TOVA,
    "snapkv": SnapKV,
}


def check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    """Refuse a value outside a range.

    Raises:
        ValueError: Naming the argument, its value and what is allowed.
    """
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value}, but must be {allowed}.")
