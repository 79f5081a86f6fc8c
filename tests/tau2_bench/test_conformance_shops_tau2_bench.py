"""Airline, retail and mock against the public benchmark's measured results."""

import hashlib
import json

import pytest
from tau2_data import DATA, expected, needs_data, upstream_tasks

from hf_pipelines.tau2_bench import Environment, ToolCall, get_domain
from hf_pipelines.tau2_bench.store import difference

pytestmark = needs_data


def touched(env):
    """The records of the agent's side that an episode has written, before and after."""
    base, now = env.agent.store.base.tables, env.agent.store.tables
    keys = {
        name: [k for k in {**base[name], **table} if base[name].get(k) is not table.get(k)]
        for name, table in now.items()
    }
    before = {name: {k: base[name][k] for k in found if k in base[name]} for name, found in keys.items()}
    after = {name: {k: now[name][k] for k in found if k in now[name]} for name, found in keys.items()}
    return before, after


def changes(env):
    """Path → [old, new], without the tables that are empty only because nothing of them was touched."""
    return {path: pair for path, pair in difference(*touched(env)).items() if path.count("/") > 1}


def gold(domain_name, task):
    """The world after a task's gold actions, and the actions that failed."""
    env = Environment.for_task(get_domain(domain_name, DATA), task)
    answers = [env.respond(ToolCall("call", a.name, a.arguments, a.requestor)) for a in task.actions]
    return env, [[action.name, answer.error] for action, answer in zip(task.actions, answers, strict=True)]


@pytest.mark.parametrize("domain", ["airline", "retail"])
def test_gold_replays_equal_the_measured_ones_when_repeated(domain):
    different = []
    for row in expected(f"{domain}.json"):
        env, calls = gold(domain, upstream_tasks(domain)[row["id"]])
        assert [pair[1] for pair in calls] == [error is not None for _, _, error in row["actions"]]
        idle = Environment(get_domain(domain, DATA))
        if changes(env) != row["agent_db_diff"] or env.same_state(idle) != row["noop_db_match"]:
            different.append(row["id"])
    assert different == []


@pytest.mark.parametrize("domain", ["airline", "retail"])
@pytest.mark.parametrize("version", ["v0.2", "verified"])
def test_gold_replays_of_other_editions_equal_the_measured_ones_when_repeated(domain, version):
    tasks = upstream_tasks(domain, version=version.removeprefix("v") if version == "v0.2" else version)
    different = []
    for row in expected(f"{domain}_alt.json")[version]:
        env, calls = gold(domain, tasks[row["id"]])
        if changes(env) != row["agent_db_diff"] or sum(error for _, error in calls) != len(row["gold_errors"]):
            different.append(row["id"])
    assert different == []


def test_mock_gold_replays_equal_the_measured_ones_when_repeated():
    different = []
    for row in expected("mock.json"):
        task = upstream_tasks("mock")[row["id"]]
        start = Environment.for_task(get_domain("mock", DATA), task)
        env, calls = gold("mock", task)
        found = difference(start.state()["agent"], env.state()["agent"])
        assertions = [env.check(item) for item in task.env_assertions]
        if (found, assertions) != (row["agent_db_diff"], row["assertions"]) or any(error for _, error in calls):
            different.append(row["id"])
        # the public loader shares one database after initialization_data; ours keeps the sides apart
        user = difference(start.state()["user"], env.state()["user"])
        assert user == ({} if task.initialization_data else row["user_db_diff"])
    assert different == []


@pytest.mark.parametrize("domain", ["airline", "retail"])
def test_all_500_recorded_calls_give_the_measured_result_when_repeated(domain):
    env, different = Environment(get_domain(domain, DATA)), []
    rows = expected(f"{domain}_traces.jsonl.gz")
    for name, arguments, error, *result in rows:
        answer = env.respond(ToolCall("call", name, arguments))
        same = answer.error == bool(error)
        if same and result:
            value = parsed(answer.content)
            wanted = result[0]
            same = (
                sha1(value) == wanted["sha1"]
                if isinstance(wanted, dict) and [*wanted] == ["sha1"]
                else value == wanted
            )
        if not same:
            different.append((name, arguments))
    assert (len(rows), different) == (500, [])


def parsed(text):
    """A result as a value: parsed where it is JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def sha1(value):
    """The measured results' digest of a read."""
    return hashlib.sha1(json.dumps(value, sort_keys=True).encode()).hexdigest()
