"""Every call of the contract, for callers with each scope, with topics of their own and of others, over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf import message, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2

from daemon import audit_log, config, errors
from daemon.audit_log import AuditLog
from daemon.auth import Door, Identity, Scope, hash_of
from daemon.grpc_services import admission, pipeline
from daemon.grpc_services.receiving import Receiving
from daemon.settings import AccessSettings
from tarry.v1 import (
    access_pb2,
    admin_pb2,
    cluster_pb2,
    delayed_delivery_pb2,
    dispatch_pb2,
    inspect_pb2,
    ledger_deletion_pb2,
    policy_pb2,
)
from tests._support import real_engine
from tests._support.door_files import DoorFiles, door_files, identity, token_of
from tests.daemon.grpc_services.conftest import Edge, serving

MODULES = (
    admin_pb2,
    cluster_pb2,
    delayed_delivery_pb2,
    dispatch_pb2,
    inspect_pb2,
    ledger_deletion_pb2,
)
METHODS: list[MethodDescriptor] = [
    method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
# Which scope a call needs, said again by hand: of all calls of a service, and of those that differ.
OF_SERVICE = {
    "DelayedDelivery": Scope.ADD,
    "Dispatch": Scope.DISPATCH,
    "Inspect": Scope.INSPECT,
    "Admin": Scope.ADMIN,
    "LedgerDeletion": Scope.DELETE,
    "Cluster": None,
}
OF_CALL = {"TrimMessages": Scope.ADMIN, "ClearMessages": Scope.ADMIN}
OF_A_SUBSCRIPTION = {"TrimMessages": Scope.DISPATCH, "ClearMessages": Scope.DISPATCH}
OVER_ALL_TOPICS = {"CollectGarbage", "SweepOrphans"}
OF_NO_TOPIC = {"GetVersion", "ListTopics"}
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
# A guard against a machine that is busy; what is measured is far below.
PATIENCE_S = 300


def name_of(method: MethodDescriptor) -> str:
    return f"{method.containing_service.name}/{method.name}"


@dataclasses.dataclass(frozen=True)
class Ask:
    """One kind of request of a call, and the scope that it needs."""

    method: MethodDescriptor
    scope: Scope | None
    subscription: str = ""

    def request(self, topic: str) -> Any:
        """A request of the topic, as far as the call has one."""
        made: Any = message_factory.GetMessageClass(self.method.input_type)()
        if self.method.name == "StreamAddMessages":
            made.add.topic = topic
            made.add.subscription = self.subscription
        elif self.method.name == "Subscribe":
            made.open.topic, made.open.subscription = topic, "s"
            made.open.type = dispatch_pb2.SUBSCRIPTION_TYPE_SHARED
        elif self.method.name == "SubscribeMany":
            lane = made.requests.add(lane=1)
            lane.request.open.topic, lane.request.open.subscription = topic, "s"
            lane.request.open.type = dispatch_pb2.SUBSCRIPTION_TYPE_SHARED
        elif "filter" in self.method.input_type.fields_by_name and "topic" not in self.method.input_type.fields_by_name:
            made.filter.topic = topic
        elif "topic" in self.method.input_type.fields_by_name:
            made.topic = topic
        if self.subscription and hasattr(made, "subscription"):
            made.subscription = self.subscription
        return made


ASKS = [Ask(method, OF_CALL.get(method.name, OF_SERVICE[method.containing_service.name])) for method in METHODS] + [
    Ask(method, OF_A_SUBSCRIPTION[method.name], "s") for method in METHODS if method.name in OF_A_SUBSCRIPTION
]


class Guest:
    """A client with a token, or without."""

    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self.channel = channel
        self.metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def open(self, method: MethodDescriptor) -> Any:
        """The call, of whatever kind, as a stream of bytes in both directions."""
        call: Any = self.channel.stream_stream(f"/tarry.v1.{name_of(method)}")
        return call(timeout=PATIENCE_S, metadata=self.metadata)

    async def outcome(self, method: MethodDescriptor, request: message.Message) -> tuple[grpc.StatusCode, str]:
        """How the call ends. Of a stream of adds or of lanes: how its request is answered."""
        while True:
            code, details = await self._outcome(method, request)
            # The call was refused before gRPC had written its request: the status is lost, and asked for again.
            if (code, details) != (grpc.StatusCode.INTERNAL, "Internal error from Core"):
                return code, details

    async def _outcome(self, method: MethodDescriptor, request: message.Message) -> tuple[grpc.StatusCode, str]:
        call = self.open(method)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(request.SerializeToString())
            await call.done_writing()
        refused = grpc.StatusCode.OK, ""
        while (answer := await read(call)) is not grpc.aio.EOF:
            if method.name == "StreamAddMessages":
                error = delayed_delivery_pb2.StreamAddMessagesResponse.FromString(answer).error
                refused = code_of(error), error.message
            if method.name == "SubscribeMany":
                for response in dispatch_pb2.SubscribeManyResponse.FromString(answer).responses:
                    refused = code_of(response.ended), response.ended.message
        code = await call.code()
        return refused if code is grpc.StatusCode.OK else (code, await call.details())


def code_of(status: status_pb2.Status) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == status.code)


async def read(call: Any) -> Any:
    """The next answer; EOF when the call is over, however it ended."""
    try:
        return await call.read()
    except grpc.aio.AioRpcError:
        return grpc.aio.EOF


@dataclasses.dataclass
class Guarded:
    """An edge behind TLS and identities."""

    edge: Edge
    files: DoorFiles
    admission: admission.Admission
    audit: Path
    guest: Callable[[str | None], Guest]

    def lines(self) -> list[dict[str, Any]]:
        """The audit log."""
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


OF_SCOPES = [identity(scope, [scope], ["own/"]) for scope in Scope]
EVERYBODY = [
    *OF_SCOPES,
    identity("all", list(Scope), [""]),
    identity("nothing", [], ["own/"]),
    identity("two", ["inspect"], ["own/", "other/"]),
]


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    files = door_files(tmp_path, *EVERYBODY)
    audit = tmp_path / "audit.log"
    settings = config.load(
        environment={},
        overrides=["grpc.listen=127.0.0.1:0", "grpc.drain_s=0", f"access.audit_file={audit}", *files.settings()],
    )
    audit_log = AuditLog(settings.access)
    let_in = admission.Admission(
        Door(settings.tls, settings.access), audit_log, lambda refusal: None, Receiving(settings)
    )
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    async with (
        contextlib.AsyncExitStack() as stack,
        real_engine.serving(settings) as engine,
        serving(engine, settings, let_in) as edge,
        grpc.aio.secure_channel(f"localhost:{edge.port}", credentials) as channel,
    ):
        stack.callback(audit_log.close)
        yield Guarded(edge, files, let_in, audit, lambda token: Guest(channel, token))


def test_every_call_says_in_the_proto_what_it_needs() -> None:
    for method in METHODS:
        rule = admission.Rule.of(method)
        assert rule.any_prefix == (method.name in OF_NO_TOPIC), method.full_name
        assert (not rule.topic) == (method.name in OVER_ALL_TOPICS | OF_NO_TOPIC), method.full_name
    needed = {(ask.method.full_name, ask.scope) for ask in ASKS}
    assert {(each.full_name, admission.Rule.of(each).scope) for each in METHODS} <= needed


def test_a_call_that_does_not_say_what_it_needs_is_found() -> None:
    with pytest.raises(errors.InvariantViolated, match="has no option `access`"):
        admission.Rule.of(cast(Any, health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name["Check"]))


def test_the_scopes_of_the_proto_are_those_of_identities() -> None:
    assert {name.removeprefix("SCOPE_").lower() for name in access_pb2.Scope.keys()[1:]} == {*Scope}


@pytest.mark.parametrize("holder", [*Scope, "nothing"])
async def test_a_call_is_let_in_with_its_scope_and_a_topic_of_the_caller_alone(guarded: Guarded, holder: str) -> None:
    guest = guarded.guest(token_of(holder))
    for ask in ASKS:
        for topic in ("own/a", "other/a", ""):
            code, details = await guest.outcome(ask.method, ask.request(topic))
            scoped = ask.scope is None or ask.scope == holder
            named = ask.method.name in OF_NO_TOPIC or (topic == "own/a" and ask.method.name not in OVER_ALL_TOPICS)
            where = f"{name_of(ask.method)} of topic {topic!r} by {holder}: {code.name}: {details}"
            assert (code in REFUSED) == (not scoped or not named), where
            if not scoped:
                assert code is grpc.StatusCode.PERMISSION_DENIED, where
                assert f"scope {ask.scope}" in details or f"{ask.scope} or " in details or f"or {ask.scope}" in details


async def test_whoever_has_every_scope_and_the_prefix_of_all_may_do_everything(guarded: Guarded) -> None:
    guest = guarded.guest(token_of("all"))
    for ask in ASKS:
        for topic in ("own/a", ""):
            code, details = await guest.outcome(ask.method, ask.request(topic))
            assert code not in REFUSED, f"{name_of(ask.method)} of topic {topic!r}: {details}"


@pytest.mark.parametrize("token", [None, "unknown", token_of("all").upper()])
async def test_no_call_is_let_in_without_a_token_that_is_known(guarded: Guarded, token: str | None) -> None:
    for ask in ASKS:
        code, details = await guarded.guest(token).outcome(ask.method, ask.request("own/a"))
        assert code is grpc.StatusCode.UNAUTHENTICATED, name_of(ask.method)
        assert token is None or token not in details


async def test_a_refusal_does_not_depend_on_what_there_is(guarded: Guarded) -> None:
    guest = guarded.guest(token_of("add"))
    for ask in ASKS:
        if ask.scope is Scope.ADD:
            _, before = await guest.outcome(ask.method, ask.request("other/there"))
            await guarded.guest(token_of("all")).outcome(METHODS_BY_NAME["AddMessages"], plain_add("other/there"))
            _, after = await guest.outcome(ask.method, ask.request("other/there"))
            assert before == after
            assert "prefix" in before


METHODS_BY_NAME = {method.name: method for method in METHODS}


def plain_add(topic: str) -> delayed_delivery_pb2.AddMessagesRequest:
    return delayed_delivery_pb2.AddMessagesRequest(topic=topic, ledger_id=[1], entry_id=[1], delay_ms=[60_000])


@pytest.mark.parametrize(
    "method",
    [each for each in METHODS if each.client_streaming or each.name in ("AddMessages", "ListTopics")],
    ids=name_of,
)
@pytest.mark.parametrize("token", [None, "unknown", token_of("nothing")])
async def test_a_silent_call_of_who_is_not_let_in_is_closed_at_once(
    guarded: Guarded, method: MethodDescriptor, token: str | None
) -> None:
    began_s = time.monotonic()
    call = guarded.guest(token).open(method)
    assert await call.code() in REFUSED
    print(f"{name_of(method)}: closed after {(time.monotonic() - began_s) * 1000:.1f} ms")  # noqa: T201


async def test_lists_show_what_the_caller_may_use_alone(guarded: Guarded) -> None:
    everybody = guarded.guest(token_of("all"))
    for topic in ("own/1", "own/2", "other/1", "third/1"):
        assert (await everybody.outcome(METHODS_BY_NAME["AddMessages"], plain_add(topic)))[0] is grpc.StatusCode.OK
    shown = {}
    for holder in ("inspect", "two", "all"):
        call = guarded.guest(token_of(holder)).open(METHODS_BY_NAME["ListTopics"])
        await call.write(b"")
        await call.done_writing()
        answer = inspect_pb2.ListTopicsResponse.FromString(await call.read())
        shown[holder] = [each.topic for each in answer.topics]
    assert shown == {
        "inspect": ["own/1", "own/2"],
        "two": ["other/1", "own/1", "own/2"],
        "all": ["other/1", "own/1", "own/2", "third/1"],
    }


async def test_quotas_count_by_identity(guarded: Guarded) -> None:
    policy = policy_pb2.TopicPolicy(client_rows_per_second_max=1)
    everybody, adder = guarded.guest(token_of("all")), guarded.guest(token_of("add"))
    many = delayed_delivery_pb2.AddMessagesRequest(
        topic="own/a", ledger_id=[1], entry_id=range(1_000), delay_ms=[60_000]
    )
    await everybody.outcome(
        METHODS_BY_NAME["SetTopicPolicy"], admin_pb2.SetTopicPolicyRequest(topic="own/a", policy=policy)
    )
    outcomes = [
        (await guest.outcome(METHODS_BY_NAME["AddMessages"], many))[0] for guest in (adder, adder, everybody, everybody)
    ]
    ok, exhausted = grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED
    assert outcomes == [ok, exhausted, ok, exhausted]


async def test_a_refused_topic_on_a_stream_of_adds_leaves_the_others_alone(guarded: Guarded) -> None:
    call = guarded.guest(token_of("add")).open(METHODS_BY_NAME["StreamAddMessages"])
    for request_id, topic in enumerate(("own/a", "other/a", "own/b"), 1):
        request = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=request_id, add=plain_add(topic))
        await call.write(request.SerializeToString())
    answers = [delayed_delivery_pb2.StreamAddMessagesResponse.FromString(await call.read()) for _ in range(3)]
    assert {each.request_id: each.error.code for each in answers} == {1: 0, 2: 7, 3: 0}
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def opened(guarded: Guarded, name: str) -> list[Any]:
    """A stream of adds, a subscription of the topic `own/a` and one in a lane that have been answered."""
    adds, subscribed, lanes = (
        guarded.guest(token_of(name)).open(METHODS_BY_NAME[each])
        for each in ("StreamAddMessages", "Subscribe", "SubscribeMany")
    )
    await adds.write(
        delayed_delivery_pb2.StreamAddMessagesRequest(request_id=1, add=plain_add("own/a")).SerializeToString()
    )
    assert delayed_delivery_pb2.StreamAddMessagesResponse.FromString(await adds.read()).added.accepted == 1
    await guarded.guest(token_of(name)).outcome(
        METHODS_BY_NAME["CreateSubscription"], dispatch_pb2.CreateSubscriptionRequest(topic="own/a", subscription="s")
    )
    opening = dispatch_pb2.Open(topic="own/a", subscription="s", type=dispatch_pb2.SUBSCRIPTION_TYPE_SHARED)
    await subscribed.write(dispatch_pb2.SubscribeRequest(open=opening).SerializeToString())
    assert dispatch_pb2.SubscribeResponse.FromString(await subscribed.read()).HasField("opened")
    in_lane = dispatch_pb2.LaneRequest(lane=1, request=dispatch_pb2.SubscribeRequest(open=opening))
    await lanes.write(dispatch_pb2.SubscribeManyRequest(requests=[in_lane]).SerializeToString())
    (answer,) = dispatch_pb2.SubscribeManyResponse.FromString(await lanes.read()).responses
    assert answer.response.HasField("opened")
    return [adds, subscribed, lanes]


@pytest.mark.parametrize(
    ("instead", "ends"),
    [
        ([], grpc.StatusCode.UNAUTHENTICATED),
        ([identity("all", ["inspect"], [""])], grpc.StatusCode.UNAVAILABLE),
        ([identity("all", list(Scope), ["own/b"])], grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["revoked", "fewer scopes", "other prefixes"],
)
async def test_the_streams_of_who_is_revoked_or_may_do_something_else_end(
    guarded: Guarded, instead: list[str], ends: grpc.StatusCode
) -> None:
    streams = await opened(guarded, "all")
    guarded.files.admit(*OF_SCOPES, *instead)
    look_twice(guarded)
    assert [await each.code() for each in streams] == [ends] * 3


UNTOLD = AuditLog(AccessSettings())


class SlowCall:
    """gRPC's context of a call whose responses take until they are `sent`."""

    read = invocation_metadata = time_remaining = auth_context = abort = None

    def __init__(self) -> None:
        self.sent = asyncio.Event()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, response: bytes) -> None:
        del response
        await self.sent.wait()


