"""Retail, single control: start state and domain. The tools are in `retail_reads` and `retail_writes`."""

import json
from pathlib import Path
from typing import Any

from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.domains.retail_writes import RetailTools
from hf_pipelines.tau2_bench.store import BaseState

CLOCK = "EST"
OPTIONAL_ORDER_FIELDS = (
    *("cancel_reason", "exchange_items", "exchange_new_items", "exchange_payment_method_id"),
    *("exchange_price_difference", "return_items", "return_payment_method_id"),
)


def load(folder: Path, compat: str = "upstream") -> Domain:
    """The retail domain over `folder/db.json`."""
    tables = json.loads((folder / "db.json").read_text(encoding="utf-8"))
    return Domain(
        "retail",
        CLOCK,
        agent_toolkit=RetailTools,
        agent_state=BaseState(checked_tables(tables, str(folder / "db.json"))),
        policies={("manual", False): ("retail.md",)},
        options={"compat": compat},
    )


def checked_tables(tables: dict[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Give every order its optional fields.

    Raises:
        ValueError: If a table is missing.
    """
    missing = [name for name in ("products", "users", "orders") if name not in tables]
    if missing:
        raise ValueError(f"{source} lacks the tables {missing}")
    for order in tables["orders"].values():
        for name in OPTIONAL_ORDER_FIELDS:
            order.setdefault(name, None)
    return {name: tables[name] for name in ("products", "users", "orders")}
