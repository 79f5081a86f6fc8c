"""The three small experiments that compare recipes of NVFP4 training.

gradient_concentration   whether the mean of many noisy gradients goes to the straight-through gradient
teacher_student_error    a regression whose inputs have outlier channels
Annealing                a tiny Llama: pre-trained in high precision, then annealed with each recipe
"""

import copy
import math
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from datasets_scripts.tetrajet_corpora import corpus_tokenizer, load_corpus, teacher_student
from hf_models.tetrajet_v2.configuration_tetrajet_v2 import TetraJetConfig
from hf_models.tetrajet_v2.linear import TetraJetLinear
from hf_models.tetrajet_v2.monitor import OscillationWindow, gradient_bias, oscillation_report
from hf_models.tetrajet_v2.osci_reset import OsciReset
from hf_models.tetrajet_v2.out_control import OutControl
from hf_models.tetrajet_v2.quantizer_tetrajet_v2 import prepare_model
from hf_models.tetrajet_v2.train_tetrajet_v2 import tiny_llama_config

Fields = dict[str, Any]

METHODS: dict[str, Fields] = {
    "bf16": {"recipe": "bf16"},
    "nvfp4_rtn": {"recipe": "nvfp4_rtn"},
    "nvidia_nvfp4": {"recipe": "nvidia_nvfp4"},
    "fp4_all_the_way": {"recipe": "fp4_all_the_way"},
    "tetrajet_v2_base": {"recipe": "tetrajet_v2_base"},
    "base + strict_unbiased": {"recipe": "tetrajet_v2_base", "strict_unbiased": True},
    "base + OsciReset": {"recipe": "tetrajet_v2_base", "osci_reset": {"enabled": True}},
    "base + OutControl": {"recipe": "tetrajet_v2_base", "out_control": {"enabled": True}},
    "tetrajet_v2": {"recipe": "tetrajet_v2"},
}


def make_config(fields: Fields, seed: int, out_control: Fields, osci_reset: Fields) -> TetraJetConfig:
    """A recipe with the schedule of an experiment; what `fields` say goes before.

    Args:
        fields (`dict`): Arguments of `TetraJetConfig`.
        seed (`int`): Seed of the noise.
        out_control (`dict`): Steps of OutControl's recording.
        osci_reset (`dict`): Windows of OsciReset.

    Returns:
        `TetraJetConfig`.
    """
    nested = {
        "out_control": out_control | fields.get("out_control", {}),
        "osci_reset": osci_reset | fields.get("osci_reset", {}),
    }
    return TetraJetConfig(**{"seed": seed, **fields, **nested})


# ── A: concentration of the gradient ────────────────────────────────────────────────────────────────────────────────


