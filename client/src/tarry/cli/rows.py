"""Parses the rows and positions that commands are given into columns.

Reads ranges of entries and ledgers, durations, times and consumers as people write them, CSV files and JSON lines.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import fractions
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TypeVar

import click
import numpy as np
from numpy.typing import NDArray

from tarry import columns, errors, hashing, key_shared, policies, times

U64_MAX = 2**64 - 1

_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
_NAME_WITH_SLOTS = re.compile(r"(.+)=(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)", re.ASCII | re.DOTALL)
_COLUMNS = ("ledger", "entry", "deliver_at_ms", "key")
_POSITION_FIELDS = ("ledger_id", "entry_id", "deliver_at_ms", "batch_index", "redelivery_count")
_BATCH_INDEX_MAX = 2**16 - 1
REDELIVERY_COUNT_MAX = 2**32 - 2
# A field of a request and the index of its row, as refusals name them
_FIELD_OF_ROW = re.compile(r"\b([a-z_]+)\[([0-9]+)\]")
# The options of fields, also beside a file, and without one
_BESIDE_FILE: Mapping[str, str] = {"delay_ms": "--in", "delay_level": "--level"}
_WITHOUT_FILE: Mapping[str, str] = {**_BESIDE_FILE, "deliver_at_ms": "--at", "entry_id": "--entries"}
# For `tarry nack`
_DELAY: Mapping[str, str] = {"delay_ms": "--delay"}
# Limits of a position's last two fields
_MOST = (_BATCH_INDEX_MAX, REDELIVERY_COUNT_MAX)


@dataclasses.dataclass(frozen=True, eq=False)
class Written:
    """The places where the rows of a request are written: options, and for other fields lines of the file `name`."""

    options: Mapping[str, str] = dataclasses.field(default_factory=lambda: _WITHOUT_FILE)
    name: str = ""
    lines: NDArray[np.int64] | None = None

    def place(self, row: int, field: str) -> str:
        """Return where a field of a row is written."""
        of_line = field if self.lines is None else f"{self.name}, line {self.lines[row]}: {field}"
        return self.options.get(field, of_line)

    @contextlib.contextmanager
    def named_in_refusals(self) -> Iterator[None]:
        """Raise refusals with the places instead of the request's fields and indexes."""
        try:
            yield
        except errors.TarryError as error:
            self.name_in(error)
            raise

    def name_in(self, error: errors.TarryError) -> None:
        """Put the place of each `field[row]` into the message of a refusal."""
        error.message = _FIELD_OF_ROW.sub(lambda found: self.place(int(found[2]), found[1]), error.message)


@dataclasses.dataclass(frozen=True, eq=False)
class RowBatch:
    """Columns for `AddStream.add`; exactly one of the times and the level is set."""

    ledger_id: NDArray[np.uint64]
    entry_id: NDArray[np.uint64]
    deliver_at_ms: NDArray[np.uint64] | None
    delay_ms: NDArray[np.uint64] | None
    key_hash: NDArray[np.uint32] | None
    delay_level: int | None = None
    written: Written = Written()

    def __len__(self) -> int:
        return len(self.entry_id)

    def take(self, kept: NDArray[np.int64]) -> RowBatch:
        """Return some rows of a file, by index."""
        return RowBatch(
            self.ledger_id[kept],
            self.entry_id[kept],
            None if self.deliver_at_ms is None else self.deliver_at_ms[kept],
            None,
            None if self.key_hash is None else self.key_hash[kept],
            written=dataclasses.replace(
                self.written, lines=None if self.written.lines is None else self.written.lines[kept]
            ),
        )

    def no_times(self) -> dict[int, int]:
        """Return the numbers that are no times (`times.fault_of`), by row."""
        if self.deliver_at_ms is None:
            return {}
        # `fault_of` by column
        wrong = np.flatnonzero((self.deliver_at_ms != 0) & (self.deliver_at_ms < times.MS_MIN))
        return dict(zip(wrong.tolist(), self.deliver_at_ms[wrong].tolist(), strict=True))

    def check_times(self) -> None:
        """Raise click.UsageError, which names the line, if a number of the file is no time."""
        for row, at_ms in self.no_times().items():
            place = self.written.place(row, "deliver_at_ms")
            raise click.UsageError(f"{place} is {at_ms}, which {times.fault_of(at_ms)}")


