"""Declares the settings that the daemon shares with offline jobs, and checks them together.

They say where everything durable is, how buckets are written, and how long an object stays after it has left a
manifest. A topic's policy may override some. `daemon.settings` declares the daemon's other settings; `settings_file`
reads all of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from storage_backends.formats.manifest import TopicPolicy
from storage_backends.formats.segment import SegmentLimits

WRITTEN_AS = "written_as"
"""The key in `Meta.extra` of a setting with a pattern for the allowed values, in words that go on from "it must be"."""


class SettingsError(ValueError):
    """The error of a setting that is unknown, out of its range, or contradicts another.

    The message names it and where it was set.
    """


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the TOML file."""


class S3(Section, frozen=True):
    """An S3 bucket; used when `kind` is `s3`. Credentials come from the AWS SDK's usual places."""

    bucket: Annotated[str, Meta(description="Name of the bucket; required.")] = ""
    prefix: Annotated[str, Meta(description="Key prefix of the root; empty: the bucket is the root.")] = ""
    region: Annotated[str, Meta(min_length=1, description="Region of the bucket.")] = "us-east-1"
    endpoint_url: (
        Annotated[
            str,
            Meta(
                pattern=r"^https?://",
                extra={WRITTEN_AS: "a URL that begins with http:// or https://"},
                description="For S3-compatible stores. Default: AWS.",
            ),
        ]
        | None
    ) = None
    addressing: Annotated[
        Literal["auto", "path", "virtual"],
        Meta(
            description="Place of the bucket's name: the path or the host name. `auto`: the path for an "
            "`endpoint_url`, and the choice of the AWS SDK for AWS."
        ),
    ] = "auto"
    checksums: Annotated[
        Literal["auto", "when_supported", "when_required"],
        Meta(
            description="Checksums that the AWS SDK adds and verifies. `auto`: `when_supported` for AWS, and "
            "`when_required` for an `endpoint_url`, since many S3-compatible stores refuse others."
        ),
    ] = "auto"
    connect_timeout_s: Annotated[float, Meta(gt=0, le=300, description="Time to connect, for each attempt.")] = 1.0
    read_timeout_s: Annotated[
        float, Meta(gt=0, le=300, description="Time without a byte after which an attempt fails.")
    ] = 5.0
    attempts: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="Attempts of a request, with growing delays, all within 20 s of the first; a conditional "
            "write has one.",
        ),
    ] = 12
    connections_max: Annotated[
        int, Meta(ge=1, le=1000, description="Connections kept open; as many requests can be in flight.")
    ] = 32


class Store(Section, frozen=True):
    """The store of everything durable."""

    kind: Annotated[Literal["local", "s3"], Meta(description="A local directory, or S3.")] = "local"
    path: Annotated[
        str, Meta(min_length=1, description="The local directory; the daemon creates it if it does not exist.")
    ] = "./tarry-data"
    log_form: Annotated[
        Literal["auto", "objects", "files"],
        Meta(
            description="Form of the daemons' commit logs, fixed when a root is created. `objects`: an object for "
            "each slot. `files`: appended files, in a local directory that only one machine uses; while a daemon's "
            "process lives, no other takes its shards. `auto`: files if the local file system is known to belong to "
            "one machine, else objects."
        ),
    ] = "auto"
    io_threads: Annotated[
        int,
        Meta(ge=1, le=256, description="Threads for all requests to the store without threads of their own below."),
    ] = 16
    journal_threads: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Threads for slots of the daemon's log, heartbeats, and checks of the ends of logs.",
        ),
    ] = 32
    load_threads: Annotated[
        int, Meta(ge=1, le=256, description="Topics that the daemon loads at the same time after a takeover.")
    ] = 16
    seal_threads: Annotated[
        int, Meta(ge=1, le=256, description="Topics whose buckets the daemon seals at the same time.")
    ] = 8
    collection_threads: Annotated[
        int,
        Meta(ge=1, le=256, description="Threads that delete unneeded objects and slots."),
    ] = 4
    s3: S3 = S3()


class Bucket(Section, frozen=True):
    """Sealing, segments and merging of buckets (names of PIP-195)."""

    min_index_count_per_bucket: Annotated[
        int,
        Meta(
            ge=1,
            description="Rows at which the mutable bucket is sealed when a row of a higher ledger arrives.",
        ),
    ] = 50_000
    rows_max: Annotated[
        int, Meta(ge=1, description="Rows at which the mutable bucket is sealed, whatever the ledger.")
    ] = 200_000
    bytes_max: Annotated[int, Meta(ge=1 << 10, description="Bytes at which the mutable bucket is sealed.")] = 16 << 20
    age_max_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Age of its oldest row at which the mutable bucket is sealed. A topic seals up to a quarter "
            "sooner, so that topics do not all seal together.",
        ),
    ] = 1800.0
    form: Annotated[
        Literal["columnar", "compatible"],
        Meta(description="`columnar` is small and fast. Programs made from PIP-195 read `compatible` in full."),
    ] = "columnar"
    max_time_step_per_bucket_snapshot_segment_seconds: Annotated[
        int, Meta(ge=1, description="Span of the due times of one segment, at most.")
    ] = 300
    max_indexes_per_bucket_snapshot_segment: Annotated[
        int, Meta(ge=-1, description="Rows of one segment, at most; -1: no limit.")
    ] = 5000
    min_indexes_per_bucket_snapshot_segment: Annotated[
        int,
        Meta(ge=0, description="Rows from which on the span cuts a segment; 0: PIP-195's rule."),
    ] = 1000
    max_num_buckets: Annotated[
        int,
        Meta(
            ge=-1,
            description="Sealed buckets of one index above which neighbours are merged; at least 1; -1: never.",
        ),
    ] = 50
    merge_buckets_max: Annotated[int, Meta(ge=2, description="Buckets that one merge reads, at most.")] = 10
    merge_rows_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Rows of a merged bucket, at most. Neighbours with more rows together stay as they are.",
        ),
    ] = 2_000_000


