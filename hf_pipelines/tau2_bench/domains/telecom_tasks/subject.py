"""The customer and line that a task is about, read from the world so that a set-up can ask for ids and limits."""

from dataclasses import dataclass

from hf_pipelines.tau2_bench.domains.base import Domain

BILL_ID = "B1234321"  # the overdue bill that a set-up adds


@dataclass(frozen=True)
class Subject:
    """Facts of one customer and one of their lines at the start.

    Args:
        customer_id, line_id, full_name, phone_number (`str`): Who it is.
        data_limit_gb, data_used_gb, data_refueling_gb (`float`): The line's plan and use, in GB.
        has_overdue_bill (`bool`): Whether a bill is overdue before any set-up.
        bill_id (`str`): Id of the bill that a set-up adds.
    """

    customer_id: str
    line_id: str
    full_name: str
    phone_number: str
    data_limit_gb: float
    data_used_gb: float
    data_refueling_gb: float
    has_overdue_bill: bool
    bill_id: str = BILL_ID

    @property
    def line(self) -> dict[str, str]:
        """The two arguments of most back-office tools."""
        return {"customer_id": self.customer_id, "line_id": self.line_id}

    @property
    def is_default(self) -> bool:
        """Whether it is the public benchmark's customer and line, whose ids carry no suffix."""
        return (self.customer_id, self.line_id) == ("C1001", "L1002")

    @classmethod
    def of(cls, domain: Domain, customer_id: str = "C1001", line_id: str = "L1002") -> "Subject":
        """Read a customer's line from a telecom domain.

        Raises:
            ValueError: If there is no such customer, the line is not theirs, or it is not active.
        """
        tables = domain.agent_state.tables
        customer = tables["customers"].get(customer_id)
        if customer is None:
            raise ValueError(f"for_customer: no customer {customer_id!r}; there are {', '.join(tables['customers'])}")
        if line_id not in customer["line_ids"]:
            raise ValueError(f"for_customer: line {line_id!r} is none of {customer_id}'s lines {customer['line_ids']}")
        line = tables["lines"][line_id]
        if line["status"] != "Active":
            raise ValueError(f"for_customer: line {line_id!r} is {line['status']}; a task starts from an Active line")
        bills = (tables["bills"][bill_id] for bill_id in customer["bill_ids"])
        return cls(
            customer_id,
            line_id,
            customer["full_name"],
            line["phone_number"],
            tables["plans"][line["plan_id"]]["data_limit_gb"],
            line["data_used_gb"],
            line["data_refueling_gb"],
            any(bill["status"] == "Overdue" for bill in bills),
        )
