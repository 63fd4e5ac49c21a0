"""Mutated configurations, overrides, records databases and their exports: read as what they say, or refused."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from reliability_trials.mutation import hostile_text, spoil_bytes, spoil_json, spoil_text
from tune_model.pipeline.config import dump_config, load_config, parse_config, shipped_configs
from tune_model.runtime.errors import TuneModelError
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.records.database import Finalist, Outcome, Records, RecordsError, Refusal, Row, Timing, parse_rows

__all__ = ["Reading", "Texts", "make_text"]

_PAGE: Final = 4096


class Texts:
    """Sound configurations and records to begin with."""

    def __init__(self, folder: Path) -> None:
        """Write a database in `folder`, twice: with everything in one file, and with a write-ahead log."""
        self.folder = folder
        self.configs = tuple(path.read_text(encoding="utf-8") for path in shipped_configs().values())
        self.rows = tuple(_rows())
        place = folder / "sound.sqlite"
        records = Records(place)
        records.merge(self.rows[:200])
        records.connection.execute("pragma wal_checkpoint(truncate)")
        self.whole = place.read_bytes()
        records.merge(self.rows[200:])
        self.log = place.with_name("sound.sqlite-wal").read_bytes()
        self.lines = tuple(records.export())
        records.close()


def _rows() -> list[Row]:
    rows: list[Row] = []
    for number in range(300):
        candidate = Candidate("triton_matmul", (("block_m", number), ("stages", 3), ("swap", number % 2 == 0)))
        key, task = f"{number:032x}", f"{number % 7:024x}"
        timing = Timing(candidate, number % 3, "race", 1.5 + number, 1.4 + number, 1.7 + number, 3, 0.001)
        rows.append(Row(key, task, timing))
        if number % 5 == 0:
            rows.append(Row(key, task, Refusal(candidate, Rejected("spills", "612 bytes of local memory"))))
        if number % 11 == 0:
            finalist = Finalist(candidate, (), 10.0, 1.0, 1.0, 1.0, 1, unconditional=True)
            rows.append(Row(key, task, Outcome((finalist,) * 12)))
    return rows


Reading = Callable[[], bool]
"""Reads what was made; says whether it was loaded, and `False` when it was refused.

