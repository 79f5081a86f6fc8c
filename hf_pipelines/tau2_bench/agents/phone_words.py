"""How a scripted agent asks the customer for each step on the phone: plain words, one step a sentence."""

import json
from typing import Any

WORDS = {
    "check_status_bar": "What does your status bar show right now?",
    "check_network_status": "Please check the network status of your phone.",
    "check_network_mode_preference": "Please check your network mode preference.",
    "run_speed_test": "Could you run a speed test for me?",
    "check_sim_status": "Please check your SIM card status.",
    "check_data_restriction_status": "Is Data Saver on? Please check.",
    "check_apn_settings": "Please check your APN settings.",
    "check_wifi_status": "Is Wi-Fi on? Please check.",
    "check_wifi_calling_status": "Is Wi-Fi Calling on? Please check.",
    "check_vpn_status": "Are you using a VPN? Please check.",
    "check_installed_apps": "Which apps do you have? Please list your installed apps.",
    "can_send_mms": "Try to send an MMS now.",
    "check_payment_request": "Have you received a payment request? Please check.",
    "reseat_sim_card": "Take the SIM card out and put it back in, please.",
    "reset_apn_settings": "Please reset the APN settings.",
    "reboot_device": "Please restart your phone.",
    "connect_vpn": "Please connect your VPN.",
    "disconnect_vpn": "Please disconnect your VPN.",
    "make_payment": "Please accept the request and make the payment.",
}


def request(tool: str, arguments: dict[str, Any] | None = None, wanted: bool | None = None) -> str:
    """A sentence that asks for one step.

    Args:
        tool (`str`): The customer's tool.
        arguments (`dict`, *optional*): Its arguments.
        wanted (`bool`, *optional*): For a switch, whether it shall be on in the end.
    """
    if wanted is not None:
        thing = tool.removeprefix("toggle_").replace("_", " ")
        thing = {"data": "mobile data", "wifi": "Wi-Fi", "wifi calling": "Wi-Fi Calling"}.get(thing, thing)
        thing = {"roaming": "data roaming", "data saver mode": "Data Saver mode"}.get(thing, thing)
        return f"Please turn {'on' if wanted else 'off'} {thing}."
    if not arguments and tool in WORDS:
        return WORDS[tool]
    if tool == "check_app_permissions" and set(arguments or {}) == {"app_name"}:
        return f"Check which permissions the {arguments['app_name']} app has, please."
    if tool == "grant_app_permission" and set(arguments or {}) == {"app_name", "permission"}:
        return f"Please grant the {arguments['app_name']} app the {arguments['permission']} permission."
    shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in (arguments or {}).items())
    return f"Please use {tool}({shown})."
