"""Payoffs, their signed index (moneyness before the positive part), and the registry that names both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Prices = torch.Tensor  # (..., d)


@dataclass(frozen=True)
class Payoff:
    """What an option pays.

    Args:
        value (`Callable`): prices (..., d), strike and parameters → payoff (...).
        index (`Callable`): The same arguments → the signed index g (...), a smooth measure of how far in the money.
        symmetric (`bool`): Whether exchanging assets changes nothing.
        nonnegative (`bool`): Whether the payoff is never negative.
        homogeneous (`bool`): Whether the payoff scales with prices and strike, so that their unit does not matter.
    """

    value: Callable[..., torch.Tensor]
    index: Callable[..., torch.Tensor]
    symmetric: bool = True
    nonnegative: bool = True
    homogeneous: bool = True


def _mean(x: Prices) -> torch.Tensor:
    return x.mean(-1)


def _geometric_mean(x: Prices) -> torch.Tensor:
    return x.log().mean(-1).exp()


def _maximum(x: Prices) -> torch.Tensor:
    return x.amax(-1)


def _minimum(x: Prices) -> torch.Tensor:
    return x.amin(-1)


def _call(level: Callable[[Prices], torch.Tensor]) -> Payoff:
    return Payoff(
        lambda x, strike: (level(x) - strike).clamp(min=0),
        lambda x, strike: (level(x) / strike).log(),
    )


def _put(level: Callable[[Prices], torch.Tensor]) -> Payoff:
    return Payoff(
        lambda x, strike: (strike - level(x)).clamp(min=0),
        lambda x, strike: (level(x) / strike).log(),
    )


def _butterfly(x: Prices, strike: float, width: float = 10.0) -> torch.Tensor:
    return (width - (_mean(x) - strike).abs()).clamp(min=0)


PAYOFFS: dict[str, Payoff] = {
    "put": _put(_mean),
    "call": _call(_mean),
    "max_call": _call(_maximum),
    "min_put": _put(_minimum),
    "basket_put": _put(_mean),
    "basket_call": _call(_mean),
    "geo_put": _put(_geometric_mean),
    "straddle": Payoff(lambda x, strike: (_mean(x) - strike).abs(), lambda x, strike: (_mean(x) / strike).log()),
    "butterfly": Payoff(_butterfly, lambda x, strike, width=10.0: (_mean(x) / strike).log(), homogeneous=False),
}


def register_payoff(
    name: str,
    value: Callable[..., torch.Tensor],
    index: Callable[..., torch.Tensor] | None = None,
    symmetric: bool = False,
    nonnegative: bool = True,
) -> None:
    """Make a payoff known by name, so that a configuration can be saved and loaded.

    Args:
        name (`str`): New name.
        value (`Callable`): (prices (..., d), strike, **parameters) → payoff (...).
        index (`Callable`, *optional*): Signed index of the same arguments; default: the payoff itself over the strike.
        symmetric (`bool`, defaults to `False`): Whether exchanging assets changes nothing.
        nonnegative (`bool`, defaults to `True`): Whether the payoff is never negative.

    Raises:
        ValueError: The name is taken.
    """
    if name in PAYOFFS:
        raise ValueError(f"payoff {name!r} is already registered.")

    def over_strike(x: Prices, strike: float, **parameters: Any) -> torch.Tensor:
        return value(x, strike, **parameters) / strike

    PAYOFFS[name] = Payoff(value, index or over_strike, symmetric, nonnegative, homogeneous=False)


def get_payoff(name: str) -> Payoff:
    """The payoff of a name.

    Raises:
        ValueError: There is none; the registered ones are listed.
    """
    if name not in PAYOFFS:
        raise ValueError(f"payoff={name!r} is not registered; there is {', '.join(sorted(PAYOFFS))}.")
    return PAYOFFS[name]
