"""What a task can do to the carrier's tables before the conversation, and what it can ask about their end."""

from datetime import date, timedelta

from hf_pipelines.tau2_bench.domains.base import assertion, setup
from hf_pipelines.tau2_bench.domains.telecom.agent_tools import TelecomAgentTools
from hf_pipelines.tau2_bench.domains.telecom.entities import TODAY
from hf_pipelines.tau2_bench.schema import ToolError

TOLERANCE_GB = 1e-6


class TelecomCarrier(TelecomAgentTools):
    """The carrier's side: thirteen tools, the set-up primitives and the assertions."""

    @setup
    def set_data_usage(self, customer_id: str, line_id: str, data_used_gb: float) -> None:
        """Set how much data a line has used."""
        self.line(customer_id, line_id)
        self.store.edit("lines", line_id)["data_used_gb"] = data_used_gb

    @setup
    def suspend_line_for_overdue_bill(
        self, customer_id: str, line_id: str, new_bill_id: str, contract_ended: bool
    ) -> None:
        """Add an overdue bill for the last month, suspend the line today, and perhaps end its contract."""
        line = self.line(customer_id, line_id)
        if line["status"] != "Active":
            raise ToolError(f"line {line_id!r} is {line['status']}; it must be Active")
        overdue = [bill["bill_id"] for bill in self.bills(customer_id) if bill["status"] == "Overdue"]
        if overdue:
            raise ToolError(f"customer {customer_id!r} already has the overdue bill {overdue[0]!r}")
        plan = self.plan(line)
        last_day = date.fromisoformat(TODAY).replace(day=1) - timedelta(days=1)
        first_day = last_day.replace(day=1)
        charge = {
            "description": f"{plan['name']}, {line['phone_number']}",
            "amount": plan["price_per_month"],
            "date": first_day.isoformat(),
            "item_type": "Plan Charge",
        }
        self.add_bill(
            {
                "bill_id": new_bill_id,
                "customer_id": customer_id,
                "period_start": first_day.isoformat(),
                "period_end": last_day.isoformat(),
                "issue_date": first_day.isoformat(),
                "total_due": plan["price_per_month"],
                "due_date": first_day.replace(day=15).isoformat(),
                "line_items": [charge],
                "status": "Overdue",
            }
        )
        line = self.store.edit("lines", line_id)
        line["status"] = "Suspended"
        line["suspension_start_date"] = TODAY
        if contract_ended:
            line["contract_end_date"] = last_day.isoformat()

    @assertion
    def assert_data_refueling_amount(self, customer_id: str, line_id: str, expected_amount: float) -> bool:
        """The line was refueled by this many gigabytes in all."""
        return abs(self.line(customer_id, line_id)["data_refueling_gb"] - expected_amount) <= TOLERANCE_GB

    @assertion
    def assert_line_status(self, customer_id: str, line_id: str, expected_status: str) -> bool:
        """The line has this status."""
        return self.line(customer_id, line_id)["status"] == expected_status

    @assertion
    def assert_overdue_bill_exists(self, customer_id: str, overdue_bill_id: str) -> bool:
        """The customer has this bill, and it is overdue."""
        bill_ids = self.customer(customer_id)["bill_ids"]
        return overdue_bill_id in bill_ids and self.store["bills"][overdue_bill_id]["status"] == "Overdue"

    @assertion
    def assert_no_overdue_bill(self, overdue_bill_id: str) -> bool:
        """There is no such bill, or it is paid."""
        bill = self.store["bills"].get(overdue_bill_id)
        return bill is None or bill["status"] == "Paid"
