"""Corpora of the NVFP4 experiments: embedded texts, token blocks, memory maps, the regression stream."""

import itertools
import json
import logging
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from datasets_scripts.character_corpora import MarkovCorpus, PythonHelpTexts
from datasets_scripts.tetrajet_corpora import (
    TokenBlocks,
    character_tokenizer,
    load_corpus,
    markov_corpus,
    pydoc_corpus,
    split_text,
    teacher_student,
)

TEXT = markov_corpus(20_000)


@pytest.fixture
def tokens(tmp_path):
    """Two raw uint32 maps of 101 and 47 tokens, and one with numpy's header of 16-bit tokens."""
    np.arange(101, dtype="<u4").tofile(tmp_path / "a.npy")
    (1000 + np.arange(47, dtype="<u4")).tofile(tmp_path / "b.npy")
    np.save(tmp_path / "c.npy", 2000 + np.arange(20, dtype=np.uint16))
    return tmp_path


def test_text_is_a_walk_over_words_when_drawn():
    words = TEXT.replace(".\n", " ").split(" ")[:-1]
    assert len(TEXT) == 20_000 and set(TEXT) <= set("abcdefghijklmnopqrstuvwxyz .\n")
    assert len(set(words)) <= 512 and {len(word) for word in words} == {2, 3, 4, 5, 6, 7}
    assert TEXT.count(".\n") / len(words) == pytest.approx(0.08, abs=0.02)
    assert Counter(TEXT.replace(" ", "")).most_common(1)[0][0] == "a"  # a letter's probability falls with its rank


def test_every_word_has_at_most_eight_successors_when_the_walk_is_long():
    words = markov_corpus(400_000).replace(".\n", " ").split(" ")[:-1]
    followers: dict = {}
    for first, second in itertools.pairwise(words):
        followers.setdefault(first, Counter())[second] += 1
    unique = [c for word, c in followers.items() if len(word) >= 6 and sum(c.values()) >= 200]
    assert len(unique) >= 20 and max(map(len, unique)) <= 8  # long words are hardly ever drawn twice
    first = np.mean([c.most_common(1)[0][1] / sum(c.values()) for c in unique])
    assert first == pytest.approx(1 / sum(1 / r for r in range(1, 9)), abs=0.03)  # 0.368


def test_text_depends_on_the_seed_alone_when_drawn_again():
    assert markov_corpus(5000) == TEXT[:5000] != markov_corpus(5000, seed=1)


def test_topics_are_joined_in_order_when_python_has_them():
    from pydoc_data.topics import topics

    assert pydoc_corpus() == "\n".join(topics[name] for name in sorted(topics))


def test_markov_text_stands_in_with_a_warning_when_python_has_no_topics(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"no `pydoc_data\.topics`; use `markov_corpus"):
        pydoc_corpus()
    with caplog.at_level(logging.WARNING):
        rows = load_corpus("pydoc", block_size=1000, split="test")
    assert "Using 'markov'" in caplog.text and len(rows) == 100


def test_text_comes_back_when_characters_are_decoded():
    tokenizer = character_tokenizer(TEXT)
    assert tokenizer.decode(tokenizer(TEXT[:500])["input_ids"]) == TEXT[:500]
    assert len(tokenizer) == 31 and tokenizer.eos_token_id == 0
    assert tokenizer("aé\n")["input_ids"] == [tokenizer.convert_tokens_to_ids("a"), 1, 2]


def test_frequent_characters_are_kept_when_the_vocabulary_is_small():
    tokenizer = character_tokenizer("aaabbc", size=4)
    assert tokenizer("abc")["input_ids"] == [2, 3, 1]


def test_blocks_are_the_text_in_order_when_not_shuffled():
    tokenizer = character_tokenizer(TEXT)
    rows = load_corpus("markov", tokenizer, block_size=64, split="test")
    held_out = split_text(markov_corpus(), "test")
    assert len(rows) == 100_000 // 64 and rows[0]["input_ids"].dtype == torch.int64
    assert tokenizer.decode(rows[0]["input_ids"]) == held_out[:64]
    assert torch.equal(rows[5]["input_ids"], rows[5]["labels"])


