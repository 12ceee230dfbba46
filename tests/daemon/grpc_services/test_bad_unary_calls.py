"""Every field of every call with one request, given wrongly: the status, the field by name in the message, and nothing
changed, so that all have one topic.

That the tables have every field and every call: `test_bad_input`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from daemon import config
from tests._support import real_engine
from tests.daemon.grpc_services import conftest
from tests.daemon.grpc_services._support import refusals
from tests.daemon.grpc_services._support.bad_calls import BAD_CALLS
from tests.daemon.grpc_services._support.bad_dead_letters import BAD_DEAD_LETTERS
from tests.daemon.grpc_services._support.bad_key_shared import BAD_CONSUMER_LISTS
from tests.daemon.grpc_services._support.bad_key_shared_policies import BAD_KEY_SHARED_POLICIES
from tests.daemon.grpc_services._support.bad_levels import BAD_LEVELS
from tests.daemon.grpc_services._support.bad_redelivery import BAD_REDELIVERIES
from tests.daemon.grpc_services._support.bad_requests import Case
from tests.daemon.grpc_services._support.bad_views import BAD_VIEWS
from tests.daemon.grpc_services._support.bad_withdrawals import BAD_WITHDRAWALS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def populated(settings: config.Config) -> AsyncIterator[refusals.Populated]:
    async with real_engine.serving(settings) as engine, conftest.serving(engine, settings) as edge:
        yield await refusals.populate(edge)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "case",
    [
        *BAD_CALLS,
        *BAD_WITHDRAWALS,
        *BAD_VIEWS,
        *BAD_LEVELS,
        *BAD_DEAD_LETTERS,
        *BAD_REDELIVERIES,
        *BAD_KEY_SHARED_POLICIES,
        *BAD_CONSUMER_LISTS,
    ],
    ids=str,
)
async def test_a_bad_request_is_refused_by_field_value_and_limit_and_changes_nothing(
    populated: refusals.Populated, case: Case
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await populated.edge.caller.unary(case.method, case.request)
    refusals.assert_says(case, refused.value.code(), refused.value.details())
    await populated.assert_unchanged()
