"""How a fault in a configuration is said: where, what was seen, what was expected.

    my-model.yaml:12: $.workload.decode.batch[2] is 0; expected a positive integer.

msgspec finds the fault; the expectation is worded from the schema's types, the value seen comes from the document.
"""

import difflib
import json
import re
from typing import Any, Final

import msgspec
from msgspec import inspect

from tune_model.pipeline.config.document import Document, Path, format_path
from tune_model.pipeline.config.schema import Config
from tune_model.runtime.errors import TuneModelError

__all__ = ["ConfigError", "Violation", "describe_value", "find_violation", "list_words"]

SHOWN_AT_MOST: Final = 60
WHERE: Final = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>.*)`\Z", re.DOTALL)
STEP: Final = re.compile(r"\.(?P<field>[^.\[]+)|\[(?P<index>\d+)\]|(?P<any>\[\.\.\.\])")
FIELD: Final = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<name>.*?)`", re.DOTALL)


class ConfigError(TuneModelError):
    """A configuration cannot be used. The message names the file and line, or the command-line flag, and the path."""


class Violation(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        path: The value at fault.
        expected: What should have been there.
        seen: What is there, with its verb (`has path and hub`); `None` says it from the document.
    """

    path: Path
    expected: str
    seen: str | None = None

    def to_error(self, document: Document) -> ConfigError:
        """Word this fault as the error that users see."""
        seen = self.seen
        if seen is None:
            try:
                seen = f"is {describe_value(document.seen(self.path))}"
            except LookupError:
                seen = "is missing"
        return ConfigError(f"{document.origin(self.path)}: {format_path(self.path)} {seen}; expected {self.expected}.")


def find_violation(data: Any) -> Violation | Config:
    """Check data against the schema; return the configuration, or the first fault."""
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        return _explain(str(error), data)


def describe_value(value: Any) -> str:
    """Show a value in one short line, as it would be written in YAML or JSON."""
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list) and not value:
        return "an empty list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_AT_MOST else f"{text[: SHOWN_AT_MOST - 3]}..."


def list_words(words: list[str], last: str = "or") -> str:
    """Join words as a sentence does: `a, b or c`."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)


def _explain(message: str, data: Any) -> Violation:
    """Translate msgspec's message into a fault with its path, expectation and, for fields, a suggestion."""
    where = WHERE.search(message)
    path = _parse_path(where["path"], message, data) if where else ()
    if where and where["key"]:
        return Violation(
            (*path, _guilty_key(path, message, data)), _describe(_type_at(path, data), key=True), "is no name"
        )
    field = FIELD.match(message)
    if field is None:
        return Violation(path, _describe(_type_at(path, data)))
    inside = (*path, field["name"])
    if field["what"] == "missing required":
        return Violation(inside, _describe(_type_at(inside, data)), "is missing")
    known = _fields(_type_at(path, data), data, path)
    near = difflib.get_close_matches(field["name"], known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return Violation(inside, f"one of {', '.join(known)}{hint}", "is not a known field")


def _parse_path(text: str, message: str, data: Any) -> Path:
    """Read msgspec's path. It hides a mapping's keys as `[...]`, so the key at fault is found by trying each alone."""
    path: Path = ()
    for step in STEP.finditer(text):
        if step["any"]:
            path = (*path, _guilty_key(path, message, data))
        else:
            path = (*path, int(step["index"]) if step["index"] else step["field"])
    return path


def _guilty_key(path: Path, message: str, data: Any) -> str:
    """Return the key of the mapping at `path` that alone still brings about `message`."""
    mapping: dict[str, Any] = Document(data, {}).seen(path)
    for key, value in mapping.items():
        try:
            msgspec.convert(_replaced(data, path, {key: value}), Config)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return key
    return next(iter(mapping))


def _replaced(data: Any, path: Path, value: Any) -> Any:
    """Return a copy of `data` with the value at `path` replaced."""
    if not path:
        return value
    step, *rest = path
    copy = data.copy()
    copy[step] = _replaced(data[step], tuple(rest), value)
    return copy


def _unwrap(kind: inspect.Type) -> inspect.Type:
    return _unwrap(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _arms(kind: inspect.Type) -> list[inspect.Type]:
    """Return a union's alternatives without null; a single type is its own only alternative."""
    kind = _unwrap(kind)
    arms = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [arm for arm in arms if not isinstance(_unwrap(arm), inspect.NoneType)]


def _structs(kind: inspect.Type, value: Any) -> list[inspect.StructType]:
    """Return the structs that `kind` allows, narrowed by the tag that `value` carries."""
    structs = [arm for arm in map(_unwrap, _arms(kind)) if isinstance(arm, inspect.StructType)]
    tagged = [
        arm for arm in structs if isinstance(value, dict) and arm.tag_field and value.get(arm.tag_field) == arm.tag
    ]
    return tagged or structs


def _type_at(path: Path, data: Any) -> inspect.Type:
    """Walk the schema along `path`; the data picks among alternatives."""
    kind = inspect.type_info(Config)
    document = Document(data, {})
    for depth, step in enumerate(path):
        try:
            value = document.seen(path[:depth])
        except LookupError:
            value = None
        kind = _step_into(kind, step, value)
    return kind


def _step_into(kind: inspect.Type, step: str | int, value: Any) -> inspect.Type:
    structs = _structs(kind, value)
    tags = [struct.tag for struct in structs if struct.tag_field == step]
    if tags:
        return inspect.LiteralType(tuple(str(tag) for tag in tags))
    for struct in structs:
        for field in struct.fields:
            if field.encode_name == step:
                return field.type
    for arm in map(_unwrap, _arms(kind)):
        if isinstance(arm, inspect.VarTupleType):
            return arm.item_type
        if isinstance(arm, inspect.DictType):
            return arm.value_type
    return inspect.AnyType()


def _fields(kind: inspect.Type, data: Any, path: Path) -> list[str]:
    """Name the fields that the mapping at `path` may have."""
    structs = _structs(kind, Document(data, {}).seen(path))
    tags = [struct.tag_field for struct in structs[:1] if struct.tag_field]
    return [*tags, *dict.fromkeys(field.encode_name for struct in structs for field in struct.fields)]


def _describe(kind: inspect.Type, *, key: bool = False) -> str:
    """Word what a type accepts: its own `expected` text, else the kind of value."""
    if key:
        dicts = [arm for arm in map(_unwrap, _arms(kind)) if isinstance(arm, inspect.DictType)]
        return _describe(dicts[0].key_type) if dicts else "a name"
    if isinstance(kind, inspect.Metadata):
        return str(kind.extra["expected"]) if kind.extra and "expected" in kind.extra else _describe(kind.type)
    if isinstance(kind, inspect.UnionType):
        arms = _arms(kind)
        null = ", or null" if len(arms) < len(kind.types) else ""
        structs = _structs(kind, None)
        if len(structs) > 1:
            tags = [str(struct.tag) for struct in structs]
            return f"a mapping with {structs[0].tag_field}: {list_words(tags)}{null}"
        return list_words([_describe(arm) for arm in arms]) + null
    if isinstance(kind, inspect.StructType):
        return f"a mapping with {list_words([field.encode_name for field in kind.fields], 'and')}"
    if isinstance(kind, inspect.LiteralType):
        return list_words([str(value) for value in kind.values])
    return WORDS.get(type(kind), "another kind of value")


WORDS: Final[dict[type[inspect.Type], str]] = {
    inspect.BoolType: "true or false",
    inspect.DictType: "a mapping",
    inspect.FloatType: "a number",
    inspect.IntType: "an integer",
    inspect.StrType: "text",
    inspect.VarTupleType: "a list",
}
