"""What an airline agent can change. The tools do not enforce the policy; the agent must."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from hf_pipelines.tau2_bench.domains.airline_reads import AirlineReads
from hf_pipelines.tau2_bench.domains.base import require, write_tool
from hf_pipelines.tau2_bench.schema import ToolError

Cabin = Literal["business", "economy", "basic_economy"]
NEW_RESERVATION_IDS = ("HATHAT", "HATHAU", "HATHAV")
NEW_CERTIFICATE_IDS = ("certificate_3221322", "certificate_3221323", "certificate_3221324")
CREATED_AT = "2024-05-15T15:00:00"
INSURANCE_PRICE, BAG_PRICE = 30, 50


class FlightLeg(TypedDict):
    """A flight on a day."""

    flight_number: str
    date: str


class Passenger(TypedDict):
    """Who flies."""

    first_name: str
    last_name: str
    dob: str


class Payment(TypedDict):
    """A payment method of the user's profile and what it pays, in whole dollars."""

    payment_id: str
    amount: int


def first_free(candidates: Sequence[str], taken: dict[str, Any], what: str) -> str:
    """The first id that is not taken.

    Raises:
        ToolError: If all are.
    """
    for candidate in candidates:
        if candidate not in taken:
            return candidate
    raise ToolError(f"no more {what} can be made in this conversation")


