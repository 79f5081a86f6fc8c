"""TetraJet-v2 against other recipes of NVFP4 training, in three small experiments (see `experiments_tetrajet_v2`)."""

import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from hf_models.tetrajet_v2.performance import measure_linear, measure_osci_reset, measure_packing
from hf_models.tetrajet_v2.quantizer_tetrajet_v2 import prepare_model
from hf_models.tetrajet_v2.train_tetrajet_v2 import tiny_llama_config
from hf_pipelines.benchmark import Bar, BenchmarkResult, Comparison, Row, markdown_table, measured
from hf_pipelines.tetrajet_v2.experiments_tetrajet_v2 import (
    METHODS,
    Annealing,
    gradient_concentration,
    teacher_student_error,
)

REPO = "tetrajet-v2-tiny-lm"
DATASET = "closedloop/python_help_texts"
MARKS = [1, 16, 256, 1024]
BASE, STRICT, OSCI, OUT, FULL = (
    "tetrajet_v2_base",
    "base + strict_unbiased",
    "base + OsciReset",
    "base + OutControl",
    "tetrajet_v2",
)
CONCENTRATION = ("nvfp4_rtn", "nvidia_nvfp4", "fp4_all_the_way", BASE, STRICT)
NO_OUTLIERS = ("bf16", "nvfp4_rtn", "nvidia_nvfp4", BASE, OSCI)
LANGUAGE = ("bf16", "nvfp4_rtn", "nvidia_nvfp4", "fp4_all_the_way", BASE, OSCI, OUT, FULL)
STRICT_NOISE_SEEDS = 6  # n·e(n)/e(1) of one noise seed scatters by 0.17
ABLATIONS = {
    "tetrajet_v2": METHODS[FULL],
    "no alignment": {**METHODS[FULL], "align_backward": False},
    "no RHT in dX": {**METHODS[FULL], "rht_dx": False},
    "no RHT in dW": {**METHODS[FULL], "rht_dw": False},
    "dY rounded to nearest": {**METHODS[FULL], "stochastic_grad": False},
    "W rounded to nearest in dX": {**METHODS[FULL], "stochastic_weight": False},
    "X rounded to nearest in dW": {**METHODS[FULL], "stochastic_act": False},
    "16×16 weight blocks": {**METHODS[FULL], "weight_block_2d": True},
    "one outer scale per tensor": {**METHODS[FULL], "outer_block_size": -1},
    "scales rounded up": {**METHODS[FULL], "scale_rounding": "up"},
    "backward scales rounded up": {**METHODS[FULL], "strict_unbiased": True},
    "OsciReset, memory-efficient": {**METHODS[FULL], "osci_reset": {"detect": "distance_ratio_mem_eff"}},
    "OsciReset by bin edge": {**METHODS[FULL], "osci_reset": {"detect": "bin_edge"}},
    "no OsciReset": METHODS[OUT],
    "no OutControl": METHODS[OSCI],
    "forward quantized only": {**METHODS[FULL], "disabled_quantizers": ["Q3", "Q4", "Q5", "Q6"]},
}

Errors = dict[str, dict[str, dict[int, float]]]


