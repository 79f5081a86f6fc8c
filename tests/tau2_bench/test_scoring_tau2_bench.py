"""The reward: every component, its options, and the verdicts beside it."""

import json
from functools import cache

import pytest
from tau2_data import needs_data, upstream_tasks

from hf_pipelines.tau2_bench import Message, Task, ToolCall, ToolMessage, get_domain, load_tasks, score_run
from hf_pipelines.tau2_bench.scoring import TERMINATIONS, communicate_checks, gold_replay

LINE = {"customer_id": "C1001", "line_id": "L1002"}


def said(*texts):
    """A conversation of the agent's texts."""
    return [Message("assistant", text) for text in texts]


def called(name, requestor="assistant", error=False, **arguments):
    """A call with its answer."""
    return [
        Message(requestor, tool_calls=[ToolCall("c", name, arguments, requestor)]),
        ToolMessage("c", "Error: no" if error else "done", requestor, error),
    ]


def mock_task(criteria, **fields):
    """A task of the toy domain with these criteria."""
    return Task({"id": "t", "evaluation_criteria": criteria, **fields}, "mock")


@cache
def single_faults():
    """Fault → its category's task with that fault alone (mobile data before MMS)."""
    return {task.atoms[0]: task for task in reversed(load_tasks("telecom", "small"))}


def telecom(atom):
    """The generated task with this fault alone."""
    return single_faults()[atom]


COMPLETE = {"name": "update_task_status", "arguments": {"task_id": "task_1", "status": "completed"}}


# ---------------------------------------------------------------------------------------------------- whole reward


def test_reward_is_1_when_there_are_no_criteria():
    assert score_run(mock_task(None), [], "user_stop").reward == 1


@pytest.mark.parametrize("termination", TERMINATIONS)
def test_components_are_computed_and_only_proper_ends_score_when_a_run_ends(termination):
    task = mock_task({"actions": [COMPLETE], "reward_basis": ["DB", "ACTION"]})
    verdict = score_run(task, called(**COMPLETE["arguments"], name=COMPLETE["name"]), termination)
    proper = termination in ("user_stop", "agent_stop")
    assert verdict.reward_breakdown == {"DB": 1.0, "ACTION": 1.0}
    assert (verdict.reward, verdict.info["premature"]) == (float(proper), not proper)


def test_termination_is_required_when_a_run_is_scored():
    with pytest.raises(ValueError, match="termination=None"):
        score_run(mock_task(None), [], None)


def test_default_basis_is_db_and_communicate_when_the_task_names_none():
    task = mock_task({"actions": [COMPLETE], "communicate_info": ["task_1"]})
    run = called(COMPLETE["name"], **COMPLETE["arguments"])
    assert score_run(task, run, "user_stop").reward_breakdown == {"DB": 1.0, "COMMUNICATE": 0.0}
    assert score_run(task, run + said("TASK_1 is done"), "user_stop").success


def test_basis_counts_1_and_is_listed_when_there_is_nothing_to_check():
    verdict = score_run(mock_task({"reward_basis": ["ENV_ASSERTION", "COMMUNICATE", "ACTION"]}), [], "user_stop")
    assert verdict.reward == 1 and verdict.info["vacuous"] == ["ENV_ASSERTION", "COMMUNICATE", "ACTION"]


def test_verdict_is_json_when_stored():
    verdict = score_run(load_tasks("mock")[8], [], "user_stop").to_dict()
    assert json.loads(json.dumps(verdict)) == verdict


# -------------------------------------------------------------------------------------------------------------- DB


def test_db_fails_when_the_run_leaves_out_or_adds_a_write():
    task = mock_task({"actions": [COMPLETE], "reward_basis": ["DB"]})
    right = called(COMPLETE["name"], **COMPLETE["arguments"])
    extra = called("create_task", user_id="user_1", title="More")
    assert [score_run(task, run, "user_stop").reward for run in ([], right, right + extra)] == [0, 1, 0]


