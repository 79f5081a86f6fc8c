"""The world: ownership of tools, checked arguments, roll-back, replay, golden speeds, and independence of episodes."""

import json

import pytest

from hf_pipelines.tau2_bench import (
    EnvCall,
    Environment,
    Message,
    ReplayError,
    ToolCall,
    ToolError,
    ToolMessage,
    get_domain,
    load_tasks,
    user_view,
)
from hf_pipelines.tau2_bench.domains.calculator import calculate
from hf_pipelines.tau2_bench.domains.telecom.phone_setup import TelecomUserTools

LINE = {"customer_id": "C1001", "line_id": "L1002"}
SMITH = EnvCall("user", "set_user_info", {"name": "John Smith", "phone_number": "555-123-2002"})


@pytest.fixture
def env():
    env = Environment(get_domain("telecom"))
    env.set_state(initialization_actions=[SMITH, EnvCall("user", "simulate_network_search")])
    return env


def user(env, name, **arguments):
    """A tool of the customer."""
    return env.call(name, arguments, "user")


def answer(env, name, arguments, requestor="assistant"):
    """The tool message that a call gets."""
    return env.respond(ToolCall("call", name, arguments, requestor))


# ------------------------------------------------------------------------------------------------------- ownership


def test_sides_own_thirteen_and_thirty_tools_when_listed(env):
    names = {side: [tool["function"]["name"] for tool in env.tools(side)] for side in ("assistant", "user")}
    assert (len(names["assistant"]), len(names["user"])) == (13, 30)
    assert not set(names["assistant"]) & set(names["user"])


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("no_such_tool", {}, "no tool 'no_such_tool'"),
        ("toggle_data", {}, "tool of the customer"),
        ("set_data_usage", {**LINE, "data_used_gb": 1.0}, "no tool"),
        ("assert_line_status", {**LINE, "expected_status": "Active"}, "no tool"),
        ("refuel_data", {**LINE}, "missing argument(s): gb_amount"),
        ("refuel_data", {**LINE, "gb_amount": 1, "free": True}, "unknown argument 'free'"),
        ("refuel_data", {**LINE, "gb_amount": "1"}, "gb_amount must be a finite number, not text"),
        ("refuel_data", {**LINE, "gb_amount": True}, "not a boolean"),
        ("refuel_data", {**LINE, "gb_amount": float("nan")}, "finite"),
        ("refuel_data", {**LINE, "gb_amount": 10**400}, "too large"),
        ("refuel_data", {**LINE, "gb_amount": -1}, "more than 0"),
        ("refuel_data", None, "must be a JSON object"),
        ("refuel_data", "[1]", "must be a JSON object"),
        ("get_bills_for_customer", {"customer_id": "C1001", "limit": 2.5}, "whole number"),
        ("get_details_by_id", {"id": ""}, "starts with none of"),
        ("get_details_by_id", {"id": ["L1002"]}, "must be text"),
    ],
)
def test_call_is_an_error_message_and_changes_nothing_when_it_is_wrong(env, name, arguments, words):
    before = env.hash()
    message = answer(env, name, arguments)
    assert message.error and words in message.content
    assert env.hash() == before


def test_agent_tool_is_refused_when_the_customer_calls_it(env):
    assert "tool of the agent" in answer(env, "refuel_data", {**LINE, "gb_amount": 1.0}, "user").content


def test_assistant_holds_both_toolkits_when_solo():
    env = Environment(get_domain("telecom"), solo=True)
    assert len(env.tools("assistant")) == 43 and env.tools("user") == []
    assert not answer(env, "toggle_data", {}).error
    assert answer(env, "toggle_data", {}).requestor == "assistant"


# ------------------------------------------------------------------------------------------------------- roll-back


def test_state_is_rolled_back_when_a_tool_raises_half_way(env, monkeypatch):
    def broken(self):
        """Write, then fail."""
        self.edit()["battery_level"] = 0
        raise ZeroDivisionError("half-way")

    function = TelecomUserTools.functions["toggle_data"]
    monkeypatch.setitem(TelecomUserTools._tools, "toggle_data", type(function)("toggle_data", "write", broken))
    before = env.hash()
    message = answer(env, "toggle_data", {}, "user")
    assert message.error and "half-way" in message.content
    assert env.hash() == before and user(env, "check_status_bar").endswith("80%")


def test_reads_never_touch_the_hash_when_all_are_called(env):
    before, arguments = env.hash(), {"app_name": "messaging", "phone_number": "555-123-2002", "id": "L1002", **LINE}
    arguments |= {"full_name": "John Smith", "dob": "1985-06-15"}
    for side, kit in (("assistant", env.agent), ("user", env.user)):
        for name, function in kit.tools().items():
            if function.kind == "read":
                needed = {key: arguments[key] for key in function.signature.required}
                assert not answer(env, name, needed, side).error
    assert env.hash() == before


