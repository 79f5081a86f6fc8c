"""What a customer understands of an agent's words."""

import pytest

from hf_pipelines.tau2_bench.users.parse import parse

MODE = {"mode": "4g_5g_preferred"}
STORAGE = {"app_name": "messaging", "permission": "storage"}
TABLE = [
    ("Please turn off Airplane Mode.", [("toggle_airplane_mode", {}, False)]),
    ("Could you run a speed test for me?", [("run_speed_test", {}, None)]),
    ("What does your status bar show right now?", [("check_status_bar", {}, None)]),
    ("Take the SIM card out and put it back in.", [("reseat_sim_card", {}, None)]),
    ("Please check your SIM card status.", [("check_sim_status", {}, None)]),
    ("Turn Data Saver off, please.", [("toggle_data_saver_mode", {}, False)]),
    ("Please switch on mobile data in settings.", [("toggle_data", {}, True)]),
    ("Turn on data roaming.", [("toggle_roaming", {}, True)]),
    ("Please disconnect your VPN.", [("disconnect_vpn", {}, None)]),
    ("Are you using a VPN?", [("check_vpn_status", {}, None)]),
    (
        "Reset the APN settings, then restart your phone.",
        [("reset_apn_settings", {}, None), ("reboot_device", {}, None)],
    ),
    ("Set the preferred network to 5G.", [("set_network_mode_preference", MODE, None)]),
    ('Use `set_network_mode_preference(mode="4g_5g_preferred")`.', [("set_network_mode_preference", MODE, None)]),
    ("Please grant the messaging app the storage permission.", [("grant_app_permission", STORAGE, None)]),
    ("Check which permissions the messaging app has.", [("check_app_permissions", {"app_name": "messaging"}, None)]),
    ("Is Wi-Fi Calling on? Please check.", [("check_wifi_calling_status", {}, None)]),
    ("Please turn Wi-Fi Calling OFF.", [("toggle_wifi_calling", {}, False)]),
    ("Try to send an MMS now.", [("can_send_mms", {}, None)]),
    ("Please accept the request and make the payment.", [("make_payment", {}, None)]),
    ("Have you received a payment request? Please check.", [("check_payment_request", {}, None)]),
    ("You do not need to restart the phone. Run the speed test again.", [("run_speed_test", {}, None)]),
    ("Could you give me your phone number?", []),
    ("Thanks for waiting, I am looking into your account.", []),
    # further ones
    ("Don't restart the phone, run the speed test.", [("run_speed_test", {}, None)]),
    ("I have enabled roaming on your line. Please run a speed test.", [("run_speed_test", {}, None)]),
    ("May I send you a payment request over $65.00?", []),
    ("Your SIM card is fine.", []),
    ('Call grant_app_permission {"app_name": "messaging", "permission": "storage"}', [
        ("grant_app_permission", STORAGE, None)
    ]),
    ("Use toggle_data to turn it on.", [("toggle_data", {}, True)]),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "requests"), TABLE)
def test_requests_are_those_of_the_table_when_an_agent_says_this(sentence, requests):
    assert parse(sentence) == requests