Raises `AssertionError` where it was read as something else than it says.
"""


def make_text(texts: Texts, case: int) -> tuple[str, Reading]:
    """Make the mutated text of a number; returns its kind, and what reads it."""
    dice = Random(f"text {case}")  # noqa: S311 (a case can be repeated)
    kind = dice.choice(list(_KINDS))
    return kind, _KINDS[kind](texts, dice)


def _config(texts: Texts, dice: Random) -> Reading:
    text = dice.choice(texts.configs)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        text = spoil_text(text, dice)
    return _load(texts, text.encode(errors="surrogatepass"), ())


def _config_bytes(texts: Texts, dice: Random) -> Reading:
    return _load(texts, spoil_bytes(dice.choice(texts.configs).encode(), dice), ())


def _config_bomb(texts: Texts, dice: Random) -> Reading:
    text = dice.choice(texts.configs)
    aliases = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
        f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    bomb = dice.choice(
        (
            aliases + text,
            text + aliases,
            text + "extra: " + "[" * dice.choice((50, 1000, 100_000)),
            text + "extra: " + "{a: " * dice.choice((50, 1000, 20_000)),
            "? " * 50_000 + text,
            text + "- " * 20_000,
            text + "x: !!python/object/apply:os.system ['true']\n",
            text + "x: !!binary " + "A" * 1000 + "\n",
            "%YAML 9.9\n---\n" + text,
            text + "\n---\n" + text,
            text + "x: " + "9" * 100_000 + "\n",
            text.replace(":", ": &x", 3),
            text + "<<: *x\n",
            text + "x" * dice.choice((60_000, 300_000, 2_000_000)) + ": 1\n",
            text + "k: [" + "1, " * dice.choice((1000, 50_000, 400_000)) + "1]\n",
            text + "".join(f"key{number}: value\n" for number in range(dice.choice((100, 5000, 60_000)))),
            text.replace("\n", "\r\n"),
            "\ufeff" + text,
        )
    )
    return _load(texts, bomb.encode(), ())


def _override(texts: Texts, dice: Random) -> Reading:
    if dice.random() < 0.2:
        sound = ("target=cpu", "search.effort=quick", "search.seed=7", "search.budget=90s", "output.path=x.tuned")
        return _load(texts, dice.choice(texts.configs).encode(), (dice.choice(sound),))
    fields = (
        "target",
        "search.effort",
        "workload.decode.batch",
        "workload.decode.batch[0]",
        "model",
        "a.b.c",
        "x[",
        "..",
        "",
    )
    values = ("cpu", "[1,4]", "{a: 1}", "1e999", "!!python/name:os.system", "[" * 2000, "&a [*a]", hostile_text(dice))
    overrides = tuple(
        dice.choice((f"{dice.choice(fields)}={dice.choice(values)}", hostile_text(dice), "=", "a=b=c"))
        for _ in range(dice.choice((1, 1, 3)))
    )
    return _load(texts, dice.choice(texts.configs).encode(), overrides)


def _load(texts: Texts, content: bytes, overrides: tuple[str, ...]) -> Reading:
    place = texts.folder / "mutated.yaml"
    place.write_bytes(content)

    def read() -> bool:
        try:
            config = load_config(str(place), overrides).config
        except TuneModelError:
            return False
        if parse_config(dump_config(config), "again") != config:
            raise AssertionError("a configuration does not survive being written and read")
        return True

    return read


def _database(texts: Texts, dice: Random) -> Reading:
    whole, log = texts.whole, texts.log if dice.random() < 0.5 else b""
    if not log or dice.random() < 0.7:
        whole = _spoil_pages(whole, dice)
    if log and dice.random() < 0.7:
        log = spoil_bytes(log, dice)
    place = _fresh_database(texts)
    place.write_bytes(whole)
    if log:
        place.with_name("mutated.sqlite-wal").write_bytes(log)
    return lambda: _read_database(texts, place)


def _fresh_database(texts: Texts) -> Path:
    for old in texts.folder.glob("mutated.sqlite*"):
        old.unlink()
    return texts.folder / "mutated.sqlite"


def _read_database(texts: Texts, place: Path) -> bool:
    try:
        found = _rows_and_one_more(texts, place)
    except RecordsError:
        return False
    if not set(texts.rows).issuperset(found):
        raise AssertionError("a damaged database gave rows that nobody wrote")
    kept = len(_rows_and_one_more(texts, place))
    if kept != len(found) + 1:
        raise AssertionError(f"{len(found)} rows and a new one became {kept}")
    return True


def _rows_and_one_more(texts: Texts, place: Path) -> list[Row]:
    """Open a database, read everything, and add a row (once)."""
    records = Records(place)
    try:
        found = [msgspec.json.decode(line, type=Row) for line in records.export()]
        records.add("new", "task", texts.rows[0].body)
    finally:
        records.close()
    return found


def _spoil_pages(data: bytes, dice: Random) -> bytes:
    spoiled = spoil_bytes(data, dice)
    if dice.random() < 0.4:
        pages = [spoiled[at : at + _PAGE] for at in range(0, len(spoiled), _PAGE)] or [b""]
        one, other = dice.randrange(len(pages)), dice.randrange(len(pages))
        pages[one], pages[other] = pages[other], dice.choice((pages[one], bytes(_PAGE), dice.randbytes(_PAGE)))
        spoiled = b"".join(pages)
    if dice.random() < 0.3:
        place = dice.randrange(100)  # in the header
        spoiled = spoiled[:place] + dice.randbytes(dice.choice((1, 4, 20))) + spoiled[place + 1 :]
    return spoiled


def _statements(texts: Texts, dice: Random) -> Reading:
    """A database that is sound and holds something else: other tables, other columns, hostile bodies."""
    place = _fresh_database(texts)
    place.write_bytes(texts.whole)
    connection = sqlite3.connect(place)
    try:
        connection.execute(
            dice.choice(
                (
                    "drop table records",
                    "alter table records rename to other",
                    "alter table records rename column kind to sort",
                    "alter table records rename column body to content",
                    "update records set body = 'null'",
                    "update records set body = '{}'",
                    "update records set body = zeroblob(100)",
                    "update records set body = null where id = 7"
                    if dice.random() < 0
                    else "update records set key = 7",
                    "update records set digest = id",
                    "update records set kind = 'outcome'",
                    "update records set task = x'ff00ff'",
                    "delete from records",
                    "drop index records_by_key",
                    "create trigger t before insert on records begin select raise(abort, 'no'); end",
                    "create view v as select * from records",
                    f"pragma user_version = {dice.choice((0, 1, 2, 3, 99, -1))}",
                    f"pragma application_id = {dice.randrange(1 << 31)}",
                )
            )
        )
        connection.commit()
    finally:
        connection.close()
    return lambda: _read_database(texts, place)


def _export(texts: Texts, dice: Random) -> Reading:
    lines = list(texts.lines[:50])
    at = dice.randrange(len(lines))
    lines[at] = spoil_json(lines[at], dice) if dice.random() < 0.7 else spoil_bytes(lines[at], dice)

    def read() -> bool:
        try:
            rows = list(parse_rows(lines))
        except RecordsError:
            return False
        if any(msgspec.json.decode(msgspec.json.encode(row), type=Row) != row for row in rows):
            raise AssertionError("a row does not survive being written and read")
        return True

    return read


_KINDS: Final[dict[str, Callable[[Texts, Random], Reading]]] = {
    "configuration": _config,
    "configuration bytes": _config_bytes,
    "configuration bomb": _config_bomb,
    "override": _override,
    "records database": _database,
    "records statements": _statements,
    "records export": _export,
}
