"""Authenticates and authorizes calls; every call of the contract passes here first.

The option `access` of a call in the proto names the scope that it needs. `daemon.auth` has the identities. A call is
refused for its caller or its scope before its message is received: what it has sent of it is dropped, and a silent
stream ends at once. The topic is checked as soon as the request that names it is parsed: in the frame of calls
with one request (`unary`), and where a stream reads the name. A refusal never depends on what exists.

Open calls end when their identity is revoked or its rights change.

For quotas, a caller is its identity, or else the name that the client gives itself in the metadata, or else its host.
That name is not verified.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Set
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf import message
from google.protobuf.descriptor import MethodDescriptor

from daemon import audit_log, errors
from daemon.audit_log import AuditLog
from daemon.auth import EVERY_TOPIC, Door, Identities, Identity, Scope, bearer_of
from daemon.grpc_services import status
from daemon.grpc_services.receiving import Receiving
from tarry.v1 import access_pb2

AUTHORIZATION_KEY: Final = "authorization"
# gRPC's keys of the names in a client's certificate
_CERTIFICATE_NAMES: Final = ("x509_common_name", "x509_subject_alternative_name")
# Time for which an ending call waits for a response in flight (seconds)
WRITE_MAX_S: Final = 5.0
# By which a caller may name a call in the audit log
REQUEST_ID_KEY: Final = "x-request-id"
REQUEST_ID_LENGTH_MAX: Final = 128
# Ends of a call before anything was staged: OK and UNKNOWN follow that, and faults of the daemon may
NOTHING_CHANGED: Final = frozenset(grpc.StatusCode) - {
    grpc.StatusCode.OK,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DATA_LOSS,
}
# A request of a call that is open to everyone, such as the name of a service
OPEN_REQUEST_BYTES_MAX: Final = 4 << 10

Refusal: TypeAlias = errors.Unauthenticated | errors.PermissionDenied
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The access rule of a call. `scope` is None if any identity may make it.

    `topic_wide` is the scope of a request without a subscription. `topic` is the path of fields to the topic's name,
    empty if the call covers all topics. With `any_prefix` no topic prefix is needed. With `audited` the audit log
    records the call, and with `audited_with` each request in which that field is set.
    """

    name: str
    scope: Scope | None
    topic_wide: Scope | None
    topic: tuple[str, ...]
    any_prefix: bool
    audited: bool
    audited_with: str

    @property
    def is_counted(self) -> bool:
        """True if requests may take long, and need room. Health and versions are asked for when nothing else goes."""
        return self.scope is not None or bool(self.topic)

    @classmethod
    def of(cls, method: MethodDescriptor) -> Rule:
        """Return the rule that the call has in the proto. Raises `InvariantViolated` if it has none."""
        options = method.GetOptions()
        if not options.HasExtension(access_pb2.access):
            raise errors.InvariantViolated(f"{method.full_name} has no option `access` in the proto")
        access = options.Extensions[access_pb2.access]
        scope = _scope(access.scope)
        return cls(
            name=f"{method.containing_service.name}/{method.name}",
            scope=scope,
            topic_wide=_scope(access.topic_wide) or scope,
            topic=tuple(access.topic.split(".")) if access.topic else (),
            any_prefix=access.any_prefix,
            audited=access.audited,
            audited_with=access.audited_with,
        )

    def topic_of(self, request: message.Message) -> str:
        """Return the topic that a request names; "" if it names none."""
        found: Any = request
        for field in self.topic:
            found = getattr(found, field)
        return found if self.topic else EVERY_TOPIC


