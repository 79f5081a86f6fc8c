"""Text for language models: documents from files, from the Hub or from installed packages, cut into equal blocks.

>>> from datasets_scripts import blocks, held_out_streams, load_text_documents
>>> train = load_text_documents("my_texts", split="train")  # doctest: +SKIP
>>> rows = blocks(train, tokenizer, block_size=512)  # doctest: +SKIP
>>> held_out = load_text_documents("my_texts", split="test")  # doctest: +SKIP
>>> streams = held_out_streams(held_out, tokenizer, length=8192, num_streams=4)  # doctest: +SKIP
"""

import ast
import hashlib
import importlib.util
import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerBase

SUFFIXES = (".txt", ".jsonl", ".parquet")
PACKAGES = ("numpy", "scipy", "sklearn", "skimage", "matplotlib")  # of our dependencies, those richest in prose
HELD_OUT_SHARE = 0.1
PIECE_LENGTH = 16_384  # characters
MIN_LETTER_SHARE = 0.75  # below it a paragraph is a formula, a table or code

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_SPLIT_IN_NAME = re.compile(r"(?:^|[/_.-])(train|test|validation)(?=[/_.-])", re.IGNORECASE)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NEITHER_LETTER_NOR_SPACE = re.compile(r"[^\sA-Za-z]")
_FEATURES = datasets.Features({"name": datasets.Value("string"), "text": datasets.Value("string")})

Document = tuple[str, str]  # name and text


def load_text_documents(
    source: str | Path,
    split: str = "train",
    streaming: bool = False,
    *,
    text_column: str = "text",
    config: str | None = None,
) -> datasets.Dataset | datasets.IterableDataset:
    """Documents as rows with a column `text` (and `name`, except from the Hub), always in the same order.

    - **A folder of .txt, .jsonl or .parquet files, or one such file.** A .txt file is a document, so is a line of a
      .jsonl file and a row of a .parquet file. Where the names of all files of a folder say `train`, `test` or
      `validation` (`train.jsonl`, `test/a.txt`, `train-00000-of-00001.parquet`) they are the splits. Otherwise a hash
      of the document's name (its path in the folder and its line or row) puts about 10 % into `test` and the rest
      into `train`, .txt files being cut at paragraphs into pieces of about 16,000 characters first. Empty documents
      and repetitions of an earlier document of the same read are left out.
    - **`"packaged"`.** English technical prose that is on every machine where this package is installed: the
      docstrings of the source files of NumPy, SciPy, scikit-learn, scikit-image and matplotlib, scikit-learn's
      descriptions of its data sets, and the reference texts of Python's `help()`. A document is a source file or a
      text. Code examples, formulas, tables and paragraphs that stood in an earlier document are left out; the split
      is by the hash of the document's name, about 10 % `test`, so no paragraph is in both. `train` has about 8 MB,
      `test` about 1 MB; they depend on the versions installed, and reading them takes some seconds. The texts keep
      their own licences (BSD, PSF): train on them, do not publish them as yours.
    - **A Hub id**, say `"HuggingFaceFW/fineweb-edu"`, goes to `datasets.load_dataset`.

    Args:
        source (`str`): Folder, file, Hub id or `"packaged"`. What exists on disk goes before the Hub.
        split (`str`, defaults to `"train"`): `"train"`, `"test"`, `"validation"` where files are named so, `"all"` for
            everything in a local or packaged source, or what the Hub data set has.
        streaming (`bool`, defaults to `False`): Read as you go and return an `IterableDataset`.
        text_column (`str`, defaults to `"text"`): Column with the text in .jsonl, .parquet and Hub data sets.
        config (`str`, *optional*): Configuration of a Hub data set, say `"sample-10BT"`.

    Returns:
        `datasets.Dataset` or, with `streaming`, `datasets.IterableDataset`.

    Raises:
        ValueError: There is no such source or split, a folder has no file to read, a file has no such column, or a
            line or file cannot be read. The message names file and line.
    """
    path = Path(source).expanduser()
    if source == "packaged":
        return _as_dataset(_packaged_documents, {}, split, str(source), streaming)
    if str(source) and path.exists():
        files, by_name = _text_files(path)
        arguments = {"path": str(path), "files": files, "text_column": text_column}
        if not by_name:
            return _as_dataset(_local_documents, arguments, split, str(source), streaming)
        names = sorted(set(by_name))
        if split not in (*names, "all"):
            raise ValueError(f"`split` must be one of {(*names, 'all')} in {str(source)!r}, got {split!r}.")
        chosen = [file for file, name in zip(files, by_name, strict=True) if split in (name, "all")]
        arguments |= {"files": chosen, "cut": False}
        return _as_dataset(_local_documents, arguments, "all", f"{source} ({split})", streaming)
    if not _HUB_ID.fullmatch(str(source)) or path.suffix in SUFFIXES:
        raise ValueError(f"`source` {str(source)!r} is no file or folder here, no Hub id, and not 'packaged'.")
    return _from_hub(str(source), config, split, streaming, text_column)


