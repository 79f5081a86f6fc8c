"""The recall tasks (arXiv 2609.24417): draws, answers, labels, and the builder that writes them."""

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from datasets_scripts import (
    RecallTasks,
    associative_recall,
    associative_recall_overwrite,
    build,
    copy_task,
    multi_query_recall,
    needle,
    persistence,
    shift_labels,
)
from datasets_scripts.recall_tasks import COPY_SEPARATOR, TASKS, VOCAB_SIZE

SMALL = {  # arguments that make each task quick
    "associative_recall": {"context_length": 20, "num_facts": 5},
    "associative_recall_overwrite": {"context_length": 20, "num_facts": 6},
    "needle": {"context_length": 30},
    "persistence": {"context_length": 30},
    "copy_task": {"context_length": 12},
    "multi_query_recall": {"context_length": 20, "num_facts": 5},
}

GOLDEN_IDS = [  # written down once, torch 2.13
    [99, 16, 159, 152, 154, 155, 130, 144, 140, 147],
    [152, 153, 155, 91, 21, 155, 139, 147, 130, 149],
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kind(token: int) -> str:
    """What a token is, by the table of the vocabulary."""
    return "SET" if token < 128 else "GET" if token < 144 else "VAL" if token < 152 else "filler"


def asked(labels: list[int]) -> list[int]:
    return [column for column, label in enumerate(labels) if label != -100]


# ── associative recall ──────────────────────────────────────────────────────────────────────────────────────────────


def test_vocabulary_has_160_tokens_when_counted():
    assert (VOCAB_SIZE, COPY_SEPARATOR) == (160, 152)
    assert [kind(token) for token in (0, 127, 128, 143, 144, 151, 152, 159)] == [
        *("SET", "SET", "GET", "GET", "VAL", "VAL", "filler", "filler")
    ]


def test_stream_is_that_of_the_written_order_of_draws_when_rebuilt_token_by_token():
    rows, length, n = 6, 12, 5
    source = seeded(999)
    keys = torch.argsort(torch.rand(rows, 16, generator=source), dim=1)[:, :n]
    values = torch.randint(8, (rows, n), generator=source)
    fillers = torch.randint(8, (rows, length), generator=source)
    positions = torch.argsort(torch.rand(rows, length, generator=source), dim=1)[:, :n].sort(dim=1).values
    order = torch.argsort(torch.rand(rows, n, generator=source), dim=1)
    expected_ids, expected_labels = [], []
    for row in range(rows):
        tokens = [152 + int(filler) for filler in fillers[row]]
        for fact in range(n):
            tokens[int(positions[row, fact])] = 8 * int(keys[row, fact]) + int(values[row, fact])
        targets = [-100] * length
        for fact in order[row].tolist():
            tokens += [128 + int(keys[row, fact]), 144 + int(values[row, fact])]
            targets += [144 + int(values[row, fact]), -100]
        expected_ids.append(tokens)
        expected_labels.append(targets)
    generator = seeded(999)
    input_ids, labels = associative_recall(rows, length, n, generator=generator)
    assert input_ids.tolist() == expected_ids and labels.tolist() == expected_labels
    assert torch.equal(generator.get_state(), source.get_state())  # the next batch is the same one, too


def test_tokens_are_these_when_the_seed_is_0():
    # a change would make shipped checkpoints and reported figures incomparable
    input_ids, labels = associative_recall(2, context_length=6, num_facts=2, generator=seeded())
    assert input_ids.tolist() == GOLDEN_IDS
    assert labels.tolist() == [[-100] * 6 + [row[7], -100, row[9], -100] for row in GOLDEN_IDS]


def test_every_answer_is_the_value_that_was_set_when_sequences_are_read():
    input_ids, labels = associative_recall(64, generator=seeded())
    assert input_ids.shape == labels.shape == (64, 48 + 16) and input_ids.dtype == labels.dtype == torch.int64
    for tokens, targets in zip(input_ids.tolist(), labels.tolist(), strict=True):
        facts = dict(divmod(token, 8) for token in tokens[:48] if kind(token) == "SET")
        assert len(facts) == 8 and all(kind(token) in ("SET", "filler") for token in tokens[:48])
        assert asked(targets) == list(range(48, 64, 2))
        assert {tokens[column] - 128 for column in asked(targets)} == set(facts)  # each key is asked once
        for column in asked(targets):
            assert targets[column] == tokens[column + 1] == 144 + facts[tokens[column] - 128]


def test_keys_values_and_positions_are_uniform_when_many_are_drawn():
    input_ids, _ = associative_recall(4000, context_length=20, num_facts=4, generator=seeded())
    context = input_ids[:, :20]
    counts = torch.bincount(context[context < 128], minlength=128).float()
    assert counts.sum() == 16_000 and abs(counts.mean() - 125) < 1e-6
    assert (counts - 125).abs().max() < 5 * 125**0.5  # five standard deviations of a Poisson count
    assert ((context < 128).float().mean(dim=0) - 0.2).abs().max() < 0.035  # five times sqrt(0.2·0.8/4000)
    questions = input_ids[:, 20::2] - 128
    order_kept = (questions == (context[context < 128].view(4000, 4) // 8)).all(dim=1).float().mean()
    assert abs(order_kept - 1 / 24) < 0.016  # one permutation of four in 24


def test_all_keys_are_used_when_facts_fill_key_set_and_context():
    input_ids, labels = associative_recall(3, context_length=16, num_facts=16, generator=seeded())
    assert (input_ids[:, :16] < 128).all()
    assert (input_ids[:, 16::2].sort(dim=1).values == torch.arange(128, 144)).all()
    assert (labels != -100).sum().item() == 48


def test_answer_is_the_latest_value_when_keys_are_overwritten():
    input_ids, labels = associative_recall_overwrite(64, context_length=30, num_facts=8, generator=seeded())
    assert input_ids.shape == (64, 30 + 8)
    changed = 0
    for tokens, targets in zip(input_ids.tolist(), labels.tolist(), strict=True):
        events = [divmod(token, 8) for token in tokens[:30] if kind(token) == "SET"]
        assert [key for key, _ in events[:4]] == [key for key, _ in events[4:]]
        first, latest = dict(events[:4]), dict(events[4:])
        assert len(latest) == 4 and asked(targets) == [30, 32, 34, 36]
        assert {tokens[column] - 128 for column in asked(targets)} == set(latest)
        for column in asked(targets):
            assert targets[column] == tokens[column + 1] == 144 + latest[tokens[column] - 128]
        changed += sum(first[key] != latest[key] for key in latest)
    assert changed > 0.8 * 256  # 7/8 on average: answering with the first value fails


def test_needle_is_recall_of_one_fact_when_drawn():
    for length in (1, 8192):
        expected = associative_recall(3, length, 1, generator=seeded(5))
        found = needle(3, length, generator=seeded(5))
        assert found[0].shape == (3, length + 2)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("length", [0, 1, 4000])
def test_one_fact_precedes_all_fillers_when_persistence_is_asked(length):
    input_ids, labels = persistence(32, length, generator=seeded())
    assert input_ids.shape == labels.shape == (32, length + 3)
    key, value = input_ids[:, 0] // 8, input_ids[:, 0] % 8
    assert (input_ids[:, 0] < 128).all() and (input_ids[:, 1 : length + 1] >= 152).all()
    assert torch.equal(input_ids[:, -2], 128 + key) and torch.equal(input_ids[:, -1], 144 + value)
    assert torch.equal(labels[:, -2], 144 + value) and (labels != -100).sum() == 32
    assert len(key.unique()) > 8 and len(value.unique()) == 8


# ── copying and multi-query recall ──────────────────────────────────────────────────────────────────────────────────


def test_symbols_are_repeated_after_the_separator_when_copied():
    input_ids, labels = copy_task(50, generator=seeded())
    assert input_ids.shape == (50, 65)
    assert torch.equal(input_ids[:, :32], input_ids[:, 33:]) and (input_ids[:, 32] == COPY_SEPARATOR).all()
    assert torch.equal(input_ids[:, :32].unique(), torch.arange(32))
    assert (labels[:, :32] == -100).all() and (labels[:, -1] == -100).all()
    assert torch.equal(labels[:, 32:-1], input_ids[:, 33:])  # aligned: each column names the next token


def test_alphabet_has_the_size_asked_when_copied():
    input_ids, _ = copy_task(200, context_length=20, num_symbols=2, generator=seeded())
    assert torch.equal(input_ids.unique(), torch.tensor([0, 1, COPY_SEPARATOR]))


@pytest.mark.parametrize(("length", "n"), [(48, 8), (21, 10), (2, 1)])
def test_value_follows_its_key_when_tokens_are_separate(length, n):
    input_ids, labels = multi_query_recall(64, length, n, generator=seeded())
    assert input_ids.shape == (64, length + 2 * n)
    for tokens, targets in zip(input_ids.tolist(), labels.tolist(), strict=True):
        keys = [column for column in range(length) if kind(tokens[column]) == "GET"]
        facts = {tokens[column] - 128: tokens[column + 1] for column in keys}
        assert len(facts) == n and all(kind(value) == "VAL" for value in facts.values())
        assert sum(kind(token) == "filler" for token in tokens[:length]) == length - 2 * n
        assert asked(targets) == list(range(length, length + 2 * n, 2))
        assert {tokens[column] - 128 for column in asked(targets)} == set(facts)
        for column in asked(targets):
            assert targets[column] == tokens[column + 1] == facts[tokens[column] - 128]


# ── all tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("task", TASKS)
def test_batches_repeat_when_the_seed_does(task):
    first, again, other = (TASKS[task](8, **SMALL[task], generator=seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert first[0].min() >= 0 and first[0].max() < VOCAB_SIZE


@pytest.mark.parametrize("task", TASKS)
def test_labels_name_the_next_token_when_shifted(task):
    input_ids, labels = TASKS[task](8, **SMALL[task], generator=seeded())
    shifted = shift_labels(labels)
    assert shifted.shape == labels.shape and (shifted != -100).sum() == (labels != -100).sum() > 0
    assert torch.equal(shifted[shifted != -100], input_ids[shifted != -100])


def test_loss_of_a_model_that_shifts_is_that_of_aligned_labels_when_labels_are_shifted():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **sizes)).eval()
    input_ids, labels = associative_recall(4, generator=seeded())
    with torch.no_grad():
        output = model(input_ids, labels=shift_labels(labels))
        wrong = model(input_ids, labels=labels).loss
    expected = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert abs(output.loss - expected) < 1e-6
    assert abs(wrong - expected) > 1e-4


def test_shift_is_refused_when_it_would_lose_a_label():
    with pytest.raises(ValueError, match="`labels` must be −100 in the last column"):
        shift_labels(torch.tensor([[-100, 3]]))


@pytest.mark.parametrize(
    ("task", "arguments", "match"),
    [
        (associative_recall, {"num_sequences": 0}, "`num_sequences` must be an integer of at least 1, got 0"),
        (associative_recall, {"num_sequences": 2.0}, r"`num_sequences` must be an integer of at least 1, got 2\.0"),
        (associative_recall, {"num_sequences": True}, "`num_sequences` must be an integer .* got True"),
        (associative_recall, {"num_facts": 0}, "`num_facts` must be an integer from 1 to 16, got 0"),
        (associative_recall, {"num_facts": 17}, "`num_facts` must be an integer from 1 to 16, got 17"),
        (
            associative_recall,
            {"context_length": 7},
            r"`context_length` must be an integer of at least 8 \(`num_facts`\), got 7",
        ),
        (associative_recall_overwrite, {"num_facts": 7}, "`num_facts` must be even .* got 7"),
        (associative_recall_overwrite, {"num_facts": 34}, "`num_facts` must be an integer from 2 to 32, got 34"),
        (associative_recall_overwrite, {"context_length": 4}, "`context_length` must .* at least 8 .* got 4"),
        (needle, {"context_length": 0}, "`context_length` must be an integer of at least 1 .* got 0"),
        (persistence, {"context_length": -1}, "`context_length` must be an integer of at least 0, got -1"),
        (copy_task, {"context_length": 0}, "`context_length` must be an integer of at least 1, got 0"),
        (copy_task, {"num_symbols": 129}, "`num_symbols` must be an integer from 2 to 128, got 129"),
        (
            multi_query_recall,
            {"context_length": 15},
            r"`context_length` must be an integer of at least 16 \(`2 \* num_facts`\), got 15",
        ),
        (multi_query_recall, {"num_facts": None}, "`num_facts` must be an integer from 1 to 16, got None"),
    ],
)
def test_argument_is_named_when_it_is_wrong(task, arguments, match):
    with pytest.raises(ValueError, match=match):
        task(**{"num_sequences": 2} | arguments, generator=seeded())


@pytest.mark.parametrize("task", TASKS)
def test_generator_is_named_when_it_is_none(task):
    with pytest.raises(TypeError, match=r"`generator` must be a torch\.Generator, got None"):
        TASKS[task](2, generator=None)


# ── builder ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of our own, so that nothing of an earlier version is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def prepared(task: str, **config) -> datasets.DatasetDict:
    builder = RecallTasks(config_name=task, **{"num_train": 6, "num_test": 4} | SMALL[task] | config)
    builder.download_and_prepare()
    return builder.as_dataset()


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_those_of_the_function_when_built(task):
    splits = prepared(task, seed=7)
    generator = seeded(7)
    for split, count in (("test", 4), ("train", 6)):  # drawn in this order
        input_ids, labels = TASKS[task](count, **SMALL[task], generator=generator)
        assert splits[split]["input_ids"][:] == input_ids.tolist()
        assert splits[split]["labels"][:] == labels.tolist()
    expected = datasets.List(datasets.Value("int32"))
    assert splits["train"].features == {"input_ids": expected, "labels": expected}


def test_configs_are_the_tasks_when_listed():
    assert [config.name for config in RecallTasks.BUILDER_CONFIGS] == list(TASKS)


def test_rows_differ_when_the_seed_does():
    first, second = prepared("copy_task"), prepared("copy_task", seed=1)
    assert first["test"]["input_ids"][:] != second["test"]["input_ids"][:]


def test_test_rows_stay_when_the_train_split_grows():
    small, large = prepared("needle", seed=2), prepared("needle", seed=2, num_train=20)
    assert (small["train"].num_rows, large["train"].num_rows) == (6, 20)
    assert small["test"]["input_ids"][:] == large["test"]["input_ids"][:]


def test_labels_move_one_column_when_built_shifted():
    aligned, shifted = prepared("associative_recall"), prepared("associative_recall", shifted=True)
    assert aligned["test"]["input_ids"][:] == shifted["test"]["input_ids"][:]
    assert [[-100, *row[:-1]] for row in aligned["test"]["labels"]] == shifted["test"]["labels"][:]


@pytest.mark.parametrize(
    ("task", "config", "match"),
    [
        ("associative_recall", {"num_facts": 17}, "`num_facts` must be an integer from 1 to 16, got 17"),
        ("needle", {"num_facts": 2}, "`num_facts` must be None for 'needle', got 2"),
        ("copy_task", {"context_length": 0}, "`context_length` must be an integer of at least 1, got 0"),
        ("copy_task", {"num_train": 0}, "`num_train` must be an integer of at least 1, got 0"),
        ("copy_task", {"num_test": -1}, "`num_test` must be an integer of at least 1, got -1"),
    ],
)
def test_field_is_named_when_the_builder_cannot_use_it(task, config, match):
    with pytest.raises(ValueError, match=match):
        RecallTasks(config_name=task, **config)


def test_folder_opens_when_the_command_writes_it(tmp_path):
    from hf_pipelines.cli import app

    result = CliRunner().invoke(app, ["data", "build", "recall_tasks", "--out", str(tmp_path / "out"), "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert sorted(datasets.get_dataset_config_names(str(tmp_path / "out"))) == sorted(TASKS)
    rows = datasets.load_dataset(str(tmp_path / "out"), split="test", cache_dir=str(tmp_path / "cache"))
    test_ids, test_labels = associative_recall(256, 48, 8, generator=seeded(3))
    assert rows["input_ids"][:] == test_ids.tolist() and rows["labels"][:] == test_labels.tolist()
    trained = datasets.load_dataset(str(tmp_path / "out"), "needle", split="train", cache_dir=str(tmp_path / "cache"))
    assert trained.num_rows == 1024 and len(trained[0]["input_ids"]) == 1026


def test_card_says_how_labels_are_aligned_when_built(tmp_path):
    card = (build("recall_tasks", tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and "- text\n" in card and "10K<n<100K" in card
    assert "the token that the logits of that column must predict" in card and "shifted=True" in card
    assert "arxiv.org/abs/2609.24417" in card
