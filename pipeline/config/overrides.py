"""Values that the command line puts over those of the file: `--set workload.decode.batch=[1,2]`."""

import re
from typing import Any, Final

import msgspec

from tune_model.pipeline.config.document import Document, DocumentError, Path, format_path, parse_value
from tune_model.pipeline.config.wording import ConfigError, describe_value

__all__ = ["Override", "apply_override", "parse_override"]

STEP: Final = re.compile(r"(?:\A|\.)([A-Za-z_][\w-]*)|\[(\d{1,6})\]", re.ASCII)


class Override(msgspec.Struct, frozen=True):
    """One value to put into a document.

    Attributes:
        flag: What the user typed, for messages: `--set target=cpu`.
        path: Where it goes.
        value: Plain data.
    """

    flag: str
    path: Path
    value: Any


def parse_override(text: str, flag: str | None = None) -> Override:
    """Parse what follows `--set`: a path, `=`, and a YAML value.

    Args:
        text: The path, `=` and the value.
        flag: What the user typed, where that is another option.

    Raises:
        ConfigError: There is no `=`, the path cannot be read, or the value is no YAML.
    """
    flag = flag or f"--set {text}"
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{flag}: there is no '='; expected FIELD=VALUE, such as search.effort=quick.")
    path: list[str | int] = []
    position = 0
    while position < len(name) or not path:
        step = STEP.match(name, position)
        if step is None:
            raise ConfigError(
                f"{flag}: the field is {describe_value(name)}; expected names and indices, such as "
                "workload.decode.batch[0]."
            )
        path.append(step[1] or int(step[2]))
        position = step.end()
    try:
        return Override(flag, tuple(path), parse_value(value))
    except DocumentError as error:
        raise ConfigError(f"{flag}: the value is {error.problem}; expected a YAML value.") from error


def apply_override(document: Document, override: Override) -> None:
    """Put an override into a document, making the mappings on the way to it where there are none.

    Raises:
        ConfigError: The path goes through a value that is no mapping or list, or past a list's end.
    """
    *parents, last = override.path
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        return  # the file is no configuration, whatever is put into it; its check says so
    target: Any = document.data
    for depth, step in enumerate(parents, start=1):
        path = override.path[:depth]
        _check_step(target, path, override)
        if isinstance(target, dict) and target.get(step) is None:
            target[step] = {}
            document.origins[path] = override.flag
        target = target[step]
    _check_step(target, override.path, override)
    target[last] = override.value
    for path in [path for path in document.origins if path[: len(override.path)] == override.path]:
        del document.origins[path]
    document.origins[override.path] = override.flag


def _check_step(target: Any, path: Path, override: Override) -> None:
    """Refuse a step into something that has no such place."""
    step = path[-1]
    if isinstance(step, str) and isinstance(target, dict):
        return
    if isinstance(step, int) and isinstance(target, list) and step < len(target):
        return
    seen = f"a list of {len(target)}" if isinstance(target, list) and target else describe_value(target)
    wanted = "a mapping" if isinstance(step, str) else f"a list with an index {step}"
    raise ConfigError(f"{override.flag}: {format_path(path[:-1])} is {seen}; expected {wanted}.")
