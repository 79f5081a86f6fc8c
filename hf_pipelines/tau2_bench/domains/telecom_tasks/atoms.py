"""The atomic faults: what breaks, how it is mended, and what must then hold besides the category's goal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_pipelines.tau2_bench.domains.telecom_tasks.subject import Subject

Json = dict[str, Any]
Steps = Callable[[Subject], list[Json]]


def init_step(env_type: str, func_name: str, **arguments: Any) -> Json:
    """A set-up step in a task's format."""
    return {"env_type": env_type, "func_name": func_name, "arguments": arguments}


def check_step(
    env_type: str, func_name: str, assert_value: bool = True, message: str | None = None, **args: Any
) -> Json:
    """An assertion in a task's format."""
    return {**init_step(env_type, func_name, **args), "assert_value": assert_value, "message": message}


def step(requestor: str, name: str, **arguments: Any) -> Json:
    """A gold action, still without its id."""
    return {"requestor": requestor, "name": name, "arguments": arguments}


@dataclass(frozen=True)
class Atom:
    """One fault.

    Args:
        name (`str`): Its name in task ids.
        category_set (`str`): Selection set: a task has at most one atom of each set.
        intents (`tuple[str, ...]`): Categories it can be part of.
        init (`Callable[[Subject], list]`): Set-up steps for a customer and line.
        fix (`Callable[[Subject], list]`, *optional*): Gold actions; `None` if the policy has no way to mend it, so
            that the customer must be handed over.
        checks (`Callable[[Subject], list]`, *optional*): Assertions that a fixable task adds to its goal.
        possible (`Callable[[Subject], bool]`): Whether the customer's start state allows the set-up.
    """

    name: str
    category_set: str
    intents: tuple[str, ...]
    init: Steps
    fix: Steps | None
    checks: Steps | None = None
    possible: Callable[[Subject], bool] = lambda subject: True


SERVICE, MOBILE, MMS = "service_issue", "mobile_data_issue", "mms_issue"
EVERYWHERE = (MOBILE, SERVICE, MMS)
REFUEL_GB = 2.0


def _phone(name: str, **arguments: Any) -> Steps:
    return lambda subject: [init_step("user", name, **arguments)]


def _by_user(*calls: Json) -> Steps:
    return lambda subject: [dict(call) for call in calls]


def _user_fix(name: str, **arguments: Any) -> Steps:
    return _by_user(step("user", name, **arguments))


def _travel(phone: str, line: str, search: bool) -> Steps:
    def init(subject: Subject) -> list[Json]:
        steps = [
            init_step("user", "set_user_location", abroad=True),
            init_step("user", f"turn_roaming_{phone}"),
            init_step("assistant", f"{line}_roaming", **subject.line),
        ]
        return steps + ([init_step("user", "simulate_network_search")] if search else [])

    return init


def _suspend(contract_ended: bool) -> Steps:
    def init(subject: Subject) -> list[Json]:
        arguments = {**subject.line, "new_bill_id": subject.bill_id, "contract_ended": contract_ended}
        suspension = init_step("assistant", "suspend_line_for_overdue_bill", **arguments)
        return [suspension, init_step("user", "simulate_network_search")]

    return init


def _no_overdue_bill(subject: Subject) -> bool:
    return not subject.has_overdue_bill


def _pay_and_resume(subject: Subject) -> list[Json]:
    return [
        step("assistant", "send_payment_request", customer_id=subject.customer_id, bill_id=subject.bill_id),
        step("user", "make_payment"),
        step("assistant", "resume_line", **subject.line),
        step("user", "reboot_device"),
    ]


def _used(subject: Subject, above_limit: float) -> Json:
    used = round(subject.data_limit_gb + above_limit, 3)
    return init_step("assistant", "set_data_usage", **subject.line, data_used_gb=used)


def _enable_roaming(subject: Subject) -> Json:
    return step("assistant", "enable_roaming", **subject.line)


def _permissions(*names: str) -> tuple[Steps, Steps]:
    app = {"app_name": "messaging"}
    take = [init_step("user", "remove_app_permission", **app, permission=name) for name in names]
    give = [step("user", "grant_app_permission", **app, permission=name) for name in names]
    return (lambda subject: [dict(item) for item in take]), _by_user(*give)


