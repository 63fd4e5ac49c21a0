"""From a file's name to a checked configuration."""

import pathlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import yaml

import tune_model
from tune_model.pipeline.config.document import Document, DocumentError, Path, format_path, parse_document
from tune_model.pipeline.config.overrides import Override, apply_override, parse_override
from tune_model.pipeline.config.rules import violations
from tune_model.pipeline.config.schema import Config, ExportedModel
from tune_model.pipeline.config.wording import ConfigError, Violation, find_violation

__all__ = ["LoadedConfig", "dump_config", "load_config", "parse_config", "shipped_configs"]

DEFAULT_DTYPE: Final = "bfloat16"

BYTES_AT_MOST: Final = 128 << 10
"""The YAML parser reads some 200 KB a second; shipped configurations have 1 to 2."""

WRITTEN_AT_MOST: Final = 2 * BYTES_AT_MOST
"""Written with every field, a configuration is a little longer."""


class LoadedConfig(msgspec.Struct, frozen=True):
    """A configuration and where it came from.

    Attributes:
        config: Checked; overrides included.
        folder: What paths inside it are relative to.
        document: The data it was made from, for messages about it.
    """

    config: Config
    folder: pathlib.Path
    document: Document

    def error(self, path: Path, expected: str, seen: str | None = None) -> ConfigError:
        """Word a fault found later (a model's folder is missing) as faults in the file are worded.

        Args:
            path: The value at fault: `("model", "path")`.
            expected: What should have been there.
            seen: What is there, with its verb; by default the value itself.
        """
        return Violation(path, expected, seen).to_error(self.document)

    def place(self, error: Exception, path: Path) -> ConfigError:
        """Say what another room refused with the value that led there: `model.yaml:3: $.target: no such GPU`.

        Args:
            error: Says what was seen, what was expected and what to do.
            path: The value it is about.
        """
        return ConfigError(f"{self.document.origin(path)}: {format_path(path)}: {error}")


def load_config(name: str, overrides: Iterable[Override | str] = ()) -> LoadedConfig:
    """Read and check a configuration.

    Args:
        name: A path; or the name of a shipped configuration, with or without `.yaml`, if there is no such file.
        overrides: Values to put over the file's, in order; text is what follows `--set`.

    Raises:
        ConfigError: It cannot be read, or the first fault found in it.
    """
    path = _find(name)
    document = _parse(_read(path, name), name)
    for override in overrides:
        apply_override(document, parse_override(override) if isinstance(override, str) else override)
    config = find_violation(document.data)
    if isinstance(config, Violation):
        raise config.to_error(document)
    for violation in violations(config):
        raise violation.to_error(document)
    return LoadedConfig(_with_dtype(config), path.resolve().parent, document)


def parse_config(text: str, name: str, overrides: Iterable[Override | str] = ()) -> Config:
    """Check a configuration's text, such as an artifact carries.

    Args:
        text: YAML.
        name: What messages call it.
        overrides: Values to put over the text's, as for `load_config`.

    Raises:
        ConfigError: The first fault found in it.
    """
    document = _parse(text, name)
    for override in overrides:
        apply_override(document, parse_override(override) if isinstance(override, str) else override)
    config = find_violation(document.data)
    if isinstance(config, Violation):
        raise config.to_error(document)
    return _with_dtype(config)


def _with_dtype(config: Config) -> Config:
    """Fill in the default dtype, but of a saved program, which has its own."""
    if config.dtype is not None or isinstance(config.model, ExportedModel):
        return config
    return msgspec.structs.replace(config, dtype=DEFAULT_DTYPE)


def shipped_configs() -> dict[str, pathlib.Path]:
    """Return the complete examples that come with the package, by file name."""
    folder = pathlib.Path(tune_model.__file__).parent / "configs"
    return {path.name: path for path in sorted(folder.glob("*.yaml"))}


def dump_config(config: Config) -> str:
    """Write a configuration as YAML that loads to the same one: every field, defaults included."""
    data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def _find(name: str) -> pathlib.Path:
    path = pathlib.Path(name)
    if path.exists():
        return path
    shipped = shipped_configs()
    for candidate in (name, f"{name}.yaml"):
        if candidate in shipped:
            return shipped[candidate]
    raise ConfigError(f"{name}: there is no such file; expected a path, or a shipped one: {', '.join(shipped)}.")


def _read(path: pathlib.Path, name: str) -> str:
    if path.is_dir():
        raise ConfigError(f"{name}: this is a folder; expected a YAML file.")
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_AT_MOST + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror}); expected a readable YAML file.") from error
    if len(content) > BYTES_AT_MOST:
        raise ConfigError(f"{name}: is larger than {BYTES_AT_MOST} bytes; expected a configuration.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        seen = f"byte {content[error.start]:#04x}"
        raise ConfigError(f"{name}:{line}: has {seen}, which is not UTF-8; expected UTF-8 text.") from error


def _parse(text: str, name: str) -> Document:
    if len(text) > WRITTEN_AT_MOST:
        raise ConfigError(f"{name}: is longer than {WRITTEN_AT_MOST} characters; expected a configuration.")
    try:
        return parse_document(text, name)
    except DocumentError as error:
        raise ConfigError(f"{name}:{error.line}: {error.problem}.") from error
