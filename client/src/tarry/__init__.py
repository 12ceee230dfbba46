"""Client of Tarry, the scheduling daemon for delayed positions.

Owns: the generated wire types (`tarry.v1`), the client library over them, and the `tarry` command (extra `cli`).

Does not own: anything of the daemon; this package lives in other people's environments.
"""

from tarry.add_stream import AddStream
from tarry.batch import Batch
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
from tarry.results import AddResult, AlreadyDue, SubscriptionCreated, SubscriptionStats, TopicStats, TopicSummary
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
    "Client",
    "Closed",
    "DataLoss",
    "DeadlineExceeded",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "NotOwner",
    "OutOfRange",
    "OutcomeUnknown",
    "PermissionDenied",
    "ResourceExhausted",
    "RetryPolicy",
    "Subscription",
    "SubscriptionCreated",
    "SubscriptionStats",
    "TarryError",
    "TopicStats",
    "TopicSummary",
    "Unauthenticated",
    "Unavailable",
    "key_hash",
]