def context_of(slow: Any) -> admission.Context:
    rule = admission.Rule.of(METHODS_BY_NAME["Subscribe"])
    return admission.Context(slow, rule, lambda *_: None, UNTOLD, Receiving(config.load(environment={}, overrides=[])))


@pytest.mark.parametrize(
    ("prefixes", "awaited"),
    [(["own/"], ["turn", "turn", "at once"]), (["", "own/"], ["at once", "at once", "at once"])],
)
async def test_messages_of_a_stream_take_turns_until_its_caller_has_named_a_topic_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, prefixes: list[str], awaited: list[str]
) -> None:
    slow: Any = SlowCall()
    call = context_of(slow)
    call.identity = Identity("own", frozenset(Scope), tuple(prefixes))
    found: list[str] = []

    async def read() -> bytes:
        found.append("at once")
        return b""

    async def in_turn(_: object, read: Callable[[], Awaitable[bytes]]) -> bytes:
        await read()
        found[-1] = "turn"
        return b""

    monkeypatch.setattr(call, "_read", read)
    monkeypatch.setattr(call.receiving, "in_turn", in_turn)
    await call.read()
    with contextlib.suppress(errors.PermissionDenied):
        call.check_topic("other/t")
    await call.read()
    call.check_topic("own/t")
    await call.read()
    assert found == awaited


