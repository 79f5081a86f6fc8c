"""Sets of digits and their scores: what stands behind the first tab. Nothing here knows of gradio."""

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.cluster import KMeans

from datasets_scripts import load_digit_tensors
from hf_models import ImageFeatureEncoder
from hf_models.flow_diversity.train_flow_diversity import parse_args, train_digit_encoder
from hf_pipelines import FlowDiversityController, FlowDiversityPipeline, attach_controller, hub
from hf_pipelines.flow_control.controller_flow import FlowControl, FlowController, FlowState, fork_generator
from hf_pipelines.flow_control.metrics import precision_recall_density_coverage, vendi_score
from hf_pipelines.flow_diversity.baselines_flow_diversity import DPPGuidance, ParticleGuidance, SDENoise
from hf_pipelines.flow_diversity.controller_flow_diversity import log_volume, prepare_features

ANY = "any"
CLASSES = {**{str(digit): f"Digit {digit}" for digit in range(10)}, ANY: "Any digit (unconditional)"}
NUM_CLUSTERS = 8
SWEEP_SETS = 8  # sets per point of the sweep


@dataclass
class DigitSet:
    """Images (m, 1, 8, 8) of one run, what was logged at its steps, and the seconds it took.

    Args:
        images (`torch.Tensor` of shape `(m, 1, 8, 8)`): In [−1, 1], not clamped.
        sigmas (`list[float]`): Noise level of every step.
        volumes (`list[float]`): Log-volume of the predicted images at every step, in the guide's features.
        acted (`bool`): Whether the controller changed anything.
        seconds (`float`): Wall-clock time.
    """

    images: torch.Tensor
    sigmas: list[float]
    volumes: list[float]
    acted: bool
    seconds: float


@dataclass
class Scores:
    """Scores of one set.

    Args:
        vendi_judge (`float`): Vendi score in the features of the independent classifier.
        vendi_guide (`float`): Vendi score in the features that guide; flattering for the controlled set.
        vendi_pixels (`float`): Vendi score of the pixels.
        reached (`int`): Clusters of real images of the class that the set falls into; classes where there is none.
        precision (`float`): Share of the images within the manifold of real ones.
        groups (`list[int]`): Cluster, or class, of each image.
    """

    vendi_judge: float
    vendi_guide: float
    vendi_pixels: float
    reached: int
    precision: float
    groups: list[int]


@functools.cache
def pipeline() -> FlowDiversityPipeline:
    """The shipped pipeline, loaded once."""
    pipe = FlowDiversityPipeline.from_pretrained(hub.repo("flow-diversity-digits-8x8"))
    pipe.set_progress_bar_config(disable=True)
    pipe.base.set_progress_bar_config(disable=True)
    pipe.base.model.requires_grad_(False)
    pipe.feature_encoder.requires_grad_(False)
    return pipe


@functools.cache
def judge() -> ImageFeatureEncoder:
    """A classifier of other architecture and seed than the guide, trained here in seconds: it scores, never guides."""
    options = "--output_dir unused --seed 1 --convolutional --num_epochs 20"
    with torch.random.fork_rng():
        encoder, _ = train_digit_encoder(parse_args(options.split()))
    return encoder.requires_grad_(False)


@functools.cache
def real_features(label: str) -> torch.Tensor:
    """Judge's features (n, 32) of the training images of a class, or of all."""
    images, labels = load_digit_tensors(8, "train")
    return judge()(images if label == ANY else images[labels == int(label)])


@functools.cache
def clusters(label: str) -> KMeans:
    """Eight clusters of the real images of a class."""
    return KMeans(NUM_CLUSTERS, n_init=4, random_state=0).fit(real_features(label).numpy())


class _VolumeRecorder(FlowController):
    """Hands every step on to another controller and notes the log-volume of the predicted images."""

    def __init__(self, inner: FlowDiversityController | None, group_size: int, tau: float):
        super().__init__()
        self.inner, self.group_size, self.tau = inner, group_size, tau

    @property
    def requires_decode(self) -> bool:
        return True

    def reset(self, num_steps: int, batch: int, device: torch.device) -> None:
        super().reset(num_steps, batch, device)
        if self.inner is not None:
            self.inner.generator = self.generator
            self.inner.reset(num_steps, batch, device)

    def control(self, state: FlowState) -> FlowControl:
        with torch.no_grad():
            features = pipeline().feature_encoder(state.decode(state.endpoint)).double()
        volumes = [float(log_volume(prepare_features(rows), self.tau)) for rows in features.split(self.group_size)]
        self.log.append({"sigma": state.sigma, "log_volume": sum(volumes) / len(volumes)})
        return FlowControl(state.v, state.x) if self.inner is None else self.inner.control(state)


def sample(
    controller: FlowDiversityController | None,
    label: str,
    num_images: int,
    steps: int,
    guidance: float,
    seed: int,
    tau: float = 10.0,
    num_sets: int = 1,
) -> DigitSet:
    """Sample sets of digits under a controller.

    Args:
        controller ([`FlowDiversityController`], *optional*): `None` is the plain pipeline, bit for bit.
        label (`str`): A key of `CLASSES`.
        num_images (`int`): m, images of one set.
        steps (`int`): Sampling steps.
        guidance (`float`): Weight of classifier-free guidance; without meaning for `ANY`.
        seed (`int`): Seed of the starting noise.
        tau (`float`, defaults to 10.0): τ of the log-volume that is noted.
        num_sets (`int`, defaults to 1): Sets, sampled in one batch and controlled on their own.

    Returns:
        [`DigitSet`]: images of all sets, one set after the other, and the log.
    """
    base = pipeline().base
    generator = torch.Generator().manual_seed(seed)
    total = num_images * num_sets
    condition: dict[str, Any] = {}
    if label != ANY:
        condition = {"class_labels": [int(label)] * total, "guidance_scale": guidance}
    recorder = _VolumeRecorder(controller, num_images, tau)
    start = time.perf_counter()
    with attach_controller(base, recorder, generator=fork_generator(generator)):
        images = base(
            num_images=total,
            num_inference_steps=steps,
            generator=generator,
            output_type="latent",
            **condition,
        ).images
    seconds = time.perf_counter() - start
    log = [] if controller is None else controller.log
    acted = any(entry["gamma"] != 0 or entry["beta"] > 0 for entry in log)
    return DigitSet(
        images,
        [entry["sigma"] for entry in recorder.log],
        [entry["log_volume"] for entry in recorder.log],
        acted,
        seconds,
    )


