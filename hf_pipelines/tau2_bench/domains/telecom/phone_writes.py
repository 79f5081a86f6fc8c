"""What the customer can do with the phone."""

from typing import Any

from hf_pipelines.tau2_bench.domains.base import write_tool
from hf_pipelines.tau2_bench.domains.telecom import phone
from hf_pipelines.tau2_bench.domains.telecom.entities import DEFAULT_APN
from hf_pipelines.tau2_bench.domains.telecom.phone_reads import PhoneReads, on_off
from hf_pipelines.tau2_bench.schema import ToolError

NETWORK_MODES = tuple(phone.TECHNOLOGY_OF_PREFERENCE)
PERMISSIONS = ("sms", "storage", "phone", "network")
APN_NAMES = ("internet", "broken")
VPN_PROFILE = {"server_address": "192.168.1.1", "protocol": "OpenVPN", "server_performance": "excellent"}


class PhoneWrites(PhoneReads):
    """Fifteen tools that change the phone; their answers end with the status bar as it is then."""

    def edit(self) -> dict[str, Any]:
        """The phone, for writing."""
        return self.store.edit("device")

    def search(self) -> None:
        """Look for a network."""
        phone.search_network(self.edit(), self.surroundings)

    def _answer(self, text: str) -> str:
        return f"{text}\nStatus bar: {phone.status_bar(self.device)}"

    def _drop_wifi(self) -> None:
        self.edit().update(wifi_connected=False, wifi_ssid=None, wifi_signal_strength="none")

    def _set_vpn(self, profile: dict[str, Any] | None) -> None:
        connected = profile is not None
        self.edit().update(vpn_connected=connected, vpn_details=dict(profile) if connected else None)

    def _set_airplane_mode(self, on: bool) -> None:
        device = self.edit()
        device["airplane_mode"] = on
        if on or device["wifi_enabled"]:
            self._drop_wifi()
        if on and device["vpn_connected"]:
            self._set_vpn(None)
        self.search()

    def _set_permission(self, app_name: str, permission: str, granted: bool) -> str | None:
        """Write a permission; returns why not, or `None`."""
        app = self.device["app_statuses"].get(app_name)
        if app is None:
            return f"There is no app {app_name!r} on this phone."
        if permission not in PERMISSIONS:
            return f"There is no permission {permission!r}; there are {', '.join(PERMISSIONS)}."
        self.edit()["app_statuses"][app_name]["permissions"][permission] = granted
        return None

    # ----------------------------------------------------------------------------------------------------- network

    @write_tool
    def set_network_mode_preference(self, mode: str) -> str:
        """Choose which type of network the phone prefers.

        Args:
            mode: One of 4g_5g_preferred, 4g_only, 3g_only, 2g_only.
        """
        if mode not in NETWORK_MODES:
            return self._answer(f"There is no network mode {mode!r}; there are {', '.join(NETWORK_MODES)}.")
        self.edit()["network_mode_preference"] = mode
        self.search()
        return self._answer(f"Preferred network mode is now {mode}.")

    @write_tool
    def toggle_airplane_mode(self) -> str:
        """Switch airplane mode on or off. On: no cellular service, no Wi-Fi, no VPN."""
        self._set_airplane_mode(not self.device["airplane_mode"])
        return self._answer(f"Airplane mode is now {on_off(self.device['airplane_mode'])}.")

    @write_tool
    def reseat_sim_card(self) -> str:
        """Take the SIM card out and put it back in. This does not unlock a locked card."""
        self.edit()["sim_card_missing"] = False
        self.search()
        return self._answer("The SIM card was taken out and put back in.")

    @write_tool
    def toggle_data(self) -> str:
        """Switch mobile data on or off."""
        device = self.edit()
        device["data_enabled"] = not device["data_enabled"]
        self.search()
        return self._answer(f"Mobile data is now {on_off(device['data_enabled'])}.")

    @write_tool
    def toggle_roaming(self) -> str:
        """Switch the phone's data roaming on or off, for data outside the home network."""
        device = self.edit()
        device["roaming_enabled"] = not device["roaming_enabled"]
        self.search()
        return self._answer(f"Data roaming is now {on_off(device['roaming_enabled'])}.")

    @write_tool
    def toggle_data_saver_mode(self) -> str:
        """Switch Data Saver on or off. On, it slows mobile data down."""
        device = self.edit()
        device["data_saver_mode"] = not device["data_saver_mode"]
        return self._answer(f"Data Saver is now {on_off(device['data_saver_mode'])}.")

    @write_tool
    def set_apn_settings(self, apn_settings: dict) -> str:
        """Replace the access point settings; what is left out takes the carrier's default.

        Args:
            apn_settings: Object with any of apn_name, reset_at_reboot, mms_apn, mmsc_url, mms_proxy, mms_port.
        """
        self.edit()["active_apn_settings"] = checked_apn(apn_settings)
        self.search()
        return self._answer("The access point settings were saved.")

    @write_tool
    def reset_apn_settings(self) -> str:
        """Reset the access point settings to the carrier's defaults. This takes effect when the phone restarts."""
        self.edit()["active_apn_settings"]["reset_at_reboot"] = True
        self.search()
        return self._answer("The access point settings will be reset at the next restart.")

    @write_tool
    def reboot_device(self) -> str:
        """Restart the phone. It then applies a pending reset of the access point settings and looks for a network."""
        device = self.edit()
        if device["active_apn_settings"]["reset_at_reboot"]:
            device["active_apn_settings"] = dict(DEFAULT_APN)
        self.search()
        return self._answer("The phone has restarted.")

    # ----------------------------------------------------------------------------------------------- Wi-Fi and VPN

    @write_tool
    def toggle_wifi(self) -> str:
        """Switch the Wi-Fi radio on or off. Not possible in airplane mode."""
        if self.device["airplane_mode"]:
            return self._answer("Wi-Fi cannot be switched in airplane mode.")
        device = self.edit()
        device["wifi_enabled"] = not device["wifi_enabled"]
        if not device["wifi_enabled"]:
            self._drop_wifi()
        return self._answer(f"Wi-Fi is now {on_off(device['wifi_enabled'])}.")

    @write_tool
    def toggle_wifi_calling(self) -> str:
        """Switch Wi-Fi Calling on or off: calls over Wi-Fi instead of the cellular network."""
        device = self.edit()
        device["wifi_calling_enabled"] = not device["wifi_calling_enabled"]
        return self._answer(f"Wi-Fi Calling is now {on_off(device['wifi_calling_enabled'])}.")

    @write_tool
    def connect_vpn(self) -> str:
        """Connect to the VPN."""
        if self.device["vpn_connected"]:
            return self._answer("The VPN is already connected.")
        self._set_vpn(VPN_PROFILE)
        return self._answer("The VPN is now connected.")

    @write_tool
    def disconnect_vpn(self) -> str:
        """Disconnect the VPN."""
        if not self.device["vpn_connected"]:
            return self._answer("No VPN is connected.")
        self._set_vpn(None)
        return self._answer("The VPN is now disconnected.")

    # ------------------------------------------------------------------------------------------- apps and payments

    @write_tool
    def grant_app_permission(self, app_name: str, permission: str) -> str:
        """Give an app a permission.

        Args:
            app_name: Name of the app, such as messaging.
            permission: One of sms, storage, phone, network.
        """
        problem = self._set_permission(app_name, permission.lower(), True)
        return self._answer(problem or f"The app {app_name} now has the permission {permission.lower()}.")

    @write_tool
    def make_payment(self) -> str:
        """Pay the bill of the open payment request."""
        request = self.surroundings["payment_request"]
        if request is None:
            return "There is no payment request to pay."
        self.store.edit("surroundings")["payment_request"]["paid"] = True
        return f"Paid ${request['amount_due']:.2f} for bill {request['bill_id']}."


def checked_apn(settings: dict[str, Any]) -> dict[str, Any]:
    """Access point settings with the defaults filled in.

    Raises:
        ToolError: If a key, the name of the access point or the type of a value is wrong.
    """
    unknown = sorted(settings.keys() - DEFAULT_APN.keys())
    if unknown:
        raise ToolError(f"apn_settings has unknown keys {unknown}; allowed are {', '.join(DEFAULT_APN)}")
    full = {**DEFAULT_APN, **settings}
    if full["apn_name"] not in APN_NAMES:
        raise ToolError(f"apn_name must be one of {', '.join(APN_NAMES)}, not {full['apn_name']!r}")
    types = {"reset_at_reboot": bool, "mms_port": int | None, "mms_apn": str}
    for key, value in full.items():
        wanted = types.get(key, str | None)
        if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
            raise ToolError(f"apn_settings[{key!r}] must not be {value!r}")
    return full