class Context:
    """One call, authorized or refused: gRPC's context, and the caller's rights.

    `identity` is None if the daemon has no identities: then every caller may do everything.
    """

    # Class attributes, since most calls never change them
    identity: Identity | None = None
    # For the audit log: known once the request is read, and the outcome once the call is over
    topic = subscription = ""
    is_audited = False
    counts: Mapping[str, Any] = MappingProxyType({})
    outcome = grpc.StatusCode.UNKNOWN
    # Goes on if its caller leaves
    work: asyncio.Future[message.Message | bytes] | None = None
    is_over = False
    is_refused = False
    # Nothing was done of a request that was not checked.
    _is_checked = False
    # Bytes of its one request that are not decided
    undecided_bytes = 0
    # The reason for which the call is ended early
    ended: errors.TarryError | None = None
    # Serves the call; None once it was cancelled for the call's end
    task: asyncio.Task[Any] | None = None
    _is_writing = False

    def __init__(
        self,
        context: grpc.aio.ServicerContext[bytes, bytes],
        rule: Rule,
        refused: Callable[[Context, Refusal], None],
        audit_log: AuditLog,
        receiving: Receiving,
    ) -> None:
        """Wrap gRPC's context. Calls `refused` with each refusal. Awaits messages as `receiving` lets it."""
        self.receiving = receiving
        self.grpc_context = context
        self.read: Callable[[], Awaitable[object]] = self._read_in_turn
        self._read = context.read
        self.peer = context.peer
        self.caller = host_of(context.peer())
        """The identity of the caller, or else its host"""
        self.invocation_metadata = context.invocation_metadata
        self.time_remaining = context.time_remaining
        self.auth_context = context.auth_context
        self._abort = context.abort
        self._write = context.write
        self._rule = rule
        self._refused = refused
        self._audit_log = audit_log

    @property
    def is_ending(self) -> bool:
        """True once the call was told to end."""
        return self.ended is not None

    async def _read_in_turn(self) -> object:
        """Return the next message as bytes, or anything else after the caller's last one.

        It has its turn until the caller has named a topic that it may use.
        """
        if EVERY_TOPIC in self.topic_prefixes:
            self.read = self._read
            return await self._read()
        message = await self.receiving.in_turn(self, self._read)
        if isinstance(message, bytes):
            # `pipeline` counts what takes long.
            self.receiving.decided(len(message))
        return message

    async def write(self, response: bytes) -> None:
        """Send a response, unless the call is about to end.

        gRPC takes no status while a response is in flight, so the call ends after it.
        """
        if self.undecided_bytes:
            # The caller may read this answer, and those that follow, as slowly as it likes.
            self.decided()
        if self.ended is not None:
            # Returns, since the code that ends the call may wait for a lock that is held for this.
            await asyncio.sleep(0)
            return
        self._is_writing = True
        try:
            await self._write(response)
        except grpc.aio.InternalError as error:
            # A response in flight fails when its caller leaves, and gRPC may cancel the call only afterwards.
            raise asyncio.CancelledError("the caller has left") from error
        finally:
            self._is_writing = False
            if self.ended is not None:
                self._cancel()

    def decided(self) -> None:
        """Count the call's request no longer."""
        size_bytes, self.undecided_bytes = self.undecided_bytes, 0
        self.receiving.decided(size_bytes)

    def count_until(self, work: asyncio.Future[Any]) -> None:
        """Count the call's request until the end of work that continues although its caller has left."""
        size_bytes, self.undecided_bytes = self.undecided_bytes, 0
        work.add_done_callback(lambda _: self.receiving.decided(size_bytes))

    def end(self, why: errors.TarryError) -> None:
        """End the call early."""
        self.ended = why
        if self._is_writing:
            # Limited, since a caller that reads nothing keeps the response in flight.
            asyncio.get_running_loop().call_later(WRITE_MAX_S, self._cancel)
        else:
            self._cancel()

    def _cancel(self) -> None:
        task, self.task = self.task, None
        if task is not None:
            task.cancel()

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata) -> NoReturn:
        """End the call with a status."""
        self.outcome, self.is_over = code, True
        await self._abort(code, details, trailing_metadata)

    @property
    def topic_prefixes(self) -> tuple[str, ...]:
        """The prefixes of the topics that the caller may know of."""
        return (EVERY_TOPIC,) if self.identity is None else self.identity.topic_prefixes

    def admit(self, identities: Identities) -> None:
        """Authenticate the caller, and check that it has a scope with which the call may be made.

        Raises `Unauthenticated` and `PermissionDenied`.
        """
        try:
            self.identity = self._identify(identities)
        except errors.Unauthenticated as refusal:
            self._refuse(refusal)
        self.caller = self.identity.name
        self._check_scope({self._rule.scope, self._rule.topic_wide})

    def lost(self, identities: Identities) -> errors.TarryError | None:
        """Return the reason why the call may not continue with these identities, or None if it may."""
        if self.identity is None:
            return None
        name = self.identity.name
        try:
            if self._identify(identities).has_rights_of(self.identity):
                return None
        except errors.Unauthenticated:
            return errors.Unauthenticated(f"what showed identity {name} was revoked while the call was open")
        return errors.Unavailable(f"what identity {name} may do has changed while the call was open; call again")

    def known(self) -> dict[str, str]:
        """Return the audit log's fields of the call."""
        return {
            "identity": audit_log.UNKNOWN if self.identity is None else self.identity.name,
            "peer": self.peer(),
            "call": self._rule.name,
            "topic": self.topic,
            "subscription": self.subscription,
            "request_id": self._request_id(),
        }

    def tell(self) -> None:
        """Append the call's line to the audit log: now, or at the end of work that goes on although its caller left."""
        # gRPC crashes if it is asked for the peer of a call that is over.
        known, work = self.known(), self.work
        if work is None:
            self._append(known, self.outcome, self.counts, may_have_changed=self._is_checked)
        elif work.done():
            self._tell_work(known, work)
        else:
            work.add_done_callback(functools.partial(self._tell_work, known))

    def _tell_work(self, known: Mapping[str, Any], work: asyncio.Future[message.Message | bytes]) -> None:
        outcome = _outcome_of(work)
        answer = work.result() if outcome is grpc.StatusCode.OK else None
        done = counts_of(answer) if isinstance(answer, message.Message) else {}
        answered = {} if outcome is self.outcome else {"answered": self.outcome.name}
        self._append({**known, **answered}, outcome, {**self.counts, **done})

    def tell_request(
        self, work: asyncio.Future[Any], counts: Callable[[Any], dict[str, int]], **named: str | int
    ) -> None:
        """Append a line for a request of a stream at the end of its work. `counts` makes the counts of its outcome."""
        known = {**self.known(), **named}

        def tell(done: asyncio.Future[Any]) -> None:
            outcome = _outcome_of(done)
            self._append(known, outcome, counts(done.result()) if outcome is grpc.StatusCode.OK else {})

        work.add_done_callback(tell)

    def _append(
        self,
        known: Mapping[str, Any],
        outcome: grpc.StatusCode,
        counts: Mapping[str, Any],
        *,
        may_have_changed: bool = True,
    ) -> None:
        changed = may_have_changed and outcome not in NOTHING_CHANGED
        self._audit_log.tell("call", **known, outcome=outcome.name, counts=dict(counts), changed=changed)

    def _request_id(self) -> str:
        """Return the id that the caller gives the call in its metadata, or "" if there is none."""
        for key, value in self.invocation_metadata() or ():
            if key == REQUEST_ID_KEY and isinstance(value, str):
                return value[:REQUEST_ID_LENGTH_MAX]
        return ""

    def _identify(self, identities: Identities) -> Identity:
        """Return the caller by its token, or else by its certificate. Raises `Unauthenticated`."""
        given = [value for key, value in self.invocation_metadata() or () if key == AUTHORIZATION_KEY]
        if given:
            token = bearer_of(given[0]) if len(given) == 1 and isinstance(given[0], str) else None
            if token is None:
                raise errors.Unauthenticated("authorization, in the metadata, is not one `Bearer <token>`")
            found = identities.of_token(token)
            if found is None:
                raise errors.Unauthenticated("authorization, in the metadata, has a token that is no identity's")
            return found
        shown = self.auth_context()
        names = [name.decode("utf-8", "replace") for kind in _CERTIFICATE_NAMES for name in shown.get(kind, ())]
        found = identities.of_certificate(names)
        if found is None:
            certificate = f"a certificate of {', '.join(names)}, who is no identity," if names else "no certificate"
            raise errors.Unauthenticated(
                f"the call has {certificate} and no token: send `authorization: Bearer <token>` in its metadata"
            )
        return found

    def check(self, request: message.Message) -> None:
        """Refuse a request that the caller may not make. Raises `PermissionDenied`."""
        rule = self._rule
        self.is_audited = rule.audited or bool(rule.audited_with and getattr(request, rule.audited_with))
        if self.is_audited:
            self.counts = {"asked": rows} if (rows := _rows_of(request)) else {}
        self.check_named(self._rule.topic_of(request), getattr(request, "subscription", ""))
        self._is_checked = True

    def check_named(self, topic: str, subscription: str) -> None:
        """Refuse a request that names these if the caller may not make it; `subscription` is "" for none.

        Raises `PermissionDenied`.
        """
        self.topic, self.subscription = topic, subscription
        if self.identity is None:
            return
        self._check_scope({self._rule.scope if self.subscription else self._rule.topic_wide})
        if not self._rule.any_prefix:
            self.check_topic(self.topic)

    def check_topic(self, topic: str) -> None:
        """Refuse a topic that the caller may not use, whether it exists or not. Raises `PermissionDenied`."""
        if self.identity is None or self.identity.may_use(topic):
            self.read = self._read
            return
        self.topic = topic
        name = self.identity.name
        if topic == EVERY_TOPIC:
            text = f'{self._rule.name} is over all topics, and identity {name} has not the topic prefix ""'
        else:
            text = f"topic {topic!r} has none of the topic prefixes of identity {name}"
        self._refuse(errors.PermissionDenied(text))

    def _check_scope(self, any_of: Set[Scope | None]) -> None:
        """Refuse a caller that has none of these scopes; None stands for no scope, which every caller has."""
        if self.identity is None or None in any_of or not self.identity.scopes.isdisjoint(any_of):
            return
        needed = " or ".join(sorted(scope for scope in any_of if scope is not None))
        text = f"{self._rule.name} needs the scope {needed}, which identity {self.identity.name} has not"
        self._refuse(errors.PermissionDenied(text))

    def _refuse(self, refusal: Refusal) -> NoReturn:
        self.is_refused = True
        self._refused(self, refusal)
        try:
            raise refusal
        finally:
            # Its traceback has this frame. If the frame had it, both would keep the request.
            del refusal