def test_calls_that_failed_or_were_never_answered_change_nothing_when_replayed():
    task = mock_task({"actions": [], "reward_basis": ["DB"]})
    run = called("update_task_status", error=True, task_id="task_9", status="completed")
    pending = [Message("assistant", tool_calls=[ToolCall("c", COMPLETE["name"], COMPLETE["arguments"])])]
    verdict = score_run(task, run + pending, "max_steps")
    assert verdict.db_check["db_match"] and verdict.info["replay_differences"] == []


def test_gold_errors_are_swallowed_and_listed_when_a_gold_action_fails():
    bad = {"name": "update_task_status", "arguments": {"task_id": "task_9", "status": "completed"}}
    verdict = score_run(mock_task({"actions": [bad, COMPLETE], "reward_basis": ["DB"]}), [], "user_stop")
    assert [name for name, _ in verdict.info["gold_errors"]] == ["update_task_status"]
    assert not verdict.db_check["db_match"]


def test_hallucinated_tools_do_not_abort_the_replay_when_a_run_has_them():
    task = mock_task({"actions": [COMPLETE], "reward_basis": ["DB"]})
    run = called("delete_everything", error=True) + called(COMPLETE["name"], **COMPLETE["arguments"])
    assert score_run(task, run, "user_stop").reward == 1


def test_unsynced_gold_gives_the_public_diagnostic_value_when_asked_for():
    task = telecom("user_abroad_roaming_disabled_on")
    run = called("enable_roaming", **LINE)
    assert score_run(task, run, "user_stop").db_check["db_match"]
    assert not score_run(task, run, "user_stop", sync_gold=False).db_check["db_match"]


# --------------------------------------------------------------------------------------------------- ENV_ASSERTION


def test_env_assertions_are_checked_on_the_replayed_run_when_the_fault_is_mended():
    task = telecom("data_mode_off")
    assert score_run(task, called("toggle_data", "user"), "user_stop").reward == 1
    assert score_run(task, called("toggle_data", "user") * 2, "user_stop").reward == 0


def test_customers_tool_is_a_no_op_when_the_agent_calls_it_but_works_when_solo():
    task = telecom("data_mode_off")
    run = called("toggle_data", "assistant")
    assert [score_run(task, run, "user_stop", solo=solo).reward for solo in (False, True)] == [0, 1]


# ----------------------------------------------------------------------------------------------------- COMMUNICATE


@pytest.mark.parametrize(
    ("wanted", "text", "plain", "strict"),
    [
        ("20", "It costs 1200 dollars", True, False),
        ("20", "It costs 20.50", True, False),
        ("20", "It costs 20. Fine", True, True),
        ("20", "It costs $20.00", True, True),
        ("1628", "In all $1,628.00", True, True),
        ("1628.0", "In all 1628", False, True),
        ("54.04", "That is 54.040", True, True),
        ("54.04", "That is 154.04", True, False),
        ("Gate 5", "gate 51", True, False),
        ("Gate 5", "Go to GATE 5, please", True, True),
        ("327", "Nothing", False, False),
    ],
)
def test_numbers_match_as_whole_numbers_only_when_strict(wanted, text, plain, strict):
    found = [communicate_checks([wanted], [text], mode)[0]["met"] for mode in (False, True)]
    assert found == [plain, strict]


def test_only_the_agents_texts_count_when_something_must_be_said():
    task = mock_task({"communicate_info": ["42"], "reward_basis": ["COMMUNICATE"]})
    asked = [Message("user", "Is it 42?"), *called("get_users"), ToolMessage("x", "42")]
    assert score_run(task, asked, "user_stop").reward == 0
    assert score_run(task, asked + said("It is 42."), "user_stop").reward == 1


