"""The client for programs on an asyncio event loop.

`Client`, `AddStream`, `Producer`, `Subscription` and `KeySharedSubscription` have the names, arguments, defaults,
failures and behaviour of those in `tarry`; calls that wait there are awaited here. Batches, results, policies and
failures are the same classes, and both clients use the same code for requests, retries, permits and held rows.
Behaviour is written here: `scripts/gen_threads.py` generates the client for threads, `tarry.threads`, from this
package.
Calls are awaited. Those that list things (`topics`, `scheduled`, ...), `collect_garbage` and `sweep_orphans` are
asynchronous iterators instead, for `async for`.
A client belongs to the event loop on which it is first used, and only that loop's thread may use it.

    async with tarry.aio.Client() as client:
        async with client.add_stream("flights") as stream:
            for day in range(365):
                await stream.add(day, np.arange(1_000), delay_ms=5_000)
        async with client.subscribe("flights", "departures", create=True) as subscription:
            async for batch in subscription:
                await subscription.ack(batch)
"""

from tarry.aio.add_stream import AddStream
from tarry.aio.client import Client
from tarry.aio.producer import Producer
from tarry.aio.subscription import KeySharedSubscription, Subscription
from tarry.on_event_loop import Opening

__all__ = ["AddStream", "Client", "KeySharedSubscription", "Opening", "Producer", "Subscription"]