def blocks(
    documents: Iterable[dict] | Iterable[str], tokenizer: PreTrainedTokenizerBase, block_size: int
) -> datasets.Dataset | datasets.IterableDataset:
    """Tokenize documents, put the end-of-sequence token after each, and cut the whole into equal blocks.

    The tokens after the last full block are dropped.

    Args:
        documents (`Dataset`, `IterableDataset`, or iterable of `str` or rows with `text`): What to cut.
        tokenizer (`PreTrainedTokenizerBase`): Must have an `eos_token`; adds no other special token here.
        block_size (`int`): Tokens a block, at least 2.

    Returns:
        `datasets.Dataset`: columns `input_ids` and `labels`, equal to each other: models of transformers shift labels
        themselves. An `IterableDataset` where `documents` is one.

    Raises:
        ValueError: `block_size` is below 2, there is no column `text`, the tokenizer has no end-of-sequence token, or
            the text gives no block.
        TypeError: `documents` is a single string or a `DatasetDict`.
    """
    _check_positive("block_size", block_size, 2)
    _check_documents(documents)
    _check_eos(tokenizer)
    features = datasets.Features(dict.fromkeys(("input_ids", "labels"), datasets.List(datasets.Value("int32"))))
    if isinstance(documents, datasets.IterableDataset):
        arguments = {"documents": documents, "tokenizer": tokenizer, "block_size": block_size}
        return datasets.IterableDataset.from_generator(_block_rows, features=features, gen_kwargs=arguments)
    tokens = np.fromiter(itertools.chain.from_iterable(_token_lists(documents, tokenizer)), dtype=np.int32)
    if len(tokens) < block_size:
        raise ValueError(f"the documents have {len(tokens)} tokens; `block_size` {block_size} is more than that.")
    rows = tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size)
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows}, features=features)


def held_out_streams(
    documents: Iterable[dict] | Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, num_streams: int
) -> torch.Tensor:
    """Long stretches of tokens on which to measure perplexity as a function of the position.

    The longest documents come first, so that a stream has as few joints (end-of-sequence tokens) as the text allows.

    Args:
        documents (`Dataset` or iterable of `str` or rows with `text`): Held-out text; all of it is read, so
            `.take(n)` some of an endless data set.
        tokenizer (`PreTrainedTokenizerBase`): Must have an `eos_token`.
        length (`int`): Tokens a stream, at least 2.
        num_streams (`int`): Number of streams, at least 1.

    Returns:
        `torch.Tensor`: int64 (num_streams, length), no token in two of them.

    Raises:
        ValueError: A number is too small, there is no column `text`, the tokenizer has no end-of-sequence token, or
            the text is too short.
        TypeError: `documents` is a single string or a `DatasetDict`.
    """
    _check_positive("length", length, 2)
    _check_positive("num_streams", num_streams, 1)
    _check_documents(documents)
    _check_eos(tokenizer)
    longest_first = sorted(_token_lists(documents, tokenizer), key=len, reverse=True)  # stable
    tokens = list(itertools.islice(itertools.chain.from_iterable(longest_first), length * num_streams))
    if len(tokens) < length * num_streams:
        raise ValueError(
            f"the documents have {len(tokens)} tokens; `num_streams` {num_streams} of `length` {length} take "
            f"{length * num_streams}."
        )
    return torch.tensor(tokens).view(num_streams, length)


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_positive(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"`{name}` must be an integer of at least {low}, got {value!r}.")