async def test_a_call_that_is_ended_while_a_response_is_under_way_ends_behind_it() -> None:
    slow: Any = SlowCall()
    call = context_of(slow)
    serving = call.task = asyncio.ensure_future(call.write(b""))
    await asyncio.sleep(0)
    call.end(errors.Unavailable("gone"))
    await asyncio.sleep(0)
    assert not serving.cancelling()
    slow.sent.set()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_a_call_whose_writer_holds_a_lock_ends_behind_the_response_too() -> None:
    slow: Any = SlowCall()
    call = context_of(slow)
    writing = asyncio.Lock()

    async def write() -> None:
        while True:
            async with writing:
                await call.write(b"")

    async def serve() -> None:
        writer = asyncio.create_task(write())
        try:
            await asyncio.Event().wait()
        finally:
            async with writing:
                await pipeline.end(writer)

    serving = call.task = asyncio.ensure_future(serve())
    await asyncio.sleep(0.01)
    call.end(errors.Unavailable("gone"))
    slow.sent.set()
    ended, _ = await asyncio.wait([serving], timeout=60)
    assert ended == {serving}
    assert serving.cancelled()


def look_twice(guarded: Guarded) -> None:
    """What the daemon does every second."""
    files = guarded.admission.door._identities
    assert files is not None
    files.look()
    files.look()
    guarded.admission.identities_changed()


