"""Telecom, the domain with dual control: the agent holds the carrier's back office, the customer holds the phone."""

from pathlib import Path

from hf_pipelines.tau2_bench.domains.base import Domain
from hf_pipelines.tau2_bench.domains.telecom.carrier_setup import TelecomCarrier
from hf_pipelines.tau2_bench.domains.telecom.entities import CLOCK, packaged_tables, phone_state, tables_from_toml
from hf_pipelines.tau2_bench.domains.telecom.phone_setup import TelecomUserTools
from hf_pipelines.tau2_bench.domains.telecom.sync import sync
from hf_pipelines.tau2_bench.domains.telecom.tripwire import tripwire
from hf_pipelines.tau2_bench.store import BaseState

POLICIES = {
    (variant, solo): (
        "telecom_main_solo.md" if solo else "telecom_main.md",
        "telecom_glossary.md",
        f"telecom_{variant}.md",
    )
    for variant in ("manual", "workflow")
    for solo in (False, True)
}


def load(folder: Path | None = None) -> Domain:
    """The telecom domain over the packaged tables, or over those of `folder/db.toml`."""
    tables = packaged_tables() if folder is None else tables_from_toml(folder / "db.toml")
    return Domain(
        "telecom",
        CLOCK,
        agent_toolkit=TelecomCarrier,
        agent_state=BaseState(tables),
        user_toolkit=TelecomUserTools,
        user_state=BaseState(phone_state()),
        sync=sync,
        policies=POLICIES,
        tripwire=tripwire,
    )