class AirlineTools(AirlineReads):
    """All fourteen tools of the airline agent."""

    @write_tool
    def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: Literal["round_trip", "one_way"],
        cabin: Cabin,
        flights: list[FlightLeg],
        passengers: list[Passenger],
        payment_methods: list[Payment],
        total_baggages: int,
        nonfree_baggages: int,
        insurance: Literal["yes", "no"],
    ) -> dict:
        """Book a reservation and charge it.

        Args:
            user_id: The user who books.
            origin: Airport code where the trip starts.
            destination: Airport code where the trip goes.
            flight_type: round_trip or one_way.
            cabin: The cabin of all flights.
            flights: Every leg in order, as flight_number and date.
            passengers: Everyone who flies, with first_name, last_name and dob (YYYY-MM-DD).
            payment_methods: What pays how much; the amounts must add up to the price.
            total_baggages: Checked bags in all.
            nonfree_baggages: Checked bags that cost 50 dollars.
            insurance: Whether travel insurance is bought, 30 dollars a passenger.
        """
        user = self.user(user_id)
        reservation_id = first_free(NEW_RESERVATION_IDS, self.store["reservations"], "reservations")
        count = len(passengers)
        legs = [self._new_leg(leg, cabin, count) for leg in flights]
        price = sum(leg["price"] for leg in legs) * count + BAG_PRICE * nonfree_baggages
        price += INSURANCE_PRICE * count if insurance == "yes" else 0
        for payment in payment_methods:
            method = require(user["payment_methods"], payment["payment_id"], "payment method")
            if method["source"] in ("gift_card", "certificate") and method["amount"] < payment["amount"]:
                raise ToolError(f"{payment['payment_id']} holds {method['amount']}, less than {payment['amount']}")
        paid = sum(payment["amount"] for payment in payment_methods)
        if paid != price:
            raise ToolError(f"the payments add up to {paid}, but the price is {price}")
        self._charge(user_id, payment_methods)
        for leg in flights:
            flight = self.store.edit("flights", leg["flight_number"])
            flight["dates"][leg["date"]]["available_seats"][cabin] -= count
        self.store.edit("users", user_id)["reservations"].append(reservation_id)
        reservation = {
            "reservation_id": reservation_id,
            "user_id": user_id,
            "origin": origin,
            "destination": destination,
            "flight_type": flight_type,
            "cabin": cabin,
            "flights": legs,
            "passengers": passengers,
            "payment_history": [dict(payment) for payment in payment_methods],
            "created_at": CREATED_AT,
            "total_baggages": total_baggages,
            "nonfree_baggages": nonfree_baggages,
            "insurance": insurance,
            "status": None,
        }
        return self.store.insert("reservations", reservation_id, reservation)

    def _new_leg(self, leg: FlightLeg, cabin: str, count: int) -> dict[str, Any]:
        number, date = leg["flight_number"], leg["date"]
        flight, departure = self.flight(number), self.departure(number, date)
        if departure["status"] != "available":
            raise ToolError(f"flight {number} on {date} is {departure['status']} and cannot be booked")
        seats = departure["available_seats"][cabin]
        if seats < count:
            raise ToolError(f"flight {number} on {date} has {seats} seats left in {cabin}, not {count}")
        return {
            "flight_number": number,
            "origin": flight["origin"],
            "destination": flight["destination"],
            "date": date,
            "price": departure["prices"][cabin],
        }

    def _charge(self, user_id: str, payments: Sequence[Payment]) -> None:
        methods = self.store.edit("users", user_id)["payment_methods"]
        for payment in payments:
            method = require(methods, payment["payment_id"], "payment method")
            if method["source"] == "gift_card":
                method["amount"] -= payment["amount"]
            elif method["source"] == "certificate":
                del methods[payment["payment_id"]]

    def _pay_difference(self, reservation: dict[str, Any], payment_id: str, price: int) -> None:
        """Pay (or refund) the price of a change with one method and note it in the reservation being edited."""
        method = require(self.user(reservation["user_id"])["payment_methods"], payment_id, "payment method")
        if method["source"] == "certificate":
            raise ToolError("a travel certificate cannot pay for a change")
        if method["source"] == "gift_card":
            if method["amount"] < price:
                raise ToolError(f"{payment_id} holds {method['amount']}, less than {price}")
            if price:
                self.store.edit("users", reservation["user_id"])["payment_methods"][payment_id]["amount"] -= price
        if price:
            reservation["payment_history"].append({"payment_id": payment_id, "amount": price})

    @write_tool
    def cancel_reservation(self, reservation_id: str) -> dict:
        """Cancel a whole reservation and refund what was paid. The tool does not check whether the policy allows it.

        Args:
            reservation_id: The reservation's id.
        """
        self.reservation(reservation_id)
        reservation = self.store.edit("reservations", reservation_id)
        history = reservation["payment_history"]
        history += [{"payment_id": row["payment_id"], "amount": -row["amount"]} for row in history]
        reservation["status"] = "cancelled"
        return reservation

    @write_tool
    def send_certificate(self, user_id: str, amount: int) -> str:
        """Give a user a travel certificate.

        Args:
            user_id: The user's id.
            amount: Its value in whole dollars.
        """
        certificate_id = first_free(NEW_CERTIFICATE_IDS, self.user(user_id)["payment_methods"], "certificates")
        methods = self.store.edit("users", user_id)["payment_methods"]
        methods[certificate_id] = {"source": "certificate", "id": certificate_id, "amount": float(amount)}
        return f"Certificate {certificate_id} over ${amount} was added to {user_id}."

    @write_tool
    def update_reservation_baggages(
        self, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
    ) -> dict:
        """Set the checked bags of a reservation; added bags that are not free cost 50 dollars each.

        Args:
            reservation_id: The reservation's id.
            total_baggages: Checked bags in all after the change.
            nonfree_baggages: Those that are not free after the change.
            payment_id: Gift card or credit card of the user that pays.
        """
        old = self.reservation(reservation_id)
        price = BAG_PRICE * max(0, nonfree_baggages - old["nonfree_baggages"])
        reservation = self.store.edit("reservations", reservation_id)
        self._pay_difference(reservation, payment_id, price)
        reservation.update(total_baggages=total_baggages, nonfree_baggages=nonfree_baggages)
        return reservation

    @write_tool
    def update_reservation_flights(
        self, reservation_id: str, cabin: Cabin, flights: list[FlightLeg], payment_id: str
    ) -> dict:
        """Set the flights and the cabin of a reservation; the difference in price is paid or refunded. The tool does
        not check whether the policy allows the change.

        Args:
            reservation_id: The reservation's id.
            cabin: The cabin of all flights after the change.
            flights: Every leg after the change, also those that stay, as flight_number and date.
            payment_id: Gift card or credit card of the user that pays or gets the refund.
        """
        old = self.reservation(reservation_id)
        count = len(old["passengers"])
        kept = {(leg["flight_number"], leg["date"]): leg for leg in old["flights"]} if cabin == old["cabin"] else {}
        legs = [kept.get((leg["flight_number"], leg["date"])) or self._new_leg(leg, cabin, count) for leg in flights]
        price = count * (sum(leg["price"] for leg in legs) - sum(leg["price"] for leg in old["flights"]))
        reservation = self.store.edit("reservations", reservation_id)
        self._pay_difference(reservation, payment_id, price)
        reservation.update(flights=[dict(leg) for leg in legs], cabin=cabin)
        return reservation

    @write_tool
    def update_reservation_passengers(self, reservation_id: str, passengers: list[Passenger]) -> dict:
        """Replace the passengers of a reservation; their number must stay the same.

        Args:
            reservation_id: The reservation's id.
            passengers: Everyone who flies after the change, with first_name, last_name and dob.
        """
        count = len(self.reservation(reservation_id)["passengers"])
        if len(passengers) != count:
            raise ToolError(f"the reservation has {count} passengers, not {len(passengers)}")
        reservation = self.store.edit("reservations", reservation_id)
        reservation["passengers"] = passengers
        return reservation
