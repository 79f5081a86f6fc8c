"""pass^k, intervals, inventory, comparison and the split of failures."""

import math

import pytest

from hf_pipelines.tau2_bench import metrics
from hf_pipelines.tau2_bench.metrics import Cell, breakdown, check_inventory, compare, decompose, pass_hat_k, pass_k


def cells(wins: dict[str, str], mode: str = "dual", **kwargs) -> list[Cell]:
    """`{"a": "1101"}`: task → its trials; `i` stands for an infrastructure error."""
    made = []
    for task, trials in wins.items():
        for trial, mark in enumerate(trials):
            end = "infrastructure_error" if mark == "i" else "user_stop"
            made.append(Cell(task, trial, mark == "1", float(mark == "1"), end, mode, **kwargs))
    return made


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 3, 2, 0.5), (4, 4, 4, 1), (4, 2, 3, 0), (8, 7, 1, 0.875), (8, 7, 2, 0.75), (8, 7, 8, 0)],
)
def test_pass_hat_k_has_its_golden_value_when_counted(n, c, k, expected):
    assert pass_hat_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_k_is_the_mean_over_tasks_when_trials_differ_in_luck():
    result = pass_k(cells({"a": "1111", "b": "1010", "c": "0000"}))
    assert result.values[1] == pytest.approx(0.5, abs=1e-12)
    assert result.values[2] == pytest.approx((1 + 1 / 6) / 3, abs=1e-12)
    assert result.values[4] == pytest.approx(1 / 3, abs=1e-12)
    assert result.pass_at[4] == pytest.approx(2 / 3, abs=1e-12)
    assert (result.n_tasks, result.n_trials, result.mean_reward) == (3, 12, 0.5)


def test_tasks_weigh_the_same_when_they_have_different_numbers_of_trials():
    result = pass_k(cells({"a": "11111111", "b": "00"}))
    assert result.values[1] == 0.5 and set(result.values) == {1, 2}  # pooled it would be 0.8


def test_infrastructure_errors_fail_or_are_left_out_when_asked():
    trials = cells({"a": "11", "b": "1i", "c": "ii"})
    failed = pass_k(trials)
    assert failed.values[1] == pytest.approx((1 + 0.5 + 0) / 3) and failed.excluded_trials == 0
    left_out = pass_k(trials, infra="exclude")
    assert left_out.values[1] == 1.0 and left_out.values[2] == 1.0
    assert (left_out.excluded_trials, left_out.excluded_tasks) == (3, 2)


def test_interval_covers_the_truth_when_drawn_over_tasks():
    wins = {f"t{i}": "1" if i % 4 else "0" for i in range(100)}
    low, high = pass_k(cells(wins)).intervals[1]
    spread = 1.96 * math.sqrt(0.75 * 0.25 / 100)
    assert low == pytest.approx(0.75 - spread, abs=0.02) and high == pytest.approx(0.75 + spread, abs=0.02)
    assert pass_k(cells(wins)).intervals == pass_k(cells(wins)).intervals


@pytest.mark.parametrize(("k", "message"), [(0, "k=0"), (5, "k=5 must be between 1 and the 4 trials")])
def test_k_is_refused_when_no_task_has_so_many_trials(k, message):
    with pytest.raises(ValueError, match=message):
        pass_k(cells({"a": "1111"}), ks=[k])


def test_nothing_is_refused_when_there_are_no_runs():
    with pytest.raises(ValueError, match="no runs"):
        pass_k([])
    with pytest.raises(ValueError, match="infra='drop'"):
        pass_k(cells({"a": "1"}), infra="drop")


def test_inventory_names_what_is_missing_when_a_cell_is_not_there():
    trials = cells({"a": "11", "b": "1"})
    with pytest.raises(ValueError, match="1 missing, such as 'b' trial 1"):
        check_inventory(trials, ["a", "b"], 2)
    assert check_inventory(trials, ["a", "b"], 2, allow_partial=True)["missing"] == [("b", 1)]
    with pytest.raises(ValueError, match="1 duplicate, such as 'a' trial 0"):
        check_inventory([*trials, trials[0]], ["a", "b"], 2, allow_partial=True)
    with pytest.raises(ValueError, match="unknown, such as 'b' trial 0"):
        check_inventory(trials, ["a"], 2, allow_partial=True)
    with pytest.raises(ValueError, match="no tasks"):
        check_inventory([], [], 2)
    with pytest.raises(ValueError, match="trials=0"):
        check_inventory(trials, ["a"], 0)


def test_difference_is_paired_when_two_runs_share_tasks():
    first = {f"t{i}": "1" if i % 2 else "0" for i in range(40)}
    second = {**first, "t1": "0", "t3": "0", "extra": "1"}
    result = compare(cells(first), cells(second))
    assert result.difference == pytest.approx(2 / 40) and result.n_tasks == 40
    assert 0 <= result.interval[0] < 0.05 < result.interval[1] < 0.13  # unpaired it would reach −0.17
    with pytest.raises(ValueError, match="no task in common"):
        compare(cells(first), cells({"x": "1"}))


def test_groups_are_counted_apart_when_broken_down():
    trials = cells({"a": "11", "b": "10"}, labels={"category": "mms"}) + cells(
        {"c": "00"}, labels={"category": "data"}
    )
    result = breakdown(trials, "category")
    assert list(result) == ["data", "mms"]
    assert (result["data"].values[1], result["mms"].values[1], result["mms"].n_tasks) == (0.0, 0.75, 2)
    assert breakdown(trials, lambda cell: cell.success)[True].n_tasks == 2


def test_gaps_add_up_when_modes_are_compared():
    trials = (
        cells({"a": "11", "b": "00", "c": "00", "d": "00"}, "dual")
        + cells({"a": "11", "b": "11", "c": "00", "d": "01"}, "solo")
        + cells({"a": "11", "b": "11", "c": "11", "d": "00"}, "oracle")
    )
    result = decompose(trials)
    assert result.scores == {"dual": 0.25, "solo": 0.625, "oracle": 0.75}
    assert (result.reasoning_gap, result.coordination_gap) == (0.375, 0.375)
    assert (result.planning_share, result.residual_talk_error) == (0.5, 0.25)
    assert result.tasks == {"a": "solved", "b": "coordination", "c": "reasoning", "d": "coordination"}
    assert 1 - result.reasoning_gap - result.coordination_gap == result.scores["dual"]


def test_task_fails_in_both_when_neither_solo_nor_oracle_solves_it():
    assert decompose([c for m in ("dual", "solo", "oracle") for c in cells({"a": "0"}, m)]).tasks == {"a": "both"}
    assert decompose([c for m in ("dual", "solo") for c in cells({"a": "0"}, m)]).tasks == {"a": "reasoning"}


def test_modes_are_refused_when_their_tasks_differ():
    with pytest.raises(ValueError, match="same tasks"):
        decompose(cells({"a": "1"}) + cells({"b": "1"}, "solo"))


def test_unjudged_tasks_are_counted_when_a_judge_was_missing():
    assert pass_k(cells({"a": "00"}, unjudged=True) + cells({"b": "11"})).unjudged_tasks == 1
    assert metrics.pass_at_k(4, 0, 4) == 0.0
