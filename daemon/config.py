"""How the daemon is configured: one TOML file, then `TARRY_SECTION__KEY` environment variables, then
`--set section.key=value`; the later wins.

Owns: reading them, strictly: an unknown key, a value out of its range or settings that contradict each other are an
error that names the setting.
Does not own: the settings (`daemon.settings`) and what they do.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from daemon import errors
from daemon.core import delay_levels
from daemon.settings import (
    S3,
    Bucket,
    Collection,
    Daemon,
    Deletion,
    DeletionObjectStore,
    DeletionOwner,
    Delivery,
    Grpc,
    Journal,
    Limits,
    Log,
    Metrics,
    Ownership,
    Redelivery,
    Store,
)

ENVIRONMENT_PREFIX = "TARRY_"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings."""

    daemon: Daemon = Daemon()
    store: Store = Store()
    grpc: Grpc = Grpc()
    metrics: Metrics = Metrics()
    log: Log = Log()
    journal: Journal = Journal()
    bucket: Bucket = Bucket()
    delivery: Delivery = Delivery()
    redelivery: Redelivery = Redelivery()
    limits: Limits = Limits()
    ownership: Ownership = Ownership()
    collection: Collection = Collection()
    deletion: Deletion = Deletion()

    @property
    def daemon_id(self) -> str:
        """`daemon.id`, or host name and port: the same after a restart on this machine."""
        if self.daemon.id is not None:
            return self.daemon.id
        return f"{socket.gethostname()}-{split_address(self.grpc.listen)[1]}"

    def read_delay_levels(self) -> delay_levels.DelayLevels:
        """`redelivery.delay_levels`. Raises `InvalidArgument`.

        The default table may go beyond a limit on delays that was set: rows of such a level are refused by themselves.
        """
        table = self.redelivery.delay_levels
        limit_ms = self.limits.delay_max_ms
        if table == delay_levels.DEFAULT_TABLE:
            limit_ms = max(limit_ms, delay_levels.DEFAULT_MAX_MS)
        return delay_levels.parse(table, clamp=self.redelivery.clamp_delay_level, delay_max_ms=limit_ms)


