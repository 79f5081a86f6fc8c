"""Synthetic recall tasks: what a memory of fixed size must keep (arXiv 2609.24417 and multi-query recall, 2312.04927).

All tasks share one vocabulary of 160 tokens, so that one small model serves them all:

    0 … 127    SET(k, v) = 8 k + v, "key k now has value v"; the copy task's symbols are the first of these
    128 … 143  GET(k), "what is the value of key k?"; in `multi_query_recall` the key itself
    144 … 151  VAL(v), the answer
    152 … 159  fillers; the first is the copy task's separator

`labels[t]` is the token that the logits at column `t` must predict, and −100 where nothing is asked. A model that
shifts labels itself, as every causal language model of transformers does, takes [`shift_labels`] of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import datasets
import torch

NUM_KEYS, NUM_VALUES, NUM_FILLERS = 16, 8, 8
GET_OFFSET = NUM_KEYS * NUM_VALUES  # 128
VALUE_OFFSET = GET_OFFSET + NUM_KEYS  # 144
FILLER_OFFSET = VALUE_OFFSET + NUM_VALUES  # 152
VOCAB_SIZE = FILLER_OFFSET + NUM_FILLERS  # 160
COPY_SEPARATOR = FILLER_OFFSET
IGNORE_INDEX = -100

_DESCRIPTION = """Token sequences that hold facts among fillers and end with questions about them. `labels` has, at
each column, the token that the logits of that column must predict, and -100 where nothing is asked. Models that shift
labels themselves (every causal language model of transformers) need them moved one column to the right:
`row["labels"] = [-100, *row["labels"][:-1]]`, or build the rows with `RecallTasks(shifted=True)`."""
_CITATION = """@misc{zeng2026arm,
  title = {Attention with Routed-Memory for Learnable Sparse Control},
  author = {Zeng and Huang and Lu and Fang and Xu and Jing and Cui and Ling and Niu and Wang},
  year = {2026},
  eprint = {2609.24417},
  archivePrefix = {arXiv}
}"""


def associative_recall(
    num_sequences: int, context_length: int = 48, num_facts: int = 8, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Atomic associative recall: SET tokens at random places among fillers, then each key is asked once.

    The draws are, in this order: keys, values, fillers, positions, order of the questions.

    Args:
        num_sequences (`int`): B, at least 1.
        context_length (`int`, defaults to 48): T, columns before the questions; at least `num_facts`.
        num_facts (`int`, defaults to 8): n, from 1 to 16 (the number of keys).
        generator (`torch.Generator`): Source of all draws; its device is the tensors' device.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `input_ids` and `labels`, int64 (B, T + 2n): the context, then n pairs
        GET, VAL. The label at a GET column is the VAL token, all others are −100.

    Raises:
        ValueError: A number is outside its range.
        TypeError: `generator` is not a `torch.Generator`.

    Example:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> ids, labels = associative_recall(2, context_length=4, num_facts=1, generator=generator)
        >>> ids.shape, int(labels[0, 4] == ids[0, 5])
        (torch.Size([2, 6]), 1)
    """
    _check_integer("num_sequences", num_sequences, 1)
    _check_integer("num_facts", num_facts, 1, NUM_KEYS)
    _check_integer("context_length", context_length, num_facts, because="`num_facts`")
    keys = _distinct(num_sequences, NUM_KEYS, num_facts, generator)  # (B, n)
    values = _integers(NUM_VALUES, (num_sequences, num_facts), generator)  # (B, n)
    context = _context_with_facts(keys, values, context_length, generator)
    return _with_questions(context, keys, values, generator)