def _check_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise ValueError("`tokenizer` must have an `eos_token`, which separates the documents; it has none.")


def _check_documents(documents: Iterable[dict] | Iterable[str]) -> None:
    if isinstance(documents, (str, dict)):  # iterating would give its characters, or the names of its splits
        raise TypeError(f"`documents` must be one split of a data set or a list, got a {type(documents).__name__}.")
    columns = getattr(documents, "column_names", None)
    if columns is not None and "text" not in columns:
        raise ValueError(f"`documents` must have a column 'text'; it has {columns}.")


def _token_lists(documents: Iterable[dict] | Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The tokens of each document, the end-of-sequence token last."""
    texts = (document if isinstance(document, str) else document["text"] for document in documents)
    while batch := list(itertools.islice(texts, 64)):
        for tokens in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            yield [*tokens, tokenizer.eos_token_id]


def _block_rows(documents: Iterable[dict], tokenizer: PreTrainedTokenizerBase, block_size: int) -> Iterator[dict]:
    tokens = itertools.chain.from_iterable(_token_lists(documents, tokenizer))
    while len(block := list(itertools.islice(tokens, block_size))) == block_size:
        yield {"input_ids": block, "labels": block}


# ── splits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def _rows_of_split(read, arguments: dict, split: str) -> Iterator[dict]:
    for name, text in read(**arguments):
        if split == "all" or _is_held_out(name) == (split == "test"):
            yield {"name": name, "text": text}


def _as_dataset(
    read, arguments: dict, split: str, source: str, streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    """The documents that `read(**arguments)` yields, those of one split by the hash of the name."""
    if split not in ("train", "test", "all"):
        raise ValueError(f"`split` must be 'train', 'test' or 'all' for {source!r}, got {split!r}.")
    rows = _rows_of_split(read, arguments, split)
    first = next(rows, None)
    if first is None and split == "all":
        raise ValueError(f"there is no text in {source!r}.")
    if first is None:
        raise ValueError(
            f"{source!r} has no document in the split {split!r}. A hash of the names decides which tenth of the "
            "documents is 'test'; ask for the split 'all', or name the files 'train….txt' and 'test….txt'."
        )
    if streaming:
        return datasets.IterableDataset.from_generator(
            _rows_of_split, features=_FEATURES, gen_kwargs={"read": read, "arguments": arguments, "split": split}
        )
    return datasets.Dataset.from_list([first, *rows], features=_FEATURES)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _text_files(path: Path) -> tuple[list[str], list[str]]:
    """The files to read, sorted, and the split that each one's name says; no splits unless all say one."""
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"`source` {str(path)!r} must be a folder or a file that ends in {', '.join(SUFFIXES)}.")
        return [str(path)], []
    relative = sorted(
        file.relative_to(path).as_posix()
        for file in path.rglob("*")
        if file.is_file() and file.suffix.lower() in SUFFIXES
    )
    relative = [name for name in relative if not any(part.startswith(".") for part in name.split("/"))]
    if not relative:
        raise ValueError(f"`source` {str(path)!r} is a folder without any {', '.join(SUFFIXES)} file.")
    found = [_SPLIT_IN_NAME.search(name) for name in relative]
    splits = [match.group(1).lower() for match in found if match]
    if len(splits) < len(relative) or "train" not in splits:
        splits = []
    return [str(path / name) for name in relative], splits


def _local_documents(path: str, files: list[str], text_column: str, cut: bool = True) -> Iterator[Document]:
    """Documents of all files without the empty ones and repetitions; names start with the path inside the folder."""
    root = Path(path)
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    seen: set[bytes] = set()
    for file in map(Path, files):
        name = file.name if file == root else file.relative_to(root).as_posix()
        name = name.encode("utf-8", "replace").decode()  # names of files may hold bytes that are no characters
        for part, text in readers[file.suffix.lower()](file, text_column):
            pieces = _pieces(text) if cut and file.suffix.lower() == ".txt" else [text]
            for index, piece in enumerate(pieces):
                digest = hashlib.blake2b(piece.strip().encode(), digest_size=16).digest()
                if piece.strip() and digest not in seen:
                    seen.add(digest)
                    yield f"{name}{part}" + (f"#{index}" if len(pieces) > 1 else ""), piece


