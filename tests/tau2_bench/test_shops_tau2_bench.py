"""Airline and retail rules over two small databases of our own, so that they are checked without the public data."""

import copy
import json

import pytest

from hf_pipelines.tau2_bench import Environment, ToolError, get_domain
from hf_pipelines.tau2_bench.lint import lint_tasks
from hf_pipelines.tau2_bench.task import Task

SEATS = {"business": 2, "economy": 3, "basic_economy": 0}
PRICES = {"business": 300, "economy": 100, "basic_economy": 50}


def flight(number, origin, destination, leaves, arrives, **dates):
    """A flight whose keyword arguments are days of May 2024 with a status."""
    days = {
        f"2024-05-{day[1:]}": {"status": status, "available_seats": dict(SEATS), "prices": dict(PRICES)}
        if status == "available"
        else {"status": status}
        for day, status in dates.items()
    }
    return {
        "flight_number": number,
        "origin": origin,
        "destination": destination,
        "scheduled_departure_time_est": leaves,
        "scheduled_arrival_time_est": arrives,
        "dates": days,
    }


AIRLINE = {
    "flights": {
        "HAT1": flight("HAT1", "JFK", "ORD", "08:00:00", "10:00:00", d20="available", d21="cancelled"),
        "HAT2": flight("HAT2", "ORD", "SEA", "10:00:00", "13:00:00", d20="available"),
        "HAT3": flight("HAT3", "ORD", "SEA", "09:59:00", "12:00:00", d20="available"),
        "HAT4": flight("HAT4", "JFK", "ORD", "23:00:00", "01:00:00+1", d20="available"),
        "HAT5": flight("HAT5", "ORD", "SEA", "07:00:00", "09:00:00", d21="available"),
    },
    "users": {
        "ann_1": {
            "user_id": "ann_1",
            "name": {"first_name": "Ann", "last_name": "Lee"},
            "address": {"address1": "1 A St", "city": "X", "country": "USA", "state": "CA", "zip": "90001"},
            "email": "ann@mail.example",
            "dob": "1990-01-01",
            "payment_methods": {
                "credit_card_1": {"source": "credit_card", "id": "credit_card_1", "brand": "visa", "last_four": "1"},
                "gift_card_1": {"source": "gift_card", "id": "gift_card_1", "amount": 150},
                "certificate_1": {"source": "certificate", "id": "certificate_1", "amount": 250},
            },
            "saved_passengers": [],
            "membership": "gold",
            "reservations": [],
        }
    },
    "reservations": {},
}
BOOKING = {
    "user_id": "ann_1",
    "origin": "JFK",
    "destination": "ORD",
    "flight_type": "one_way",
    "cabin": "economy",
    "flights": [{"flight_number": "HAT1", "date": "2024-05-20"}],
    "passengers": [{"first_name": "Ann", "last_name": "Lee", "dob": "1990-01-01"}],
    "payment_methods": [{"payment_id": "credit_card_1", "amount": 100}],
    "total_baggages": 0,
    "nonfree_baggages": 0,
    "insurance": "no",
}

SHIRT = {
    f"{n}": {"item_id": f"{n}", "options": {"size": size}, "available": available, "price": price}
    for n, size, available, price in ((11, "S", True, 10.0), (12, "M", True, 12.5), (13, "L", False, 15.0))
}
HAT = {
    f"{n}": {"item_id": f"{n}", "options": {"colour": colour}, "available": True, "price": price}
    for n, colour, price in ((21, "red", 20.0), (22, "blue", 26.0))
}


def order(order_id, status):
    """An order of a shirt and a hat, paid by card."""
    items = [
        {"name": name, "product_id": product, "item_id": item, "price": price, "options": options}
        for name, product, item, price, options in (
            ("Shirt", "p1", "11", 10.0, {"size": "S"}),
            ("Hat", "p2", "21", 20.0, {"colour": "red"}),
        )
    ]
    paid = {"transaction_type": "payment", "amount": 30.0, "payment_method_id": "credit_card_2"}
    return {
        "order_id": order_id,
        "user_id": "bob_2",
        "address": {
            "address1": "2 B St",
            "address2": "",
            "city": "Y",
            "country": "USA",
            "state": "TX",
            "zip": "70002",
        },
        "items": items,
        "status": status,
        "fulfillments": [],
        "payment_history": [paid],
    }


