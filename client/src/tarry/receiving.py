"""One subscription's side of its stream: rows received, held and given back; without I/O, threads or waiting.

Keeps the permits and what is held, declares held positions when a stream is opened again, repeats requests until they
are durable, and drops what a former owner sends. The inbox at the top holds what no caller has taken yet, in order.
`tarry.stream_requests` has the requests, `tarry.batch` the account of held rows.
Permits: `permits` is how many positions may be received and neither acknowledged nor released. They return when a batch
is acknowledged, positively or negatively (before that is durable), or released. They are granted again in portions of
at least a quarter of all, unless the daemon has none left. While requests for about eight times `permits` positions are
not durable, no more are granted. Each receiver of a stream has a window of them; the one of a SHARED subscription is
receiver 0.
Reopening: `Open` declares every held position and every one whose acknowledgement is not known to be durable. They stay
in flight and are not sent again. After `Opened` these requests are sent again.
Forwarded: a negative acknowledgement that is `forwarded` may name positions that were acknowledged long ago or received
on another stream. Only those held here under that very name are given back, or declared. A stream knows the features of
its daemon. If `forwarded` is missing, such requests fail and their positions are not declared, so Tarry redelivers
them.
Lingering: acknowledgements may wait a few ms for others and are sent as one request; each is settled separately. They
return their permits at once and count as not durable, so a stream opened meanwhile declares them. Anything else that is
sent, except permits, sends them first. If the daemon does not report which positions it ignored, none waits.
Joining: batches are joined when they are taken, not when they arrive, so positions taken back have left by then.
Batches of one receiver and one epoch are joined, past batches of other receivers but past nothing else: a receiver's
other events keep their place among its batches.
The driver (`tarry.aio.subscription`) settles what a method returns and only then calls `remove`. A caller that waits
until every request is durable therefore finds every answer settled.
"""

from __future__ import annotations

import abc
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from tarry import attempts, batch, columns, errors, results, stream_requests, streams, wire
from tarry.stream_requests import Answer, Request, Settled
from tarry.v1 import dispatch_pb2

Received = TypeVar("Received")

ROWS_MAX = 10_000
"""Default limit of rows joined from several batches"""


class Inbox(Generic[Received]):
    """A queue of batches and of the events between them."""

    def __init__(self) -> None:
        self._waiting: deque[Received] = deque()
        self._rows = 0
        # Events that are no batch
        self._others = 0

    def __len__(self) -> int:
        """Return the number of waiting batches and other events, joined or not."""
        return len(self._waiting)

    def append(self, event: Received) -> None:
        """Append an event behind all that wait."""
        self._waiting.append(event)
        self._count(event, 1)

    def keep(self, left_of: Callable[[Received], Received | None]) -> None:
        """Replace each event by the result of `left_of`; None removes it."""
        given = [left_of(event) for event in self._waiting]
        self._waiting, self._rows, self._others = deque(), 0, 0
        for event in given:
            if event is not None:
                self.append(event)

    def waited_ms(self, now_ms: int) -> int:
        """Return how long the first batch has waited by this clock (ms); 0 if no batch is first."""
        first: Any = self._waiting[0] if self._waiting else None
        return max(0, now_ms - first.received_at_ms) if isinstance(first, batch.Batch) else 0

    def is_enough(self, max_rows: int) -> bool:
        """Return True if later arrivals would not be joined with what is here, or if there are this many rows."""
        if not self._waiting or self._others or self._rows >= max_rows:
            return True
        first: Any = self._waiting[0]
        last: Any = self._waiting[-1]
        return bool(first.epoch != last.epoch)

    def take(self, max_rows: int, receiver_of: Callable[[Any], int | None]) -> Received:
        """Remove the first event and join it with the batches that may follow it, at most this many rows.

        There must be an event.
        """
        first: Any = self._waiting.popleft()
        self._count(first, -1)
        taken: Any = first
        if isinstance(first, batch.Batch):
            parts = [self._cut(first, max_rows)]
            taken = batch.Batch.concat(parts + self._behind(first, max_rows - len(first), receiver_of))
        joined: Received = taken
        return joined

    def _behind(self, first: batch.Batch, room: int, receiver_of: Callable[[Any], int | None]) -> list[batch.Batch]:
        """Remove the batches that may be joined with the first, at most this many rows."""
        parts: list[batch.Batch] = []
        passed: list[Received] = []
        receiver = receiver_of(first)
        while room > 0 and self._waiting:
            each: Any = self._waiting[0]
            if not isinstance(each, batch.Batch) or each.epoch != first.epoch:
                break
            other = self._waiting.popleft()
            if receiver_of(each) != receiver:
                passed.append(other)
                continue
            self._count(each, -1)
            parts.append(self._cut(each, room))
            room -= len(each)
        self._waiting.extendleft(reversed(passed))
        return parts

    def _cut(self, whole: batch.Batch, rows: int) -> batch.Batch:
        """Return the first rows of a removed batch; the others go back to the front."""
        if len(whole) <= rows:
            return whole
        rest: Any = whole.take(slice(rows, None))
        self._waiting.appendleft(rest)
        self._count(rest, 1)
        return whole.take(slice(rows))

    def _count(self, event: Any, sign: int) -> None:
        if isinstance(event, batch.Batch):
            self._rows += sign * len(event)
        else:
            self._others += sign


