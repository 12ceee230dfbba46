"""Client of Tarry, the scheduling daemon for delayed positions.

Owns: the generated wire types (`tarry.v1`), the client library over them, for threads and for an event loop
(`tarry.aio`), and the `tarry` command (extra `cli`).

Does not own: anything of the daemon; this package lives in other people's environments.
"""

from tarry import aio
from tarry.add_stream import AddStream
from tarry.batch import Batch, Leased
from tarry.client import DEFAULT_TARGET, Client
from tarry.errors import (
    Aborted,
    AlreadyExists,
    Closed,
    DataLoss,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    NotOwner,
    OutcomeUnknown,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    TarryError,
    Unauthenticated,
    Unavailable,
)
from tarry.hashing import key_hash
from tarry.inspection import (
    BacklogPage,
    BacklogState,
    BucketPage,
    BucketSummary,
    Histogram,
    Page,
    RowsPage,
    ScheduledPage,
    SubscriptionPage,
    SubscriptionStats,
    TopicPage,
    TopicStats,
    TopicSummary,
)
from tarry.policies import BucketForm, SubscriptionPolicy, TopicPolicy
from tarry.results import (
    AddResult,
    AlreadyDue,
    Cancelled,
    Contained,
    EntryRanges,
    Garbage,
    GarbageCount,
    Merged,
    RebuildNeeded,
    Rescheduled,
    Sealed,
    SubscriptionCreated,
    TopicDeleted,
    TopicLocation,
    TopicPolicies,
    Withdrawn,
)
from tarry.retry import RetryPolicy
from tarry.subscription import Subscription

__all__ = [
    "DEFAULT_TARGET",
    "Aborted",
    "AddResult",
    "AddStream",
    "AlreadyDue",
    "AlreadyExists",
    "BacklogPage",
    "BacklogState",
    "Batch",
    "BucketForm",
    "BucketPage",
    "BucketSummary",
    "Cancelled",
    "Client",
    "Closed",
    "Contained",
    "DataLoss",
    "DeadlineExceeded",
    "EntryRanges",
    "Garbage",
    "GarbageCount",
    "Histogram",
    "Internal",
    "InvalidArgument",
    "Leased",
    "Merged",
    "NotFound",
    "NotOwner",
    "OutOfRange",
    "OutcomeUnknown",
    "Page",
    "PermissionDenied",
    "RebuildNeeded",
    "Rescheduled",
    "ResourceExhausted",
    "RetryPolicy",
    "RowsPage",
    "ScheduledPage",
    "Sealed",
    "Subscription",
    "SubscriptionCreated",
    "SubscriptionPage",
    "SubscriptionPolicy",
    "SubscriptionStats",
    "TarryError",
    "TopicDeleted",
    "TopicLocation",
    "TopicPage",
    "TopicPolicies",
    "TopicPolicy",
    "TopicStats",
    "TopicSummary",
    "Unauthenticated",
    "Unavailable",
    "Withdrawn",
    "aio",
    "key_hash",
]