def associative_recall_overwrite(
    num_sequences: int, context_length: int = 48, num_facts: int = 8, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Associative recall in which the second half of the SETs gives the first half's keys a new value.

    Args:
        num_sequences (`int`): B, at least 1.
        context_length (`int`, defaults to 48): T, columns before the questions; at least `num_facts`.
        num_facts (`int`, defaults to 8): n, the number of SET tokens: even, from 2 to 32. The keys are n / 2.
        generator (`torch.Generator`): Source of all draws, in the order of [`associative_recall`].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `input_ids` and `labels`, int64 (B, T + n): the context, then n / 2 pairs
        GET, VAL, where VAL is the latest value. (A new value equals the old one with probability 1/8.)

    Raises:
        ValueError: A number is outside its range, or `num_facts` is odd.
        TypeError: `generator` is not a `torch.Generator`.
    """
    _check_integer("num_sequences", num_sequences, 1)
    _check_integer("num_facts", num_facts, 2, 2 * NUM_KEYS)
    if num_facts % 2:
        raise ValueError(f"`num_facts` must be even (each key is set twice), got {num_facts}.")
    _check_integer("context_length", context_length, num_facts, because="`num_facts`")
    half = num_facts // 2
    keys = _distinct(num_sequences, NUM_KEYS, half, generator)  # (B, n/2)
    values = _integers(NUM_VALUES, (num_sequences, num_facts), generator)  # (B, n)
    context = _context_with_facts(keys.repeat(1, 2), values, context_length, generator)
    return _with_questions(context, keys, values[:, half:], generator)


def needle(
    num_sequences: int, context_length: int = 1024, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """One fact at a random place of a long context: [`associative_recall`] with `num_facts=1`.

    Args:
        num_sequences (`int`): B, at least 1.
        context_length (`int`, defaults to 1024): T, at least 1; the reported results go up to 8,192.
        generator (`torch.Generator`): Source of all draws.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `input_ids` and `labels`, int64 (B, T + 2).

    Raises:
        ValueError: A number is outside its range.
        TypeError: `generator` is not a `torch.Generator`.
    """
    return associative_recall(num_sequences, context_length, 1, generator=generator)


def persistence(
    num_sequences: int, context_length: int = 400, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """One SET, then nothing but fillers, then its GET: how long a memory keeps what nobody refreshes.

    Args:
        num_sequences (`int`): B, at least 1.
        context_length (`int`, defaults to 400): Number of fillers between SET and GET, at least 0.
        generator (`torch.Generator`): Source of the draws: keys, values, fillers.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `input_ids` and `labels`, int64 (B, context_length + 3): SET, fillers,
        GET, VAL. The only label is that of the GET column.

    Raises:
        ValueError: A number is outside its range.
        TypeError: `generator` is not a `torch.Generator`.
    """
    _check_integer("num_sequences", num_sequences, 1)
    _check_integer("context_length", context_length, 0)
    keys = _integers(NUM_KEYS, (num_sequences, 1), generator)
    values = _integers(NUM_VALUES, (num_sequences, 1), generator)
    fillers = FILLER_OFFSET + _integers(NUM_FILLERS, (num_sequences, context_length), generator)
    context = torch.cat([NUM_VALUES * keys + values, fillers], dim=1)
    return _with_questions(context, keys, values, generator)


def copy_task(
    num_sequences: int, context_length: int = 32, num_symbols: int = 32, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random symbols, a separator, and the same symbols again.

    Args:
        num_sequences (`int`): B, at least 1.
        context_length (`int`, defaults to 32): T, the number of symbols to copy, at least 1.
        num_symbols (`int`, defaults to 32): Size of the alphabet, from 2 to 128.
        generator (`torch.Generator`): Source of all draws.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `input_ids` and `labels`, int64 (B, 2T + 1). The separator's column and
        all but the last of the copy have the next symbol as label.

    Raises:
        ValueError: A number is outside its range.
        TypeError: `generator` is not a `torch.Generator`.
    """
    _check_integer("num_sequences", num_sequences, 1)
    _check_integer("context_length", context_length, 1)
    _check_integer("num_symbols", num_symbols, 2, GET_OFFSET)
    symbols = _integers(num_symbols, (num_sequences, context_length), generator)  # (B, T)
    separator = symbols.new_full((num_sequences, 1), COPY_SEPARATOR)
    input_ids = torch.cat([symbols, separator, symbols], dim=1)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:, context_length:-1] = symbols
    return input_ids, labels


