"""What the log says while the store does not take what is tried again and again.

Owns: that many who wait for one store say it together, at a bearable rate.
Does not own: trying again (`daemon.runtime.backoff`), health (`engine`), and metrics, which count each attempt.
"""

from __future__ import annotations

import dataclasses
import logging

log = logging.getLogger(__name__)

# One line about one kind of work in so long.
SAY_AGAIN_S = 30.0


@dataclasses.dataclass(slots=True)
class _Said:
    at_s: float
    unsaid: int = 0


class Outages:
    """Says in the log what fails in one daemon and is tried again, at a bearable rate."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}

    def tell(self, what: str, whose: str, error: Exception, *, now_s: float) -> None:
        """`what`: the kind of work that failed and is tried again; `now_s`: by a clock that never steps."""
        said = self._said.get(what)
        if said is not None and now_s - said.at_s < SAY_AGAIN_S:
            said.unsaid += 1
            return
        unsaid = 0 if said is None else said.unsaid
        self._said[what] = _Said(now_s)
        more = f"; {unsaid} failures since this was said last" if unsaid else ""
        log.warning("%s, trying again: %s: %s%s", what, whose, error, more)
