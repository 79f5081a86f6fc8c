"""Text for language models: every source, the splits, the blocks, and what is said about bad files."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from integration.hub_server import HubServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from datasets_scripts import blocks, held_out_streams, load_text_documents

EOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens: the id of an ASCII character is its code, the end of the sequence is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [character for character in alphabet if ord(character) < 256]  # stand for the byte of their code
    vocab = {character: ord(character) for character in printable}
    others = (code for code in range(256) if code not in set(vocab.values()))
    vocab |= {character: code for character, code in zip(sorted(set(alphabet) - set(printable)), others, strict=True)}
    bpe = Tokenizer(models.BPE(vocab=vocab | {"<eos>": EOS}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", model_max_length=16)


def write_jsonl(path: Path, records: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def both_ways(source, split="train", **arguments) -> list[dict]:
    """The rows, which streaming must not change."""
    rows = load_text_documents(source, split, **arguments)
    stream = load_text_documents(source, split, streaming=True, **arguments)
    assert isinstance(rows, datasets.Dataset) and isinstance(stream, datasets.IterableDataset)
    assert list(stream) == rows.to_list()
    return rows.to_list()


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_documents_come_in_order_of_their_paths_when_a_folder_has_all_formats(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "z.txt").write_bytes(b"\xef\xbb\xbf" + "Ünder a byte-order mark\n".encode())
    (tmp_path / "b.TXT").write_text("capital suffix")
    write_jsonl(tmp_path / "a.jsonl", [{"text": "first", "other": 1}, {"text": "second"}])
    pq.write_table(pa.table({"text": ["third", "fourth"], "n": [1, 2]}), tmp_path / "c.parquet")
    (tmp_path / "notes.md").write_text("not read")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "hidden.txt").write_text("not read either")
    assert both_ways(tmp_path, "all") == [
        {"name": "a.jsonl:1", "text": "first"},
        {"name": "a.jsonl:2", "text": "second"},
        {"name": "b.TXT", "text": "capital suffix"},
        {"name": "c.parquet:1", "text": "third"},
        {"name": "c.parquet:2", "text": "fourth"},
        {"name": "sub/z.txt", "text": "Ünder a byte-order mark\n"},
    ]


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_documents_are_read_when_one_file_is_named(suffix, tmp_path):
    path = tmp_path / f"one.{suffix}"
    if suffix == "txt":
        path.write_text("only")
    elif suffix == "jsonl":
        write_jsonl(path, [{"text": "only"}])
    else:
        pq.write_table(pa.table({"text": pa.array(["only"], pa.large_string())}), path)
    expected = [{"name": path.name + ("" if suffix == "txt" else ":1"), "text": "only"}]
    assert both_ways(path, "all") == both_ways(str(path), "all") == expected


def test_empty_and_repeated_documents_are_left_out_when_read(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("x y", " \n", "", "x y\n", "z")])
    pq.write_table(pa.table({"text": ["z", None, "new"]}), tmp_path / "b.parquet")
    assert [row["name"] for row in both_ways(tmp_path, "all")] == ["a.jsonl:1", "a.jsonl:5", "b.parquet:3"]


def test_other_column_is_read_when_named(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "no", "content": "yes"}])
    assert both_ways(tmp_path, "all", text_column="content") == [{"name": "a.jsonl:1", "text": "yes"}]


def test_changed_file_is_seen_when_read_again(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "old"}])
    assert both_ways(path, "all")[0]["text"] == "old"
    write_jsonl(path, [{"text": "new"}])
    assert both_ways(path, "all")[0]["text"] == "new"  # nothing was cached


# ── splits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tenth_is_held_out_by_name_when_files_say_no_split(tmp_path):
    write_jsonl(tmp_path / "docs.jsonl", [{"text": f"document {n}"} for n in range(5000)])
    train, test, everything = (both_ways(tmp_path, split) for split in ("train", "test", "all"))
    assert len(everything) == 5000 and abs(len(test) - 500) < 107  # five standard deviations
    assert sorted(row["name"] for row in train + test) == sorted(row["name"] for row in everything)
    held_out = [
        "docs.jsonl:3",
        "docs.jsonl:8",
        "docs.jsonl:12",
        "docs.jsonl:15",
        "docs.jsonl:27",
        "docs.jsonl:30",
        "docs.jsonl:33",
        "docs.jsonl:38",
    ]
    assert [row["name"] for row in test[:8]] == held_out  # on every machine, for ever
    write_jsonl(tmp_path / "docs.jsonl", [{"text": f"other text {n}"} for n in range(2500)])
    assert [row["name"] for row in both_ways(tmp_path, "test")] == [  # by the name: not by text or number
        row["name"] for row in test if int(row["name"].split(":")[1]) <= 2500
    ]


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl", "validation.jsonl"),
        ("train/a.jsonl", "test/a.jsonl", "validation/a.jsonl"),
        ("x/train-00000-of-00001.jsonl", "x/test-00000-of-00001.jsonl", "x/validation-00000-of-00001.jsonl"),
        ("stories_train.jsonl", "stories_test.jsonl", "stories_Validation.jsonl"),
    ],
)
def test_names_are_the_splits_when_all_files_say_one(names, tmp_path):
    for name, text in zip(names, ("for training", "for testing", "for choosing"), strict=True):
        write_jsonl(tmp_path / name, [{"text": f"{text} {n}"} for n in range(30)])
    for split, text in (("train", "for training"), ("test", "for testing"), ("validation", "for choosing")):
        assert [row["text"] for row in both_ways(tmp_path, split)] == [f"{text} {n}" for n in range(30)]
    assert len(both_ways(tmp_path, "all")) == 90
    with pytest.raises(
        ValueError, match=r"`split` must be one of \('test', 'train', 'validation', 'all'\).*got 'dev'"
    ):
        load_text_documents(tmp_path, "dev")


def test_names_mean_nothing_when_only_some_files_say_a_split(tmp_path):
    for name in ("test_of_time.txt", "essay.txt", "train.txt"):
        (tmp_path / name).write_text(name)
    assert len(both_ways(tmp_path, "all")) == 3
    with pytest.raises(ValueError, match=r"`split` must be 'train', 'test' or 'all' .* got 'validation'"):
        load_text_documents(tmp_path, "validation")


def test_long_text_is_cut_at_paragraphs_when_a_hash_splits_it(tmp_path):
    paragraphs = [f"Paragraph {n}: " + "word " * 150 for n in range(1000)]
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(paragraphs) + "\n\n")
    pieces = both_ways(book, "all")
    assert "".join(row["text"] for row in pieces) == book.read_text()  # nothing lost, nothing moved
    assert all(16_384 <= len(row["text"]) < 16_384 + 800 for row in pieces[:-1]) and len(pieces) > 40
    assert all(row["text"].startswith("Paragraph") for row in pieces)
    assert [row["name"] for row in pieces] == [f"book.txt#{index}" for index in range(len(pieces))]
    train, test = both_ways(book), both_ways(book, "test")
    assert len(train) + len(test) == len(pieces) and 0 < len(test) < len(train)


def test_long_text_stays_whole_when_names_say_the_split(tmp_path):
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(f"{name}\n\n" * 10_000)
    assert [row["name"] for row in both_ways(tmp_path)] == ["train.txt"]
    assert len(both_ways(tmp_path, "test")[0]["text"]) == len("test.txt\n\n") * 10_000


def test_way_out_is_told_when_a_split_is_empty(tmp_path):
    (tmp_path / "only.txt").write_text("one document")
    assert len(both_ways(tmp_path, "test")) == 1  # so the hash of "only.txt" wants it
    with pytest.raises(ValueError, match=r"no document in the split 'train'\. A hash .*ask for the split 'all', or"):
        load_text_documents(tmp_path, "train")
    (tmp_path / "only.txt").write_text(" \n")
    fails("there is no text in", tmp_path)
    (tmp_path / "only.txt").rename(tmp_path / "test.txt")
    (tmp_path / "train.txt").write_text("something")
    with pytest.raises(ValueError, match=r"there is no text in '.*\(test\)'"):
        load_text_documents(tmp_path, "test")


# ── bad files ───────────────────────────────────────────────────────────────────────────────────────────────────────


def fails(match: str, source, **arguments) -> None:
    """It fails whether streaming or not, at the latest when the rows are read."""
    for streaming in (False, True):
        with pytest.raises(ValueError, match=match):
            list(load_text_documents(source, "all", streaming, **arguments))


def test_suffixes_are_listed_when_a_folder_has_nothing_to_read(tmp_path):
    fails(r"is a folder without any \.txt, \.jsonl, \.parquet file", tmp_path)
    (tmp_path / "table.csv").write_text("a,b")
    fails(r"is a folder without any \.txt, \.jsonl, \.parquet file", tmp_path)
    fails(r"table\.csv' must be a folder or a file that ends in \.txt, \.jsonl, \.parquet", tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"text": "cut', r"a\.jsonl, line 3: no JSON; Unterminated string starting at column 10\."),
        (b'{"text": "\xff"}', r"a\.jsonl, line 3: no JSON; 'utf-8' codec can't decode byte 0xff in position 10"),
        (b'{"text": ' + b"[" * 10**6, r"a\.jsonl, line 3: no JSON; maximum recursion depth exceeded"),
        (rb'{"text": "\ud83d"}', r"a\.jsonl, line 3: half a surrogate pair"),
        (b'{"content": "x"}', r"a\.jsonl, line 3: no text under 'text'; found \['content'\]"),
        (b'{"text": 5}', r"a\.jsonl, line 3: no text under 'text'; found \['text'\]"),
        (b'["text"]', r"a\.jsonl, line 3: no text under 'text'; found list"),
    ],
)
def test_file_and_line_are_named_when_a_json_line_is_bad(line, match, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")  # the empty line counts
    fails(match, tmp_path)


def test_columns_are_listed_when_a_table_has_no_text(tmp_path):
    pq.write_table(pa.table({"content": ["x"], "n": [1]}), tmp_path / "a.parquet")
    fails(r"a\.parquet has no column 'text'; it has \['content', 'n'\]", tmp_path)
    fails(r"a\.parquet: the column 'n' must hold strings, it holds int64", tmp_path, text_column="n")


def test_file_is_named_when_it_is_not_what_its_suffix_says(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"plainly no table")
    fails(r"a\.parquet is not a Parquet file", tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_bytes("café".encode("latin-1"))
    fails(r"b\.txt is not UTF-8 text: byte 3 cannot be decoded", tmp_path / "b.txt")


@pytest.mark.parametrize("source", ["./texts", "/no/such/folder", "a/b/c", "stories.jsonl", "two words", ""])
def test_source_is_named_when_it_is_nothing(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("what an empty source must not read")
    fails(f"`source` '{source}' is no file or folder here, no Hub id, and not 'packaged'", source)


# ── the Hub ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_source_is_named_when_the_hub_cannot_be_reached():
    for streaming in (False, True):
        with pytest.raises(
            ValueError, match="'nobody/nothing' is no file or folder here, not 'packaged', and not to be"
        ):
            load_text_documents("nobody/nothing", streaming=streaming)


def test_rows_are_those_of_load_dataset_when_a_hub_id_is_named(tmp_path):
    write_jsonl(tmp_path / "repo" / "train.jsonl", [{"content": "one", "n": 1}, {"content": "two", "n": 2}])
    write_jsonl(tmp_path / "repo" / "test.jsonl", [{"content": "three", "n": 3}])
    (tmp_path / "repo" / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        "  - split: test\n    path: test.jsonl\n---\n# Stories\n"
    )
    code = """
        import json
        from datasets_scripts import load_text_documents

        answers = {}
        for streaming in (False, True):
            for split in ("train", "test"):
                rows = load_text_documents("us/stories", split, streaming, text_column="content", config="small")
                answers[f"{split} {streaming}"] = [type(rows).__name__, list(rows)]
        try:
            load_text_documents("us/stories", config="small")
        except ValueError as error:
            answers["error"] = str(error)
        print(json.dumps(answers))
    """
    with HubServer() as hub:
        hub.add("dataset", "us/stories", tmp_path / "repo")
        environment = os.environ | {
            **{"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""},
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        command = [sys.executable, "-c", textwrap.dedent(code)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["error"] == "'us/stories' has no column 'text'; it has ['content', 'n']."
    train, test = [{"text": "one"}, {"text": "two"}], [{"text": "three"}]
    assert answers["train False"] == ["Dataset", train] and answers["test False"] == ["Dataset", test]
    assert answers["train True"] == ["IterableDataset", train] and answers["test True"] == ["IterableDataset", test]


# ── prose of installed packages ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def packaged() -> dict[str, datasets.Dataset]:
    return {split: load_text_documents("packaged", split) for split in ("train", "test")}


def test_packaged_text_is_large_enough_when_read(packaged):
    sizes = {split: sum(len(text.encode()) for text in rows["text"]) for split, rows in packaged.items()}
    assert sizes["train"] > 5_000_000 and sizes["test"] > 500_000
    assert 0.06 < packaged["test"].num_rows / sum(rows.num_rows for rows in packaged.values()) < 0.14
    sources = {name.split("/")[0] for name in packaged["train"]["name"]}
    assert sources == {"python", "numpy", "scipy", "sklearn", "skimage", "matplotlib"}


def test_no_paragraph_is_repeated_when_both_splits_are_read(packaged):
    paragraphs = [
        " ".join(paragraph.split())
        for rows in packaged.values()
        for text in rows["text"]
        for paragraph in text.split("\n\n")
    ]
    assert len(paragraphs) > 20_000 and len(set(paragraphs)) == len(paragraphs)


def test_packaged_text_is_english_when_counted(packaged):
    text = "\n".join(packaged["train"]["text"])
    words = text.lower().split()
    assert 0.04 < words.count("the") / len(words) < 0.09  # about 5 to 7 % in English prose
    assert ">>>" not in text
    assert sum(character.isalpha() or character.isspace() for character in text) > 0.85 * len(text)


def test_documents_are_whole_modules_in_order_when_packaged(packaged):
    rows = dict(zip(packaged["train"]["name"], packaged["train"]["text"], strict=True))
    rows |= dict(zip(packaged["test"]["name"], packaged["test"]["text"], strict=True))
    linalg = rows["numpy/linalg/_linalg.py"]
    assert linalg.startswith("Lite version of scipy.linalg.")
    assert linalg.index("Solve a linear matrix equation") < linalg.index("Cholesky decomposition.")
    assert not any("/tests/" in name for name in rows)
    for split in packaged.values():
        order = [name.split("/")[0] for name in split["name"]]
        packages = ["python", "numpy", "scipy", "sklearn", "skimage", "matplotlib"]
        assert order == sorted(order, key=packages.index)


def test_stream_has_the_same_documents_when_packaged(packaged):
    stream = load_text_documents("packaged", "test", streaming=True)
    assert list(stream.take(8)) == packaged["test"].select(range(8)).to_list()  # 8 lie in Python's own topics
    with pytest.raises(ValueError, match="`split` must be 'train', 'test' or 'all' for 'packaged', got 'validation'"):
        load_text_documents("packaged", "validation")


# ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tokens_of(*texts: str) -> list[int]:
    return [token for text in texts for token in [*text.encode(), EOS]]


def test_documents_are_joined_with_eos_and_cut_when_made_blocks(tokenizer):
    documents = datasets.Dataset.from_dict({"text": ["abc", "de", "fghij"]})
    rows = blocks(documents, tokenizer, block_size=4)
    assert rows.num_rows == 3  # 13 tokens; the last one is dropped
    assert rows["input_ids"][:] == [[*b"abc", EOS], [*b"de", EOS, *b"f"], [*b"ghij"]]
    assert rows["labels"][:] == rows["input_ids"][:]
    assert rows.features["input_ids"] == rows.features["labels"] == datasets.List(datasets.Value("int32"))


def test_blocks_are_the_same_when_documents_are_strings_rows_or_a_stream(tokenizer):
    texts = [f"Document number {n}, naïve or not." for n in range(200)]  # more than one batch of the tokenizer
    expected = tokens_of(*texts)
    rows = blocks(texts, tokenizer, 64)
    assert [token for row in rows["input_ids"] for token in row] == expected[: len(expected) // 64 * 64]
    assert blocks(iter([{"text": text} for text in texts]), tokenizer, 64).to_list() == rows.to_list()
    stream = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()
    lazily = blocks(stream, tokenizer, 64)
    assert isinstance(lazily, datasets.IterableDataset) and lazily.column_names == ["input_ids", "labels"]
    assert list(lazily) == list(lazily) == rows.to_list()  # twice: a second epoch is like the first


def test_only_what_is_needed_is_read_when_a_stream_is_cut(tokenizer):
    def endless():
        n = 0
        while True:
            yield {"text": f"document {n}"}
            n += 1

    rows = blocks(datasets.IterableDataset.from_generator(endless), tokenizer, 8)
    assert next(iter(rows))["input_ids"] == [*b"document"]


def test_nothing_is_said_or_cut_off_when_a_document_is_longer_than_the_models_context(tokenizer, caplog):
    rows = blocks(["x" * 1000], tokenizer, 1001)  # model_max_length is 16
    assert rows["input_ids"][0] == [120] * 1000 + [EOS] and not caplog.records


def test_model_of_transformers_learns_when_it_gets_blocks(tokenizer, packaged):
    rows = blocks(packaged["test"].select(range(40)), tokenizer, 64).with_format("torch")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        batch = rows[step * 16 : (step + 1) * 16]
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - 5.55) < 0.3  # ln 257
    assert sum(losses[-5:]) / 5 < 3.2  # English bytes are worth less than 3.3 nats by their frequencies alone


@pytest.mark.parametrize("block_size", [1, 0, -4, 2.0, True, None])
def test_block_size_is_named_when_it_is_too_small(block_size, tokenizer):
    with pytest.raises(ValueError, match=f"`block_size` must be an integer of at least 2, got {block_size}"):
        blocks(["abc"], tokenizer, block_size)


def test_lengths_are_told_when_text_is_shorter_than_a_block(tokenizer):
    assert blocks(["abc"], tokenizer, 4).num_rows == 1
    with pytest.raises(ValueError, match="the documents have 4 tokens; `block_size` 5 is more than that"):
        blocks(["abc"], tokenizer, 5)
    with pytest.raises(ValueError, match="the documents have 0 tokens"):
        blocks([], tokenizer, 5)


def test_documents_are_refused_when_iterating_would_give_something_else(tokenizer):
    split = datasets.Dataset.from_dict({"text": ["abc"]})
    for call in (lambda given: blocks(given, tokenizer, 2), lambda given: held_out_streams(given, tokenizer, 2, 1)):
        for given, kind in ((datasets.DatasetDict(train=split), "DatasetDict"), ("abc", "str")):
            with pytest.raises(
                TypeError, match=f"`documents` must be one split of a data set or a list, got a {kind}"
            ):
                call(given)
        with pytest.raises(ValueError, match=r"`documents` must have a column 'text'; it has \['content'\]"):
            call(split.rename_column("text", "content"))


def test_tokenizer_is_refused_when_it_has_no_eos(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    for call in (lambda: blocks(["abc"], bare, 2), lambda: held_out_streams(["abc"], bare, 2, 1)):
        with pytest.raises(ValueError, match="`tokenizer` must have an `eos_token`"):
            call()


# ── held-out streams ────────────────────────────────────────────────────────────────────────────────────────────────


def test_longest_documents_come_first_when_streams_are_made(tokenizer):
    streams = held_out_streams(["ab", "cdefghi", "xy", "mnop"], tokenizer, length=5, num_streams=3)
    assert streams.dtype == torch.int64
    # cdefghi|mnop|ab|xy|, the two shortest in their old order
    assert streams.tolist() == [[*b"cdefg"], [*b"hi", EOS, *b"mn"], [*b"op", EOS, *b"ab"]]


def test_streams_are_long_when_cut_from_packaged_text(tokenizer, packaged):
    streams = held_out_streams(packaged["test"], tokenizer, length=32_768, num_streams=4)
    assert streams.shape == (4, 32_768)
    assert (streams == EOS).sum() <= 4  # a few documents are that long
    longest = max(packaged["test"]["text"], key=lambda text: len(text.encode()))
    assert tokenizer.decode(streams[0]) == longest.encode()[:32_768].decode(errors="replace")


@pytest.mark.parametrize(
    ("length", "num_streams", "match"),
    [
        (1, 1, "`length` must be an integer of at least 2, got 1"),
        (2, 0, "`num_streams` must be an integer of at least 1, got 0"),
        (3, 2, "the documents have 4 tokens; `num_streams` 2 of `length` 3 take 6"),
    ],
)
def test_argument_is_named_when_streams_cannot_be_made(length, num_streams, match, tokenizer):
    with pytest.raises(ValueError, match=match):
        held_out_streams(["abc"], tokenizer, length, num_streams)