async def test_a_stream_goes_on_when_a_token_is_added_and_the_one_of_its_own_stays(guarded: Guarded) -> None:
    adds, subscribed, lanes = await opened(guarded, "all")
    both = [hash_of(token_of("all")), hash_of("the next one")]
    guarded.files.admit(*OF_SCOPES, identity("all", list(Scope), [""], tokens=both))
    look_twice(guarded)
    await adds.write(
        delayed_delivery_pb2.StreamAddMessagesRequest(request_id=2, add=plain_add("own/b")).SerializeToString()
    )
    assert delayed_delivery_pb2.StreamAddMessagesResponse.FromString(await adds.read()).request_id == 2
    code, _ = await guarded.guest("the next one").outcome(
        METHODS_BY_NAME["GetVersion"], cluster_pb2.GetVersionRequest()
    )
    assert code is grpc.StatusCode.OK
    for each in (adds, subscribed, lanes):
        await each.done_writing()
        while await read(each) is not grpc.aio.EOF:
            pass
        assert await each.code() is grpc.StatusCode.OK


async def test_the_audit_log_tells_of_changes_and_refusals_without_a_token(guarded: Guarded) -> None:
    everybody = guarded.guest(token_of("all"))
    created = dispatch_pb2.CreateSubscriptionRequest(topic="own/a", subscription="s")
    deleted = admin_pb2.DeleteTopicRequest(topic="own/none")
    await everybody.outcome(METHODS_BY_NAME["CreateSubscription"], created)
    await everybody.outcome(METHODS_BY_NAME["GetTopicStats"], inspect_pb2.GetTopicStatsRequest(topic="own/a"))
    await everybody.outcome(METHODS_BY_NAME["DeleteTopic"], deleted)
    await guarded.guest(token_of("inspect")).outcome(METHODS_BY_NAME["DeleteTopic"], deleted)
    await guarded.guest("a secret").outcome(METHODS_BY_NAME["GetVersion"], cluster_pb2.GetVersionRequest())
    told = [
        (line["message"], line["identity"], line["call"], line["topic"], line["subscription"], line["outcome"])
        for line in guarded.lines()
    ]
    # A guest asks again after a refusal whose status gRPC lost: such a call has its line twice.
    assert [line for line, _ in itertools.groupby(told)] == [
        ("call", "all", "Dispatch/CreateSubscription", "own/a", "s", "OK"),
        ("call", "all", "Admin/DeleteTopic", "own/none", "", "NOT_FOUND"),
        ("refused", "inspect", "Admin/DeleteTopic", "", "", "PERMISSION_DENIED"),
        ("refused", "", "Cluster/GetVersion", "", "", "UNAUTHENTICATED"),
    ]
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in guarded.lines())
    assert "secret" not in guarded.audit.read_text()
    assert guarded.audit.stat().st_mode & 0o777 == 0o600


