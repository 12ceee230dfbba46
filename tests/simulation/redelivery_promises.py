"""What a daemon promises of redeliveries, held against the truth at the moment of the answer or the hand-out.

Owns: the rules for answers to negative acknowledgements, for lists, replays and purges of dead letters, and for when
and with which count a position comes back.
Does not own: the truth (`oracle`, `redelivery_truth`), every other promise (`promises`), the calls (`nacking`).

A position does not come back before its time by the clock of the daemon that hands it out, if that is the one that
decided. A later owner may have taken over from one by whose clock the time had come; so then it counts whether it had
by any clock. A former owner that has not heard of a negative acknowledgement hands out as before, for as long as it
may hand out at all: the answer waits for that, and after the answer nobody does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from daemon.call_values import Replayed
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter, DeadLetterRows
from daemon.core.decisions import redelivery_policy
from daemon.settings import RedeliverySettings
from storage_backends.formats.manifest import RedeliveryKind, RedeliveryPolicy, SubscriptionPolicy
from tests._support.outcomes import Counts
from tests.simulation.history import History
from tests.simulation.oracle import Oracle, Row
from tests.simulation.positions import Position, entry_of, in_index, is_part, named
from tests.simulation.redelivery_truth import DeadLetter, Leaving

if TYPE_CHECKING:
    from tests.simulation.promises import Claim, OpenStream, Promises, Sent

# More than any delay.
NEVER_MS = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NackSent:
    """A negative acknowledgement under way. `delays_ms`: of each claim, None: by policy; `at_least`: or longer.
    `sent_ms`, `sent_s`: the daemon's clocks, the one on the wall and the one that never steps.

    `asked`: how often each was asked for, this time included; None where somebody else asks at the time. `counts`:
    which hand-outs are named, None: any.
    """

    sent: Sent
    name: str
    subscription_id: int
    claims: tuple[Claim, ...]
    reject: bool
    delays_ms: tuple[int, ...] | None
    at_least: bool
    sent_ms: int
    sent_s: float
    asked: tuple[int | None, ...]
    counts: tuple[int, ...] | None
    forwarded: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LettersSent:
    """A request about dead letters under way. `there`: those that its daemon knew when it was sent."""

    sent: Sent
    number: int
    subscription_id: int
    filter: DeadLetterFilter
    there: tuple[DeadLetter, ...]


class RedeliveryPromises:
    """Holds answers and hand-outs of redeliveries of a run against the oracle. `default`: where no policy says more."""

    def __init__(self, promises: Promises, oracle: Oracle, history: History, default: RedeliverySettings) -> None:
        self._promises = promises
        self._oracle = oracle
        self._history = history
        # By topic, position, slot of its row and subscription: the last slot of a negative acknowledgement that was
        # answered.
        self._answered: dict[tuple[str, Position, int, int], int] = {}
        self._default = default

    # ---- hand-outs

    def handed_out(self, stream: OpenStream, position: Position, row: Row, count: int, what: str) -> None:
        number = stream.subscription_id
        nacked = row.nacked.get(number)
        row.handed_out[number] = stream.epoch, 0 if nacked is None else nacked.slot
        row.handed_out_s[number] = self._oracle.now_s()
        if nacked is None:
            if count:
                self._history.breach(f"{what} is handed out with count {count}, and was never negatively acknowledged")
            return
        heard = nacked.epoch <= stream.epoch
        answered = self._answered.get((stream.topic, position, row.slot, number), 0) >= nacked.slot
        if (heard and count != nacked.count) or count > nacked.count:
            self._history.breach(f"{what} is handed out with count {count}, and was {nacked}")
        now_ms = stream.daemon.latest_ms() if nacked.epoch == stream.epoch else self._oracle.latest_ms()
        if (heard or answered) and nacked.redeliver_at_ms > now_ms:
            self._history.breach(f"{what} comes back at {now_ms}, early: {nacked}")

    # ---- negative acknowledgements

    def sending_nack(
        self,
        sent: Sent,
        subscription_id: int,
        claims: Sequence[Claim],
        *,
        delays_ms: Sequence[int] | None,
        reject: bool,
        at_least: bool = False,
        counts: Sequence[int] | None = None,
        forwarded: bool = False,
    ) -> NackSent | None:
        """None when there is no such subscription any more. `at_least`: the delays may be longer. `counts`: which
        hand-outs are named, None: any.
        """
        topic = sent.topic
        stored = topic.subscriptions.get(subscription_id)
        if stored is None:
            return None
        known, asked = topic.redeliveries, []
        for number, (position, _) in enumerate(claims):
            key = stored.name, *named(position)
            known.asked[key] += 1
            if counts is not None:
                known.named[key].add(counts[number])
            if reject:
                known.rejected.add(key)
            asked.append(None if known.under_way[key] else known.asked[key])
            known.under_way[key] += 1
        delays = None if delays_ms is None else tuple(delays_ms)
        sent_ms = sent.daemon.now_ms()
        return NackSent(
            sent,
            stored.name,
            subscription_id,
            tuple(claims),
            reject,
            delays,
            at_least,
            sent_ms,
            sent.daemon.elapsed_s(),
            tuple(asked),
            None if counts is None else tuple(counts),
            forwarded,
        )

    def nack_answered(self, nack: NackSent, shard: int, epoch: int, outcome: Counts, stream: OpenStream | None) -> None:
        """`stream`: on which it was sent, if it was on one."""
        sent, topic, number = nack.sent, nack.sent.topic, nack.subscription_id
        for position, _ in nack.claims:
            topic.redeliveries.under_way[nack.name, *named(position)] -= 1
        self._promises.check_confirmed(sent)
        self._promises.check_former_owners(shard, epoch, f"topic {topic.name}: a negative acknowledgement is answered")
        if number not in topic.subscriptions:
            return
        claims = [claim for claim in nack.claims if not self._promises.has_twin(topic.name, claim)]
        left = [claim for claim in claims if not self._has_changed(nack, claim[0])]
        if len(left) > outcome.ignored:
            self._breach(nack, f"{nack.claims} were answered with {outcome}, and {left} are as before")
        if stream is not None and self._oracle.epochs[shard] == epoch == stream.epoch:
            named_counts = dict(zip(nack.claims, nack.counts or (), strict=True))
            mine = [claim for claim in left if self._holds(nack, stream, claim, named_counts[claim])]
            if mine:
                self._breach(nack, f"negative acknowledgements of what the stream holds were ignored: {mine}")
        self._check_dead(nack, outcome)
        if nack.forwarded and nack.counts is not None:
            self._check_forwarded(nack, nack.counts, outcome)
        if outcome.ignored:
            return
        for (position, _), place in zip(nack.claims, range(len(nack.claims)), strict=True):
            for key in self._keys(nack, position):
                row = topic.rows.get(key)
                nacked = None if row is None else row.nacked.get(number)
                if row is not None and nacked is not None and nacked.slot > sent.slot:
                    self._answered[topic.name, key, row.slot, number] = nacked.slot
                    self._check_time(nack, place, row)

    def _check_forwarded(self, nack: NackSent, counts: Sequence[int], outcome: Counts) -> None:
        """What was passed on and failed comes again, whether it was acknowledged or not."""
        applies = [claim for claim, count in zip(nack.claims, counts, strict=True) if self._applies(nack, claim, count)]
        if len(applies) > len(nack.claims) - outcome.ignored:
            self._breach(
                nack, f"{nack.claims} with {counts} were handed back; {applies} apply, answered with {outcome}"
            )

    def _applies(self, nack: NackSent, claim: Claim, count: int) -> bool:
        """Whether a claim that is forwarded cannot be ignored: all the time no row was owed, or none but of that
        hand-out or an earlier one.
        """
        (position, deliver_at_ms), topic, number = claim, nack.sent.topic, nack.subscription_id
        due_ms = min(nack.sent_ms, nack.sent.daemon.now_ms())
        unreadable = entry_of(position) in self._oracle.objects.unreadable
        keys = (*self._keys(nack, position), *self._keys(nack, entry_of(position)))
        changed = any(self._has_changed(nack, key) for key in keys)
        if changed or unreadable or deliver_at_ms > due_ms or self._promises.has_twin(topic.name, claim):
            return False
        owed = {key: topic.rows[key] for key in keys if key in topic.rows and number in topic.owes(topic.rows[key])}
        rows = [owed[position]] if is_part(position) and position in owed else owed.values()
        return all(row.deliver_at_ms == deliver_at_ms and row.count(number) <= count for row in rows)

    def _breach(self, nack: NackSent, text: str) -> None:
        self._history.breach(f"topic {nack.sent.topic.name}: {text}")

    def _holds(self, nack: NackSent, stream: OpenStream, claim: Claim, count: int) -> bool:
        """Whether the stream was handed out the row with that count, and nothing has become of it since."""
        position, deliver_at_ms = claim
        if position[:2] in self._oracle.objects.unreadable:
            # It cannot be found in the backlog.
            return False
        row = nack.sent.topic.rows.get(position)
        if row is None or row.deliver_at_ms != deliver_at_ms or stream.subscription_id not in nack.sent.topic.owes(row):
            return False
        handed_out = stream.handed_out.get(position) == row.generation(stream.subscription_id)
        return handed_out and row.count(stream.subscription_id) == count

    @staticmethod
    def _keys(nack: NackSent, position: Position) -> tuple[Position, ...]:
        """The rows that may be meant."""
        if is_part(position):
            return (position,)
        return position[:2], in_index(position, nack.subscription_id)

    def _has_changed(self, nack: NackSent, position: Position) -> bool:
        """Whether anything has become of the position since the request was sent."""
        topic, number, slot = nack.sent.topic, nack.subscription_id, nack.sent.slot
        if number not in topic.subscriptions:
            return True
        for key in self._keys(nack, position):
            row = topic.rows.get(key)
            slots = [topic.removed.get(key, 0), topic.redeliveries.died.get((number, key), 0)]
            if row is not None:
                slots += [row.slot, row.acknowledged.get(number, 0)]
                slots += [row.nacked[number].slot] if number in row.nacked else []
            if max(slots) > slot or key in topic.missing:
                return True
        return False

    def _check_dead(self, nack: NackSent, outcome: Counts) -> None:
        topic, number = nack.sent.topic, nack.subscription_id
        if nack.reject and outcome.ignored + outcome.dead_lettered != len(nack.claims):
            self._breach(nack, f"{nack.claims} were rejected and answered with {outcome}")
        died = topic.redeliveries.died
        died_since = [
            position
            for position, _ in nack.claims
            if any(died.get((number, key), 0) > nack.sent.slot for key in self._keys(nack, position))
        ]
        if outcome.dead_lettered > len(died_since):
            self._breach(nack, f"{outcome} is answered, and dead letters are {died_since}")

    def _check_time(self, nack: NackSent, place: int, row: Row) -> None:
        """When it comes back is as it was asked for. Where several asked at a time nobody knows whose it is."""
        topic, number = nack.sent.topic, nack.subscription_id
        stored, known = topic.subscriptions[number], topic.redeliveries
        asked = known.asked[stored.name, *named(nack.claims[place][0])]
        if nack.asked[place] != asked or known.timeout_ms(number) is not None:
            return
        # A policy may have landed, and its daemon not know it yet.
        if not any(self._is_as_asked(nack, place, row, policy) for policy in known.policies[number]):
            self._breach(nack, f"{nack.claims[place]} of {nack} is {row.nacked[number]}")

    def _is_as_asked(self, nack: NackSent, place: int, row: Row, policy: SubscriptionPolicy) -> bool:
        nacked, daemon = row.nacked[nack.subscription_id], nack.sent.daemon
        delays = self._delays_by_policy(policy, nacked.count)
        if nack.delays_ms is not None:
            delays = nack.delays_ms[place], NEVER_MS if nack.at_least else nack.delays_ms[place]
        if policy.max_redeliver_count is not None and nacked.count > policy.max_redeliver_count:
            # The dead letters were full.
            longest = self._longest_by_policy(policy)
            delays = max(delays[0], longest[0]), max(delays[1], longest[1])
        bits = policy.nack_precision_bits
        bits = self._default.nack_precision_bits if bits is None else bits
        # The clock may have been set back meanwhile, at once after it was sent.
        set_back_ms = daemon.now_ms() - math.ceil(1000 * (daemon.elapsed_s() - nack.sent_s))
        least_ms = max(row.deliver_at_ms, min(nack.sent_ms, set_back_ms) + delays[0])
        most_ms = max(row.deliver_at_ms, daemon.latest_ms() + delays[1]) + (1 << bits) - 1
        return least_ms <= nacked.redeliver_at_ms <= most_ms and nacked.redeliver_at_ms % (1 << bits) == 0

    def _longest_by_policy(self, policy: SubscriptionPolicy) -> tuple[int, int]:
        """The longest delay, from and to: a ladder's is that of the delay levels in force."""
        redelivery = policy.redelivery
        if redelivery is None or redelivery.kind is RedeliveryKind.CONSTANT:
            return self._delays_by_policy(policy, 1)
        if redelivery.kind is RedeliveryKind.LADDER:
            return 0, NEVER_MS
        longest_ms = redelivery.max_ms or max(redelivery.delays_ms)
        return longest_ms, longest_ms

    def _delays_by_policy(self, policy: SubscriptionPolicy, count: int) -> tuple[int, int]:
        """The shortest and the longest."""
        constant = RedeliveryPolicy(kind=RedeliveryKind.CONSTANT, initial_ms=self._default.delay_ms)
        redelivery = policy.redelivery or constant
        if redelivery.kind is RedeliveryKind.LADDER:
            # By the delay levels that are in force.
            return 0, NEVER_MS
        if redelivery.kind is RedeliveryKind.LIST:
            delay_ms = redelivery.delays_ms[min(count, len(redelivery.delays_ms)) - 1]
        elif redelivery.kind is RedeliveryKind.LINEAR:
            delay_ms = redelivery.initial_ms + (count - 1) * redelivery.step_ms
        elif redelivery.kind is RedeliveryKind.EXPONENTIAL:
            multiplier = redelivery.multiplier or redelivery_policy.MULTIPLIER_DEFAULT
            delay_ms = int(redelivery.initial_ms * multiplier ** (count - 1))
        else:
            delay_ms = redelivery.initial_ms
        delay_ms = min(delay_ms, redelivery.max_ms or delay_ms)
        return int(delay_ms * (1 - redelivery.jitter)), delay_ms

    # ---- dead letters

    def sending_letters(
        self, sent: Sent, subscription: str, asked: DeadLetterFilter, *, replays: bool | None = None
    ) -> LettersSent | None:
        """`replays`: whether they are to be replayed, or purged; None: looked at. None when there is no such
        subscription.
        """
        topic, known = sent.topic, sent.topic.redeliveries
        number = next((number for number, each in topic.subscriptions.items() if each.name == subscription), None)
        if number is None:
            return None
        request = next(known.numbers)
        if replays is not None:
            known.leaving[request] = Leaving(subscription, asked, replays)
        there = tuple(
            letter
            for letter in known.dead_letters.get(number, {}).values()
            if letter.slot <= sent.slot and letter.is_asked_for(asked)
        )
        return LettersSent(sent, request, number, asked, there)

    def letters_listed(self, asked: LettersSent, rows: DeadLetterRows, *, whole: bool) -> None:
        """`whole`: no further page follows."""
        sent, number = asked.sent, asked.subscription_id
        if number not in sent.topic.subscriptions:
            return
        known = sent.topic.redeliveries
        listed = {letter[0]: letter for letter in letters_of(rows)}
        if list(listed) != sorted(listed) or len(listed) != len(rows):
            self._letters_breach(asked, f"dead letters are listed as {list(listed)}")
        for dead_letter_id, shown in listed.items():
            letter = known.dead_letters.get(number, {}).get(dead_letter_id)
            if letter is None:
                left_slot, letter = known.left.get((number, dead_letter_id), (0, None))
                if letter is not None and left_slot <= sent.slot:
                    self._letters_breach(asked, f"{letter} is listed, and left in slot {left_slot}")
            if letter is None or as_listed(letter) != shown or not letter.is_asked_for(asked.filter):
                self._letters_breach(asked, f"{shown} is listed, and is {letter}")
        last_id = max(listed, default=0)
        lacking = [each for each in self._still_there(asked) if each.dead_letter_id not in listed]
        if lacking := [each for each in lacking if whole or each.dead_letter_id < last_id]:
            self._letters_breach(asked, f"{lacking} are not listed")

    def replayed(self, asked: LettersSent, answer: Replayed) -> None:
        self._left(asked, answer.replayed, answer.skipped)

    def purged(self, asked: LettersSent, letters: int) -> None:
        self._left(asked, letters, 0)

    def _left(self, asked: LettersSent, gone: int, skipped: int) -> None:
        sent, known = asked.sent, asked.sent.topic.redeliveries
        del known.leaving[asked.number]
        self._promises.check_confirmed(sent)
        if asked.subscription_id not in sent.topic.subscriptions:
            return
        stay = self._still_there(asked)
        if len(stay) > skipped:
            self._letters_breach(asked, f"{stay} are still there; {gone} have left, {skipped} were skipped")
        left = sum(
            slot > sent.slot and letter.is_asked_for(asked.filter)
            for (number, _), (slot, letter) in known.left.items()
            if number == asked.subscription_id
        )
        if gone > left:
            self._letters_breach(asked, f"{gone} are answered to have left, and {left} have")

    @staticmethod
    def _still_there(asked: LettersSent) -> list[DeadLetter]:
        there = asked.sent.topic.redeliveries.dead_letters.get(asked.subscription_id, {})
        return [letter for letter in asked.there if letter.dead_letter_id in there]

    def _letters_breach(self, asked: LettersSent, text: str) -> None:
        self._history.breach(f"topic {asked.sent.topic.name}: of subscription {asked.subscription_id}: {text}")


def letters_of(rows: DeadLetterRows) -> Iterable[tuple[int, Position, int, int, int, int, int, str]]:
    """(id, ledger and entry, batch index, deliver_at_ms, count, dead_at_ms, reason, text) of each."""
    columns = (
        rows.dead_letter_id,
        rows.ledger_id,
        rows.entry_id,
        rows.batch_index,
        rows.deliver_at_ms,
        rows.redelivery_count,
        rows.dead_at_ms,
        rows.reason,
        rows.text_index,
    )
    for number, ledger_id, entry_id, *rest, text in np.array([column.astype(object) for column in columns]).T.tolist():
        yield (number, (ledger_id, entry_id), *rest, rows.texts[text])


def as_listed(letter: DeadLetter) -> tuple[int, Position, int, int, int, int, int, str]:
    return (
        letter.dead_letter_id,
        *named(letter.position),
        letter.deliver_at_ms,
        letter.redelivery_count,
        letter.dead_at_ms,
        letter.reason,
        letter.text,
    )