def test_strict_value_is_reported_beside_when_the_plain_one_counts():
    task = mock_task({"communicate_info": ["20"], "reward_basis": ["COMMUNICATE"]})
    verdict = score_run(task, said("1200"), "user_stop")
    assert verdict.reward == 1 and verdict.info["communicate_strict"] is False
    assert score_run(task, said("1200"), "user_stop", communicate="strict").reward == 0


# ---------------------------------------------------------------------------------------------------------- ACTION


def action_reward(action, run, compare="strict", solo=False):
    """The reward of a task whose only gold action this is."""
    task = mock_task({"actions": [action], "reward_basis": ["ACTION"]})
    return score_run(task, run, "user_stop", compare_actions=compare, solo=solo).reward


def test_action_matches_over_its_compare_args_when_arguments_differ():
    run = called("update_task_status", task_id="task_1", status="pending")
    assert action_reward(COMPLETE, run) == 0
    assert action_reward({**COMPLETE, "compare_args": ["task_id"]}, run) == 1
    assert action_reward({**COMPLETE, "compare_args": []}, called("update_task_status")) == 1


def test_action_matches_over_the_predicted_keys_when_compare_args_is_null():
    assert action_reward(COMPLETE, called("update_task_status", status="completed")) == 1


def test_action_needs_the_right_side_and_success_when_not_upstream():
    by_user = called(COMPLETE["name"], "user", **COMPLETE["arguments"])
    failed = called(COMPLETE["name"], error=True, **COMPLETE["arguments"])
    assert [action_reward(COMPLETE, run) for run in (by_user, failed)] == [0, 0]
    assert [action_reward(COMPLETE, run, "upstream") for run in (by_user, failed)] == [1, 1]


def test_customers_actions_match_when_a_solo_agent_makes_them():
    action = {"name": "dismiss_notification", "arguments": {"notification_id": "n"}, "requestor": "user"}
    run = called("dismiss_notification", notification_id="n")
    assert [action_reward(action, run, solo=solo) for solo in (False, True)] == [0, 1]


def test_numbers_match_when_one_is_whole_and_the_other_a_fraction():
    action = {"name": "create_task", "arguments": {"n": 25.0}}
    assert action_reward(action, called("create_task", n=25)) == 1


# ---------------------------------------------------------------------------------------------------- NL_ASSERTION


