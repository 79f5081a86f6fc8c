"""Data of the NVFP4 training experiments: token blocks for language models, two offline texts, a regression stream.

>>> from datasets_scripts.tetrajet_corpora import load_corpus, markov_corpus
>>> len(markov_corpus(1000))
1000
>>> rows = load_corpus("markov", block_size=64)  # doctest: +SKIP
"""

import importlib
import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from . import text_blocks

logger = logging.getLogger(__name__)

EMBEDDED = ("pydoc", "markov")
SPLITS = ("train", "test", "all")
TRAIN_SHARE = 0.9  # by position; the rest is held out
_NPY_MAGIC = b"\x93NUMPY"
# ── embedded texts ──────────────────────────────────────────────────────────────────────────────────────────────────


def pydoc_corpus() -> str:
    """The reference texts of Python's `help()`, joined by newlines in the order of their names (PSF licence).

    About 465,000 characters, of which 103 are distinct, in CPython 3.11; other versions differ, so compare figures
    only on one machine.

    Returns:
        `str`: the text.

    Raises:
        ValueError: This Python was stripped of `pydoc_data`.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise ValueError("this Python has no `pydoc_data.topics`; use `markov_corpus()` or 'markov'.") from None
    return "\n".join(topics[name] for name in sorted(topics))


def markov_corpus(n_chars: int = 1_000_000, seed: int = 0) -> str:
    """A synthetic text: a walk over 512 random words, each with eight possible successors.

    Letters a to z are drawn with probability ∝ 1/(rank + 1), so are the successors of a word. A space follows each
    word, or with probability 0.08 a full stop and a newline.

    Args:
        n_chars (`int`, defaults to 1,000,000): Length in characters.
        seed (`int`, defaults to 0): Seed of words, successors and walk.

    Returns:
        `str`: exactly `n_chars` characters; a shorter text is the beginning of a longer one.

    Raises:
        ValueError: `n_chars` is no positive integer.
    """
    text_blocks._check_positive("n_chars", n_chars, 1)
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, int(rng.integers(2, 8)), p=_falling(26))) for _ in range(512)]
    successors = np.stack([rng.choice(512, 8, replace=False) for _ in words])
    cumulative = _falling(8).cumsum()
    pieces, length, word = [], 0, 0
    while length < n_chars:
        ranks = np.minimum(cumulative.searchsorted(rng.random(4096), side="right"), 7)
        for rank, stops in zip(ranks.tolist(), (rng.random(4096) < 0.08).tolist(), strict=True):
            pieces.append(words[word] + (".\n" if stops else " "))
            length += len(pieces[-1])
            word = int(successors[word, rank])
    return "".join(pieces)[:n_chars]


def _falling(count: int) -> np.ndarray:
    """Probabilities ∝ 1/(rank + 1)."""
    weights = 1 / np.arange(1, count + 1)
    return weights / weights.sum()


def split_text(text: str, split: str) -> str:
    """The first nine tenths (`"train"`), the last tenth (`"test"`) or all of a text.

    Args:
        text (`str`): The text.
        split (`str`): `"train"`, `"test"` or `"all"`.

    Returns:
        `str`: the part.

    Raises:
        ValueError: There is no such split.
    """
    return text[_part(len(text), split)]


def _part(size: int, split: str) -> slice:
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {SPLITS}, got {split!r}.")
    border = int(TRAIN_SHARE * size)
    return {"train": slice(0, border), "test": slice(border, size), "all": slice(0, size)}[split]


def _embedded_text(name: str) -> str:
    if name == "pydoc":
        try:
            return pydoc_corpus()
        except ValueError as error:
            logger.warning("%s Using 'markov' instead of 'pydoc'.", error)
    return markov_corpus()


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def character_tokenizer(text: str, size: int = 128) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the most frequent characters of a text.

    Args:
        text (`str`): The text.
        size (`int`, defaults to 128): Tokens at most: `<eos>` (0), `<unk>` (1) and `size - 2` characters.

    Returns:
        `PreTrainedTokenizerFast`: characters in the order of their code points.

    Raises:
        ValueError: `size` is below 3, or the text is empty.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    text_blocks._check_positive("size", size, 3)
    if not text:
        raise ValueError("`text` must not be empty.")
    counts = Counter(text)
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[: size - 2]
    tokens = ["<eos>", "<unk>", *sorted(frequent)]
    model = models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def corpus_tokenizer(path_or_name: str | Path, size: int = 128) -> PreTrainedTokenizerFast:
    """The character tokenizer of all splits of a corpus.

    Args:
        path_or_name (`str`): As for [`load_corpus`], but not a folder of tokens.
        size (`int`, defaults to 128): As for [`character_tokenizer`].

    Returns:
        `PreTrainedTokenizerFast`.
    """
    if path_or_name in EMBEDDED:
        return character_tokenizer(_embedded_text(str(path_or_name)), size)
    documents = text_blocks.load_text_documents(path_or_name, split="all")
    return character_tokenizer("".join(row["text"] for row in documents), size)


def load_corpus(
    path_or_name: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    block_size: int = 64,
    split: str = "train",
    seed: int = 0,
    shuffle: bool | None = None,
) -> "datasets.Dataset | TokenBlocks":
    """Blocks of equal length for a causal language model; what does not fill a block is dropped.

    - `"pydoc"` and `"markov"` are the embedded texts; the last tenth is the split `"test"`. A Python without
      `pydoc_data` takes `"markov"` instead, with a warning.
    - A file or folder of .txt, .jsonl or .parquet, or a Hub id: see [`load_text_documents`].
    - A folder of .npy files is tokens: uint32 memory maps without a header, as OLMo's training mix has them (or
      arrays that `numpy.save` wrote). They are mapped, never read whole. No block crosses a file; the last tenth of
      all blocks is `"test"`.

    Args:
        path_or_name (`str`): Folder, file, Hub id, `"pydoc"` or `"markov"`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For text; by default the corpus' own characters.
        block_size (`int`, defaults to 64): Tokens a block, at least 2.
        split (`str`, defaults to `"train"`): `"train"`, `"test"` or `"all"`, or what the source has.
        seed (`int`, defaults to 0): Seed of the order.
        shuffle (`bool`, *optional*): Whether to shuffle the blocks; by default those of `"train"`.

    Returns:
        `datasets.Dataset` or [`TokenBlocks`]: rows of `input_ids` and equal `labels`, both int64 tensors.

    Raises:
        ValueError: There is no such source or split, a file has another layout, or nothing fills a block.
    """
    text_blocks._check_positive("block_size", block_size, 2)
    shuffle = split == "train" if shuffle is None else shuffle
    folder = Path(path_or_name).expanduser()
    if folder.is_dir() and any(folder.glob("*.npy")):
        return TokenBlocks(folder, block_size, split, seed if shuffle else None)
    tokenizer = tokenizer or corpus_tokenizer(path_or_name)
    if path_or_name in EMBEDDED:
        text = split_text(_embedded_text(str(path_or_name)), split)
        rows = _text_rows(text, tokenizer, block_size)
    else:
        documents = text_blocks.load_text_documents(path_or_name, split=split)
        rows = text_blocks.blocks(documents, tokenizer, block_size)
    return (rows.shuffle(seed=seed) if shuffle else rows).with_format("torch")


def _text_rows(text: str, tokenizer: PreTrainedTokenizerBase, block_size: int) -> datasets.Dataset:
    tokens = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
    if len(tokens) < block_size:
        raise ValueError(f"the text has {len(tokens)} tokens; `block_size` {block_size} is more than that.")
    rows = tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size)
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


class TokenBlocks(torch.utils.data.Dataset):
    """Blocks of a folder of memory-mapped token files; a block is read when it is asked for.

    Args:
        folder (`Path`): Folder with .npy files.
        block_size (`int`): Tokens a block.
        split (`str`, defaults to `"all"`): `"train"`, `"test"` (the last tenth of the blocks) or `"all"`.
        seed (`int`, *optional*): Seed of the order; without it the files' own.

    Raises:
        ValueError: A file's layout is wrong, there is no such split, or nothing fills a block.
    """

    def __init__(self, folder: str | Path, block_size: int, split: str = "all", seed: int | None = None) -> None:
        files = sorted(Path(folder).glob("*.npy"))
        self.block_size = block_size
        self._maps = [_token_map(file) for file in files]
        self._ends = np.cumsum([len(tokens) // block_size for tokens in self._maps])
        total = int(self._ends[-1]) if files else 0
        blocks = np.arange(total)[_part(total, split)]
        if not len(blocks):
            raise ValueError(f"no block of {block_size} tokens for the split {split!r} in {str(folder)!r}.")
        self._order = blocks if seed is None else np.random.default_rng(seed).permutation(blocks)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Block `index` as `input_ids` and `labels`."""
        block = int(self._order[index])
        file = int(np.searchsorted(self._ends, block, side="right"))
        first = (block - (int(self._ends[file - 1]) if file else 0)) * self.block_size
        tokens = torch.from_numpy(self._maps[file][first : first + self.block_size].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens.clone()}


