"""Telecom against the public benchmark's measured results: no difference in set-ups, gold replays, recorded calls."""

from tau2_data import among, expected, needs_data, telecom_facts, upstream_tasks

from hf_pipelines.tau2_bench import Environment, ToolCall, get_domain
from hf_pipelines.tau2_bench.store import difference

pytestmark = needs_data
GOAL_FREE = "assert_data_refueling_amount"


def replayed(task):
    """(start, after gold with and without coupling, goal met before the last action) of a task."""
    start = Environment.for_task(get_domain("telecom"), task)
    gold, unsynced = start.copy(), start.copy()
    goal = [item for item in task.env_assertions if item.func_name != GOAL_FREE]
    before_last = None

    def solved(env):
        """Whether the customer's problem is gone; a hand-over's assertions say that it is not."""
        return all(env.check(item) for item in goal) != task.must_transfer

    for place, action in enumerate(task.actions):
        if place == len(task.actions) - 1:
            before_last = solved(gold)
        gold.call(action.name, action.arguments, action.requestor)
        unsynced.run_tool(action.name, action.arguments, action.requestor, sync=False)
    return start, gold, unsynced, before_last, solved(gold)


def test_all_2285_gold_replays_equal_the_measured_facts_when_replayed():
    tasks, rows = upstream_tasks("telecom", "full"), expected("telecom_full.jsonl.gz")
    assert len(rows) == len(tasks) == 2285
    different = []
    for row in rows:
        task = tasks[row["id"]]
        start, gold, unsynced, before_last, after = replayed(task)
        found = {
            "init": among(telecom_facts(start), row["init"]),
            "final": among(telecom_facts(gold), row["final"]),
            "actions": [[action.requestor[0], action.name] for action in task.actions],
            "assertions": [gold.check(item) for item in task.env_assertions],
            "noop_assertions": [start.check(item) for item in task.env_assertions],
            "unsynced_gold_equal": gold.same_state(unsynced),
            "solved_before_last": before_last,
            "solved_after": after,
        }
        different += [(row["id"], name) for name, value in found.items() if value != row[name]]
    assert different == []


def test_all_9000_recorded_calls_give_the_measured_error_flag_and_change_when_repeated():
    tasks, different, calls = upstream_tasks("telecom", "full"), [], 0
    for row in expected("telecom_traces.jsonl.gz"):
        env = Environment.for_task(get_domain("telecom"), tasks[row["task_id"]])
        facts = telecom_facts(env)
        assert facts == row["init"]
        for side, name, arguments, error, changed in row["steps"]:
            answer = env.respond(ToolCall("call", name, arguments, {"a": "assistant", "u": "user"}[side]))
            now = telecom_facts(env)
            if answer.error != bool(error) or {k: v for k, v in now.items() if facts[k] != v} != changed:
                different.append((row["task_id"], name, arguments))
            facts, calls = now, calls + 1
    assert (calls, different) == (9000, [])


def test_base_tasks_change_exactly_the_measured_fields_when_the_gold_is_replayed():
    def as_lists(state):
        """Tables as lists, in which the measured paths count."""
        return {name: list(table.values()) for name, table in state.items()}

    different = []
    for row in expected("telecom_base.json"):
        start, gold, *_ = replayed(upstream_tasks("telecom")[row["id"]])
        before, after = start.state(), gold.state()
        if difference(as_lists(before["agent"]), as_lists(after["agent"])) != row["agent_db_diff"]:
            different.append((row["id"], "agent"))
        if difference(before["user"], after["user"]) != row["user_db_diff"]:
            different.append((row["id"], "user"))
    assert different == []


def test_hashes_agree_with_the_comparison_of_states_when_the_gold_is_left_unsynced():
    rows = expected("telecom_full.jsonl.gz")[::40]
    for row in rows:
        _, gold, unsynced, *_ = replayed(upstream_tasks("telecom", "full")[row["id"]])
        assert (gold.hash() == unsynced.hash()) == row["unsynced_gold_equal"]
    assert {row["unsynced_gold_equal"] for row in rows} == {True, False}
