"""The carrier's back office: what the support agent can look up and change."""

import calendar
from datetime import date
from typing import Any

from hf_pipelines.tau2_bench.domains.base import (
    Toolkit,
    generic_tool,
    read_tool,
    read_tool_with_plain_result,
    require,
    write_tool,
)
from hf_pipelines.tau2_bench.domains.telecom.entities import TODAY
from hf_pipelines.tau2_bench.schema import ToolError

TABLE_OF_LETTER = {"L": "lines", "D": "devices", "B": "bills", "C": "customers", "P": "plans"}


class TelecomAgentTools(Toolkit):
    """Thirteen tools over customers, lines, plans, devices and bills."""

    # ----------------------------------------------------------------------------------------------------- helpers

    def customer(self, customer_id: str) -> dict[str, Any]:
        """The customer's record, for reading."""
        return require(self.store["customers"], customer_id, "customer")

    def line(self, customer_id: str, line_id: str) -> dict[str, Any]:
        """A line of this customer, for reading."""
        if line_id not in self.customer(customer_id)["line_ids"]:
            raise ToolError(f"line {line_id!r} is not a line of customer {customer_id!r}")
        return require(self.store["lines"], line_id, "line")

    def plan(self, line: dict[str, Any]) -> dict[str, Any]:
        """The plan of a line, for reading."""
        return require(self.store["plans"], line["plan_id"], "plan")

    def bills(self, customer_id: str) -> list[dict[str, Any]]:
        """The customer's bills in the order of the account, for reading."""
        return [self.store["bills"][bill_id] for bill_id in self.customer(customer_id)["bill_ids"]]

    def add_bill(self, bill: dict[str, Any]) -> None:
        """Put a new bill into the table and into its customer's account."""
        if bill["bill_id"] in self.store["bills"]:
            raise ToolError(f"there is already a bill {bill['bill_id']!r}")
        self.store.insert("bills", bill["bill_id"], bill)
        self.store.edit("customers", bill["customer_id"])["bill_ids"].append(bill["bill_id"])

    # ----------------------------------------------------------------------------------------------------- look up

    @read_tool
    def get_customer_by_phone(self, phone_number: str) -> dict:
        """Find the customer who has this phone number as contact number or on one of their lines.

        Args:
            phone_number: The number, such as 555-123-2002.
        """
        lines = self.store["lines"]
        for customer in self.store["customers"].values():
            numbers = (lines[line_id]["phone_number"] for line_id in customer["line_ids"])
            if customer["phone_number"] == phone_number or phone_number in numbers:
                return customer
        raise ToolError(f"no customer has the phone number {phone_number!r}")

    @read_tool
    def get_customer_by_id(self, customer_id: str) -> dict:
        """Show a customer's record.

        Args:
            customer_id: The customer's id, such as C1001.
        """
        return self.customer(customer_id)

    @read_tool
    def get_customer_by_name(self, full_name: str, dob: str) -> list:
        """List the customers with this name and date of birth; the list may be empty.

        Args:
            full_name: First and last name; upper or lower case does not matter.
            dob: Date of birth as YYYY-MM-DD, which confirms who is speaking.
        """
        wanted = full_name.lower()
        return [
            customer
            for customer in self.store["customers"].values()
            if customer["full_name"].lower() == wanted and customer["date_of_birth"] == dob
        ]

    @read_tool
    def get_details_by_id(self, id: str) -> dict:
        """Show the record with this id, whose first letter says what it is: L line, D device, B bill, C customer, P
        plan.

        Args:
            id: The id, such as L1002 or P1002.
        """
        table = TABLE_OF_LETTER.get(id[:1])
        if table is None:
            raise ToolError(f"the id {id!r} starts with none of {', '.join(TABLE_OF_LETTER)}")
        return require(self.store[table], id, table[:-1])

    @read_tool
    def get_bills_for_customer(self, customer_id: str, limit: int = 12) -> list:
        """List a customer's bills, the newest first.

        Args:
            customer_id: The customer's id.
            limit: How many bills at most.
        """
        bills = sorted(self.bills(customer_id), key=lambda bill: bill["issue_date"], reverse=True)
        return bills[: max(limit, 0)]

    @read_tool_with_plain_result
    def get_data_usage(self, customer_id: str, line_id: str) -> dict:
        """Show how much mobile data a line has used in this billing cycle, its plan's limit, and what was refueled.

        Args:
            customer_id: The customer's id.
            line_id: The line's id.
        """
        line = self.line(customer_id, line_id)
        today = date.fromisoformat(TODAY)
        last_day = calendar.monthrange(today.year, today.month)[1]
        return {
            "line_id": line_id,
            "data_used_gb": line["data_used_gb"],
            "data_limit_gb": self.plan(line)["data_limit_gb"],
            "data_refueling_gb": line["data_refueling_gb"],
            "cycle_end_date": today.replace(day=last_day).isoformat(),
        }

    # ------------------------------------------------------------------------------------------------------ change

    @write_tool
    def suspend_line(self, customer_id: str, line_id: str, reason: str) -> dict:
        """Suspend an active line: it loses all service until it is resumed.

        Args:
            customer_id: The customer's id.
            line_id: The line's id.
            reason: Why, for the records.
        """
        status = self.line(customer_id, line_id)["status"]
        if status != "Active":
            raise ToolError(f"line {line_id!r} is {status}; only an Active line can be suspended")
        line = self.store.edit("lines", line_id)
        line["status"] = "Suspended"
        line["suspension_start_date"] = TODAY
        return {"message": f"Line {line_id} is now suspended. Reason: {reason}", "line": line}

    @write_tool
    def resume_line(self, customer_id: str, line_id: str) -> dict:
        """Make a suspended or not yet activated line active again. The tool does not check bills or the contract: your
        policy says when a line may be resumed.

        Args:
            customer_id: The customer's id.
            line_id: The line's id.
        """
        status = self.line(customer_id, line_id)["status"]
        if status not in ("Suspended", "Pending Activation"):
            raise ToolError(f"line {line_id!r} is {status}; only Suspended or Pending Activation can be resumed")
        line = self.store.edit("lines", line_id)
        line["status"] = "Active"
        line["suspension_start_date"] = None
        return {"message": f"Line {line_id} is active again.", "line": line}

    @write_tool
    def send_payment_request(self, customer_id: str, bill_id: str) -> str:
        """Ask the customer's phone for the payment of a bill; the bill then awaits payment. Only one bill of a
        customer can await payment at a time. The tool does not check whether the bill is overdue.

        Args:
            customer_id: The customer's id.
            bill_id: The bill's id.
        """
        if bill_id not in self.customer(customer_id)["bill_ids"]:
            raise ToolError(f"bill {bill_id!r} is not a bill of customer {customer_id!r}")
        waiting = [bill["bill_id"] for bill in self.bills(customer_id) if bill["status"] == "Awaiting Payment"]
        if waiting:
            raise ToolError(f"bill {waiting[0]!r} of this customer already awaits payment")
        bill = self.store.edit("bills", bill_id)
        bill["status"] = "Awaiting Payment"
        return f"A payment request over ${bill['total_due']:.2f} for bill {bill_id} was sent to the customer."

    @write_tool
    def enable_roaming(self, customer_id: str, line_id: str) -> str:
        """Allow data roaming on a line, so that it works outside the home network.

        Args:
            customer_id: The customer's id.
            line_id: The line's id.
        """
        return self._set_roaming(customer_id, line_id, True)

    @write_tool
    def disable_roaming(self, customer_id: str, line_id: str) -> str:
        """Forbid data roaming on a line.

        Args:
            customer_id: The customer's id.
            line_id: The line's id.
        """
        return self._set_roaming(customer_id, line_id, False)

    def _set_roaming(self, customer_id: str, line_id: str, enabled: bool) -> str:
        word = "enabled" if enabled else "disabled"
        if self.line(customer_id, line_id)["roaming_enabled"] == enabled:
            return f"Roaming was already {word} on line {line_id}."
        self.store.edit("lines", line_id)["roaming_enabled"] = enabled
        return f"Roaming is now {word} on line {line_id}."

    @write_tool
    def refuel_data(self, customer_id: str, line_id: str, gb_amount: float) -> dict:
        """Add mobile data to a line for this billing cycle. The price per gigabyte is that of the line's plan and goes
        onto the customer's next bill.

        Args:
            customer_id: The customer's id.
            line_id: The line's id.
            gb_amount: Gigabytes to add, more than 0.
        """
        plan = self.plan(self.line(customer_id, line_id))
        if gb_amount <= 0:
            raise ToolError(f"gb_amount must be more than 0, not {gb_amount}")
        price = plan["data_refueling_price_per_gb"]
        line = self.store.edit("lines", line_id)
        line["data_refueling_gb"] += gb_amount
        charge = gb_amount * price
        self._charge(customer_id, charge, f"Data refueling: {gb_amount} GB at ${price}/GB")
        return {
            "message": f"Added {gb_amount} GB to line {line_id} for ${charge:.2f}.",
            "new_data_refueling_gb": line["data_refueling_gb"],
            "charge": charge,
        }

    def _charge(self, customer_id: str, amount: float, description: str) -> None:
        draft = next((bill for bill in self.bills(customer_id) if bill["status"] == "Draft"), None)
        if draft is None:
            draft = self._next_draft(customer_id)
            self.add_bill(draft)
        bill = self.store.edit("bills", draft["bill_id"])
        item = {"description": description, "amount": amount, "date": TODAY, "item_type": "Charge"}
        bill["line_items"].append(item)
        bill["total_due"] += amount

    def _next_draft(self, customer_id: str) -> dict[str, Any]:
        today = date.fromisoformat(TODAY)
        year, month = (today.year + 1, 1) if today.month == 12 else (today.year, today.month + 1)
        start = date(year, month, 1)
        numbers = [int(bill_id[1:]) for bill_id in self.store["bills"] if bill_id[1:].isdigit()]
        return {
            "bill_id": f"B{max(numbers, default=1000) + 1}",
            "customer_id": customer_id,
            "period_start": start.isoformat(),
            "period_end": start.replace(day=calendar.monthrange(year, month)[1]).isoformat(),
            "issue_date": start.isoformat(),
            "total_due": 0.0,
            "due_date": start.replace(day=15).isoformat(),
            "line_items": [],
            "status": "Draft",
        }

    @generic_tool
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the customer over to a human agent. Only for what neither you nor the customer can solve under the
        policy.

        Args:
            summary: What the customer needs and what was tried.
        """
        return "Transfer successful"
