"""The reward of one run: replay it, replay the gold plan, and compare end states, assertions, words and actions.

The reward is the product over the task's basis of DB, ENV_ASSERTION, COMMUNICATE, ACTION and NL_ASSERTION. Every
component is computed for every run, also for one that was cut off, which scores 0 all the same.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.env import Environment, answered_calls
from hf_pipelines.tau2_bench.judge import ChatModel, judge_assertions
from hf_pipelines.tau2_bench.task import TRANSFER_TOOL, Action, Task
from hf_pipelines.tau2_bench.types import AnyMessage, Message, ToolCall

TERMINATIONS = (
    "user_stop",
    "agent_stop",
    "max_steps",
    "timeout",
    "too_many_errors",
    "agent_error",
    "user_error",
    "infrastructure_error",
    "context_window_exceeded",
    "unexpected_error",
)
PROPER_ENDS = ("user_stop", "agent_stop")
SUCCESS_TOLERANCE = 1e-6


@dataclass
class RewardInfo:
    """The verdict on one run.

    Args:
        reward (`float`): 1 or 0.
        reward_basis (`list[str]`): Components that count.
        reward_breakdown (`dict[str, float | None]`): Value of each of them; `None` where a judge is missing.
        db_check (`dict`): `{"db_match", "db_reward"}`.
        env_assertions (`list[dict]`): `{"env_assertion", "met", "reward"}` each.
        action_checks (`list[dict]`): `{"action", "action_match", "action_reward", "tool_type"}` each.
        communicate_checks (`list[dict]`): `{"info", "met", "justification"}` each.
        nl_assertions (`list[dict]`): `{"nl_assertion", "met", "justification"}` each.
        info (`dict`): Everything that is not part of the reward: `premature`, `vacuous`, `unjudged`, `gold_errors`,
            `replay_differences`, `communicate_strict`, `matched`, `premature_transfer`, `tripwires`.
    """

    reward: float
    reward_basis: list[str]
    reward_breakdown: dict[str, float | None]
    db_check: dict[str, Any] | None = None
    env_assertions: list[dict[str, Any]] = field(default_factory=list)
    action_checks: list[dict[str, Any]] = field(default_factory=list)
    communicate_checks: list[dict[str, Any]] = field(default_factory=list)
    nl_assertions: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def success(self) -> bool:
        """Whether the run counts as solved."""
        return abs(self.reward - 1) <= SUCCESS_TOLERANCE

    @property
    def unjudged(self) -> bool:
        """Whether only the missing judge keeps the run from being solved or failed."""
        return bool(self.info.get("unjudged"))

    def to_dict(self) -> dict[str, Any]:
        """Storage format."""
        return dict(vars(self))


def score_run(
    task: Task,
    messages: Sequence[AnyMessage],
    termination: str,
    *,
    domain: Domain | None = None,
    solo: bool = False,
    judge: ChatModel | None = None,
    communicate: Literal["upstream", "strict"] = "upstream",
    compare_actions: Literal["strict", "upstream"] = "strict",
    sync_gold: bool = True,
) -> RewardInfo:
    """Judge one run.

    Args:
        task (`Task`): The task.
        messages (`Sequence`): The whole conversation, the task's history included.
        termination (`str`): How it ended, one of `TERMINATIONS`.
        domain (`Domain`, *optional*): The world, where it is not the one the task names.
        solo (`bool`, defaults to `False`): Whether the assistant held both toolkits.
        judge (`ChatModel`, *optional*): Model for NL assertions. Without one they are unjudged, and a run that needs
            them is not solved.
        communicate (`str`, defaults to `"upstream"`): `"strict"` lets numbers match as whole numbers only.
        compare_actions (`str`, defaults to `"strict"`): `"upstream"` ignores who made a call and whether it failed.
        sync_gold (`bool`, defaults to `True`): Whether the gold replay couples the sides after every action; `False`
            gives the value that the public evaluator records for telecom.

    Raises:
        ValueError: If `termination` or an option is unknown.
    """
    if termination not in TERMINATIONS:
        raise ValueError(f"termination={termination!r} is not one of {', '.join(TERMINATIONS)}")
    if communicate not in ("upstream", "strict") or compare_actions not in ("strict", "upstream"):
        raise ValueError(f"communicate={communicate!r}, compare_actions={compare_actions!r}: 'upstream' or 'strict'")
    domain = domain or get_domain(task.domain_name, task.data_dir)
    world, tripwires, differences = replayed(task, domain, messages, solo)
    gold, gold_errors = gold_replay(task, domain, sync_gold)
    same_state = gold.same_state(world)
    texts = [m.content for m in messages if isinstance(m, Message) and m.role == "assistant" and m.is_text]
    verdict = RewardInfo(
        reward=0.0,
        reward_basis=list(task.reward_basis),
        reward_breakdown={},
        db_check={"db_match": same_state, "db_reward": float(same_state)},
        env_assertions=env_checks(task, world),
        action_checks=action_checks(task, messages, domain, solo, compare_actions == "strict"),
        communicate_checks=communicate_checks(task.communicate_info, texts, communicate == "strict"),
        nl_assertions=judge_assertions(judge, task.nl_assertions, messages),
    )
    breakdown = {component: _value(component, verdict) for component in task.reward_basis}
    judged = math.prod(value for value in breakdown.values() if value is not None)
    premature = termination not in PROPER_ENDS
    waiting = [component for component, value in breakdown.items() if value is None]
    verdict.reward_breakdown = breakdown
    verdict.reward = 0.0 if premature or waiting else float(judged)
    strict = communicate_checks(task.communicate_info, texts, strict=True)
    verdict.info = {
        "premature": premature,
        "unjudged": waiting if judged and not premature else [],
        "vacuous": [component for component in task.reward_basis if is_vacuous(component, task)],
        "gold_errors": gold_errors,
        "replay_differences": differences,
        "communicate_strict": all(check["met"] for check in strict),
        "matched": _matched(verdict.action_checks),
        "premature_transfer": not task.must_transfer and _transferred(messages),
        "tripwires": tripwires,
    }
    return verdict


def is_vacuous(component: str, task: Task) -> bool:
    """Whether a component of the basis has nothing to check, so that it counts 1."""
    items = {
        "ENV_ASSERTION": task.env_assertions,
        "COMMUNICATE": task.communicate_info,
        "ACTION": task.actions,
        "NL_ASSERTION": task.nl_assertions,
    }
    return component in items and not items[component]


def _value(component: str, verdict: RewardInfo) -> float | None:
    if component == "DB":
        return verdict.db_check["db_reward"]
    if component == "ENV_ASSERTION":
        return float(all(check["met"] for check in verdict.env_assertions))
    if component == "COMMUNICATE":
        return float(all(check["met"] for check in verdict.communicate_checks))
    if component == "ACTION":
        return float(all(check["action_match"] for check in verdict.action_checks))
    met = [check["met"] for check in verdict.nl_assertions]
    return None if None in met else float(all(met))


# --------------------------------------------------------------------------------------------------------- replays


def gold_replay(task: Task, domain: Domain, sync: bool = True) -> tuple[Environment, list[list[str]]]:
    """The world after the gold actions, and the actions that failed as [tool, error]."""
    env = Environment.for_task(domain, task)
    errors = []
    for action in task.actions:
        try:
            env.run_tool(action.name, action.arguments, action.requestor, sync=sync)
        except Exception as error:  # a gold action may be wrong in any way; the task's lint reports it
            errors.append([action.name, str(error)])
    return env, errors


def replayed(
    task: Task, domain: Domain, messages: Sequence[AnyMessage], solo: bool = False
) -> tuple[Environment, list[dict[str, Any]], list[str]]:
    """The world after a run's write calls, the policy's tripwires it touched, and results that differ from the run."""
    tripwires = [
        {"rule": "several_calls_in_one_turn", "turn_idx": place, "tool": message.tool_calls[0].name}
        for place, message in enumerate(messages)
        if isinstance(message, Message) and message.role == "assistant" and len(message.tool_calls or ()) > 1
    ]

    def watch(env: Environment, call: ToolCall) -> None:
        if domain.tripwire is not None and call.requestor == "assistant" and isinstance(call.arguments, dict):
            rule = domain.tripwire(env.agent.store, call.name, call.arguments)
            if rule is not None:
                tripwires.append({"rule": rule, "turn_idx": _turn_of(messages, call), "tool": call.name})

    env = Environment(domain, solo)
    env.set_state(task.initialization_data, task.initialization_actions)
    differences = env.replay(messages, strict=False, before=watch)
    env.sync()
    return env, tripwires, differences


def _turn_of(messages: Sequence[AnyMessage], call: ToolCall) -> int | None:
    holds = (
        i for i, m in enumerate(messages) if isinstance(m, Message) and any(c is call for c in m.tool_calls or ())
    )
    return next(holds, None)


# ------------------------------------------------------------------------------------------------------ components


def env_checks(task: Task, env: Environment) -> list[dict[str, Any]]:
    """Whether each assertion of the task holds in this world."""
    raw = (task.criteria or {}).get("env_assertions") or ()
    checks = []
    for record, item in zip(raw, task.env_assertions, strict=True):
        met = env.holds(item)
        checks.append({"env_assertion": record, "met": met, "reward": float(met)})
    return checks


def action_checks(
    task: Task, messages: Sequence[AnyMessage], domain: Domain, solo: bool = False, strict: bool = True
) -> list[dict[str, Any]]:
    """Whether each gold action has a matching call in the run.

    Args:
        task (`Task`): The task.
        messages (`Sequence`): The run.
        domain (`Domain`): Its world, which knows the kind of each tool.
        solo (`bool`, defaults to `False`): Whether the assistant made the customer's calls, too.
        strict (`bool`, defaults to `True`): Whether the right side must have made the call, and successfully.
    """
    kinds = {"assistant": domain.agent_toolkit.tools()}
    kinds["user"] = domain.user_toolkit.tools() if domain.user_toolkit else {}
    if strict:
        calls = [call for call, answer in answered_calls(messages) if not answer.error]
    else:
        calls = [call for m in messages if isinstance(m, Message) for call in m.tool_calls or ()]
    raw = (task.criteria or {}).get("actions") or ()
    checks = []
    for record, action in zip(raw, task.actions, strict=True):
        met = any(_agrees(action, call, solo, strict) for call in calls)
        tool = kinds.get(action.requestor, {}).get(action.name)
        checks.append(
            {
                "action": record,
                "action_match": met,
                "action_reward": float(met),
                "tool_type": tool.kind if tool else None,
            }
        )
    return checks


def _agrees(action: Action, call: ToolCall, solo: bool, strict: bool) -> bool:
    if strict and not solo and call.requestor != action.requestor:
        return False
    return isinstance(call.arguments, dict) and action.matches(call)


def communicate_checks(strings: Sequence[str], texts: Sequence[str], strict: bool = False) -> list[dict[str, Any]]:
    """Whether each string was said in one of the assistant's texts (case and thousands separators aside)."""
    plain = [text.lower().replace(",", "") for text in texts]
    checks = []
    for wanted in strings:
        found = _whole_match(str(wanted)) if strict else str(wanted).lower()
        met = any(found.search(text) if strict else found in text for text in plain)
        why = "said by the agent" if met else "not said by the agent"
        checks.append({"info": wanted, "met": met, "justification": why})
    return checks


