"""The three kinds of trouble: which faults go together, and what counts as solved."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_pipelines.tau2_bench.domains.telecom_tasks.atoms import MMS, MOBILE, SERVICE, check_step
from hf_pipelines.tau2_bench.domains.telecom_tasks.subject import Subject

Sets = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Category:
    """A kind of trouble.

    Args:
        name (`str`): Its name in task ids.
        shared_sets (`tuple`): Selection sets that other categories have too; at most one atom of each.
        own_sets (`tuple`): Selection sets of which at least one atom must be there.
        goal (`Callable[[bool, Subject], list]`): Assertions of the end state, for a task that can be solved (`True`)
            or cannot.
        asks_location (`bool`): Whether the customer knows and says where they are.
    """

    name: str
    shared_sets: Sets
    own_sets: Sets
    goal: Callable[[bool, Subject], list[dict[str, Any]]]
    asks_location: bool

    @property
    def sets(self) -> Sets:
        """All selection sets in order."""
        return self.shared_sets + self.own_sets


def _service_goal(solved: bool, subject: Subject) -> list[dict[str, Any]]:
    if not solved:
        return [check_step("user", "assert_service_status", expected_status="no_service")]
    words = "is not as expected"
    return [
        check_step("user", "assert_service_status", message=f"Service status {words}", expected_status="connected"),
        check_step(
            "assistant", "assert_no_overdue_bill", message=f"Overdue bill {words}", overdue_bill_id=subject.bill_id
        ),
    ]


def _mobile_goal(solved: bool, subject: Subject) -> list[dict[str, Any]]:
    if not solved:
        return [
            check_step("user", "assert_mobile_data_status", expected_status=False),
            check_step("user", "assert_internet_speed", expected_speed=0),
        ]
    return [
        check_step("user", "assert_mobile_data_status", expected_status=True),
        check_step("user", "assert_internet_speed", expected_speed=200, expected_desc="excellent"),
    ]


def _mms_goal(solved: bool, subject: Subject) -> list[dict[str, Any]]:
    return [check_step("user", "assert_can_send_mms", expected_status=solved)]


_AIRPLANE, _SIM, _DATA = ("airplane_mode_on",), ("unseat_sim_card",), ("data_mode_off",)
_USAGE = ("data_usage_exceeded", "data_usage_exceeded_no_refuel")
_ROAMING = ("user_abroad_roaming_enabled_off", "user_abroad_roaming_disabled_on", "user_abroad_roaming_disabled_off")
_PERMISSIONS = ("break_app_sms_permission", "break_app_storage_permission", "break_app_both_permissions")
_LISTED = (
    Category(
        MOBILE,
        (_AIRPLANE,),
        (_ROAMING, _DATA, ("data_saver_mode_on",), ("bad_network_preference",), ("bad_vpn",), _USAGE),
        _mobile_goal,
        asks_location=True,
    ),
    Category(
        SERVICE,
        (),
        (
            _AIRPLANE,
            _SIM,
            ("lock_sim_card_pin",),
            ("break_apn_settings",),
            ("overdue_bill_suspension", "contract_end_suspension"),
        ),
        _service_goal,
        asks_location=False,
    ),
    Category(
        MMS,
        (_AIRPLANE, _SIM, _DATA, _USAGE, _ROAMING),
        (("bad_network_preference",), ("bad_wifi_calling",), ("break_apn_mms_setting",), _PERMISSIONS),
        _mms_goal,
        asks_location=True,
    ),
)
CATEGORIES: dict[str, Category] = {category.name: category for category in _LISTED}
