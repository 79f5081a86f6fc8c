"""What an airline agent can look up."""

from typing import Any

from hf_pipelines.tau2_bench.domains.base import Toolkit, generic_tool, read_tool, require
from hf_pipelines.tau2_bench.domains.calculator import calculate
from hf_pipelines.tau2_bench.schema import ToolError

AIRPORTS = {
    "SFO": "San Francisco",
    "JFK": "New York",
    "LAX": "Los Angeles",
    "ORD": "Chicago",
    "DFW": "Dallas",
    "DEN": "Denver",
    "SEA": "Seattle",
    "ATL": "Atlanta",
    "MIA": "Miami",
    "BOS": "Boston",
    "PHX": "Phoenix",
    "IAH": "Houston",
    "LAS": "Las Vegas",
    "MCO": "Orlando",
    "EWR": "Newark",
    "CLT": "Charlotte",
    "MSP": "Minneapolis",
    "DTW": "Detroit",
    "PHL": "Philadelphia",
    "LGA": "LaGuardia",
}


class AirlineReads(Toolkit):
    """Tools that change nothing."""

    def flight(self, flight_number: str) -> dict[str, Any]:
        """A flight's record, for reading."""
        return require(self.store["flights"], flight_number, "flight")

    def departure(self, flight_number: str, date: str) -> dict[str, Any]:
        """What is known of a flight on one day, for reading."""
        return require(self.flight(flight_number)["dates"], date, f"departure of {flight_number} on")

    def user(self, user_id: str) -> dict[str, Any]:
        """A user's record, for reading."""
        return require(self.store["users"], user_id, "user")

    def reservation(self, reservation_id: str) -> dict[str, Any]:
        """A reservation's record, for reading."""
        return require(self.store["reservations"], reservation_id, "reservation")

    @read_tool
    def get_user_details(self, user_id: str) -> dict:
        """Show a user's profile: address, payment methods, membership, saved passengers, reservations.

        Args:
            user_id: The user's id, such as sara_doe_496.
        """
        return self.user(user_id)

    @read_tool
    def get_reservation_details(self, reservation_id: str) -> dict:
        """Show a reservation: flights, passengers, cabin, bags, insurance, payments, status.

        Args:
            reservation_id: The reservation's id, such as 8JX2WO.
        """
        return self.reservation(reservation_id)

    @read_tool
    def get_flight_status(self, flight_number: str, date: str) -> str:
        """Tell the status of a flight on one day: available, on time, flying, landed, cancelled or delayed.

        Args:
            flight_number: The flight, such as HAT001.
            date: Day of departure as YYYY-MM-DD.
        """
        return self.departure(flight_number, date)["status"]

    @read_tool
    def list_all_airports(self) -> list:
        """List the airports that are served, with their cities."""
        return [{"iata": iata, "city": city} for iata, city in AIRPORTS.items()]

    @read_tool
    def search_direct_flight(self, origin: str, destination: str, date: str) -> list:
        """Find bookable flights without a stop.

        Args:
            origin: Airport code of departure, such as JFK.
            destination: Airport code of arrival.
            date: Day of departure as YYYY-MM-DD.
        """
        return [
            _offer(flight, date, None)
            for flight in self.store["flights"].values()
            if flight["origin"] == origin and flight["destination"] == destination and _is_available(flight, date)
        ]

    @read_tool
    def search_onestop_flight(self, origin: str, destination: str, date: str) -> list:
        """Find bookable pairs of flights with one stop between them.

        Args:
            origin: Airport code of departure, such as JFK.
            destination: Airport code of arrival.
            date: Day of the first departure as YYYY-MM-DD.
        """
        if not date[-2:].isdigit():
            raise ToolError(f"date must be YYYY-MM-DD, not {date!r:.40}")
        flights = self.store["flights"].values()
        pairs = []
        for first in flights:
            if first["origin"] != origin or not _is_available(first, date):
                continue
            arrival = first["scheduled_arrival_time_est"]
            second_date = f"2024-05-{int(date[-2:]) + 1}" if "+1" in arrival else date
            for second in flights:
                if (
                    second["origin"] == first["destination"]
                    and second["destination"] == destination
                    and second["scheduled_departure_time_est"] >= arrival
                    and _is_available(second, second_date)
                ):
                    pairs.append([_offer(first, date, date), _offer(second, second_date, second_date)])
        return pairs

    @generic_tool
    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression, rounded to two decimals.

        Args:
            expression: Digits, + - * / ( ) . and spaces.
        """
        return calculate(expression)

    @generic_tool
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human agent. Only for what the policy and your tools do not let you do.

        Args:
            summary: What the user needs and what was tried.
        """
        return "Transfer successful"


def _is_available(flight: dict[str, Any], date: str) -> bool:
    return flight["dates"].get(date, {}).get("status") == "available"


def _offer(flight: dict[str, Any], date: str, shown_date: str | None) -> dict[str, Any]:
    departure = flight["dates"][date]
    return {
        "flight_number": flight["flight_number"],
        "origin": flight["origin"],
        "destination": flight["destination"],
        "status": departure["status"],
        "scheduled_departure_time_est": flight["scheduled_departure_time_est"],
        "scheduled_arrival_time_est": flight["scheduled_arrival_time_est"],
        "date": shown_date,
        "available_seats": departure["available_seats"],
        "prices": departure["prices"],
    }