def multi_query_recall(
    num_sequences: int, context_length: int = 48, num_facts: int = 8, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-query associative recall (arXiv 2312.04927) with keys and values as separate, adjacent tokens.

    A model must join a value to the token before it, so one layer of attention is not enough.

    Args:
        num_sequences (`int`): B, at least 1.
        context_length (`int`, defaults to 48): T, columns before the questions; at least `2 * num_facts`.
        num_facts (`int`, defaults to 8): n, from 1 to 16 (the number of keys).
        generator (`torch.Generator`): Source of all draws, in the order of [`associative_recall`].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `input_ids` and `labels`, int64 (B, T + 2n): pairs GET(k), VAL(v) that
        start at even columns among fillers, then n pairs GET, VAL whose GET column has the VAL token as label.

    Raises:
        ValueError: A number is outside its range.
        TypeError: `generator` is not a `torch.Generator`.
    """
    _check_integer("num_sequences", num_sequences, 1)
    _check_integer("num_facts", num_facts, 1, NUM_KEYS)
    _check_integer("context_length", context_length, 2 * num_facts, because="`2 * num_facts`")
    keys = _distinct(num_sequences, NUM_KEYS, num_facts, generator)  # (B, n)
    values = _integers(NUM_VALUES, (num_sequences, num_facts), generator)  # (B, n)
    context = FILLER_OFFSET + _integers(NUM_FILLERS, (num_sequences, context_length), generator)
    columns = 2 * _distinct(num_sequences, context_length // 2, num_facts, generator).sort(dim=1).values
    context.scatter_(1, columns, GET_OFFSET + keys).scatter_(1, columns + 1, VALUE_OFFSET + values)
    return _with_questions(context, keys, values, generator)


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels for a model that shifts them itself: each moves one column to the right, onto the token it names.

    Args:
        labels (`torch.Tensor` (B, T)): As the functions of this file return them.

    Returns:
        `torch.Tensor` (B, T): `shifted[:, t] = labels[:, t − 1]`, −100 in the first column.

    Raises:
        ValueError: The last column holds a label, which would be lost.
    """
    if (labels[:, -1] != IGNORE_INDEX).any():
        raise ValueError("`labels` must be −100 in the last column, where no next token follows.")
    return torch.cat([torch.full_like(labels[:, :1], IGNORE_INDEX), labels[:, :-1]], dim=1)


def _check_integer(name: str, value: int, low: int, high: int | None = None, because: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"`{name}` must be an integer {allowed}{because and f' ({because})'}, got {value!r}.")


def _device(generator: torch.Generator) -> torch.device:
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"`generator` must be a torch.Generator, got {generator!r}.")
    return generator.device


