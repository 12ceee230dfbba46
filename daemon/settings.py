"""Every setting of the daemon, declared once: name, unit in the name, default, range and meaning.

Owns: the sections of the configuration.
Does not own: how they are read and which contradict each other (`daemon.config`), what they do, and
docs/CONFIGURATION.md, which is made from this module (`scripts/gen_configuration.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from daemon.core.delay_levels import DEFAULT_TABLE
from storage_backends.settings import S3, Section

ADDRESS = r"^.+:[0-9]{1,5}\Z"
# Without credentials, which would end up in logs, and without a fragment.
URL = r"^https?://[^\s/?#@]+(?:[/?][^\s#]*)?\Z"

# What a name may be that people give to something here.
_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z"

# 10,000 rows of Messages, the largest answer there is, must fit.
_MESSAGE_BYTES_LEAST = 1 << 20


class Daemon(Section, frozen=True):
    """Who this daemon is."""

    id: (
        Annotated[
            str,
            Meta(
                pattern=_NAME,
                description="Names this daemon among those that share a root; letters, digits, `.`, `_` and `-`. It "
                "must stay the same when the daemon restarts, since a daemon takes its own shards back at once, and no "
                "two daemons may use one id at a time. Default: host name and port of `grpc.listen`. Set it where the "
                "host name changes with every start (containers) and where the port is 0.",
            ),
        ]
        | None
    ) = None
    address: (
        Annotated[
            str,
            Meta(
                pattern=ADDRESS,
                description="host:port at which clients and other daemons reach this one. Default: the address that is "
                "bound; with the host name in place of `0.0.0.0` and `[::]`.",
            ),
        ]
        | None
    ) = None
    insecure: Annotated[
        bool,
        Meta(
            description="Allow `grpc.listen` and `metrics.listen` on an address that is not loopback although "
            "neither TLS nor tokens exist yet: whoever reaches the port may add, receive and delete.",
        ),
    ] = False
    drain_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="At shutdown, time to make durable what is staged, to seal, to write checkpoints and to give "
            "the shards up; after it, or at a second signal, the daemon ends with status 3 and says what was left.",
        ),
    ] = 30.0
    shards: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Shards of a new root: units of ownership, journal and checkpoint. An existing root "
            "keeps its number.",
        ),
    ] = 16


class Grpc(Section, frozen=True):
    """The gRPC server."""

    listen: Annotated[
        str, Meta(pattern=ADDRESS, description="host:port; port 0 takes a free one. IPv6: `[::1]:7461`.")
    ] = "127.0.0.1:7461"
    concurrent_calls_per_connection_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Calls and streams that one connection may have open.")
    ] = 1000
    stream_requests_in_flight_max: Annotated[
        int, Meta(ge=1, le=100_000, description="Unanswered requests of one stream above which it is not read further.")
    ] = 256
    stream_bytes_in_flight_max: Annotated[
        int, Meta(ge=1, description="Bytes of these requests above which the stream is not read further.")
    ] = 32 << 20
    keepalive_time_s: Annotated[
        float, Meta(ge=1, le=7200, description="Silence after which a connection is probed.")
    ] = 30.0
    keepalive_timeout_s: Annotated[
        float, Meta(ge=1, le=600, description="Time without an answer to the probe until the connection is closed.")
    ] = 10.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0, le=600, description="At shutdown, time for open calls to end by themselves before they are cancelled."
        ),
    ] = 5.0


class Metrics(Section, frozen=True):
    """The Prometheus endpoint."""

    listen: Annotated[str, Meta(pattern=ADDRESS, description="host:port of `/metrics`; port 0 takes a free one.")] = (
        "127.0.0.1:7462"
    )
    per_topic: Annotated[
        bool, Meta(description='A series per topic; if false, all topics are counted under `topic="_all"`.')
    ] = True
    per_topic_max: Annotated[
        int,
        Meta(ge=0, le=1_000_000, description='Topics that get series of their own; the others share `topic="_other"`.'),
    ] = 1000


class Log(Section, frozen=True):
    """The log, on standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least level that is written.")
    ] = "info"
    format: Annotated[Literal["text", "json"], Meta(description="Lines for people, or one JSON object a line.")] = (
        "text"
    )