async def told(guarded: Guarded, count: int) -> list[dict[str, Any]]:
    """The lines of the audit log, of which the last may come after its call has been answered."""
    async with asyncio.timeout(PATIENCE_S):
        while len(guarded.lines()) < count:  # noqa: ASYNC110 - the log says nothing when it grows
            await asyncio.sleep(0.005)
    return guarded.lines()


def shown(lines: list[dict[str, Any]]) -> list[tuple[str, str, str, dict[str, Any]]]:
    assert {(line["message"], line["identity"], line["topic"]) for line in lines} == {("call", "all", "own/a")}
    return [(line["call"], line["subscription"], line["outcome"], line["counts"]) for line in lines]


async def test_the_audit_log_tells_what_was_withdrawn(guarded: Guarded) -> None:
    everybody = guarded.guest(token_of("all"))
    rows = delayed_delivery_pb2.AddMessagesRequest(
        topic="own/a", ledger_id=[1], entry_id=range(500), delay_ms=[60_000_000]
    )
    rescheduled = delayed_delivery_pb2.RescheduleMessagesRequest(
        topic="own/a", ledger_id=[1], entry_id=range(5), delay_ms=[70_000_000]
    )
    cancelled = delayed_delivery_pb2.CancelMessagesRequest(topic="own/a", ledger_id=[1], entry_id=range(600))
    wrong = delayed_delivery_pb2.CancelMessagesRequest(topic="own/a", ledger_id=[1, 2], entry_id=range(3))
    await everybody.outcome(METHODS_BY_NAME["AddMessages"], rows)
    await everybody.outcome(METHODS_BY_NAME["RescheduleMessages"], rescheduled)
    await everybody.outcome(METHODS_BY_NAME["CancelMessages"], cancelled)
    await everybody.outcome(METHODS_BY_NAME["CancelMessages"], wrong)
    assert shown(await told(guarded, 3)) == [
        ("DelayedDelivery/RescheduleMessages", "", "OK", {"asked": 5, "rescheduled": 5}),
        ("DelayedDelivery/CancelMessages", "", "OK", {"asked": 600, "cancelled": 500, "not_found": 100}),
        ("DelayedDelivery/CancelMessages", "", "INVALID_ARGUMENT", {"asked": 3}),
    ]