class Admission:
    """The gate of all calls. It knows those that are open."""

    def __init__(
        self, door: Door, audit_log: AuditLog, refused: Callable[[Refusal], None], receiving: Receiving
    ) -> None:
        """Start without open calls. Calls `refused` with each refusal. Receives messages as `receiving` lets it."""
        self.door = door
        self._receiving = receiving
        self._audit_log = audit_log
        self._told = refused
        self._open: set[Context] = set()

    @property
    def open_calls(self) -> int:
        """The number of open calls, streams included."""
        return len(self._open)

    def guarded(self, method: MethodDescriptor, handler: Any) -> Any:
        """Wrap a handler of bytes so that only authorized callers reach it."""
        return self._wrapped(handler, Rule.of(method), is_open=False)

    def open_to_everyone(self, name: str, handler: Any) -> Any:
        """Wrap a handler of a call that is none of the contract, whose requests are small."""
        kind = _kind_of(handler)
        serve = getattr(handler, kind)

        def parsed(data: bytes) -> Any:
            if len(data) > OPEN_REQUEST_BYTES_MAX:
                raise errors.InvalidArgument(f"message: {len(data)} bytes, the limit is {OPEN_REQUEST_BYTES_MAX}")
            try:
                return handler.request_deserializer(data)
            except message.DecodeError as error:
                raise errors.InvalidArgument(f"message: these {len(data)} bytes are none of {name}") from error

        async def requests(call: Context) -> AsyncGenerator[Any]:
            read = call.grpc_context.read
            while isinstance(data := await self._receiving.in_turn(call, read, needs_room=False), bytes):
                yield parsed(data)

        async def served(data: Any, call: Context) -> Any:
            try:
                if kind != "stream_stream":
                    return await serve(parsed(data), call.grpc_context)
                async for answer in serve(requests(call), call.grpc_context):
                    await call.write(answer)
            except errors.TarryError as error:
                await status.abort(call, error)

        rule = Rule(name=name, scope=None, topic_wide=None, topic=(), any_prefix=True, audited=False, audited_with="")
        return self._wrapped(handler._replace(**{kind: served}), rule, is_open=True)

    def _wrapped(self, handler: Any, rule: Rule, *, is_open: bool) -> Any:
        """Make a handler that is called before a message is received, as gRPC calls those of streams of requests."""
        kind = _kind_of(handler)
        serve: Callable[[Any, Context], Awaitable[Any]] = getattr(handler, kind)
        has_one_request, is_counted = kind != "stream_stream", rule.is_counted

        async def guarding(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> Any:
            call = Context(context, rule, self._refused, self._audit_log, self._receiving)
            call.is_audited = rule.audited
            try:
                if not is_open and (identities := self.door.identities) is not None:
                    call.admit(identities)
            except (errors.Unauthenticated, errors.PermissionDenied) as refusal:
                await status.abort(call, refusal)
            task: Any = asyncio.current_task()
            call.task = task
            self._open.add(call)
            data: object = None
            try:
                try:
                    if has_one_request:
                        data = await self._receiving.in_turn(call, context.read, needs_room=is_counted)
                        if not isinstance(data, bytes):
                            raise errors.InvalidArgument("message: it is missing; the call has one request")
                        if is_counted:
                            call.undecided_bytes = len(data)
                    answer = await serve(data, call)
                    call.outcome = grpc.StatusCode.OK
                    return answer
                except errors.TarryError as error:
                    await status.abort(call, error)
                except asyncio.CancelledError:
                    if call.ended is None:
                        call.outcome = grpc.StatusCode.CANCELLED
                        raise
                    task.uncancel()
                    await status.abort(call, call.ended)
            except grpc.aio.AbortError as aborted:
                # gRPC keeps it with its call, in a cycle. Its frames, this one among them, would keep the request.
                data = aborted.__context__ = None
                raise aborted.with_traceback(None) from None
            finally:
                self._open.remove(call)
                if call.undecided_bytes:
                    self._receiving.decided(call.undecided_bytes)
                if call.is_audited and not call.is_refused:
                    call.tell()

        make = grpc.stream_unary_rpc_method_handler if kind == "unary_unary" else grpc.stream_stream_rpc_method_handler
        return make(guarding, response_serializer=handler.response_serializer)

    def identities_changed(self) -> None:
        """End the open calls of callers that are no longer known, or whose rights have changed."""
        identities = self.door.identities
        for call in list(self._open):
            if identities is not None and not call.is_over and call.ended is None:
                lost = call.lost(identities)
                if lost is not None:
                    call.end(lost)

    def _refused(self, call: Context, refusal: Refusal) -> None:
        self._told(refusal)
        outcome = status.code_of(refusal).name
        self._audit_log.tell("refused", **call.known(), outcome=outcome, text=str(refusal), changed=False)


def _outcome_of(work: asyncio.Future[Any]) -> grpc.StatusCode:
    """Return the status of what was done; UNKNOWN if the end of the daemon cut it short."""
    if work.cancelled():
        return grpc.StatusCode.UNKNOWN
    error = work.exception()
    return grpc.StatusCode.OK if error is None else status.code_of(error)


def _rows_of(request: message.Message) -> int:
    """Return how many rows, ranges or other items a request lists."""
    listed = (value for field, value in request.ListFields() if field.is_repeated)
    return max(map(len, listed), default=0)


def counts_of(answer: message.Message) -> dict[str, Any]:
    """Return the numbers of an answer by field, those of its parts included, and how long its lists are."""
    counts: dict[str, Any] = {}
    for field, value in answer.ListFields():
        if field.is_repeated:
            counts[field.name.removesuffix("_index")] = len(value)
        elif isinstance(value, message.Message):
            counts[field.name] = counts_of(value)
        elif isinstance(value, int):
            counts[field.name] = value
    return counts


def _kind_of(handler: Any) -> str:
    return next(each for each in ("unary_unary", "unary_stream", "stream_stream") if getattr(handler, each))


def _scope(scope: access_pb2.Scope.ValueType) -> Scope | None:
    """Convert a scope of the proto; return None for SCOPE_UNSPECIFIED."""
    return Scope(access_pb2.Scope.Name(scope).removeprefix("SCOPE_").lower()) if scope else None


CLIENT_ID_KEY = "tarry-client-id"
CLIENT_ID_MAX_BYTES = 128
# The number of peers that call often
PEERS_REMEMBERED = 1_024
# A caller that sends it waits for a former owner itself, and can report the reason.
TOLD_KEY = "tarry-told-of-former-owner"


def client_of(context: Context) -> str:
    """Return the id of the client: its identity, or else the name in its metadata, or else its host.

    Raises `InvalidArgument`.
    """
    if context.identity is not None:
        return context.identity.name
    for key, value in context.invocation_metadata() or ():
        if key == CLIENT_ID_KEY:
            client = value if isinstance(value, str) else value.decode("utf-8", errors="replace")
            if not 1 <= len(client) <= CLIENT_ID_MAX_BYTES:
                raise errors.InvalidArgument(
                    f"{CLIENT_ID_KEY}, in the metadata, has {len(client)} characters; it must have 1 to "
                    f"{CLIENT_ID_MAX_BYTES}"
                )
            return client
    return context.caller


def waits_by_itself(context: Context, wait_s: float) -> bool:
    """Return whether to report the wait to the caller: it asks for that, or its deadline passes first."""
    left_s = context.time_remaining()
    if left_s is not None and left_s < wait_s:
        return True
    return any(key == TOLD_KEY for key, _ in context.invocation_metadata() or ())


@functools.lru_cache(PEERS_REMEMBERED)
def host_of(peer: str) -> str:
    """Return the host of a peer in gRPC's form; 127.0.0.1 for a Unix socket.

    `ipv4:127.0.0.1:1234` and `ipv6:%5B::1%5D:1234` lose their ports.
    """
    kind, _, address = peer.partition(":")
    if kind == "unix":
        return "127.0.0.1"
    if kind not in ("ipv4", "ipv6"):
        return peer
    host = urllib.parse.unquote(address).rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")