def gradient_concentration(
    fields: Fields, marks: list[int], seed: int = 0, noise_seeds: int = 1
) -> dict[str, dict[int, float]]:
    """e(n) of a layer with outlier inputs and gradients of very different size (T = 256, K = N = 128).

    Args:
        fields (`dict`): Arguments of `TetraJetConfig`.
        marks (`list[int]`): Numbers of draws n at which to report.
        seed (`int`, defaults to 0): Seed of the data and of the first noise.
        noise_seeds (`int`, defaults to 1): Noise seeds to average over.

    Returns:
        `dict`: `"dx"` and `"dw"`, each n → e(n).
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 128, generator=generator)
    x[:, 5] *= 20
    x[:, 77] *= 8
    linear = nn.Linear(128, 128, bias=False)
    linear.weight.data = 0.05 * torch.randn(128, 128, generator=generator)
    dy = torch.randn(256, 128, generator=generator) * torch.randn(256, 1, generator=generator).exp() * 1e-3
    mean = {key: dict.fromkeys(marks, 0.0) for key in ("dx", "dw")}
    for noise in range(noise_seeds):
        layer = TetraJetLinear.from_linear(linear, TetraJetConfig(**fields, seed=1000 * seed + noise))
        errors = gradient_bias(layer, x, dy, marks)
        for key, values in mean.items():
            for n in marks:
                values[n] += errors[key][n] / noise_seeds
    return mean


# ── B: teacher and student ──────────────────────────────────────────────────────────────────────────────────────────


def teacher_student_error(fields: Fields, seed: int = 0, outliers: bool = True, steps: int = 1000) -> float:
    """Normalized mean squared error of a student trained with a recipe, quantized forward pass, 4,096 clean points.

    Args:
        fields (`dict`): Arguments of `TetraJetConfig`.
        seed (`int`, defaults to 0): Seed of teacher, student, data and noise.
        outliers (`bool`, defaults to `True`): Whether 8 of 128 inputs are 20 times larger.
        steps (`int`, defaults to 1000): Steps of AdamW, 256 points each.

    Returns:
        `float`: mean (ŷ − y)² / mean y².
    """
    stream = teacher_student(seed, outliers=outliers)
    hidden, width = stream.student[0].shape
    model = nn.Sequential(nn.Linear(width, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, width, bias=False))
    model[0].weight.data, model[2].weight.data = (weight.clone() for weight in stream.student)
    record = {"record_start": min(20, steps // 10), "record_steps": 10}
    osci = {"start": int(0.6 * steps), "period": 40, "window": 20, "threshold": 8.0}
    config = make_config(fields, seed, record, osci)
    train(model, config, steps, 2e-3, 20, 0.02, lambda i: _regression_loss(model, *stream.batch(i)), weight_decay=0.0)
    x, y = stream.clean()
    with torch.no_grad():
        return float((model(x) - y).square().mean() / y.square().mean())


def _regression_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def train(
    model: nn.Module,
    config: TetraJetConfig,
    steps: int,
    learning_rate: float,
    warmup: int,
    final_share: float,
    loss_of_step: Any,
    weight_decay: float,
    clip: float | None = None,
    watch: int = 0,
) -> dict[str, Any] | None:
    """Convert a model and train it with AdamW (0.9, 0.95): linear warm-up, then a cosine.

    Args:
        model (`nn.Module`): The model, converted in place.
        config (`TetraJetConfig`): The recipe.
        steps (`int`): Optimizer steps.
        learning_rate (`float`): Peak learning rate.
        warmup (`int`): Steps of warm-up.
        final_share (`float`): Learning rate at the end over the peak; 1 keeps it constant.
        loss_of_step (`Callable`): Step number → loss.
        weight_decay (`float`): Of AdamW.
        clip (`float`, *optional*): Largest norm of the gradient.
        watch (`int`, defaults to 0): Last steps over which to measure oscillation.

    Returns:
        `dict` or `None`: what `oscillation_report` says, if asked for.
    """
    prepare_model(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay)

    def share(i: int) -> float:
        progress = max(0, i - warmup) / max(1, steps - warmup)
        return min(1.0, (i + 1) / warmup) * (
            final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * progress))
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    control, reset = OutControl(model, config), OsciReset(model, config, steps)
    window = None
    model.train()
    for i in range(steps):
        control.begin(i)
        optimizer.zero_grad()
        loss_of_step(i).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        control.step(i)
        reset.step(i)
        if window is not None:
            window.update()
        elif watch and config.is_on("Q2") and i == steps - watch - 1:
            window = OscillationWindow(model)
    model.eval()
    return None if window is None else oscillation_report(model, window)


# ── C: tiny Llama ───────────────────────────────────────────────────────────────────────────────────────────────────


class Annealing:
    """A tiny Llama on characters: stage 1 in high precision, stage 2 with a recipe, all recipes on the same batches.

    Args:
        seed (`int`, defaults to 0): Seed of weights, batches and noise.
        corpus (`str`, defaults to `"pydoc"`): As for `load_corpus`.
        pretrain_steps (`int`, defaults to 500): Steps of stage 1.
        steps (`int`, defaults to 200): Steps of stage 2.
        eval_windows (`int`, defaults to 512): Windows of the held-out tenth that are evaluated.
    """

    def __init__(
        self,
        seed: int = 0,
        corpus: str = "pydoc",
        pretrain_steps: int = 500,
        steps: int = 200,
        eval_windows: int = 512,
    ) -> None:
        self.seed, self.pretrain_steps, self.steps = seed, pretrain_steps, steps
        tokenizer = corpus_tokenizer(corpus)
        rows = load_corpus(corpus, tokenizer, 64, "train", shuffle=False)
        self.tokens = rows["input_ids"][:].reshape(-1)
        self.held_out = load_corpus(corpus, tokenizer, 64, "test")["input_ids"][:eval_windows]
        self.base = self._pretrain()

    def batch(self, stage: int, step: int) -> torch.Tensor:
        """Sixteen random windows of 64 characters, by seed, stage and step alone."""
        generator = torch.Generator().manual_seed((self.seed * 2 + stage) * 1_000_003 + step)
        starts = torch.randint(0, len(self.tokens) - 63, (16, 1), generator=generator)
        return self.tokens[starts + torch.arange(64)]

    def _pretrain(self) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = AutoModelForCausalLM.from_config(tiny_llama_config())
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        for i in range(self.pretrain_steps):
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (i + 1) / 20)
            ids = self.batch(0, i)
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return model.eval()

    @torch.no_grad()
    def loss(self, model: PreTrainedModel) -> float:
        """Held-out loss in nats per character, with the model's own forward pass."""
        return float(model(self.held_out, labels=self.held_out).loss)

    def anneal(self, fields: Fields) -> dict[str, float]:
        """Stage 2 with a recipe.

        Args:
            fields (`dict`): Arguments of `TetraJetConfig`.

        Returns:
            `dict[str, float]`: `val loss`; and over the last 20 steps `oscillating` (share of weights with ρ ≥ 8) and
            `distance ratio` (ΣD_q/ΣD_w), where weights are quantized.
        """
        model = copy.deepcopy(self.base)
        record = {"record_start": 0, "record_steps": 10}
        osci = {"start": int(0.4 * self.steps), "period": 20, "window": 10, "threshold": 8.0}
        config = make_config(fields, self.seed, record, osci)

        def loss(i: int) -> torch.Tensor:
            ids = self.batch(1, i)
            return model(ids, labels=ids).loss

        report = train(model, config, self.steps, 1.5e-3, 5, 0.05, loss, weight_decay=0.1, clip=1.0, watch=20)
        metrics = {"val loss": self.loss(model)}
        if report is not None:
            metrics |= {"oscillating": report["share"], "distance ratio": report["distance_ratio"]}
        return metrics