def _whole_match(wanted: str) -> re.Pattern[str]:
    """Pattern of a string whose numbers must be whole numbers of the text: "20" is not in "1200" or "20.5"."""
    text = wanted.lower().replace(",", "")
    number = re.fullmatch(r"\s*\$?(\d+)(?:\.(\d+))?\s*", text)
    if number is not None:
        whole, fraction = number.group(1).lstrip("0") or "0", (number.group(2) or "").rstrip("0")
        tail = rf"\.{fraction}0*" if fraction else r"(?:\.0+)?"
        return re.compile(rf"(?<![\d.])0*{whole}{tail}(?!\d|\.\d)")
    before = r"(?<![\d.])" if text[:1].isdigit() else ""
    after = r"(?!\d|\.\d)" if text[-1:].isdigit() else ""
    return re.compile(before + re.escape(text) + after)


# -------------------------------------------------------------------------------------------------- other verdicts


def _matched(checks: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Tool kind → [matched, all] gold actions."""
    counts: dict[str, list[int]] = {}
    for check in checks:
        pair = counts.setdefault(check["tool_type"] or "unknown", [0, 0])
        pair[0] += check["action_match"]
        pair[1] += 1
    return counts


def _transferred(messages: Sequence[AnyMessage]) -> bool:
    return any(
        call.name == TRANSFER_TOOL and call.requestor == "assistant" and not answer.error
        for call, answer in answered_calls(messages)
    )
