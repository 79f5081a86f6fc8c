"""The acceptance table: scripted agents against the scripted customer, one seed, and four trials marked slow."""

import time
from collections import Counter

import pytest
from tau2_data import DATA, needs_data

from hf_pipelines.tau2_bench import Orchestrator, load_tasks, score_run, trial_seeds
from hf_pipelines.tau2_bench.agents.build import build_agent
from hf_pipelines.tau2_bench.attribution import attribute
from hf_pipelines.tau2_bench.users.audit import audit_user
from hf_pipelines.tau2_bench.users.build import build_user


def skipping(topic):
    """The workflow agent, blind to a topic."""
    return {"kind": "workflow_script", "skip": [topic]}


def play(agent, mode="dual", omit=0.0, tasks=None, trials=1):
    """(task, run, verdict) of every cell."""
    make_agent = build_agent(agent)
    make_user = build_user({"kind": "scripted", "noise": {"omit": omit}})
    cells = []
    for seed in trial_seeds(300, trials):
        for task in tasks or load_tasks("telecom"):
            solo = mode == "solo"
            run = Orchestrator(task, make_agent(), None if solo else make_user(), mode=mode, seed=seed).run()
            cells.append((task, run, score_run(task, run.messages, run.termination, solo=solo)))
    return cells


def solved(cells):
    """How many."""
    return sum(verdict.success for _, _, verdict in cells)


def labels(cells, noisy=False):
    """Attribution of the failures."""
    return Counter(
        attribute(task, run, verdict, audit_user(task, run, False), noisy=noisy).label
        for task, run, verdict in cells
        if not verdict.success
    )


ROWS = [
    ("workflow_script", "dual", 114),
    ("workflow_script", "solo", 114),
    ("oracle_script", "dual", 114),
    ("oracle_script", "solo", 114),
    ("noop", "dual", 0),
    ("transfer", "dual", 20),
    ("role_confused", "dual", 20),
    (skipping("roaming"), "dual", 50),
    (skipping("roaming"), "solo", 50),
    (skipping("refuel"), "dual", 64),
    (skipping("refuel"), "solo", 64),
]


@pytest.mark.parametrize(("agent", "mode", "wanted"), ROWS)
def test_solved_tasks_are_those_of_the_table_when_all_base_tasks_are_played(agent, mode, wanted):
    cells = play(agent, mode)
    assert solved(cells) == wanted
    assert max(run.steps for _, run, _ in cells) <= 200


@pytest.mark.parametrize("topic", ["roaming", "refuel"])
def test_every_failure_is_reasoning_when_the_agent_is_blind_to_a_topic(topic):
    assert {label.partition("/")[0] for label in labels(play(skipping(topic)))} == {"reasoning"}


def test_every_failure_is_role_confusion_when_the_agent_calls_the_phone_itself():
    assert set(labels(play("role_confused"))) == {"coordination/role_confusion"}


def test_every_failure_is_coordination_when_the_customer_leaves_steps_out():
    assert set(labels(play("oracle_script", omit=0.2), noisy=True)) == {"coordination/not_executed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("omit", "expected", "at_least"), [(0.1, 0.7199, 0.97), (0.2, 0.5365, 0.92), (0.4, 0.3325, 0.7)]
)
def test_rechecking_beats_a_blind_plan_when_the_customer_leaves_steps_out(omit, expected, at_least):
    blind, careful = play("oracle_script", omit=omit, trials=4), play("workflow_script", omit=omit, trials=4)
    assert solved(blind) / len(blind) == pytest.approx(expected, abs=0.04)
    assert solved(careful) / len(careful) >= at_least
    assert {label.partition("/")[0] for label in labels(blind, noisy=True)} == {"coordination"}


@pytest.mark.slow
def test_456_dual_episodes_are_all_solved_within_ten_seconds_when_four_trials_are_played():
    start = time.process_time()
    cells = play("workflow_script", trials=4)
    assert solved(cells) == 456 and time.process_time() - start <= 10


@pytest.mark.slow
def test_every_task_is_solved_when_all_that_can_be_generated_are_played_alone():
    tasks = load_tasks("telecom", "all")
    assert solved(play("workflow_script", "solo", tasks=tasks)) == len(tasks) == 3405


@needs_data
@pytest.mark.parametrize(
    ("domain", "agent", "passed", "unjudged", "matched"),
    [
        ("airline", "oracle_script", 50, 0, 50),
        ("retail", "oracle_script", 74, 40, 114),
        ("airline", "noop", 23, 0, None),
        ("retail", "noop", 6, None, 11),
    ],
)
def test_shop_rows_are_those_of_the_table_when_the_public_tasks_are_played(domain, agent, passed, unjudged, matched):
    cells = play(agent, tasks=load_tasks(domain, data_dir=DATA))
    assert solved(cells) == passed
    assert unjudged is None or sum(verdict.unjudged for _, _, verdict in cells) == unjudged
    assert matched is None or sum(bool(verdict.db_check["db_match"]) for _, _, verdict in cells) == matched
