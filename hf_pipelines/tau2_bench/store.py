"""One side's state: tables of records over a shared, never-changed base.

An episode copies a table's index when it first writes to the table and a record when it first writes to the record, so
that a database of seven megabytes costs a new episode nothing. Every write can be taken back until the next
[`Store.begin`].
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from hf_pipelines.tau2_bench.hashing import canonical_json, text_hash

_ABSENT = object()


def json_copy(value: Any) -> Any:
    """Copy dictionaries and lists all the way down; everything else is shared."""
    if type(value) is dict:
        copied = value.copy()
        for key, item in value.items():
            if type(item) is dict or type(item) is list:
                copied[key] = json_copy(item)
        return copied
    if type(value) is list:
        return [json_copy(item) if type(item) is dict or type(item) is list else item for item in value]
    return value


class BaseState:
    """The start state that all episodes of a domain share.

    Args:
        tables (`dict[str, dict]`): Table name → key → record. The caller must not change it afterwards.
    """

    def __init__(self, tables: dict[str, dict[str, Any]]) -> None:
        self.tables = tables

    @cached_property
    def texts(self) -> dict[str, dict[str, str]]:
        """Canonical JSON of every record, made once."""
        return {
            name: {key: canonical_json(record) for key, record in table.items()} for name, table in self.tables.items()
        }

    @cached_property
    def table_texts(self) -> dict[str, str]:
        """Canonical JSON of every table."""
        return {name: canonical_json(table) for name, table in self.tables.items()}


class Store:
    """The state of one side in one episode.

    Args:
        base (`BaseState`): The start state.
    """

    def __init__(self, base: BaseState) -> None:
        self.base = base
        self.tables: dict[str, dict[str, Any]] = dict(base.tables)
        self._own_tables: set[str] = set()
        self._journal: dict[tuple[str, ...], tuple[dict, str, Any]] = {}

    def __getitem__(self, table: str) -> dict[str, Any]:
        """A table for reading. Never write into it: use [`edit`], [`insert`] or [`delete`]."""
        return self.tables[table]

    # ----------------------------------------------------------------------------------------------------- writing

    def begin(self) -> None:
        """Start a transaction: what is written from here on is what [`rollback`] takes back."""
        self._journal.clear()

    def rollback(self) -> None:
        """Undo every write since [`begin`]."""
        for container, key, old in reversed(self._journal.values()):
            if old is _ABSENT:
                container.pop(key, None)
            else:
                container[key] = old
        self._journal.clear()

    def edit(self, table: str, key: str | None = None) -> dict[str, Any]:
        """Return a record (or, without a key, the whole table) that may be written in place until the next
        [`begin`]."""
        if (table,) in self._journal:
            whole = self.tables[table]
            return whole if key is None else whole[key]
        path = (table,) if key is None else (table, key)
        if path not in self._journal:
            container = self.tables if key is None else self._own(table)
            name = table if key is None else key
            self._journal[path] = (container, name, container[name])
            container[name] = json_copy(container[name])
            if key is None:
                self._own_tables.add(table)
        return self.tables[table] if key is None else self.tables[table][key]

    def insert(self, table: str, key: str, record: Any) -> Any:
        """Add or replace a record and return it."""
        container = self._own(table)
        self._journal.setdefault((table, key), (container, key, container.get(key, _ABSENT)))
        container[key] = record
        return record

    def delete(self, table: str, key: str) -> None:
        """Remove a record."""
        container = self._own(table)
        self._journal.setdefault((table, key), (container, key, container[key]))
        del container[key]

    def merge(self, data: dict[str, Any]) -> None:
        """Merge nested dictionaries into the state; anything that is not a dictionary replaces what was there.

        Raises:
            ValueError: If `data` names a table that this side does not have.
        """
        for table, values in data.items():
            if table not in self.tables:
                raise ValueError(
                    f"initialization_data names {table!r}, which this side lacks; its tables are {sorted(self.tables)}"
                )
            if not isinstance(values, dict):
                raise ValueError(f"initialization_data[{table!r}] must be an object, not {values!r}")
            for key, value in values.items():
                old = self.tables[table].get(key)
                self.insert(table, key, _merged(old, value))

    def _own(self, table: str) -> dict[str, Any]:
        if table not in self._own_tables:
            self.tables[table] = dict(self.tables[table])
            self._own_tables.add(table)
        return self.tables[table]

    # ----------------------------------------------------------------------------------------------------- reading

    def copy(self) -> "Store":
        """An independent store with the same content; costs as little as a new one."""
        self._journal.clear()
        self._own_tables.clear()
        other = Store(self.base)
        other.tables = dict(self.tables)
        return other

    def to_dict(self) -> dict[str, Any]:
        """The whole state as a copy of its own."""
        return json_copy(self.tables)

    def equals(self, other: "Store") -> bool:
        """Whether both states are the same; shared records cost nothing, and 25 equals 25.0."""
        return self.tables == other.tables

    def hash(self) -> str:
        """SHA-256 of the canonical JSON of the whole state; the text of unchanged records is kept with the base."""
        return text_hash("{" + ",".join(self._table_texts()) + "}")

    def _table_texts(self) -> Iterator[str]:
        for name in sorted(self.tables):
            table = self.tables[name]
            start = self.base.tables.get(name, {})
            if table is start:
                text = self.base.table_texts[name]
            elif not isinstance(table, dict):
                text = canonical_json(table)
            else:
                texts = self.base.texts[name]
                parts = (
                    f"{canonical_json(key)}:"
                    + (texts[key] if key in start and table[key] is start[key] else canonical_json(table[key]))
                    for key in sorted(table)
                )
                text = "{" + ",".join(parts) + "}"
            yield f"{canonical_json(name)}:{text}"


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return json_copy(new)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a nested value; an empty dictionary or list is a leaf."""
    if isinstance(value, (dict, list)) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from flatten(item, f"{path}/{key}")
    else:
        yield path, value


def difference(old: Any, new: Any) -> dict[str, list[Any]]:
    """Path → [old, new] of every leaf that differs; a leaf that one side lacks is `"<absent>"`."""
    before, after = dict(flatten(old)), dict(flatten(new))
    changed = {}
    for path in sorted(before.keys() | after.keys()):
        pair = [before.get(path, "<absent>"), after.get(path, "<absent>")]
        if pair[0] != pair[1]:
            changed[path] = pair
    return changed