def _pieces(text: str) -> list[str]:
    """Cut a long text at the first paragraph's end after every `PIECE_LENGTH` characters; joined they are the text."""
    pieces = []
    while (end := text.find("\n\n", PIECE_LENGTH)) >= 0 and text[end:].strip():
        pieces.append(text[: end + 2])
        text = text[end + 2 :]
    return [*pieces, text]


def _read_txt(file: Path, text_column: str) -> Iterator[Document]:
    try:
        yield "", file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: byte {error.start} cannot be decoded.") from None


def _read_jsonl(file: Path, text_column: str) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig").strip())
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}: no JSON; {error.msg} column {error.colno}.") from None
            except (UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{file}, line {number}: no JSON; {error}.") from None
            if not isinstance(record, dict) or not isinstance(record.get(text_column), str):
                found = list(record) if isinstance(record, dict) else type(record).__name__
                raise ValueError(f"{file}, line {number}: no text under {text_column!r}; found {found}.")
            if _LONE_SURROGATE.search(record[text_column]):
                raise ValueError(f"{file}, line {number}: half a surrogate pair (\\ud800 … \\udfff) is no character.")
            yield f":{number}", record[text_column]


def _read_parquet(file: Path, text_column: str) -> Iterator[Document]:
    try:
        reader = pa.parquet.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is not a Parquet file ({error}).") from None
    with reader:
        schema = reader.schema_arrow
        if text_column not in schema.names:
            raise ValueError(f"{file} has no column {text_column!r}; it has {schema.names}.")
        kind = schema.field(text_column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(f"{file}: the column {text_column!r} must hold strings, it holds {kind}.")
        batches = reader.iter_batches(batch_size=1024, columns=[text_column])
        texts = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for number, text in enumerate(texts, start=1):
            yield f":{number}", text or ""  # a null is an empty document


def _from_hub(
    source: str, config: str | None, split: str, streaming: bool, text_column: str
) -> datasets.Dataset | datasets.IterableDataset:
    try:
        rows = datasets.load_dataset(source, config, split=split, streaming=streaming)
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(
            f"`source` {source!r} is no file or folder here, not 'packaged', and not to be had from the Hub: {error}"
        ) from error
    columns = rows.column_names or list(next(iter(rows)))  # a stream may not know its columns before the first row
    if text_column not in columns:
        raise ValueError(f"{source!r} has no column {text_column!r}; it has {columns}.")
    rows = rows.select_columns([text_column])
    return rows if text_column == "text" else rows.rename_column(text_column, "text")


# ── prose of installed packages ─────────────────────────────────────────────────────────────────────────────────────


def _packaged_documents() -> Iterator[Document]:
    seen: set[str] = set()
    for name, text in _packaged_texts():
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = " ".join(paragraph.split())
            if key and key not in seen and _is_prose(paragraph):
                seen.add(key)
                paragraphs.append(paragraph.strip("\n"))
        if paragraphs:
            yield name, "\n\n".join(paragraphs) + "\n"


def _is_prose(paragraph: str) -> bool:
    letters = len(paragraph) - len(_NEITHER_LETTER_NOR_SPACE.findall(paragraph))
    return ">>>" not in paragraph and letters >= MIN_LETTER_SHARE * len(paragraph)


def _packaged_texts() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield f"python/{topic}", topics[topic]
    for package in PACKAGES:
        root = Path(importlib.util.find_spec(package).origin).parent  # found, not imported
        for file in sorted((*root.rglob("*.py"), *root.rglob("*.rst"))):
            inside = file.relative_to(root)
            if not {"tests", "testing", "_vendor", "externals"} & set(inside.parts):
                name = f"{package}/{inside.as_posix()}"
                yield name, _docstrings(file) if file.suffix == ".py" else file.read_text(encoding="utf-8")


def _docstrings(file: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes and the like in other people's code
        tree = ast.parse(file.read_bytes())
    return "\n\n".join(_docstrings_below(tree))


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    """The docstrings in the order of the source; walks statements alone, which `ast.walk` does not."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
        yield docstring
    for block in ("body", "orelse", "handlers", "finalbody"):
        for statement in getattr(node, block, ()):
            yield from _docstrings_below(statement)
