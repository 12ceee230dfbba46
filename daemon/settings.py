"""Declares every setting of the daemon once: name, unit in the name, default, range and meaning.

`daemon.config` reads them and refuses contradictions. docs/CONFIGURATION.md is generated from this module
(`scripts/gen_configuration.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from daemon.core.index.delay_levels import DEFAULT_TABLE
from storage_backends.storage_settings import S3, WRITTEN_AS, Section

ADDRESS = r"^.+:[0-9]{1,5}\Z"
# Without credentials, which would end up in logs, and without a fragment
URL = r"^https?://[^\s/?#@]+(?:[/?][^\s#]*)?\Z"

# The form of names that operators choose
_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z"

_AN_ADDRESS = {WRITTEN_AS: "host:port with a port from 0 to 65535, such as 127.0.0.1:7461"}
_A_URL = {WRITTEN_AS: "a URL that begins with http:// or https://, without user, password and fragment"}
_A_NAME = {WRITTEN_AS: "1 to 128 letters, digits, `.`, `_` and `-`, and not begin with `.`"}

_ABSOLUTE = r"^/[^\x00]{0,102}\Z"
_AN_ABSOLUTE_PATH = {WRITTEN_AS: "an absolute path of at most 103 characters, which is what a socket's name may have"}

# The largest answer, 10,000 rows of Messages, must fit.
_MESSAGE_BYTES_LEAST = 1 << 20


class DaemonSettings(Section, frozen=True):
    """Identity, end and shards of the daemon."""

    id: (
        Annotated[
            str,
            Meta(
                pattern=_NAME,
                extra=_A_NAME,
                description="The name of this daemon among those that share a root: letters, digits, `.`, `_` and "
                "`-`. Keep it over restarts, so that the daemon takes its own shards back at once. No two daemons "
                "may use one id at a time. Default: host name and port of `grpc.listen`. Set the id if the host name "
                "changes with every start (containers), or if the port is 0.",
            ),
        ]
        | None
    ) = None
    address: (
        Annotated[
            str,
            Meta(
                pattern=ADDRESS,
                extra=_AN_ADDRESS,
                description="The host:port at which clients and other daemons reach this daemon. Default: the bound "
                "address, with the host name in place of `0.0.0.0` and `[::]`.",
            ),
        ]
        | None
    ) = None
    insecure: Annotated[
        bool,
        Meta(
            description="Allow `grpc.listen` and `metrics.listen` on addresses other than loopback without TLS and "
            "identities. Use it only if the network itself keeps strangers out.",
        ),
    ] = False
    drain_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Time for a clean end: staged decisions become durable, seals in flight end, checkpoints are "
            "written, and shards are given up. After this time, or at a second signal, the daemon reports what is "
            "left and ends with status 3.",
        ),
    ] = 30.0
    shards: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Shards of a new root. Each has one owner and its own checkpoints. An existing root keeps "
            "its number.",
        ),
    ] = 16


class GrpcSettings(Section, frozen=True):
    """The gRPC server."""

    listen: Annotated[
        str,
        Meta(
            pattern=ADDRESS,
            extra=_AN_ADDRESS,
            description="The host:port to listen on; port 0 takes a free one. IPv6: `[::1]:7461`.",
        ),
    ] = "127.0.0.1:7461"
    unix_socket: (
        Annotated[
            str,
            Meta(
                pattern=_ABSOLUTE,
                extra=_AN_ABSOLUTE_PATH,
                description="Path of a Unix socket on which the daemon also listens, without TLS, for clients of its "
                "own user and machine. Their address is `unix:` and the path. The daemon replaces an existing "
                "socket, so no two daemons may name one path. Default: none.",
            ),
        ]
        | None
    ) = None
    concurrent_calls_per_connection_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Open calls and streams of one connection, at most.")
    ] = 1000
    stream_requests_in_flight_max: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="The daemon stops reading a stream with more unanswered requests than this.",
        ),
    ] = 256
    stream_bytes_in_flight_max: Annotated[
        int,
        Meta(ge=1, description="The daemon stops reading a stream with more bytes of unanswered requests than this."),
    ] = 32 << 20
    received_bytes_max: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="Bytes of requests that are received and not decided, of all connections together. Half of "
            "it is for requests that are not whole, each as large as `limits.message_bytes_max` allows, but at least "
            "for one. Others wait. On streams this holds until their caller has named a topic that it may use.",
        ),
    ] = 256 << 20
    request_arrival_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="Time for a request to arrive whole; on streams, for the first one. A call waits as long for "
            "its turn to be received.",
        ),
    ] = 30.0
    keepalive_time_s: Annotated[
        float, Meta(ge=1, le=7200, description="Silence after which the daemon probes a connection.")
    ] = 30.0
    keepalive_timeout_s: Annotated[
        float,
        Meta(
            ge=1, le=600, description="Time without an answer to the probe after which the daemon closes a connection."
        ),
    ] = 10.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="Time for open calls to end at shutdown; then the daemon cancels them.",
        ),
    ] = 5.0


class MetricsSettings(Section, frozen=True):
    """The Prometheus endpoint."""

    listen: Annotated[
        str,
        Meta(pattern=ADDRESS, extra=_AN_ADDRESS, description="The host:port of `/metrics`; port 0 takes a free one."),
    ] = "127.0.0.1:7462"
    tls: Annotated[bool, Meta(description="Serve only HTTPS, with the certificate and key of section `tls`.")] = False
    tokens: Annotated[
        bool,
        Meta(
            description="A scrape needs the bearer token of an identity (`access.identities_file`) with scope "
            '`inspect` and topic prefix `""`.'
        ),
    ] = False
    per_topic: Annotated[
        bool, Meta(description='Each topic has its own series. If false, all topics count under `topic="_all"`.')
    ] = True
    per_topic_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description='Topics with series of their own, at most; all others share `topic="_other"`.',
        ),
    ] = 1000


class TlsSettings(Section, frozen=True):
    """TLS of the gRPC server, and of the metrics if `metrics.tls` is set. The files are PEM.

    The daemon reads changed files again and keeps connections. Wrong files change nothing.
    """

    cert_file: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="Certificate of the daemon with its chain. Its names must be those that clients and "
                "other daemons use. Default: no TLS.",
            ),
        ]
        | None
    ) = None
    key_file: (
        Annotated[str, Meta(min_length=1, description="Key of the certificate, without a password. Default: none.")]
        | None
    ) = None
    client_ca_file: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="Certificates of the clients' CAs. If set, every client, health checks included, needs a "
                "certificate of one of them (mutual TLS). Default: no client needs one.",
            ),
        ]
        | None
    ) = None


class AccessSettings(Section, frozen=True):
    """Rights of callers ([SECURITY.md](SECURITY.md))."""

    identities_file: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="TOML file of the identities: tokens, certificates, scopes and topic prefixes. The "
                "daemon reads it again when it changes; replace it in one step, by renaming. Default: every caller "
                "that reaches the port may do everything.",
            ),
        ]
        | None
    ) = None
    reflection: (
        Annotated[
            bool,
            Meta(description="Serve gRPC reflection to every caller. Default: true without identities, else false."),
        ]
        | None
    ) = None
    audit_file: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="File to which the daemon appends the audit log, one JSON object a line. It opens the "
                "file again after a rename. Default: the daemon's log if there are identities, else no audit log.",
            ),
        ]
        | None
    ) = None


class LogSettings(Section, frozen=True):
    """The log, on standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="The lowest level to write.")] = (
        "info"
    )
    format: Annotated[Literal["text", "json"], Meta(description="Lines for people, or one JSON object a line.")] = (
        "text"
    )


