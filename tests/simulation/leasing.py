"""The clients of one run that lease what is due, and acknowledge it, have it come back later, or keep it longer.

Owns: what is leased when. Does not own: streams (`workload`), and what answers must be (`promises`).
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from storage_backends.formats import names
from tests._support.engine_fixture import Daemon
from tests._support.outcomes import ignored_by
from tests.simulation.columns import handed_of, held_positions
from tests.simulation.history import History
from tests.simulation.nacking import Nacking
from tests.simulation.oracle import Oracle
from tests.simulation.promises import OpenStream, Promises

if TYPE_CHECKING:
    from tests.simulation.workload import Clients


class Leasing:
    """The leases of a run's clients."""

    def __init__(
        self, clients: Clients, nacking: Nacking, oracle: Oracle, promises: Promises, history: History
    ) -> None:
        self._clients = clients
        self._nacking = nacking
        self._oracle = oracle
        self._promises = promises
        self._history = history

    async def pull(self, topic: str, draw: random.Random) -> None:
        while not self._clients.ended:
            daemon = await self._clients.daemon(draw)
            if daemon is None:
                continue
            lease_ms = draw.choice((300, 2_000, 20_000))
            view = await self._clients.call(daemon, self._get(daemon, topic, draw.choice("ab"), lease_ms, draw))
            if view is None:
                await asyncio.sleep(draw.random() * 4)
                continue
            if view.held and draw.random() < 0.4:
                await self._extend(draw, daemon, view)
            if view.held and draw.random() < self._nacking.share(topic):
                await self._nacking.some_of(draw, daemon, view, self._clients.name_of(view), None)
            elif draw.random() < 0.8:
                await self._acknowledge(draw, daemon, view)
            await asyncio.sleep(draw.random() * 3)

    async def _get(
        self, daemon: Daemon, topic: str, subscription: str, lease_ms: int, draw: random.Random
    ) -> OpenStream | None:
        """Runs in the daemon's process: what is handed out counts from that moment on."""
        wait_ms = draw.choice((0, 100, 5_000))
        leased = await daemon.engine.requests.get_scheduled(
            topic, subscription, max_rows=draw.choice((1, 4, 100)), lease_ms=lease_ms, wait_ms=wait_ms
        )
        truth = self._oracle.topic(topic)
        number = next((number for number, each in truth.subscriptions.items() if each.name == subscription), None)
        if number is None:
            return None
        shard = names.shard_of(topic, daemon.engine._shards_total)
        view = OpenStream(daemon, topic, shard, number, leased.handed_out.epoch)
        view.ends_s = daemon.elapsed_s() + lease_ms / 1000
        taken = handed_of(leased.handed_out, number)
        self._history.note(f"{daemon.name} leases {topic} {subscription} {taken}")
        self._promises.handed_out(view, taken, leased.handed_out.rows.listed_ids())
        return view

    async def _extend(self, draw: random.Random, daemon: Daemon, view: OpenStream) -> None:
        claims = held_positions(view.held.items(), view.counts_of(view.held.items()))
        lease_ms = draw.choice((0, 500, 5_000))
        sent_s = view.ends_s = daemon.elapsed_s()
        extend, name = daemon.engine.requests.extend_lease, self._clients.name_of(view)
        ignored = await self._clients.call(daemon, ignored_by(extend, view.topic, name, claims, lease_ms))
        if ignored == 0 and lease_ms:
            view.ends_s = sent_s + lease_ms / 1000

    async def _acknowledge(self, draw: random.Random, daemon: Daemon, view: OpenStream) -> None:
        claims = sorted(draw.sample(sorted(view.held.items()), draw.randrange(len(view.held) + 1)))
        if not claims:
            return
        sent = self._promises.sending_acknowledgement(view, claims)
        acknowledge, name = daemon.engine.requests.acknowledge, self._clients.name_of(view)
        positions = held_positions(claims, sent.counts)
        ignored = await self._clients.call(daemon, ignored_by(acknowledge, view.topic, name, positions))
        if ignored is not None:
            self._history.note(f"{daemon.name} acknowledged {view.topic} {view.subscription_id} {claims} -> {ignored}")
            self._promises.acknowledgement_answered(view, sent, claims, ignored)
