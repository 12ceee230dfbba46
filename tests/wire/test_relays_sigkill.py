"""The relays of the examples as real processes beside real brokers: relay, daemon and broker are killed, and consumers
fail, some before the relay has acknowledged. The consumer's own record is the oracle.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import tarry
from benchmarks import carrier_settings, carrying
from benchmarks.handing_back import HandingBack
from benchmarks.relays import Relayed
from examples import processes, redis_relay
from tests._support.processes import Daemons
from tests._support.tcp_proxy import TcpProxy
from tests.brokers import redis_server
from tests.wire._support.listening import PATIENCE_S

BESIDE: Mapping[str, Relayed] = {
    "redis": carrier_settings.relayed_by_redis,
    "nats": carrier_settings.relayed_by_nats,
}
needs_redis = pytest.mark.skipif(redis_server.find() is None, reason=redis_server.MISSING)


class HeldBack:
    """A consumer for which a relay is killed between passing on and acknowledging: when the first message has failed,
    nothing that the relay says reaches the daemon until that message was passed on again, and has failed again.
    """

    def __init__(self, account: carrying.Account, proxy: TcpProxy) -> None:
        self._account = account
        self._proxy = proxy
        self._has_failed_again = asyncio.Event()

    def take(self, delivered: Sequence[carrying.Delivery]) -> Sequence[carrying.Delivery]:
        """Takes for the account."""
        failed = self._account.take(delivered)
        for each in failed:
            if each.number == 0 and each.attempt == 1:
                self._has_failed_again.set()
            elif each.number == 0 and not self._has_failed_again.is_set():
                self._proxy.hold_back()
        return failed

    async def kill(self, relay: carrying.Victim) -> None:
        """Returns when the relay runs again."""
        await self._has_failed_again.wait()
        await relay.kill()
        self._proxy.let_pass()


@pytest.mark.parametrize("beside", [pytest.param("redis", marks=needs_redis), "nats"])
@pytest.mark.parametrize(
    ("messages", "most_ms", "fails_every"),
    [(300, 2_000, 10), pytest.param(10_000, 30_000, 50, marks=pytest.mark.long)],
)
async def test_each_delivery_of_a_relay_comes_once_and_never_early_whoever_is_killed(
    daemons: Daemons, tmp_path: Path, beside: str, messages: int, most_ms: int, fails_every: int
) -> None:
    daemon = daemons.make("tarryd", processes.local_store(tmp_path / "root"))
    daemon.start_serving()
    account = carrying.Account(messages, fails_every=fails_every)
    with TcpProxy(int(daemon.address.rpartition(":")[2])) as proxy:
        async with tarry.aio.Client(daemon.address, timeout_s=PATIENCE_S) as client:
            handing_back = HandingBack(client, redis_relay.SOURCE, redis_relay.RELAY)
            await handing_back.create_subscription()
            async with BESIDE[beside](tmp_path, f"127.0.0.1:{proxy.port}", handing_back) as setting:
                broker, relay = setting.victims[carrier_settings.BROKER], setting.victims[carrier_settings.RELAY]
                held_back = HeldBack(account, proxy)
                try:
                    await carrying.carry(
                        setting.carrier,
                        account,
                        carrying.delays(messages, most_ms=most_ms, seed=messages),
                        [
                            carrying.Kill(0.0, lambda: held_back.kill(relay)),
                            carrying.Kill(0.3, carrying.Victim(daemon, daemon.start_serving).kill),
                            carrying.Kill(0.5, relay.kill),
                            carrying.Kill(0.7, broker.kill),
                        ],
                        take=held_back.take,
                        until_rest=lambda: nothing_is_owed(client),
                        timeout_s=PATIENCE_S,
                    )
                finally:
                    # pytest shows it with a test that failed.
                    sys.stdout.write(relay.process.log_text())
    assert account.problems() == []
    assert account.doubles == []
    assert handing_back.before_acks > 0


async def nothing_is_owed(client: tarry.aio.Client) -> None:
    """Waits until Tarry has no row left."""
    while True:
        stats = await client.stats(redis_relay.SOURCE)
        if not stats.pending and not any(each.backlog for each in stats.subscriptions):
            return
        await asyncio.sleep(0.05)
