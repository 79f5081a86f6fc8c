"""Files for the public leaderboard: one results file per domain and `submission.json`."""

import json
import re
import subprocess
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

from hf_pipelines.tau2_bench.domains import get_domain
from hf_pipelines.tau2_bench.metrics import pass_k
from hf_pipelines.tau2_bench.report import Report
from hf_pipelines.tau2_bench.store_runs import RunRecord
from hf_pipelines.tau2_bench.task import Task

OURS = ("steps", "errors", "notes", "reason", "labels", "attribution", "audit", "digest", "mode")


def results_file(report: Report, tasks: Sequence[Task], domain: str, mode: str = "dual") -> dict[str, Any]:
    """The results of one domain as the public tool stores, accepts and re-grades them.

    Args:
        report (`Report`): The run.
        tasks (`Sequence[Task]`): Its tasks.
        domain (`str`): Which domain.
        mode (`str`, defaults to `"dual"`): Which mode.

    Raises:
        ValueError: Nothing of this domain and mode was run.
    """
    records = [record for record in report.records if record.domain == domain and record.mode == mode]
    if not records:
        raise ValueError(f"no run of domain {domain!r} in mode {mode!r}")
    config = report.config
    mine = [task for task in tasks if task.domain_name == domain]
    world = get_domain(domain, mine[0].data_dir if mine else None)
    agent, user = dict(config.agent), dict(config.user)
    return {
        "timestamp": datetime.now().isoformat(timespec="seconds"),
        "info": {
            "git_commit": _commit(),
            "num_trials": config.trials,
            "max_steps": config.max_steps,
            "max_errors": config.max_errors,
            "seed": config.seed,
            "user_info": {
                "implementation": user.pop("kind", None),
                "llm": user.pop("model", None),
                "llm_args": user,
                "global_simulation_guidelines": None,
            },
            "agent_info": {
                "implementation": agent.pop("kind", None),
                "llm": agent.pop("model", None),
                "llm_args": agent,
            },
            "environment_info": {"domain_name": domain, "policy": world.policy(config.policy, mode.endswith("solo"))},
        },
        "tasks": [task.to_dict() for task in mine],
        "simulations": [_simulation(record) for record in records],
    }


def _simulation(record: RunRecord) -> dict[str, Any]:
    verdict = json.loads(json.dumps(record.reward_info))
    verdict["info"] = {**(verdict.get("info") or {}), "closedloop": {name: getattr(record, name) for name in OURS}}
    return {
        "id": f"{record.task_id}/{record.trial}/{record.seed}",
        "task_id": record.task_id,
        "timestamp": record.end_time,
        "start_time": record.start_time,
        "end_time": record.end_time,
        "duration": record.duration,
        "termination_reason": record.termination,
        "agent_cost": _cost(record, "assistant"),
        "user_cost": _cost(record, "user"),
        "reward_info": verdict,
        "messages": record.messages,
        "trial": record.trial,
        "seed": record.seed,
        "mode": "half_duplex",
    }


def _cost(record: RunRecord, role: str) -> float:
    return float(sum(message.get("cost") or 0 for message in record.messages if message.get("role") == role))


def _commit() -> str:
    """Commit of this package where it runs from a checkout, else its version."""
    from importlib.metadata import PackageNotFoundError, version

    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    try:
        return f"closedloop {version('closedloop')}"
    except PackageNotFoundError:
        return "closedloop"


def standard_differences(report: Report) -> list[str]:
    """Why a run may not be called "standard": everything that differs from the leaderboard's own set-up."""
    config = report.config
    differences = ["own scaffold, prompts and policies in the words of this library"]
    if config.user.get("kind") != "llm":
        differences.append(f"customer {config.user.get('kind')!r} instead of a language model")
    elif config.user.get("guard", "retry") != "off":
        differences.append("the customer's guards are on")
    if config.policy not in (None, "manual"):
        differences.append(f"policy {config.policy!r}")
    if config.split != "base" or config.task_ids:
        differences.append("not the base task set")
    if config.trials != 4:
        differences.append(f"{config.trials} trials instead of 4")
    return differences


