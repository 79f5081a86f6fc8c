"""Measure what the emulation costs, as the benchmark reports it."""

import time
from collections.abc import Callable

import torch
from torch import nn

from .configuration_tetrajet_v2 import TetraJetConfig
from .linear import TetraJetLinear
from .osci_reset import OsciReset
from .quantize import nvfp4_quantize

__all__ = ["best_seconds", "measure_linear", "measure_osci_reset", "measure_packing"]


def best_seconds(run: Callable[[], object], repeats: int = 5, warmup: int = 2) -> float:
    """Shortest of several timed runs.

    Args:
        run (`Callable`): What to time.
        repeats (`int`, defaults to 5): Timed runs.
        warmup (`int`, defaults to 2): Runs before them.

    Returns:
        `float`: Seconds.
    """
    for _ in range(warmup):
        run()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def measure_linear(
    tokens: int = 1024,
    in_features: int = 256,
    out_features: int = 256,
    recipe: str | TetraJetConfig = "tetrajet_v2_base",
    repeats: int = 10,
    seed: int = 0,
) -> dict[str, float]:
    """Forward plus backward of a quantized layer against an FP32 `nn.Linear` with the same weights, one thread.

    Args:
        tokens (`int`, defaults to 1024): T.
        in_features (`int`, defaults to 256): K.
        out_features (`int`, defaults to 256): N.
        recipe (`str` or `TetraJetConfig`, defaults to `"tetrajet_v2_base"`): The recipe.
        repeats (`int`, defaults to 10): Timed runs of each; the shortest counts.
        seed (`int`, defaults to 0): Seed of the data.

    Returns:
        `dict[str, float]`: `seconds`, `reference_seconds` and their `ratio`.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, in_features, generator=generator, requires_grad=True)
    dy = torch.randn(tokens, out_features, generator=generator)
    plain = nn.Linear(in_features, out_features, bias=False)
    config = TetraJetConfig(recipe) if isinstance(recipe, str) else recipe
    layer = TetraJetLinear.from_linear(plain, config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = {"quantized": float("inf"), "plain": float("inf")}
        for _ in range(repeats):  # alternate, so that a busy machine slows both
            for name, module in (("quantized", layer), ("plain", plain)):
                taken = best_seconds(
                    lambda m=module: torch.autograd.grad(m(x), (x, m.weight), dy), repeats=1, warmup=1
                )
                seconds[name] = min(seconds[name], taken)
    finally:
        torch.set_num_threads(threads)
    return {
        "seconds": seconds["quantized"],
        "reference_seconds": seconds["plain"],
        "ratio": seconds["quantized"] / seconds["plain"],
    }


def measure_packing(rows: int = 2048, columns: int = 1024, repeats: int = 5) -> dict[str, float]:
    """Weights per second, one thread: quantize and pack, unpack and dequantize.

    Args:
        rows (`int`, defaults to 2048): Rows of the weight.
        columns (`int`, defaults to 1024): Columns of the weight.
        repeats (`int`, defaults to 5): Timed runs; the shortest counts.

    Returns:
        `dict[str, float]`: `pack_weights_per_second` and `unpack_weights_per_second`.
    """
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        packed = nvfp4_quantize(w).pack()
        return {
            "pack_weights_per_second": w.numel() / best_seconds(lambda: nvfp4_quantize(w).pack(), repeats),
            "unpack_weights_per_second": w.numel() / best_seconds(packed.dequantize, repeats),
        }
    finally:
        torch.set_num_threads(threads)


def measure_osci_reset(model: nn.Module, train_step: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """What OsciReset adds to a training step, inside and outside a window.

    Args:
        model (`nn.Module`): A converted model.
        train_step (`Callable`): One whole training step, optimizer included.
        repeats (`int`, defaults to 5): Timed runs; the shortest counts.

    Returns:
        `dict[str, float]`: `window_share` and `outside_share`, seconds of the engine over seconds of the step.
    """
    config = next(m for m in model.modules() if hasattr(m, "recipe")).recipe.osci_reset
    engine = OsciReset(model, type(config)(start=0, period=10**6, window=10**5))
    step = best_seconds(train_step, repeats)
    outside = best_seconds(lambda: engine.update(10**6 - 1), repeats)
    engine.update(0)
    inside = best_seconds(lambda: engine.update(1), repeats)
    return {"window_share": inside / step, "outside_share": outside / step}