class Collection(Section, frozen=True):
    """Deletion of objects that no manifest needs."""

    interval_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Time between two passes over a shard's tombstones and the log.")
    ] = 600.0
    orphan_interval_s: Annotated[
        float,
        Meta(
            gt=0,
            le=7 * 86_400,
            description="Time between two listings of a shard, for orphans, old manifests and deleted topics.",
        ),
    ] = 21_600.0
    grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=30 * 86_400,
            description="Time that an object stays after it left its manifest. Readers of an older manifest finish "
            "by then, or read the newest manifest.",
        ),
    ] = 3600.0
    orphan_age_s: Annotated[
        float,
        Meta(
            ge=0,
            le=365 * 86_400,
            description="Time from the start of an object to the manifest that names it, at most. Work that takes "
            "longer is refused and starts over; no row is lost.",
        ),
    ] = 86_400.0
    manifests_kept: Annotated[
        int, Meta(ge=1, description="Manifests of a shard or topic that are kept, whatever their age.")
    ] = 1000
    manifests_age_s: Annotated[
        float,
        Meta(
            ge=86_400,
            le=3650 * 86_400,
            description="Time that a manifest is kept after a later one exists. After it, all but the last manifest "
            "of a deleted topic are deleted.",
        ),
    ] = 86_400.0
    attempts_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Failed attempts after which the deletion of an object is given up, and recorded under "
            "`dead_objects/`.",
        ),
    ] = 10
    guard_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="If orphans exceed this part of a shard's bytes, they stay until `tarry gc --force`: so many "
            "are likely a mistake.",
        ),
    ] = 0.2
    guard_bytes: Annotated[
        int, Meta(ge=0, description="Orphans of up to this many bytes are deleted, whatever part they are.")
    ] = 64 << 20


def check_store(store: Store) -> None:
    """Check the settings of the store together. Raises SettingsError."""
    if store.kind == "s3" and not store.s3.bucket:
        raise SettingsError("store.s3.bucket is not set; store.kind 's3' needs it")


def check_bucket(bucket: Bucket) -> None:
    """Check the settings of buckets together. Raises SettingsError."""
    refuse_above(
        "bucket.min_index_count_per_bucket", bucket.min_index_count_per_bucket, "bucket.rows_max", bucket.rows_max
    )
    if bucket.max_indexes_per_bucket_snapshot_segment == 0:
        raise SettingsError(
            "bucket.max_indexes_per_bucket_snapshot_segment is 0; it must be at least 1, or -1 for no limit"
        )
    if bucket.max_num_buckets == 0:
        raise SettingsError("bucket.max_num_buckets is 0; it must be at least 1, or -1 for never")
    if bucket.max_indexes_per_bucket_snapshot_segment > 0:
        refuse_above(
            "bucket.min_indexes_per_bucket_snapshot_segment",
            bucket.min_indexes_per_bucket_snapshot_segment,
            "bucket.max_indexes_per_bucket_snapshot_segment",
            bucket.max_indexes_per_bucket_snapshot_segment,
        )


def refuse_above(name: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise SettingsError(f"{name} is {value}; it must be at most {limit_name}, which is {limit}")


def segment_limits(bucket: Bucket, policy: TopicPolicy) -> SegmentLimits:
    """Return how the buckets of a topic are cut into segments, by its policy, else by the settings.

    If the minimum exceeds the maximum of rows, the maximum counts.
    """
    seconds = policy.max_time_step_per_bucket_snapshot_segment_seconds
    rows_max = policy.max_indexes_per_bucket_snapshot_segment
    rows_min = policy.min_indexes_per_bucket_snapshot_segment
    seconds = bucket.max_time_step_per_bucket_snapshot_segment_seconds if seconds is None else seconds
    rows_max = bucket.max_indexes_per_bucket_snapshot_segment if rows_max is None else rows_max
    rows_min = bucket.min_indexes_per_bucket_snapshot_segment if rows_min is None else rows_min
    if rows_max > 0:
        rows_min = min(rows_min, rows_max)
    return SegmentLimits(time_step_ms=seconds * 1000, rows_max=rows_max, rows_min=rows_min)


def compatible_form(bucket: Bucket, policy: TopicPolicy) -> bool:
    """Return whether the buckets of a topic are written in PIP-195's form."""
    return bucket.form == "compatible" if policy.compatible_form is None else policy.compatible_form


def merge_rows_max(bucket: Bucket, policy: TopicPolicy) -> int:
    """Return how many rows a merged bucket of a topic may have."""
    return bucket.merge_rows_max if policy.merge_rows_max is None else policy.merge_rows_max
