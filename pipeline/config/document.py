"""YAML text as plain data that remembers where every value stands.

Scalars follow YAML 1.2's core schema: `no`, `on` and `1:30` are text, `1e-5` is a number. Duplicate keys, tags, cycles
and texts that expand beyond reason are refused. Nothing here knows what a configuration means.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
import yaml

__all__ = ["Document", "DocumentError", "Path", "format_path", "parse_document", "parse_value"]

Path = tuple[str | int, ...]
"""Where a value is inside a document: `("workload", "decode", "batch", 2)`."""

VALUES_AT_MOST: Final = 20_000
DEPTH_AT_MOST: Final = 50
PLAIN_KEY: Final = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)

SCALARS: Final[tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...]] = (
    (re.compile(r"~|null|Null|NULL|"), lambda _text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+(_[0-9]+)*"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)
STANDARD_TAG: Final = "tag:yaml.org,2002:"


class DocumentError(Exception):
    """The text is no usable YAML.

    Attributes:
        line: Counted from 1.
        problem: What was seen and what was expected.
    """

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


class Document(msgspec.Struct):
    """Data and origins.

    Attributes:
        data: Dicts with text keys, lists and scalars.
        origins: Path of every value to where it was written: `model.yaml:12`, or the command-line flag that set it.
    """

    data: Any
    origins: dict[Path, str]

    def origin(self, path: Path) -> str:
        """Return where `path`, or the nearest value around it, was written."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins[path]

    def seen(self, path: Path) -> Any:
        """Return the value at `path`; raises LookupError if there is none."""
        value = self.data
        for step in path:
            if isinstance(step, str) != isinstance(value, dict) or not isinstance(value, dict | list):
                raise LookupError(format_path(path))
            value = value[step]  # type: ignore[index]  # the step's type fits the value's, checked above
        return value


def format_path(path: Path) -> str:
    """Write a path as error messages show it: `$.workload.decode.batch[2]`."""
    text = "$"
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if PLAIN_KEY.fullmatch(step) else f"[{step!r}]"
    return text


def parse_document(text: str, name: str) -> Document:
    """Parse YAML text.

    Args:
        text: One YAML document.
        name: The file, as messages should call it.

    Raises:
        DocumentError: The text is no YAML, or uses something a configuration has no use for.
    """
    reader = _Reader(name)
    data = reader.read(_compose(text), ())
    return Document(data, reader.origins)


def parse_value(text: str) -> Any:
    """Parse one YAML value, as given on a command line.

    Raises:
        DocumentError: As `parse_document`.
    """
    return parse_document(text, "").data


def _compose(text: str) -> yaml.Node:
    """Parse into nodes, without resolving scalars: the base loader calls them all text."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise DocumentError(line, f"not valid YAML: {said}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise DocumentError(line, f"not valid YAML: character {error.character!r} is not allowed") from error
    except RecursionError as error:
        raise DocumentError(1, f"values are nested too deeply; expected at most {DEPTH_AT_MOST} levels") from error
    start = yaml.Mark("", 0, 0, 0, "", 0)
    return node if node is not None else yaml.ScalarNode(f"{STANDARD_TAG}str", "", start, start)


class _Reader:
    """Turns nodes into data, once, counting what aliases expand to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.origins: dict[Path, str] = {}
        self.open: list[int] = []

    def read(self, node: yaml.Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        self.origins[path] = f"{self.name}:{line}"
        if len(self.origins) > VALUES_AT_MOST:
            raise DocumentError(line, f"aliases or lists expand to more than {VALUES_AT_MOST} values")
        if id(node) in self.open:
            raise DocumentError(line, f"{format_path(path)} contains itself through an alias")
        if len(path) > DEPTH_AT_MOST:
            raise DocumentError(line, f"values are nested too deeply; expected at most {DEPTH_AT_MOST} levels")
        self.open.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.read_mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                _refuse_tag(node, "seq")
                return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
            return _scalar(node) if isinstance(node, yaml.ScalarNode) else None
        finally:
            self.open.pop()

    def read_mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        _refuse_tag(node, "map")
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise DocumentError(line, f"{format_path(path)} has the key {shown}; expected text (quote it)")
            if key in data:
                raise DocumentError(line, f"{format_path((*path, key))} is given twice; expected once")
            data[key] = self.read(value_node, (*path, key))
            self.origins[*path, key] = f"{self.name}:{line}"
        return data


def _refuse_tag(node: yaml.Node, expected: str) -> None:
    if node.tag not in {f"{STANDARD_TAG}{expected}", "!"}:
        raise DocumentError(node.start_mark.line + 1, f"the tag {node.tag} is not supported; expected plain YAML")


def _scalar(node: yaml.ScalarNode) -> Any:
    """Resolve a scalar by YAML 1.2's core schema; quoted and block scalars are text."""
    _refuse_tag(node, "str")
    text: str = node.value
    if node.style is not None:
        return text
    for pattern, convert in SCALARS:
        if pattern.fullmatch(text):
            try:
                return convert(text)
            except ValueError as error:
                raise DocumentError(node.start_mark.line + 1, f"a number of {len(text)} digits is too long") from error
    return text
