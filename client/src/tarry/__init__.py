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
from tarry.policies import BucketForm, SubscriptionPolicy, TopicPolicy
from tarry.results import (
    AddResult,
    AlreadyDue,
    BucketPage,
    BucketSummary,
    Contained,
    EntryRanges,
    Page,
    RebuildNeeded,
    Sealed,
    SubscriptionCreated,
    SubscriptionPage,
    SubscriptionStats,
    TopicDeleted,
    TopicLocation,
    TopicPage,
    TopicPolicies,
    TopicStats,
    TopicSummary,
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
    "Batch",
    "BucketForm",
    "BucketPage",
    "BucketSummary",
    "Client",
    "Closed",
    "Contained",
    "DataLoss",
    "DeadlineExceeded",
    "EntryRanges",
    "Internal",
    "InvalidArgument",
    "Leased",
    "NotFound",
    "NotOwner",
    "OutOfRange",
    "OutcomeUnknown",
    "Page",
    "PermissionDenied",
    "RebuildNeeded",
    "ResourceExhausted",
    "RetryPolicy",
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
    "aio",
    "key_hash",
]
