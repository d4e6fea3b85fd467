"""JSON schemas over every keyword that grammars take, all of short answers."""

from __future__ import annotations

from itertools import combinations
from typing import Any

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

STRINGS: dict[str, Schema] = {
    "any": {"maxLength": 6},
    "empty": {"maxLength": 0},
    "least": {"minLength": 3, "maxLength": 5},
    "exact": {"minLength": 4, "maxLength": 4},
    "word": {"pattern": "^[a-z]{2,6}$"},
    "code": {"pattern": "^[A-Z]{3}-[0-9]{2}$"},
    "either": {"pattern": "^(red|green|blue)$"},
    "escaped": {"pattern": '^[\\\\"/]{1,2}$'},
    "unicode": {"pattern": "^[äöü]{2}$"},
    "hex": {"pattern": "^0x[0-9a-f]{4}$"},
    "optional": {"pattern": "^a?b{0,2}c$"},
    "digits": {"pattern": "^\\d{3}$"},
}
FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
INTEGERS: dict[str, Schema] = {
    "digit": {"minimum": 0, "maximum": 9},
    "negative": {"minimum": -20, "maximum": -3},
    "both": {"minimum": -5, "maximum": 5},
    "exclusive": {"exclusiveMinimum": 1, "exclusiveMaximum": 4},
    "one": {"minimum": 7, "maximum": 7},
    "large": {"minimum": 99_990, "maximum": 100_010},
    "multiple": {"minimum": 0, "maximum": 50, "multipleOf": 5},
    "odd": {"minimum": 10, "maximum": 99, "multipleOf": 7},
}
NUMBERS: dict[str, Schema] = {
    "share": {"minimum": 0, "maximum": 1},
    "mixed": {"minimum": -1.5, "maximum": 2.25},
    "exclusive": {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    "above": {"minimum": 10.5, "maximum": 11},
    "below zero": {"exclusiveMinimum": -0.5, "exclusiveMaximum": 0},
    "after one": {"exclusiveMinimum": 1, "maximum": 1.5},
}
SCALARS: dict[str, Schema] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "true": {"const": True},
    "text": {"const": 'a "quoted" text\n'},
    "constant list": {"const": [1, "a", None]},
    "constant object": {"const": {"a": {"b": [True]}}},
    "enumeration": {"enum": ["a", 1, None, False, [2], {"k": 3}]},
    "typed enumeration": {"type": "string", "enum": ["yes", "no", "maybe"]},
    "types": {"type": ["null", "boolean"]},
    "numbers": {"enum": [1, 2.5, -3]},
}


def scalars() -> dict[str, Schema]:
    """Schemas of single values."""
    found = dict(SCALARS)
    found |= {f"string {name}": {"type": "string"} | more for name, more in STRINGS.items()}
    for name in FORMATS:
        found[f"format {name}"] = {"type": "string", "format": name, "maxLength": 48}
    found |= {f"integer {name}": {"type": "integer"} | more for name, more in INTEGERS.items()}
    found |= {f"number {name}": {"type": "number"} | more for name, more in NUMBERS.items()}
    return found


def an_object(properties: Schema, required: Any = None, **more: Any) -> Schema:
    required = list(properties) if required is None else required
    closed: Schema = {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": required} | closed | more


def arrays(items: dict[str, Schema]) -> dict[str, Schema]:
    """Lists of values, of several lengths and with leading items."""
    found: dict[str, Schema] = {}
    for name, item in items.items():
        found[f"pair of {name}"] = {"type": "array", "items": item, "minItems": 2, "maxItems": 2}
        found[f"some {name}"] = {"type": "array", "items": item, "maxItems": 3}
    names = list(items)
    for first, second in zip(names[::3], names[1::3], strict=False):
        found[f"tuple of {first} and {second}"] = {
            "type": "array",
            "prefixItems": [items[first], items[second]],
            "items": False,
            "minItems": 2,
        }
    return found


def objects(values: dict[str, Schema]) -> dict[str, Schema]:
    """Objects with required, optional, additional and patterned properties."""
    found: dict[str, Schema] = {}
    names = list(values)
    for name, value in values.items():
        found[f"holds {name}"] = an_object({"value": value})
    for first, second in zip(names, names[5:], strict=False):
        pair = {"a": values[first], "b": values[second]}
        found[f"may hold {first}, {second}"] = an_object(pair, [])
        found[f"holds {first}, may hold {second}"] = an_object(pair, ["a"])
    short = {"type": "integer", "minimum": 0, "maximum": 9}
    open_object: Schema = {"type": "object", "maxProperties": 2}
    found["additional integers"] = open_object | {"additionalProperties": short}
    found["patterned names"] = open_object | {
        "patternProperties": {"^k[0-9]$": short},
        "additionalProperties": False,
    }
    found["least properties"] = {
        "type": "object",
        "additionalProperties": short,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return found


def compositions(values: dict[str, Schema]) -> dict[str, Schema]:
    """Alternatives, conjunctions and references."""
    found: dict[str, Schema] = {}
    for first, second in list(combinations(values, 2))[::11]:
        found[f"{first} or {second}"] = {"anyOf": [values[first], values[second]]}
    integer: Schema = {"type": "integer"}
    found["one of"] = {"oneOf": [{"type": "null"}, integer | {"minimum": 0, "maximum": 9}]}
    found["all of numbers"] = {"allOf": [integer, {"minimum": 3}, {"maximum": 8}]}
    found["all of objects"] = {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    }
    leaf = {"$ref": "#/$defs/leaf"}
    leaves: Schema = {"leaf": {"enum": ["x", "y"]}}
    found["reference"] = an_object({"left": leaf, "right": leaf}) | {"$defs": leaves}
    found["tree"] = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": an_object(
                {
                    "leaf": {"type": "boolean"},
                    "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                ["leaf"],
            )
        },
    }
    found["old definitions"] = an_object({"a": {"$ref": "#/definitions/d"}}) | {
        "definitions": {"d": {"type": "null"}}
    }
    nested = an_object({"a": an_object({"b": an_object({"c": {"type": "boolean"}})})})
    found["nested"] = nested
    found["titled"] = nested | {"title": "T", "description": "D", "$schema": DRAFT}
    return found


def every_schema() -> dict[str, Schema]:
    """By name; more than 200."""
    values = scalars()
    return values | arrays(values) | objects(values) | compositions(values)
