"""Says what each failure of a call to Tarry means for the request, and whether it passes by itself."""

from __future__ import annotations

from collections.abc import Mapping

import tarry
from tarry_relay import port
from tarry_relay.port import Cause, Meaning, Meant

TABLE: Mapping[type[tarry.TarryError], Meant] = {
    # It names what is wrong with the request, so it will be wrong again.
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
"""Failures that concern one call. Any other one, such as a topic or subscription that was deleted meanwhile, a feature
that the daemon lacks, or a client that is closed, ends the session.
"""


def meant(error: BaseException) -> Meant | None:
    """Return what a failure means; None if the table does not have it."""
    for kind in type(error).__mro__:
        if (found := TABLE.get(kind)) is not None:
            return found
    return None


def passes(error: BaseException) -> bool:
    """Say whether another try may cure a failure of either end. It does not cure `Internal`, which is a bug."""
    if isinstance(error, port.Unreachable):
        return True
    found = meant(error)
    return found is not None and found.meaning is not Meaning.REFUSED and not isinstance(error, tarry.Internal)