def load(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """Reads the file (None: defaults), the environment (None: the process's) and `section.key=value` overrides.

    Raises `InvalidArgument`: what is wrong, by the setting's path and where it was set.
    """
    data: dict[str, Any] = {} if path is None else _read(path)
    _refuse_unknown_keys(data, Config, path=())
    for source, keys, text in _overrides(os.environ if environment is None else environment, overrides):
        _set(data, source, keys, text)
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise errors.InvalidArgument(f"configuration: {_explain(error, data)}") from error
    _check(config)
    return config


def split_address(address: str) -> tuple[str, int]:
    """`host:port` as host (without brackets) and port. Raises `InvalidArgument`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise errors.InvalidArgument(f"address: {address!r} is not host:port with a port from 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address. A name other than `localhost` counts as reachable from outside."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.InvalidArgument(f"configuration: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise errors.InvalidArgument(f"configuration: {path} is not TOML: {error}") from error


def _fields(section: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(section)}


def _is_section(declared: Any) -> bool:
    return isinstance(declared, type) and issubclass(declared, msgspec.Struct)


def table_of(declared: Any) -> type[msgspec.Struct] | None:
    """The section of which the setting is an array; None where it is something else."""
    if typing.get_origin(declared) is not tuple:
        return None
    item = typing.get_args(declared)[0]
    return item if _is_section(item) else None


def _unknown(keys: Iterable[str], known: Iterable[str], source: str = "") -> errors.InvalidArgument:
    *parents, name = keys
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {'.'.join([*parents, nearest[0]])}?" if nearest else ""
    return errors.InvalidArgument(f"configuration: {'.'.join(keys)}{source} is not a setting{hint}")


def _refuse_unknown_keys(data: Mapping[str, Any], section: type[msgspec.Struct], path: tuple[str, ...]) -> None:
    fields = _fields(section)
    for name, value in data.items():
        if name not in fields:
            raise _unknown((*path, name), fields)
        if _is_section(fields[name]):
            if not isinstance(value, dict):
                raise errors.InvalidArgument(f"configuration: {'.'.join((*path, name))} is a section, not a setting")
            _refuse_unknown_keys(value, fields[name], (*path, name))
        table = table_of(fields[name])
        if table is not None:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                where = ".".join((*path, name))
                raise errors.InvalidArgument(f"configuration: {where} is an array of tables: [[{where}]]")
            for index, item in enumerate(value):
                _refuse_unknown_keys(item, table, (*path, f"{name}[{index}]"))


def _overrides(environment: Mapping[str, str], overrides: Sequence[str]) -> Iterable[tuple[str, tuple[str, ...], str]]:
    """Source (for messages), path and text of each override, in the order in which they count."""
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            yield f" (from {name})", tuple(keys), environment[name]
    for override in overrides:
        left, equals, text = override.partition("=")
        if not equals or not left.strip():
            raise errors.InvalidArgument(f"configuration: --set {override} is not section.key=value")
        yield f" (from --set {override})", tuple(left.strip().split(".")), text


def _set(data: dict[str, Any], source: str, keys: tuple[str, ...], text: str) -> None:
    """Puts one override into `data`, as the type that the setting has."""
    section: type[msgspec.Struct] = Config
    for depth, name in enumerate(keys):
        fields = _fields(section)
        if name not in fields:
            raise _unknown(keys[: depth + 1], fields, source)
        if table_of(fields[name]) is not None:
            raise errors.InvalidArgument(
                f"configuration: {'.'.join(keys[: depth + 1])}{source} is an array of tables, which only the file sets"
            )
        last = depth == len(keys) - 1
        if _is_section(fields[name]) == last:
            kind = "a section, not a setting" if last else "a setting, not a section"
            raise errors.InvalidArgument(f"configuration: {'.'.join(keys[: depth + 1])}{source} is {kind}")
        if last:
            try:
                data[name] = msgspec.convert(text, fields[name], strict=False)
            except msgspec.ValidationError as error:
                raise errors.InvalidArgument(f"configuration: {'.'.join(keys)}{source} is {text!r}: {error}") from error
        else:
            data = data.setdefault(name, {})
            section = fields[name]


def _explain(error: msgspec.ValidationError, data: dict[str, Any]) -> str:
    """msgspec says `Expected ... - at `$.journal.slot_bytes_max``; names the setting first, with its value."""
    what, _, where = str(error).partition(" - at `$.")
    value: Any = data
    for key, index in re.findall(r"([^.\[\]`]+)|\[(\d+)\]", where):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and index:
            value = value[int(index)]
    return f"{where.rstrip('`')} is {value!r}: {what}"


def _check(config: Config) -> None:
    """What no single setting shows."""
    for name, listen in (("grpc.listen", config.grpc.listen), ("metrics.listen", config.metrics.listen)):
        if not is_loopback(listen) and not config.daemon.insecure:
            raise errors.InvalidArgument(
                f"configuration: {name} is {listen!r}, which is not a loopback address. This version has neither "
                "TLS nor tokens, so that whoever reaches the port could use it: listen on 127.0.0.1, or set "
                "daemon.insecure = true where the network itself keeps strangers out"
            )
    if config.store.kind == "s3" and not config.store.s3.bucket:
        raise errors.InvalidArgument("configuration: store.s3.bucket is not set, and store.kind is 's3'")
    _check_deletion(config)
    try:
        config.read_delay_levels()
    except errors.InvalidArgument as error:
        raise errors.InvalidArgument(f"configuration: redelivery.delay_levels: {error}") from error
    bucket = config.bucket
    _refuse_above(
        "bucket.min_index_count_per_bucket", bucket.min_index_count_per_bucket, "bucket.rows_max", bucket.rows_max
    )
    if bucket.max_indexes_per_bucket_snapshot_segment == 0:
        raise errors.InvalidArgument(
            "configuration: bucket.max_indexes_per_bucket_snapshot_segment is 0: "
            "a segment has at least one row; -1 is no limit"
        )
    if bucket.max_num_buckets == 0:
        raise errors.InvalidArgument("configuration: bucket.max_num_buckets is 0: it is at least 1; -1 is never")
    if bucket.max_indexes_per_bucket_snapshot_segment > 0:
        _refuse_above(
            "bucket.min_indexes_per_bucket_snapshot_segment",
            bucket.min_indexes_per_bucket_snapshot_segment,
            "bucket.max_indexes_per_bucket_snapshot_segment",
            bucket.max_indexes_per_bucket_snapshot_segment,
        )


def _refuse_above(name: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise errors.InvalidArgument(f"configuration: {name} is {value}, above {limit_name}, which is {limit}")


def _check_deletion(config: Config) -> None:
    """What the object stores and owners of deletions must be for a record to have one place at most."""
    stores, owners = config.deletion.object_stores, config.deletion.owners
    for index, store in enumerate(stores):
        _check_object_store(f"deletion.object_stores[{index}]", store)
    for index, owner in enumerate(owners):
        _check_owner(f"deletion.owners[{index}]", owner)
    _refuse_twice("deletion.object_stores", "name", [(store.name,) for store in stores])
    _refuse_twice("deletion.owners", "name", [(owner.name,) for owner in owners])
    _refuse_twice("deletion.owners", "topic prefix", [owner.topic_prefixes for owner in owners])
    _refuse_twice("deletion.owners", "driver", [owner.drivers for owner in owners])
    places = [
        [f"{driver}, {f'bucket {store.s3.bucket}' if store.kind == 's3' else 'local'}" for driver in store.drivers]
        for store in stores
    ]
    _refuse_twice("deletion.object_stores", "driver and bucket", places)
    for index, store in enumerate(stores):
        if _overlap(config.store, store):
            raise errors.InvalidArgument(
                f"configuration: deletion.object_stores[{index}] and store, which is this daemon's own, overlap: "
                "neither may be inside the other"
            )


def _check_object_store(path: str, store: DeletionObjectStore) -> None:
    if store.kind == "local" and not store.path:
        raise errors.InvalidArgument(f"configuration: {path}.path is not set, and {path}.kind is 'local'")
    if store.kind == "local" and store.s3 != S3():
        raise errors.InvalidArgument(f"configuration: {path}.s3 is set, and {path}.kind is 'local'")
    if store.kind == "s3" and not store.s3.bucket:
        raise errors.InvalidArgument(f"configuration: {path}.s3.bucket is not set, and {path}.kind is 's3'")
    if store.kind == "s3" and store.path:
        raise errors.InvalidArgument(f"configuration: {path}.path is {store.path!r}, and {path}.kind is 's3'")


def _check_owner(path: str, owner: DeletionOwner) -> None:
    if owner.delete_url is None and owner.in_use_url is None:
        raise errors.InvalidArgument(f"configuration: {path} has neither delete_url nor in_use_url")
    if not owner.topic_prefixes and not owner.drivers:
        raise errors.InvalidArgument(f"configuration: {path} has neither topic_prefixes nor drivers: it gets no record")
    if owner.drivers and owner.delete_url is None:
        raise errors.InvalidArgument(f"configuration: {path}.delete_url is not set, and {path}.drivers are")
    if owner.in_use_url is not None and not owner.topic_prefixes:
        raise errors.InvalidArgument(f"configuration: {path}.topic_prefixes is not set, and {path}.in_use_url is")


def _refuse_twice(path: str, what: str, values: Sequence[Iterable[str]]) -> None:
    """Refuses a value that stands twice in an array of tables; `values`: of each of its tables."""
    first: dict[str, int] = {}
    for index, own in enumerate(values):
        for value in own:
            if value in first:
                raise errors.InvalidArgument(
                    f"configuration: {path}[{index}] has {what} {value!r}, which {path}[{first[value]}] has"
                )
            first[value] = index


def _overlap(own: Store, other: DeletionObjectStore) -> bool:
    """Whether one of the places is, or is inside, the other."""
    if own.kind != other.kind:
        return False
    if own.kind == "local":
        one, two = Path(own.path).resolve().parts, Path(other.path).resolve().parts
    else:
        if (own.s3.bucket, own.s3.endpoint_url) != (other.s3.bucket, other.s3.endpoint_url):
            return False
        one, two = (tuple(filter(None, s3.prefix.split("/"))) for s3 in (own.s3, other.s3))
    shared = min(len(one), len(two))
    return one[:shared] == two[:shared]