class JournalSettings(Section, frozen=True):
    """Group commit and checkpoints."""

    commit_linger_ms: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=10_000,
                description="Longest wait of a slot of the log for more decisions. A slot waits only while others "
                "arrive, and no longer than the slot before it took. With acknowledgements alone, it waits no longer "
                "than the tick, while that is longer than at rest. Default: 10 for a local directory, 50 for S3.",
            ),
        ]
        | None
    ) = None
    commit_latency_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Shortest time between two slots of the log: each is a request to S3, and costs money. It "
            "delays answers by as much. 0: none.",
        ),
    ] = 0
    slot_bytes_max: Annotated[
        int, Meta(ge=64 << 10, le=64 << 20, description="Bytes of one shard in a slot of the log, at most.")
    ] = 8 << 20
    checkpoint_bytes: Annotated[
        int, Meta(ge=64 << 10, description="Bytes of a shard in the log after which it writes a checkpoint.")
    ] = 64 << 20
    checkpoint_slots: Annotated[
        int,
        Meta(
            ge=1,
            description="Slots of the log with a section of a shard after which it writes a checkpoint. A restart "
            "reads the log from the oldest checkpoint on, so shards take turns sooner if it would take long.",
        ),
    ] = 10_000


class DeliverySettings(Section, frozen=True):
    """Loading ahead and delivery."""

    tick_ms: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=500,
                description="Deliveries are batched by this time: a row may come later by as much, never earlier. "
                "Default: 5; under load 10 or 15; and 25 or 50 while the daemon is late by more than that.",
            ),
        ]
        | None
    ) = None
    lookahead_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="Time from the loading of a segment until its first row is due.")
    ] = 30_000
    segment_memory_bytes: Annotated[
        int, Meta(ge=1 << 20, description="Memory for the loaded segments of all topics.")
    ] = 256 << 20
    ready_rows_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Due rows of a subscription that wait in memory for permits, at most; other rows stay in "
            "their buckets.",
        ),
    ] = 200_000


