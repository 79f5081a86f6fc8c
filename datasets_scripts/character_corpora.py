"""The embedded texts of `tetrajet_corpora` as data sets that `closedloop data build` writes."""

from collections.abc import Iterator
from dataclasses import dataclass

import datasets

from datasets_scripts import text_blocks
from datasets_scripts.tetrajet_corpora import markov_corpus, pydoc_corpus, split_text

_WORDS = (
    "A text without any meaning but with structure: 512 words of two to seven letters, each followed by one of eight "
    "successors, with sentences that end at random. A language model can learn its spelling and its word order."
)

_HELP = (
    "The reference texts of Python's `help()`, as the Python that built this data set ships them; versions of Python "
    "differ. Licence: PSF License Agreement."
)


class _TextBuilder(datasets.GeneratorBasedBuilder):
    """Rows of one column `text`; the first nine tenths of the characters are `train`, the rest is `test`."""

    def _dataset_info(self, description: str, name: str, license: str, citation: str) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            description=description,
            citation=citation,
            homepage=f"https://huggingface.co/datasets/closedloop/{name}",
            license=license,
            features=datasets.Features({"text": datasets.Value("string")}),
        )

    def _split_generators(self, dl_manager):
        return [
            datasets.SplitGenerator(datasets.Split.TRAIN, gen_kwargs={"split": "train"}),
            datasets.SplitGenerator(datasets.Split.TEST, gen_kwargs={"split": "test"}),
        ]

    def _generate_examples(self, split: str):
        rows = _rows(split_text(self._text(), split))
        yield from enumerate({"text": row} for row in rows)


def _rows(text: str, least: int = 1000) -> Iterator[str]:
    """Whole lines, together at least `least` characters a row; the rows joined are the text."""
    row = ""
    for line in text.splitlines(keepends=True):
        row += line
        if len(row) >= least:
            yield row
            row = ""
    if row:
        yield row


@dataclass
class MarkovCorpusConfig(datasets.BuilderConfig):
    """Configuration of the text.

    Args:
        n_chars (`int`, defaults to 1,000,000): Characters of both splits together.
        seed (`int`, defaults to 0): Seed of words, successors and walk.
    """

    n_chars: int = 1_000_000
    seed: int = 0


class MarkovCorpus(_TextBuilder):
    """The text of [`markov_corpus`] as rows of whole sentences, about 1,000 characters each.

    The first nine tenths are the split `train`, the rest is `test`; the rows joined are the text again.

    Example:
        >>> from datasets_scripts.tetrajet_corpora import MarkovCorpus
        >>> builder = MarkovCorpus(n_chars=20_000)
        >>> builder.download_and_prepare()
        >>> sum(len(row["text"]) for row in builder.as_dataset(split="test"))
        2000
    """

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = MarkovCorpusConfig
    BUILDER_CONFIGS = [MarkovCorpusConfig(name="words", version=VERSION)]  # noqa: RUF012  (a plain list in the base)
    DEFAULT_CONFIG_NAME = "words"

    def _info(self) -> datasets.DatasetInfo:
        text_blocks._check_positive("n_chars", self.config.n_chars, 10)
        citation = "@misc{closedloop, title = {closedloop: a synthetic text}, year = {2026}}"
        return self._dataset_info(_WORDS, "markov_corpus", "apache-2.0", citation)

    def _text(self) -> str:
        return markov_corpus(self.config.n_chars, self.config.seed)


@dataclass
class PythonHelpTextsConfig(datasets.BuilderConfig):
    """Configuration of the help texts.

    Args:
        seed (`int`, defaults to 0): Of no effect: the order is that of the names.
    """

    seed: int = 0


class PythonHelpTexts(_TextBuilder):
    """The text of [`pydoc_corpus`] as rows of whole lines, at least 1,000 characters each.

    Example:
        >>> from datasets_scripts import PythonHelpTexts
        >>> builder = PythonHelpTexts()
        >>> builder.download_and_prepare()
        >>> rows = builder.as_dataset(split="test")
    """

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = PythonHelpTextsConfig
    BUILDER_CONFIGS = [PythonHelpTextsConfig(name="help", version=VERSION)]  # noqa: RUF012  (a plain list in the base)
    DEFAULT_CONFIG_NAME = "help"

    def _info(self) -> datasets.DatasetInfo:
        citation = "@manual{python, title = {The Python Language Reference}, author = {Python Software Foundation}}"
        return self._dataset_info(_HELP, "python_help_texts", "other", citation)

    def _text(self) -> str:
        return pydoc_corpus()