def run(quick: bool = False, seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Compare the recipes.

    Args:
        quick (`bool`, defaults to `False`): Few gradient draws and a short teacher–student run: what `closedloop demo`
            shows.
        seed (`int`, defaults to 0): Seed of everything; the full run trains with this seed alone.
        device (`str`, defaults to `"cpu"`): Only measured for memory; the experiments run on the CPU.

    Returns:
        [`BenchmarkResult`]: concentration, errors and losses of every recipe, and the method's bars.
    """
    result = BenchmarkResult("tetrajet_v2", seed, quick, repo=REPO, dataset=DATASET)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices
    try:
        with measured(result, device):
            (_run_quick if quick else _run_full)(result, seed)
    finally:
        torch.set_num_threads(threads)
    return result


def _run_quick(result: BenchmarkResult, seed: int) -> None:
    marks = [1, 16, 64]
    errors = {name: gradient_concentration(METHODS[name], marks, seed) for name in ("nvfp4_rtn", "nvidia_nvfp4", BASE)}
    quick = ("bf16", "nvfp4_rtn", "nvidia_nvfp4", FULL)
    nmse = {name: teacher_student_error(METHODS[name], seed, steps=100) for name in quick}
    for name, value in nmse.items():
        metrics = {"NMSE, 100 steps": value}
        result.rows.append(Row(name, metrics, ours=name == FULL))
    for name, error in errors.items():
        result.rows.append(Row(f"{name}, gradient", {f"e_dW, n = {n}": error["dw"][n] for n in marks}, name == BASE))
    result.comparisons = [
        Comparison(name, "teacher–student error, 100 steps", nmse[FULL], nmse[name], higher_is_better=False)
        for name in quick
        if name != FULL
    ]
    result.figures["concentration"] = draw_concentration(errors)


def _run_full(result: BenchmarkResult, seed: int) -> None:
    with tqdm(
        total=len(CONCENTRATION) + len(METHODS) + len(NO_OUTLIERS) + 1 + len(LANGUAGE), desc="tetrajet_v2"
    ) as bar:
        _concentration(result, seed, bar)
        nmse = _teacher_student(result, seed, bar)
        loss = _language(result, seed, bar)
    names = ("bf16", "nvfp4_rtn", "nvidia_nvfp4", BASE, FULL)
    result.card_tables["summary tetrajet_v2"] = markdown_table(
        ["", *names],
        [
            ["error of a student with outlier inputs", *(f"{nmse[name]:.4f}" for name in names)],
            ["tiny Llama, held-out nats per character", *(f"{loss[name]['val loss']:.4f}" for name in names)],
        ],
    )


def _concentration(result: BenchmarkResult, seed: int, bar: tqdm) -> None:
    errors: Errors = {}
    for name in CONCENTRATION:
        errors[name] = gradient_concentration(METHODS[name], MARKS, seed, STRICT_NOISE_SEEDS if name == STRICT else 1)
        metrics = {f"e_{key}, n = {n}": error for key in ("dx", "dw") for n, error in errors[name][key].items()}
        result.rows.append(Row(f"{name}, gradient", metrics, ours="base" in name))
        bar.update()
    n = MARKS[-1]
    for key in ("dx", "dw"):
        scaled = {name: n * errors[name][key][n] / errors[name][key][1] for name in (BASE, STRICT)}
        result.bars += [
            Bar(f"strict_unbiased: n·e(n)/e(1) of {key}", scaled[STRICT], 0.8),
            Bar(f"strict_unbiased: n·e(n)/e(1) of {key}", scaled[STRICT], 1.25, at_least=False),
            Bar(f"base: n·e(n)/e(1) of {key}", scaled[BASE], 2.0, at_least=False),
        ]
    for name in ("nvfp4_rtn", "fp4_all_the_way"):
        result.bars.append(Bar(f"{name}: the error of dw stays", errors[name]["dw"][n], 5e-3))
    columns = ["recipe", *(f"e_{key}, n = {n}" for key in ("dX", "dW") for n in MARKS)]
    rows = [[name, *(f"{error[key][n]:.1e}" for key in ("dx", "dw") for n in MARKS)] for name, error in errors.items()]
    result.card_tables["concentration"] = markdown_table(columns, rows)
    result.figures["concentration"] = draw_concentration(errors)


def _teacher_student(result: BenchmarkResult, seed: int, bar: tqdm) -> dict[str, float]:
    nmse, plain = {}, {}
    for name, fields in METHODS.items():
        nmse[name] = teacher_student_error(fields, seed)
        bar.update()
    for name in NO_OUTLIERS:
        plain[name] = teacher_student_error(METHODS[name], seed, outliers=False)
        bar.update()
    for name, value in nmse.items():
        metrics = {"NMSE": value} | ({"NMSE without outliers": plain[name]} if name in plain else {})
        result.rows.append(Row(name, metrics, ours=name == FULL))
    result.bars += [
        Bar("teacher–student: base / nvfp4_rtn", nmse[BASE] / nmse["nvfp4_rtn"], 0.94, at_least=False),
        Bar("teacher–student: base / nvidia_nvfp4", nmse[BASE] / nmse["nvidia_nvfp4"], 0.90, at_least=False),
        Bar("teacher–student: base + OsciReset / base", nmse[OSCI] / nmse[BASE], 0.99, at_least=False),
        Bar("teacher–student: base + OutControl / base", nmse[OUT] / nmse[BASE], 0.55, at_least=False),
        Bar("teacher–student: full / bf16", nmse[FULL] / nmse["bf16"], 1.25, at_least=False),
        Bar("without outliers: OsciReset / base", plain[OSCI] / plain[BASE], 1.02, at_least=False),
        *(
            Bar(f"without outliers: {name} / bf16", plain[name] / plain["bf16"], 1.30, at_least=False)
            for name in NO_OUTLIERS[1:]
        ),
    ]
    rows = [[name, f"{value:.4f}", f"{plain[name]:.4f}" if name in plain else ""] for name, value in nmse.items()]
    columns = ["recipe", "error, 8 of 128 inputs 20 times larger", "without outliers"]
    result.card_tables["teacher student"] = markdown_table(columns, rows)
    return nmse


def _language(result: BenchmarkResult, seed: int, bar: tqdm) -> dict[str, dict[str, float]]:
    annealing = Annealing(seed)
    before = annealing.loss(annealing.base)
    bar.update()
    found = {}
    for name in LANGUAGE:
        found[name] = annealing.anneal(METHODS[name])
        result.rows.append(Row(f"{name}, tiny Llama", found[name], ours=name == FULL))
        bar.update()
    loss = {name: metrics["val loss"] for name, metrics in found.items()}
    cut = found[BASE]["oscillating"] / max(found[OSCI]["oscillating"], 1e-12)
    result.bars += [
        *(
            Bar(f"tiny Llama: {name} above bf16, nats", loss[name] - loss["bf16"], 0.03, at_least=False)
            for name in LANGUAGE[1:]
        ),
        Bar("tiny Llama: oscillating weights, base / with OsciReset", cut, 2.5),
        Bar("tiny Llama: OsciReset changes the loss by", abs(loss[OSCI] - loss[BASE]), 0.01, at_least=False),
    ]
    rows = [["before stage 2", f"{before:.4f}", "", ""]]
    for name, metrics in found.items():
        share, ratio = metrics.get("oscillating"), metrics.get("distance ratio")
        watched = ["", ""] if share is None else [f"{100 * share:.1f} %", f"{ratio:.2f}"]
        rows.append([name, f"{loss[name]:.4f}", *watched])
    columns = ["recipe of stage 2", "held-out nats per character", "weights with ρ ≥ 8", "ΣD_q/ΣD_w"]
    result.card_tables["tiny llama"] = markdown_table(columns, rows)
    return found


def draw_concentration(errors: Errors) -> Figure:
    """e(n) of both gradients over the number of draws n, on logarithmic axes."""
    figure = Figure(figsize=(8, 3.4))
    for axis, key in zip(figure.subplots(1, 2, sharey=True), ("dx", "dw"), strict=True):
        for name, error in errors.items():
            axis.loglog(list(error[key]), list(error[key].values()), "o-", markersize=3, label=name)
        axis.set_title({"dx": "input gradient", "dw": "weight gradient"}[key])
        axis.set_xlabel("draws n")
    figure.axes[0].set_ylabel("relative squared error of the mean")
    figure.axes[1].legend(fontsize=7)
    figure.tight_layout()
    return figure


def run_performance(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Measure what emulation, OsciReset and packing cost, on one CPU thread.

    Args:
        seed (`int`, defaults to 0): Seed of the data, without effect on the times.
        device (`str`, defaults to `"cpu"`): The CPU.

    Returns:
        [`BenchmarkResult`]: ratios to FP32 layers, shares of a training step, weights per second, and their bars.
    """
    result = BenchmarkResult("tetrajet_v2", seed, False, repo=REPO, dataset=DATASET)
    with measured(result, device):
        _measure(result, seed)
    return result


def _measure(result: BenchmarkResult, seed: int) -> None:
    ratios: dict[str, list[float]] = {}
    for name in ("nvfp4_rtn", "nvidia_nvfp4", BASE):
        shapes = ((1024, 256, 256, 20), (2048, 1024, 1024, 4))
        ratios[name] = [measure_linear(t, k, n, name, repeats, seed)["ratio"] for t, k, n, repeats in shapes]
        metrics = {"width 256 / FP32": ratios[name][0], "width 1024 / FP32": ratios[name][1]}
        result.rows.append(Row(name, {key: round(value, 2) for key, value in metrics.items()}, ours=name == BASE))
    reset, packing = _reset_shares(seed), measure_packing()
    result.rows.append(Row("OsciReset", reset, ours=True))
    result.rows.append(Row("packing", packing, ours=True))
    result.bars = [
        Bar("base / FP32 layer, width 256", ratios[BASE][0], 3.0, at_least=False),
        Bar("base / FP32 layer, width 1024", ratios[BASE][1], 2.0, at_least=False),
        Bar("OsciReset in a window, share of a step", reset["window_share"], 0.15, at_least=False),
        Bar("OsciReset outside, share of a step", reset["outside_share"], 0.005, at_least=False),
        Bar("weights quantized and packed per second", packing["pack_weights_per_second"], 50e6),
        Bar("weights unpacked per second", packing["unpack_weights_per_second"], 100e6),
    ]
    rows = [[name, *(f"{ratio:.2f}" for ratio in pair)] for name, pair in ratios.items()]
    columns = ["forward + backward over FP32", "T = 1024, width 256", "T = 2048, width 1024"]
    result.card_tables["performance"] = markdown_table(columns, rows)
    result.card_tables["costs"] = markdown_table(
        ["OsciReset step in a window", "outside", "quantize and pack", "unpack"],
        [
            [
                f"{100 * reset['window_share']:.1f} % of a step",
                f"{100 * reset['outside_share']:.2f} %",
                f"{packing['pack_weights_per_second'] / 1e6:.0f} M weights/s",
                f"{packing['unpack_weights_per_second'] / 1e6:.0f} M weights/s",
            ]
        ],
    )


def _reset_shares(seed: int) -> dict[str, float]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = prepare_model(AutoModelForCausalLM.from_config(tiny_llama_config()), FULL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 128, (16, 64), generator=torch.Generator().manual_seed(seed))

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return measure_osci_reset(model, step)


def run_ablations(seed: int = 0, device: str = "cpu") -> BenchmarkResult:
    """Switch one choice of the method at a time on the teacher–student task with outliers.

    Args:
        seed (`int`, defaults to 0): Seed of everything.
        device (`str`, defaults to `"cpu"`): The CPU.

    Returns:
        [`BenchmarkResult`]: error per variant.
    """
    result = BenchmarkResult("tetrajet_v2", seed, False, repo=REPO, dataset=DATASET)
    with measured(result, device):
        for name, fields in tqdm(ABLATIONS.items(), desc="tetrajet_v2 ablations"):
            result.rows.append(Row(name, {"NMSE": teacher_student_error(fields, seed)}, ours=name == FULL))
    rows = [[row.name, f"{row.metrics['NMSE']:.4f}"] for row in result.rows]
    result.card_tables["ablations"] = markdown_table(["variant", "error"], rows)
    return result


__all__ = ["run", "run_ablations", "run_performance"]