def _token_map(file: Path) -> np.ndarray:
    with file.open("rb") as stream:
        has_header = stream.read(len(_NPY_MAGIC)) == _NPY_MAGIC
    if has_header:
        # not `np.load`: `datasets` replaces it in every data set's module by one that streams and maps nothing
        tokens = np.lib.format.open_memmap(file, mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise ValueError(f"{file} must hold one row of integers, it holds {tokens.dtype} {tokens.shape}.")
        return tokens
    size = file.stat().st_size
    if size == 0 or size % 4:
        raise ValueError(f"{file} is no uint32 memory map: its {size} bytes are no positive multiple of 4.")
    return np.memmap(file, dtype="<u4", mode="r")


# ── teacher and student ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class TeacherStudent:
    """An endless stream of batches `(x, y)`, x ~ N(0, 1)·scale, y = B·silu(A·x) + 0.1·noise.

    Args:
        scale (`torch.Tensor`): `(d,)`, 20 on the outlier inputs and 1 elsewhere.
        teacher (`tuple[torch.Tensor, torch.Tensor]`): A `(h, d)` and B `(d, h)`.
        student (`tuple[torch.Tensor, torch.Tensor]`): Initial weights of the same law, drawn independently.
        batch_size (`int`): Points a batch.
        seed (`int`): Seed of everything.
    """

    scale: torch.Tensor
    teacher: tuple[torch.Tensor, torch.Tensor]
    student: tuple[torch.Tensor, torch.Tensor]
    batch_size: int
    seed: int

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch of a step: it depends on the seed and the step alone.

        Args:
            step (`int`): Number of the step, from 0.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: x and noisy y, `(batch_size, d)` each.
        """
        generator = _generator(self.seed, 1, step)
        x = torch.randn(self.batch_size, len(self.scale), generator=generator) * self.scale
        return x, self._answer(x) + 0.1 * torch.randn(x.shape, generator=generator)

    def clean(self, num_points: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
        """Points without noise on which to evaluate, in no batch.

        Args:
            num_points (`int`, defaults to 4096): How many.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: x and y.
        """
        x = torch.randn(num_points, len(self.scale), generator=_generator(self.seed, 2)) * self.scale
        return x, self._answer(x)

    def _answer(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.teacher
        return torch.nn.functional.silu(x @ a.t()) @ b.t()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        step = 0
        while True:
            yield self.batch(step)
            step += 1


def _generator(*key: int) -> torch.Generator:
    word = np.random.SeedSequence([part % 2**64 for part in key]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(word >> np.uint64(1)))


def teacher_student(seed: int, d: int = 128, h: int = 256, T: int = 256, outliers: bool = True) -> TeacherStudent:
    """A two-layer regression whose inputs have outlier channels.

    Args:
        seed (`int`): Seed of teacher, student and points.
        d (`int`, defaults to 128): Inputs and outputs.
        h (`int`, defaults to 256): Hidden units.
        T (`int`, defaults to 256): Points a batch.
        outliers (`bool`, defaults to `True`): Whether d/16 random inputs are 20 times larger (8 of 128).

    Returns:
        [`TeacherStudent`]: iterate over it, or ask it for the batch of a step.

    Raises:
        ValueError: A size is no positive integer.
    """
    for name, value in (("d", d), ("h", h), ("T", T)):
        text_blocks._check_positive(name, value, 1)
    generator = _generator(seed, 0)
    scale = torch.ones(d)
    chosen = torch.randperm(d, generator=generator)[: d // 16]
    if outliers:
        scale[chosen] = 20

    def weights() -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(h, d, generator=generator) / math.sqrt(d) / scale
        return a, torch.randn(d, h, generator=generator) / math.sqrt(h)

    return TeacherStudent(scale, weights(), weights(), T, seed)
