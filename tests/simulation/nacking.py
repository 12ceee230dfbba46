"""The clients of redelivery in one run: they negatively acknowledge and reject, look after dead letters, and change
policies and delay levels, by the seed.

Owns: what is asked for when. Does not own: every other call (`workload`), and what answers must be
(`redelivery_promises`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from daemon.call_values import Nack
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.topic.open_streams import DispatchStream
from daemon.topic.open_streams import OpenStream as OpenDispatch
from storage_backends.formats import names
from storage_backends.formats.manifest import RedeliveryKind, RedeliveryPolicy, SubscriptionPolicy, TopicDelayLevels
from storage_backends.formats.schedule_ids import ScheduleIds
from tests._support.engine_fixture import Daemon
from tests._support.outcomes import Counts, counts_of, ignored_by
from tests.simulation.columns import has_ids, held_positions, ids_of
from tests.simulation.forwarding import Failed
from tests.simulation.history import History
from tests.simulation.oracle import Oracle, TopicTruth
from tests.simulation.positions import Position, in_index, is_part, named, owner_of, part_of
from tests.simulation.promises import Claim, OpenStream, Promises, Sent

if TYPE_CHECKING:
    from tests.simulation.workload import Clients

# So much of what a receiver does with what it holds is a negative acknowledgement, by topic.
SHARES = (0.0, 0.3, 0.6)
# How long positions are to wait, ms: (from, to).
DELAYS = ((0, 1), (0, 800), (300, 3_000), (2_000, 20_000))
# Messages of one entry.
BATCH = 4
LEVELS_TOP = 6
TABLES = ("1s 2s 4s 8s", "1s", "3s 1s 10s", "2s 2s 30s 1s 1s 1s")
POLICIES = (
    None,
    RedeliveryPolicy(kind=RedeliveryKind.CONSTANT, initial_ms=0),
    RedeliveryPolicy(kind=RedeliveryKind.CONSTANT, initial_ms=900),
    RedeliveryPolicy(kind=RedeliveryKind.LINEAR, initial_ms=100, step_ms=700, max_ms=4_000),
    RedeliveryPolicy(kind=RedeliveryKind.EXPONENTIAL, initial_ms=200, max_ms=9_000, multiplier=3.0),
    RedeliveryPolicy(kind=RedeliveryKind.EXPONENTIAL, initial_ms=500, max_ms=9_000, jitter=0.5),
    RedeliveryPolicy(kind=RedeliveryKind.LIST, delays_ms=(50, 2_000, 400)),
    RedeliveryPolicy(kind=RedeliveryKind.LADDER),
)
# In runs of so many seeds a subscription may have few dead letters, and few rows for positions that nobody added.
SEEDS_A_LIMIT = 4
TEXTS = ("", "no", "cannot be read: \N{SNOWMAN}")


def settings_of(seed: int) -> tuple[str, ...]:
    """How the daemons of a run are configured."""
    draw = random.Random(f"redelivery {seed}")
    limited = random.Random(f"limits of redelivery {seed}")
    limits = (
        f"limits.nacked_rows_per_subscription_max={limited.choice((2, 5, 1_000))}",
        f"limits.dead_letters_per_subscription_max={limited.choice((1, 4))}",
    )
    return (
        *(limits if limited.randrange(SEEDS_A_LIMIT) == 0 else ()),
        f"redelivery.delay_ms={draw.choice((0, 700, 5_000))}",
        f"redelivery.nack_precision_bits={draw.choice((0, 4, 8, 11))}",
        f"redelivery.delay_levels={draw.choice(TABLES)}",
        f"redelivery.clamp_delay_level={draw.choice(('true', 'false'))}",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class How:
    """When positions come back, by the call. `delays_ms`: of each; None: by policy, or by a level."""

    delays_ms: tuple[int, ...] | None = None
    levels: tuple[int, ...] | None = None
    reject: bool = False
    text: str = ""

    @staticmethod
    def drawn(draw: random.Random, count: int) -> How:
        kind = draw.choice(("delay", "delay", "policy", "policy", "policy", "level", "reject"))
        if kind == "delay":
            low_ms, high_ms = draw.choice(DELAYS)
            return How(delays_ms=tuple(draw.randrange(low_ms, high_ms) for _ in range(count)))
        if kind == "level":
            return How(levels=tuple(draw.randrange(LEVELS_TOP) for _ in range(count)))
        if kind == "reject":
            return How(reject=True, text=draw.choice(TEXTS))
        return How()


class Nacking:
    """The redeliveries of a run's clients. `share`: see `SHARES`; None: as the seed says."""

    def __init__(
        self,
        clients: Clients,
        oracle: Oracle,
        promises: Promises,
        history: History,
        seed: int,
        share: float | None,
    ) -> None:
        self._share = share
        self._clients = clients
        self._oracle = oracle
        self._promises = promises
        self._history = history
        self._seed = seed

    def share(self, topic: str) -> float:
        """See `SHARES`."""
        if self._share is not None:
            return self._share
        return random.Random(f"nacks of {topic} {self._seed}").choice(SHARES)

    def clients(self, topic: str) -> Mapping[str, Any]:
        """What goes on beside receiving: by name, work of a topic that takes a random generator."""
        if not self.share(topic):
            return {}
        working: dict[str, Any] = {
            "stranger": self._strangers,
            "undertaker": self._dead_letters,
            "policies": self._change_policies,
        }
        working["consumers"] = self._hand_back
        if random.Random(f"levels of {topic} {self._seed}").random() < 0.4:
            working["levels"] = self._change_levels
        return working

    # ---- what is held

    async def some_of(
        self,
        draw: random.Random,
        daemon: Daemon,
        view: OpenStream,
        name: str,
        stream: OpenDispatch | None,
        *,
        parts: bool = True,
    ) -> bool:
        """Of what a dispatcher holds: by its stream, None: it is leased; whether that was answered. `parts`: now and
        then one message of an entry.
        """
        held = list(view.held.items())
        claims = draw.sample(held, draw.randrange(1, min(len(held), 12) + 1))
        claims = self._claims(draw, claims, view.subscription_id) if parts else sorted(claims)
        for position, _ in claims:
            view.held.pop(position, None)
        return await self._nack(draw, daemon, view.topic, name, view.subscription_id, claims, view, stream)

    @staticmethod
    def _claims(draw: random.Random, held: Sequence[Claim], subscription_id: int) -> list[Claim]:
        """Now and then one message of an entry instead of the entry, and a time that is not the row's."""
        claims: dict[tuple[Position, int], Claim] = {}
        for position, deliver_at_ms in held:
            if not is_part(position) and draw.random() < 0.2:
                position = part_of(position[:2], draw.randrange(BATCH), subscription_id)
            if draw.random() < 0.03:
                deliver_at_ms += 1
            claims.setdefault(named(position), (position, deliver_at_ms))
        return sorted(claims.values())

    async def extend(self, draw: random.Random, daemon: Daemon, view: OpenStream, stream: DispatchStream) -> None:
        claims = draw.sample(list(view.held.items()), draw.randrange(1, len(view.held) + 1))
        ignored = await self._clients.call(
            daemon, ignored_by(stream.extend, held_positions(claims, view.counts_of(claims)))
        )
        if ignored is not None and ignored > len(claims):
            self._history.breach(f"{ignored} of {len(claims)} positions were ignored")

    # ---- what failed behind those who passed it on

    async def _hand_back(self, topic: str, draw: random.Random) -> None:
        """Late, by a call beside the streams, until it is answered."""
        output = self._promises.output
        while not self._clients.ended:
            await asyncio.sleep(draw.random() * 0.5)
            daemon = await self._clients.daemon(draw)
            failed = [] if daemon is None else output.some_failed(topic, draw)
            if daemon is None or not failed:
                continue
            number = failed[0].message.subscription_id
            stored = self._oracle.topic(topic).subscriptions.get(number)
            if stored is None or self._oracle.topic(topic).incarnation != failed[0].message.incarnation:
                continue
            claims = [(each.position, each.message.deliver_at_ms) for each in failed]
            if not await self._nack(draw, daemon, topic, stored.name, number, claims, None, None, failed):
                output.kept(failed)

    # ---- what was never handed out, or not to this client

    async def _strangers(self, topic: str, draw: random.Random) -> None:
        while not self._clients.ended:
            daemon = await self._clients.daemon(draw)
            if daemon is None:
                continue
            name = draw.choice("aab")
            truth = self._oracle.topic(topic)
            number = next((number for number, each in truth.subscriptions.items() if each.name == name), None)
            if number is not None:
                claims = self._strange_claims(draw, truth, number)
                await self._nack(draw, daemon, topic, name, number, claims, None, None)
            await asyncio.sleep(draw.random() * 4)

    def _strange_claims(self, draw: random.Random, truth: TopicTruth, number: int) -> list[Claim]:
        claims: list[Claim] = []
        for _ in range(draw.choice((1, 1, 3, 8))):
            entry = self._clients.entry(draw)
            kind = draw.random()
            if kind < 0.5:
                claims.append((in_index(entry, number), 0))
            elif kind < 0.75:
                claims.append((part_of(entry, draw.randrange(BATCH), number), 0))
            else:
                rows = sorted(position for position in truth.rows if owner_of(position) in (0, number))
                claims += [(each, truth.rows[each].deliver_at_ms) for each in draw.sample(rows, min(len(rows), 1))]
        return sorted({named(position): (position, time) for position, time in claims}.values())

    def _ids_of(self, claims: Sequence[Claim]) -> ScheduleIds | None:
        """The ids that claims of what is gone bring."""
        if not has_ids(self._seed):
            return None
        return ids_of([b"%d-%d again" % named(position)[0] for position, _ in claims])

    async def _nack(
        self,
        draw: random.Random,
        daemon: Daemon,
        topic: str,
        name: str,
        number: int,
        claims: Sequence[Claim],
        view: OpenStream | None,
        stream: OpenDispatch | None,
        failed: Sequence[Failed] = (),
    ) -> bool:
        """Whether it was answered. `failed`: what the claims are for, if they are late: they were passed on."""
        answered = False
        if not claims:
            return answered
        how = How.drawn(draw, len(claims))
        counts = [each.count for each in failed] if failed else None if view is None else view.counts_of(claims)
        nack = Nack(
            positions=held_positions(claims, counts),
            delay_ms=None if how.delays_ms is None else np.array(how.delays_ms, np.uint64),
            delay_level=None if how.levels is None else np.array(how.levels, np.int32),
            reject=how.reject,
            text=how.text,
            forwarded=bool(failed),
            # Of those that are gone: what they come back with.
            schedule_ids=self._ids_of(claims) if failed else None,
        )
        output = self._promises.output
        withdrawn = [output.withdrawn(each) for each in failed]
        for _ in range(draw.choice((1, 1, 2))):
            sent = self._promises.sending(daemon, topic)
            # Of a level nobody knows here what it means.
            delays_ms = (0,) * len(claims) if how.levels is not None else how.delays_ms
            asked = self._promises.redeliveries.sending_nack(
                sent,
                number,
                claims,
                delays_ms=delays_ms,
                reject=how.reject,
                at_least=how.levels is not None,
                counts=counts,
                forwarded=bool(failed),
            )
            if asked is None:
                return answered
            calling: Coroutine[Any, Any, Counts]
            if stream is not None:
                calling = counts_of(stream.negative_acknowledge, nack)
            else:
                calling = counts_of(daemon.engine.requests.negative_acknowledge, topic, name, nack)
            outcome = await self._clients.call(daemon, calling)
            if outcome is not None:
                answered = True
                self._history.note(f"{daemon.name} nack {topic} {name} {claims} {how} -> {outcome}")
                shard = names.shard_of(topic, daemon.engine._shards_total)
                served = daemon.shards.get(shard)
                epoch = view.epoch if view is not None and stream is not None else 0 if served is None else served.epoch
                self._promises.redeliveries.nack_answered(asked, shard, epoch, outcome, view)
                if outcome == Counts(0, 0):
                    for each, times in zip(failed, withdrawn, strict=True):
                        output.handed_back(each, times)
            again = await self._clients.daemon(draw)
            if again is None or draw.random() < 0.5:
                break
            daemon, stream = again, None
        return answered

    # ---- dead letters

    async def _dead_letters(self, topic: str, draw: random.Random) -> None:
        await asyncio.sleep(draw.random() * 5)
        while not self._clients.ended:
            daemon = await self._clients.daemon(draw)
            if daemon is None:
                continue
            name = draw.choice("aab")
            asked = self._filter(draw, topic, name)
            kind = draw.choice(("list", "list", "replay", "replay", "purge"))
            if kind == "list":
                await self._list(draw, daemon, topic, name, asked)
            elif kind == "replay":
                await self._replay(draw, daemon, topic, name, asked)
            else:
                await self._purge(daemon, topic, name, asked)
            await asyncio.sleep(draw.random() * 5)

    def _filter(self, draw: random.Random, topic: str, name: str) -> DeadLetterFilter:
        truth = self._oracle.topic(topic)
        known = [
            letter
            for number, stored in truth.subscriptions.items()
            if stored.name == name
            for letter in truth.redeliveries.dead_letters.get(number, {}).values()
        ]
        kind = draw.random()
        if not known or kind < 0.4:
            return DeadLetterFilter()
        letter = draw.choice(known)
        if kind < 0.6:
            return DeadLetterFilter(ids=np.array([letter.dead_letter_id], np.uint64))
        if kind < 0.8:
            return DeadLetterFilter(ledgers=(letter.position[0], letter.position[0]), reason=letter.reason)
        if kind < 0.9:
            return DeadLetterFilter(from_ms=letter.dead_at_ms)
        return DeadLetterFilter(until_ms=letter.dead_at_ms)

    def _sent(self, daemon: Daemon, topic: str) -> Sent:
        return self._promises.sending(daemon, topic)

    async def _list(self, draw: random.Random, daemon: Daemon, topic: str, name: str, asked: DeadLetterFilter) -> None:
        sent = self._promises.redeliveries.sending_letters(self._sent(daemon, topic), name, asked)
        if sent is None:
            return
        size = draw.choice((1, 3, 500))
        page = await self._clients.call(daemon, daemon.engine.requests.list_dead_letters(topic, name, asked, size, 0))
        if page is not None:
            self._history.note(f"{daemon.name} lists {len(page.rows)} dead letters of {topic} {name}")
            self._promises.redeliveries.letters_listed(sent, page.rows, whole=page.next_after is None)

    async def _replay(
        self, draw: random.Random, daemon: Daemon, topic: str, name: str, asked: DeadLetterFilter
    ) -> None:
        sent = self._promises.redeliveries.sending_letters(self._sent(daemon, topic), name, asked, replays=True)
        if sent is None:
            return
        delay_ms = draw.choice((0, 0, 1_500, 15_000))
        answer = await self._clients.call(
            daemon, daemon.engine.requests.replay_dead_letters(topic, name, asked, delay_ms)
        )
        if answer is not None:
            self._history.note(f"{daemon.name} replays of {topic} {name} -> {answer}")
            self._promises.redeliveries.replayed(sent, answer)

    async def _purge(self, daemon: Daemon, topic: str, name: str, asked: DeadLetterFilter) -> None:
        sent = self._promises.redeliveries.sending_letters(self._sent(daemon, topic), name, asked, replays=False)
        if sent is None:
            return
        letters = await self._clients.call(daemon, daemon.engine.requests.purge_dead_letters(topic, name, asked))
        if letters is not None:
            self._history.note(f"{daemon.name} purges of {topic} {name} -> {letters}")
            self._promises.redeliveries.purged(sent, letters)

    # ---- policies and levels

    async def _change_policies(self, topic: str, draw: random.Random) -> None:
        while not self._clients.ended:
            daemon = await self._clients.daemon(draw)
            if daemon is None:
                continue
            policy = SubscriptionPolicy(
                redelivery=draw.choice(POLICIES),
                max_redeliver_count=draw.choice((None, None, 0, 1, 3)),
                ack_timeout_ms=draw.choice((None, None, None, 400, 4_000)),
                nack_precision_bits=draw.choice((None, 0, 3, 8, 12)),
            )
            name = draw.choice("aab")
            properties = self._oracle.objects.properties.of(policy)
            changing = daemon.engine.requests.update_subscription(topic, name, policy, properties)
            await self._clients.call(daemon, changing)
            await asyncio.sleep(draw.random() * 15)

    async def _change_levels(self, topic: str, draw: random.Random) -> None:
        while not self._clients.ended:
            daemon = await self._clients.daemon(draw)
            if daemon is None:
                continue
            table = TopicDelayLevels(table=draw.choice(TABLES), clamp=draw.random() < 0.8)
            setting = daemon.engine.requests.set_delay_levels(topic, table if draw.random() < 0.8 else None)
            await self._clients.call(daemon, setting)
            await asyncio.sleep(draw.random() * 15)
