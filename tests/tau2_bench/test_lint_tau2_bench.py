"""The task lint against the answer key of known defects."""

import pytest
from tau2_data import expected, needs_data, upstream_tasks

from hf_pipelines.tau2_bench import CODES, Task, lint_tasks, load_tasks

KEYS = {
    "noop_passes": "do_nothing_agent_passes_without_judge",
    "gold_read_error": "gold_read_actions_error",
    "gold_write_error": "gold_write_actions_error",
    "vacuous_basis": "basis_component_with_nothing_to_check",
    "gold_changes_nothing": "gold_state_equals_initial_state",
    "state_corrupt": "gold_state_corrupted_by_multi_item_modify",
    "order_sensitive": "gold_state_corrupted_by_multi_item_modify",
}


def found(findings, code):
    """Ids of the tasks with a code."""
    return [finding.task_id for finding in findings if finding.code == code]


def mock_finding(code, **fields):
    """Whether a toy task gets a code."""
    return code in {finding.code for finding in lint_tasks([Task({"id": "t", **fields}, "mock")])}


@needs_data
@pytest.mark.parametrize("domain", ["airline", "retail"])
def test_findings_equal_the_answer_key_when_the_public_tasks_are_checked(domain):
    key = expected("known_task_defects.json")[domain]
    findings = lint_tasks(list(upstream_tasks(domain).values()))
    assert {code: found(findings, code) for code in KEYS} == {
        code: list(key.get(name, ())) for code, name in KEYS.items()
    }


@needs_data
def test_corrupt_rows_are_counted_as_in_the_answer_key_when_retail_is_checked():
    key = expected("known_task_defects.json")["retail"]["gold_state_corrupted_by_multi_item_modify"]
    findings = lint_tasks(list(upstream_tasks("retail").values()))
    rows = {f.task_id: f.details["wrong_rows"] for f in findings if f.code == "state_corrupt"}
    assert rows == {task_id: entry["wrong_rows"] for task_id, entry in key.items()}


@needs_data
@pytest.mark.parametrize(("version", "name"), [("0.2", "v0.2"), ("verified", "verified")])
def test_failing_gold_writes_equal_the_answer_key_when_other_editions_are_checked(version, name):
    findings = lint_tasks(list(upstream_tasks("retail", version=version).values()))
    key = expected("known_task_defects.json")["retail"]
    assert found(findings, "gold_write_error") == key[f"gold_write_errors_in_{name}_file"]


@needs_data
def test_reported_consent_and_age_defects_are_found_when_public_telecom_tasks_are_checked():
    tasks = list(upstream_tasks("telecom").values())
    findings = lint_tasks(tasks)
    missing = [t.id for t in tasks if t.category == "mms_issue" and "data_usage_exceeded" in t.atoms]
    hard = [t.id for t in tasks if t.persona_name == "Hard"]
    assert (found(findings, "ticket_missing_consent"), found(findings, "persona_age_conflict")) == (missing, hard)
    assert len(findings) == len(missing) + len(hard)


def test_our_own_telecom_tasks_are_clean_when_checked():
    assert lint_tasks(load_tasks("telecom")) == []


def test_compat_fixed_has_no_corrupt_rows_when_retail_is_checked():
    from tau2_data import DATA

    if DATA is None:
        pytest.skip("needs the public data")
    from hf_pipelines.tau2_bench import get_domain

    tasks = list(upstream_tasks("retail").values())
    findings = lint_tasks(tasks, get_domain("retail", DATA, compat="fixed"))
    assert found(findings, "state_corrupt") == found(findings, "order_sensitive") == []


COMPLETE = {"name": "update_task_status", "arguments": {"task_id": "task_1", "status": "completed"}}
PENDING = {
    "env_type": "assistant",
    "func_name": "assert_task_status",
    "arguments": {"task_id": "task_1", "expected_status": "pending"},
}


def test_unknown_tool_is_found_when_a_gold_action_names_none():
    assert mock_finding("unknown_tool", evaluation_criteria={"actions": [{"name": "fly", "arguments": {}}]})


def test_goal_met_early_is_found_when_the_last_write_is_not_needed():
    criteria = {"actions": [COMPLETE], "env_assertions": [PENDING], "reward_basis": ["ENV_ASSERTION"]}
    assert mock_finding("goal_met_early", evaluation_criteria=criteria)


def test_unsatisfied_assertion_is_found_when_the_gold_does_not_reach_it():
    criteria = {"actions": [COMPLETE], "env_assertions": [PENDING], "reward_basis": ["ENV_ASSERTION"]}
    assert mock_finding("unsat_assertion", evaluation_criteria=criteria)
    assert not mock_finding("unsat_assertion", evaluation_criteria={**criteria, "actions": []})


def test_every_finding_has_a_known_code_and_is_storable_when_listed():
    findings = lint_tasks(load_tasks("mock"))
    assert findings and {finding.code for finding in findings} <= CODES.keys()
    assert set(findings[0].to_dict()) == {"task_id", "code", "message", "details"}


def test_lint_is_refused_when_there_are_no_tasks():
    with pytest.raises(ValueError, match="tasks is empty"):
        lint_tasks([])