class Journal(Section, frozen=True):
    """Group commit and checkpoints."""

    commit_linger_ms: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=10_000,
                description="How long a slot waits for company when the shard is not idle. Default: 2 for a local "
                "directory, 50 for S3.",
            ),
        ]
        | None
    ) = None
    slot_bytes_max: Annotated[int, Meta(ge=64 << 10, le=64 << 20, description="Size of one slot.")] = 8 << 20
    checkpoint_bytes: Annotated[
        int, Meta(ge=64 << 10, description="Bytes of journal after which a shard writes a checkpoint.")
    ] = 64 << 20
    checkpoint_slots: Annotated[
        int,
        Meta(
            ge=1,
            description="Slots of journal after which a shard writes a checkpoint; it does so sooner where the "
            "shards together have 10,000 slots above their checkpoints, or 2,000 where a read is a request to another "
            "machine: a restart reads them.",
        ),
    ] = 10_000


class Delivery(Section, frozen=True):
    """Loading ahead and handing out."""

    tick_ms: Annotated[
        int, Meta(ge=1, le=500, description="Hand-outs are batched by as much; only ever later, never earlier.")
    ] = 5
    lookahead_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="How long before its first row is due a segment is loaded.")
    ] = 30_000
    segment_memory_bytes: Annotated[int, Meta(ge=1 << 20, description="Memory for loaded segments of all topics.")] = (
        256 << 20
    )
    ready_rows_max: Annotated[
        int, Meta(ge=1, description="Due rows of one topic that wait in memory for permits; more stay where they are.")
    ] = 200_000


class Redelivery(Section, frozen=True):
    """When negatively acknowledged positions come back, and the delay levels of topics without a table of their own."""

    delay_ms: Annotated[
        int,
        Meta(ge=0, le=1 << 53, description="The delay where neither the call nor the subscription's policy says one."),
    ] = 60_000
    nack_precision_bits: Annotated[
        int,
        Meta(
            ge=0,
            le=20,
            description="Redelivery times are rounded up to multiples of 2^n ms where the subscription's policy says "
            "nothing (PIP-393); 0: exact.",
        ),
    ] = 8
    delay_levels: Annotated[
        str,
        Meta(
            description="The delays of level 1, 2 and so on: whole numbers, each with `s`, `m`, `h` or `d`, separated "
            "by white space; 1 to 256 of them, none above `limits.delay_max_ms`. Default: RocketMQ's."
        ),
    ] = DEFAULT_TABLE
    clamp_delay_level: Annotated[
        bool, Meta(description="A level above the last one is the last one; if false, it is refused.")
    ] = True


class Limits(Section, frozen=True):
    """What a request may ask for. A refused request changes nothing."""

    rows_per_request_max: Annotated[int, Meta(ge=1, le=10_000_000, description="Rows of one request.")] = 100_000
    message_bytes_max: Annotated[
        int, Meta(ge=_MESSAGE_BYTES_LEAST, le=1 << 30, description="Bytes of one request.")
    ] = 16 << 20
    topic_bytes_max: Annotated[int, Meta(ge=1, le=65_535, description="Bytes of a topic's name in UTF-8.")] = 1024
    subscription_bytes_max: Annotated[int, Meta(ge=1, le=65_535, description="Bytes of a subscription's name.")] = 255
    delay_max_ms: Annotated[int, Meta(ge=1, le=1 << 53, description="How far ahead a row may be due.")] = (
        10 * 365 * 86_400_000
    )
    subscriptions_per_topic_max: Annotated[int, Meta(ge=1, description="Subscriptions of one topic.")] = 1000
    streams_per_subscription_max: Annotated[int, Meta(ge=1, description="Open streams of one subscription.")] = 10_000
    leases_per_subscription_max: Annotated[
        int, Meta(ge=1, description="Leases of one subscription that hold positions.")
    ] = 10_000
    consumers_per_subscription_max: Annotated[
        int, Meta(ge=1, le=60_000, description="Consumers of one KEY_SHARED subscription, of all its streams.")
    ] = 10_000
    pending_rows_max: Annotated[
        int, Meta(ge=0, le=1 << 53, description="Pending rows of all topics together; 0: no limit.")
    ] = 0
    pending_rows_per_topic_max: Annotated[
        int, Meta(ge=0, le=1 << 53, description="Pending rows of a topic whose policy says nothing; 0: no limit.")
    ] = 0
    due_rows_per_second_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Rows of a topic whose policy says nothing that may come due within one second, so that nobody "
            "plans a burst by accident; 0: no limit.",
        ),
    ] = 0
    client_rows_per_second_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Rows that one client may add in a second to a topic whose policy says nothing; 0: no limit. A "
            "client is who sends one `tarry-client-id`, or the host that calls.",
        ),
    ] = 0
    client_bytes_per_second_max: Annotated[
        int, Meta(ge=0, le=1 << 53, description="The same in bytes of requests; 0: no limit.")
    ] = 0


