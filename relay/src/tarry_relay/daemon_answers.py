"""Interprets the failures of calls to Tarry: what each means for its request, and whether it is temporary."""

from __future__ import annotations

from collections.abc import Mapping

import tarry
from tarry_relay import port
from tarry_relay.port import Cause, Meaning, Meant

TABLE: Mapping[type[tarry.TarryError], Meant] = {
    # The request itself is wrong and will be wrong again.
    tarry.InvalidArgument: Meant(Meaning.REFUSED),
    tarry.OutOfRange: Meant(Meaning.REFUSED),
    tarry.ResourceExhausted: Meant(Meaning.NOT_NOW, Cause.LIMIT),
    tarry.PermissionDenied: Meant(Meaning.NOT_NOW, Cause.LIMIT),
    tarry.Unauthenticated: Meant(Meaning.NOT_NOW, Cause.LIMIT),
    tarry.Aborted: Meant(Meaning.NOT_NOW),
    tarry.NotOwner: Meant(Meaning.NOT_NOW),
    tarry.DataLoss: Meant(Meaning.NOT_NOW),
    tarry.Unavailable: Meant(Meaning.UNKNOWN),
    tarry.DeadlineExceeded: Meant(Meaning.UNKNOWN),
    tarry.OutcomeUnknown: Meant(Meaning.UNKNOWN),
    tarry.Internal: Meant(Meaning.UNKNOWN),
}
"""Failures of one call. Any other one, such as a deleted topic or subscription, a feature that the daemon lacks, or a
closed client, ends the session.
"""


def meant(error: BaseException) -> Meant | None:
    """Return what a failure means, or None if the table does not have it."""
    for kind in type(error).__mro__:
        if (found := TABLE.get(kind)) is not None:
            return found
    return None


def passes(error: BaseException) -> bool:
    """Return whether another try may fix a failure of either end. It does not fix `Internal`, which is a bug."""
    if isinstance(error, port.Unreachable):
        return True
    found = meant(error)
    return found is not None and found.meaning is not Meaning.REFUSED and not isinstance(error, tarry.Internal)
