"""What a retail agent can change."""

from collections import Counter
from typing import Any

from hf_pipelines.tau2_bench.domains.base import require, write_tool
from hf_pipelines.tau2_bench.domains.retail_reads import RetailReads
from hf_pipelines.tau2_bench.schema import ToolError

CANCEL_REASONS = ("no longer needed", "ordered by mistake")
Record = dict[str, Any]


class RetailTools(RetailReads):
    """All tools of the retail agent."""

    # ------------------------------------------------------------------------------------------------------ checks

    def _order_with_status(self, order_id: str, status: str, exactly: bool = True) -> Record:
        order = self.order(order_id)
        if order["status"] != status if exactly else status not in order["status"]:
            raise ToolError(f"order {order_id} is {order['status']}; it must be {status}")
        return order

    def _method(self, order: Record, payment_method_id: str) -> Record:
        return require(
            self.user(order["user_id"])["payment_methods"], payment_method_id, "payment method of this user"
        )

    @staticmethod
    def _check_items(order: Record, item_ids: list[str]) -> None:
        missing = Counter(item_ids) - Counter(item["item_id"] for item in order["items"])
        if missing:
            raise ToolError(f"order {order['order_id']} does not have the item(s) {sorted(missing)}, or not as many")

    def _variants(
        self, order: Record, item_ids: list[str], new_item_ids: list[str], same: bool
    ) -> list[tuple[Record, Record]]:
        """(order's item, new variant) of every pair; `same` allows a new id that equals the old one."""
        self._check_items(order, item_ids)
        if len(item_ids) != len(new_item_ids):
            raise ToolError(
                f"item_ids has {len(item_ids)} ids and new_item_ids {len(new_item_ids)}; they must pair up"
            )
        pairs = []
        for item_id, new_id in zip(item_ids, new_item_ids, strict=True):
            if item_id == new_id and not same:
                raise ToolError(f"the new item {new_id} is the old one")
            item = next(item for item in order["items"] if item["item_id"] == item_id)
            variant = require(self.product(item["product_id"])["variants"], new_id, f"variant of {item['name']}")
            if not variant["available"]:
                raise ToolError(f"item {new_id} is not available")
            pairs.append((item, variant))
        return pairs

    @staticmethod
    def _check_balance(method: Record, amount: float) -> None:
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise ToolError(f"the gift card holds {method['balance']}, less than {amount}")

    def _add_balance(self, user_id: str, payment_method_id: str, amount: float) -> None:
        """Credit (or, negative, charge) a gift card; other methods settle outside of this database."""
        if self.user(user_id)["payment_methods"][payment_method_id]["source"] == "gift_card":
            method = self.store.edit("users", user_id)["payment_methods"][payment_method_id]
            method["balance"] = round(method["balance"] + amount, 2)

    # ---------------------------------------------------------------------------------------------- pending orders

    @write_tool
    def cancel_pending_order(self, order_id: str, reason: str) -> Record:
        """Cancel a pending order. Gift cards are credited at once, other payment methods in 5 to 7 business days.

        Args:
            order_id: The order's id with its leading #.
            reason: "no longer needed" or "ordered by mistake".
        """
        order = self._order_with_status(order_id, "pending")
        if reason not in CANCEL_REASONS:
            raise ToolError(f"reason must be one of {', '.join(CANCEL_REASONS)}, not {reason!r:.80}")
        refunds = [{**row, "transaction_type": "refund"} for row in order["payment_history"]]
        for row in refunds:
            self._method(order, row["payment_method_id"])
            self._add_balance(order["user_id"], row["payment_method_id"], row["amount"])
        order = self.store.edit("orders", order_id)
        order["payment_history"] += refunds
        order.update(status="cancelled", cancel_reason=reason)
        return order

    @write_tool
    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Record:
        """Replace items of a pending order by other variants of the same products. Works once per order: give all
        items in one call.

        Args:
            order_id: The order's id with its leading #.
            item_ids: Items to replace; one that is in the order twice may be given twice.
            new_item_ids: Their new variants, in the same order.
            payment_method_id: Method of the user that pays the difference or gets it back.
        """
        old = self._order_with_status(order_id, "pending")
        pairs = self._variants(old, item_ids, new_item_ids, same=False)
        method = self._method(old, payment_method_id)
        difference = sum(variant["price"] - item["price"] for item, variant in pairs)
        self._check_balance(method, difference)
        order = self.store.edit("orders", order_id)
        order["payment_history"].append(
            {
                "transaction_type": "payment" if difference > 0 else "refund",
                "amount": abs(difference),
                "payment_method_id": payment_method_id,
            }
        )
        self._add_balance(order["user_id"], payment_method_id, -difference)
        for item_id, (_, variant) in zip(item_ids, pairs, strict=True):
            written = pairs[-1][1] if self.compat == "upstream" else variant
            item = next(item for item in order["items"] if item["item_id"] == item_id)
            item.update(item_id=variant["item_id"], price=written["price"], options=dict(written["options"]))
        order["status"] = "pending (item modified)"
        return order

    @write_tool
    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Record:
        """Pay a pending order with another method; the first one is refunded.

        Args:
            order_id: The order's id with its leading #.
            payment_method_id: The new method of the user.
        """
        old = self._order_with_status(order_id, "pending", exactly=False)
        method = self._method(old, payment_method_id)
        history = old["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise ToolError("the order must have exactly one payment and nothing else in its history")
        amount, first = history[0]["amount"], history[0]["payment_method_id"]
        if payment_method_id == first:
            raise ToolError("the new payment method is the old one")
        self._check_balance(method, amount)
        self._method(old, first)
        order = self.store.edit("orders", order_id)
        order["payment_history"] += [
            {"transaction_type": "payment", "amount": amount, "payment_method_id": payment_method_id},
            {"transaction_type": "refund", "amount": amount, "payment_method_id": first},
        ]
        self._add_balance(order["user_id"], payment_method_id, -amount)
        self._add_balance(order["user_id"], first, amount)
        return order

    @write_tool
    def modify_pending_order_address(
        self, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Record:
        """Send a pending order to another address.

        Args:
            order_id: The order's id with its leading #.
            address1: Street and number.
            address2: Apartment or suite, or an empty text.
            city: City.
            state: State, such as CA.
            country: Country, such as USA.
            zip: Zip code.
        """
        self._order_with_status(order_id, "pending", exactly=False)
        order = self.store.edit("orders", order_id)
        order["address"] = _address(address1, address2, city, state, country, zip)
        return order

    @write_tool
    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Record:
        """Change a user's default address.

        Args:
            user_id: The user's id.
            address1: Street and number.
            address2: Apartment or suite, or an empty text.
            city: City.
            state: State, such as CA.
            country: Country, such as USA.
            zip: Zip code.
        """
        self.user(user_id)
        user = self.store.edit("users", user_id)
        user["address"] = _address(address1, address2, city, state, country, zip)
        return user

    # -------------------------------------------------------------------------------------------- delivered orders

    @write_tool
    def return_delivered_order_items(self, order_id: str, item_ids: list[str], payment_method_id: str) -> Record:
        """Ask for the return of items of a delivered order.

        Args:
            order_id: The order's id with its leading #.
            item_ids: Items to return; one that is in the order twice may be given twice.
            payment_method_id: Where the refund goes: the order's first payment method or a gift card of the user.
        """
        old = self._order_with_status(order_id, "delivered")
        method = self._method(old, payment_method_id)
        if method["source"] != "gift_card" and payment_method_id != old["payment_history"][0]["payment_method_id"]:
            raise ToolError("the refund must go to the order's first payment method or to a gift card")
        self._check_items(old, item_ids)
        order = self.store.edit("orders", order_id)
        order.update(
            status="return requested", return_items=sorted(item_ids), return_payment_method_id=payment_method_id
        )
        return order

    @write_tool
    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Record:
        """Ask for the exchange of items of a delivered order for other variants of the same products. Works once per
        order: give all items in one call.

        Args:
            order_id: The order's id with its leading #.
            item_ids: Items to exchange; one that is in the order twice may be given twice.
            new_item_ids: Their new variants, in the same order.
            payment_method_id: Method of the user that pays the difference or gets it back.
        """
        old = self._order_with_status(order_id, "delivered")
        pairs = self._variants(old, item_ids, new_item_ids, same=True)
        method = self._method(old, payment_method_id)
        difference = round(sum(variant["price"] - item["price"] for item, variant in pairs), 2)
        self._check_balance(method, difference)
        order = self.store.edit("orders", order_id)
        order.update(
            status="exchange requested",
            exchange_items=sorted(item_ids),
            exchange_new_items=sorted(new_item_ids),
            exchange_payment_method_id=payment_method_id,
            exchange_price_difference=difference,
        )
        return order


def _address(address1: str, address2: str, city: str, state: str, country: str, zip_code: str) -> Record:
    names = ("address1", "address2", "city", "country", "state", "zip")
    return dict(zip(names, (address1, address2, city, country, state, zip_code), strict=True))
