"""What a retail agent can look up."""

import json
from typing import Any

from hf_pipelines.tau2_bench.domains.base import Toolkit, generic_tool, read_tool, require
from hf_pipelines.tau2_bench.domains.calculator import calculate
from hf_pipelines.tau2_bench.schema import ToolError
from hf_pipelines.tau2_bench.store import Store


class RetailReads(Toolkit):
    """Tools that change nothing.

    Args:
        store (`Store`): The shop's state.
        compat (`str`, defaults to `"upstream"`): How several modified items of an order are written.
    """

    def __init__(self, store: Store, compat: str = "upstream") -> None:
        super().__init__(store)
        self.compat = compat

    def order(self, order_id: str) -> dict[str, Any]:
        """An order's record, for reading."""
        return require(self.store["orders"], order_id, "order")

    def user(self, user_id: str) -> dict[str, Any]:
        """A user's record, for reading."""
        return require(self.store["users"], user_id, "user")

    def product(self, product_id: str) -> dict[str, Any]:
        """A product's record, for reading."""
        return require(self.store["products"], product_id, "product")

    @read_tool
    def find_user_id_by_email(self, email: str) -> str:
        """Find the id of the user with this e-mail address.

        Args:
            email: The address; upper or lower case does not matter.
        """
        for user in self.store["users"].values():
            if user["email"].lower() == email.lower():
                return user["user_id"]
        raise ToolError("no user has this e-mail address")

    @read_tool
    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find the id of the user with this name and zip code.

        Args:
            first_name: First name; upper or lower case does not matter.
            last_name: Last name; upper or lower case does not matter.
            zip: Zip code of the user's address.
        """
        wanted = (first_name.lower(), last_name.lower(), zip)
        for user in self.store["users"].values():
            name = user["name"]
            if (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == wanted:
                return user["user_id"]
        raise ToolError("no user has this name and zip code")

    @read_tool
    def get_user_details(self, user_id: str) -> dict:
        """Show a user's profile: address, payment methods, orders.

        Args:
            user_id: The user's id, such as sara_doe_496.
        """
        return self.user(user_id)

    @read_tool
    def get_order_details(self, order_id: str) -> dict:
        """Show an order: items, status, address, deliveries, payments.

        Args:
            order_id: The order's id with its leading #, such as #W0000000.
        """
        return self.order(order_id)

    @read_tool
    def get_product_details(self, product_id: str) -> dict:
        """Show a product with all its variants. A product id is not an item id.

        Args:
            product_id: The product's id, such as 6086499569.
        """
        return self.product(product_id)

    @read_tool
    def get_item_details(self, item_id: str) -> dict:
        """Show one variant of a product: options, price, whether it is available.

        Args:
            item_id: The item's id, such as 1008292230.
        """
        for product in self.store["products"].values():
            if item_id in product["variants"]:
                return product["variants"][item_id]
        raise ToolError(f"there is no item {item_id!r}")

    @read_tool
    def list_all_product_types(self) -> str:
        """List the names and ids of all products."""
        products = self.store["products"].values()
        return json.dumps({product["name"]: product["product_id"] for product in products}, sort_keys=True)

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
