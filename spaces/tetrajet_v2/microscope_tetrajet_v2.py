"""One row of numbers in NVFP4: what stands behind the first tab. No gradio in here."""

import math
from dataclasses import dataclass

import torch
from figures_tetrajet_v2 import BLUE, INK, ORANGE, RED, dress, new_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_models.tetrajet_v2 import NVFP4Tensor, decode_e2m1, mxfp8_fake_quant, nvfp4_fake_quant, nvfp4_quantize

INNER = 16
DISTRIBUTIONS = {
    "normal": "normal",
    "laplace": "Laplace",
    "student": "Student t, 3 degrees of freedom",
    "uniform": "uniform",
    "ties": "halfway between two codes",
    "own": "the numbers below",
}
OUTERS = {"128": "128 values (TetraJet-v2)", "64": "64 values", "32": "32 values", "-1": "the whole row (NVIDIA)"}
ROUNDINGS = {"nearest": "to nearest (forward)", "stochastic": "stochastic (backward)"}
SCALE_ROUNDINGS = {"nearest": "to nearest (paper)", "up": "up (nothing is clipped)"}
MAX_OWN = 512
FP32_MAX = torch.finfo(torch.float32).max


def sample(distribution: str, size: int, outlier: float, seed: int) -> torch.Tensor:
    """A row of random numbers.

    Args:
        distribution (`str`): A key of `DISTRIBUTIONS`, not `"own"`.
        size (`int`): How many.
        outlier (`float`): Value that the number after the first third takes; 0 leaves it alone.
        seed (`int`): Seed of the row.

    Returns:
        `torch.Tensor`: FP32, `(size,)`; of unit variance but for the ties.
    """
    generator = torch.Generator().manual_seed(seed)
    if distribution == "uniform":
        x = (2 * torch.rand(size, generator=generator) - 1) * math.sqrt(3)
    elif distribution == "laplace":
        u = torch.rand(size, generator=generator).clamp(1e-6, 1 - 1e-6) - 0.5
        x = -u.sign() * (1 - 2 * u.abs()).log() / math.sqrt(2)
    elif distribution == "student":
        normal = torch.randn(size, 4, generator=generator)
        x = normal[:, 0] / normal[:, 1:].square().mean(1).sqrt() / math.sqrt(3)
    elif distribution == "ties":
        halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        x = halves[torch.randint(7, (size,), generator=generator)]
        x = x * (2 * torch.randint(2, (size,), generator=generator) - 1)
        x[::INNER] = 6.0  # so that every block's scale is 1
    else:
        x = torch.randn(size, generator=generator)
    if outlier:
        x[size // 3] = outlier
    return x


def parse(text: str) -> torch.Tensor:
    """Numbers that somebody typed, separated by spaces, commas, semicolons or lines.

    Args:
        text (`str`): The text; `nan` and `inf` are numbers too.

    Returns:
        `torch.Tensor`: FP32, `(n,)`.

    Raises:
        ValueError: There is none, there are more than 512, one is no number or beyond FP32.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError("Your own numbers are empty: type some, for instance 0.3 -1 6 0.02.")
    if len(text) > 40 * MAX_OWN:
        raise ValueError(f"Your own numbers may have {40 * MAX_OWN} characters at most, got {len(text)}.")
    words = text.replace(",", " ").replace(";", " ").split()
    if len(words) > MAX_OWN:
        raise ValueError(f"Your own numbers may be {MAX_OWN} at most, got {len(words)}.")
    numbers = []
    for index, word in enumerate(words, 1):
        try:
            number = float(word)
        except ValueError:
            raise ValueError(f"Number {index} of your own, {word[:40]!r}, is not a number.") from None
        if math.isfinite(number) and abs(number) > FP32_MAX:
            raise ValueError(f"Number {index} of your own, {word[:40]!r}, is beyond FP32, whose largest is 3.4e38.")
        if word.lower().lstrip("+-") not in ("inf", "infinity") and math.isinf(number):
            raise ValueError(f"Number {index} of your own, {word[:40]!r}, is beyond FP32, whose largest is 3.4e38.")
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float32)


@dataclass
class View:
    """A row, its codes and scales, and what they stand for.

    Args:
        x (`torch.Tensor`): The numbers, `(n,)`.
        tensor (`NVFP4Tensor`): Codes and scales of the first draw.
        mean (`torch.Tensor`): x̂, the mean over all draws.
        outer_block (`int`): Values under an outer scale, -1 for the row.
    """

    x: torch.Tensor
    tensor: NVFP4Tensor
    mean: torch.Tensor
    outer_block: int

    @property
    def scale(self) -> torch.Tensor:
        """s_i·s_o of every number, `(n,)`."""
        return self.tensor.scales()[0].repeat_interleave(INNER)[: len(self.x)]

    @property
    def outer(self) -> torch.Tensor:
        """s_o of every inner block."""
        blocks = self.tensor.inner.shape[-1]
        if self.outer_block == -1:
            return self.tensor.outer.reshape(1).expand(blocks)
        return self.tensor.outer[0].repeat_interleave(self.outer_block // INNER)[:blocks]


def view(x: torch.Tensor, outer_block: int, rounding: str, scale_rounding: str, draws: int, seed: int) -> View:
    """Quantize a row.

    Args:
        x (`torch.Tensor`): The row, FP32, `(n,)`.
        outer_block (`int`): Values under an outer scale, -1 for the row.
        rounding (`str`): `"nearest"` or `"stochastic"`.
        scale_rounding (`str`): `"nearest"` or `"up"`.
        draws (`int`): Stochastic draws to average.
        seed (`int`): Seed of their noise.

    Returns:
        [`View`].
    """
    draws = draws if rounding == "stochastic" else 1
    rows = x.expand(draws, -1)  # equal rows have equal scales, whatever the outer block
    drawn = nvfp4_quantize(rows, outer_block, rounding, scale_rounding, torch.Generator().manual_seed(seed))
    outer = drawn.outer if outer_block == -1 else drawn.outer[:1]
    first = NVFP4Tensor(drawn.codes[:1], drawn.inner[:1], outer, torch.Size((1, len(x))), outer_block)
    return View(x, first, drawn.dequantize(torch.float64).mean(0), outer_block)


def relative_error(x: torch.Tensor, approximation: torch.Tensor) -> float:
    """‖x̂ − x‖²/‖x‖²; 0 for a row of zeros, NaN where something is not finite."""
    x, approximation = x.double(), approximation.double()
    norm = float(x.square().sum())
    return float((approximation - x).square().sum()) / norm if norm else 0.0


def scale_rows(seen: View) -> list[list[str]]:
    """Per inner block: its numbers, both scales, the inner scale's byte, the largest |t| and the error."""
    inner, product = seen.tensor.inner[0], seen.tensor.scales()[0]
    rows = []
    for block, (scale, whole, outer) in enumerate(zip(inner, product, seen.outer, strict=True)):
        first, end = block * INNER, min((block + 1) * INNER, len(seen.x))
        x = seen.x[first:end]
        largest = float((x / whole).abs().max())
        rows.append(
            [
                f"{first}–{end - 1}",
                f"{float(outer):.4g}",
                f"{float(scale):g}",
                f"0x{int(scale.view(torch.uint8)):02x}",
                f"{float(whole):.4g}",
                f"{largest:.3f}{' clipped' if largest > 6.0005 else ''}",
                f"{relative_error(x, seen.mean[first:end]):.2e}",
            ]
        )
    return rows


def code_rows(seen: View) -> list[list[str]]:
    """Per number: x, t = x/(s_i·s_o), the code's bits, its value, x̂ of this code, and x̂ − x."""
    codes = seen.tensor.codes[0]
    values, approximation = decode_e2m1(codes), seen.tensor.dequantize()[0]
    return [
        [
            str(index),
            f"{float(x):.5g}",
            f"{float(x / scale):.4f}",
            f"{code:04b}",
            f"{float(value):g}",
            f"{float(back):.5g}",
            f"{float(back - x):.2g}",
        ]
        for index, (x, scale, code, value, back) in enumerate(
            zip(seen.x, seen.scale, codes.tolist(), values, approximation, strict=True)
        )
    ]


def other_rows(seen: View, seed: int) -> list[list[str]]:
    """Error of the same row under other settings, single draws: of all of it, and without its largest number."""

    def fake(outer: int, rounding: str, scale_rounding: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return nvfp4_fake_quant(seen.x.view(1, -1), outer, rounding, scale_rounding, generator)[0]

    n = len(seen.x)
    settings = [
        ("NVFP4, nearest", 128, "nearest", "nearest"),
        ("NVFP4, nearest, scales up", 128, "nearest", "up"),
        ("NVFP4, stochastic", 128, "stochastic", "nearest"),
        ("NVFP4, stochastic, scales up", 128, "stochastic", "up"),
        ("NVFP4, nearest, one outer scale", -1, "nearest", "nearest"),
    ]
    made = [(name, fake(outer, rounding, scale), bits(n, outer)) for name, outer, rounding, scale in settings]
    made.append(("MXFP8 (outlier channels)", mxfp8_fake_quant(seen.x.view(1, -1))[0], 8 + 8 * -(-n // 32) / n))
    others = torch.arange(n) != seen.x.abs().nan_to_num(math.inf, math.inf).argmax()
    return [
        [
            name,
            f"{relative_error(seen.x, approximation):.2e}",
            f"{relative_error(seen.x[others], approximation[others]):.2e}",
            f"{size:.2f}",
        ]
        for name, approximation, size in made
    ]


def bits(size: int, outer_block: int) -> float:
    """Bits per number of a row: its code, a byte for 16 numbers, 32 bits for an outer block."""
    outers = 1 if outer_block == -1 else -(-size // outer_block)
    return 4 + (8 * -(-size // INNER) + 32 * outers) / size


def draw(seen: View) -> Figure:
    """The row and what its codes stand for, above the error."""
    figure = new_figure(10, 5.8)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    x, mean = seen.x.double().numpy(), seen.mean.numpy()
    index = range(len(x))
    top.vlines(index, 0, seen.x.nan_to_num(0, 0, 0), color=INK, linewidth=0.9, alpha=0.6)
    top.plot(index, x, "o", color=INK, markersize=3.6, label="x")
    top.plot(index, mean, "D", color=BLUE, markersize=3.2, label="x̂", alpha=0.9)
    error = mean - x
    bottom.vlines(index, 0, torch.tensor(error).nan_to_num(0, 0, 0), color=ORANGE, linewidth=1.6)
    _fit(top, seen.x)
    _fit(bottom, torch.tensor(error))
    for axes in (top, bottom):
        _boundaries(axes, seen)
    for first in range(0, len(x), seen.outer_block if seen.outer_block > 0 else len(x)):
        end = min(len(x), first + seen.outer_block) if seen.outer_block > 0 else len(x)
        if not bool(seen.mean[first:end].isfinite().all()):
            for axes in (top, bottom):
                axes.axvspan(first - 0.5, end - 0.5, color=RED, alpha=0.18, linewidth=0, label="NaN")
    top.set_xlim(-1, len(x))
    top.xaxis.set_major_locator(MaxNLocator(integer=True))
    dress(top, "stems: x; diamonds: what the codes stand for; dotted: inner blocks; lines: outer blocks")
    dress(bottom, "x̂ − x", x="number", legend=False)
    return figure


def _fit(axes: Axes, values: torch.Tensor) -> None:
    """A scale that is logarithmic beyond four medians, where a few numbers dwarf the rest."""
    size = values[values.isfinite()].abs()
    if not len(size) or not float(size.max()) > 25 * float(size.median()) > 0:
        return
    threshold = 4 * float(size.median())
    axes.set_yscale("symlog", linthresh=threshold)
    axes.set_yticks([tick for tick in axes.get_yticks() if tick == 0 or abs(tick) >= threshold])


def _boundaries(axes: Axes, seen: View) -> None:
    size = len(seen.x)
    for first in range(INNER, size, INNER):
        is_outer = seen.outer_block > 0 and first % seen.outer_block == 0
        axes.axvline(first - 0.5, color=INK, linewidth=1.6 if is_outer else 0.8, linestyle="-" if is_outer else ":")
