"""One subscription's side of its stream: what is received, held and given back. No I/O, no threads, no waiting.

Owns: the permits, what is held and declared when a stream is opened again, sending and repeating requests until they
are durable (acknowledgements, negative ones, extensions of the ack time-out), and dropping what a former owner sends.
Does not own: what a request names and is settled with (`tarry.stream_requests`); the stream (`tarry.streams`); the
account of held rows (`tarry.batch`); what came and was not taken (`tarry.receiving`); consumers and plans
(`tarry.key_shared_receiving`); who waits for what (`tarry.aio.subscription`).

Permits. `permits` is how many positions may be received and neither acknowledged nor released. They come back when a
batch is acknowledged, positively or negatively (not only when that is durable), or released; they are granted again in
portions, at least a quarter of all unless the daemon has none left. When requests about eight times `permits` positions
wait to become durable, no more are granted until some are. Each receiver of a stream has a window of them; the one of a
SHARED subscription is receiver 0.

Reopening. `Open` declares every position that is held and every one whose acknowledgement is not known to be durable:
they stay in flight and are not sent again. After `Opened` these requests are sent again.

Forwarded. A negative acknowledgement that is `forwarded` may name what was acknowledged long ago, or was received by
another stream: of what it names only what is held here by that very name is given back, or declared. A stream opens
with what its daemon can do; where that does not know `forwarded`, such requests fail, and what they name is not
declared: it is handed out again.

Lingering. Acknowledgements may wait a few ms for others (`tarry.stream_requests`), and go out as one request of the
wire; each is settled by itself. They give their permits back at once, and count as requests that are not durable: a
stream that is opened meanwhile declares them. Whatever else is sent, but for permits, sends them before it. Where the
daemon does not say which positions it ignored, none waits.

Whoever drives it settles what a method returns, and only then calls `remove`: who waits until every request is durable
finds every answer settled.

What came on a stream and nobody has taken yet, in the order in which it came.

Owns: which batches are joined when they are taken, and when enough is there to stop waiting for more.
Does not own: permits and what is held (`tarry.receiving`); what a joined batch is (`tarry.batch`).

Batches are joined when they are taken, not when they come: what is taken back meanwhile has left them by then. Those of
one receiver and one epoch are joined, past batches of other receivers, but not past anything else: what a receiver is
told of what it has stays in its place among its batches.
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
"""How many rows of several batches are joined when nothing else is said."""


class Inbox(Generic[Received]):
    """Batches, and whatever else comes between them."""

    def __init__(self) -> None:
        self._waiting: deque[Received] = deque()
        self._rows = 0
        # What comes that is no batch.
        self._others = 0

    def __len__(self) -> int:
        """How many batches and other things wait, joined or not."""
        return len(self._waiting)

    def append(self, event: Received) -> None:
        """Appends an event behind all that wait."""
        self._waiting.append(event)
        self._count(event, 1)

    def keep(self, left_of: Callable[[Received], Received | None]) -> None:
        """Puts what `left_of` gives in the place of each; None: it leaves."""
        given = [left_of(event) for event in self._waiting]
        self._waiting, self._rows, self._others = deque(), 0, 0
        for event in given:
            if event is not None:
                self.append(event)

    def waited_ms(self, now_ms: int) -> int:
        """How long the first batch waits already, by the clock that is given; 0 where none comes first."""
        first: Any = self._waiting[0] if self._waiting else None
        return max(0, now_ms - first.received_at_ms) if isinstance(first, batch.Batch) else 0

    def is_enough(self, max_rows: int) -> bool:
        """Whether nothing that may come would be taken together with what is here, or so many rows are here."""
        if not self._waiting or self._others or self._rows >= max_rows:
            return True
        first: Any = self._waiting[0]
        last: Any = self._waiting[-1]
        return bool(first.epoch != last.epoch)

    def take(self, max_rows: int, receiver_of: Callable[[Any], int | None]) -> Received:
        """What came first: joined with the batches that may go with it, at most so many rows. There is something."""
        first: Any = self._waiting.popleft()
        self._count(first, -1)
        taken: Any = first
        if isinstance(first, batch.Batch):
            parts = [self._cut(first, max_rows)]
            taken = batch.Batch.concat(parts + self._behind(first, max_rows - len(first), receiver_of))
        joined: Received = taken
        return joined

    def _behind(self, first: batch.Batch, room: int, receiver_of: Callable[[Any], int | None]) -> list[batch.Batch]:
        """Takes out what may go with the first, at most so many rows."""
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
        """The first rows of a batch that was taken out; the others go back to the front."""
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
    """Refuses what a caller cannot mean: raises InvalidArgument."""
    columns.check_unsigned("max_rows", max_rows, bits=64)
    columns.check_unsigned("linger_ms", linger_ms, bits=32)
    if max_rows < 1:
        raise errors.InvalidArgument(f"max_rows is {max_rows}; it must be at least 1")


Response: TypeAlias = wire.MessagesColumns | dispatch_pb2.SubscribeResponse
"""What comes on the stream: due positions, or something else."""


def read(response: bytes) -> Response:
    return wire.decode_messages(response) or dispatch_pb2.SubscribeResponse.FromString(response)


METHOD: streams.StreamMethod[Response] = streams.StreamMethod("/tarry.v1.Dispatch/Subscribe", read)

PERMITS_MAX = 2**32 - 1
_UNCONFIRMED_PER_PERMIT = 8
_GRANTS_PER_WINDOW = 4

Rows = TypeVar("Rows", columns.Positions, columns.NackColumns)


@dataclasses.dataclass(slots=True)
class Window:
    """What one receiver may be sent, and what it holds."""

    permits: int
    granted: int = 0
    held: batch.HeldPositions = dataclasses.field(default_factory=batch.HeldPositions)

    @property
    def free(self) -> int:
        """Permits that are neither used nor granted; below 0 when more came than was granted."""
        return self.permits - len(self.held) - self.granted

    @property
    def is_worth_a_grant(self) -> bool:
        free = self.free
        return free > 0 and (self.granted == 0 or free * _GRANTS_PER_WINDOW >= self.permits)


def distinct(held: list[tuple[int, batch.Batch]]) -> list[tuple[int, batch.Batch]]:
    """Each position where it is named last."""
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
    """What all kinds of subscriptions have alike.

    `Answer` is the driver's kind of future, made by it and given back in what is settled; `Received` is what `take`
    gives.
    """

    def __init__(
        self,
        topic: str,
        subscription: str,
        windows: dict[int, Window],
        *,
        rows_max: int,
        policy: attempts.RetryPolicy,
        ack_linger: stream_requests.AckLinger,
    ) -> None:
        """Nothing is received before a stream is `opened`. Raises InvalidArgument."""
        self._topic = wire.utf8("topic", topic)
        self._subscription = wire.utf8("subscription", subscription)
        self._windows = windows
        self._rows_max = rows_max
        self._policy = policy
        self._ack_linger = ack_linger
        # What is not sent yet though there is a stream, and whether the end of its time will be told.
        self._lingering: list[Request[Answer]] = []
        self._lingering_rows = 0
        self._is_linger_timed = False
        # Of this stream, by their numbers on the wire.
        self._joined: dict[int, stream_requests.Joined[Answer]] = {}
        self._inbox: Inbox[Received] = Inbox()
        self._unconfirmed: dict[int, Request[Answer]] = {}
        self._unconfirmed_rows = 0
        self._last_request_id = 0
        self._last_batch = 0
        self._opening: streams.Sending | None = None
        self._sending: streams.Sending | None = None
        self._features: frozenset[str] | None = None
        """What the daemon of the stream can do; None: there is no stream."""
        self.epoch = 0
        self.streams_opened = 0
        self.rebuild_needed: tuple[results.RebuildNeeded, ...] = ()
        self.last_error: errors.TarryError | None = None
        self.ended: errors.TarryError | None = None
        self.closed = False

    @property
    def held(self) -> int:
        """Positions received, and neither acknowledged nor released."""
        return sum(len(window.held) for window in self._windows.values())

    @property
    def has_news(self) -> bool:
        """Whether `take` has something, or tells that there will be nothing."""
        return bool(self._inbox) or self.ended is not None or self.closed

    @property
    def is_confirmed(self) -> bool:
        """Whether every request is durable, or `raise_ended` tells that it will not be."""
        return not self._unconfirmed or self.ended is not None

    def take(self, max_rows: int = ROWS_MAX) -> Received | None:
        """The next of what came, joined with what came behind it where that may be, at most so many rows; None when
        there is none yet, or when it is closed. Raises what ended it.
        """
        if self.closed:
            return None
        if self._inbox:
            return self._inbox.take(max_rows, self._receiver_of)
        self.raise_ended()
        return None

    def is_enough(self, max_rows: int) -> bool:
        """Whether waiting for more would bring `take` nothing."""
        return self._inbox.is_enough(max_rows) or self.ended is not None or self.closed

    def lingers_s(self, linger_ms: int, now_ms: int) -> float:
        """How long what came first is still to wait for more, when it waits so long from its coming on."""
        return max(0, linger_ms - self._inbox.waited_ms(now_ms)) / 1000

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
        """Sends acknowledgements, now or together with others, each with an answer that `promise` makes. Raises
        InvalidArgument, what ended it.
        """
        positions = batch.positions_of(given)
        self._check_open()
        self._ack_linger.acknowledged(alone=not self._unconfirmed)
        requests = [
            self._name_positions(wire.encode_acknowledge, part, part, _ignored, promise())
            for part in columns.parts(positions, self._rows_max)
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
        """Sends negative acknowledgements, as `acknowledge`. Raises Unsupported, too."""
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
            for part in nack.requests(self._rows_max)
        ]
        # Of a message of a batch the entry as a whole stays here; a batch that is forwarded may be of another stream.
        named = batch_index is not None or forwarded
        self._give_back(positions if named else given, positions, requests)
        return [request.answer for request in requests]

    def extend(self, given: batch.HandedOut, promise: Callable[[], Answer]) -> list[Answer]:
        """Sends extensions of the ack time-out, as `acknowledge`; the positions stay here."""
        positions = batch.positions_of(given)
        self._check_open()
        return [
            self._name_positions(wire.encode_extend, part, part, _ignored, promise()).answer
            for part in columns.parts(positions, self._rows_max)
        ]

    def acknowledge_unconfirmed(self, given: batch.HandedOut) -> None:
        """Sends acknowledgements without answer. Raises InvalidArgument, what ended it."""
        positions = batch.positions_of(given)
        self._check_open()
        if self._sending is not None:
            self.send_lingering()
            for part in columns.parts(positions, self._rows_max):
                self._sending.put(wire.encode_acknowledge(0, part))
        self._give_back(given, positions, [])

    def send_lingering(self) -> None:
        """Sends the acknowledgements that wait for others, without waiting any longer."""
        lingering, self._lingering, self._lingering_rows = self._lingering, [], 0
        if self._sending is None:
            return
        for group in stream_requests.joinable(lingering, self._rows_max):
            if len(group) == 1:
                self._sending.put(group[0].message())
                continue
            joined = stream_requests.Joined(self._next_request_id(), group)
            self._joined[joined.request_id] = joined
            self._sending.put(joined.message())

    def release(self, given: batch.Batch) -> None:
        """Takes the permits back. Raises what ended it."""
        self._check_open()
        self._give_back(given, given.positions, [])

    # What happens to the stream.

    def opened(self, sending: streams.Sending, features: frozenset[str]) -> list[Settled[Answer]]:
        """A stream has begun: it is opened with what is held. Nothing else is sent before it is answered. `features`:
        what the daemon can do. The requests that it cannot answer.
        """
        self._opening, self._features = sending, features
        unmet: list[Settled[Answer]] = [
            streams.Settled(number, request.answer, None, error)
            for number, request in self._unconfirmed.items()
            if (error := self._unmet(request.needs)) is not None
        ]
        for each in unmet:
            self._unconfirmed[each.request_id].leaving = []
        sending.put(self._open())
        return unmet

    def received(self, response: Response) -> tuple[bool, list[Settled[Answer]]]:
        """Whether the answer shows progress, and the requests that are settled now.

        Raises Unavailable, NotOwner: the stream is of no use any more.
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
        # Or a kind of answer that this version does not know.
        return False, []

    def interrupted(self, error: errors.TarryError) -> list[Settled[Answer]]:
        """The stream is gone and will be opened again: the requests that cannot be repeated."""
        self._forget_stream()
        self.last_error = error
        return []

    def failed(self, error: errors.TarryError) -> list[Settled[Answer]]:
        """There will be no other stream: every request that is not durable."""
        self._forget_stream()
        self.ended = error
        return [streams.Settled(number, request.answer, None, error) for number, request in self._unconfirmed.items()]

    def remove(self, request_id: int) -> None:
        """Forgets a request whose answer is settled."""
        was_bounded = self._is_bounded
        self._unconfirmed_rows -= self._unconfirmed.pop(request_id).size_rows
        if was_bounded:
            self._grant(self._windows.items())

    # What kinds of subscriptions do each in its way.

    @abc.abstractmethod
    def _open(self) -> bytes:
        """The bytes of the first message of a stream: everything held, and what is not known to be acknowledged."""

    @abc.abstractmethod
    def _take_in(self, messages: wire.MessagesColumns) -> bool:
        """Whether it is of the owner."""

    @abc.abstractmethod
    def _receiver_of(self, given: batch.Batch) -> int | None:
        """None when it is not there any more."""

    # What they share.

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed("the subscription is closed")
        self.raise_ended()

    def _unmet(self, needs: attempts.Need | None) -> errors.Unsupported | None:
        """The failure of a request that the daemon of the stream does not know."""
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
        """Sends a request about positions."""
        number = self._next_request_id()
        return self._send(Request(number, encode, rows, answer, read, positions, positions.rows, needs=needs))

    def _next_request_id(self) -> int:
        self._last_request_id += 1
        return self._last_request_id

    def _send(self, request: Request[Answer]) -> Request[Answer]:
        """Sends it now, an acknowledgement after lingering, and on every stream until it is answered. Raises
        InvalidArgument: the wire cannot hold it.
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
        """Whether it may be sent together with others. An answer without indexes cannot be shared out."""
        if self._ack_linger.is_off or not request.is_acknowledgement:
            return False
        return self._features is not None and attempts.HANDOUT_NAMES in self._features

    def _linger(self, request: Request[Answer]) -> None:
        """Has an acknowledgement wait for others; the stream is open."""
        self._lingering.append(request)
        self._lingering_rows += request.size_rows
        if self._lingering_rows >= self._rows_max:
            self.send_lingering()
        elif not self._is_linger_timed and self._sending is not None:
            self._is_linger_timed = True
            self._sending.put_after(self._ack_linger.wait_s(), self._end_linger)

    def _end_linger(self) -> None:
        """The time is over. It may be that of what was sent already; then what came since waits less."""
        self._is_linger_timed = False
        self.send_lingering()

    def _forget_stream(self) -> None:
        """It is gone, with everything that was sent or waited to be sent on it."""
        self._opening = self._sending = self._features = None
        self._lingering, self._lingering_rows, self._is_linger_timed = [], 0, False
        self._joined = {}

    def _give_back(self, given: batch.HandedOut, positions: columns.Positions, requests: list[Request[Answer]]) -> None:
        """The positions are held no longer; the requests say why."""
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
        """What is declared when a stream is opened, by receiver: what is held, and what may be acknowledged by now."""
        held = [(number, part) for number, window in self._windows.items() for part in window.held.batches()]
        leaving = [
            (number, part)
            for request in self._unconfirmed.values()
            for number, part in request.leaving
            if number in self._windows
        ]
        # What was redelivered before its negative acknowledgement was answered is both, or in two requests.
        return held, stream_requests.without(distinct(leaving), batch.concatenate([part.positions for _, part in held]))

    @property
    def _is_bounded(self) -> bool:
        """Whether so much waits to become durable that nothing more is granted."""
        permits = sum(window.permits for window in self._windows.values())
        return self._unconfirmed_rows >= _UNCONFIRMED_PER_PERMIT * permits

    def _grant(self, windows: Iterable[tuple[int, Window]]) -> None:
        """Sends the permits that are free, when they are worth a message."""
        if self._sending is None or self._is_bounded:
            return
        for receiver, window in windows:
            if window.is_worth_a_grant:
                free = window.free
                window.granted += free
                self._sending.put(wire.encode_flow(free, receiver))

    def _start(self, opened: dispatch_pb2.Opened) -> list[Settled[Answer]]:
        """The stream is open: requests go out again, and permits for all that is not held."""
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
        """Sends it on a new stream; or what it is settled with because there is nothing to ask for any more."""
        if request.asks_for_nothing:
            return request.settled_unsent()
        if self._may_linger(request):
            self._lingering.append(request)
        elif self._sending is not None:
            self.send_lingering()
            self._sending.put(request.message())
        return None

    def _is_of_owner(self, epoch: int) -> bool:
        """Whether an answer with this epoch counts."""
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
        """What the answer to joined acknowledgements settles."""
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
        # One of them may be wrong, and the others are not: each is asked for by itself.
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
        policy: attempts.RetryPolicy,
        ack_linger: stream_requests.AckLinger | None = None,
    ) -> None:
        """`permits` are those of its one receiver. `ack_linger`: None: none waits. Raises InvalidArgument."""
        check_permits(permits)
        self._window = Window(permits)
        windows = {0: self._window}
        linger = ack_linger or stream_requests.AckLinger(0)
        super().__init__(topic, subscription, windows, rows_max=rows_max, policy=policy, ack_linger=linger)

    def _open(self) -> bytes:
        held, leaving = self._declared()
        self._window.granted = 0
        positions = batch.concatenate([part.positions for _, part in held + leaving])
        return wire.encode_open(self._topic, self._subscription, dispatch_pb2.SUBSCRIPTION_TYPE_SHARED, positions)

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
    """Refuses permits that the wire cannot grant: raises InvalidArgument."""
    if not 1 <= permits <= PERMITS_MAX:
        raise errors.InvalidArgument(f"permits is {permits}; it must be from 1 to {PERMITS_MAX}")
