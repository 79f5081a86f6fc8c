"""An endless stream into one cache of fixed size: what stands behind the fourth tab. No gradio in here."""

import functools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from datasets_scripts.recall_tasks import FILLER_OFFSET, IGNORE_INDEX, NUM_FILLERS, VOCAB_SIZE, associative_recall
from hf_models import ArmCache
from hf_pipelines import hub

FEEDS = {
    "change": "facts that change: 8 new facts and questions per 256 tokens",
    "once": "8 facts at the start, then fillers only",
    "text": "the text below, over and over (folders with a tokenizer)",
}
FACTS, CONTEXT = 8, 48
RECALL_PART, TEXT_PART = 256, 32  # tokens of one step
SHOW_EVERY = 0.7  # seconds


@dataclass
class Loaded:
    """A model of a local folder.

    Args:
        model (`PreTrainedModel`): An ARM model.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer, where the folder has one.
        lock (`threading.Lock`): One call at a time: a model notes statistics of its last call.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    lock: Any = field(default_factory=threading.Lock)

    @property
    def is_recall(self) -> bool:
        """Whether the model speaks the 160 tokens of the recall tasks."""
        return self.tokenizer is None and self.model.config.vocab_size == VOCAB_SIZE


def folder_of(path: Any) -> str:
    """The folder that is meant; empty means the shipped recall model.

    Args:
        path (`str`): What somebody typed.

    Returns:
        `str`: a local folder that holds an ARM model.

    Raises:
        ValueError: It is none. Nothing is ever downloaded.
    """
    if not isinstance(path, str):
        raise ValueError(f"The folder must be a path, got {path!r}.")
    text = path.strip()
    if not text:
        return hub.repo("arm-recall")
    try:
        folder = Path(text)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = config.get("model_type") if isinstance(config, dict) else None
        weights = any(folder.glob("model*.safetensors"))
    except (OSError, ValueError):
        kind, weights = None, False
    if not str(kind).startswith("arm_") or not weights:
        raise ValueError(
            f"{text[:200]!r} is not a local folder with an ARM model (config.json of an ARM type and safetensors), "
            "as save_pretrained writes it after convert_to_arm. Nothing is downloaded."
        )
    return str(folder.resolve())


@functools.lru_cache(maxsize=2)
def load(folder: str) -> Loaded:
    """Load a folder that `folder_of` let pass; the last two are kept.

    Raises:
        ValueError: Its files cannot be read.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
        ).eval()
        has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_tokenizer else None
    except Exception as error:  # whatever a damaged file provokes
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"The ARM model of this folder cannot be loaded: {reason}") from error
    return Loaded(model, tokenizer)


@dataclass
class Stream:
    """One visitor's stream: its cache and what was seen so far.

    Args:
        key (`tuple`): Folder, kind of feed and text; another one needs another stream.
        loaded ([`Loaded`]): The model.
        feed (`str`): A key of `FEEDS`.
        ids (`torch.Tensor`, *optional*): Tokens (1, n) of the text that is repeated.
    """

    key: tuple[str, str, str]
    loaded: Loaded
    feed: str
    ids: torch.Tensor | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    questions: tuple[torch.Tensor, torch.Tensor] | None = None
    points: list[tuple[int, int, float | None]] = field(default_factory=list)  # tokens, bytes, share right
    answered: list[tuple[int, int]] = field(default_factory=list)  # right, asked

    def __post_init__(self) -> None:
        self.cache = ArmCache(self.loaded.model.config)

    @property
    def tokens(self) -> int:
        """Tokens seen."""
        return int(self.cache.get_seq_length())

    @property
    def masses(self) -> list[tuple[int, torch.Tensor]]:
        """Layer and mass of its slots (K, M), of the layers with a memory."""
        states = [(index, getattr(layer, "state", None)) for index, layer in enumerate(self.cache.layers)]
        return [(index, state.c[0]) for index, state in states if state is not None]

    @property
    def occupied(self) -> float:
        """Share of the slots that hold something."""
        shares = [float((mass > 0).float().mean()) for _, mass in self.masses]
        return sum(shares) / max(len(shares), 1)

    @property
    def full_bytes_per_token(self) -> int:
        """What a growing cache of this model takes for each token."""
        config = self.loaded.model.config
        size = self.loaded.model.dtype.itemsize
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.arm_head_dim * size

    @torch.no_grad()
    def step(self) -> None:
        """Feed the next piece and note bytes and answers."""
        with self.loaded.lock:
            right = None
            if self.feed == "change":
                ids, labels = associative_recall(1, RECALL_PART - 2 * FACTS, FACTS, generator=self.generator)
                right = self._note_answers(self._run(ids), labels)
            elif self.feed == "once":
                right = self._step_once()
            else:
                start = self.tokens % self.ids.shape[1]
                self._run(self.ids[:, start : start + TEXT_PART])
            self.points.append((self.tokens, self.cache.nbytes(), right))
            if len(self.points) > 2000:
                self.points = self.points[::2]

    def _step_once(self) -> float:
        if self.questions is None:
            ids, labels = associative_recall(1, CONTEXT, FACTS, generator=self.generator)
            self.questions = ids[:, CONTEXT:], labels[:, CONTEXT:]
            self._run(ids[:, :CONTEXT])
        else:
            fillers = torch.randint(NUM_FILLERS, (1, RECALL_PART), generator=self.generator)
            self._run(FILLER_OFFSET + fillers)
        asked, labels = self.questions
        with_questions = self.loaded.model(asked, cache=self.cache.copy()).logits.argmax(-1)
        return self._note_answers(with_questions, labels)

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loaded.model(ids, cache=self.cache).logits.argmax(-1)

    def _note_answers(self, answers: torch.Tensor, labels: torch.Tensor) -> float:
        asked = labels != IGNORE_INDEX
        self.answered.append((int((answers[asked] == labels[asked]).sum()), int(asked.sum())))
        del self.answered[:-2000]
        return self.answered[-1][0] / self.answered[-1][1]