def test_result_is_the_callers_own_when_it_is_changed(env):
    before = env.hash()
    env.call("get_customer_by_id", {"customer_id": "C1001"})["line_ids"].clear()
    assert env.hash() == before


# --------------------------------------------------------------------------------------------------- golden values


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "275.0 Mbps (Excellent)"),
        ([("set_network_mode_preference", {"mode": "4g_only"})], "44.0 Mbps (Good)"),
        ([("set_network_mode_preference", {"mode": "3g_only"})], "1.5 Mbps (Poor)"),
        ([("set_network_mode_preference", {"mode": "2g_only"})], "0.05 Mbps (Very Poor)"),
        ([("toggle_data_saver_mode", {})], "55.0 Mbps (Good)"),
        ([("break_vpn", {})], "27.5 Mbps (Good)"),
        ([("break_vpn", {}), ("toggle_data_saver_mode", {})], "5.5 Mbps (Fair)"),
        ([("toggle_data", {})], "no connection"),
    ],
)
def test_speed_has_the_golden_value_when_the_phone_is_set(env, steps, text):
    for name, arguments in steps:
        env.run(EnvCall("user", name, arguments))
    assert text in user(env, "run_speed_test")


def test_service_returns_at_the_next_search_only_when_a_line_is_resumed(env):
    env.call("suspend_line", {**LINE, "reason": "test"})
    assert env.user.facts()["service"] == "connected"
    user(env, "reboot_device")
    assert env.user.facts()["service"] == "no_service"
    env.call("resume_line", LINE)
    assert env.user.facts()["service"] == "no_service"
    user(env, "reboot_device")
    assert env.user.facts()["service"] == "connected"


def test_bill_turns_paid_and_the_next_is_asked_when_the_customer_pays(env):
    assert "no payment request" in user(env, "make_payment")
    env.call("send_payment_request", {"customer_id": "C1001", "bill_id": "B1002"})
    with pytest.raises(ToolError, match="already awaits payment"):
        env.call("send_payment_request", {"customer_id": "C1001", "bill_id": "B1001"})
    assert "B1002: $150.00" in user(env, "check_payment_request")
    user(env, "make_payment")
    assert env.call("get_details_by_id", {"id": "B1002"})["status"] == "Paid"
    assert "no payment request" in user(env, "check_payment_request")


def test_data_stops_at_the_limit_and_returns_when_refueled(env):
    env.run(EnvCall("assistant", "set_data_usage", {**LINE, "data_used_gb": 15.0}))  # the limit itself counts
    assert "no connection" in user(env, "run_speed_test")
    env.call("refuel_data", {**LINE, "gb_amount": 0.5})
    assert "Excellent" in user(env, "run_speed_test")
    assert env.call("get_details_by_id", {"id": "B1003"})["total_due"] == 1.0


def test_refuel_makes_a_draft_bill_when_the_customer_has_none(env):
    env.call("refuel_data", {"customer_id": "C1002", "line_id": "L1004", "gb_amount": 2})
    bill = env.call("get_bills_for_customer", {"customer_id": "C1002", "limit": 1})[0]
    assert (bill["status"], bill["period_start"], bill["total_due"]) == ("Draft", "2025-03-01", 0.2)


def test_reset_of_access_point_takes_effect_at_the_restart_only_when_asked(env):
    env.run(EnvCall("user", "break_apn_mms_setting"))
    user(env, "reset_apn_settings")
    assert "cannot" in user(env, "can_send_mms")
    user(env, "reboot_device")
    assert "can send" in user(env, "can_send_mms")


# -------------------------------------------------------------------------------------------- independent episodes


def script(env):
    """A run that touches VPN, settings and bills, as a generator so that two can be interleaved."""
    for name in ("connect_vpn", "toggle_wifi_calling", "disconnect_vpn", "connect_vpn"):
        user(env, name)
        yield
    env.call("refuel_data", {**LINE, "gb_amount": 1})
    yield


def test_interleaved_episodes_equal_sequential_ones_when_one_breaks_its_vpn():
    def fresh(broken):
        """An environment; in the broken one the VPN performs poorly."""
        env = Environment(get_domain("telecom"))
        env.set_state(initialization_actions=[SMITH, *([EnvCall("user", "break_vpn")] if broken else [])])
        return env

    sequential = [fresh(True), fresh(False)]
    for env in sequential:
        list(script(env))
    mixed = [fresh(True), fresh(False)]
    for _ in zip(*(script(env) for env in mixed), strict=True):
        pass
    assert [env.hash() for env in mixed] == [env.hash() for env in sequential]
    assert "excellent" in user(mixed[1], "check_vpn_status")