class RedeliverySettings(Section, frozen=True):
    """Redelivery of negatively acknowledged positions, and delay levels for topics without a table of their own."""

    delay_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Delay of a negative acknowledgement if neither the call nor the subscription's policy has "
            "one.",
        ),
    ] = 60_000
    nack_precision_bits: Annotated[
        int,
        Meta(
            ge=0,
            le=20,
            description="Redelivery times are rounded up to multiples of 2^n ms (PIP-393); 0: exact. The policy of a "
            "subscription may set another n.",
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
        bool, Meta(description="A level above the last counts as the last. If false, the daemon refuses it.")
    ] = True


class LimitsSettings(Section, frozen=True):
    """Limits of requests. A refused request changes nothing."""

    rows_per_request_max: Annotated[int, Meta(ge=1, le=10_000_000, description="Rows of one request, at most.")] = (
        100_000
    )
    message_bytes_max: Annotated[
        int,
        Meta(
            ge=_MESSAGE_BYTES_LEAST,
            le=1 << 30,
            description="Bytes of one request, at most. Clients ask for it, and cut their requests by it; older ones "
            "cut at 16 MiB.",
        ),
    ] = 4 << 20
    topic_bytes_max: Annotated[int, Meta(ge=1, le=65_535, description="Bytes of a topic's name in UTF-8.")] = 1024
    subscription_bytes_max: Annotated[int, Meta(ge=1, le=65_535, description="Bytes of a subscription's name.")] = 255
    delay_max_ms: Annotated[int, Meta(ge=1, le=1 << 53, description="The longest delay of a row.")] = (
        10 * 365 * 86_400_000
    )
    topics_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Topics of this daemon, at most; beyond it no topic is created. Existing topics are served, "
            "however many they are. Each takes some 25 kB of memory, and a file.",
        ),
    ] = 100_000
    subscriptions_per_topic_max: Annotated[int, Meta(ge=1, description="Subscriptions of one topic.")] = 1000
    streams_per_subscription_max: Annotated[int, Meta(ge=1, description="Open streams of one subscription.")] = 10_000
    leases_per_subscription_max: Annotated[
        int, Meta(ge=1, description="Leases of one subscription with positions.")
    ] = 10_000
    nacked_rows_per_subscription_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Negatively acknowledged rows of one subscription outside the shared index: positions that "
            "were never added, single messages of batches, rows of the subscription alone. Beyond it, no position "
            "without a row can be negatively acknowledged.",
        ),
    ] = 1_000_000
    dead_letters_per_subscription_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Dead letters of one subscription. Beyond it, nothing can be rejected or trimmed with dead "
            "letters, and what exceeds `max_redeliver_count` is redelivered at the longest delay of its policy. Each "
            "takes 50 B of memory, and its text; each checkpoint and seal writes them all.",
        ),
    ] = 100_000
    consumers_per_subscription_max: Annotated[
        int, Meta(ge=1, le=60_000, description="Consumers of one KEY_SHARED subscription, of all its streams.")
    ] = 10_000
    pending_rows_max: Annotated[
        int, Meta(ge=0, le=1 << 53, description="Pending rows of all topics together; 0: no limit.")
    ] = 0
    pending_rows_per_topic_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Pending rows of one topic; 0: no limit. The policy of a topic may set another limit.",
        ),
    ] = 0
    due_rows_per_second_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Rows of one topic that may come due within one second, as a guard against an accidental "
            "burst; 0: no limit. The policy of a topic may set another limit.",
        ),
    ] = 0
    client_rows_per_second_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Rows that one client may add to one topic in a second; 0: no limit. A client is an identity. "
            "Without identities it is all callers with one `tarry-client-id`, or else all callers of one host. The "
            "policy of a topic may set another limit.",
        ),
    ] = 0
    client_bytes_per_second_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Bytes of requests by which one client may add to one topic in a second; 0: no limit. A client "
            "is the same as for rows. The policy of a topic may set another limit.",
        ),
    ] = 0


class OwnershipSettings(Section, frozen=True):
    """Heartbeats, by which daemons that share a root watch each other."""

    heartbeat_interval_s: Annotated[float, Meta(gt=0, le=60, description="Time between two heartbeats.")] = 3.0
    misses_max: Annotated[
        int, Meta(ge=2, le=1000, description="Missed heartbeats after which a daemon is presumed dead.")
    ] = 3


