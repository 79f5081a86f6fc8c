"""The `calculate` tool of airline and retail: plain arithmetic, read by a parser of its own and never evaluated."""

import re

from hf_pipelines.tau2_bench.schema import ToolError

MAX_LENGTH, MAX_DEPTH = 1000, 50
_TOKEN = re.compile(r"\s*(\d+\.?\d*|\.\d+|[-+*/()])")


def calculate(expression: str) -> str:
    """The value of an expression of + − * / and parentheses, rounded to two decimals, as text.

    >>> calculate("2 * (3.5 - 1)")
    '5.0'

    Raises:
        ToolError: If the text is anything else, too long, or divides by zero.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"expression is longer than {MAX_LENGTH} characters")
    if set(expression) - set("0123456789+-*/(). "):
        raise ToolError("expression may hold only digits, + - * / ( ) . and spaces")
    tokens, place = [], 0
    text = expression.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ToolError(f"expression cannot be read at {text[place:]!r:.40}")
        tokens.append(match.group(1))
        place = match.end()
    parser = _Parser(tokens)
    try:
        return str(round(float(parser.parse()), 2))
    except ZeroDivisionError:
        raise ToolError("expression divides by zero") from None
    except OverflowError:
        raise ToolError("expression is too large") from None


class _Parser:
    """Recursive descent over the tokens: sum → product → factor."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = [*tokens, ""]
        self.place = 0
        self.depth = 0

    def parse(self) -> float:
        """The value of all tokens."""
        value = self.sum()
        if self.tokens[self.place]:
            raise ToolError(f"expression has {self.tokens[self.place]!r} where an operator or the end should be")
        return value

    def take(self) -> str:
        """The next token."""
        self.place += 1
        return self.tokens[self.place - 1]

    def sum(self) -> float:
        """Terms joined by + and −."""
        value = self.product()
        while self.tokens[self.place] in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> float:
        """Factors joined by * and /."""
        value = self.factor()
        while self.tokens[self.place] in ("*", "/"):
            value = value * self.factor() if self.take() == "*" else value / self.factor()
        return value

    def factor(self) -> float:
        """A number, a sign with a factor, or a sum in parentheses."""
        token = self.take()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ToolError(f"expression is nested deeper than {MAX_DEPTH}")
        if token in ("+", "-"):
            value = self.factor() if token == "+" else -self.factor()
        elif token == "(":
            value = self.sum()
            if self.take() != ")":
                raise ToolError("expression lacks a closing parenthesis")
        elif token and token not in "*/)":
            value = float(token) if "." in token else int(token)
        else:
            raise ToolError(f"expression has {token or 'its end'!r} where a number should be")
        self.depth -= 1
        return value
