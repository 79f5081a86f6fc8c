"""What a fixed-size memory costs: bytes, time per token, prefill, and the two forms of the scan, as ratios in one
run."""

import subprocess
import sys

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_models.arm.cache_arm import ArmCache
from hf_models.arm.convert_arm import convert_to_arm
from hf_models.arm.ops_arm import Writes
from hf_models.arm.scan_arm import arm_scan, empty_state
from hf_pipelines.arm.dense_oracle_arm import dense_scan
from hf_pipelines.benchmark import (
    Bar,
    BenchmarkResult,
    Row,
    least_cpu_seconds,
    markdown_table,
    measured,
    peak_process_megabytes,
)

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
}
CONTEXTS = (1024, 4096, 16384, 32768)
PEAK_CONTEXTS = (4096, 32768)


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same random Llama (2 layers, 4 heads of 32) with full attention and with a memory of 256 slots."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        full = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
        return full, convert_to_arm(full)


def tokens(length: int) -> torch.Tensor:
    """Random tokens (1, length)."""
    return torch.randint(0, SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def filled_caches(full: PreTrainedModel, arm: PreTrainedModel, length: int) -> tuple[DynamicCache, ArmCache]:
    """Caches of both models after a text of `length` tokens, fed 1,024 at a time."""
    ids = tokens(length)
    dynamic, memory = DynamicCache(config=full.config), ArmCache(arm.config)
    for part in ids.split(1024, 1):
        full(part, cache=dynamic, logits_to_keep=1)
        arm(part, cache=memory, logits_to_keep=1)
    return dynamic, memory


def peak_growth(length: int) -> float:
    """Megabytes by which a process's peak memory grows while an ARM model reads `length` tokens at once."""
    code = f"from hf_pipelines.arm.performance_arm import print_peak_growth; print_peak_growth({length})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


@torch.no_grad()
def print_peak_growth(length: int) -> None:
    """Run inside a fresh process: prefill and print the growth of the peak memory."""
    _, arm = models()
    arm(tokens(1024), cache=ArmCache(arm.config), logits_to_keep=1)  # warm buffers
    before = peak_process_megabytes()
    arm(tokens(length), cache=ArmCache(arm.config), logits_to_keep=1)
    print(peak_process_megabytes() - before)


def scan_inputs(length: int = 2048, slots: int = 256, heads: int = 4, d: int = 32) -> tuple:
    """Random arguments of both forms of the scan."""
    g = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, heads, length, d, generator=g) for _ in range(3))
    gate = torch.rand(1, heads, length, generator=g)
    slot = torch.randint(0, slots, (1, heads, length), generator=g)
    writes = Writes(k, v, k, gate, slot, slot // 4, torch.ones(1, length, dtype=torch.bool))
    state = empty_state(1, heads, d, d, slots // 4, 4, 64, 4, torch.float32, "cpu")
    return state, q[:, :, None], q[:, :, None], writes, d**-0.5


@torch.no_grad()
def run_performance(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Measure bytes and time against context length, on one thread.

    Args:
        seed (`int`, defaults to 0): Of no effect: sizes count, not values.
        device (`str`, defaults to `"cpu"`): The CPU; ratios on a GPU differ.

    Returns:
        [`BenchmarkResult`]: bytes, milliseconds per token and prefill seconds per context, and the spec's bars.
    """
    result = BenchmarkResult("arm", seed, False, repo="arm-recall", dataset="closedloop/recall_tasks")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with measured(result, device):
            _measure(result)
    finally:
        torch.set_num_threads(threads)
    return result


def _measure(result: BenchmarkResult) -> None:
    full, arm = models()
    x = tokens(1)
    caches = {n: filled_caches(full, arm, n) for n in tqdm(CONTEXTS, desc="filling caches")}
    jobs = []
    for dynamic, memory in caches.values():
        jobs += [lambda c=dynamic: full(x, cache=c), lambda c=memory: arm(x, cache=c)]
    seconds = least_cpu_seconds(*jobs, repeats=40)
    decode = {n: (seconds[2 * i], seconds[2 * i + 1]) for i, n in enumerate(CONTEXTS)}
    sizes = {
        n: (sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers), memory.nbytes())
        for n, (dynamic, memory) in caches.items()
    }
    jobs = []
    for n in CONTEXTS:
        ids = tokens(n)
        jobs += [lambda ids=ids: full(ids, logits_to_keep=1), lambda ids=ids: arm(ids, logits_to_keep=1)]
    seconds = least_cpu_seconds(*jobs, repeats=2)
    prefill = {n: (seconds[2 * i], seconds[2 * i + 1]) for i, n in enumerate(CONTEXTS)}
    peaks = {n: peak_growth(n) for n in PEAK_CONTEXTS}
    arguments = scan_inputs()
    ratios = {}
    for chunk in (16, 32):
        index, dense = least_cpu_seconds(
            lambda chunk=chunk: arm_scan(*arguments, chunk=chunk),
            lambda chunk=chunk: dense_scan(*arguments, chunk=chunk),
            repeats=3,
        )
        ratios[f"dense / index form, C = {chunk}"] = round(dense / index, 2)

    columns = [
        "context",
        "cache, full",
        "cache, ARM",
        "ms/token, full",
        "ms/token, ARM",
        "prefill s, full",
        "prefill s, ARM",
    ]
    table = []
    for n in CONTEXTS:
        megabytes = [f"{size / 1e6:.3f} MB" for size in sizes[n]]
        table.append([f"{n:,}", *megabytes, *(f"{1e3 * s:.1f}" for s in decode[n]), *(f"{s:.2f}" for s in prefill[n])])
        metrics = {
            "bytes / full": sizes[n][1] / sizes[n][0],
            "time per token / full": decode[n][1] / decode[n][0],
            "prefill / full": prefill[n][1] / prefill[n][0],
        }
        result.rows.append(Row(f"context {n:,}", {k: round(v, 3) for k, v in metrics.items()}, ours=True))
    result.rows.append(Row("scan, 256 slots", ratios, ours=True))
    growth = {f"peak memory of prefill at {n:,}, MB": round(value, 1) for n, value in peaks.items()}
    result.rows.append(Row("prefill", growth, ours=True))
    result.card_tables["performance"] = markdown_table(columns, table)
    short, long = CONTEXTS[0], CONTEXTS[-1]
    result.bars = [
        Bar("cache bytes at 32k − at 1k", sizes[long][1] - sizes[short][1], 0, at_least=False),
        Bar("ms/token at 32k / at 1k", decode[long][1] / decode[short][1], 1.3, at_least=False),
        Bar("ms/token at 32k, full / ARM", decode[long][0] / decode[long][1], 3.0),
        Bar("prefill, 16k / 4k", prefill[16384][1] / prefill[4096][1], 5.0, at_least=False),
        Bar("prefill at 4k / full", prefill[4096][1] / prefill[4096][0], 4.0, at_least=False),
        Bar("prefill at 32k / full", prefill[long][1] / prefill[long][0], 1.0, at_least=False),
        Bar("peak memory of prefill, MB more at 32k than at 4k", peaks[long] - peaks[4096], 16, at_least=False),
        Bar("scan at 256 slots, dense / index form, C = 32", ratios["dense / index form, C = 32"], 5.0),
    ]