Driver = Annotated[str, Meta(min_length=1, max_length=255)]


class DeletionObjectStore(Section, frozen=True):
    """A store with offloaded ledgers that the daemon itself deletes; a table for each store.

    A record belongs to the store with its driver, and with its bucket if it names one. It reaches only stores with a
    table here. A local directory must already be a store, so that an unmounted one does not look empty.
    """

    name: Annotated[
        str, Meta(pattern=_NAME, extra=_A_NAME, description="Name of the store, for `tarry sweep`; required.")
    ]
    drivers: Annotated[
        tuple[Driver, ...],
        Meta(min_length=1, description="Drivers whose ledgers are in this store, such as `aws-s3`; required."),
    ]
    kind: Annotated[Literal["local", "s3"], Meta(description="A local directory, or S3.")] = "s3"
    path: Annotated[str, Meta(description="The local directory; required when `kind` is `local`.")] = ""
    s3: S3 = S3()


class DeletionOwner(Section, frozen=True):
    """An owner of ledgers that the daemon asks by HTTP (`docs/DELETION.md`); a table for each owner."""

    name: Annotated[str, Meta(pattern=_NAME, extra=_A_NAME, description="Name of the owner, for messages; required.")]
    topic_prefixes: Annotated[
        tuple[str, ...],
        Meta(
            description="Prefixes of the owner's topics. A topic belongs to the owner with the longest matching "
            "prefix; an empty prefix matches every topic."
        ),
    ] = ()
    drivers: Annotated[
        tuple[Driver, ...],
        Meta(
            description="Drivers whose offloaded ledgers the owner deletes itself, unless an object store above has "
            "them."
        ),
    ] = ()
    delete_url: (
        Annotated[
            str,
            Meta(
                pattern=URL,
                extra=_A_URL,
                description="URL at which the daemon asks the owner to delete a ledger. Default: none.",
            ),
        ]
        | None
    ) = None
    in_use_url: (
        Annotated[
            str,
            Meta(
                pattern=URL,
                extra=_A_URL,
                description="URL at which the daemon asks the owner for ledgers in use. Default: none.",
            ),
        ]
        | None
    ) = None
    authorization_file: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="File with the value of the `Authorization` header. The daemon reads it for each "
                "request, and sends it over https only.",
            ),
        ]
        | None
    ) = None
    insecure: Annotated[
        bool,
        Meta(
            description="Send the authorization over http too. Use it only if the network itself keeps strangers out."
        ),
    ] = False
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=300,
            description="Time to connect, then for the answer to begin, then for it to be complete, each.",
        ),
    ] = 10.0


class DeletionSettings(Section, frozen=True):
    """Deletion of ledgers and offloaded objects of other systems, in two phases (names of PIP-186).

    Without an object store or an owner, nothing is deleted: records are retried, and become dead letters.
    """

    two_phase_deletion_enabled: Annotated[
        bool, Meta(description="Record deletions. The policy of a topic may differ.")
    ] = True
    parallelism: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Attempts at the same time, each in its own thread. No other work waits for these threads.",
        ),
    ] = 4
    reconsume_later_seconds: Annotated[
        int, Meta(ge=1, le=30 * 86_400, description="Time from a failed attempt to the next.")
    ] = 600
    max_retry_delete_count: Annotated[
        int, Meta(ge=0, le=1000, description="Retries after the first attempt; then a record becomes a dead letter.")
    ] = 10
    jitter: Annotated[
        float,
        Meta(ge=0, le=0.5, description="Random part by which the time between attempts is longer or shorter, at most."),
    ] = 0.1
    pending_max: Annotated[
        int,
        Meta(ge=1, le=10_000_000, description="Records of all topics that are pending, held or dead letters, at most."),
    ] = 200_000
    in_use_max: Annotated[
        int,
        Meta(ge=1, le=100_000_000, description="Ledgers of all topics that owners state to be in use, at most."),
    ] = 1_000_000
    sweep_grace_s: Annotated[
        float,
        Meta(ge=0, le=365 * 86_400, description="Age from which on an unknown offloaded ledger is an orphan."),
    ] = 86_400.0
    guard_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="If orphans exceed this part of the listed bytes, they stay until `tarry sweep --force`.",
        ),
    ] = 0.2
    guard_bytes: Annotated[
        int, Meta(ge=0, description="Orphans of up to this many bytes are deleted, whatever part they are.")
    ] = 64 << 20
    object_stores: tuple[DeletionObjectStore, ...] = ()
    owners: tuple[DeletionOwner, ...] = ()
