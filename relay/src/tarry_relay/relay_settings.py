"""Reads the TOML file of a relay: the settings, their defaults and limits.

An error names the line, the field, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import re
import socket
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

import tarry
import tarry.aio
from tarry import credentials
from tarry_relay import toml_lines

Name = Annotated[str, Meta(min_length=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400 * 365)]
OnBad = Literal["dead_letter", "now", "stop"]
Kind = Literal["kafka", "nats", "redis"]
DELAY_FORM = "a whole number with ms, s, m, h, d, such as 10s"
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DELAY = re.compile(r"(\d{1,15})(ms|s|m|h|d)", re.ASCII)
# The place of a bad value in msgspec's errors, and what it expected there
_PLACE = re.compile(r" - at (`key` in )?`\$\.?(.*)`$")
_EXPECTED = re.compile(r"Expected `([a-z |]+)`(.*?)(?:, got `.*)?")
_TYPES = {
    "array": "an array",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "a table",
    "str": "a text",
}


class SettingsError(Exception):
    """A file that cannot be used. The message begins with the field, and gives the reason."""


class Tls(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS with the daemon, as `tarry.Tls`: PEM files, which are read again when they change."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None


class Daemon(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The address of Tarry, and the credentials shown to it."""

    address: Name = tarry.DEFAULT_TARGET
    timeout_s: Seconds = 30.0
    tls: Tls | None = None
    token_file: str | None = None
    """File of the token, read again when it changes"""


class Relay(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The identity of this relay, and its limits."""

    topic: Name
    """The Tarry topic; its name continues with `@` and the generation of the source"""
    subscription: Name = "relay"
    id: Name = msgspec.field(default_factory=socket.gethostname)
    """Must differ between relays that read one source"""
    listen: str | None = "127.0.0.1:7463"
    """Address of metrics and health"""
    drain_s: Seconds = 30.0
    """Time at the end to wait for what is in flight"""
    permits: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    """Messages that may be delivered and not acknowledged, besides parked ones"""
    parked_max: Annotated[int, Meta(ge=0, le=10_000_000)] = 100_000
    """Due messages for targets that take nothing now of which only the names are kept, so that others proceed"""
    missing_target_s: Seconds = 3_600.0
    """Time that messages wait for a target of a pattern that the broker does not have; then each is a dead letter"""
    memory_bytes: Annotated[int, Meta(ge=2**20)] = 256 * 2**20
    """Approximate memory of messages: half at most for those read that wait for Tarry or their target, half for due
    ones that were fetched. A larger one is taken alone.
    """
    read_ahead: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    """Messages that may be read and not committed"""
    rows: Annotated[int, Meta(ge=1, le=10_000)] = 500
    """Messages that go to the broker, or to Tarry, at once"""
    linger_ms: Annotated[int, Meta(ge=0, le=60_000)] = 5
    """Time that the first due message waits for more"""

    def topic_of(self, generation: str) -> str:
        """Return the Tarry topic of a source of this generation."""
        return f"{self.topic}@{generation}"


class Headers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The names of the headers that a producer sets."""

    deliver_at: Name = "deliver-at"
    """Unix time in ms, or RFC 3339 with a zone"""
    delay: Name = "delay"
    """From the moment at which the broker took the message: a whole number with ms, s, m, h or d"""
    level: Name = "delay-level"
    """A level of `source.levels`, from 1"""
    target: Name = "target"
    cancel_of: Name = "cancel-of"
    """The message is not delivered: it cancels the one at this position, as the broker's answer to its producer names
    it.
    """
    reschedule_of: Name = "reschedule-of"
    """The message gives that one its own time."""
    correlation: Name = "correlation-id"
    """For a cancel or a reschedule: returned with the result"""


class Source(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log whose messages are delayed."""

    name: Name
    """A stream, or a topic of Kafka"""
    headers: Headers = Headers()
    levels: Annotated[str, Meta(min_length=1)] = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    """Delays, level 1 first"""
    delay_max: str | None = None
    """Longest delay of a message from when it was sent; None for as long as Tarry takes"""
    target: str | None = None
    """Target of messages that name none"""
    on_bad: OnBad = "dead_letter"
    """The treatment of a message whose time, level or target cannot be used: published to `dead_letters` with the
    reason; passed on at once, if its target can be used; or the relay stops.
    """
    dead_letters: str = ""
    """A target; it need not be in `targets`."""
    results: str = ""
    """A target, which need not be in `targets`, that gets the result of each cancel and reschedule; empty for none"""
    await_commit_s: Seconds = 120.0
    """Time that a cancel or reschedule waits until the message that it names is committed, by any relay that has read
    it
    """
    retention: Literal["warn", "dead_letter"] = "warn"
    """The treatment of waiting messages that the log has dropped: it is reported, and each is a dead letter of Tarry
    when it is due; or they are dead letters at once.
    """
    retention_every_s: Seconds = 60.0
    accept: tuple[Literal["size", "subject", "compaction", "rollup", "ttl", "eviction", "age"], ...] = ()
    """Findings that are only warnings here although a payload can be dropped before its delivery"""


class Retry(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log to which consumers publish the `tarry-delivery-id` of messages that they failed to process.

    The delays and the count go to a subscription that the relay creates; an existing one keeps its policy.
    """

    name: Name
    delays_ms: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)] = (1_000, 10_000, 60_000, 600_000)
    """After the first failure, the second, and so on; then the last one"""
    count_max: Annotated[int, Meta(ge=1)] | None = 16
    """Failures after which it is a dead letter of Tarry; None for never"""