def submission(
    report: Report,
    model_name: str,
    organization: str,
    contact: dict[str, str],
    submission_type: str = "custom",
    mode: str = "dual",
) -> dict[str, Any]:
    """`submission.json` of a run.

    Args:
        report (`Report`): A complete run.
        model_name (`str`): Name of the model.
        organization (`str`): Who made the model.
        contact (`dict`): `email`, and if you like `name` and `github`.
        submission_type (`str`, defaults to `"custom"`): `"standard"` is refused, with the reasons, where the set-up
            differs from the leaderboard's.
        mode (`str`, defaults to `"dual"`): Which mode's figures.

    Raises:
        ValueError: The run is partial, there is no e-mail address, or `"standard"` would be untrue.
    """
    if report.is_partial:
        raise ValueError("the run is PARTIAL: complete it before you submit it")
    if "@" not in contact.get("email", ""):
        raise ValueError(f"contact={contact!r} must hold an 'email'")
    if submission_type not in ("standard", "custom"):
        raise ValueError(f"submission_type={submission_type!r} must be 'standard' or 'custom'")
    differences = standard_differences(report)
    if submission_type == "standard":
        raise ValueError(f"this run is not standard: {'; '.join(differences)}. Use submission_type='custom'.")
    results: dict[str, Any] = {}
    for domain in ("retail", "airline", "telecom"):
        cells = [r.to_cell() for r in report.records if r.domain == domain and r.mode == mode]
        if cells:
            value = pass_k(cells, infra=report.config.infra)
            results[domain] = {
                **{f"pass_{k}": _percent(value.values.get(k)) for k in range(1, 5)},
                "cost": None,
            }
    return {
        "model_name": model_name,
        "model_organization": organization,
        "submitting_organization": organization,
        "submission_date": date.today().isoformat(),
        "submission_type": submission_type,
        "contact_info": contact,
        "results": results,
        "is_new": True,
        "trajectories_available": True,
        "methodology": {
            "evaluation_date": date.today().isoformat(),
            "tau2_bench_version": report.config.version,
            "user_simulator": str(report.config.user.get("model") or report.config.user.get("kind")),
            "notes": f"Custom because of: {'; '.join(differences)}.",
            "verification": {"modified_prompts": True, "omitted_questions": False, "details": differences[0]},
        },
    }


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 2)


def write_submission(
    report: Report, tasks: Sequence[Task], folder: str | Path, model_name: str, organization: str, **kwargs: Any
) -> Path:
    """Write `<model>_<org>_<date>/` with `submission.json` and `trajectories/<domain>.json`.

    Args:
        report (`Report`): A complete run.
        tasks (`Sequence[Task]`): Its tasks.
        folder (`str` or `Path`): Where the directory is made.
        model_name (`str`): Name of the model.
        organization (`str`): Who made it.
        **kwargs: Of [`submission`].

    Returns:
        `Path`: the directory.

    Raises:
        ValueError: As [`submission`]; or the directory exists.
    """
    content = submission(report, model_name, organization, **kwargs)
    name = "_".join(_slug(part) for part in (model_name, organization)) + f"_{date.today().isoformat()}"
    target = Path(folder) / name
    if target.exists():
        raise ValueError(f"{target} exists already")
    (target / "trajectories").mkdir(parents=True)
    mode = kwargs.get("mode", "dual")
    stem, tail = _slug(model_name), f"{report.config.trials}trials.json"
    files = {domain: f"{stem}_{domain}_{tail}" for domain in content["results"]}
    for domain, file in files.items():
        text = json.dumps(results_file(report, tasks, domain, mode), ensure_ascii=False)
        (target / "trajectories" / file).write_text(text + "\n", encoding="utf-8")
    content["trajectory_files"] = files
    (target / "submission.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return target


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
