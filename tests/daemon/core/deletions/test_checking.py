from __future__ import annotations

import dataclasses

import pytest

from daemon.core.deletions import deletion_checks
from daemon.errors import InvalidArgument
from storage_backends.formats.deletion_format import LedgerComponent, LedgerType, OffloadContext, PendingDelete

U64_MAX = (1 << 64) - 1
CONTEXT = OffloadContext(0, 1, "aws-s3", (("bucket", "b"), ("region", "")))
LEDGER = PendingDelete(LedgerComponent.MANAGED_LEDGER, LedgerType.LEDGER, 7)
OFFLOADED = PendingDelete(LedgerComponent.MANAGED_LEDGER, LedgerType.OFFLOADED_LEDGER, 7, offload_context=CONTEXT)
CURSOR = dataclasses.replace(LEDGER, component=LedgerComponent.MANAGED_CURSOR, cursor_name="reader")
SCHEMA = dataclasses.replace(LEDGER, component=LedgerComponent.SCHEMA_STORAGE, schema_id="t/n/orders")


def offloaded(**changes: object) -> PendingDelete:
    return dataclasses.replace(OFFLOADED, offload_context=dataclasses.replace(CONTEXT, **changes))  # type: ignore[arg-type]


def properties(count: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"{number:03}", "v") for number in range(count))


GOOD = {
    "a ledger": LEDGER,
    "the first ledger": dataclasses.replace(LEDGER, ledger_id=0),
    "the last ledger": dataclasses.replace(LEDGER, ledger_id=U64_MAX),
    "a cursor": CURSOR,
    "a long cursor": dataclasses.replace(CURSOR, cursor_name="c" * 255),
    "a schema": SCHEMA,
    "a long schema": dataclasses.replace(SCHEMA, schema_id="s" * 1_024),
    "an offloaded ledger": OFFLOADED,
    "an offloaded cursor": dataclasses.replace(
        CURSOR, ledger_type=LedgerType.OFFLOADED_LEDGER, offload_context=CONTEXT
    ),
    "half a UUID": offloaded(uuid_msb=1, uuid_lsb=0),
    "no metadata": offloaded(driver_metadata=()),
    "all metadata": offloaded(driver_metadata=properties(64)),
    "long metadata": offloaded(driver_metadata=(("n" * 128, "v" * 1_024),)),
    "as much metadata as there may be": offloaded(driver_metadata=tuple((name, "v" * 1_023) for name in "abcd")),
    "a long driver": offloaded(driver_name="d" * 255),
}

BAD = {
    "ledger_id is -1; it must be 0 to": dataclasses.replace(LEDGER, ledger_id=-1),
    f"ledger_id is {U64_MAX + 1}; it must be 0 to": dataclasses.replace(LEDGER, ledger_id=U64_MAX + 1),
    "cursor_name is missing; MANAGED_CURSOR must have one": dataclasses.replace(CURSOR, cursor_name=None),
    "cursor_name is missing; MANAGED_CURSOR": dataclasses.replace(CURSOR, cursor_name=""),
    "cursor_name has 256 bytes; it must have 1 to 255": dataclasses.replace(CURSOR, cursor_name="c" * 256),
    "cursor_name has 258 bytes": dataclasses.replace(CURSOR, cursor_name="\N{SNOWMAN}" * 86),
    "cursor_name is 'reader'; MANAGED_LEDGER must have none": dataclasses.replace(LEDGER, cursor_name="reader"),
    "cursor_name is ''; MANAGED_LEDGER must have none": dataclasses.replace(LEDGER, cursor_name=""),
    "cursor_name is 'reader'; SCHEMA_STORAGE must have none": dataclasses.replace(SCHEMA, cursor_name="reader"),
    "schema_id is missing; SCHEMA_STORAGE must have one": dataclasses.replace(SCHEMA, schema_id=None),
    "schema_id has 1025 bytes; it must have 1 to 1024": dataclasses.replace(SCHEMA, schema_id="s" * 1_025),
    "schema_id is 's'; MANAGED_CURSOR must have none": dataclasses.replace(CURSOR, schema_id="s"),
    "offload_context is missing; OFFLOADED_LEDGER must have one": dataclasses.replace(OFFLOADED, offload_context=None),
    "offload_context is given; LEDGER must have none": dataclasses.replace(LEDGER, offload_context=CONTEXT),
    "uuid_msb and uuid_lsb are 0": offloaded(uuid_msb=0, uuid_lsb=0),
    "offload_context.uuid_msb is -1": offloaded(uuid_msb=-1),
    f"offload_context.uuid_lsb is {U64_MAX + 1}": offloaded(uuid_lsb=U64_MAX + 1),
    "offload_context.driver_name has 0 bytes; it must have 1 to 255": offloaded(driver_name=""),
    "offload_context.driver_name has 256 bytes": offloaded(driver_name="d" * 256),
    "offload_context.driver_metadata has 65 properties; it may have 64": offloaded(driver_metadata=properties(65)),
    "a name of offload_context.driver_metadata has 0 bytes": offloaded(driver_metadata=(("", "v"),)),
    "a name of offload_context.driver_metadata has 129 bytes": offloaded(driver_metadata=(("n" * 129, "v"),)),
    r"offload_context.driver_metadata\['n'\] has 1025 bytes; it may have 1024": offloaded(
        driver_metadata=(("n", "v" * 1_025),)
    ),
    "offload_context.driver_metadata has 4097 bytes; it may have 4096": offloaded(
        driver_metadata=(*((name, "v" * 1_023) for name in "abc"), ("d", "v" * 1_024))
    ),
    "offload_context.driver_metadata does not ascend": offloaded(driver_metadata=(("b", ""), ("a", ""))),
    "offload_context.driver_metadata does not ascend by name, or has": offloaded(
        driver_metadata=(("a", "1"), ("a", "2"))
    ),
}


@pytest.mark.parametrize("delete", GOOD.values(), ids=GOOD)
def test_a_delete_that_is_whole_may_be_recorded(delete: PendingDelete) -> None:
    deletion_checks.check_pending_delete(delete)


@pytest.mark.parametrize(("said", "delete"), BAD.items(), ids=BAD)
def test_a_delete_that_is_malformed_is_refused_with_the_field_its_value_and_the_limit(
    said: str, delete: PendingDelete
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        deletion_checks.check_pending_delete(delete)


@pytest.mark.parametrize(
    "topic", ["orders", "persistent://t/n/x", "persistent://t/n/persistent/x", "a/b/c", "a/b/c/d", "t/n/persistent"]
)
def test_a_topic_has_any_name_of_its_own(topic: str) -> None:
    deletion_checks.check_topic(topic)


@pytest.mark.parametrize("topic", ["t/n/persistent/x", "t/n/persistent/x/y", "t/n/persistent/", "//persistent/x"])
def test_a_topic_that_is_named_as_its_ledgers_are_is_refused(topic: str) -> None:
    with pytest.raises(InvalidArgument, match=r"topic is .*, as its ledgers are named; it must be 'persistent://"):
        deletion_checks.check_topic(topic)
