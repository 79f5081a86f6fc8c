"""The four modes: who acts and what the agent is told. They are ablations, so that a failure can be placed.

| mode          | who acts                    | the agent sees                | isolates                 |
| ------------- | --------------------------- | ----------------------------- | ------------------------ |
| `dual`        | agent and customer          | policy                        | everything               |
| `solo`        | agent with both toolkits    | solo policy, ticket           | reasoning without guiding |
| `oracle`      | agent and customer          | policy, gold steps            | guiding without planning |
| `oracle_solo` | agent with both toolkits    | solo policy, ticket, gold steps | plain use of tools     |
"""

import json
from typing import Any

from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.env import Environment
from hf_pipelines.tau2_bench.players import Briefing
from hf_pipelines.tau2_bench.task import Action, Task

MODES = ("dual", "solo", "oracle", "oracle_solo")
DONE = "done"
DONE_TOOL = {
    "type": "function",
    "function": {
        "name": DONE,
        "description": "Say that you have finished: the ticket is solved, or was handed over. This ends your work.",
        "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    },
}


def is_solo(mode: str) -> bool:
    """Whether the agent works alone.

    Raises:
        ValueError: If the mode is unknown.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {', '.join(MODES)}")
    return mode in ("solo", "oracle_solo")


def check_mode(domain: Domain, task: Task, mode: str) -> None:
    """Refuse a mode that this task cannot be played in.

    Raises:
        ValueError: If the mode is unknown, or solo where the domain or the task does not allow it.
    """
    if not is_solo(mode):
        return
    if not domain.supports_solo:
        raise ValueError(f"mode={mode!r}: the domain {domain.name!r} has no solo mode; use 'dual' or 'oracle'")
    if not task.ticket:
        raise ValueError(f"mode={mode!r}: task {task.id!r} has no ticket; use 'dual' or 'oracle'")


def gold_steps(task: Task, solo: bool = False, hide_arguments: bool = False) -> str:
    """The gold plan in words, one numbered step per action.

    Args:
        task (`Task`): The task.
        solo (`bool`, defaults to `False`): Whether the agent itself does the customer's steps.
        hide_arguments (`bool`, defaults to `False`): Whether only the tools are named.
    """
    steps = [f"{number}. {_step(action, solo, hide_arguments)}" for number, action in enumerate(task.actions, 1)] or [
        "There is nothing to change."
    ]
    return "\n".join(steps)


def _step(action: Action, solo: bool, hide_arguments: bool) -> str:
    shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in action.arguments.items())
    call = action.name if hide_arguments else f"{action.name}({shown})"
    return f"have the customer do {call}" if action.requestor == "user" and not solo else f"do {call}"


def agent_briefing(
    domain: Domain,
    task: Task,
    env: Environment,
    mode: str = "dual",
    policy: str | None = None,
    seed: int = 0,
    hide_arguments: bool = False,
) -> Briefing:
    """What the agent is told before a run.

    Args:
        domain (`Domain`): The world.
        task (`Task`): The task.
        env (`Environment`): The run's environment, for the tools.
        mode (`str`, defaults to `"dual"`): One of `MODES`.
        policy (`str`, *optional*): Variant of the policy, such as `"manual"` or `"workflow"`.
        seed (`int`, defaults to 0): The run's seed.
        hide_arguments (`bool`, defaults to `False`): For the oracle modes, whether the plan names tools only.
    """
    check_mode(domain, task, mode)
    solo = is_solo(mode)
    parts = [domain.policy(policy, solo)]
    if solo:
        parts.append(f"<ticket>\n{task.ticket}\n</ticket>")
    if mode.startswith("oracle"):
        parts.append(
            "<plan>\nThese steps, in this order, solve the case. Follow them.\n"
            f"{gold_steps(task, solo, hide_arguments)}\n</plan>"
        )
    tools = env.tools("assistant") + ([DONE_TOOL] if solo else [])
    return Briefing("assistant", "\n".join(parts), tools, task, mode, seed)


def user_briefing(task: Task, env: Environment, mode: str = "dual", seed: int = 0) -> Briefing:
    """What the customer is told before a run: the scenario's fields in words, without anything else of the task."""
    return Briefing("user", scenario_text(task.instructions), env.tools("user"), task, mode, seed, task.persona)


SCENARIO_TITLES = {
    "reason_for_call": "Why you call",
    "known_info": "What you know",
    "unknown_info": "What you do not know",
    "task_instructions": "How you go about it",
}


def scenario_text(instructions: dict[str, Any] | str | None) -> str:
    """A scenario as text, whether the task has fields or one text."""
    if not isinstance(instructions, dict):
        return instructions or ""
    parts = [f"{title}: {instructions[name]}" for name, title in SCENARIO_TITLES.items() if instructions.get(name)]
    return "\n".join(parts)
