"""JSON schemas as people write them, at random: objects of bounded things, nested a little."""

from collections.abc import Callable
from random import Random

Schema = dict[str, object]

_NAMES = ("id", "name", "tags", "größe", "price", "created_at", "is_open", "notes", "from", "a b")
_PATTERNS = ("^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{4}$", "^(red|green|blue)$", "[0-9]", "^\\w+@\\w+$")
_FORMATS = ("date", "date-time", "uuid", "ipv4", "email")
_VALUES = ("red", "grün", 'quo"te', "日本", 0, -7, 2.5, True, None)


def random_schema(random: Random) -> Schema:
    """A schema whose root is an object."""
    return _object(random, 3)


def _schema(random: Random, depth: int) -> Schema:
    kinds: list[Callable[[Random, int], Schema]] = [_string, _integer, _number, _enum, _simple]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return random.choice(kinds)(random, depth - 1)


def _object(random: Random, depth: int, /) -> Schema:
    names = random.sample(_NAMES, random.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(random, depth) for name in names},
        "required": [name for name in names if random.random() < 0.7],
        "additionalProperties": random.random() < 0.1,
    }


def _array(random: Random, depth: int, /) -> Schema:
    least = random.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(random, depth),
        "minItems": least,
        "maxItems": least + random.randint(0, 2),
    }


def _any_of(random: Random, depth: int, /) -> Schema:
    return {"anyOf": [_schema(random, depth) for _ in range(random.randint(2, 3))]}


def _string(random: Random, _: int, /) -> Schema:
    least = random.randint(0, 4)
    return random.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 12)},
            {"type": "string", "pattern": random.choice(_PATTERNS), "maxLength": 20},
            {"type": "string", "format": random.choice(_FORMATS)},
        ]
    )


def _integer(random: Random, _: int, /) -> Schema:
    least = random.randint(-1000, 1000)
    return random.choice(
        [
            {"type": "integer", "minimum": least, "maximum": least + random.randint(0, 5000)},
            {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + 2},
            {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": random.randint(2, 9)},
        ]
    )


def _number(random: Random, _: int, /) -> Schema:
    least = round(random.uniform(-50, 50), 2)
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + 10.5}


def _enum(random: Random, _: int, /) -> Schema:
    if random.random() < 0.3:
        return {"const": random.choice(_VALUES)}
    return {"enum": random.sample(_VALUES, random.randint(1, 5))}


def _simple(random: Random, _: int, /) -> Schema:
    return {"type": random.choice(["boolean", "null", ["null", "boolean"]])}
