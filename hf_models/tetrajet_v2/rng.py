"""Keyed random streams: the noise of one operand of one layer in one backward pass depends on nothing else.

A stream's key is the tuple (seed, step, micro-step, layer, operand, rank). Resuming, gradient checkpointing and the
order in which layers run therefore change no result, and the two operands of a matrix product never share noise
(sharing it biases the diagonal of the weight gradient).
"""

from dataclasses import dataclass

import torch

__all__ = ["TetraJetState", "random_signs", "splitmix64", "stochastic_noise", "stream_generator"]

_MASK = (1 << 64) - 1
_NOISE_OFFSET = torch.tensor(0.5 + 2.0**-17, dtype=torch.float32, device="cpu")


def splitmix64(*words: int) -> int:
    """Hash integers into 64 bits with the splitmix64 finalizer, one absorbing round per word.

    Args:
        *words (`int`): Any integers; the order matters.

    Returns:
        `int`: A number in [0, 2^64).
    """
    z = 0
    for word in words:
        z = (z + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


def stream_generator(
    seed: int,
    step: int = 0,
    micro: int = 0,
    layer: int = 0,
    operand: int = 0,
    rank: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Generator:
    """Generator of the stream with this key.

    Args:
        seed (`int`): Seed of the run.
        step (`int`, defaults to 0): Optimizer step.
        micro (`int`, defaults to 0): Micro-step of gradient accumulation.
        layer (`int`, defaults to 0): Number of the layer.
        operand (`int`, defaults to 0): Which quantizer (3 … 6 for Q3 … Q6) or sign vector draws.
        rank (`int`, defaults to 0): Rank of the process.
        device (`torch.device` or `str`, defaults to `"cpu"`): Where the numbers are drawn.

    Returns:
        `torch.Generator`: Fresh generator; equal keys give equal streams.
    """
    key = splitmix64(seed, step, micro, layer, operand, rank)
    return torch.Generator(device=device).manual_seed(key - (1 << 64) if key >= 1 << 63 else key)


def stochastic_noise(
    size: int,
    generator: torch.Generator | None,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
) -> torch.Tensor:
    """Uniform noise u = (k + 1/2)/2^16 with 16 random bits k per element, four elements cut from one 64-bit draw.

    Args:
        size (`int`): Number of elements.
        generator (`torch.Generator` or `None`): Source of randomness; `None` is torch's global generator.
        device (`torch.device` or `str`, defaults to `"cpu"`): Device of the noise.
        out (`torch.Tensor`, *optional*): FP32 tensor of `size` elements to fill.
        draws (`torch.Tensor`, *optional*): Int64 work space of at least `size/4` elements.

    Returns:
        `torch.Tensor`: FP32 noise in (0, 1) of shape `(size,)`.
    """
    count = -(-size // 4)
    draws = torch.empty(count, dtype=torch.int64, device=device) if draws is None else draws[:count]
    draws.random_(-(2**63), None, generator=generator)
    out = torch.empty(size, dtype=torch.float32, device=device) if out is None else out.view(-1)
    out.copy_(draws.view(torch.int16)[:size])  # k − 2^15, exact
    return torch.add(_NOISE_OFFSET, out, alpha=2.0**-16, out=out)  # exact: multiples of 2^-17 below 1


def random_signs(size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> torch.Tensor:
    """Random signs σ ∈ {±1}^size.

    Args:
        size (`int`): How many.
        generator (`torch.Generator`): Source of randomness on `device`.
        device (`torch.device` or `str`, defaults to `"cpu"`): Device of the signs.

    Returns:
        `torch.Tensor`: FP32 signs.
    """
    return torch.randint(0, 2, (size,), generator=generator, device=device).mul_(2).sub_(1).to(torch.float32)


@dataclass
class TetraJetState:
    """Counters that key the random streams; one object shared by all layers of a model.

    `TetraJetStateCallback` and the engines keep them current; a hand-written loop calls `set_step` before each step.

    Args:
        seed (`int`, defaults to 0): Seed of the run.
        step (`int`, defaults to 0): Optimizer steps done so far.
        micro_step (`int`, defaults to 0): Micro-step inside the current optimizer step.
        rank (`int`, *optional*): Rank of the process; by default asked from `torch.distributed`.
    """

    seed: int = 0
    step: int = 0
    micro_step: int = 0
    rank: int | None = None

    def set_step(self, step: int, micro_step: int = 0) -> None:
        """Set both counters.

        Args:
            step (`int`): Optimizer steps done so far.
            micro_step (`int`, defaults to 0): Micro-step inside this step.
        """
        self.step, self.micro_step = int(step), int(micro_step)

    def key(self, layer: int) -> tuple[int, int, int, int, int]:
        """Key of a layer's streams at this moment: (seed, step, micro-step, layer, rank).

        Args:
            layer (`int`): Number of the layer.

        Returns:
            `tuple`: Five integers.
        """
        rank = self.rank
        if rank is None:
            ready = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if ready else 0
        return self.seed, self.step, self.micro_step, layer, rank
