"""Every setting of the daemon, declared once: name, unit in the name, default, range and meaning.

Owns: the sections of the configuration.
Does not own: how they are read and which contradict each other (`daemon.config`), what they do, and
docs/CONFIGURATION.md, which is made from this module (`scripts/gen_configuration.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from daemon.core.index.delay_levels import DEFAULT_TABLE
from storage_backends.storage_settings import S3, WRITTEN_AS, Section

ADDRESS = r"^.+:[0-9]{1,5}\Z"
# Without credentials, which would end up in logs, and without a fragment.
URL = r"^https?://[^\s/?#@]+(?:[/?][^\s#]*)?\Z"

# What a name may be that people give to something here.
_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z"

_AN_ADDRESS = {WRITTEN_AS: "host:port with a port from 0 to 65535, such as 127.0.0.1:7461"}
_A_URL = {WRITTEN_AS: "a URL that begins with http:// or https://, without user, password and fragment"}
_A_NAME = {WRITTEN_AS: "1 to 128 letters, digits, `.`, `_` and `-`, and not begin with `.`"}

_ABSOLUTE = r"^/[^\x00]{0,102}\Z"
_AN_ABSOLUTE_PATH = {WRITTEN_AS: "an absolute path of at most 103 characters, which is what a socket's name may have"}

# 10,000 rows of Messages, the largest answer there is, must fit.
_MESSAGE_BYTES_LEAST = 1 << 20


class Daemon(Section, frozen=True):
    """Who this daemon is."""

    id: (
        Annotated[
            str,
            Meta(
                pattern=_NAME,
                extra=_A_NAME,
                description="Names this daemon among those that share a root; letters, digits, `.`, `_` and `-`. The "
                "id must stay the same over restarts: a daemon takes its own shards back at once. No two daemons may "
                "use one id at a time. Default: host name and port of `grpc.listen`. Set the id where the host name "
                "changes with every start (containers) and where the port is 0.",
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
                description="host:port at which clients and other daemons reach this daemon. Default: the address that "
                "is bound, with the host name in place of `0.0.0.0` and `[::]`.",
            ),
        ]
        | None
    ) = None
    insecure: Annotated[
        bool,
        Meta(
            description="Allow `grpc.listen` and `metrics.listen` on an address that is not loopback without TLS and "
            "identities, where the network itself keeps strangers out.",
        ),
    ] = False
    drain_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Time for an orderly end: what is staged becomes durable, seals that are under way end, "
            "checkpoints are written, shards are given up. After this time, or at a second signal, the daemon ends "
            "with status 3 and says what was left.",
        ),
    ] = 30.0
    shards: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Shards of a new root. A shard has one owner and its checkpoints. An existing "
            "root keeps its number.",
        ),
    ] = 16


class Grpc(Section, frozen=True):
    """The gRPC server."""

    listen: Annotated[
        str,
        Meta(pattern=ADDRESS, extra=_AN_ADDRESS, description="host:port; port 0 takes a free one. IPv6: `[::1]:7461`."),
    ] = "127.0.0.1:7461"
    unix_socket: (
        Annotated[
            str,
            Meta(
                pattern=_ABSOLUTE,
                extra=_AN_ABSOLUTE_PATH,
                description="Path of a Unix socket on which the daemon listens as well, without TLS, for clients of "
                "its own user on its own machine: their address is `unix:` and the path. A socket that is there is "
                "replaced: no two daemons may name one path. Default: none.",
            ),
        ]
        | None
    ) = None
    concurrent_calls_per_connection_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Calls and streams that one connection may have open.")
    ] = 1000
    stream_requests_in_flight_max: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="The daemon stops reading a stream that has more unanswered requests than this.",
        ),
    ] = 256
    stream_bytes_in_flight_max: Annotated[
        int,
        Meta(
            ge=1, description="The daemon stops reading a stream whose unanswered requests have more bytes than this."
        ),
    ] = 32 << 20
    keepalive_time_s: Annotated[
        float, Meta(ge=1, le=7200, description="The daemon probes a connection after so long a silence.")
    ] = 30.0
    keepalive_timeout_s: Annotated[
        float,
        Meta(ge=1, le=600, description="The daemon closes a connection that has not answered the probe for so long."),
    ] = 10.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="At shutdown open calls have so long to end by themselves; then they are cancelled.",
        ),
    ] = 5.0


class Metrics(Section, frozen=True):
    """The Prometheus endpoint."""

    listen: Annotated[
        str, Meta(pattern=ADDRESS, extra=_AN_ADDRESS, description="host:port of `/metrics`; port 0 takes a free one.")
    ] = "127.0.0.1:7462"
    tls: Annotated[
        bool, Meta(description="Serve HTTPS with the certificate and key of section `tls`, and nothing else.")
    ] = False
    tokens: Annotated[
        bool,
        Meta(
            description="A scrape needs the bearer token of an identity (`access.identities_file`) with scope "
            '`inspect` and topic prefix `""`.'
        ),
    ] = False
    per_topic: Annotated[
        bool, Meta(description='Each topic has its own series. If false, all topics are counted under `topic="_all"`.')
    ] = True
    per_topic_max: Annotated[
        int,
        Meta(
            ge=0, le=1_000_000, description='Topics that have series of their own; all others share `topic="_other"`.'
        ),
    ] = 1000


class Tls(Section, frozen=True):
    """TLS of the gRPC server, and of the metrics where `metrics.tls` is set. The files are PEM.

    They are read again when they change; connections stay. Files that are wrong then change nothing.
    """

    cert_file: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="Certificate of the daemon with its chain; its names are those by which clients and other "
                "daemons reach it. Default: no TLS.",
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
                description="Certificates of the CAs of clients. If set, each client needs a certificate of one of "
                "them (mutual TLS), those that ask for health too. Default: none needs one.",
            ),
        ]
        | None
    ) = None


class Access(Section, frozen=True):
    """Who may do what ([SECURITY.md](SECURITY.md))."""

    identities_file: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="TOML file of the identities: their tokens and certificates, scopes and topic prefixes. "
                "It is read again when it changes; replace it in one step, by renaming. Default: whoever reaches the "
                "port may do everything.",
            ),
        ]
        | None
    ) = None
    reflection: (
        Annotated[
            bool,
            Meta(
                description="gRPC reflection, which anybody may ask. Default: true where there are no identities, "
                "else false."
            ),
        ]
        | None
    ) = None
    audit_file: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="File to which the audit log is appended, one JSON object a line. The file is opened again "
                "when it was moved away. Default: the daemon's log where there are identities, else no audit log.",
            ),
        ]
        | None
    ) = None


class Log(Section, frozen=True):
    """The log, on standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The lowest level that is written.")
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
                description="How long a slot of the log waits for more decisions to join it, at most. It waits only "
                "while others come, and not longer than the slot before it took; acknowledgements alone not longer "
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
            description="Slots of the log leave at most this often: every one is a request to S3, and costs money. "
            "Answers come later by as much. 0: as soon as they can.",
        ),
    ] = 0
    slot_bytes_max: Annotated[
        int, Meta(ge=64 << 10, le=64 << 20, description="What one shard has in a slot of the log, at most.")
    ] = 8 << 20
    checkpoint_bytes: Annotated[
        int, Meta(ge=64 << 10, description="Bytes in the log after which a shard writes a checkpoint.")
    ] = 64 << 20
    checkpoint_slots: Annotated[
        int,
        Meta(
            ge=1,
            description="Slots of the log with something of a shard after which it writes a checkpoint. A restart "
            "reads the log from the oldest checkpoint on, so shards take turns sooner than that where it would take "
            "long.",
        ),
    ] = 10_000