def spread_controller(num_images: int, **settings) -> FlowDiversityController | None:
    """The method under `settings` of its controller; `None` where there is nothing to spread or to add."""
    if num_images < 2 or (settings["gamma0"] == 0 and settings["beta0"] == 0):
        return None
    return FlowDiversityController(pipeline().feature_encoder, group_size=num_images, chunk=num_images, **settings)


@torch.no_grad()
def score(images: torch.Tensor, label: str) -> Scores:
    """Score one set of images (m, 1, 8, 8) of a class, clamped as they are shown."""
    images = images.clamp(-1, 1)
    features, logits = judge().vision_tower(images)
    groups = group(features, logits, label)
    return Scores(
        vendi_judge=vendi_score(features),
        vendi_guide=vendi_score(pipeline().feature_encoder(images)),
        vendi_pixels=vendi_score(images),
        reached=len(set(groups)),
        precision=precision(features, label),
        groups=groups,
    )


def group(features: torch.Tensor, logits: torch.Tensor, label: str) -> list[int]:
    """Cluster of real images of the class that each image belongs to; its class where there is no class."""
    if label == ANY:
        return logits.argmax(1).tolist()
    return clusters(label).predict(features.numpy()).tolist()


def precision(features: torch.Tensor, label: str) -> float:
    """Share of the judge's features (m, 32) within the 5-nearest-neighbour manifold of real images."""
    # the metric asks for more than 5 rows; a mean over repeated rows is the same
    repeated = features.repeat(-(-6 // len(features)), 1)
    return precision_recall_density_coverage(repeated, real_features(label))["precision"]


@dataclass(frozen=True)
class Method:
    """A way to spread a set, for the sweep.

    Args:
        label (`str`): What people read.
        colour (`str`): Of its curve.
        symbol (`str`): Of its strength.
        strengths (`tuple[float, ...]`): Strengths of its points.
    """

    label: str
    colour: str
    symbol: str
    strengths: tuple[float, ...]


METHODS = {
    "plain": Method("Plain sampling", "#555555", "", (0.0,)),
    "sde": Method("SDE noise", "#2ca02c", "β", (0.1, 0.3, 1.0)),
    "particle": Method("Particle Guidance", "#ff7f0e", "γ", (1.0, 2.0, 4.0)),
    "dpp": Method("DPP (DiverseFlow)", "#d62728", "γ", (1.0, 2.0, 4.0)),
    "ours": Method("This method", "#4338ca", "γ₀", (2.0, 4.0, 6.0, 8.0, 12.0)),
}


@dataclass
class SweepPoint:
    """Mean scores of `SWEEP_SETS` sets under one method at one strength."""

    method: str
    strength: float
    vendi: float
    reached: float
    precision: float


def sweep_runs() -> list[tuple[str, float]]:
    """(method, strength) of every point of the sweep."""
    return [(name, strength) for name, method in METHODS.items() for strength in method.strengths]


def sweep_point(
    name: str, strength: float, label: str, num_images: int, steps: int, guidance: float, seed: int, settings: dict
) -> SweepPoint:
    """Sample `SWEEP_SETS` sets under one method and score them with the judge.

    Args:
        name (`str`): A key of `METHODS`.
        strength (`float`): Its strength.
        label (`str`): A key of `CLASSES`.
        num_images (`int`): m, at least 2.
        steps (`int`): Sampling steps.
        guidance (`float`): Weight of classifier-free guidance.
        seed (`int`): Seed of the starting noise, the same for all methods.
        settings (`dict`): Settings of our controller, whose `gamma0` is replaced by `strength`.

    Returns:
        [`SweepPoint`]: the means.
    """
    shared = {"group_size": num_images, "chunk": num_images * SWEEP_SETS}
    encoder = pipeline().feature_encoder
    controller = {
        "plain": lambda: None,
        "sde": lambda: SDENoise(beta=strength, **shared),
        "particle": lambda: ParticleGuidance(encoder, gamma=strength, **shared),
        "dpp": lambda: DPPGuidance(encoder, gamma=strength, **shared),
        "ours": lambda: FlowDiversityController(encoder, **{**settings, "gamma0": strength}, **shared),
    }[name]()
    images = sample(controller, label, num_images, steps, guidance, seed, num_sets=SWEEP_SETS).images.clamp(-1, 1)
    with torch.no_grad():
        features, logits = judge().vision_tower(images)
    parts = list(zip(features.split(num_images), logits.split(num_images), strict=True))
    vendi = sum(vendi_score(rows) for rows, _ in parts) / SWEEP_SETS
    reached = sum(len(set(group(*part, label))) for part in parts) / SWEEP_SETS
    return SweepPoint(name, strength, vendi, reached, precision(features, label))
