"""Where the public task data and the measured results lie; tests that need them skip where they are absent."""

import gzip
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hf_pipelines.tau2_bench import Environment, Task, load_tasks

ROOT = Path(__file__).parents[2]
PLACES = (os.environ.get("TAU2_DATA_DIR"), ROOT / "shared" / "data" / "tau2", ROOT.parent / "shared" / "data" / "tau2")
DATA = next((Path(place) for place in PLACES if place and Path(place).is_dir()), None)

needs_data = pytest.mark.skipif(
    DATA is None, reason="the public τ²-bench data is absent: set TAU2_DATA_DIR to a folder with telecom/, airline/, …"
)


@cache
def expected(name: str) -> Any:
    """A file of `expected/`: JSON, or the rows of a packed JSONL."""
    path = DATA / "expected" / name
    if name.endswith(".jsonl.gz"):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def upstream_tasks(domain: str, split: str = "base", version: str = "1.0.1") -> dict[str, Task]:
    """Id → task of the public files."""
    return {task.id: task for task in load_tasks(domain, split, data_dir=DATA, version=version)}


def telecom_facts(env: Environment) -> dict[str, Any]:
    """The facts that the measured telecom results list."""
    line = env.agent.store["lines"]["L1002"]
    request = env.user.surroundings["payment_request"]
    return {
        **env.user.facts(),
        "line": line["status"],
        "roaming_line": line["roaming_enabled"],
        "refuel_gb": line["data_refueling_gb"],
        "used_gb": line["data_used_gb"],
        "payment_request": request and request["bill_id"],
        "bills": {bill["bill_id"]: [bill["status"], bill["total_due"]] for bill in env.agent.bills("C1001")},
    }


def among(facts: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The facts that `wanted` names."""
    return {name: facts[name] for name in wanted}
