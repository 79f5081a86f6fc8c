"""Mock, a toy with dual control: a to-do list, and a customer with an inbox of notifications."""

import json
from pathlib import Path
from typing import Any, Literal

from hf_pipelines.tau2_bench.domains.base import (
    Domain,
    Toolkit,
    assertion,
    generic_tool,
    read_tool,
    require,
    setup,
    write_tool,
)
from hf_pipelines.tau2_bench.schema import ToolError
from hf_pipelines.tau2_bench.store import BaseState

CLOCK = "2025-02-25 12:08 EST"
TASKS = {
    "tasks": {
        "task_1": {"task_id": "task_1", "title": "Test task", "description": "A first task", "status": "pending"},
    },
    "users": {"user_1": {"user_id": "user_1", "name": "Test User", "tasks": ["task_1"]}},
}
INBOX: dict[str, dict[str, Any]] = {"notifications": {}}


class MockAgentTools(Toolkit):
    """The agent's tools over tasks and users."""

    @write_tool
    def create_task(self, user_id: str, title: str, description: str | None = None) -> dict:
        """Create a pending task for a user.

        Args:
            user_id: The user's id, such as user_1.
            title: Title of the task.
            description: What is to be done.
        """
        require(self.store["users"], user_id, "user")
        task_id = f"task_{len(self.store['tasks']) + 1}"
        if task_id in self.store["tasks"]:
            raise ToolError(f"the id {task_id!r} is already taken")
        self.store.edit("users", user_id)["tasks"].append(task_id)
        task = {"task_id": task_id, "title": title, "description": description, "status": "pending"}
        return self.store.insert("tasks", task_id, task)

    @read_tool
    def get_users(self) -> list:
        """List all users with the ids of their tasks."""
        return list(self.store["users"].values())

    @write_tool
    def update_task_status(self, task_id: str, status: Literal["pending", "completed"]) -> dict:
        """Set the status of a task.

        Args:
            task_id: The task's id, such as task_1.
            status: pending or completed.
        """
        require(self.store["tasks"], task_id, "task")
        task = self.store.edit("tasks", task_id)
        task["status"] = status
        return task

    @generic_tool
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human agent. Only for what the policy and your tools do not let you do.

        Args:
            summary: What the user needs and what was tried.
        """
        return "Transfer successful"

    @assertion
    def assert_task_status(self, task_id: str, expected_status: str) -> bool:
        """The task exists and has this status."""
        return self.store["tasks"].get(task_id, {}).get("status") == expected_status

    @assertion
    def assert_number_of_tasks(self, user_id: str, expected_number: int) -> bool:
        """The user has this many tasks."""
        return len(self.store["users"].get(user_id, {}).get("tasks", ())) == expected_number


class MockUserTools(Toolkit):
    """The customer's inbox."""

    @read_tool
    def check_notifications(self) -> list:
        """Look at all notifications in the inbox."""
        return list(self.store["notifications"].values())

    @write_tool
    def dismiss_notification(self, notification_id: str) -> str:
        """Mark a notification as read.

        Args:
            notification_id: The notification's id.
        """
        require(self.store["notifications"], notification_id, "notification")
        self.store.edit("notifications", notification_id)["status"] = "read"
        return f"Notification {notification_id} is now read."

    @setup
    def add_notification(self, notification_id: str, message: str, task_id: str | None = None) -> None:
        """Put an unread notification into the inbox."""
        self.store.insert(
            "notifications",
            notification_id,
            {"notification_id": notification_id, "message": message, "status": "unread", "task_id": task_id},
        )

    @assertion
    def assert_notification_status(self, notification_id: str, expected_status: str) -> bool:
        """The notification exists and has this status."""
        return self.store["notifications"].get(notification_id, {}).get("status") == expected_status


def load(folder: Path | None = None) -> Domain:
    """The mock domain, packaged or over `folder/db.json` and `folder/user_db.json`."""
    tables, inbox = TASKS, INBOX
    if folder is not None:
        tables = json.loads((folder / "db.json").read_text(encoding="utf-8"))
        for task in tables["tasks"].values():
            task.setdefault("description", None)
        user_path = folder / "user_db.json"
        inbox = json.loads(user_path.read_text(encoding="utf-8")) if user_path.is_file() else INBOX
    return Domain(
        "mock",
        CLOCK,
        agent_toolkit=MockAgentTools,
        agent_state=BaseState(tables),
        user_toolkit=MockUserTools,
        user_state=BaseState(inbox),
        policies={("manual", False): ("mock.md",), ("manual", True): ("mock_solo.md",)},
    )