class Delivery(Section, frozen=True):
    """Loading ahead and handing out."""

    tick_ms: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=500,
                description="Hand-outs are batched by this time: a row may come later by as much, never earlier. "
                "Default: 5, and while the daemon has much to do 10 or 15; while it comes to rows later than that, 25 "
                "or 50.",
            ),
        ]
        | None
    ) = None
    lookahead_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="A segment is loaded so long before its first row is due.")
    ] = 30_000
    segment_memory_bytes: Annotated[int, Meta(ge=1 << 20, description="Memory for loaded segments of all topics.")] = (
        256 << 20
    )
    ready_rows_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Due rows of a subscription that wait in memory for permits, at most; further rows stay in "
            "their buckets.",
        ),
    ] = 200_000


class Redelivery(Section, frozen=True):
    """When negatively acknowledged positions come back, and the delay levels of topics without a table of their own."""

    delay_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Delay of a negative acknowledgement where neither the call nor the subscription's policy has "
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
        bool, Meta(description="A level above the last one counts as the last one. If false, it is refused.")
    ] = True


class Limits(Section, frozen=True):
    """What a request may ask for. A refused request changes nothing."""

    rows_per_request_max: Annotated[int, Meta(ge=1, le=10_000_000, description="Rows of one request, at most.")] = (
        100_000
    )
    message_bytes_max: Annotated[
        int, Meta(ge=_MESSAGE_BYTES_LEAST, le=1 << 30, description="Bytes of one request, at most.")
    ] = 16 << 20
    topic_bytes_max: Annotated[int, Meta(ge=1, le=65_535, description="Bytes of a topic's name in UTF-8.")] = 1024
    subscription_bytes_max: Annotated[int, Meta(ge=1, le=65_535, description="Bytes of a subscription's name.")] = 255
    delay_max_ms: Annotated[int, Meta(ge=1, le=1 << 53, description="The longest delay of a row.")] = (
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
            description="Rows of one topic that may come due within one second, as a guard against a burst that is "
            "planned by accident; 0: no limit. The policy of a topic may set another limit.",
        ),
    ] = 0
    client_rows_per_second_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Rows that one client may add to one topic in a second; 0: no limit. A client is all callers "
            "that send one `tarry-client-id`, or else one calling host. The policy of a topic may set another limit.",
        ),
    ] = 0
    client_bytes_per_second_max: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 53,
            description="Bytes of requests with which one client may add to one topic in a second; 0: no limit. The "
            "policy of a topic may set another limit.",
        ),
    ] = 0