class Ownership(Section, frozen=True):
    """How daemons that share a root watch each other."""

    heartbeat_interval_s: Annotated[float, Meta(gt=0, le=60, description="Time between two heartbeats.")] = 3.0
    misses_max: Annotated[
        int, Meta(ge=2, le=1000, description="Missed heartbeats after which another daemon is taken to be gone.")
    ] = 3


Driver = Annotated[str, Meta(min_length=1, max_length=255)]


class DeletionObjectStore(Section, frozen=True):
    """A place where offloaded ledgers are, which the daemon deletes itself; a table for each.

    A record belongs to the store that has its driver, and its bucket if it names one. A record reaches nothing that has
    no table here. A local directory must be a store already: one that is not mounted is not taken for an empty one.
    """

    name: Annotated[str, Meta(pattern=_NAME, description="Names the store, for `tarry sweep`; required.")]
    drivers: Annotated[
        tuple[Driver, ...],
        Meta(min_length=1, description="Names of drivers whose ledgers are here, such as `aws-s3`; required."),
    ]
    kind: Annotated[Literal["local", "s3"], Meta(description="A local directory, or S3.")] = "s3"
    path: Annotated[str, Meta(description="The local directory; required when `kind` is `local`.")] = ""
    s3: S3 = S3()


class DeletionOwner(Section, frozen=True):
    """Somebody who is asked by HTTP, `docs/LEDGER_OWNERS.md`; a table for each."""

    name: Annotated[str, Meta(pattern=_NAME, description="Names the owner, in messages; required.")]
    topic_prefixes: Annotated[
        tuple[str, ...],
        Meta(
            description="What names of its topics begin with; the longest that fits has a topic, an empty one fits all."
        ),
    ] = ()
    drivers: Annotated[
        tuple[Driver, ...],
        Meta(description="Drivers whose offloaded ledgers it deletes itself, unless an object store here has them."),
    ] = ()
    delete_url: (
        Annotated[str, Meta(pattern=URL, description="Where it is told to delete a ledger. Default: it is not.")] | None
    ) = None
    in_use_url: (
        Annotated[str, Meta(pattern=URL, description="Where it is asked what is in use. Default: it is not.")] | None
    ) = None
    authorization_file: (
        Annotated[str, Meta(min_length=1, description="File with the `Authorization` header, read each time.")] | None
    ) = None
    timeout_s: Annotated[
        float, Meta(gt=0, le=300, description="Time to connect; then until an answer begins; then until it is whole.")
    ] = 10.0


class Deletion(Section, frozen=True):
    """Deletion of ledgers and offloaded objects of other systems, in two phases (names of PIP-186).

    Without an object store or an owner nothing is deleted: records are retried, and then are dead letters.
    """

    two_phase_deletion_enabled: Annotated[
        bool, Meta(description="Whether deletions of topics whose policy says nothing are recorded.")
    ] = True
    parallelism: Annotated[
        int, Meta(ge=1, le=256, description="Attempts at once, each in a thread of its own that nobody else waits for.")
    ] = 4
    reconsume_later_seconds: Annotated[
        int, Meta(ge=1, le=30 * 86_400, description="Time from a failed attempt to the next.")
    ] = 600
    max_retry_delete_count: Annotated[
        int, Meta(ge=0, le=1000, description="Retries after the first attempt; then a record is a dead letter.")
    ] = 10
    jitter: Annotated[
        float, Meta(ge=0, le=0.5, description="Part of the time between attempts by which it is longer or shorter.")
    ] = 0.1
    pending_max: Annotated[
        int, Meta(ge=1, le=10_000_000, description="Records that are pending, held or dead letters, of all topics.")
    ] = 200_000
    in_use_max: Annotated[
        int, Meta(ge=1, le=100_000_000, description="Ledgers that are in use as their owners say, of all topics.")
    ] = 1_000_000
    sweep_grace_s: Annotated[
        float,
        Meta(ge=0, le=365 * 86_400, description="Age from which an offloaded ledger that nobody knows is an orphan."),
    ] = 86_400.0
    guard_share: Annotated[
        float,
        Meta(ge=0, le=1, description="Part of the listed bytes above which orphans stay until `tarry sweep --force`."),
    ] = 0.2
    guard_bytes: Annotated[int, Meta(ge=0, description="Orphans of up to so many bytes are deleted in any case.")] = (
        64 << 20
    )
    object_stores: tuple[DeletionObjectStore, ...] = ()
    owners: tuple[DeletionOwner, ...] = ()