# ------------------------------------------------------------------------------------------------ start and replay


def conversation(*calls):
    """A conversation of the agent's calls with their recorded results."""
    messages = []
    for place, (name, arguments, content) in enumerate(calls):
        messages.append(Message("assistant", tool_calls=[ToolCall(f"c{place}", name, arguments)]))
        messages.append(ToolMessage(f"c{place}", content))
    return messages


MADE = '{"task_id":"task_2","title":"Plan","description":null,"status":"pending"}'


def test_history_replays_when_results_agree_as_json():
    env = Environment(get_domain("mock"))
    env.set_state(message_history=conversation(("create_task", {"user_id": "user_1", "title": "Plan"}, MADE)))
    assert env.agent.store["tasks"]["task_2"]["title"] == "Plan"


def test_replay_is_refused_when_a_result_differs_and_tolerated_when_not_strict():
    history = conversation(("create_task", {"user_id": "user_1", "title": "Plan"}, MADE.replace("Plan", "Plot")))
    with pytest.raises(ReplayError, match="create_task"):
        Environment(get_domain("mock")).set_state(message_history=history)
    assert len(Environment(get_domain("mock")).set_state(message_history=history, strict=False)) == 1


def test_unknown_tools_are_skipped_when_replayed():
    env = Environment(get_domain("mock"))
    before = env.hash()
    history = conversation(("no_such_tool", {}, "Error: there is no tool"), ("dismiss_notification", {}, "Error"))
    assert env.replay(history) == [] and env.hash() == before


def test_initialization_data_changes_the_named_side_only_when_merged():
    env = Environment(get_domain("mock"))
    user_before = env.hash()[1]
    env.set_state({"agent_data": {"tasks": {"task_1": {"status": "completed"}}}})
    assert env.agent.store["tasks"]["task_1"]["title"] == "Test task"
    assert env.agent.store["tasks"]["task_1"]["status"] == "completed" and env.hash()[1] == user_before


def test_customers_side_is_refused_when_the_domain_has_none(tmp_path):
    (tmp_path / "retail").mkdir()
    (tmp_path / "retail" / "db.json").write_text(json.dumps({"products": {}, "users": {}, "orders": {}}))
    env = Environment(get_domain("retail", tmp_path))
    with pytest.raises(ValueError, match="no customer side"):
        env.set_state({"user_data": {"x": {}}})
    with pytest.raises(ValueError, match="no solo mode"):
        Environment(get_domain("retail", tmp_path), solo=True)


def test_numbers_become_text_when_compat_text_is_asked(env):
    compat = Environment(get_domain("telecom"), compat_text=True)
    assert json.loads(answer(env, "get_data_usage", LINE).content)["data_limit_gb"] == 15.0
    assert json.loads(answer(compat, "get_data_usage", LINE).content)["data_limit_gb"] == "15.0"
    assert json.loads(answer(compat, "get_details_by_id", {"id": "P1002"}).content)["data_limit_gb"] == 15.0


def test_users_view_holds_its_own_calls_and_results_when_the_agent_calls_too():
    own = [Message("user", tool_calls=[ToolCall("u", "toggle_data", {}, "user")]), ToolMessage("u", "off", "user")]
    other = conversation(("get_users", {}, "[]"))
    texts = [Message("assistant", "Hello"), Message("user", "Hi")]
    assert user_view([*texts, *other, *own]) == [*texts, *own]


def test_tasks_start_states_are_equal_when_built_twice():
    for task in load_tasks("telecom", "small"):
        domain = get_domain("telecom")
        assert Environment.for_task(domain, task).hash() == Environment.for_task(domain, task).hash()


# ------------------------------------------------------------------------------------------------------ calculator


@pytest.mark.parametrize(
    ("text", "value"),
    [("2 * ((350 - 122) + (499 - 127))", "1200.0"), ("-3 - -(.5)", "-2.5"), ("1/3", "0.33"), ("007+1.", "8.0")],
)
def test_calculate_gives_the_value_when_the_text_is_arithmetic(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("2**9999999", "__import__", "1//2", "", "(", "1 2", "1/0", "1e5", "(" * 999, "1" * 1001, "()", "1..2"),
        *("9" * 999, "*".join(["9" * 9] * 99)),
    ],
)
def test_calculate_is_refused_when_the_text_is_anything_else(text):
    with pytest.raises(ToolError, match="expression"):
        calculate(text)