def check(max_rows: int, linger_ms: int) -> None:
    """Raise InvalidArgument for values that a caller cannot mean."""
    columns.check_unsigned("max_rows", max_rows, bits=64)
    columns.check_unsigned("linger_ms", linger_ms, bits=32)
    if max_rows < 1:
        raise errors.InvalidArgument(f"max_rows is {max_rows}; it must be at least 1")


Response: TypeAlias = wire.MessagesColumns | dispatch_pb2.SubscribeResponse
"""A message of the stream: due positions, or something else"""


def read(response: bytes) -> Response:
    return wire.decode_messages(response) or dispatch_pb2.SubscribeResponse.FromString(response)


METHOD: streams.StreamMethod[Response] = streams.StreamMethod("/tarry.v1.Dispatch/Subscribe", read)

PERMITS_MAX = 2**32 - 1
_UNCONFIRMED_PER_PERMIT = 8
_GRANTS_PER_WINDOW = 4

Rows = TypeVar("Rows", columns.Positions, columns.NackColumns)


@dataclasses.dataclass(slots=True)
class Window:
    """The permits of one receiver and the positions that it holds."""

    permits: int
    granted: int = 0
    held: batch.HeldPositions = dataclasses.field(default_factory=batch.HeldPositions)

    @property
    def free(self) -> int:
        """The permits neither used nor granted; below 0 if more rows arrived than were granted."""
        return self.permits - len(self.held) - self.granted

    @property
    def is_worth_a_grant(self) -> bool:
        free = self.free
        return free > 0 and (self.granted == 0 or free * _GRANTS_PER_WINDOW >= self.permits)


def distinct(held: list[tuple[int, batch.Batch]]) -> list[tuple[int, batch.Batch]]:
    """Return each position once, where it is named last."""
    if not held:
        return []
    last = batch.last_of_each(batch.concatenate([part.positions for _, part in held]))
    begins = np.cumsum([len(part) for _, part in held])[:-1]
    return [(receiver, part.take(rows)) for (receiver, part), rows in zip(held, np.split(last, begins), strict=True)]


def _ignored(done: dispatch_pb2.Done, ignored: results.Ignored) -> results.Ignored:
    return ignored


def _nacked(done: dispatch_pb2.Done, ignored: results.Ignored) -> results.Nacked:
    return results.Nacked(ignored, done.dead_lettered)


