"""Tools that were offered, and calls that an assistant made: all spellings → one shape.

Arguments come as an object or as a JSON string; JSON strings are what survives Arrow, which gives every object of a column
the fields of all others (`hs_assets.samples.table_rows` takes the nulls off again that came that way).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hs_assets.samples.conversations import Dropped, ToolCall
from hs_assets.samples.row_json import load_nested

CALL_PARTS = ("tool_call", "function_call")
"""Roles and types of parts whose text is a call."""


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...] | Dropped:
    """The schemas of a ``tools`` column, ``{"type": "function", "function": {...}}`` each.

    The column is a list, or a JSON string of the whole or of each. A schema that comes bare (``name``, ``parameters``) is
    put into that shape, which chat templates expect.
    """
    schemas = load_nested(value) if isinstance(value, str) else value
    if isinstance(schemas, Mapping):
        schemas = [schemas]
    if schemas is None or schemas == "":
        return ()
    if isinstance(schemas, list):
        schemas = [load_nested(schema) if isinstance(schema, str) else schema for schema in schemas]
    if not isinstance(schemas, list) or not all(isinstance(schema, Mapping) for schema in schemas):
        return Dropped("unreadable_tools", "tools is neither a list of objects nor a JSON string of one")
    whole = tuple(
        schema if "function" in schema or "name" not in schema else {"type": "function", "function": schema} for schema in schemas
    )
    if not all(isinstance(s.get("function"), Mapping) and isinstance(s["function"].get("name"), str) for s in whole):
        return Dropped("unreadable_tools", "a tool without the name of a function")
    return whole


def read_calls(value: Any, where: str) -> tuple[ToolCall, ...] | Dropped:
    """Calls of one turn: an object, a list, or a JSON string of either; `where` is named in reasons."""
    calls = load_nested(value) if isinstance(value, str) and value.strip() else value
    if calls is None or calls == "":
        return ()
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        one = _call(load_nested(call) if isinstance(call, str) else call)
        if isinstance(one, str):
            return Dropped("unreadable_tool_call", f"{where}: {one}")
        made.append(one)
    return tuple(made)


def _call(call: Any) -> ToolCall | str:
    """A call, or what is wrong with it."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function", call), Mapping):
        return "a call is no JSON object"
    if call.get("type") not in ("function", *CALL_PARTS, None):
        return f"a call of type {call['type']!r}, not of a function"
    if function.keys().isdisjoint(("arguments", "parameters")) and function.keys() - {"name", "id", "type"}:
        return f"a call without arguments, but with {', '.join(sorted(function))}"
    name, arguments, number = function.get("name"), function.get("arguments", function.get("parameters")), call.get("id")
    if not isinstance(name, str) or not isinstance(number, str | int | None):
        return "a call without a name, or with an id that is neither text nor a number"
    if isinstance(arguments, str):
        arguments = load_nested(arguments) if arguments.strip() else {}
    if not isinstance(arguments, Mapping | None):
        return f"the arguments of {name!r} are no JSON object"
    return ToolCall(name, arguments or {}, None if number is None else str(number))