def test_order_follows_the_seed_when_training_blocks_are_loaded():
    tokenizer = character_tokenizer(TEXT)
    first, again, other = (load_corpus("markov", tokenizer, 1000, seed=seed)["input_ids"][:] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(first.sort(0).values, other.sort(0).values)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_files_are_packed_when_they_hold_text(suffix, tmp_path):
    file = tmp_path / f"train.{suffix}"
    file.write_text(TEXT if suffix == "txt" else json.dumps({"text": TEXT}))
    rows = load_corpus(file, block_size=50, split="all", shuffle=False)
    tokenizer = character_tokenizer(TEXT)
    assert len(rows) == 20_001 // 50  # an end-of-sequence token closes the document
    assert tokenizer.decode(rows[3]["input_ids"]) == TEXT[150:200]


def test_memory_maps_are_cut_inside_each_file_when_a_folder_holds_npy(tokens):
    blocks = TokenBlocks(tokens, 10)
    assert [int(blocks[i]["input_ids"][0]) for i in range(len(blocks))] == [
        *range(0, 100, 10),
        *range(1000, 1040, 10),
        *(2000, 2010),
    ]
    assert blocks[15]["labels"].tolist() == list(range(2010, 2020))
    assert blocks[0]["input_ids"].dtype == torch.int64


def test_files_are_mapped_not_read_when_opened(tokens):
    assert all(isinstance(part, np.memmap) for part in TokenBlocks(tokens, 10)._maps)


def test_splits_of_memory_maps_are_disjoint_when_loaded(tokens):
    train, test = (load_corpus(tokens, block_size=10, split=split) for split in ("train", "test"))
    firsts = [{int(part[i]["input_ids"][0]) for i in range(len(part))} for part in (train, test)]
    assert len(train) == 14 and firsts[1] == {2000, 2010} and not firsts[0] & firsts[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"12345", "is no uint32 memory map: its 5 bytes"),
        (b"", "its 0 bytes"),
        (None, "must hold one row of integers"),
    ],
)
def test_file_is_named_when_it_holds_no_tokens(content, message, tmp_path):
    if content is None:
        np.save(tmp_path / "bad.npy", np.zeros((2, 3)))
    else:
        (tmp_path / "bad.npy").write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.npy.*{message}"):
        load_corpus(tmp_path, block_size=2)


def test_wrong_arguments_are_named_when_loading(tokens):
    for call, message in (
        (lambda: load_corpus("markov", block_size=1), "`block_size` must be an integer of at least 2"),
        (lambda: load_corpus("markov", split="dev"), "`split` must be one of"),
        (lambda: load_corpus("markov", block_size=200_000, split="test"), "`block_size` 200000 is more"),
        (lambda: load_corpus(tokens, block_size=500), "no block of 500 tokens"),
        (lambda: load_corpus("no/such/file.txt"), "is no file or folder here"),
        (lambda: markov_corpus(0), "`n_chars` must be an integer of at least 1"),
        (lambda: teacher_student(0, d=0), "`d` must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_inputs_have_outliers_when_asked():
    stream = teacher_student(0)
    assert sorted(stream.scale.tolist())[-9:] == [1.0, *[20.0] * 8]
    assert teacher_student(0, outliers=False).scale.tolist() == [1.0] * 128
    x, y = stream.clean()
    assert torch.allclose(x.std(0), stream.scale, rtol=0.06) and x.shape == y.shape == (4096, 128)
    a, b = stream.teacher
    assert torch.equal(y, torch.nn.functional.silu(x @ a.t()) @ b.t())
    assert float((a * stream.scale).std()) == pytest.approx(128**-0.5, rel=0.02)
    assert float(b.std()) == pytest.approx(256**-0.5, rel=0.02)


def test_batches_are_noisy_and_fixed_by_the_step_when_streamed():
    stream = teacher_student(3, T=2048)
    for step, (x, y) in zip(range(3), stream, strict=False):
        assert torch.equal(x, stream.batch(step)[0])
        assert float((y - stream._answer(x)).std()) == pytest.approx(0.1, rel=0.02)
    assert not torch.equal(stream.batch(0)[0], stream.batch(1)[0])
    assert not torch.equal(stream.student[0], stream.teacher[0])


@pytest.mark.parametrize(
    ("builder", "text"),
    [(lambda cache: MarkovCorpus(n_chars=20_000, cache_dir=cache), TEXT), (PythonHelpTexts, None)],
    ids=["words", "help"],
)
def test_rows_join_to_the_text_when_the_data_set_is_built(builder, text, tmp_path):
    builder = builder(str(tmp_path))
    builder.download_and_prepare()
    parts = builder.as_dataset()
    assert "".join(parts["train"]["text"]) + "".join(parts["test"]["text"]) == (text or pydoc_corpus())