class Receiving(abc.ABC, Generic[Answer, Received]):
    """The common part of all kinds of subscriptions.

    `Answer` is the future type of the driver, which makes the futures and settles them; `Received` is what `take`
    returns.
    """

    def __init__(
        self,
        topic: str,
        subscription: str,
        windows: dict[int, Window],
        *,
        rows_max: int,
        bytes_max: Callable[[], int],
        policy: attempts.RetryPolicy,
        ack_linger: stream_requests.AckLinger,
    ) -> None:
        """Receive nothing until a stream is `opened`. `bytes_max` is asked for each request. Raises InvalidArgument."""
        self._topic = wire.utf8("topic", topic)
        self._subscription = wire.utf8("subscription", subscription)
        self._windows = windows
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._policy = policy
        self._ack_linger = ack_linger
        # Requests not sent yet although there is a stream, and whether the end of their wait is timed
        self._lingering: list[Request[Answer]] = []
        self._lingering_rows = 0
        self._is_linger_timed = False
        # Joined requests of this stream, by number on the wire
        self._joined: dict[int, stream_requests.Joined[Answer]] = {}
        self._inbox: Inbox[Received] = Inbox()
        self._unconfirmed: dict[int, Request[Answer]] = {}
        self._unconfirmed_rows = 0
        self._last_request_id = 0
        self._last_batch = 0
        self._opening: streams.Sending | None = None
        self._sending: streams.Sending | None = None
        self._features: frozenset[str] | None = None
        """Features of the stream's daemon; None without a stream"""
        self.epoch = 0
        self.streams_opened = 0
        self.rebuild_needed: tuple[results.RebuildNeeded, ...] = ()
        self.last_error: errors.TarryError | None = None
        self.ended: errors.TarryError | None = None
        self.closed = False

    @property
    def held(self) -> int:
        """The number of positions received and neither acknowledged nor released."""
        return sum(len(window.held) for window in self._windows.values())

    @property
    def _open_bytes_max(self) -> int | None:
        """The most bytes of a message that opens a stream; None if there may be only one."""
        return self._bytes_max() if attempts.HELD_MORE in (self._features or ()) else None

    @property
    def _positions_max(self) -> int:
        """The most positions that a request names."""
        return columns.positions_per_request(self._rows_max, self._bytes_max())

    @property
    def is_open(self) -> bool:
        """True if a daemon has opened the stream."""
        return self._sending is not None

    @property
    def has_news(self) -> bool:
        """True if `take` returns something, or reports that nothing will come."""
        return bool(self._inbox) or self.ended is not None or self.closed

    @property
    def is_confirmed(self) -> bool:
        """True if every request is durable, or if `raise_ended` reports that it will not be."""
        return not self._unconfirmed or self.ended is not None

    def take(self, max_rows: int = ROWS_MAX) -> Received | None:
        """Return the next event, joined with later ones where allowed, at most this many rows.

        Returns None if there is none yet, or if the subscription is closed. Raises what ended it.
        """
        if self.closed:
            return None
        if self._inbox:
            return self._inbox.take(max_rows, self._receiver_of)
        self.raise_ended()
        return None

    def is_enough(self, max_rows: int) -> bool:
        """Return True if waiting for more would bring `take` nothing."""
        return self._inbox.is_enough(max_rows) or self.ended is not None or self.closed

    def lingers_s(self, linger_ms: int, now_ms: int) -> float:
        """Return how long the first event still waits for more, if it waits this long from its arrival (seconds)."""
        return max(0, linger_ms - self._inbox.waited_ms(now_ms)) / 1000

    def raise_ended(self) -> None:
        """Raise the failure that ended the subscription, if any."""
        if self.ended is not None:
            raise self.ended

    def unconfirmed(self, timeout_s: float | None) -> errors.DeadlineExceeded:
        """Return the error to raise if requests are not durable after this time (seconds)."""
        return errors.DeadlineExceeded(
            f"{len(self._unconfirmed)} requests are not durable after {timeout_s or 0:g} s",
            last=self.last_error,
        )

    def acknowledge(self, given: batch.HandedOut, promise: Callable[[], Answer]) -> list[Answer]:
        """Send acknowledgements, now or joined with others, each with an answer made by `promise`.

        Raises InvalidArgument, or what ended the subscription.
        """
        positions = batch.positions_of(given)
        self._check_open()
        self._ack_linger.acknowledged(alone=not self._unconfirmed)
        requests = [
            self._name_positions(wire.encode_acknowledge, part, part, _ignored, promise())
            for part in columns.parts(positions, self._positions_max)
        ]
        self._give_back(given, positions, requests)
        return [request.answer for request in requests]

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
        forwarded: bool = False,
    ) -> list[Answer]:
        """Send negative acknowledgements, as `acknowledge` does. Also raises Unsupported."""
        positions = batch.positions_of(given, batch_index)
        nack = columns.nack_columns(
            positions,
            delay_ms=delay_ms,
            delay_level=delay_level,
            key_hash=batch.key_hash_of(given) if forwarded and key_hash is None else key_hash,
            reject=reject,
            reason=reason,
            forwarded=forwarded,
        )
        self._check_open()
        needs = attempts.FORWARDED if forwarded else None
        if (unmet := self._unmet(needs)) is not None:
            raise unmet
        requests = [
            self._name_positions(wire.encode_nack, part, part.positions, _nacked, promise(), needs)
            for part in nack.requests(self._positions_max)
        ]
        # With a batch index, the entry as a whole stays here; a forwarded batch may be of another stream.
        named = batch_index is not None or forwarded
        self._give_back(positions if named else given, positions, requests)
        return [request.answer for request in requests]

    def extend(self, given: batch.HandedOut, promise: Callable[[], Answer]) -> list[Answer]:
        """Send extensions of the ack timeout, as `acknowledge` does; the positions stay here."""
        positions = batch.positions_of(given)
        self._check_open()
        return [
            self._name_positions(wire.encode_extend, part, part, _ignored, promise()).answer
            for part in columns.parts(positions, self._positions_max)
        ]

    def acknowledge_unconfirmed(self, given: batch.HandedOut) -> None:
        """Send acknowledgements without answer. Raises InvalidArgument, or what ended the subscription."""
        positions = batch.positions_of(given)
        self._check_open()
        if self._sending is not None:
            self.send_lingering()
            for part in columns.parts(positions, self._positions_max):
                self._sending.put(wire.encode_acknowledge(0, part))
        self._give_back(given, positions, [])

    def send_lingering(self) -> None:
        """Send the acknowledgements that wait for others now."""
        lingering, self._lingering, self._lingering_rows = self._lingering, [], 0
        if self._sending is None:
            return
        for group in stream_requests.joinable(lingering, self._positions_max):
            if len(group) == 1:
                self._sending.put(group[0].message())
                continue
            joined = stream_requests.Joined(self._next_request_id(), group)
            self._joined[joined.request_id] = joined
            self._sending.put(joined.message())

    def release(self, given: batch.Batch) -> None:
        """Take the permits back. Raises what ended the subscription."""
        self._check_open()
        self._give_back(given, given.positions, [])

    # Events of the stream

    def opened(self, sending: streams.Sending, features: frozenset[str]) -> list[Settled[Answer]]:
        """Open a new stream, on a daemon with these features; return the requests that it cannot answer.

        The stream declares what is held.
        Nothing else is sent before it is answered.
        """
        self._opening, self._features = sending, features
        unmet: list[Settled[Answer]] = [
            streams.Settled(number, request.answer, None, error)
            for number, request in self._unconfirmed.items()
            if (error := self._unmet(request.needs)) is not None
        ]
        for each in unmet:
            self._unconfirmed[each.request_id].leaving = []
        for message in self._open():
            sending.put(message)
        return unmet

    def received(self, response: Response) -> tuple[bool, list[Settled[Answer]]]:
        """Return whether the answer shows progress, and the requests that it settles.

        Raises Unavailable or NotOwner if the stream is of no further use.
        """
        if isinstance(response, wire.MessagesColumns):
            return self._take_in(response), []
        match response.WhichOneof("response"):
            case "messages":
                return self._take_in(wire.messages_columns(response.messages)), []
            case "done" if response.done.request_id in self._joined:
                settled_together = self._settled_together(response.done)
                return any(each.error is None for each in settled_together), settled_together
            case "done":
                settled = self._settled(response.done)
                return settled is not None and settled.error is None, [] if settled is None else [settled]
            case "opened":
                return False, self._start(response.opened)
            case "moved":
                owner = response.moved.owner_address
                raise errors.NotOwner(
                    f"topic {self._topic.decode()!r} moved to {owner or 'an unknown owner'}", owner_address=owner
                )
        # Or a kind of answer that this version does not know
        return False, []

    def interrupted(self, error: errors.TarryError) -> list[Settled[Answer]]:
        """Note that the stream broke and will be opened again; return the requests that cannot be repeated."""
        self._forget_stream()
        self.last_error = error
        return []

    def failed(self, error: errors.TarryError) -> list[Settled[Answer]]:
        """Note that no other stream will be opened; return every request that is not durable."""
        self._forget_stream()
        self.ended = error
        return [streams.Settled(number, request.answer, None, error) for number, request in self._unconfirmed.items()]

    def remove(self, request_id: int) -> None:
        """Forget a request whose answer is settled."""
        was_bounded = self._is_bounded
        self._unconfirmed_rows -= self._unconfirmed.pop(request_id).size_rows
        if was_bounded:
            self._grant(self._windows.items())

    # Kinds of subscriptions differ in these

    @abc.abstractmethod
    def _open(self) -> list[bytes]:
        """Return the first messages of a stream, with everything held and everything not known to be acknowledged."""

    @abc.abstractmethod
    def _take_in(self, messages: wire.MessagesColumns) -> bool:
        """Take rows in; return whether they come from the owner."""

    @abc.abstractmethod
    def _receiver_of(self, given: batch.Batch) -> int | None:
        """Return the receiver of a batch, or None if it is no longer there."""

    # Shared parts

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed("the subscription is closed")
        self.raise_ended()

    def _unmet(self, needs: attempts.Need | None) -> errors.Unsupported | None:
        """Return the failure of a request that needs a feature the daemon lacks, or None."""
        return None if needs is None else needs.unmet(self._features, f"the daemon of topic {self._topic.decode()!r}")

    def _name_positions(
        self,
        encode: Callable[[int, Rows], bytes],
        rows: Rows,
        positions: columns.Positions,
        read: Callable[[dispatch_pb2.Done, results.Ignored], object],
        answer: Answer,
        needs: attempts.Need | None = None,
    ) -> Request[Answer]:
        """Send a request about positions."""
        number = self._next_request_id()
        return self._send(Request(number, encode, rows, answer, read, positions, positions.rows, needs=needs))

    def _next_request_id(self) -> int:
        self._last_request_id += 1
        return self._last_request_id

    def _send(self, request: Request[Answer]) -> Request[Answer]:
        """Send a request now, an acknowledgement after lingering, and on every stream until it is answered.

        Raises InvalidArgument if the wire cannot hold it.
        """
        message = None if self._may_linger(request) else request.message()
        self._unconfirmed[request.request_id] = request
        self._unconfirmed_rows += request.size_rows
        if self._sending is not None:
            if message is None:
                self._linger(request)
            else:
                self.send_lingering()
                self._sending.put(message)
        return request

    def _may_linger(self, request: Request[Answer]) -> bool:
        """Return whether it may be joined with others. An answer without indexes cannot be divided among them."""
        if self._ack_linger.is_off or not request.is_acknowledgement:
            return False
        return self._features is not None and attempts.HANDOUT_NAMES in self._features

    def _linger(self, request: Request[Answer]) -> None:
        """Let an acknowledgement wait for others; the stream must be open."""
        self._lingering.append(request)
        self._lingering_rows += request.size_rows
        if self._lingering_rows >= self._positions_max:
            self.send_lingering()
        elif not self._is_linger_timed and self._sending is not None:
            self._is_linger_timed = True
            self._sending.put_after(self._ack_linger.wait_s(), self._end_linger)

    def _end_linger(self) -> None:
        """Send lingering acknowledgements at the end of their time.

        The time may be that of ones already sent; later ones then wait less.
        """
        self._is_linger_timed = False
        self.send_lingering()

    def _forget_stream(self) -> None:
        """Forget the stream, with everything sent on it or waiting for it."""
        self._opening = self._sending = self._features = None
        self._lingering, self._lingering_rows, self._is_linger_timed = [], 0, False
        self._joined = {}

    def _give_back(self, given: batch.HandedOut, positions: columns.Positions, requests: list[Request[Answer]]) -> None:
        """Stop holding the positions because of these requests."""
        if isinstance(given, batch.Batch):
            receiver = self._receiver_of(given)
            leaving = [] if receiver is None else [(receiver, given)]
        else:
            leaving = [(number, part) for number, each in self._windows.items() for part in each.held.find(positions)]
        for number, part in leaving:
            self._windows[number].held.give_back(part)
        for request in requests:
            request.leaving = leaving
            if len(requests) > 1:
                request.leaving = [
                    (number, found) for number, part in leaving for found in batch.among([part], request.positions)
                ]
        self._grant((number, self._windows[number]) for number, _ in leaving)

    def _declared(self) -> tuple[list[tuple[int, batch.Batch]], list[tuple[int, batch.Batch]]]:
        """Return what a new stream declares, by receiver: held positions, and those that may be acknowledged by now."""
        held = [(number, part) for number, window in self._windows.items() for part in window.held.batches()]
        leaving = [
            (number, part)
            for request in self._unconfirmed.values()
            for number, part in request.leaving
            if number in self._windows
        ]
        # A position that was redelivered before its negative acknowledgement was answered is in both, or in two
        # requests.
        return held, stream_requests.without(distinct(leaving), batch.concatenate([part.positions for _, part in held]))

    @property
    def _is_bounded(self) -> bool:
        """True if too much waits to become durable, so that no permits are granted."""
        permits = sum(window.permits for window in self._windows.values())
        return self._unconfirmed_rows >= _UNCONFIRMED_PER_PERMIT * permits

    def _grant(self, windows: Iterable[tuple[int, Window]]) -> None:
        """Send the free permits, if they are worth a message."""
        if self._sending is None or self._is_bounded:
            return
        for receiver, window in windows:
            if window.is_worth_a_grant:
                free = window.free
                window.granted += free
                self._sending.put(wire.encode_flow(free, receiver))

    def _start(self, opened: dispatch_pb2.Opened) -> list[Settled[Answer]]:
        """Start on an open stream: send requests again, and permits for all that is not held."""
        if opened.epoch < self.epoch:
            raise errors.Unavailable(f"a former owner answered, of epoch {opened.epoch}; {self.epoch} was seen")
        self.epoch = opened.epoch
        self._sending = self._opening
        settled = [each for request in self._unconfirmed.values() if (each := self._repeat(request)) is not None]
        self.send_lingering()
        self._grant(self._windows.items())
        self.streams_opened += 1
        self.rebuild_needed = tuple(results.RebuildNeeded.from_message(each) for each in opened.rebuild_needed)
        return settled

    def _repeat(self, request: Request[Answer]) -> Settled[Answer] | None:
        """Send a request on a new stream, or return what settles it if nothing is left to ask for."""
        if request.asks_for_nothing:
            return request.settled_unsent()
        if self._may_linger(request):
            self._lingering.append(request)
        elif self._sending is not None:
            self.send_lingering()
            self._sending.put(request.message())
        return None

    def _is_of_owner(self, epoch: int) -> bool:
        """Return whether an answer with this epoch is valid; remember the highest."""
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        return True

    def _settled(self, done: dispatch_pb2.Done) -> Settled[Answer] | None:
        request = self._unconfirmed.get(done.request_id)
        if not self._is_of_owner(done.epoch) or request is None:
            return None
        if not done.HasField("error"):
            return request.settled(done)
        error = errors.from_status(done.error)
        if isinstance(error, errors.NotOwner):
            raise error
        if request.asks_for_nothing:
            # All of it was taken back before it was sent again.
            return request.settled_unsent()
        if errors.is_retryable(error) and self._sending is not None:
            self._sending.put_after(self._policy.delay_s(error, request.attempt), request.message)
            request.attempt += 1
            self.last_error = error
            return None
        return streams.Settled(done.request_id, request.answer, None, error)

    def _settled_together(self, done: dispatch_pb2.Done) -> list[Settled[Answer]]:
        """Return what the answer to joined acknowledgements settles."""
        joined = self._joined[done.request_id]
        if not self._is_of_owner(done.epoch):
            return []
        if not done.HasField("error"):
            del self._joined[done.request_id]
            return joined.settled(done)
        error = errors.from_status(done.error)
        if isinstance(error, errors.NotOwner):
            raise error
        if errors.is_retryable(error) and self._sending is not None:
            self._sending.put_after(self._policy.delay_s(error, joined.attempt), joined.message)
            joined.attempt += 1
            self.last_error = error
            return []
        # One of them may be wrong while the others are not, so each is sent separately.
        del self._joined[done.request_id]
        for member in joined.members:
            if self._sending is not None and not member.asks_for_nothing:
                self._sending.put(member.message())
        return [member.settled_unsent() for member in joined.members if member.asks_for_nothing]


