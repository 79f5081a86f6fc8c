"""The ten mock tasks: one for each feature of the task format, with the public ids and our own wording."""

import json
from typing import Any

from hf_pipelines.tau2_bench.task import Task

Json = dict[str, Any]
PERSONA = "You write briefly and to the point."
REVIEW = {"user_id": "user_1", "title": "Project Review", "description": "Review Q4 project status"}
MEETING = {"user_id": "user_1", "title": "Important Meeting"}
CONTINUE = (
    "You talk about your tasks again. Earlier a task with the id task_2, a project review, was made for you. It is "
    "done now: ask for it to be marked as completed."
)
CONTINUE_TICKET = "The user has finished task_2 and wants it marked as completed."
CONFIRMED = "The agent confirms that the status of the task was changed"
REMEMBERED = "The agent takes up what was said before"


def _action(action_id: str, name: str, **arguments: Any) -> Json:
    return {"action_id": action_id, "name": name, "arguments": arguments, "info": None}


def _complete(task_id: str) -> Json:
    return _action("update_1", "update_task_status", task_id=task_id, status="completed")


def _has_status(side: str, function: str, expected_status: str, **arguments: str) -> Json:
    return {"env_type": side, "func_name": function, "arguments": {**arguments, "expected_status": expected_status}}


def _record(task_id: str, purpose: str, instructions: str, ticket: str | None, criteria: Json, **start: Any) -> Json:
    record: Json = {
        "id": task_id,
        "description": {"purpose": purpose, "notes": None},
        "user_scenario": {"persona": PERSONA, "instructions": instructions},
    }
    if ticket is not None:
        record["ticket"] = ticket
    if start:
        record["initial_state"] = start
    return {**record, "evaluation_criteria": criteria}


def _history() -> list[Json]:
    call = {"id": "call_1", "name": "create_task", "arguments": dict(REVIEW)}
    made = {"task_id": "task_2", "title": REVIEW["title"], "description": REVIEW["description"], "status": "pending"}
    return [
        {"role": "user", "content": "Please make a task for the project review.", "turn_idx": 0},
        {"role": "assistant", "tool_calls": [call], "turn_idx": 1},
        {"role": "tool", "id": "call_1", "content": json.dumps(made), "turn_idx": 2},
        {"role": "assistant", "content": "The task 'Project Review' is there: task_2, pending.", "turn_idx": 3},
    ]


def _records() -> list[Json]:
    meeting = f"You need a task for a meeting. Ask for a new task titled '{MEETING['title']}' for user_1."
    meeting_ticket = f"The user wants a new task titled '{MEETING['title']}' for user_1."
    create = _action("create_1", "create_task", **MEETING)
    created = ["The agent confirms that the task was made"]
    prepared = {"env_type": "assistant", "func_name": "create_task", "arguments": dict(REVIEW)}
    merged = {
        "tasks": {
            "task_2": {"task_id": "task_2", **{k: REVIEW[k] for k in ("title", "description")}, "status": "pending"}
        },
        "users": {"user_1": {"tasks": ["task_1", "task_2"]}},
    }
    note = {"notification_id": "notif_1", "message": "'Test task' was assigned to you.", "task_id": "task_1"}
    inbox = (
        "You have a new notification. Look at your notifications first: task_1 was assigned to you, and you have "
        "already done it. Ask the agent to mark it as completed. When the agent confirms, dismiss the "
        "notification notif_1."
    )
    cannot = "The user wants all of their current tasks deleted."
    return [
        _record(
            "create_task_1",
            "A task is made.",
            meeting,
            meeting_ticket,
            {"actions": [create], "nl_assertions": created},
        ),
        _record(
            "create_task_1_with_env_assertions",
            "A task is made and looked up at the end.",
            meeting,
            meeting_ticket,
            {
                "actions": [create],
                "env_assertions": [_has_status("assistant", "assert_task_status", "pending", task_id="task_2")],
                "nl_assertions": created,
                "reward_basis": ["DB", "ENV_ASSERTION"],
            },
        ),
        _record(
            "create_task_1_nl_eval",
            "Only a judge can tell.",
            f"{meeting} Then ask for a compliment.",
            f"{meeting_ticket} Then the user wants a compliment.",
            {"nl_assertions": ["The task was made", "The user got a compliment"]},
        ),
        _record(
            "update_task_1",
            "A task is completed.",
            "You have finished task_1. Ask for it to be marked as completed.",
            "The user has finished task_1 and wants it marked as completed.",
            {"actions": [_complete("task_1")], "nl_assertions": [CONFIRMED]},
        ),
        _record(
            "update_task_with_message_history",
            "The conversation goes on after a recorded one with a tool call.",
            CONTINUE,
            None,
            {"actions": [_complete("task_2")], "nl_assertions": [REMEMBERED, CONFIRMED]},
            message_history=_history(),
        ),
        _record(
            "update_task_with_initialization_data",
            "The start state is merged from data.",
            CONTINUE,
            CONTINUE_TICKET,
            {"actions": [_complete("task_2")], "communicate_info": ["task_2", "completed"]},
            initialization_data={"agent_data": merged},
        ),
        _record(
            "update_task_with_initialization_actions",
            "The start state is made by a tool.",
            CONTINUE,
            CONTINUE_TICKET,
            {"actions": [_complete("task_2")], "nl_assertions": [REMEMBERED, CONFIRMED]},
            initialization_actions=[prepared],
        ),
        _record(
            "update_task_with_history_and_env_assertions",
            "A recorded conversation, judged by the end state.",
            CONTINUE,
            None,
            {
                "env_assertions": [_has_status("assistant", "assert_task_status", "completed", task_id="task_2")],
                "nl_assertions": [REMEMBERED, CONFIRMED],
                "reward_basis": ["ENV_ASSERTION"],
            },
            message_history=_history(),
        ),
        _record(
            "update_task_with_user_tools",
            "Both sides have something to do.",
            inbox,
            "The user has finished task_1, wants it marked as completed and the notification notif_1 dismissed.",
            {
                "actions": [_complete("task_1")],
                "env_assertions": [
                    {
                        **_has_status("user", "assert_notification_status", "read", notification_id="notif_1"),
                        "assert_value": True,
                    }
                ],
                "nl_assertions": [CONFIRMED],
                "reward_basis": ["DB", "ACTION", "ENV_ASSERTION"],
            },
            initialization_actions=[{"env_type": "user", "func_name": "add_notification", "arguments": note}],
        ),
        _record(
            "impossible_task_1",
            "What no tool can do is handed over.",
            "You want all of your current tasks deleted.",
            cannot,
            {
                "actions": [
                    {**_action("transfer_1", "transfer_to_human_agents", summary=cannot), "compare_args": []},
                ],
                "reward_basis": ["DB", "ACTION"],
            },
        ),
    ]


def mock_tasks() -> list[Task]:
    """The ten tasks, which are also the split `"base"`."""
    return [Task(record, "mock", splits=("base",)) for record in _records()]
