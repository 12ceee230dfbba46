"""The client for programs on an asyncio event loop.

Owns: `Client`, `AddStream`, `Producer`, `Subscription` and `KeySharedSubscription` with the names, arguments, defaults,
failures and behaviour of those in `tarry`; what waits there is awaited here. Batches, results, policies and failures
are the same classes.
Does not own: any rule: requests, retries, permits and what is held are decided by the code that `tarry` uses.

Each behaviour is written here: `scripts/gen_threads.py` makes the client of threads, `tarry.threads`, from this one.

Calls are awaited. Those that list things (`topics`, `scheduled`, ...), `collect_garbage` and `sweep_orphans` are
asynchronous iterators instead, for `async for`.

A client belongs to the event loop that it is first used on, and is used by that loop's thread alone.

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
