"""What every `benchmark_<slug>.py` returns, and how the command line finds and writes it.

A method's benchmark is the function `run(quick, seed, device) -> BenchmarkResult` in `hf_pipelines/<slug>/
benchmark_<slug>.py`; it may also have `run_performance(seed, device)` and `run_ablations(seed, device)`. Nothing else
has to be registered.
"""

import gc
import importlib
import importlib.metadata
import json
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

import hf_pipelines
from hf_models._rooms import register_all
from hf_pipelines import hub

PACKAGES = ("torch", "diffusers", "transformers", "datasets", "accelerate", "numpy")


@dataclass
class Row:
    """One line of a benchmark's table.

    Args:
        name (`str`): Method and setting.
        metrics (`dict[str, float | str]`): Named values.
        ours (`bool`, defaults to `False`): Whether it is the method itself, whose values go into its card's results.
    """

    name: str
    metrics: dict[str, Any]
    ours: bool = False


@dataclass
class Comparison:
    """The line of a method in the table of `closedloop demo`: its value beside a baseline's.

    Args:
        baseline (`str`): Name of the baseline.
        metric (`str`): Name of the metric with its unit.
        value, baseline_value (`float`): What the method and the baseline reach.
        higher_is_better (`bool`, defaults to `True`): Direction of the metric.
    """

    baseline: str
    metric: str
    value: float
    baseline_value: float
    higher_is_better: bool = True

    @property
    def wins(self) -> bool:
        """Whether the method is strictly better."""
        return (self.value > self.baseline_value) == self.higher_is_better and self.value != self.baseline_value


