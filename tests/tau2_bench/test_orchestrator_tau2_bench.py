"""Whose turn it is, what a player may answer, and how a run ends."""

import random

import pytest

from hf_pipelines.tau2_bench import (
    ContextWindowExceeded,
    InfrastructureError,
    MalformedOutput,
    Message,
    Orchestrator,
    Player,
    Task,
    ToolCall,
    ToolMessage,
    load_tasks,
    message_from_dict,
    messages_from_dicts,
    score_run,
    trial_seeds,
)
from hf_pipelines.tau2_bench.orchestrator import GREETING


def text(content):
    """A message of text."""
    return Message("assistant", content)


def calls(*names, **arguments):
    """A message of calls; ids are left to the orchestrator."""
    return Message("assistant", tool_calls=[ToolCall("", name, arguments) for name in names])


class Script:
    """A player that gives the answers it was told to give; the last one is repeated."""

    def __init__(self, *answers):
        self.answers, self.place = answers, 0
        self.views, self.notices = [], []

    def start(self, briefing):
        """Keep the briefing and start over."""
        self.briefing, self.place = briefing, 0

    def respond(self, view, notice=None):
        """The next answer."""
        self.views.append(list(view))
        self.notices.append(notice)
        answer = self.answers[min(self.place, len(self.answers) - 1)]
        self.place += 1
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer


STOP = Script(text("###STOP###"))


def task(**fields):
    """A task of the toy domain."""
    return Task({"id": "t", "ticket": "Do it.", "evaluation_criteria": None, **fields}, "mock")


def play(agent, user=None, mode="dual", the_task=None, **arguments):
    """Run an episode."""
    return Orchestrator(the_task or task(), agent, user or STOP, mode=mode, **arguments).run()


# ----------------------------------------------------------------------------------------------------------- turns


def test_trial_seeds_have_the_golden_values_when_the_seed_is_300():
    assert trial_seeds(300, 4) == [626729, 373753, 361454, 1567]
    with pytest.raises(ValueError, match="trials=0"):
        trial_seeds(300, 0)


def test_global_random_numbers_are_untouched_when_seeds_and_tasks_are_drawn():
    before = random.getstate()
    trial_seeds(300, 4)
    load_tasks("telecom", "base")
    assert random.getstate() == before


def test_agent_greets_and_the_customer_is_next_when_there_is_no_history():
    run = play(Script(text("Yes?")), Script(text("Hello"), text("Bye ###STOP###")))
    assert [(m.role, m.content) for m in run.messages] == [
        ("assistant", GREETING),
        ("user", "Hello"),
        ("assistant", "Yes?"),
        ("user", "Bye ###STOP###"),
    ]
    assert (run.termination, run.steps, run.errors) == ("user_stop", 3, 0)
    assert [m.turn_idx for m in run.messages] == [0, 1, 2, 3]


