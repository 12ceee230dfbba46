"""Who is let in: every call of the contract passes here before anything else is done for it.

Owns: what a call needs (its option `access` in the proto), who makes it, the refusal of those who may not, the open
calls, and the end of those whose identity may do so no longer.
Does not own: the identities and their file (`daemon.auth`), and what a call does.

A call is refused for its caller or its scope before its message is parsed, and a stream before one is read: one that
stays silent is ended at once. Its topic is checked as soon as the request that names it is parsed: in the frame of
calls with one request (`unary`), and where a stream reads the name. A refusal never depends on what there is.

Who calls, for quotas: an identity, or else a client's own name for itself, or the host that it calls from.

Owns: the metadata key and what it may hold, and reading gRPC's form of a peer.
Does not own: what a client may do (`daemon.core.quotas`, `admission`). The name that a client gives itself is taken as
it is: nothing proves it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import urllib.parse
from collections.abc import Awaitable, Callable, Set
from typing import Any, Final, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf import message
from google.protobuf.descriptor import MethodDescriptor

from daemon import errors
from daemon.audit_log import AuditLog
from daemon.auth import EVERY_TOPIC, Door, Identities, Identity, Scope, bearer_of
from daemon.core.quotas import Caller
from daemon.grpc_services import status
from tarry.v1 import access_pb2

AUTHORIZATION_KEY: Final = "authorization"
# What gRPC calls the names in a client's certificate.
_CERTIFICATE_NAMES: Final = ("x509_common_name", "x509_subject_alternative_name")
# A call that is to end waits so long for the response that is under way.
WRITE_MAX_S: Final = 5.0

Refusal: TypeAlias = errors.Unauthenticated | errors.PermissionDenied
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a call needs. `scope` None: any identity may make it.

    `topic_wide`: the scope of a request without a subscription. `topic`: the fields that lead to the topic's name; none
    where the call is over all topics. `any_prefix`: no prefix is needed. `audited`: the audit log tells of the call.
    """

    name: str
    scope: Scope | None
    topic_wide: Scope | None
    topic: tuple[str, ...]
    any_prefix: bool
    audited: bool

    @classmethod
    def of(cls, method: MethodDescriptor) -> Rule:
        """The rule that the call has in the proto. Raises `InvariantViolated` when it has none."""
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
        )

    def topic_of(self, request: message.Message) -> str:
        """The topic that a request names; "" for none."""
        found: Any = request
        for field in self.topic:
            found = getattr(found, field)
        return found if self.topic else EVERY_TOPIC


class Context:
    """One call that is let in, or refused: gRPC's context, and what the caller may do. `identity` None: everything."""

    # What most calls never change is not set for each of them.
    identity: Identity | None = None
    # Known when the request was read, and when the call was over: the audit log tells them.
    topic = subscription = ""
    outcome = grpc.StatusCode.UNKNOWN
    is_over = False
    is_refused = False
    # Why the call is ended before its time.
    ended: errors.TarryError | None = None
    _is_writing = False
    _task: asyncio.Task[Any] | None = None

    def __init__(
        self, context: grpc.aio.ServicerContext[bytes, bytes], rule: Rule, refused: Callable[[Context, Refusal], None]
    ) -> None:
        """`refused` is told of each refusal."""
        self.read = context.read
        self.peer = context.peer
        self.invocation_metadata = context.invocation_metadata
        self.time_remaining = context.time_remaining
        self.auth_context = context.auth_context
        self._abort = context.abort
        self._write = context.write
        self._rule = rule
        self._refused = refused

    async def write(self, response: bytes) -> None:
        """Sends a response; none when the call is to end. gRPC takes no status while a response is under way,
        so the call ends behind that.
        """
        if self.ended is not None:
            # Returns, since whoever ends the call may wait for a lock that is held for this.
            await asyncio.sleep(0)
            return
        self._is_writing = True
        try:
            await self._write(response)
        finally:
            self._is_writing = False
            if self.ended is not None:
                self._cancel()

    def end(self, why: errors.TarryError, task: asyncio.Task[Any]) -> None:
        """Ends the call before its time. `task`: what serves it."""
        self.ended, self._task = why, task
        if self._is_writing:
            # Not for ever: a caller that reads nothing keeps the response under way.
            asyncio.get_running_loop().call_later(WRITE_MAX_S, self._cancel)
        else:
            self._cancel()

    def _cancel(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata) -> NoReturn:
        """Ends the call with a status."""
        self.outcome, self.is_over = code, True
        await self._abort(code, details, trailing_metadata)

    @property
    def topic_prefixes(self) -> tuple[str, ...]:
        """What the names of topics begin with that the caller may know of."""
        return (EVERY_TOPIC,) if self.identity is None else self.identity.topic_prefixes

    def admit(self, identities: Identities) -> None:
        """Lets the caller in if it has a scope with which the call may be made.

        Raises `Unauthenticated` and `PermissionDenied`.
        """
        try:
            self.identity = self._identify(identities)
        except errors.Unauthenticated as refusal:
            self._refuse(refusal)
        self._check_scope({self._rule.scope, self._rule.topic_wide})

    def lost(self, identities: Identities) -> errors.TarryError | None:
        """Why the call may not go on with these identities; None: it may."""
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
        """What the audit log tells of the call."""
        return {
            "identity": "" if self.identity is None else self.identity.name,
            "peer": self.peer(),
            "call": self._rule.name,
            "topic": self.topic,
            "subscription": self.subscription,
        }

    def _identify(self, identities: Identities) -> Identity:
        """Who calls: by a token, or else by a certificate. Raises `Unauthenticated`."""
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
        """Refuses a request that the caller may not make. Raises `PermissionDenied`."""
        self.check_named(self._rule.topic_of(request), getattr(request, "subscription", ""))

    def check_named(self, topic: str, subscription: str) -> None:
        """Refuses a request that names these where the caller may not make it. `subscription`: "" for none. Raises
        `PermissionDenied`.
        """
        self.topic, self.subscription = topic, subscription
        if self.identity is None:
            return
        self._check_scope({self._rule.scope if self.subscription else self._rule.topic_wide})
        if not self._rule.any_prefix:
            self.check_topic(self.topic)

    def check_topic(self, topic: str) -> None:
        """Refuses a topic that the caller may not use, whether there is one or not. Raises `PermissionDenied`."""
        if self.identity is None or self.identity.may_use(topic):
            return
        self.topic = topic
        name = self.identity.name
        if topic == EVERY_TOPIC:
            text = f'{self._rule.name} is over all topics, and identity {name} has not the topic prefix ""'
        else:
            text = f"topic {topic!r} has none of the topic prefixes of identity {name}"
        self._refuse(errors.PermissionDenied(text))

    def _check_scope(self, any_of: Set[Scope | None]) -> None:
        """None stands for no scope, which everybody has."""
        if self.identity is None or None in any_of or not self.identity.scopes.isdisjoint(any_of):
            return
        needed = " or ".join(sorted(scope for scope in any_of if scope is not None))
        text = f"{self._rule.name} needs the scope {needed}, which identity {self.identity.name} has not"
        self._refuse(errors.PermissionDenied(text))

    def _refuse(self, refusal: Refusal) -> NoReturn:
        self.is_refused = True
        self._refused(self, refusal)
        raise refusal