@dataclass
class Bar:
    """A claim of the method's acceptance section, checked.

    Args:
        claim (`str`): What is claimed.
        value (`float`): What was measured.
        limit (`float`): The bar.
        at_least (`bool`, defaults to `True`): Whether the value must reach the limit or stay below it.
    """

    claim: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def passed(self) -> bool:
        """Whether the claim holds; never for NaN."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class BenchmarkResult:
    """Everything a benchmark found.

    Args:
        slug (`str`): The method.
        seed (`int`): Seed of the run.
        quick (`bool`): Whether this is the short run of `closedloop demo`.
        rows (`list[Row]`): The table.
        comparisons (`list[Comparison]`): Lines of the demo's table.
        bars (`list[Bar]`): Checked claims.
        figures (`dict[str, matplotlib.figure.Figure]`): Pictures by name.
        card_tables (`dict[str, str]`): Markdown tables that the model card shows between
            `<!-- begin NAME -->` and `<!-- end NAME -->`.
        repo (`str`, *optional*): The model card that the results belong to.
        dataset (`str`): Hub id of the data, for the card's results.
        seconds (`float`): Wall time, filled in by [`measured`].
        peak_memory_bytes (`int`): Peak resident memory of the process (or of the GPU), filled in by [`measured`].
    """

    slug: str
    seed: int
    quick: bool
    rows: list[Row] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    card_tables: dict[str, str] = field(default_factory=dict)
    repo: str | None = None
    dataset: str = ""
    seconds: float = 0.0
    peak_memory_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values; a number that is not finite, which JSON cannot hold, becomes `None`."""
        return {
            "slug": self.slug,
            "seed": self.seed,
            "quick": self.quick,
            "rows": [
                {"name": row.name, "metrics": {name: _plain(value) for name, value in row.metrics.items()}}
                for row in self.rows
            ],
            "bars": [
                {
                    "claim": bar.claim,
                    "value": _plain(bar.value),
                    "limit": bar.limit,
                    "relation": ">=" if bar.at_least else "<=",
                    "passed": bar.passed,
                }
                for bar in self.bars
            ],
            "seconds": round(self.seconds, 2),
            "peak_memory_bytes": self.peak_memory_bytes,
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        }

    def save_figures(self, folder: Path) -> list[Path]:
        """Write the figures as PNG files into `folder` and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, figure in self.figures.items():
            paths.append(folder / f"{self.slug}_{name}.png")
            figure.savefig(paths[-1], dpi=150, bbox_inches="tight")
        return paths

    def save_eval_results(self, folder: Path, name: str) -> Path:
        """Write `.eval_results/<name>.yaml` below a model card, in the Hub's format, and the full table as JSON.

        Args:
            folder (`Path`): The repo's folder.
            name (`str`): Stem of the two files.

        Returns:
            `Path`: the YAML file.
        """
        from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

        entries = [
            EvalResultEntry(
                dataset_id=self.dataset,
                task_id=f"{row.name}/{metric}",
                value=value,
                date=time.strftime("%Y-%m-%d"),
                notes=f"closedloop bench {self.slug} --seed {self.seed}",
            )
            for row in self.rows
            if row.ours
            for metric, value in row.metrics.items()
            if isinstance(value, (int, float))
        ]
        target = folder / ".eval_results"
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{name}.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        path = target / f"{name}.yaml"
        path.write_text(yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False))
        return path

    def update_card(self, readme: Path) -> bool:
        """Put the tables between their markers in a model card; returns whether the file changed."""
        before = text = readme.read_text(encoding="utf-8")
        for name, table in self.card_tables.items():
            pattern = rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)"
            text = re.sub(pattern, lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL)
        if text != before:
            readme.write_text(text, encoding="utf-8")
        return text != before


def markdown_table(columns: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table with the names of its columns and the cells of its rows."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def measured(result: BenchmarkResult, device: str = "cpu") -> Iterator[BenchmarkResult]:
    """Fill in wall time and peak memory of the block."""
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield result
    result.seconds = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts kB on Linux
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    result.peak_memory_bytes = torch.cuda.max_memory_allocated() if cuda else resident


def peak_process_megabytes() -> float:
    """Peak resident megabytes of this process since it began (`ru_maxrss` would count the parent's too)."""
    status = Path("/proc/self/status")
    if not status.is_file():
        raise NotImplementedError("peak memory is read from /proc/self/status, which only Linux has.")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def least_cpu_seconds(*jobs: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Least CPU time of each job, the jobs taking turns so that a busy machine slows all alike."""
    best = [float("inf")] * len(jobs)
    for _ in range(repeats):
        for index, job in enumerate(jobs):
            start = time.process_time()
            job()
            best[index] = min(best[index], time.process_time() - start)
    return best


def _live_tensor_bytes() -> int:
    """Bytes of all tensors alive in this process, each storage once."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def memory_growth(sample: Callable[[Callable], Any], device: str = "cpu") -> float:
    """Tensor memory after the last sampling step over that after the second (peak memory on a GPU).

    Args:
        sample (`Callable`): Runs a pipeline with its argument as `callback_on_step_end`.
        device (`str`, defaults to `"cpu"`): Where it runs.

    Returns:
        `float`: 1 where nothing piles up.
    """
    cuda = torch.device(device).type == "cuda"
    samples = []

    def note(pipe, step, timestep, tensors):
        samples.append(torch.cuda.max_memory_allocated() if cuda else _live_tensor_bytes())
        return tensors

    sample(note)
    return samples[-1] / samples[1]


def find_benchmarks() -> list[str]:
    """Slugs of all rooms that have a benchmark, in order of name."""
    files = [path for folder in hf_pipelines.__path__ for path in Path(folder).glob("*/benchmark_*.py")]
    return sorted({path.parent.name for path in files if path.stem == f"benchmark_{path.parent.name}"})


def load_benchmark(slug: str) -> ModuleType:
    """Import the benchmark of a method.

    Raises:
        ValueError: There is no such method.
    """
    if slug not in find_benchmarks():
        raise ValueError(f"no method {slug!r}; there is {', '.join(find_benchmarks())}.")
    register_all()
    return importlib.import_module(f"hf_pipelines.{slug}.benchmark_{slug}")


def card_folder(result: BenchmarkResult) -> Path | None:
    """The checked-out model card a result belongs to; `None` in an installed wheel, which is nobody's to write to."""
    if result.repo is None:
        return None
    folder = Path(hub.repo(result.repo))
    return folder if folder.is_dir() and "_shipped" not in folder.parts else None
