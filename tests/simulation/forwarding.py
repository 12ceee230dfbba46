"""The world behind the dispatchers of one run: they pass on what they are handed out, before they acknowledge it, and
consumers behind them fail before or after that.

Owns: an output that remembers for ever by which names it has what, what failed behind it, and that each name that was
handed back comes again by a later one, which the output does not have yet.
Does not own: the calls (`nacking`), what is true (`oracle`), and what each answer must be (`redelivery_promises`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable

from storage_backends.formats.index_ids import NO_BATCH_INDEX
from tests.simulation.oracle import Oracle, TopicTruth
from tests.simulation.positions import Position, entry_of, is_part, named, part_of

# The subscriptions whose dispatchers do so.
SUBSCRIPTIONS = ("a", "b")
# So many of what consumers receive fail, so many of these only by one message of the entry, of so many; and so many of
# one subscription are handed back at once.
FAILURES = 0.7
PARTS = 0.2
BATCH = 4
AT_ONCE = (1, 1, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """What has names, all but the count: of a subscription of an incarnation of a topic; `batch_index` of one message
    of an entry.
    """

    topic: str
    incarnation: int
    subscription_id: int
    entry: Position
    batch_index: int
    deliver_at_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A hand-out that failed behind the output. `position`: as it was handed out."""

    message: Message
    position: Position
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Owed:
    """A message is to come with a higher count. `withdrawn`: how often its entry was withdrawn before that."""

    count: int
    withdrawn: int


class Output:
    """`breach`: a rule was broken."""

    def __init__(self, oracle: Oracle, breach: Callable[[str], None], seed: int) -> None:
        self.fails = True
        self._oracle = oracle
        self._breach = breach
        self._draw = random.Random(f"consumers {seed}")
        self._has: set[tuple[Message, int]] = set()
        self._failed: list[Failed] = []
        self._owed: dict[Message, Owed] = {}

    def passed_on(
        self, topic: TopicTruth, subscription_id: int, position: Position, deliver_at_ms: int, count: int
    ) -> None:
        """What the output has by that name it drops."""
        stored = topic.subscriptions.get(subscription_id)
        message = Message(topic.name, topic.incarnation, subscription_id, *named(position), deliver_at_ms)
        if stored is None or stored.name not in SUBSCRIPTIONS or (message, count) in self._has:
            return
        self._has.add((message, count))
        self._came(message, count)
        if self.fails and self._draw.random() < FAILURES:
            if not is_part(position) and self._draw.random() < PARTS:
                position = part_of(position[:2], self._draw.randrange(BATCH), subscription_id)
                message = dataclasses.replace(message, batch_index=named(position)[1])
            self._failed.append(Failed(message, position, count))

    def _came(self, message: Message, count: int) -> None:
        """Whatever its time: an entry may have a row for all subscriptions and one for this alone, and what is handed
        back after a clock was set back gets the time of that clock.
        """
        for each in [each for each in self._owed if self._comes_with(each, message)]:
            if self._owed[each].count < count:
                del self._owed[each]

    @staticmethod
    def _comes_with(owed: Message, came: Message) -> bool:
        """An entry as a whole comes with each of its messages."""
        batch_index = owed.batch_index if came.batch_index == NO_BATCH_INDEX else came.batch_index
        return owed == dataclasses.replace(came, batch_index=batch_index, deliver_at_ms=owed.deliver_at_ms)

    # ---- what is handed back

    def some_failed(self, topic: str, draw: random.Random) -> list[Failed]:
        """Of one subscription, each position once; they are to be handed back, or given back by `kept`."""
        mine = [each for each in self._failed if each.message.topic == topic]
        if not mine:
            return []
        first = draw.choice(mine)
        alike = {
            named(each.position): each
            for each in mine
            if each.message.subscription_id == first.message.subscription_id
            and each.message.incarnation == first.message.incarnation
        }
        chosen = draw.sample(list(alike.values()), min(len(alike), draw.choice(AT_ONCE)))
        self._failed = [each for each in self._failed if each not in chosen]
        return chosen

    def kept(self, failed: Iterable[Failed]) -> None:
        """Nobody knows whether they were handed back: they are once more."""
        self._failed += failed

    def withdrawn(self, failed: Failed) -> int:
        return self._oracle.topic(failed.message.topic).withdrawn[entry_of(failed.position)]

    def handed_back(self, failed: Failed, withdrawn: int) -> None:
        """It was answered that it comes again. `withdrawn`: of its entry, when that was asked for."""
        if not any(count > failed.count and self._comes_with(failed.message, came) for came, count in self._has):
            self._owed[failed.message] = Owed(failed.count, withdrawn)

    # ---- at rest

    def compare(self) -> None:
        """Everything came that was handed back, unless it was withdrawn since."""
        for message, owed in self._owed.items():
            topic = self._oracle.topic(message.topic)
            if topic.deleted or topic.incarnation != message.incarnation:
                continue
            there = message.subscription_id in topic.subscriptions
            readable = message.entry not in self._oracle.objects.unreadable
            if there and readable and topic.withdrawn[message.entry] == owed.withdrawn:
                self._breach(f"{message} was handed back with count {owed.count}, and never came with a higher one")