def _integers(high: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(high, shape, generator=generator, device=_device(generator))


def _distinct(rows: int, high: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """In each row, `count` different integers below `high`."""
    return torch.rand(rows, high, generator=generator, device=_device(generator)).argsort(dim=1)[:, :count]


def _context_with_facts(
    keys: torch.Tensor, values: torch.Tensor, context_length: int, generator: torch.Generator
) -> torch.Tensor:
    """Fillers (B, T) with SET(k, v) at random columns, in the order of the facts."""
    rows, num_facts = keys.shape
    context = FILLER_OFFSET + _integers(NUM_FILLERS, (rows, context_length), generator)
    positions = _distinct(rows, context_length, num_facts, generator).sort(dim=1).values
    return context.scatter_(1, positions, NUM_VALUES * keys + values)


def _with_questions(
    context: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append GET, VAL for each fact (B, n), in random order; the labels are the VAL tokens, at the GET columns."""
    rows, num_facts = keys.shape
    order = _distinct(rows, num_facts, num_facts, generator)
    questions = GET_OFFSET + keys.gather(1, order)
    answers = VALUE_OFFSET + values.gather(1, order)
    input_ids = torch.cat([context, torch.stack([questions, answers], dim=2).flatten(1)], dim=1)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:, context.shape[1] :: 2] = answers
    return input_ids, labels


TASKS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "associative_recall": associative_recall,
    "associative_recall_overwrite": associative_recall_overwrite,
    "needle": needle,
    "persistence": persistence,
    "copy_task": copy_task,
    "multi_query_recall": multi_query_recall,
}
_TASKS_WITH_FACTS = ("associative_recall", "associative_recall_overwrite", "multi_query_recall")


@dataclass
class RecallTasksConfig(datasets.BuilderConfig):
    """Config of [`RecallTasks`]; its name is the task.

    Args:
        context_length (`int`, defaults to 48): As the task's function takes it.
        num_facts (`int`, *optional*): As the task's function takes it, where it takes one.
        num_train (`int`, defaults to 4096): Rows of the train split.
        num_test (`int`, defaults to 256): Rows of the test split.
        shifted (`bool`, defaults to `False`): Whether `labels` are those of [`shift_labels`].
        seed (`int`, defaults to 0): Seed of all draws.
    """

    context_length: int = 48
    num_facts: int | None = None
    num_train: int = 4096
    num_test: int = 256
    shifted: bool = False
    seed: int = 0


class RecallTasks(datasets.GeneratorBasedBuilder):
    """The tasks of this file as rows with the columns `input_ids` and `labels`, splits `train` and `test`.

    The test rows are drawn first, the train rows next from the same generator, so the two never share a draw and the
    test split depends on the seed and its own size alone.

    Example:
        >>> from datasets_scripts import RecallTasks
        >>> builder = RecallTasks(config_name="needle", context_length=256, num_train=8, num_test=4)
        >>> builder.download_and_prepare()
        >>> len(builder.as_dataset(split="test")[0]["input_ids"])
        258
    """

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = RecallTasksConfig
    BUILDER_CONFIGS = [  # noqa: RUF012  (the base class defines it as a plain list)
        RecallTasksConfig(name="associative_recall", num_facts=8, version=VERSION),
        RecallTasksConfig(name="associative_recall_overwrite", num_facts=8, version=VERSION),
        RecallTasksConfig(name="needle", context_length=1024, num_train=1024, version=VERSION),
        RecallTasksConfig(name="persistence", context_length=400, num_train=1024, version=VERSION),
        RecallTasksConfig(name="copy_task", context_length=32, version=VERSION),
        RecallTasksConfig(name="multi_query_recall", num_facts=8, version=VERSION),
    ]
    DEFAULT_CONFIG_NAME = "associative_recall"

    def _info(self) -> datasets.DatasetInfo:
        config = self.config  # checked here, because the library sets a config's fields after its `__init__`
        _check_integer("num_train", config.num_train, 1)
        _check_integer("num_test", config.num_test, 1)
        if config.name not in _TASKS_WITH_FACTS and config.num_facts is not None:
            raise ValueError(f"`num_facts` must be None for {config.name!r}, got {config.num_facts!r}.")
        self._draw(1, torch.Generator())  # the task's own checks
        return datasets.DatasetInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            homepage="https://arxiv.org/abs/2609.24417",
            license="apache-2.0",
            features=datasets.Features(
                {"input_ids": datasets.List(datasets.Value("int32")), "labels": datasets.List(datasets.Value("int32"))}
            ),
        )

    def _draw(self, num_sequences: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        facts = {"num_facts": config.num_facts} if config.name in _TASKS_WITH_FACTS else {}
        return TASKS[config.name](num_sequences, config.context_length, **facts, generator=generator)

    def _split_generators(self, dl_manager):
        return [
            datasets.SplitGenerator(datasets.Split.TRAIN, gen_kwargs={"split": "train"}),
            datasets.SplitGenerator(datasets.Split.TEST, gen_kwargs={"split": "test"}),
        ]

    def _generate_examples(self, split: str):
        generator = torch.Generator().manual_seed(self.config.seed)
        input_ids, labels = self._draw(self.config.num_test, generator)
        if split == "train":
            input_ids, labels = self._draw(self.config.num_train, generator)
        if self.config.shifted:
            labels = shift_labels(labels)
        for index, (ids, row_labels) in enumerate(zip(input_ids.tolist(), labels.tolist(), strict=True)):
            yield index, {"input_ids": ids, "labels": row_labels}
