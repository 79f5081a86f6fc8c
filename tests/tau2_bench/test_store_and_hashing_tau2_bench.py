"""State hashes and the copy-on-write store."""

import datetime
import doctest
import enum
import importlib

import pytest

from hf_pipelines.tau2_bench import canonical_json, state_hash
from hf_pipelines.tau2_bench.store import BaseState, Store, difference

GOLDEN = "84ea4db78867d3d8fb9551cb2d712d95489807ba9240c61778f4f960b3c8e4dd"  # methods/tau2_bench.md, golden values
EMPTY = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


class Colour(enum.Enum):
    RED = "red"


@pytest.fixture
def store():
    return Store(BaseState({"a": {"x": {"n": 1, "list": [1, {"m": 2}]}, "y": {"n": 2}}, "b": {"z": {"n": 3}}}))


def test_hash_has_the_golden_value_when_keys_and_number_types_differ():
    assert state_hash({"b": 1.0, "a": [True, None, "x", 2.5]}) == GOLDEN
    assert state_hash({"a": [True, None, "x", 2.5], "b": 1}) == GOLDEN
    assert state_hash({}) == EMPTY


def test_canonical_json_normalizes_when_values_are_enums_dates_tuples_and_text():
    value = {"é": (Colour.RED, datetime.date(2025, 2, 25), datetime.datetime(2025, 2, 25, 12, 8)), "n": -0.0}
    assert canonical_json(value) == '{"n":0,"é":["red","2025-02-25","2025-02-25T12:08:00"]}'


def test_hash_differs_when_the_order_of_a_list_or_a_boolean_does():
    assert state_hash([1, 2]) != state_hash([2, 1])
    assert state_hash([1]) != state_hash([True])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_hash_is_refused_when_a_number_is_not_finite(number):
    with pytest.raises(ValueError, match="only finite numbers"):
        state_hash({"x": number})


@pytest.mark.parametrize("value", [{1: "x"}, {"x": object()}, {"x": {1, 2}}])
def test_hash_is_refused_when_a_value_has_no_json_form(value):
    with pytest.raises(TypeError, match="a state"):
        state_hash(value)


def test_store_hash_equals_the_hash_of_the_whole_state_when_records_change(store):
    assert store.hash() == state_hash(store.to_dict())
    store.begin()
    store.edit("a", "x")["list"][1]["m"] = 5
    store.insert("b", "new", {"n": 1.0})
    store.delete("a", "y")
    assert store.hash() == state_hash(store.to_dict())
    assert store.to_dict() == {"a": {"x": {"n": 1, "list": [1, {"m": 5}]}}, "b": {"z": {"n": 3}, "new": {"n": 1.0}}}


def test_base_is_untouched_when_an_episode_writes(store):
    store.begin()
    store.edit("a", "x")["list"].append("mine")
    store.edit("b")["z"]["n"] = 9
    assert Store(store.base).to_dict() == {
        "a": {"x": {"n": 1, "list": [1, {"m": 2}]}, "y": {"n": 2}},
        "b": {"z": {"n": 3}},
    }


def test_rollback_restores_everything_when_a_transaction_edited_inserted_and_deleted(store):
    store.begin()
    store.edit("a", "x")["n"] = 7
    store.begin()  # the first transaction is kept
    before = store.to_dict()
    store.edit("a", "x")["n"] = 8
    store.insert("a", "new", {})
    store.delete("a", "new")
    store.delete("a", "y")
    store.edit("b")["z"]["n"] = 4
    store.edit("b", "z")["n"] = 5
    store.rollback()
    assert store.to_dict() == before
    assert store["a"]["x"]["n"] == 7


def test_copies_are_independent_when_either_side_writes(store):
    store.begin()
    store.edit("a", "x")["n"] = 7
    other = store.copy()
    store.edit("a", "x")["n"] = 8
    other.edit("a", "x")["n"] = 9
    other.edit("b")["z"]["n"] = 0
    assert (store["a"]["x"]["n"], other["a"]["x"]["n"], store["b"]["z"]["n"]) == (8, 9, 3)


def test_merge_merges_dictionaries_and_replaces_the_rest_when_given_data(store):
    store.begin()
    store.merge({"a": {"x": {"list": [], "extra": 1}, "w": {"n": 0}}})
    assert store["a"]["x"] == {"n": 1, "list": [], "extra": 1}
    assert store["a"]["w"] == {"n": 0} and store["a"]["y"] == {"n": 2}


def test_merge_is_refused_when_a_table_is_unknown(store):
    with pytest.raises(ValueError, match=r"names 'orders'.*\['a', 'b'\]"):
        store.merge({"orders": {}})


def test_states_are_equal_when_only_number_types_differ(store):
    other = Store(store.base)
    other.begin()
    other.edit("a", "x")["n"] = 1.0
    assert store.equals(other) and store.hash() == other.hash()
    other.edit("a", "x")["n"] = 1.5
    assert not store.equals(other) and store.hash() != other.hash()


def test_difference_lists_leaves_when_containers_appear_or_vanish():
    assert difference({"a": [], "b": {"c": 1}}, {"a": [2], "b": {"c": 1}}) == {
        "/a": [[], "<absent>"],
        "/a/0": ["<absent>", 2],
    }


@pytest.mark.parametrize("name", ["domains.calculator", "env", "hashing", "lint", "orchestrator", "tasks"])
def test_examples_in_docstrings_run_when_executed(name):
    results = doctest.testmod(importlib.import_module(f"hf_pipelines.tau2_bench.{name}"))
    assert results.attempted > 0 and results.failed == 0
