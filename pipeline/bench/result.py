"""Benchmark results as files: one JSON per benchmark and device, with what is needed to judge and repeat it."""

import datetime as dt
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from tune_model.package.output import staged_document, try_writing
from tune_model.runtime.errors import TuneModelError

__all__ = [
    "BenchmarkResult",
    "check_result",
    "command_text",
    "device_name",
    "library_versions",
    "merge_commands",
    "merge_rows",
    "read_result",
    "today",
    "write_result",
]

_JOINT = " && "
_BYTES_AT_MOST = 64 << 20
"""A result of some hundred rows has some hundred thousand."""


class BenchmarkResult(msgspec.Struct, frozen=True):
    """One benchmark run.

    Attributes:
        benchmark: What was measured: `llama-3-8b`.
        device: Marketing name.
        versions: Of Python, torch, triton, transformers and the driver's CUDA.
        date: ISO day.
        command: What was run; several commands where rows come from several runs.
        rows: One mapping per measured point.
        summary: Flat numbers for comparison between runs.
    """

    benchmark: str
    device: str
    versions: dict[str, str]
    date: str
    command: str
    rows: list[dict[str, Any]]
    summary: dict[str, float]


def device_name(device: torch.device) -> str:
    """Return the GPU's or the CPU's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def library_versions() -> dict[str, str]:
    """Return the versions that the figures depend on."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    for name in ("triton", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return versions


def today() -> str:
    """Return the day in UTC."""
    return dt.datetime.now(dt.UTC).date().isoformat()


def merge_rows(old: list[dict[str, Any]], new: list[dict[str, Any]], key: tuple[str, ...]) -> list[dict[str, Any]]:
    """Replace rows measured again, keep the others: a long benchmark runs in shards."""
    fresh = {tuple(row.get(k) for k in key) for row in new}
    return [row for row in old if tuple(row.get(k) for k in key) not in fresh] + new


def command_text(arguments: Sequence[str]) -> str:
    """Return the command as it was typed, but of absolute paths only the file's name: they mean nothing elsewhere."""
    return shlex.join(["tune-model", *(_short(argument) for argument in arguments)])


def _short(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={_short(value)}"
    return Path(argument).name if argument.startswith("/") else argument


def merge_commands(old: str, new: str) -> str:
    """Return the commands that made a result to which rows were added, each once."""
    return _JOINT.join(dict.fromkeys([*old.split(_JOINT), *new.split(_JOINT)]))


def check_result(path: Path) -> None:
    """Fail before anything is timed if a result could not be put at `path`; a device or a pipe takes anything.

    Raises:
        TuneModelError: Something else is there or in its way, or it cannot be written there.
    """
    if path.is_file() or path.is_dir():
        read_result(path)
    elif path.exists():
        return
    for folder in path.absolute().parents:
        if folder.exists():
            if not folder.is_dir():
                raise TuneModelError(f"{path}: {folder} is not a folder; expected one to put the result in")
            try:
                try_writing(folder / path.name)
            except OSError as error:
                raise TuneModelError(f"{path}: {error.strerror}; expected a place for the result") from error
            return


def write_result(path: Path, result: BenchmarkResult) -> None:
    """Write a result file, all of it or nothing, in place of an older one or of nothing.

    Raises:
        OutputError: Something else is there by now (records that a run made, say), or the system refused.
    """
    text = msgspec.json.format(msgspec.json.encode(result), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_document(path, "a benchmark result", b"{") as place:
        place.write_bytes(text + b"\n")


def read_result(path: Path) -> BenchmarkResult:
    """Read a result file.

    Raises:
        TuneModelError: It is not one.
    """
    try:
        with path.open("rb") as stream:
            text = stream.read(_BYTES_AT_MOST + 1)
    except OSError as error:
        raise TuneModelError(f"{path}: {error.strerror}; expected a benchmark result") from error
    if len(text) > _BYTES_AT_MOST:
        raise TuneModelError(f"{path}: is larger than {_BYTES_AT_MOST} bytes; expected a benchmark result")
    try:
        return msgspec.json.decode(text, type=BenchmarkResult)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise TuneModelError(f"{path}: {error}; expected a benchmark result") from error
