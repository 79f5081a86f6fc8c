"""Telecom's start state: the carrier's tables, the phone, and what surrounds it."""

import json
import tomllib
from pathlib import Path
from typing import Any

from hf_pipelines.tau2_bench.store import json_copy

CLOCK = "2025-02-25 12:08 EST"
TODAY = "2025-02-25"

KEYS = {
    "plans": "plan_id",
    "devices": "device_id",
    "lines": "line_id",
    "customers": "customer_id",
    "bills": "bill_id",
}
FIELDS = {
    "plans": ("plan_id", "name", "data_limit_gb", "price_per_month", "data_refueling_price_per_gb"),
    "devices": (
        *("device_id", "device_type", "model", "imei", "is_esim_capable", "activated", "activation_date"),
        "last_esim_transfer_date",
    ),
    "lines": (
        *("line_id", "phone_number", "status", "plan_id", "device_id", "data_used_gb", "data_refueling_gb"),
        *("roaming_enabled", "contract_end_date", "last_plan_change_date", "last_sim_replacement_date"),
        "suspension_start_date",
    ),
    "customers": (
        *("customer_id", "full_name", "date_of_birth", "email", "phone_number", "address", "account_status"),
        *("payment_methods", "line_ids", "bill_ids", "created_at", "last_extension_date"),
        "goodwill_credit_used_this_year",
    ),
    "bills": (
        *("bill_id", "customer_id", "period_start", "period_end", "issue_date", "total_due", "due_date"),
        *("line_items", "status"),
    ),
}
OPTIONAL = {
    *("imei", "activation_date", "last_esim_transfer_date", "device_id", "last_plan_change_date"),
    *("last_sim_replacement_date", "suspension_start_date", "last_extension_date", "contract_end_date"),
}

DEFAULT_APN = {
    "apn_name": "internet",
    "reset_at_reboot": False,
    "mms_apn": "mms",
    "mmsc_url": "http://mms.carrier.com/mms/wapenc",
    "mms_proxy": None,
    "mms_port": None,
}

PHONE: dict[str, dict[str, Any]] = {
    "device": {
        "sim_card_status": "active",
        "sim_card_missing": False,
        "airplane_mode": False,
        "network_signal_strength": "good",
        "network_technology_connected": "5G",
        "network_connection_status": "connected",
        "battery_level": 80,
        "data_enabled": True,
        "roaming_enabled": False,
        "network_mode_preference": "4g_5g_preferred",
        "active_apn_settings": DEFAULT_APN,
        "wifi_enabled": False,
        "wifi_connected": False,
        "wifi_ssid": None,
        "wifi_signal_strength": "none",
        "wifi_calling_enabled": False,
        "wifi_calling_mms_over_wifi": False,
        "data_saver_mode": False,
        "vpn_enabled_setting": False,
        "vpn_connected": False,
        "vpn_details": None,
        "app_statuses": {
            "messaging": {
                "app_name": "messaging",
                "permissions": {"sms": True, "storage": True, "phone": True, "network": False},
            },
            "browser": {
                "app_name": "browser",
                "permissions": {"sms": False, "storage": True, "phone": False, "network": True},
            },
        },
    },
    "surroundings": {
        "name": None,
        "phone_number": None,
        "is_abroad": False,
        "roaming_allowed": False,
        "line_active": True,
        "mobile_data_usage_exceeded": False,
        "payment_request": None,
        "signal_strength": {"2G": "poor", "3G": "fair", "4G": "good", "5G": "excellent"},
    },
}


def phone_state() -> dict[str, Any]:
    """The phone and its surroundings at the start, as a copy."""
    return json_copy(PHONE)


def packaged_tables() -> dict[str, dict[str, Any]]:
    """The carrier's tables that come with the package."""
    path = Path(__file__).parent.parent / "telecom_db.json"
    return checked_tables(json.loads(path.read_text(encoding="utf-8")), str(path))


def tables_from_toml(path: Path) -> dict[str, dict[str, Any]]:
    """The carrier's tables of a `db.toml`, where each table is a list of records."""
    lists = tomllib.loads(path.read_text(encoding="utf-8"))
    tables = {name: {record[KEYS[name]]: record for record in lists.get(name, ())} for name in KEYS}
    return checked_tables(tables, str(path))


def checked_tables(tables: dict[str, dict[str, Any]], source: str) -> dict[str, dict[str, Any]]:
    """Give every record all its fields (absent optional ones are null).

    Raises:
        ValueError: If a record has an unknown field or lacks one.
    """
    full: dict[str, dict[str, Any]] = {}
    for name, fields in FIELDS.items():
        full[name] = {}
        for key, record in tables[name].items():
            unknown = sorted(record.keys() - set(fields))
            missing = [field for field in fields if field not in record and field not in OPTIONAL]
            if unknown or missing:
                raise ValueError(f"{source}: {name}[{key!r}] has unknown fields {unknown} or lacks {missing}")
            full[name][key] = {field: record.get(field) for field in fields}
    return full