async def test_the_audit_log_tells_of_rejections_and_not_of_other_answers_of_dispatchers(guarded: Guarded) -> None:
    everybody = guarded.guest(token_of("all"))
    policy = dispatch_pb2.CreateSubscriptionRequest(topic="own/a", subscription="s")
    await everybody.outcome(METHODS_BY_NAME["CreateSubscription"], policy)
    where: dict[str, Any] = {"ledger_id": [1], "deliver_at_ms": [0]}
    for method, request in (
        ("Acknowledge", dispatch_pb2.AcknowledgeRequest(topic="own/a", subscription="s", entry_id=[1], **where)),
        (
            "NegativeAcknowledge",
            dispatch_pb2.NegativeAcknowledgeRequest(topic="own/a", subscription="s", entry_id=[2], **where),
        ),
        (
            "NegativeAcknowledge",
            dispatch_pb2.NegativeAcknowledgeRequest(
                topic="own/a", subscription="s", entry_id=[3, 4], reject=True, reason="no", **where
            ),
        ),
    ):
        await everybody.outcome(METHODS_BY_NAME[method], request)
    rejected = dispatch_pb2.NegativeAcknowledge(request_id=7, entry_id=[5, 6, 7], reject=True, **where)
    requests = [
        dispatch_pb2.SubscribeRequest(
            open=dispatch_pb2.Open(topic="own/a", subscription="s", type=dispatch_pb2.SUBSCRIPTION_TYPE_SHARED)
        ),
        dispatch_pb2.SubscribeRequest(
            negative_acknowledge=dispatch_pb2.NegativeAcknowledge(request_id=6, entry_id=[8], **where)
        ),
        dispatch_pb2.SubscribeRequest(negative_acknowledge=rejected),
    ]
    subscribed = everybody.open(METHODS_BY_NAME["Subscribe"])
    for each in requests:
        await subscribed.write(each.SerializeToString())
    await told(guarded, 3)
    # One that is not to be answered
    unanswered = dispatch_pb2.NegativeAcknowledge(entry_id=[9], reject=True, **where)
    requests[2] = dispatch_pb2.SubscribeRequest(negative_acknowledge=unanswered)
    lanes = everybody.open(METHODS_BY_NAME["SubscribeMany"])
    in_lane = [dispatch_pb2.LaneRequest(lane=1, request=each) for each in (requests[0], requests[2])]
    await lanes.write(dispatch_pb2.SubscribeManyRequest(requests=in_lane).SerializeToString())
    lines = await told(guarded, 4)
    rejections = {"asked": 2, "dead_lettered": 2}, {"asked": 3, "dead_lettered": 3, "ignored": 0}
    assert shown(lines[1:]) == [
        ("Dispatch/NegativeAcknowledge", "s", "OK", rejections[0]),
        ("Dispatch/Subscribe", "s", "OK", rejections[1]),
        ("Dispatch/SubscribeMany", "s", "OK", {"asked": 1, "dead_lettered": 1, "ignored": 0}),
    ]
    assert [line["request_id"] for line in lines[1:]] == ["", 7, 0]
    for call in (subscribed, lanes):
        call.cancel()


