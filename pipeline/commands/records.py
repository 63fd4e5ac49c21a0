"""`tune-model records`: look at, tidy, join and export the database of measurements."""

import gzip
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import click

from tune_model.pipeline.options import artifact_path
from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    from tune_model.tune.records.database import Records
    from tune_model.tune.records.facts import Row
    from tune_model.tune.records.holdings import Holdings

__all__ = ["NoRecordsError", "command"]

HELP = """Look at, tidy, join and export the records: every measurement that any tune has taken here.

Records are shared by all models: what one race has measured, no other measures again. They are one SQLite database;
several tuners may use it at once. Built kernels lie beside it.

\b
  tune-model records list                         per task: candidates, best time, plain operators' time
  tune-model records list llama-3-8b.tuned        only that artifact's tasks, by name
  tune-model records stats                        rows by kind, family and reason; sizes on disk
  tune-model records export -o records.jsonl      one JSON line per row
  tune-model records merge other.jsonl /mnt/b     add what is not here yet, from exports, databases or folders
  tune-model records prune --superseded           remove what later rows replace
"""

F = TypeVar("F", bound=Callable[..., Any])


class NoRecordsError(TuneModelError):
    """There is no records database where one is wanted."""


def _store_option(function: F) -> F:
    option = click.option(
        "--records",
        "store",
        metavar="FOLDER",
        default=None,
        help="Where records and kernels live; the cache by default.",
    )
    return option(function)


