"""What the clients of a daemon that died say of the positions that it handed out, as soon as the next one serves."""

from __future__ import annotations

import numpy as np

from daemon.call_values import Nack
from daemon.core.decisions.claims import HeldPositions
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.outcomes import Counts, counts_of, ignored_by

# More than are passed at once.
ROWS = 60_000
ADD_ROWS = 10_000
CLAIMED_ROWS = 1_000


async def restarted(machines: EngineFixture) -> tuple[Daemon, HeldPositions]:
    """A daemon that serves again, and the last positions that it handed out before."""
    one = await machines.served_by()
    for first in range(0, ROWS, ADD_ROWS):
        await one.add("t", 1, range(first, first + ADD_ROWS))
    receiver = await one.receiver("t")
    rows = (await receiver.received(ROWS))[-CLAIMED_ROWS:]
    one.kill()
    two = await machines.daemon().start()
    await two.until(lambda: two.engine.health.serving)
    ledger_id, entry_id, deliver_at_ms = np.array(rows, np.uint64).T.copy()
    return two, HeldPositions(ledger_id, entry_id, deliver_at_ms)


async def test_what_the_former_owner_handed_out_is_acknowledged_before_the_head_has_passed_it(
    machines: EngineFixture,
) -> None:
    two, held = await restarted(machines)
    assert await two.call(ignored_by(two.engine.requests.acknowledge, "t", "s", held)) == 0


async def test_what_the_former_owner_handed_out_is_nacked_before_the_head_has_passed_it(
    machines: EngineFixture,
) -> None:
    two, held = await restarted(machines)
    nack = Nack(held, delay_ms=np.full(len(held), 60_000, np.uint64))
    assert await two.call(counts_of(two.engine.requests.negative_acknowledge, "t", "s", nack)) == Counts(0, 0)
    assert two.topic("t").subscription("s").nacks.keys