_RESET = _by_user(step("user", "reset_apn_settings"), step("user", "reboot_device"))
_LISTED = (
    Atom(
        "airplane_mode_on", "airplane", EVERYWHERE, _phone("turn_airplane_mode_on"), _user_fix("toggle_airplane_mode")
    ),
    Atom("unseat_sim_card", "unseat_sim", (SERVICE, MMS), _phone("unseat_sim_card"), _user_fix("reseat_sim_card")),
    Atom("lock_sim_card_pin", "lock_pin", (SERVICE,), _phone("lock_sim_card", mode="pin"), None),
    Atom("break_apn_settings", "break_apn", (SERVICE,), _phone("break_apn_settings"), _RESET),
    Atom(
        "overdue_bill_suspension",
        "suspension",
        (SERVICE,),
        _suspend(contract_ended=False),
        _pay_and_resume,
        possible=_no_overdue_bill,
    ),
    Atom(
        "contract_end_suspension",
        "suspension",
        (SERVICE,),
        _suspend(contract_ended=True),
        None,
        possible=_no_overdue_bill,
    ),
    Atom(
        "user_abroad_roaming_enabled_off",
        "roaming",
        (MOBILE, MMS),
        _travel("off", "enable", search=False),
        _user_fix("toggle_roaming"),
    ),
    Atom(
        "user_abroad_roaming_disabled_on",
        "roaming",
        (MOBILE, MMS),
        _travel("on", "disable", search=True),
        lambda subject: [_enable_roaming(subject)],
    ),
    Atom(
        "user_abroad_roaming_disabled_off",
        "roaming",
        (MOBILE, MMS),
        _travel("off", "disable", search=True),
        lambda subject: [_enable_roaming(subject), step("user", "toggle_roaming")],
    ),
    Atom("data_mode_off", "data_mode", (MOBILE, MMS), _phone("turn_data_off"), _user_fix("toggle_data")),
    Atom(
        "data_saver_mode_on",
        "data_saver",
        (MOBILE,),
        _phone("turn_data_saver_mode_on"),
        _user_fix("toggle_data_saver_mode"),
    ),
    Atom(
        "bad_network_preference",
        "preference",
        (MOBILE, MMS),
        _phone("set_network_mode_preference", mode="2g_only"),
        _user_fix("set_network_mode_preference", mode="4g_5g_preferred"),
    ),
    Atom("bad_vpn", "vpn", (MOBILE,), _phone("break_vpn"), _user_fix("disconnect_vpn")),
    Atom(
        "data_usage_exceeded",
        "usage",
        (MOBILE, MMS),
        lambda subject: [_used(subject, 0.1)],
        lambda subject: [step("assistant", "refuel_data", **subject.line, gb_amount=REFUEL_GB)],
        lambda subject: [
            check_step(
                "assistant",
                "assert_data_refueling_amount",
                **subject.line,
                expected_amount=subject.data_refueling_gb + REFUEL_GB,
            )
        ],
    ),
    Atom(
        "data_usage_exceeded_no_refuel",
        "usage",
        (MOBILE, MMS),
        lambda subject: [
            init_step("assistant", "refuel_data", **subject.line, gb_amount=REFUEL_GB),
            _used(subject, REFUEL_GB + 0.1),
        ],
        None,
    ),
    Atom(
        "bad_wifi_calling",
        "wifi_calling",
        (MMS,),
        _phone("set_wifi_calling", enabled=True, mms_over_wifi=True),
        _user_fix("toggle_wifi_calling"),
    ),
    Atom("break_apn_mms_setting", "break_apn_mms", (MMS,), _phone("break_apn_mms_setting"), _RESET),
    Atom("break_app_sms_permission", "permissions", (MMS,), *_permissions("sms")),
    Atom("break_app_storage_permission", "permissions", (MMS,), *_permissions("storage")),
    Atom("break_app_both_permissions", "permissions", (MMS,), *_permissions("sms", "storage")),
)
ATOMS: dict[str, Atom] = {atom.name: atom for atom in _LISTED}
