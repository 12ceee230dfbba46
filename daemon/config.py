"""Loads the configuration from a TOML file, the environment and `--set`, and refuses contradictory settings.

An error names the settings. `daemon.settings` and `storage_backends.storage_settings` declare them, and
`storage_backends.settings_file` reads them.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from daemon import errors
from daemon.core.index import delay_levels
from daemon.settings import (
    AccessSettings,
    DaemonSettings,
    DeletionObjectStore,
    DeletionOwner,
    DeletionSettings,
    DeliverySettings,
    GrpcSettings,
    JournalSettings,
    LimitsSettings,
    LogSettings,
    MetricsSettings,
    OwnershipSettings,
    RedeliverySettings,
    TlsSettings,
)
from storage_backends import settings_file
from storage_backends.storage_settings import S3, Bucket, Collection, SettingsError, Store, check_bucket, check_store

PORT_MAX = 65_535


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings."""

    daemon: DaemonSettings = DaemonSettings()
    store: Store = Store()
    grpc: GrpcSettings = GrpcSettings()
    tls: TlsSettings = TlsSettings()
    access: AccessSettings = AccessSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    journal: JournalSettings = JournalSettings()
    bucket: Bucket = Bucket()
    delivery: DeliverySettings = DeliverySettings()
    redelivery: RedeliverySettings = RedeliverySettings()
    limits: LimitsSettings = LimitsSettings()
    ownership: OwnershipSettings = OwnershipSettings()
    collection: Collection = Collection()
    deletion: DeletionSettings = DeletionSettings()

    @property
    def daemon_id(self) -> str:
        """The setting `daemon.id`, or host name and port, which stay the same after a restart on this machine."""
        if self.daemon.id is not None:
            return self.daemon.id
        return f"{socket.gethostname()}-{split_address(self.grpc.listen)[1]}"

    def read_delay_levels(self) -> delay_levels.DelayLevels:
        """Parse `redelivery.delay_levels`. Raise `InvalidArgument` if it is wrong.

        The default table may exceed a lower limit on delays: rows of such levels are then refused individually.
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
    """Load the file (None: defaults), the environment (None: the process's) and `section.key=value` overrides.

    Raises `InvalidArgument` with the setting's path, where it was set and what is wrong.
    """
    try:
        config = settings_file.load(Config, path, environment=environment, overrides=overrides)
        _check(config)
    except SettingsError as error:
        raise errors.InvalidArgument(f"configuration: {error}") from error
    return config


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` into host (without brackets) and port. Raise `InvalidArgument` if it has another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise errors.InvalidArgument(f"address: {address!r} is not host:port with a port from 0 to {PORT_MAX}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def cannot_be_bound(name: str, address: str, error: OSError) -> OSError:
    """Return the error of a daemon that cannot listen at the address of a setting."""
    why = f"{name}: {address} cannot be bound: {error.strerror or error}"
    match error.errno:
        case errno.EADDRINUSE:
            why += f"; another process listens there: stop it, or set {name} to another address"
        case errno.EADDRNOTAVAIL:
            why += f"; {name} must have an address of this machine"
    return OSError(why)


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches the address. Names other than `localhost` count as reachable."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_port(name: str, address: str | None) -> None:
    """Refuse an invalid port in host:port or in a URL."""
    authority = re.split("[/?]", re.sub("^https?://", "", address or ""), maxsplit=1)[0]
    port = re.search(r":([0-9]+)\Z", authority)
    if port is not None and int(port[1]) > PORT_MAX:
        raise errors.InvalidArgument(
            f"configuration: {name} is {address!r}, and {port[1]} is no port: it must be from 0 to {PORT_MAX}"
        )


def _check(config: Config) -> None:
    """Refuse settings that are wrong only in combination."""
    _check_port("daemon.address", config.daemon.address)
    _check_port("grpc.listen", config.grpc.listen)
    _check_port("metrics.listen", config.metrics.listen)
    _check_port("store.s3.endpoint_url", config.store.s3.endpoint_url)
    _check_door(config)
    check_store(config.store)
    check_bucket(config.bucket)
    _check_deletion(config)
    try:
        config.read_delay_levels()
    except errors.InvalidArgument as error:
        raise errors.InvalidArgument(f"configuration: redelivery.delay_levels: {error}") from error


def _check_door(config: Config) -> None:
    """Refuse TLS and identities that lack a part, and addresses that other machines reach without both."""
    tls, access, metrics = config.tls, config.access, config.metrics
    if (tls.cert_file is None) != (tls.key_file is None):
        given, missing = ("cert_file", "key_file") if tls.key_file is None else ("key_file", "cert_file")
        raise errors.InvalidArgument(f"configuration: tls.{given} is set, and tls.{missing} is not: set both, or none")
    for name, is_set, needed, is_there in (
        ("tls.client_ca_file", tls.client_ca_file is not None, "tls.cert_file", tls.cert_file is not None),
        ("metrics.tls", metrics.tls, "tls.cert_file", tls.cert_file is not None),
        ("metrics.tokens", metrics.tokens, "access.identities_file", access.identities_file is not None),
    ):
        if is_set and not is_there:
            raise errors.InvalidArgument(f"configuration: {name} is set, and {needed} is not")
    if config.daemon.insecure:
        return
    _check_reachable(
        "grpc.listen",
        config.grpc.listen,
        {"tls.cert_file": tls.cert_file is not None, "access.identities_file": access.identities_file is not None},
    )
    _check_reachable("metrics.listen", metrics.listen, {"metrics.tls": metrics.tls, "metrics.tokens": metrics.tokens})


def _check_reachable(name: str, listen: str, needed: Mapping[str, bool]) -> None:
    """Refuse an address that other machines reach if a setting that it needs is not set."""
    missing = [setting for setting, is_set in needed.items() if not is_set]
    if missing and not is_loopback(listen):
        raise errors.InvalidArgument(
            f"configuration: {name} is {listen!r}, which other machines reach, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Set what is missing (docs/SECURITY.md), listen on "
            "127.0.0.1, or set daemon.insecure = true where the network itself keeps strangers out"
        )


def _check_deletion(config: Config) -> None:
    """Refuse object stores and owners of deletions with which a record could have two places."""
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
    _check_port(f"{path}.s3.endpoint_url", store.s3.endpoint_url)
    if store.kind == "local" and not store.path:
        raise errors.InvalidArgument(f"configuration: {path}.path is not set, and {path}.kind is 'local'")
    if store.kind == "local" and store.s3 != S3():
        raise errors.InvalidArgument(f"configuration: {path}.s3 is set, and {path}.kind is 'local'")
    if store.kind == "s3" and not store.s3.bucket:
        raise errors.InvalidArgument(f"configuration: {path}.s3.bucket is not set, and {path}.kind is 's3'")
    if store.kind == "s3" and store.path:
        raise errors.InvalidArgument(f"configuration: {path}.path is {store.path!r}, and {path}.kind is 's3'")


def _check_owner(path: str, owner: DeletionOwner) -> None:
    _check_port(f"{path}.delete_url", owner.delete_url)
    _check_port(f"{path}.in_use_url", owner.in_use_url)
    if owner.delete_url is None and owner.in_use_url is None:
        raise errors.InvalidArgument(f"configuration: {path} has neither delete_url nor in_use_url")
    for name, url in (("delete_url", owner.delete_url), ("in_use_url", owner.in_use_url)):
        if owner.authorization_file is not None and not owner.insecure and (url or "").startswith("http:"):
            raise errors.InvalidArgument(
                f"configuration: {path}.{name} is {url!r}, and the authorization would go there for everybody to read: "
                f"use https, or set {path}.insecure = true where the network itself keeps strangers out"
            )
    if not owner.topic_prefixes and not owner.drivers:
        raise errors.InvalidArgument(f"configuration: {path} has neither topic_prefixes nor drivers: it gets no record")
    if owner.drivers and owner.delete_url is None:
        raise errors.InvalidArgument(f"configuration: {path}.delete_url is not set, and {path}.drivers are")
    if owner.in_use_url is not None and not owner.topic_prefixes:
        raise errors.InvalidArgument(f"configuration: {path}.topic_prefixes is not set, and {path}.in_use_url is")


def _refuse_twice(path: str, what: str, values: Sequence[Iterable[str]]) -> None:
    """Refuse a value that occurs twice in an array of tables; `values` has those of each table."""
    first: dict[str, int] = {}
    for index, own in enumerate(values):
        for value in own:
            if value in first:
                raise errors.InvalidArgument(
                    f"configuration: {path}[{index}] has {what} {value!r}, which {path}[{first[value]}] has"
                )
            first[value] = index


def _overlap(own: Store, other: DeletionObjectStore) -> bool:
    """Return whether one of the places is, or is inside, the other."""
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