RETAIL = {
    "products": {
        "p1": {"name": "Shirt", "product_id": "p1", "variants": SHIRT},
        "p2": {"name": "Hat", "product_id": "p2", "variants": HAT},
    },
    "users": {
        "bob_2": {
            "user_id": "bob_2",
            "name": {"first_name": "Bob", "last_name": "May"},
            "address": {
                "address1": "2 B St",
                "address2": "",
                "city": "Y",
                "country": "USA",
                "state": "TX",
                "zip": "70002",
            },
            "email": "Bob.May@mail.example",
            "payment_methods": {
                "credit_card_2": {"source": "credit_card", "id": "credit_card_2", "brand": "visa", "last_four": "2"},
                "gift_card_2": {"source": "gift_card", "id": "gift_card_2", "balance": 8.5},
                "paypal_2": {"source": "paypal", "id": "paypal_2"},
            },
            "orders": ["#W1", "#W2"],
        }
    },
    "orders": {"#W1": order("#W1", "pending"), "#W2": order("#W2", "delivered")},
}


def world(folder, name, tables, **options):
    """An environment over tables written to a folder."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "db.json").write_text(json.dumps(tables))
    return Environment(get_domain(name, folder, **options))


@pytest.fixture
def airline(tmp_path):
    return world(tmp_path, "airline", AIRLINE)


@pytest.fixture
def retail(tmp_path):
    return world(tmp_path, "retail", RETAIL)


def booking(**changes):
    """The arguments of a booking."""
    return {**copy.deepcopy(BOOKING), **changes}


# --------------------------------------------------------------------------------------------------------- airline


def test_booking_takes_seats_and_payment_when_it_is_paid_exactly(airline):
    made = airline.call("book_reservation", booking())
    assert (made["reservation_id"], made["created_at"], made["status"]) == ("HATHAT", "2024-05-15T15:00:00", None)
    assert airline.agent.store["flights"]["HAT1"]["dates"]["2024-05-20"]["available_seats"]["economy"] == 2
    assert airline.call("get_user_details", {"user_id": "ann_1"})["reservations"] == ["HATHAT"]


def test_certificate_is_used_up_and_gift_card_reduced_when_they_pay(airline):
    pays = [{"payment_id": "certificate_1", "amount": 100}, {"payment_id": "gift_card_1", "amount": 80}]
    price = {"insurance": "yes", "total_baggages": 1, "nonfree_baggages": 1}  # 100 + 30 + 50
    airline.call("book_reservation", booking(payment_methods=pays, **price))
    methods = airline.call("get_user_details", {"user_id": "ann_1"})["payment_methods"]
    assert set(methods) == {"credit_card_1", "gift_card_1"} and methods["gift_card_1"]["amount"] == 70


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"payment_methods": [{"payment_id": "credit_card_1", "amount": 99}]}, "add up to 99, but the price is 100"),
        ({"payment_methods": [{"payment_id": "gift_card_1", "amount": 151}]}, "holds 150.0, less than 151"),
        ({"payment_methods": [{"payment_id": "credit_card_9", "amount": 100}]}, "no payment method 'credit_card_9'"),
        ({"payment_methods": [{"payment_id": "credit_card_1", "amount": 99.5}]}, "amount must be a whole number"),
        ({"cabin": "basic_economy"}, "0 seats left"),
        ({"cabin": "first"}, "cabin must be one of business"),
        ({"flights": [{"flight_number": "HAT1", "date": "2024-05-21"}]}, "is cancelled"),
        ({"flights": [{"flight_number": "HAT1", "date": "2024-05-29"}]}, "no departure of HAT1"),
        ({"flights": [{"flight_number": "HAT1"}]}, "flights[0]: missing argument(s): date"),
        ({"flights": [{"flight_number": "HAT1", "date": "2024-05-20", "seat": "1A"}]}, "unknown argument 'seat'"),
        ({"user_id": "eve"}, "no user 'eve'"),
    ],
)
def test_booking_is_refused_and_changes_nothing_when_something_is_wrong(airline, changes, words):
    before = airline.hash()
    with pytest.raises(ToolError) as caught:
        airline.call("book_reservation", booking(**changes))
    assert words in str(caught.value) and airline.hash() == before


def test_fourth_reservation_is_refused_when_the_ids_are_used_up(airline):
    free = {"flights": [], "payment_methods": []}
    ids = [airline.call("book_reservation", booking(**free))["reservation_id"] for _ in range(3)]
    assert ids == ["HATHAT", "HATHAU", "HATHAV"]
    with pytest.raises(ToolError, match="no more reservations"):
        airline.call("book_reservation", booking(**free))


def test_kept_leg_has_its_old_price_when_the_cabin_stays(airline):
    airline.call("book_reservation", booking())
    two = [{"flight_number": "HAT1", "date": "2024-05-20"}, {"flight_number": "HAT2", "date": "2024-05-20"}]
    change = {"reservation_id": "HATHAT", "cabin": "economy", "flights": two, "payment_id": "gift_card_1"}
    assert [leg["price"] for leg in airline.call("update_reservation_flights", change)["flights"]] == [100, 100]
    methods = airline.agent.store["users"]["ann_1"]["payment_methods"]
    assert methods["gift_card_1"]["amount"] == 50
    back = {**change, "flights": two[:1]}
    assert airline.call("update_reservation_flights", back)["payment_history"][-1]["amount"] == -100
    assert airline.agent.store["users"]["ann_1"]["payment_methods"]["gift_card_1"]["amount"] == 150


def test_certificate_is_refused_when_it_should_pay_a_change(airline):
    airline.call("book_reservation", booking())
    bags = {"reservation_id": "HATHAT", "total_baggages": 1, "nonfree_baggages": 1}
    with pytest.raises(ToolError, match="certificate cannot pay"):
        airline.call("update_reservation_baggages", {**bags, "payment_id": "certificate_1"})
    assert (
        airline.call("update_reservation_baggages", {**bags, "payment_id": "credit_card_1"})["nonfree_baggages"] == 1
    )


def test_history_is_negated_and_seats_stay_when_a_reservation_is_cancelled_twice(airline):
    airline.call("book_reservation", booking())
    for _ in range(2):
        cancelled = airline.call("cancel_reservation", {"reservation_id": "HATHAT"})
    assert [row["amount"] for row in cancelled["payment_history"]] == [100, -100, -100, 100]
    assert cancelled["status"] == "cancelled"
    assert airline.agent.store["flights"]["HAT1"]["dates"]["2024-05-20"]["available_seats"]["economy"] == 2


def test_one_stop_pairs_meet_in_time_when_the_second_leg_leaves_after_the_first(airline):
    pairs = airline.call("search_onestop_flight", {"origin": "JFK", "destination": "SEA", "date": "2024-05-20"})
    found = [[(leg["flight_number"], leg["date"]) for leg in pair] for pair in pairs]
    assert [("HAT1", "2024-05-20"), ("HAT2", "2024-05-20")] in found  # departs at the minute of arrival
    assert [("HAT4", "2024-05-20"), ("HAT5", "2024-05-21")] in found  # the next day
    assert all(pair[1][0] != "HAT3" for pair in found)


def test_three_certificates_can_be_sent_and_no_more_when_asked(airline):
    for _ in range(3):
        airline.call("send_certificate", {"user_id": "ann_1", "amount": 50})
    assert "certificate_3221324" in airline.agent.store["users"]["ann_1"]["payment_methods"]
    with pytest.raises(ToolError, match="no more certificates"):
        airline.call("send_certificate", {"user_id": "ann_1", "amount": 50})


# ---------------------------------------------------------------------------------------------------------- retail

SWAP = {"order_id": "#W1", "item_ids": ["11", "21"], "new_item_ids": ["12", "22"], "payment_method_id": "gift_card_2"}


@pytest.mark.parametrize(("compat", "prices"), [("upstream", [26.0, 26.0]), ("fixed", [12.5, 26.0])])
def test_items_get_the_last_or_their_own_variant_when_several_are_modified(tmp_path, compat, prices):
    retail = world(tmp_path, "retail", RETAIL, compat=compat)
    changed = retail.call("modify_pending_order_items", SWAP)
    assert [item["item_id"] for item in changed["items"]] == ["12", "22"]
    assert [item["price"] for item in changed["items"]] == prices
    assert changed["status"] == "pending (item modified)"
    assert changed["payment_history"][-1] == {
        "transaction_type": "payment",
        "amount": 8.5,
        "payment_method_id": "gift_card_2",
    }
    assert retail.agent.store["users"]["bob_2"]["payment_methods"]["gift_card_2"]["balance"] == 0


@pytest.mark.parametrize("compat", ["upstream", "fixed"])
def test_lint_finds_order_and_corruption_when_compat_is_upstream_only(tmp_path, compat):
    world(tmp_path, "retail", RETAIL, compat=compat)
    criteria = {"actions": [{"name": "modify_pending_order_items", "arguments": SWAP}], "reward_basis": ["DB"]}
    findings = lint_tasks(
        [Task({"id": "t", "evaluation_criteria": criteria}, "retail")], get_domain("retail", tmp_path, compat)
    )
    codes = {finding.code for finding in findings}
    assert codes == ({"order_sensitive", "state_corrupt"} if compat == "upstream" else set())


def test_compat_is_refused_when_it_is_unknown(tmp_path):
    with pytest.raises(ValueError, match="compat='new' must be 'upstream' or 'fixed'"):
        world(tmp_path, "retail", RETAIL, compat="new")


@pytest.mark.parametrize(
    ("tool", "changes", "words"),
    [
        ("modify_pending_order_items", {"new_item_ids": ["11", "22"]}, "is the old one"),
        ("modify_pending_order_items", {"new_item_ids": ["13", "22"]}, "not available"),
        ("modify_pending_order_items", {"new_item_ids": ["21", "22"]}, "no variant of Shirt '21'"),
        ("modify_pending_order_items", {"new_item_ids": ["12"]}, "must pair up"),
        ("modify_pending_order_items", {"item_ids": ["11", "11"]}, "not as many"),
        ("modify_pending_order_items", {"order_id": "#W2"}, "is delivered; it must be pending"),
        ("modify_pending_order_items", {"payment_method_id": "paypal_9"}, "no payment method of this user"),
        ("exchange_delivered_order_items", {}, "is pending; it must be delivered"),
    ],
)
def test_change_is_refused_and_changes_nothing_when_items_do_not_fit(retail, tool, changes, words):
    before = retail.hash()
    with pytest.raises(ToolError) as caught:
        retail.call(tool, {**SWAP, **changes})
    assert words in str(caught.value) and retail.hash() == before


def test_second_modification_and_cancellation_are_refused_when_items_were_modified(retail):
    retail.call("modify_pending_order_items", SWAP)
    with pytest.raises(ToolError, match="item modified"):
        retail.call("modify_pending_order_items", {**SWAP, "item_ids": ["12"], "new_item_ids": ["11"]})
    with pytest.raises(ToolError, match="item modified"):
        retail.call("cancel_pending_order", {"order_id": "#W1", "reason": "no longer needed"})
    address = {"address1": "9 Z St", "address2": "", "city": "Q", "state": "NV", "country": "USA", "zip": "80008"}
    assert retail.call("modify_pending_order_address", {"order_id": "#W1", **address})["address"]["city"] == "Q"


def test_gift_card_is_credited_at_once_when_an_order_paid_with_it_is_cancelled(tmp_path):
    tables = copy.deepcopy(RETAIL)
    tables["orders"]["#W1"]["payment_history"][0]["payment_method_id"] = "gift_card_2"
    retail = world(tmp_path, "retail", tables)
    with pytest.raises(ToolError, match="reason must be one of"):
        retail.call("cancel_pending_order", {"order_id": "#W1", "reason": "too expensive"})
    cancelled = retail.call("cancel_pending_order", {"order_id": "#W1", "reason": "ordered by mistake"})
    assert [row["transaction_type"] for row in cancelled["payment_history"]] == ["payment", "refund"]
    assert retail.agent.store["users"]["bob_2"]["payment_methods"]["gift_card_2"]["balance"] == 38.5


@pytest.mark.parametrize(
    ("method", "words"), [("gift_card_2", "holds 8.5"), ("credit_card_2", "is the old one"), ("paypal_2", None)]
)
def test_payment_changes_when_the_new_method_is_another_and_covers_it(retail, method, words):
    arguments = {"order_id": "#W1", "payment_method_id": method}
    if words is None:
        rows = retail.call("modify_pending_order_payment", arguments)["payment_history"]
        pairs = [(row["transaction_type"], row["payment_method_id"]) for row in rows[1:]]
        assert pairs == [("payment", "paypal_2"), ("refund", "credit_card_2")]
    else:
        with pytest.raises(ToolError, match=words):
            retail.call("modify_pending_order_payment", arguments)


def test_refund_goes_to_the_first_method_or_a_gift_card_when_items_are_returned(retail):
    back = {"order_id": "#W2", "item_ids": ["21", "11"], "payment_method_id": "paypal_2"}
    with pytest.raises(ToolError, match="first payment method or to a gift card"):
        retail.call("return_delivered_order_items", back)
    returned = retail.call("return_delivered_order_items", {**back, "payment_method_id": "gift_card_2"})
    assert (returned["status"], returned["return_items"]) == ("return requested", ["11", "21"])


def test_exchange_allows_the_same_item_and_moves_no_money_when_made(retail):
    swap = {**SWAP, "order_id": "#W2", "new_item_ids": ["11", "22"]}
    made = retail.call("exchange_delivered_order_items", swap)
    assert (made["status"], made["exchange_price_difference"]) == ("exchange requested", 6.0)
    assert made["items"][1]["item_id"] == "21" and len(made["payment_history"]) == 1
    assert retail.agent.store["users"]["bob_2"]["payment_methods"]["gift_card_2"]["balance"] == 8.5


def test_user_is_found_whatever_the_case_when_looked_up(retail):
    assert retail.call("find_user_id_by_email", {"email": "BOB.may@mail.example"}) == "bob_2"
    name = {"first_name": "bOB", "last_name": "MAY", "zip": "70002"}
    assert retail.call("find_user_id_by_name_zip", name) == "bob_2"
    with pytest.raises(ToolError, match="no user"):
        retail.call("find_user_id_by_name_zip", {**name, "zip": "70003"})
