"""One subscription's side of its stream: what is received, held and given back. No I/O, no threads, no waiting.

Owns: the permits, what is held and declared when a stream is opened again, requests until they are durable
(acknowledgements, negative ones, extensions of the ack time-out), and dropping what a former owner still sends.
Does not own: the stream (`tarry.streams`); the account of held rows (`tarry.batch`); who waits for what
(`tarry.subscription`, `tarry.aio.subscription`).

Permits. `permits` is how many positions may be received and neither acknowledged nor released. They come back when a
batch is acknowledged, positively or negatively (not only when that is durable), or released; they are granted again in
portions, at least a quarter of all unless the daemon has none left. When requests about eight times `permits` positions
wait to become durable, no more are granted until some are.

Reopening. `Open` declares every position that is held and every one whose acknowledgement is not known to be durable:
they stay in flight and are not sent again. After `Opened` these requests are sent again.

Whoever drives it settles what a method returns, and only then calls `remove`: who waits until every request is durable
finds every answer settled.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from tarry import batch, columns, errors, results, retry, streams, wire
from tarry.v1 import dispatch_pb2

Response: TypeAlias = wire.MessagesColumns | dispatch_pb2.SubscribeResponse
"""What comes on the stream: due positions, or something else."""


def read(response: bytes) -> Response:
    return wire.decode_messages(response) or dispatch_pb2.SubscribeResponse.FromString(response)


METHOD: streams.StreamMethod[Response] = streams.StreamMethod("/tarry.v1.Dispatch/Subscribe", read)

PERMITS_MAX = 2**32 - 1
_UNCONFIRMED_PER_PERMIT = 8
_GRANTS_PER_WINDOW = 4

Answer = TypeVar("Answer")
Rows = TypeVar("Rows", columns.Positions, columns.NackColumns)
Settled: TypeAlias = streams.Settled[Answer, Any]


@dataclasses.dataclass(slots=True)
class _Unconfirmed(Generic[Answer]):
    """A request that is not known to be durable."""

    positions: columns.Positions
    message: bytes
    answer: Answer
    read: Callable[[dispatch_pb2.Done], object]
    gives_back: bool
    """Whether the positions are held no longer."""
    attempt: int = 1


def _ignored(done: dispatch_pb2.Done) -> int:
    return done.ignored


class Receiving(Generic[Answer]):
    """`Answer` is the driver's kind of future, made by it and given back in what is settled."""

    def __init__(
        self, topic: str, subscription: str, *, permits: int, rows_max: int, policy: retry.RetryPolicy
    ) -> None:
        """Raises InvalidArgument."""
        if not 1 <= permits <= PERMITS_MAX:
            raise errors.InvalidArgument(f"permits is {permits}; it must be from 1 to {PERMITS_MAX}")
        self._topic = wire.utf8("topic", topic)
        self._subscription = wire.utf8("subscription", subscription)
        self._permits = permits
        self._rows_max = rows_max
        self._policy = policy
        self._inbox: deque[batch.Batch] = deque()
        self._held = batch.HeldPositions()
        self._unconfirmed: dict[int, _Unconfirmed[Answer]] = {}
        self._unconfirmed_rows = 0
        self._granted = 0
        self._last_request_id = 0
        self._last_batch = 0
        self._opening: streams.Sending | None = None
        self._sending: streams.Sending | None = None
        self.epoch = 0
        self.streams_opened = 0
        self.rebuild_needed: tuple[results.RebuildNeeded, ...] = ()
        self.last_error: errors.TarryError | None = None
        self.ended: errors.TarryError | None = None
        self.closed = False

    @property
    def held(self) -> int:
        """Positions received, and neither acknowledged nor released."""
        return len(self._held)

    @property
    def has_news(self) -> bool:
        """Whether `take` has a batch, or tells that there will be none."""
        return bool(self._inbox) or self.ended is not None or self.closed

    @property
    def is_confirmed(self) -> bool:
        """Whether every request is durable, or `raise_ended` tells that it will not be."""
        return not self._unconfirmed or self.ended is not None

    def take(self) -> batch.Batch | None:
        """The next batch; None when there is none yet, or when it is closed. Raises what ended it."""
        if self.closed:
            return None
        if self._inbox:
            return self._inbox.popleft()
        self.raise_ended()
        return None

    def raise_ended(self) -> None:
        """Raises the failure that ended it, if any."""
        if self.ended is not None:
            raise self.ended

    def unconfirmed(self, timeout_s: float | None) -> errors.DeadlineExceeded:
        """What to raise when requests stayed unconfirmed."""
        return errors.DeadlineExceeded(
            f"{len(self._unconfirmed)} requests are not durable after {timeout_s or 0:g} s",
            last=self.last_error,
        )

    def acknowledge(self, given: batch.HandedOut, promise: Callable[[], Answer]) -> list[Answer]:
        """Sends acknowledgements, each with an answer that `promise` makes. Raises InvalidArgument, what ended it."""
        positions = batch.positions_of(given)
        self._check_open()
        answers = [
            self._request(wire.encode_acknowledge, part, part, _ignored, promise)
            for part in columns.parts(positions, self._rows_max)
        ]
        self._give_back(given, positions)
        return answers

    def nack(
        self,
        given: batch.HandedOut,
        promise: Callable[[], Answer],
        *,
        batch_index: columns.Column | None,
        key_hash: columns.Column | None,
        delay_ms: columns.Column | None = None,
        delay_level: columns.Column | None = None,
        reject: bool = False,
        reason: str = "",
    ) -> list[Answer]:
        """Sends negative acknowledgements, as `acknowledge`."""
        positions = batch.positions_of(given, batch_index)
        nack = columns.nack_columns(
            positions, delay_ms=delay_ms, delay_level=delay_level, key_hash=key_hash, reject=reject, reason=reason
        )
        self._check_open()
        answers = [
            self._request(wire.encode_nack, part, part.positions, results.Nacked.from_message, promise)
            for part in nack.requests(self._rows_max)
        ]
        # Of a message of a batch the entry as a whole stays here.
        self._give_back(given if batch_index is None else positions, positions)
        return answers

    def extend(self, given: batch.HandedOut, promise: Callable[[], Answer]) -> list[Answer]:
        """Sends extensions of the ack time-out, as `acknowledge`; the positions stay here."""
        positions = batch.positions_of(given)
        self._check_open()
        return [
            self._request(wire.encode_extend, part, part, _ignored, promise, gives_back=False)
            for part in columns.parts(positions, self._rows_max)
        ]

    def acknowledge_unconfirmed(self, given: batch.HandedOut) -> None:
        """Sends acknowledgements without answer. Raises InvalidArgument, what ended it."""
        positions = batch.positions_of(given)
        self._check_open()
        if self._sending is not None:
            for part in columns.parts(positions, self._rows_max):
                self._sending.put(wire.encode_acknowledge(0, part))
        self._give_back(given, positions)

    def release(self, given: batch.Batch) -> None:
        """Takes the permits back. Raises what ended it."""
        self._check_open()
        self._give_back(given, given.positions)

    # What happens to the stream.

    def opened(self, sending: streams.Sending) -> None:
        """A stream has begun: it is opened with what is held. Nothing else is sent before it is answered."""
        held = self._held.positions()
        leaving = batch.concatenate([each.positions for each in self._unconfirmed.values() if each.gives_back])
        # What was redelivered before its negative acknowledgement was answered is both.
        declared = batch.concatenate([held, leaving.take(~batch.members(leaving, held))])
        self._opening = sending
        sending.put(wire.encode_open(self._topic, self._subscription, dispatch_pb2.SUBSCRIPTION_TYPE_SHARED, declared))

    def received(self, response: Response) -> tuple[bool, Settled[Answer] | None]:
        """Whether the answer shows progress, and the request that is settled now, if any.

        Raises Unavailable, NotOwner: the stream is of no use any more.
        """
        if isinstance(response, wire.MessagesColumns):
            return self._take_in(response), None
        match response.WhichOneof("response"):
            case "messages":
                return self._take_in(wire.messages_columns(response.messages)), None
            case "done":
                settled = self._settled(response.done)
                return settled is not None and settled.error is None, settled
            case "opened":
                self._start(response.opened)
            case "moved":
                owner = response.moved.owner_address
                raise errors.NotOwner(
                    f"topic {self._topic.decode()!r} moved to {owner or 'an unknown owner'}", owner_address=owner
                )
        # Or a kind of answer that this version does not know.
        return False, None

    def interrupted(self, error: errors.TarryError) -> None:
        """The stream is gone and will be opened again."""
        self._opening = self._sending = None
        self.last_error = error

    def failed(self, error: errors.TarryError) -> list[Settled[Answer]]:
        """There will be no other stream: every request that is not durable."""
        self._opening = self._sending = None
        self.ended = error
        return [streams.Settled(number, request.answer, None, error) for number, request in self._unconfirmed.items()]

    def remove(self, request_id: int) -> None:
        """Its answer is settled."""
        request = self._unconfirmed.pop(request_id)
        self._unconfirmed_rows -= request.positions.rows
        self._grant()

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed("the subscription is closed")
        self.raise_ended()

    def _request(
        self,
        encode: Callable[[int, Rows], bytes],
        rows: Rows,
        positions: columns.Positions,
        read: Callable[[dispatch_pb2.Done], object],
        promise: Callable[[], Answer],
        *,
        gives_back: bool = True,
    ) -> Answer:
        self._last_request_id += 1
        request = _Unconfirmed(positions, encode(self._last_request_id, rows), promise(), read, gives_back)
        self._unconfirmed[self._last_request_id] = request
        self._unconfirmed_rows += positions.rows
        if self._sending is not None:
            self._sending.put(request.message)
        return request.answer

    def _give_back(self, given: batch.HandedOut, positions: columns.Positions) -> None:
        self._held.give_back(given if isinstance(given, batch.Batch) else positions)
        self._grant()

    def _grant(self) -> None:
        """Sends the permits that are free, when they are worth a message."""
        free = self._permits - len(self._held) - self._granted
        worth_it = self._granted == 0 or free * _GRANTS_PER_WINDOW >= self._permits
        bounded = self._unconfirmed_rows < _UNCONFIRMED_PER_PERMIT * self._permits
        if self._sending is None or free <= 0 or not worth_it or not bounded:
            return
        self._granted += free
        self._sending.put(wire.encode_flow(free))

    def _start(self, opened: dispatch_pb2.Opened) -> None:
        """The stream is open: requests go out again, and permits for all that is not held."""
        if opened.epoch < self.epoch:
            raise errors.Unavailable(f"a former owner answered, of epoch {opened.epoch}; {self.epoch} was seen")
        self.epoch = opened.epoch
        self._sending = self._opening
        self._granted = 0
        if self._sending is not None:
            for request in self._unconfirmed.values():
                self._sending.put(request.message)
        self._grant()
        self.streams_opened += 1
        self.rebuild_needed = tuple(results.RebuildNeeded.from_message(each) for each in opened.rebuild_needed)

    def _take_in(self, messages: wire.MessagesColumns) -> bool:
        self._granted = max(0, self._granted - len(messages.entry_id))
        if messages.epoch < self.epoch:
            self._grant()
            return False
        self.epoch = messages.epoch
        self._last_batch += 1
        received = batch.Batch.from_columns(messages, self._last_batch)
        self._held.add(received)
        self._inbox.append(received)
        return True

    def _settled(self, done: dispatch_pb2.Done) -> Settled[Answer] | None:
        request = self._unconfirmed.get(done.request_id)
        if done.epoch < self.epoch:
            return None
        self.epoch = done.epoch
        if request is None:
            return None
        if not done.HasField("error"):
            return streams.Settled(done.request_id, request.answer, request.read(done), None)
        error = errors.from_status(done.error)
        if isinstance(error, errors.NotOwner):
            raise error
        if errors.is_retryable(error) and self._sending is not None:
            self._sending.put_after(self._policy.delay_s(error, request.attempt), request.message)
            request.attempt += 1
            self.last_error = error
            return None
        return streams.Settled(done.request_id, request.answer, None, error)