def begin(path: Any, feed: str, text: Any) -> Stream:
    """Open a stream.

    Args:
        path (`str`): Local ARM folder, or empty.
        feed (`str`): A key of `FEEDS`.
        text (`str`): What a model with a tokenizer reads.

    Returns:
        [`Stream`].

    Raises:
        ValueError: No ARM folder, or a feed that does not suit its model.
    """
    folder = folder_of(path)
    loaded = load(folder)
    ids = None
    if loaded.is_recall:
        if feed == "text":
            raise ValueError("The recall model knows 160 tokens and no text: choose one of the feeds of facts.")
        text = ""
    else:
        feed = "text"
        if loaded.tokenizer is None:
            ids = torch.randint(loaded.model.config.vocab_size, (1, 4096), generator=torch.Generator().manual_seed(0))
        else:
            ids = loaded.tokenizer(text, return_tensors="pt").input_ids
            if ids.shape[1] == 0:
                raise ValueError("The text holds no token.")
    return Stream((folder, feed, text), loaded, feed, ids)


def key_of(path: Any, feed: str, text: str) -> tuple[str, str, str]:
    """The key that `begin` would give a stream."""
    folder = folder_of(path)
    return (folder, feed, "") if load(folder).is_recall else (folder, "text", text)


def run(stream: Stream, seconds: float) -> Iterator[None]:
    """Feed for some seconds, pausing often enough to look.

    Args:
        stream ([`Stream`]): Changed in place.
        seconds (`float`): Wall-clock time after which no further piece is begun.

    Yields:
        `None`, about twice a second and at the end.
    """
    start = shown = time.monotonic()
    while time.monotonic() - start < seconds:
        stream.step()
        if time.monotonic() - shown > SHOW_EVERY:
            shown = time.monotonic()
            yield
    yield


def draw(stream: Stream) -> Figure:
    """Bytes over tokens seen, beside what a growing cache would take; and the share of right answers."""
    asks = stream.feed != "text"
    figure = Figure(figsize=(10.5 if asks else 6.5, 3.9), dpi=100, layout="constrained")
    panels = figure.subplots(1, 2 if asks else 1, squeeze=False)[0]
    tokens, sizes, right = zip(*stream.points, strict=True)
    panels[0].plot([0, tokens[-1]], [0, tokens[-1] * stream.full_bytes_per_token / 1e6], "--", color="#7f7f7f")
    panels[0].plot(tokens, [size / 1e6 for size in sizes], color="#4338ca", linewidth=2.4)
    panels[0].legend(["full attention would hold (computed)", "ARM holds (measured)"], frameon=False, loc="upper left")
    panels[0].set(xlabel="tokens seen", ylabel="cache, MB", xlim=(0, None), ylim=(0, None))
    if asks:
        window = 16
        means = [sum(right[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(right))]
        panels[1].plot(tokens, means, color="#4338ca", linewidth=2)
        panels[1].axhline(1 / 8, color="black", linestyle=":", linewidth=0.8, label="chance, 1/8")
        panels[1].set(xlabel="tokens seen", ylabel="right answers, last 128 questions", xlim=(0, None), ylim=(0, 1.02))
        panels[1].legend(frameon=False, loc="lower left")
    for axes in panels:
        axes.grid(alpha=0.25)
    return figure


def occupancy(stream: Stream) -> str:
    """Mass of every slot as an HTML picture: a row per layer and kv head, a column per slot."""
    rows = []
    for index, masses in stream.masses:
        rows += [(f"layer {index + 1}, head {head + 1}", mass.tolist()) for head, mass in enumerate(masses)]
    hidden, rows = max(0, len(rows) - 24), rows[:24]
    if not rows:
        return ""
    side = max(3, min(26, 700 // len(rows[0][1])))
    width, height = 130 + side * len(rows[0][1]), 22 * len(rows)
    parts = [f'<svg width="{width}" height="{height}" role="img" aria-label="Slot occupancy">']
    for y, (label, masses) in enumerate(rows):
        parts.append(f'<text x="0" y="{22 * y + 15}" font-size="12" fill="currentColor">{label}</text>')
        for x, mass in enumerate(masses):
            place = f'x="{130 + side * x}" y="{22 * y + 2}" width="{side - 1}" height="18"'
            parts.append(
                f'<rect {place} fill="#4338ca" fill-opacity="{mass:.2f}" stroke="#a1a1aa" stroke-width="0.5">'
                f"<title>slot {x}: mass {mass:.3f}</title></rect>"
            )
    more = f"<p>and {hidden} more rows</p>" if hidden else ""
    return "".join(parts) + "</svg>" + more
