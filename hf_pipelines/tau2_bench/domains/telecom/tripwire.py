"""The rules of the telecom policy that the tools do not enforce, watched for reports; they never touch the reward."""

from typing import Any

from hf_pipelines.tau2_bench.domains.telecom.entities import TODAY
from hf_pipelines.tau2_bench.store import Store

MAX_REFUEL_GB = 2.0


def tripwire(agent: Store, name: str, arguments: dict[str, Any]) -> str | None:
    """Name the rule that a write call is about to break.

    Args:
        agent (`Store`): The carrier's state before the call.
        name (`str`): The tool.
        arguments (`dict`): Its arguments.

    Returns:
        `str` or `None`: `"resume_with_unpaid_bill"`, `"resume_after_contract_end"` or `"refuel_above_2_gb"`.
    """
    line = agent["lines"].get(arguments.get("line_id"))
    customer = agent["customers"].get(arguments.get("customer_id"))
    if line is None or customer is None:
        return None
    if name == "resume_line":
        bills = (agent["bills"][bill_id] for bill_id in customer["bill_ids"])
        if any(_is_overdue(bill) for bill in bills):
            return "resume_with_unpaid_bill"
        if line["contract_end_date"] and line["contract_end_date"] < TODAY:
            return "resume_after_contract_end"
    amount = arguments.get("gb_amount")
    if (
        name == "refuel_data"
        and isinstance(amount, (int, float))
        and line["data_refueling_gb"] + amount > MAX_REFUEL_GB + 1e-9
    ):
        return "refuel_above_2_gb"
    return None


def _is_overdue(bill: dict[str, Any]) -> bool:
    return bill["status"] == "Overdue" or (bill["status"] == "Awaiting Payment" and bill["due_date"] < TODAY)