class Judge:
    """A judge that gives the answers it was told to give, one after another."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def __call__(self, messages, tools=None, tool_choice=None, seed=None):
        """The next answer."""
        self.asked.append(messages)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"content": answer}


NICE = {"nl_assertions": ["The agent is kind"], "reward_basis": ["DB", "NL_ASSERTION"]}


def test_run_is_unjudged_and_not_passed_when_there_is_no_judge():
    verdict = score_run(mock_task(NICE), [], "user_stop")
    assert (verdict.reward, verdict.unjudged) == (0.0, True)
    assert verdict.reward_breakdown == {"DB": 1.0, "NL_ASSERTION": None}


def test_run_is_failed_not_unjudged_when_another_component_fails():
    task = mock_task({**NICE, "actions": [COMPLETE]})
    assert not score_run(task, [], "user_stop").unjudged
    assert not score_run(mock_task(NICE), [], "max_steps").unjudged


@pytest.mark.parametrize("met", [True, False])
def test_judges_verdict_and_reason_count_when_it_answers(met):
    judge = Judge("Sure: " + json.dumps([{"statement": "x", "reason": "it says so", "met": met}]))
    verdict = score_run(mock_task(NICE), said("Dear friend"), "user_stop", judge=judge)
    assert verdict.reward == float(met) and verdict.nl_assertions[0]["justification"] == "it says so"
    assert "Dear friend" in judge.asked[0][1]["content"] and "1. The agent is kind" in judge.asked[0][1]["content"]


@pytest.mark.parametrize("answer", ["yes", "[1]", "[]", '[{"met": "true"}]', "[" * 9999, TimeoutError("down")])
def test_run_is_unjudged_when_the_judges_answers_cannot_be_read(answer):
    verdict = score_run(mock_task(NICE), [], "user_stop", judge=Judge(answer, answer))
    assert verdict.unjudged and verdict.nl_assertions[0]["met"] is None


def test_judge_is_asked_again_when_its_first_answer_cannot_be_read():
    judge = Judge("hm", '[{"met": true, "reason": "ok"}]')
    assert score_run(mock_task(NICE), [], "user_stop", judge=judge).reward == 1


# -------------------------------------------------------------------------------------------------- other verdicts


def test_matched_gold_actions_are_counted_by_kind_when_scored():
    task = telecom("overdue_bill_suspension")
    run = called("send_payment_request", customer_id="C1001", bill_id="B1234321") + called("make_payment", "user")
    assert score_run(task, run, "user_stop").info["matched"] == {"write": [2, 4]}


@pytest.mark.parametrize(
    ("run", "rules"),
    [
        (called("resume_line", **LINE), ["resume_with_unpaid_bill"]),
        (called("refuel_data", **LINE, gb_amount=2.5), ["refuel_above_2_gb"]),
        (called("refuel_data", **LINE, gb_amount=1.5) * 2, ["refuel_above_2_gb"]),
        (called("refuel_data", **LINE, gb_amount=2.0), []),
    ],
)
def test_policy_tripwires_are_listed_with_their_turn_when_a_rule_is_broken(run, rules):
    task = telecom("overdue_bill_suspension")
    found = score_run(task, run, "user_stop").info["tripwires"]
    assert [item["rule"] for item in found] == rules
    assert all(run[item["turn_idx"]].tool_calls[0].name == item["tool"] for item in found)


def test_contract_end_is_a_tripwire_when_the_bill_is_paid_first():
    task = telecom("contract_end_suspension")
    pay = called("send_payment_request", customer_id="C1001", bill_id="B1234321") + called("make_payment", "user")
    found = score_run(task, pay + called("resume_line", **LINE), "user_stop").info["tripwires"]
    assert [item["rule"] for item in found] == ["resume_after_contract_end"]


def test_transfer_is_premature_when_the_task_can_be_solved():
    run = called("transfer_to_human_agents", summary="x")
    atoms = ("airplane_mode_on", "lock_sim_card_pin")
    assert [score_run(telecom(atom), run, "user_stop").info["premature_transfer"] for atom in atoms] == [
        True,
        False,
    ]
    assert score_run(telecom(atoms[1]), run, "user_stop").reward == 1


def test_every_base_task_scores_1_when_its_gold_is_performed():
    for task in load_tasks("telecom"):
        run = [m for a in task.actions for m in called(a.name, a.requestor, **a.arguments)]
        assert score_run(task, run, "user_stop").reward == 1, task.id


@needs_data
@pytest.mark.parametrize(
    ("domain", "passed", "same_state"), [("airline", 23, 24), ("retail", 6, 11), ("telecom", 0, 20)]
)
def test_idle_agent_scores_as_measured_when_it_does_nothing(domain, passed, same_state):
    verdicts = [score_run(task, [], "user_stop") for task in upstream_tasks(domain).values()]
    assert sum(verdict.success for verdict in verdicts) == passed
    assert sum(verdict.db_check["db_match"] for verdict in verdicts) == same_state


@needs_data
def test_gold_speaker_scores_as_by_construction_when_it_says_every_string():
    passed, unjudged, database = 0, 0, 0
    for domain in ("airline", "retail"):
        for task in upstream_tasks(domain).values():
            _, errors = gold_replay(task, get_domain(domain, task.data_dir))
            failed = [name for name, _ in errors]
            run = [m for a in task.actions if a.name not in failed for m in called(a.name, **a.arguments)]
            verdict = score_run(task, run + said(*task.communicate_info), "user_stop")
            passed, unjudged = passed + verdict.success, unjudged + verdict.unjudged
            database += verdict.db_check["db_match"]
    assert (passed, unjudged, database) == (50 + 74, 40, 164)
