"""What a task can do to the phone before the conversation, and what it can ask about its end."""

from typing import Any, Literal

from hf_pipelines.tau2_bench.domains.base import assertion, setup
from hf_pipelines.tau2_bench.domains.telecom import phone
from hf_pipelines.tau2_bench.domains.telecom.phone_writes import VPN_PROFILE, PhoneWrites
from hf_pipelines.tau2_bench.schema import ToolError


class TelecomUserTools(PhoneWrites):
    """The customer's phone: thirty tools, the set-up primitives and the assertions."""

    # ------------------------------------------------------------------------------------------------------ set-up

    @setup
    def set_user_info(self, name: str, phone_number: str) -> None:
        """Say whose phone it is and which number it has."""
        self.store.edit("surroundings").update(name=name, phone_number=phone_number)

    @setup
    def set_user_location(self, abroad: bool) -> None:
        """Put the customer abroad or at home."""
        self.store.edit("surroundings")["is_abroad"] = abroad

    @setup
    def simulate_network_search(self) -> None:
        """Let the phone look for a network."""
        self.search()

    @setup
    def turn_airplane_mode_on(self) -> None:
        """Airplane mode on, whatever it was."""
        self._set_airplane_mode(True)

    @setup
    def unseat_sim_card(self) -> None:
        """Loosen the SIM card."""
        self.edit()["sim_card_missing"] = True
        self.search()

    @setup
    def lock_sim_card(self, mode: Literal["pin", "puk"]) -> None:
        """Lock the SIM card."""
        self.edit()["sim_card_status"] = f"locked_{mode}"
        self.search()

    @setup
    def break_apn_settings(self) -> None:
        """Give the access point a wrong name."""
        self.edit()["active_apn_settings"]["apn_name"] = "broken"
        self.search()

    @setup
    def break_apn_mms_setting(self) -> None:
        """Remove the address of the picture message centre."""
        self.edit()["active_apn_settings"]["mmsc_url"] = None

    @setup
    def turn_data_on(self) -> None:
        """Mobile data on."""
        self._switch("data_enabled", True)

    @setup
    def turn_data_off(self) -> None:
        """Mobile data off."""
        self._switch("data_enabled", False)

    @setup
    def turn_roaming_on(self) -> None:
        """Data roaming of the phone on."""
        self._switch("roaming_enabled", True)

    @setup
    def turn_roaming_off(self) -> None:
        """Data roaming of the phone off."""
        self._switch("roaming_enabled", False)

    def _switch(self, name: str, value: bool) -> None:
        self.edit()[name] = value
        self.search()

    @setup
    def turn_data_saver_mode_on(self) -> None:
        """Data Saver on."""
        self.edit()["data_saver_mode"] = True

    @setup
    def break_vpn(self) -> None:
        """Connect a VPN that performs poorly."""
        self._set_vpn({**VPN_PROFILE, "server_performance": "poor"})

    @setup
    def set_wifi_calling(self, enabled: bool, mms_over_wifi: bool | None = None) -> None:
        """Set Wi-Fi Calling, and whether it carries picture messages."""
        device = self.edit()
        device["wifi_calling_enabled"] = enabled
        if mms_over_wifi is not None:
            device["wifi_calling_mms_over_wifi"] = mms_over_wifi

    @setup
    def remove_app_permission(self, app_name: str, permission: str) -> None:
        """Take a permission from an app."""
        problem = self._set_permission(app_name, permission.lower(), False)
        if problem:
            raise ToolError(problem)

    # -------------------------------------------------------------------------------------------------- assertions

    def _speed(self) -> tuple[float | None, str]:
        return phone.speed(self.device, self.surroundings)

    @assertion
    def assert_airplane_mode_status(self, expected_status: bool) -> bool:
        """Airplane mode is as expected."""
        return self.device["airplane_mode"] == expected_status

    @assertion
    def assert_service_status(self, expected_status: str) -> bool:
        """The cellular connection is as expected, such as connected or no_service."""
        return self.device["network_connection_status"] == expected_status

    @assertion
    def assert_mobile_data_status(self, expected_status: bool) -> bool:
        """Mobile data reaches the internet, or does not."""
        return phone.data_working(self.device, self.surroundings) == expected_status

    @assertion
    def assert_mobile_roaming_status(self, expected_status: bool) -> bool:
        """The phone's data roaming is as expected."""
        return self.device["roaming_enabled"] == expected_status

    @assertion
    def assert_mobile_data_saver_mode_status(self, expected_status: bool) -> bool:
        """Data Saver is as expected."""
        return self.device["data_saver_mode"] == expected_status

    @assertion
    def assert_internet_speed(self, expected_speed: float, expected_desc: str | None = None) -> bool:
        """The speed in Mbps is at least this, and its word is this one."""
        mbps, word = self._speed()
        as_described = expected_desc is None or word.lower() == expected_desc.lower()
        return (mbps or 0.0) >= expected_speed and as_described

    @assertion
    def assert_internet_not_excellent(self) -> bool:
        """The speed test does not say Excellent."""
        return self._speed()[1] != "Excellent"

    @assertion
    def assert_can_send_mms(self, expected_status: bool) -> bool:
        """A picture message can be sent, or cannot."""
        return phone.can_send_mms(self.device, self.surroundings) == expected_status

    @assertion
    def assert_mobile_data_usage_exceeded(self, expected_status: bool) -> bool:
        """The line has used up its data, or has not."""
        return self.surroundings["mobile_data_usage_exceeded"] == expected_status

    def facts(self) -> dict[str, Any]:
        """What a viewer or a report wants to know of the phone."""
        device = self.device
        mbps, word = self._speed()
        return {
            "service": device["network_connection_status"],
            "signal": device["network_signal_strength"],
            "tech": device["network_technology_connected"],
            "data_working": phone.data_working(device, self.surroundings),
            "speed": mbps,
            "speed_desc": word,
            "mms": phone.can_send_mms(device, self.surroundings),
            "airplane": device["airplane_mode"],
            "sim": phone.sim_status(device),
            "data": device["data_enabled"],
            "roaming": device["roaming_enabled"],
            "saver": device["data_saver_mode"],
            "pref": device["network_mode_preference"],
            "apn": device["active_apn_settings"]["apn_name"],
            "mmsc": device["active_apn_settings"]["mmsc_url"],
            "apn_reset": device["active_apn_settings"]["reset_at_reboot"],
            "wifi": device["wifi_enabled"],
            "wifi_calling": device["wifi_calling_enabled"],
            "wifi_calling_mms": device["wifi_calling_mms_over_wifi"],
            "vpn": device["vpn_details"]["server_performance"] if device["vpn_connected"] else None,
            "sms": device["app_statuses"]["messaging"]["permissions"]["sms"],
            "storage": device["app_statuses"]["messaging"]["permissions"]["storage"],
        }