class Ownership(Section, frozen=True):
    """How daemons that share a root watch each other."""

    heartbeat_interval_s: Annotated[float, Meta(gt=0, le=60, description="Time between two heartbeats.")] = 3.0
    misses_max: Annotated[
        int, Meta(ge=2, le=1000, description="A daemon that has missed so many heartbeats is taken to be gone.")
    ] = 3


Driver = Annotated[str, Meta(min_length=1, max_length=255)]


class DeletionObjectStore(Section, frozen=True):
    """A store with offloaded ledgers, which the daemon deletes itself; a table for each store.

    A record belongs to the store that has its driver, and its bucket if it names one. A record reaches only stores that
    have a table here. A local directory must be a store already, so that an unmounted one is not taken for empty.
    """

    name: Annotated[
        str, Meta(pattern=_NAME, extra=_A_NAME, description="Names the store, for `tarry sweep`; required.")
    ]
    drivers: Annotated[
        tuple[Driver, ...],
        Meta(min_length=1, description="Names of drivers whose ledgers are here, such as `aws-s3`; required."),
    ]
    kind: Annotated[Literal["local", "s3"], Meta(description="A local directory, or S3.")] = "s3"
    path: Annotated[str, Meta(description="The local directory; required when `kind` is `local`.")] = ""
    s3: S3 = S3()


class DeletionOwner(Section, frozen=True):
    """An owner of ledgers, which the daemon asks by HTTP (`docs/DELETION.md`); a table for each owner."""

    name: Annotated[str, Meta(pattern=_NAME, extra=_A_NAME, description="Names the owner, in messages; required.")]
    topic_prefixes: Annotated[
        tuple[str, ...],
        Meta(
            description="Prefixes of the owner's topics. A topic belongs to the owner with the longest prefix that "
            "fits; an empty prefix fits every topic."
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
                description="URL at which the owner is told to delete a ledger. Default: none.",
            ),
        ]
        | None
    ) = None
    in_use_url: (
        Annotated[
            str,
            Meta(
                pattern=URL, extra=_A_URL, description="URL at which the owner is asked what is in use. Default: none."
            ),
        ]
        | None
    ) = None
    authorization_file: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="File with the value of the `Authorization` header; it is read for each request, and goes "
                "over https only.",
            ),
        ]
        | None
    ) = None
    insecure: Annotated[
        bool,
        Meta(description="Send the authorization over http too, where the network itself keeps strangers out."),
    ] = False
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=300,
            description="Time to connect, again until the answer begins, and again until the answer is whole.",
        ),
    ] = 10.0


class Deletion(Section, frozen=True):
    """Deletion of ledgers and offloaded objects of other systems, in two phases (names of PIP-186).

    Without an object store or an owner nothing is deleted: records are retried, and become dead letters.
    """

    two_phase_deletion_enabled: Annotated[
        bool, Meta(description="Whether deletions are recorded. The policy of a topic may say otherwise.")
    ] = True
    parallelism: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Attempts at the same time, each in its own thread. Nothing else waits for these threads.",
        ),
    ] = 4
    reconsume_later_seconds: Annotated[
        int, Meta(ge=1, le=30 * 86_400, description="Time from a failed attempt to the next.")
    ] = 600
    max_retry_delete_count: Annotated[
        int, Meta(ge=0, le=1000, description="Retries after the first attempt; then a record is a dead letter.")
    ] = 10
    jitter: Annotated[
        float,
        Meta(ge=0, le=0.5, description="The time between attempts is longer or shorter by up to this part of it."),
    ] = 0.1
    pending_max: Annotated[
        int,
        Meta(ge=1, le=10_000_000, description="Records of all topics that are pending, held or dead letters, at most."),
    ] = 200_000
    in_use_max: Annotated[
        int,
        Meta(ge=1, le=100_000_000, description="Ledgers of all topics that their owners state to be in use, at most."),
    ] = 1_000_000
    sweep_grace_s: Annotated[
        float,
        Meta(ge=0, le=365 * 86_400, description="An offloaded ledger that nobody knows is an orphan from this age on."),
    ] = 86_400.0
    guard_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Orphans that are more than this part of the listed bytes stay until `tarry sweep --force`.",
        ),
    ] = 0.2
    guard_bytes: Annotated[
        int, Meta(ge=0, description="Orphans of up to so many bytes are deleted whatever part they are.")
    ] = 64 << 20
    object_stores: tuple[DeletionObjectStore, ...] = ()
    owners: tuple[DeletionOwner, ...] = ()