@pytest.mark.parametrize("mark", ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"])
def test_run_ends_when_the_customer_writes_a_stop_mark(mark):
    assert play(Script(text("x")), Script(text(f"ok {mark}"))).termination == "user_stop"


def test_run_goes_on_when_the_agent_or_a_tool_result_holds_a_stop_mark():
    title = "###STOP###"
    agent = Script(calls("create_task", user_id="user_1", title=title), text(title), text("###TRANSFER###"))
    run = play(agent, Script(text("Hello"), text("go on"), text("Bye ###STOP###")))
    assert run.steps == 7 and title in run.messages[3].content


def test_calls_return_to_their_sender_in_order_when_a_message_has_several():
    user = Script(calls("check_notifications", "check_notifications"), text("###STOP###"))
    run = play(Script(text("x")), user)
    roles = [m.role for m in run.messages]
    assert roles == ["assistant", "user", "tool", "tool", "user"]
    made = run.messages[1].tool_calls
    assert [m.id for m in run.messages[2:4]] == [call.id for call in made] and made[0].id != made[1].id
    assert {m.requestor for m in run.messages[2:4]} == {"user"}


def test_sides_never_see_each_others_calls_when_both_call():
    agent = Script(calls("get_users"), text("Done"))
    user = Script(calls("check_notifications"), text("Hi"), text("###STOP###"))
    play(agent, user)
    assert [m.role for m in agent.views[-1]] == ["assistant", "user", "assistant", "tool"]
    assert [m.role for m in user.views[-1]] == ["assistant", "user", "tool", "user", "assistant"]
    assert user.views[-1][2].requestor == "user" and agent.views[-1][3].requestor == "assistant"


def test_dialogue_goes_on_after_the_last_message_when_there_is_history():
    the_task = next(t for t in load_tasks("mock") if t.id == "update_task_with_message_history")
    agent = Script(calls("update_task_status", task_id="task_2", status="completed"), text("Done"))
    run = play(agent, Script(text("Complete task_2"), text("###STOP###")), the_task=the_task)
    assert [m.role for m in run.messages[:5]] == ["user", "assistant", "tool", "assistant", "user"]
    assert score_run(the_task, run.messages, run.termination).db_check["db_match"]


def test_open_call_runs_first_when_the_history_ends_with_it():
    history = [{"role": "assistant", "tool_calls": [{"id": "c", "name": "get_users", "arguments": {}}]}]
    agent = Script(text("x"))
    run = play(agent, the_task=task(initial_state={"message_history": history}))
    assert [m.role for m in run.messages] == ["assistant", "tool", "assistant", "user"]


# ------------------------------------------------------------------------------------------------------------ solo


def test_done_is_stored_as_the_stop_text_when_a_solo_agent_finishes():
    run = play(Script(calls("check_notifications"), calls("done")), mode="solo")
    assert (run.termination, run.messages[-1].content) == ("agent_stop", "###STOP###")
    assert {m.requestor for m in run.messages if isinstance(m, ToolMessage)} == {"assistant"}


def test_verdict_is_agent_error_when_a_solo_agent_answers_with_text():
    run = play(Script(calls("get_users"), text("Hello?")), mode="solo")
    assert run.termination == "agent_error" and "text" in run.reason
    assert score_run(task(), run.messages, run.termination, solo=True).reward == 0


def test_solo_is_refused_when_the_task_has_no_ticket():
    with pytest.raises(ValueError, match="has no ticket"):
        play(Script(calls("done")), mode="solo", the_task=task(ticket=None))


def test_mode_is_refused_when_it_is_unknown():
    with pytest.raises(ValueError, match="mode='duo'"):
        play(Script(text("x")), mode="duo")


def test_customer_is_required_when_the_mode_is_dual():
    with pytest.raises(ValueError, match="needs a customer"):
        Orchestrator(task(), Script(text("x")))


@pytest.mark.parametrize(
    ("mode", "has_ticket", "has_plan", "count"),
    [
        ("dual", False, False, 13),
        ("solo", True, False, 44),
        ("oracle", False, True, 13),
        ("oracle_solo", True, True, 44),
    ],
)
def test_agent_is_briefed_by_mode_when_a_run_starts(mode, has_ticket, has_plan, count):
    the_task = load_tasks(
        "telecom", task_ids=["[service_issue]airplane_mode_on|overdue_bill_suspension[PERSONA:None]"]
    )[0]
    agent = Script(calls("done") if "solo" in mode else text("x"))
    play(agent, mode=mode, the_task=the_task, seed=5)
    briefing = agent.briefing
    assert ("<ticket>" in briefing.instructions, "<plan>" in briefing.instructions) == (has_ticket, has_plan)
    assert (len(briefing.tools), briefing.mode, briefing.seed) == (count, mode, 5)
    if has_plan:
        steps = briefing.instructions.split("<plan>")[1]
        verb = "do" if "solo" in mode else "have the customer do"
        assert f"1. {verb} toggle_airplane_mode()" in steps
        assert '2. do send_payment_request(customer_id="C1001", bill_id="B1234321")' in steps


def test_plan_names_tools_only_when_arguments_are_hidden():
    the_task = load_tasks(
        "telecom", task_ids=["[service_issue]airplane_mode_on|overdue_bill_suspension[PERSONA:None]"]
    )[0]
    agent = Script(text("x"))
    play(agent, mode="oracle", the_task=the_task, hide_arguments=True)
    assert "2. do send_payment_request\n" in agent.briefing.instructions


def test_customer_is_told_the_scenario_and_nothing_of_the_goal_when_a_run_starts():
    the_task = next(t for t in load_tasks("telecom") if t.persona_name == "Hard")
    user = Script(text("###STOP###"))
    play(Script(text("x")), user, the_task=the_task)
    assert user.briefing.persona == the_task.persona and len(user.briefing.tools) == 30
    assert the_task.instructions["reason_for_call"] in user.briefing.instructions
    assert "assert" not in user.briefing.instructions


# ------------------------------------------------------------------------------------------------------------ ends


def test_run_is_cut_off_at_max_steps_when_nobody_stops():
    run = play(Script(text("x")), Script(text("y")), max_steps=7)
    assert (run.termination, run.steps) == ("max_steps", 7)


def test_limit_waits_for_the_answer_when_a_call_is_open():
    run = play(Script(calls("get_users")), Script(text("y")), max_steps=2)
    assert (run.steps, run.messages[-1].role) == (3, "tool")


def test_run_is_cut_off_when_ten_calls_have_failed():
    run = play(Script(calls("nothing")), Script(text("y")))
    assert (run.termination, run.errors) == ("too_many_errors", 10)


def test_run_is_cut_off_when_it_takes_too_long():
    assert play(Script(text("x")), Script(text("y")), timeout_s=0).termination == "timeout"


@pytest.mark.parametrize(
    ("error", "termination"),
    [
        (ContextWindowExceeded("4,000 of 2,048 tokens"), "context_window_exceeded"),
        (InfrastructureError("503"), "infrastructure_error"),
        (RuntimeError("bug"), "unexpected_error"),
    ],
)
@pytest.mark.parametrize("side", ["agent", "user"])
def test_run_ends_with_a_name_and_a_reason_when_a_player_raises(error, termination, side):
    broken = Script(error)
    run = play(broken, Script(text("y"))) if side == "agent" else play(Script(text("x")), broken)
    assert run.termination == termination and str(error) in run.reason


def test_run_ends_with_a_name_when_a_player_cannot_start():
    class Broken(Script):
        def start(self, briefing):
            """Fail."""
            raise OSError("no weights")

    run = play(Broken())
    assert run.termination == "unexpected_error" and "no weights" in run.reason


@pytest.mark.parametrize("limit", ["max_steps", "max_errors"])
def test_limit_is_refused_when_it_is_less_than_1(limit):
    with pytest.raises(ValueError, match=f"{limit}=0"):
        play(Script(text("x")), **{limit: 0})


# ------------------------------------------------------------------------------------------------ unusable answers


@pytest.mark.parametrize(
    "empty", [text(""), text("  \n"), text(None), Message("assistant", tool_calls=[]), None, "text"]
)
def test_player_is_asked_again_with_a_notice_when_its_answer_is_empty(empty):
    agent = Script(empty, text("Yes?"))
    run = play(agent, Script(text("y"), text("###STOP###")))
    assert (run.termination, run.errors) == ("user_stop", 1)
    assert agent.notices[0] is None and agent.notices[1]
    assert run.notes[0].side == "assistant"


def test_run_ends_with_agent_error_when_four_answers_are_unusable():
    agent = Script(MalformedOutput("broken JSON"))
    run = play(agent, Script(text("y")))
    assert (run.termination, len(agent.views), run.errors) == ("agent_error", 4, 4)
    assert "broken JSON" in run.reason


def test_run_ends_with_user_error_when_the_customers_second_answer_is_unusable_too():
    user = Script(text(""))
    run = play(Script(text("x")), user)
    assert (run.termination, len(user.views)) == ("user_error", 2)


def test_calls_win_and_text_is_kept_aside_when_a_message_has_both():
    agent = Script(Message("assistant", "Let me look", [ToolCall("a", "get_users")]), text("Done"))
    run = play(agent, Script(text("y"), text("###STOP###")))
    message = run.messages[2]
    assert (message.content, message.raw_data) == (None, {"dropped_text": "Let me look"})


def test_only_the_first_call_runs_when_one_call_per_turn_is_asked():
    agent = Script(calls("get_users", "get_users"), text("Done"))
    run = play(agent, Script(text("y"), text("###STOP###")), one_call_per_turn=True)
    assert len(run.messages[2].tool_calls) == 1 and len(run.notes) == 1


def test_ids_are_renumbered_and_noted_when_they_are_there_twice():
    twice = Message("assistant", tool_calls=[ToolCall("a", "get_users"), ToolCall("a", "get_users")])
    run = play(Script(twice, text("Done")), Script(text("y"), text("###STOP###")))
    ids = [call.id for call in run.messages[2].tool_calls]
    assert ids[0] == "a" and len(set(ids)) == 2 and "twice" in run.notes[0].what


@pytest.mark.parametrize(
    ("arguments", "error"),
    [('{"task_id": "task_1", "status": "completed"}', False), ("", True), ("[1]", True), ("{", True), ([1], True)],
)
def test_arguments_are_read_from_json_text_or_refused_when_they_are_no_object(arguments, error):
    call = Message("assistant", tool_calls=[ToolCall("a", "update_task_status", arguments)])
    run = play(Script(call, text("Done")), Script(text("y"), text("###STOP###")))
    assert run.messages[3].error == error


def test_requestor_is_the_sender_when_a_player_claims_another():
    forged = Message("user", tool_calls=[ToolCall("a", "toggle_data", {}, "user")])
    the_task = load_tasks("telecom")[0]
    run = play(Script(forged, text("Done")), Script(text("y"), text("###STOP###")), the_task=the_task)
    assert run.messages[2].role == "assistant" and run.messages[3].error


def test_script_is_a_player_when_it_has_both_methods():
    assert isinstance(STOP, Player)


# --------------------------------------------------------------------------------------------------------- storage


def test_messages_round_trip_when_stored():
    run = play(Script(calls("get_users"), text("Done")), Script(text("y"), text("###STOP###")))
    stored = [message.to_dict() for message in run.messages]
    assert [message_from_dict(data) for data in stored] == run.messages == messages_from_dicts(stored)
    assert set(stored[2]) == {"role", "content", "tool_calls", "turn_idx", "timestamp", "cost", "usage", "raw_data"}
    assert set(stored[3]) == {"role", "id", "content", "requestor", "error", "turn_idx", "timestamp"}


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"role": "robot"}], "role 'robot'"),
        ([{"role": "tool", "id": "c", "content": "x"}], "answers no call"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "arguments": {}}]}, {"role": "user"}],
            "has no tool message",
        ),
    ],
)
def test_stored_conversation_is_refused_when_calls_and_results_do_not_pair_up(records, words):
    with pytest.raises(ValueError, match=words):
        messages_from_dicts(records)


def test_runs_are_equal_when_repeated_with_the_same_players():
    def once():
        """A run without its times."""
        run = play(Script(calls("get_users"), text("Done")), Script(text("y"), text("###STOP###")))
        return [{**m.to_dict(), "timestamp": None} for m in run.messages]

    assert once() == once()