async def test_the_audit_log_tells_what_became_of_a_call_that_its_caller_left(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody = guarded.guest(token_of("all"))
    await everybody.outcome(METHODS_BY_NAME["AddMessages"], plain_add("own/a"))
    requests = guarded.edge.engine.requests
    began, may_go_on, delete = asyncio.Event(), asyncio.Event(), requests.delete_topic

    async def slowly(topic: str) -> Any:
        began.set()
        await may_go_on.wait()
        return await delete(topic)

    monkeypatch.setattr(requests, "delete_topic", slowly)
    for topic, outcome in (("own/a", "OK"), ("own/none", "NOT_FOUND")):
        began.clear()
        may_go_on.clear()
        call = everybody.open(METHODS_BY_NAME["DeleteTopic"])
        await call.write(admin_pb2.DeleteTopicRequest(topic=topic).SerializeToString())
        await call.done_writing()
        await began.wait()
        before = guarded.admission.open_calls
        call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while guarded.admission.open_calls == before:  # noqa: ASYNC110 - nor does the gate
                await asyncio.sleep(0.005)
        known = len(guarded.lines())
        may_go_on.set()
        line = (await told(guarded, known + 1))[-1]
        assert (line["topic"], line["outcome"], line["answered"]) == (topic, outcome, "CANCELLED")
    assert [line["counts"].get("rows", 0) for line in guarded.lines()] == [1, 0]


async def test_calls_that_are_left_before_their_request_comes_are_limited_like_refusals(guarded: Guarded) -> None:
    """They have changed nothing, and may come as fast as a caller likes."""
    everybody = guarded.guest(token_of("all"))
    count = 2 * audit_log.IDENTITY_LINES_MAX
    calls = [everybody.open(METHODS_BY_NAME["DeleteTopic"]) for _ in range(count)]
    async with asyncio.timeout(PATIENCE_S):
        while guarded.admission.open_calls < count:  # noqa: ASYNC110 - nor does the gate
            await asyncio.sleep(0.005)
        for call in calls:
            call.cancel()
        while guarded.admission.open_calls:  # noqa: ASYNC110 - nor does the gate
            await asyncio.sleep(0.005)
    assert 0 < len(guarded.lines()) < count


async def test_the_audit_log_has_the_id_that_a_caller_gives_a_call(guarded: Guarded) -> None:
    guest = guarded.guest(token_of("all"))
    guest.metadata = (*guest.metadata, (admission.REQUEST_ID_KEY, "x" * 500))
    await guest.outcome(METHODS_BY_NAME["DeleteTopic"], admin_pb2.DeleteTopicRequest(topic="own/none"))
    (line,) = await told(guarded, 1)
    assert line["request_id"] == "x" * admission.REQUEST_ID_LENGTH_MAX


async def reflected(guest: Guest) -> grpc.StatusCode:
    """How a call ends that asks which calls there are."""
    call: Any = guest.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    asked = call(timeout=PATIENCE_S)
    await asked.done_writing()
    return cast(grpc.StatusCode, await asked.code())


async def test_reflection_is_off_and_health_is_open(guarded: Guarded) -> None:
    stranger = guarded.guest(None)
    assert await reflected(stranger) is grpc.StatusCode.UNIMPLEMENTED
    health: Any = stranger.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert await health(b"", timeout=PATIENCE_S)


async def test_reflection_is_there_when_it_is_asked_for(tmp_path: Path) -> None:
    files = door_files(tmp_path, *EVERYBODY)
    overrides = ["grpc.listen=127.0.0.1:0", "grpc.drain_s=0", "access.reflection=true", *files.settings()]
    settings = config.load(environment={}, overrides=overrides)
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    async with (
        real_engine.serving(settings) as engine,
        serving(engine, settings) as edge,
        grpc.aio.secure_channel(f"localhost:{edge.port}", credentials) as channel,
    ):
        assert await reflected(Guest(channel, None)) is grpc.StatusCode.OK