class Admission:
    """Lets calls in, and knows those that are open."""

    def __init__(self, door: Door, audit_log: AuditLog, refused: Callable[[Refusal], None]) -> None:
        """`refused` is told of each refusal."""
        self.door = door
        self._audit_log = audit_log
        self._told = refused
        self._open: dict[Context, asyncio.Task[Any]] = {}

    @property
    def open_calls(self) -> int:
        """Streams included."""
        return len(self._open)

    def guarded(self, method: MethodDescriptor, handler: Any) -> Any:
        """The handler, for those who are let in."""
        rule = Rule.of(method)
        kind = next(each for each in ("unary_unary", "unary_stream", "stream_stream") if getattr(handler, each))
        serve: Callable[[Any, Context], Awaitable[Any]] = getattr(handler, kind)

        async def guarding(request: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> Any:
            call = Context(context, rule, self._refused)
            try:
                if (identities := self.door.identities) is not None:
                    call.admit(identities)
            except (errors.Unauthenticated, errors.PermissionDenied) as refusal:
                await status.abort(call, refusal)
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            self._open[call] = task
            try:
                answer = await serve(request, call)
                call.outcome = grpc.StatusCode.OK
                return answer
            except asyncio.CancelledError:
                if call.ended is None:
                    call.outcome = grpc.StatusCode.CANCELLED
                    raise
                task.uncancel()
                await status.abort(call, call.ended)
            finally:
                del self._open[call]
                if rule.audited and not call.is_refused:
                    self._audit_log.tell("call", **call.known(), outcome=call.outcome.name)

        return handler._replace(**{kind: guarding})

    def identities_changed(self) -> None:
        """Ends the open calls of those who are known no longer, or may do something else now."""
        identities = self.door.identities
        for call, task in list(self._open.items()):
            if identities is not None and not call.is_over and call.ended is None:
                lost = call.lost(identities)
                if lost is not None:
                    call.end(lost, task)

    def _refused(self, call: Context, refusal: Refusal) -> None:
        self._told(refusal)
        self._audit_log.tell_refusal(**call.known(), outcome=status.code_of(refusal).name, text=str(refusal))


def _scope(scope: access_pb2.Scope.ValueType) -> Scope | None:
    """None for SCOPE_UNSPECIFIED."""
    return Scope(access_pb2.Scope.Name(scope).removeprefix("SCOPE_").lower()) if scope else None


CLIENT_ID_KEY = "tarry-client-id"
CLIENT_ID_MAX_BYTES = 128
# So many connections call often.
PEERS_REMEMBERED = 1_024
# Whoever sends it waits for a former owner by itself, and can say what it waits for.
TOLD_KEY = "tarry-told-of-former-owner"


def client_of(context: Context) -> str:
    """The id by which the client is told apart: its identity, or else what its metadata says, or else its host.

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
    return host_of(context.peer())


def waits_by_itself(context: Context, wait_s: float) -> bool:
    """Whether a caller is told that its answer takes so long: it asks for that, or its deadline is over before."""
    left_s = context.time_remaining()
    if left_s is not None and left_s < wait_s:
        return True
    return any(key == TOLD_KEY for key, _ in context.invocation_metadata() or ())


@functools.lru_cache(PEERS_REMEMBERED)
def host_of(peer: str) -> str:
    """`ipv4:127.0.0.1:1234` and `ipv6:%5B::1%5D:1234` without their ports; 127.0.0.1 behind a Unix socket."""
    kind, _, address = peer.partition(":")
    if kind == "unix":
        return "127.0.0.1"
    if kind not in ("ipv4", "ipv6"):
        return peer
    host = urllib.parse.unquote(address).rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


def caller_of(context: Context, size_bytes: int) -> Caller:
    """The caller of one request of that size. Raises `InvalidArgument`."""
    return Caller(client_of(context), size_bytes)
