"""What the customer can look at on the phone."""

from typing import Any

from hf_pipelines.tau2_bench.domains.base import Toolkit, read_tool
from hf_pipelines.tau2_bench.domains.telecom import phone


def on_off(value: bool) -> str:
    """`"ON"` or `"OFF"`."""
    return "ON" if value else "OFF"


class PhoneReads(Toolkit):
    """Fifteen tools that change nothing."""

    @property
    def device(self) -> dict[str, Any]:
        """The phone, for reading."""
        return self.store["device"]

    @property
    def surroundings(self) -> dict[str, Any]:
        """Where the phone is and what the carrier lets it do, for reading."""
        return self.store["surroundings"]

    @read_tool
    def check_status_bar(self) -> str:
        """Look at the top of the screen: airplane mode, signal, network type, mobile data, data saver, Wi-Fi, VPN,
        battery."""
        return f"Status bar: {phone.status_bar(self.device)}"

    @read_tool
    def check_network_status(self) -> str:
        """See how the phone is connected: airplane mode, SIM, service, signal, network type, mobile data, data
        roaming, Wi-Fi."""
        device = self.device
        return "\n".join(
            (
                f"Airplane mode: {on_off(device['airplane_mode'])}",
                f"SIM card: {phone.sim_status(device)}",
                f"Cellular connection: {device['network_connection_status']}",
                f"Signal strength: {device['network_signal_strength']}",
                f"Network type: {device['network_technology_connected']}",
                f"Mobile data: {on_off(device['data_enabled'])}",
                f"Data roaming: {on_off(device['roaming_enabled'])}",
                f"Wi-Fi radio: {on_off(device['wifi_enabled'])}, connected: {device['wifi_ssid'] or 'no'}",
            )
        )

    @read_tool
    def check_network_mode_preference(self) -> str:
        """See which type of network the phone prefers."""
        return f"Preferred network mode: {self.device['network_mode_preference']}"

    @read_tool
    def run_speed_test(self) -> str:
        """Measure the download speed of the mobile data connection."""
        mbps, word = phone.speed(self.device, self.surroundings)
        if mbps is None:
            return "Speed test failed: no connection. Mobile data does not reach the internet."
        return f"Speed test: {mbps} Mbps ({word})."

    @read_tool
    def check_sim_status(self) -> str:
        """See whether the SIM card is active, missing, or locked."""
        texts = {
            "active": "The SIM card is active and working.",
            "missing": "No SIM card detected: it is missing or not seated properly.",
            "locked_pin": "The SIM card is locked and asks for a PIN.",
            "locked_puk": "The SIM card is locked and asks for a PUK.",
        }
        return texts[phone.sim_status(self.device)]

    @read_tool
    def check_data_restriction_status(self) -> str:
        """See whether Data Saver limits the use of data."""
        return f"Data Saver is {on_off(self.device['data_saver_mode'])}."

    @read_tool
    def check_apn_settings(self) -> str:
        """See the name of the access point and the address of the picture message centre (MMSC URL)."""
        apn = self.device["active_apn_settings"]
        state = " (incorrect)" if apn["apn_name"] == "broken" else ""
        later = " A reset is pending and applies when the phone restarts." if apn["reset_at_reboot"] else ""
        return f"APN name: {apn['apn_name']}{state}. MMSC URL: {apn['mmsc_url'] or 'not set'}.{later}"

    @read_tool
    def check_wifi_status(self) -> str:
        """See whether Wi-Fi is on and connected."""
        device = self.device
        if not device["wifi_enabled"]:
            return "Wi-Fi is OFF."
        if not device["wifi_connected"]:
            return "Wi-Fi is ON, not connected to a network."
        return f"Wi-Fi is ON, connected to {device['wifi_ssid']} (signal {device['wifi_signal_strength']})."

    @read_tool
    def check_wifi_calling_status(self) -> str:
        """See whether Wi-Fi Calling is on, and whether it also carries picture messages."""
        device = self.device
        carries = on_off(device["wifi_calling_mms_over_wifi"])
        return f"Wi-Fi Calling is {on_off(device['wifi_calling_enabled'])}. MMS over Wi-Fi: {carries}."

    @read_tool
    def check_vpn_status(self) -> str:
        """See whether a VPN is connected and how well it performs."""
        device = self.device
        if not device["vpn_connected"]:
            return "No VPN is connected."
        details = device["vpn_details"] or {}
        return (
            f"VPN is ON and connected. Server: {details.get('server_address')}, protocol: {details.get('protocol')}, "
            f"performance: {details.get('server_performance', 'unknown')}."
        )

    @read_tool
    def check_installed_apps(self) -> str:
        """List the apps on the phone."""
        return f"Installed apps: {', '.join(self.device['app_statuses'])}."

    @read_tool
    def check_app_status(self, app_name: str) -> str:
        """See what is known about one app, its permissions included.

        Args:
            app_name: Name of the app, such as messaging.
        """
        return self._permissions(app_name, f"App {app_name} is installed. ")

    @read_tool
    def check_app_permissions(self, app_name: str) -> str:
        """See which permissions an app has.

        Args:
            app_name: Name of the app, such as messaging.
        """
        return self._permissions(app_name, "")

    def _permissions(self, app_name: str, start: str) -> str:
        app = self.device["app_statuses"].get(app_name)
        if app is None:
            return f"There is no app {app_name!r} on this phone."
        granted = [name for name, has in app["permissions"].items() if has]
        denied = [name for name, has in app["permissions"].items() if not has]
        words = (
            f"Granted to {app_name}: {', '.join(granted) or 'nothing'}. Not granted: {', '.join(denied) or 'nothing'}."
        )
        return start + words

    @read_tool
    def can_send_mms(self) -> str:
        """Try whether the messaging app can send a picture message (MMS)."""
        works = phone.can_send_mms(self.device, self.surroundings)
        return f"The messaging app {'can' if works else 'cannot'} send MMS messages."

    @read_tool
    def check_payment_request(self) -> str:
        """See whether the carrier has asked for a payment."""
        request = self.surroundings["payment_request"]
        if request is None:
            return "There is no payment request."
        return f"Payment request for bill {request['bill_id']}: ${request['amount_due']:.2f}."
