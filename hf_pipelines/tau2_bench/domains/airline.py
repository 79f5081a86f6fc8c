"""Airline, single control: start state and domain. The tools are in `airline_reads` and `airline_writes`."""

import json
from pathlib import Path
from typing import Any

from hf_pipelines.tau2_bench.domains.airline_writes import AirlineTools
from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.store import BaseState

CLOCK = "2024-05-15 15:00 EST"


def load(folder: Path) -> Domain:
    """The airline domain over `folder/db.json`."""
    tables = json.loads((folder / "db.json").read_text(encoding="utf-8"))
    return Domain(
        "airline",
        CLOCK,
        agent_toolkit=AirlineTools,
        agent_state=BaseState(checked_tables(tables, str(folder / "db.json"))),
        policies={("manual", False): ("airline.md",)},
    )


def checked_tables(tables: dict[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Give every record its optional fields.

    Raises:
        ValueError: If a table is missing.
    """
    missing = [name for name in ("flights", "users", "reservations") if name not in tables]
    if missing:
        raise ValueError(f"{source} lacks the tables {missing}")
    for reservation in tables["reservations"].values():
        reservation.setdefault("status", None)
    for user in tables["users"].values():
        user["address"].setdefault("address2", None)
        for method in user["payment_methods"].values():
            if "amount" in method:
                method["amount"] = float(method["amount"])
    return {name: tables[name] for name in ("flights", "users", "reservations")}
