"""The coupling of the carrier's tables and the phone's surroundings, run after every call."""

from hf_pipelines.tau2_bench.store import Store


def sync(agent: Store, user: Store) -> None:
    """Let the phone feel its line, and the carrier the phone's payment. Does nothing until the phone has a number.

    It does not search for the network: a line that was resumed gives service at the phone's next search only.
    """
    around = user["surroundings"]
    number = around["phone_number"]
    if number is None:
        return
    for line in agent["lines"].values():
        if line["phone_number"] == number:
            break
    else:
        return
    # 1. the line's state
    limit = agent["plans"][line["plan_id"]]["data_limit_gb"] + line["data_refueling_gb"]
    now = (line["status"] == "Active", line["roaming_enabled"], line["data_used_gb"] >= limit)
    if now != (around["line_active"], around["roaming_allowed"], around["mobile_data_usage_exceeded"]):
        around = user.edit("surroundings")
        around["line_active"], around["roaming_allowed"], around["mobile_data_usage_exceeded"] = now
    # 2. a request that the customer has paid
    request = around["payment_request"]
    if request is not None and request["paid"]:
        agent.edit("bills", request["bill_id"])["status"] = "Paid"
        around = user.edit("surroundings")
        around["payment_request"] = request = None
    # 3. the next request
    if request is None:
        bill_ids = next((c["bill_ids"] for c in agent["customers"].values() if line["line_id"] in c["line_ids"]), ())
        for bill_id in bill_ids:
            bill = agent["bills"][bill_id]
            if bill["status"] == "Awaiting Payment":
                asked = {"bill_id": bill_id, "amount_due": bill["total_due"], "paid": False}
                user.edit("surroundings")["payment_request"] = asked
                break
