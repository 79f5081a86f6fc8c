"""How the phone works: the search for a network, the speed of its data, and what its status bar shows."""

from typing import Any

NO_NETWORK = ("no_service", "none", "none")  # connection, technology, signal
SPEED_RANGE = {"2G": (0.1, 0.4), "3G": (1.0, 5.0), "4G": (10.0, 100.0), "5G": (50.0, 500.0)}  # Mbps
SIGNAL_FACTOR = {"poor": 0.2, "fair": 0.5, "good": 0.8, "excellent": 1.0}
SPEED_WORDS = ((1, "Very Poor"), (5, "Poor"), (25, "Fair"), (100, "Good"))
NO_CONNECTION = "No Connection"
POOR_VPN_FACTOR, DATA_SAVER_FACTOR = 0.1, 0.2
TECHNOLOGY_OF_PREFERENCE = {"4g_5g_preferred": "5G", "4g_only": "4G", "3g_only": "3G", "2g_only": "2G"}


def search_network(device: dict[str, Any], surroundings: dict[str, Any]) -> None:
    """Let the phone look for a network and write what it finds into `device`."""
    found = NO_NETWORK
    if device["sim_card_status"] == "active" and not device["sim_card_missing"]:
        radio = surroundings["signal_strength"]
        technology = TECHNOLOGY_OF_PREFERENCE[device["network_mode_preference"]]
        if device["network_mode_preference"] == "4g_5g_preferred" and radio.get("5G", "none") == "none":
            technology = "4G"
        found = ("connected", technology, radio.get(technology, "none"))
    apn_broken = device["active_apn_settings"]["apn_name"] == "broken"
    if device["airplane_mode"] or apn_broken or not surroundings["line_active"]:
        found = NO_NETWORK
    device["network_connection_status"], device["network_technology_connected"] = found[:2]
    device["network_signal_strength"] = found[2]


def data_working(device: dict[str, Any], surroundings: dict[str, Any]) -> bool:
    """Whether mobile data reaches the internet."""
    roams = device["roaming_enabled"] and surroundings["roaming_allowed"]
    return (
        not device["airplane_mode"]
        and device["network_signal_strength"] != "none"
        and device["network_connection_status"] != "no_service"
        and (not surroundings["is_abroad"] or roams)
        and device["data_enabled"]
        and not surroundings["mobile_data_usage_exceeded"]
    )


def speed(device: dict[str, Any], surroundings: dict[str, Any]) -> tuple[float | None, str]:
    """Download speed in Mbps and its word; `(None, "No Connection")` where data does not work."""
    limits = SPEED_RANGE.get(device["network_technology_connected"])
    factor = SIGNAL_FACTOR.get(device["network_signal_strength"])
    if not data_working(device, surroundings) or limits is None or factor is None:
        return None, NO_CONNECTION
    vpn = device["vpn_details"]
    if device["vpn_connected"] and vpn and vpn["server_performance"] == "poor":
        factor *= POOR_VPN_FACTOR
    if device["data_saver_mode"]:
        factor *= DATA_SAVER_FACTOR
    mbps = round(sum(limits) / 2 * factor, 2)
    return mbps, next((word for limit, word in SPEED_WORDS if mbps < limit), "Excellent")


def can_send_mms(device: dict[str, Any], surroundings: dict[str, Any]) -> bool:
    """Whether the messaging app can send a picture message."""
    messaging = device["app_statuses"].get("messaging", {}).get("permissions", {})
    return bool(
        data_working(device, surroundings)
        and device["network_technology_connected"] != "2G"
        and not (device["wifi_calling_enabled"] and device["wifi_calling_mms_over_wifi"])
        and device["active_apn_settings"]["mmsc_url"]
        and messaging.get("storage")
        and messaging.get("sms")
    )


def sim_status(device: dict[str, Any]) -> str:
    """`"active"`, `"missing"`, `"locked_pin"` or `"locked_puk"`."""
    return "missing" if device["sim_card_missing"] else device["sim_card_status"]


def status_bar(device: dict[str, Any]) -> str:
    """What the top of the screen shows, as one line."""
    if device["airplane_mode"]:
        parts = ["✈️ Airplane Mode"]
    else:
        signal, technology = device["network_signal_strength"], device["network_technology_connected"]
        parts = ["📵 No Signal" if signal == "none" else f"📶 Signal {signal.capitalize()}"]
        if technology != "none":
            parts.append(technology)
        if technology != "none" and device["data_enabled"]:
            parts.append("📱 Data Enabled")
            if device["data_saver_mode"]:
                parts.append("🔽 Data Saver")
        else:
            parts.append("📵 Data Disabled")
    if device["wifi_connected"]:
        parts.append(f"📡 Wi-Fi {device['wifi_ssid'] or ''}".rstrip())
    if device["vpn_connected"]:
        parts.append("🔒 VPN")
    parts.append(f"🔋 {device['battery_level']}%")
    return " | ".join(parts)