def _artifacts(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(artifact_path(ctx, parameter, value) for value in values)


@click.group("records", help=HELP)
def command() -> None:
    """Hold the subcommands."""


@command.command("list")
@click.argument("artifacts", metavar="[ARTIFACT]...", nargs=-1, callback=_artifacts)
@_store_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_tasks(artifacts: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """List what is known of every task, or of the tasks of some artifacts.

    The records know tasks by key; with an artifact they get its names.
    """
    import msgspec

    names = _task_names(artifacts)
    holdings = _stock(_folder(store))
    tasks = [task for task in holdings.tasks if not artifacts or task.task in names]
    if as_json:
        rows = [{"label": names.get(task.task, ""), **msgspec.structs.asdict(task)} for task in tasks]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    from rich.table import Table

    from tune_model.pipeline.console import console, gain_text, time_text

    table = Table()
    for name in ("task", "candidates", "timings", "refused", "races", "best", "time", "plain", "gain"):
        table.add_column(name, justify="left" if name in {"task", "best"} else "right", overflow="fold")
    for task in tasks:
        counts = [str(n) for n in (task.candidates, task.timings, task.refusals, task.races)]
        times = ["-", "-", "-"]
        if task.extern_us > 0 and not task.doubtful:
            times = [time_text(task.best_us), time_text(task.extern_us), gain_text(task.extern_us, task.best_us)]
        best = "disturbed" if task.doubtful else task.best or task.failed or "not finished"
        table.add_row(names.get(task.task, task.task), *counts, best, *times)
    out = console()
    out.print(table)
    missing = len(names.keys() - {task.task for task in tasks})
    out.print(f"{len(tasks)} tasks" + (f"; {missing} of the artifacts' tasks are not here" if missing else ""))


@command.command("stats")
@_store_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show_stats(store: str | None, as_json: bool) -> None:
    """Count rows by kind, family and reason, and measure database and kernels on disk."""
    import msgspec

    from tune_model.pipeline.console import console, size_text
    from tune_model.pipeline.store import kernels_path, records_path

    folder = _folder(store)
    holdings = _stock(folder)
    objects = [p for p in (kernels_path(folder) / "objects").glob("*/*") if p.is_file()]
    sizes = {
        "database_bytes": sum(p.stat().st_size for p in folder.glob(f"{records_path(folder).name}*") if p.is_file()),
        "kernels": len(objects),
        "kernels_bytes": sum(p.stat().st_size for p in objects),
    }
    if as_json:
        facts = {**msgspec.structs.asdict(holdings), "tasks": len(holdings.tasks), **sizes}
        click.echo(msgspec.json.format(msgspec.json.encode(facts)).decode())
        return
    out = console()
    for name, counts in (("rows", holdings.kinds), ("families", holdings.families), ("refused", holdings.reasons)):
        out.print(
            f"{name + ':':10}{', '.join(f'{n} {what}' for what, n in counts.items()) or 'none'}",
            markup=False,
            soft_wrap=True,
        )
    out.print(f"{'tasks:':10}{len(holdings.tasks)}")
    out.print(f"{'useless:':10}{holdings.superseded} superseded, {holdings.damaged} damaged")
    out.print(f"{'database:':10}{size_text(sizes['database_bytes'])} in {folder}", markup=False, soft_wrap=True)
    out.print(f"{'kernels:':10}{sizes['kernels']}, {size_text(sizes['kernels_bytes'])}")


@command.command("prune")
@_store_option
@click.option("--superseded", "drop_superseded", is_flag=True, help="Rows that later ones replace, and damaged ones.")
@click.option("--task", "tasks", metavar="KEY", multiple=True, help="Everything about this task; repeatable.")
@click.option(
    "--keep", metavar="ARTIFACT", multiple=True, callback=_artifacts, help="All tasks but those of it; repeatable."
)
@click.option("--kernels", is_flag=True, help="All built kernels; what is needed is built again.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(
    store: str | None,
    drop_superseded: bool,
    tasks: tuple[str, ...],
    keep: tuple[str, ...],
    kernels: bool,
    dry_run: bool,
) -> None:
    """Remove rows that are not wanted any more; what was removed and is asked for later is measured again.

    A tune afterwards chooses the same winners, but rows that were removed are no longer in its artifact's records.
    """
    from tune_model.pipeline.store import kernels_path
    from tune_model.tune.records.holdings import superseded

    if not (drop_superseded or tasks or keep or kernels):
        raise click.UsageError("say what to remove: --superseded, --task KEY, --keep ARTIFACT or --kernels")
    folder = _folder(store)
    kept = _task_names(keep)
    with closing(_open(folder)) as records:
        rows = records.numbers()
        unknown = sorted(set(tasks) - {row.task for row in rows.values() if row is not None})
        if unknown:
            raise click.BadParameter(f"{unknown[0]!r} is no task of these records; `records list` shows them")
        doomed = {
            n for n, row in rows.items() if row is not None and (row.task in tasks or (keep and row.task not in kept))
        }
        if drop_superseded:
            doomed |= {*superseded(rows), *(n for n, row in rows.items() if row is None)}
        removed = len(doomed) if dry_run else records.remove(sorted(doomed))
    if kernels and not dry_run:
        shutil.rmtree(kernels_path(folder), ignore_errors=True)
    would = "would remove" if dry_run else "removed"
    click.echo(f"{would} {removed} of {len(rows)} rows" + (" and all built kernels" if kernels else ""))


@command.command("merge")
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@_store_option
def merge(sources: tuple[str, ...], store: str | None) -> None:
    """Add rows that are not here yet, from exports (.jsonl, .jsonl.gz), databases or folders of `--records`.

    Only machines that are alike in everything a time depends on share rows; others lie side by side.
    """
    from tune_model.pipeline.environment import read_environment
    from tune_model.pipeline.store import check_store, records_path
    from tune_model.tune.records.database import Records

    places = [_source(source) for source in sources]
    folder = Path(store) if store else read_environment().cache_dir
    check_store(folder)
    with closing(Records(records_path(folder))) as records:
        for place in places:
            added = records.merge(_rows(place))
            click.echo(f"{place}: {added} new rows")


@command.command("export")
@_store_option
@click.option("-o", "--output", metavar="FILE", default="-", help="Where to; standard output by default. .gz packs it.")
def export(store: str | None, output: str) -> None:
    """Write every row as a line of JSON, in the order written; `records merge` reads it."""
    from tune_model.package.output import staged_document

    with closing(_open(_folder(store))) as records:
        if output == "-":
            for line in records.export():
                click.echo(line, nl=False)
            return
        count = 0
        packed = output.endswith(".gz")
        beginning = b"\x1f\x8b" if packed else b'{"'
        with (
            staged_document(Path(output), "exported records", beginning) as path,
            _created(path, packed=packed) as file,
        ):
            for line in records.export():
                file.write(line)
                count += 1
    click.echo(f"wrote {output} ({count} rows)", err=True)


@contextmanager
def _created(place: Path, *, packed: bool) -> Iterator[IO[bytes]]:
    """Make a file; the same rows give the same bytes."""
    with place.open("wb") as file:
        if not packed:
            yield file
            return
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packing:  # neither a name nor a time inside
            yield cast("IO[bytes]", packing)


def _folder(store: str | None) -> Path:
    """Return a folder of records that is there.

    Raises:
        NoRecordsError: It is not.
    """
    from tune_model.pipeline.environment import read_environment
    from tune_model.pipeline.store import records_path

    folder = Path(store) if store else read_environment().cache_dir
    if not records_path(folder).is_file():
        raise NoRecordsError(f"{records_path(folder)}: there are no records; expected a folder that a tune used")
    return folder


def _open(folder: Path) -> "Records":
    from tune_model.pipeline.store import records_path
    from tune_model.tune.records.database import Records

    return Records(records_path(folder))


def _stock(folder: Path) -> "Holdings":
    from tune_model.tune.records.holdings import take_stock

    with closing(_open(folder)) as records:
        return take_stock(records.numbers())


def _task_names(artifacts: tuple[str, ...]) -> dict[str, str]:
    """Return the labels of the tasks of some artifacts, of all parts of bundles, by key."""
    from tune_model.package.format.records import TaskRecord
    from tune_model.package.read import open_parts

    parts = [part for path in artifacts for part in open_parts(path)]
    found = (record.planned for part in parts for record in part.records() if isinstance(record, TaskRecord))
    return {planned.key: planned.label for planned in found}


def _source(text: str) -> Path:
    """Find what to merge from: a file, or the database of a folder."""
    from tune_model.pipeline.store import records_path

    place = Path(text)
    if place.is_dir():
        place = records_path(place)
    if not place.is_file():
        raise NoRecordsError(
            f"{text}: there are no records; expected an export, a database or a folder that a tune used"
        )
    return place


def _rows(place: Path) -> "Iterator[Row]":
    from tune_model.tune.records.database import Records, RecordsError, parse_rows
    from tune_model.tune.records.storage import snapshot

    with place.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"SQLite format 3"):
        with tempfile.TemporaryDirectory() as folder:
            copy = snapshot(place, Path(folder))
            try:
                with closing(Records(copy, copy_of=place)) as records:
                    yield from records.rows()
            except RecordsError as error:
                raise RecordsError(str(error).replace(str(copy), str(place))) from error
        return
    try:
        with cast("IO[bytes]", gzip.open(place)) if start[:2] == b"\x1f\x8b" else place.open("rb") as file:
            yield from parse_rows(file)
    except (RecordsError, OSError, EOFError) as error:
        raise RecordsError(f"{place}: {error}; expected what `records export` wrote, or a records database") from error