class Duration(click.ParamType[int]):
    """A duration in milliseconds, written as `500ms`, `5s`, `1.5h` or `1h30m`."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            self.fail(f"{text!r} is not a duration; write for example 500ms, 5s, 2m, 1h30m or 7d", param, ctx)
        # Floats would lose digits of large numbers.
        duration_ms = round(sum(fractions.Fraction(number) * _UNIT_MS[unit] for number, unit in parts))
        if duration_ms > U64_MAX:
            self.fail(f"{text!r} is too long: {U64_MAX} ms at most", param, ctx)
        return duration_ms


class Moment(click.ParamType[int]):
    """A Unix time (ms), written as `now`, `+1h30m`, ISO 8601 (local without an offset) or Unix time in ms."""

    name = "time"

    def __init__(self, *, past: bool = False, any_number: bool = False) -> None:
        """Accept times such as `-1h`, that long ago, if `past` is True, and any number if `any_number` is True."""
        self._past = past
        self._any_number = any_number

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if self._any_number and re.fullmatch("[0-9]{1,20}", text) and int(text) <= U64_MAX:
            return int(text)
        if text == "now":
            return _now_ms()
        if text.startswith("+"):
            return _now_ms() + Duration().convert(text[1:], param, ctx)
        if self._past and text.startswith("-"):
            return max(0, _now_ms() - Duration().convert(text[1:], param, ctx))
        try:
            moment_ms = times.parse(text, local=True)
        except times.NoTime as error:
            self.fail(f"{text!r} {error}", param, ctx)
        except ValueError:
            self.fail(
                f"{text!r} is not a time; write for example now, +1h30m, 2030-01-31T12:00:00Z or 1896091200000",
                param,
                ctx,
            )
        if moment_ms < 0:
            self.fail(f"{text!r} is before 1970", param, ctx)
        return moment_ms


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class EntryRange(click.ParamType[range]):
    """A range such as `7` or `0-999`, both ends included, of entries or of what `name` says."""

    def __init__(self, name: str = "entries") -> None:
        self.name = name

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> range:
        if isinstance(value, range):
            return value
        text = str(value)
        matched = re.fullmatch(r"(\d+)(?:-(\d+))?", text, flags=re.ASCII)
        if matched is None:
            self.fail(f"{text!r} is not a range of {self.name}; write for example 7 or 0-999", param, ctx)
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if first > last or last > U64_MAX:
            self.fail(f"{text!r} must go from lower to higher {self.name}, {U64_MAX} at most", param, ctx)
        return range(first, last + 1)


class ConsumerName(click.ParamType[key_shared.Consumer]):
    """A consumer such as `gate-1`, or with its slots `gate-1=0-16383,49152-65535`. A name may contain a =."""

    name = "consumer"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> key_shared.Consumer:
        if isinstance(value, key_shared.Consumer):
            return value
        matched = _NAME_WITH_SLOTS.fullmatch(str(value))
        if matched is None:
            return key_shared.Consumer(str(value))
        slots = [EntryRange("slots").convert(text, param, ctx) for text in matched[2].split(",")]
        return key_shared.Consumer(
            matched[1], hash_ranges=tuple(policies.HashRange(each.start, each.stop - 1) for each in slots)
        )


def from_options(
    ledger: int,
    entries: range,
    *,
    deliver_at_ms: int | None,
    delay_ms: int | None,
    key: str | None,
    batch_rows: int,
    delay_level: int | None = None,
) -> Iterator[RowBatch]:
    """Yield consecutive entries of one ledger, all with one time or level and one key."""
    for first in range(entries.start, entries.stop, batch_rows):
        last = min(first + batch_rows, entries.stop) - 1
        yield RowBatch(
            ledger_id=np.array([ledger], dtype=np.uint64),
            # `arange(first, last + 1)` would fail at an end of 2^64.
            entry_id=np.arange(last - first + 1, dtype=np.uint64) + np.uint64(first),
            deliver_at_ms=None if deliver_at_ms is None else np.array([deliver_at_ms], dtype=np.uint64),
            delay_ms=None if delay_ms is None else np.array([delay_ms], dtype=np.uint64),
            key_hash=None if key is None else hashing.key_hash(key),
            delay_level=delay_level,
        )


def from_csv(lines: Iterable[str], *, name: str, batch_rows: int, timed: bool = True) -> Iterator[RowBatch]:
    """Yield the rows of a CSV file with a header: ledger, entry, deliver_at_ms and optionally key (empty for none).

    Without `timed`, deliver_at_ms is optional too. Raises click.UsageError, which names the line.
    """
    reader = csv.reader(lines)
    header = [column.strip() for column in next(reader, [])]
    where = {column: header.index(column) for column in _COLUMNS if column in header}
    required = _COLUMNS[:3] if timed else _COLUMNS[:2]
    unknown = [column for column in header if column not in _COLUMNS]
    lacking = [column for column in required if column not in where]
    if lacking or unknown:
        wrong = f"lacks {', '.join(lacking)}" if lacking else f"has the unknown column {unknown[0]!r}"
        optional = _COLUMNS[len(required) :]
        expected = ",".join(required) + "".join(f"[,{column}]" for column in optional)
        raise click.UsageError(f"{name}: the first line {wrong}; it must be {expected}")
    numbered = [column for column in _COLUMNS[:3] if column in where]
    numbers: list[list[int]] = [[] for _ in numbered]
    keys: list[str | None] = []
    places: list[int] = []
    for row in reader:
        if not row:
            continue
        for column, target in zip(numbered, numbers, strict=True):
            target.append(_number(row, where[column], column, f"{name}, line {reader.line_num}"))
        if "key" in where:
            keys.append((row[where["key"]] if where["key"] < len(row) else "") or None)
        places.append(reader.line_num)
        if len(numbers[0]) == batch_rows:
            yield _batch(numbers, keys, places, name)
            numbers, keys, places = [[] for _ in numbered], [], []
    if numbers[0]:
        yield _batch(numbers, keys, places, name)


def from_file(lines: Iterable[str], *, name: str, batch_rows: int) -> Iterator[RowBatch]:
    """Read positions, with times and keys if the file has them; an empty file has none.

    Reads JSON lines as `tarry scheduled --json` prints them, or CSV as `from_csv` reads it. Raises click.UsageError,
    which names the line.
    """
    remaining = iter(lines)
    first = next(remaining, None)
    if first is None:
        return iter(())
    whole = itertools.chain([first], remaining)
    if first.lstrip().startswith("{"):
        return _from_json(whole, name=name, batch_rows=batch_rows)
    return from_csv(whole, name=name, batch_rows=batch_rows, timed=False)


def _from_json(lines: Iterable[str], *, name: str, batch_rows: int) -> Iterator[RowBatch]:
    fields = ("ledger_id", "entry_id", "deliver_at_ms", "key_hash")
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    while several := list(itertools.islice(numbered, batch_rows)):
        positions = [_position(line, f"{name}, line {number}", fields, optional=fields[2:]) for number, line in several]
        ledger_id, entry_id, deliver_at_ms, key_hash = zip(*positions, strict=True)
        if None in deliver_at_ms and any(at_ms is not None for at_ms in deliver_at_ms):
            number, _ = several[deliver_at_ms.index(None)]
            raise click.UsageError(f"{name}, line {number}: deliver_at_ms is missing, and other lines have it")
        if any(each is not None and each >= 2**32 for each in key_hash):
            raise click.UsageError(f"{name}: a key_hash is above {2**32 - 1}")
        hashes = np.array([each or 0 for each in key_hash], dtype=np.uint32)
        yield RowBatch(
            np.array(ledger_id, dtype=np.uint64),
            np.array(entry_id, dtype=np.uint64),
            None if None in deliver_at_ms else np.array(deliver_at_ms, dtype=np.uint64),
            None,
            hashes if hashes.any() else None,
            written=Written(_BESIDE_FILE, name, np.array([number for number, _ in several], dtype=np.int64)),
        )


def _number(row: list[str], index: int, column: str, place: str) -> int:
    text = row[index].strip() if index < len(row) else ""
    if text.isascii() and text.isdigit() and int(text) <= U64_MAX:
        return int(text)
    raise click.UsageError(f"{place}: {column} is {text!r}; it must be an integer from 0 to {U64_MAX}")


def _batch(numbers: list[list[int]], keys: list[str | None], places: list[int], name: str) -> RowBatch:
    ledger_id, entry_id, *at_ms = (np.array(column, dtype=np.uint64) for column in numbers)
    key_hash = hashing.key_hash(keys) if any(key is not None for key in keys) else None
    written = Written(_BESIDE_FILE, name, np.array(places, dtype=np.int64))
    return RowBatch(ledger_id, entry_id, at_ms[0] if at_ms else None, None, key_hash, written=written)


T = TypeVar("T")


def readable(batches: Iterator[T]) -> Iterator[T]:
    """Pass on the batches of a file; raises click.UsageError for what cannot be read as text."""
    try:
        yield from batches
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the file is not UTF-8: {error}") from error
    except csv.Error as error:
        raise click.UsageError(f"the file is not CSV: {error}") from error


def lines_of(source: IO[str], *, header: bool) -> int | None:
    """Return the lines of a regular file, without its header, or None if only reading it could tell."""
    try:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            return None
    except OSError:
        return None
    with open(source.fileno(), "rb", closefd=False) as raw:
        lines = sum(block.count(b"\n") for block in iter(lambda: raw.read(1 << 20), b""))
        raw.seek(0)
    return max(0, lines - header)


def positions_from_options(
    ledger: int,
    entries: range,
    deliver_at_ms: int,
    *,
    batch_index: int | None,
    redelivery_count: int | None,
    batch_rows: int,
) -> Iterator[tuple[columns.Positions, Written]]:
    """Yield consecutive entries of one ledger delivered with one time; with a batch index, one message of each."""
    for batch in from_options(
        ledger, entries, deliver_at_ms=deliver_at_ms, delay_ms=None, key=None, batch_rows=batch_rows
    ):
        positions = columns.positions(ledger, batch.entry_id, deliver_at_ms, batch_index, redelivery_count)
        yield positions, Written({**_WITHOUT_FILE, **_DELAY})


def positions_from_json(
    lines: Iterable[str], *, name: str, batch_rows: int, timed: bool = True
) -> Iterator[tuple[columns.Positions, Written]]:
    """Yield positions from JSON lines with ledger_id, entry_id and deliver_at_ms.

    batch_index and redelivery_count are optional, other names are ignored. If one position of a request has no count,
    any delivery is meant for all of them. Without `timed`, deliver_at_ms is optional too, and then 0. Raises
    click.UsageError, which names the line.
    """
    optional = ("batch_index", "redelivery_count", *(() if timed else ("deliver_at_ms",)))
    positions: list[list[int | None]] = []
    places: list[int] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            place = f"{name}, line {number}"
            places.append(number)
            positions.append(_position(line, place, _POSITION_FIELDS, optional=optional))
            for field, value, most in zip(("batch_index", "redelivery_count"), positions[-1][3:], _MOST, strict=True):
                if (value or 0) > most:
                    raise click.UsageError(f"{place}: {field} is {value}; it is at most {most}")
        if len(positions) == batch_rows:
            yield (
                _position_columns(positions),
                Written({**_BESIDE_FILE, **_DELAY}, name, np.array(places, dtype=np.int64)),
            )
            positions, places = [], []
    if positions:
        yield _position_columns(positions), Written({**_BESIDE_FILE, **_DELAY}, name, np.array(places, dtype=np.int64))


def _position(line: str, place: str, fields: Sequence[str], *, optional: Sequence[str] = ()) -> list[int | None]:
    """Return the fields of an object in order, with None for an optional one that is absent or null."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{place}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise click.UsageError(f"{place}: not an object such as `tarry get --json` prints")
    position: list[int | None] = []
    for field in fields:
        value = values.get(field)
        absent = value is None and field in optional
        if not absent and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= U64_MAX):
            raise click.UsageError(f"{place}: {field} is {value!r}; it must be an integer from 0 to {U64_MAX}")
        position.append(value)
    return position


def _position_columns(positions: list[list[int | None]]) -> columns.Positions:
    ledger_id, entry_id, deliver_at_ms, batch_index, counts = zip(*positions, strict=True)
    whole = columns.NO_BATCH_INDEX
    return columns.positions(
        np.array(ledger_id, np.uint64),
        np.array(entry_id, np.uint64),
        np.array([each or 0 for each in deliver_at_ms], np.uint64),
        None
        if all(each is None for each in batch_index)
        else np.array([whole if each is None else each for each in batch_index], np.uint32),
        None if any(each is None for each in counts) else np.array(counts, np.uint32),
    )


def names_and_values(texts: Iterable[str], *, option: str) -> dict[str, str]:
    """Parse each `name=value`. Raises click.UsageError, also if a name is given twice."""
    named: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.UsageError(f"{option} {text}: write NAME=VALUE")
        if name in named:
            raise click.UsageError(f"{option} {text}: {name} is given twice")
        named[name] = value
    return named