class SharedReceiving(Receiving[Answer, batch.Batch]):
    """A SHARED subscription: one receiver, any position."""

    def __init__(
        self,
        topic: str,
        subscription: str,
        *,
        permits: int,
        rows_max: int,
        bytes_max: Callable[[], int],
        policy: attempts.RetryPolicy,
        ack_linger: stream_requests.AckLinger | None = None,
    ) -> None:
        """Give its receiver these permits. Without `ack_linger` no acknowledgement waits. Raises InvalidArgument."""
        check_permits(permits)
        self._window = Window(permits)
        windows = {0: self._window}
        linger = ack_linger or stream_requests.AckLinger(0)
        super().__init__(
            topic, subscription, windows, rows_max=rows_max, bytes_max=bytes_max, policy=policy, ack_linger=linger
        )

    def _open(self) -> list[bytes]:
        held, leaving = self._declared()
        self._window.granted = 0
        positions = batch.concatenate([part.positions for _, part in held + leaving])
        kind = dispatch_pb2.SUBSCRIPTION_TYPE_SHARED
        return wire.encode_open(self._topic, self._subscription, kind, positions, bytes_max=self._open_bytes_max)

    def _take_in(self, messages: wire.MessagesColumns) -> bool:
        window = self._window
        window.granted = max(0, window.granted - len(messages.entry_id))
        if not self._is_of_owner(messages.epoch):
            self._grant(self._windows.items())
            return False
        self._last_batch += 1
        received = batch.Batch.from_columns(messages, self._last_batch)
        window.held.add(received)
        self._inbox.append(received)
        return True

    def _receiver_of(self, given: batch.Batch) -> int | None:
        return 0


def check_permits(permits: int) -> None:
    """Raise InvalidArgument for permits that the wire cannot grant."""
    if not 1 <= permits <= PERMITS_MAX:
        raise errors.InvalidArgument(f"permits is {permits}; it must be from 1 to {PERMITS_MAX}")