class Target(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The targets to which messages may go: exactly one of `name` and `pattern`."""

    name: str | None = None
    pattern: str | None = None
    """A regular expression that matches the whole name"""
    rate_limit: Annotated[float, Meta(gt=0)] | None = None
    """Messages a second, for each target separately; None for as fast as it takes them"""

    def allows(self, target: str) -> bool:
        """Return whether this setting allows a target."""
        return target == self.name or (self.pattern is not None and re.fullmatch(self.pattern, target) is not None)


class _Server(Struct, tag_field="kind", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The connection settings of every broker."""

    user: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    timeout_s: Seconds = 5.0


class Nats(_Server, tag="nats", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """NATS with JetStream; source and retry are streams, targets are subjects."""

    url: Name = "nats://127.0.0.1:4222"
    credentials_file: str | None = None
    in_flight: Annotated[int, Meta(ge=1, le=10_000)] = 256
    """Unanswered requests"""
    ack_wait_s: Seconds = 60.0
    """Time after which an uncommitted message is read again, by any relay"""


class Redis(_Server, tag="redis", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Redis Streams, of one server; source, retry and targets are streams."""

    url: Name = "redis://127.0.0.1:6379"
    """Also rediss:// and unix://"""
    once_s: Annotated[int, Meta(ge=1, le=86_400 * 30)] = 3_600
    """Time that a target remembers its messages"""
    claim_s: Seconds = 60.0
    """Time after which a message that another relay has read and not committed is read here"""


class Kafka(_Server, tag="kafka", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Kafka; source, retry and targets are topics."""

    url: Name = "127.0.0.1:9092"
    """Host and port of a broker, or of several, separated by commas"""
    tls: bool = False
    """With the CAs of this machine; not needed with `ca_file` or `cert_file`"""
    sasl: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    """Mechanism for `user`, if there is one"""
    transactional: bool = False
    """Messages published together appear together, or not at all, to consumers that read committed messages."""
    session_s: Annotated[float, Meta(ge=0.1, le=3_600)] = 10.0
    """Time after which others read the partitions of a silent relay"""
    confirm_s: Annotated[float, Meta(ge=1, le=3_600)] = 30.0
    """Longest confirmation of a message. Within it, a message is published exactly once, whatever brokers do."""
    kept_bytes: Annotated[int, Meta(ge=0)] = 64 * 2**20
    """Memory for messages that were read and may be due soon, which are not fetched"""
    properties: dict[Name, str | int | float | bool] = {}
    """Further settings of Kafka's client, by the names of librdkafka"""


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    relay: Relay
    source: Source
    broker: Kafka | Nats | Redis
    daemon: Daemon = Daemon()
    retry: Retry | None = None
    targets: tuple[Target, ...] = ()

    @property
    def read_names(self) -> tuple[str, ...]:
        """The logs that the relay itself reads: the source, and the retry log if there is one."""
        return (self.source.name,) if self.retry is None else (self.source.name, self.retry.name)

    def targets_by_field(self) -> dict[str, str]:
        """Return the targets that the file names, by the field that names them."""
        named: dict[str, str | None] = {f"targets[{n}].name": target.name for n, target in enumerate(self.targets)}
        for field in ("target", "dead_letters", "results"):
            named[f"source.{field}"] = getattr(self.source, field)
        return {field: name for field, name in named.items() if name}

    def named_targets(self) -> list[str]:
        """Return the targets that the file names, each once."""
        return list(dict.fromkeys(self.targets_by_field().values()))


def load(path: Path) -> Settings:
    """Read the file. Raises SettingsError, which names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except (UnicodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error
    try:
        return _settings(document)
    except SettingsError as error:
        raise SettingsError(f"{path}{_line(text, str(error))}: {error}") from error


def delay_ms(text: str) -> int | None:
    """Return a delay (ms), or None if the text is none."""
    found = _DELAY.fullmatch(text)
    return None if found is None else int(found[1]) * _UNITS_MS[found[2]]


def delay_text(ms: int) -> str:
    """Return a delay as it is written, in the largest unit that fits."""
    name, unit_ms = [(name, unit_ms) for name, unit_ms in _UNITS_MS.items() if ms % unit_ms == 0][-1]
    return f"{ms // unit_ms}{name}"


def delay_max_ms(source: Source) -> int | None:
    """Return the longest delay that the file allows (ms), or None if it names none. Raises SettingsError."""
    if source.delay_max is None:
        return None
    most_ms = delay_ms(source.delay_max)
    if most_ms is None:
        raise SettingsError(f"source.delay_max is {source.delay_max!r}, which is no delay: {DELAY_FORM}")
    return most_ms


def levels_ms(source: Source) -> list[int]:
    """Return the delays of the levels (ms), level 1 first. Raises SettingsError."""
    levels = []
    most_ms = delay_max_ms(source)
    for text in source.levels.split():
        if (delay := delay_ms(text)) is None:
            raise SettingsError(f"source.levels has {text!r}, which is no delay: {DELAY_FORM}")
        if most_ms is not None and delay > most_ms:
            raise SettingsError(
                f"source.levels has {text!r}, which is longer than source.delay_max allows, {source.delay_max!r}: name "
                "the levels that are used"
            )
        levels.append(delay)
    return levels


def client_of(daemon: Daemon) -> tarry.aio.Client:
    """Return a client of the daemon. Raises SettingsError if a file cannot be read, or it or the address is invalid."""
    try:
        addresses = credentials.addresses_of(daemon.address, name="daemon.address")
    except tarry.InvalidArgument as error:
        raise SettingsError(error.message) from error
    try:
        tls = None if daemon.tls is None else tarry.Tls(**msgspec.structs.asdict(daemon.tls))
        return tarry.aio.Client(addresses, timeout_s=daemon.timeout_s, tls=tls, token_file=daemon.token_file)
    except tarry.InvalidArgument as error:
        raise SettingsError(f"daemon: {error.message}") from error


def secret(field: str, path: str | None) -> str | None:
    """Return the text of a password's file, without surrounding white space. Raises SettingsError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"{field} is {path!r}: {error}") from error


def without_credentials(url: str) -> str:
    """Return a broker's URL for messages, without what precedes the host, which may be a password."""
    return re.sub(r"^(\w+://)?.*@", r"\1", url)


def _settings(document: dict[str, Any]) -> Settings:
    """Convert the contents of the file. Raises SettingsError."""
    declared = dict(_declared(document, [Settings]))
    try:
        settings = msgspec.convert(document, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(_in_words(str(error), document, declared)) from error
    _check(settings)
    return settings


def _declared(value: Any, kinds: Sequence[type[Struct]], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field of the file with its type. Raises SettingsError for a key that none of these kinds has."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _declared(item, kinds, f"{where}[{index}]")
    if not isinstance(value, dict) or not kinds:
        return
    kinds = [each for each in kinds if each.__struct_config__.tag in (None, value.get("kind"))] or kinds
    known = {field.name: field.type for each in kinds for field in msgspec.structs.fields(each)}
    whose = ""
    if issubclass(kinds[0], _Server):
        known["kind"] = Kind
        whose = f" of {value['kind']}" if len(kinds) == 1 else ""
    for key, inner in value.items():
        field = f"{where}.{key}" if where else key
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {field.removesuffix(key)}{nearest[0]}?" if nearest else f"it must be {_one_of(known)}"
            raise SettingsError(f"{field} is not a setting{whose}; {hint}")
        yield field, known[key]
        yield from _declared(inner, _structs(known[key]), field)


def _structs(declared: Any) -> list[type[Struct]]:
    """Return the kinds of table that a setting of this type may be or have."""
    if isinstance(declared, type) and issubclass(declared, Struct):
        return [declared]
    return [struct for inner in typing.get_args(declared) for struct in _structs(inner)]


def _check(settings: Settings) -> None:
    """Check what no single field shows. Raises SettingsError."""
    source = settings.source
    if source.on_bad != "stop" and not source.dead_letters:
        raise SettingsError(
            f"source.dead_letters is not set, and source.on_bad is {source.on_bad!r}: name the target of dead letters, "
            "or let the relay stop with on_bad = 'stop'"
        )
    levels_ms(source)
    if not settings.targets:
        raise SettingsError("targets is empty: name at least one target, or a pattern")
    for index, target in enumerate(settings.targets):
        if (target.name is None) == (target.pattern is None):
            raise SettingsError(f"targets[{index}] must have exactly one of name and pattern")
        try:
            re.compile(target.pattern or "")
        except re.error as error:
            raise SettingsError(f"targets[{index}].pattern is {target.pattern!r}: {error}") from error
    if settings.retry is not None and settings.retry.name == source.name:
        raise SettingsError(f"retry.name is {source.name!r}, which is the source: take another stream")
    for field, name in settings.targets_by_field().items():
        if name in settings.read_names:
            raise SettingsError(f"{field} is {name!r}, which the relay reads itself: what it publishes would circulate")
    if source.target is not None and not any(each.allows(source.target) for each in settings.targets):
        raise SettingsError(
            f"source.target is {source.target!r}, which none of targets allows: if it is not misspelt, add [[targets]] "
            f"with name = {source.target!r}"
        )


def _in_words(message: str, document: dict[str, Any], declared: Mapping[str, Any]) -> str:
    """Rewrite a message of msgspec as the field, its value and what it must be."""
    place = _PLACE.search(message)
    where, what = ("", message) if place is None else (place[2], message[: place.start()])
    missing = re.fullmatch("Object missing required field `(.*)`", what)
    if missing is not None:
        return f"{where}.{missing[1]} is not set; it is required".removeprefix(".")
    expected = _EXPECTED.fullmatch(what)
    value: Any = document
    for key in _keys(where):
        value = value[key]
    if typing.get_origin(declared.get(where)) is Literal:
        must = _one_of(typing.get_args(declared[where]))
    elif expected is None or place is None or place[1] or where.endswith("[...]"):
        return f"{where}: {what}"
    elif expected[1].startswith("array") and isinstance(value, dict):
        must = f"an array of tables: [[{where}]]"
    else:
        names = expected[1].removesuffix(" | null").split(" | ")
        must = _one_of([_TYPES.get(each, each) for each in names]) + expected[2]
    shown = "a table" if isinstance(value, dict) else "an array" if isinstance(value, list) and value else repr(value)
    return f"{where} is {shown}; it must be {must}"


def _one_of(words: Iterable[str]) -> str:
    """Return the words as a choice: a, b or c."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _keys(field: str) -> list[str | int]:
    """Return the keys and indexes that lead to a field."""
    return [int(index) if index else key for key, index in re.findall(r"([\w-]+)|\[(\d+)\]", field)]


def _line(text: str, message: str) -> str:
    """Return the line of the field with which a message begins, or else of its table; empty if neither exists."""
    keys = _keys(message.split(maxsplit=1)[0])
    for length in range(len(keys), 0, -1):
        line = toml_lines.line_of(text, keys[:length])
        if line is not None:
            return f", line {line}"
    return ""
