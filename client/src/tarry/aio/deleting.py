"""The calls of two-phase deletion (PIP-186).

They are for owners of ledgers or offloaded objects, and for operators. `tarry.deletion_calls` builds the requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from tarry import calls, columns, deletion_calls, deletions
from tarry.aio import connections, inspecting


class Deleting:
    """The deletion calls of `tarry.aio.Client`."""

    _connections: connections.Connections
    _calls: calls.Calls

    async def record_pending_deletes(
        self, topic: str, deletes: Iterable[deletions.PendingDelete], *, timeout_s: float | None = None
    ) -> deletions.RecordedDeletes:
        """Record, durably, ledgers of a topic to delete; from then on the daemon verifies and deletes them.

        Only what is `recorded` may leave the owner's metadata; when it has, call `forget_in_use` for ledgers that were
        recorded as in use. If this raises, nothing may leave: call again, which leaves existing records unchanged. The
        topic need not exist in Tarry. More than 1,000 take several requests. Raises ResourceExhausted if too many are
        pending.
        Example: `(await client.record_pending_deletes("flights", [tarry.PendingDelete(7)])).remaining([7, 8, 9])`
        """
        return await self._connections.run(self._calls.record_pending_deletes(topic, deletes, timeout_s=timeout_s))

    async def record_in_use(
        self,
        topic: str,
        ledger_id: columns.Column,
        *,
        ledger_type: deletions.LedgerType = deletions.LedgerType.LEDGER,
        uuid: deletions.UuidColumn | None = None,
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> deletions.InUseRecorded:
        """Record that ledgers of a topic are in use: from the answer on no deletion of them begins.

        The answer names those recorded too late. They must not be used: record their deletion and drop them, or try
        again later, when the attempt is over, and check that they still exist.
        `uuid` is that of offloaded ledgers, one for all or one each; None means any UUID. With `replace`, these and no
        others of their type are in use, which an owner records when it starts; it takes one request, so at most as many
        ledgers as the client's `rows_per_request`. Raises ResourceExhausted if too many are in use.
        Example: `(await client.record_in_use("flights", [8, 9], replace=True)).being_deleted_index`
        """
        return await self._connections.run(
            self._calls.record_in_use(
                topic, ledger_id, ledger_type=ledger_type, uuid=uuid, replace=replace, timeout_s=timeout_s
            )
        )

    async def forget_in_use(
        self,
        topic: str,
        ledger_id: columns.Column,
        *,
        ledger_type: deletions.LedgerType = deletions.LedgerType.LEDGER,
        uuid: deletions.UuidColumn | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Withdraw that ledgers are in use, named as in `record_in_use`; return how many were.

        Call it after they have left the owner's metadata, not before: their deletions are pending again at once. After
        a lost answer the request is sent again and counts only what was left.
        Example: `await client.forget_in_use("flights", [8])`
        """
        return await self._connections.run(
            self._calls.forget_in_use(topic, ledger_id, ledger_type=ledger_type, uuid=uuid, timeout_s=timeout_s)
        )

    def pending_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[deletions.Deletion]:
        """Yield unfinished deletions, in each shard in the order in which they were recorded, page by page.

        `which` None means all.
        Example: `[each.text async for each in client.pending_deletes() if each.failures]`
        """
        return inspecting.items(
            lambda token: self.pending_deletes_page(
                which, token, page_size=deletion_calls.ITERATED_PAGE_SIZE, timeout_s=timeout_s
            )
        )

    async def pending_deletes_page(
        self,
        which: deletions.DeletionFilter | None = None,
        page_token: str = "",
        *,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> deletions.DeletionPage:
        """Return one page of pending deletions, starting at the previous page's token.

        `page_size` is at most 1,000; 0 means 100. A page may be shorter, even empty, and still have a successor.
        Example: `(await client.pending_deletes_page(tarry.DeletionFilter(topic="flights"), page_size=10)).items`
        """
        return await self._connections.run(
            self._calls.deletions_page(
                deletion_calls.PENDING, which, page_token, page_size=page_size, timeout_s=timeout_s
            )
        )

    def dead_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[deletions.Deletion]:
        """Yield dead letters: deletions that were given up. They stay until they are retried or purged.

        Pages and `which` are as in `pending_deletes`.
        Example: `{each.text async for each in client.dead_deletes()}`
        """
        return inspecting.items(
            lambda token: self.dead_deletes_page(
                which, token, page_size=deletion_calls.ITERATED_PAGE_SIZE, timeout_s=timeout_s
            )
        )

    async def dead_deletes_page(
        self,
        which: deletions.DeletionFilter | None = None,
        page_token: str = "",
        *,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> deletions.DeletionPage:
        """Return one page of dead letters, as `pending_deletes_page` does.

        Example: `(await client.dead_deletes_page(page_size=10)).items`
        """
        return await self._connections.run(
            self._calls.deletions_page(deletion_calls.DEAD, which, page_token, page_size=page_size, timeout_s=timeout_s)
        )

    def ended_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[deletions.Deletion]:
        """Yield the results of the last deletions that ended; the daemon keeps a limited number.

        Pages and `which` are as in `pending_deletes`.
        Example: `{each.pending_delete.ledger_id: each.outcome async for each in client.ended_deletes()}`
        """
        return inspecting.items(
            lambda token: self.ended_deletes_page(
                which, token, page_size=deletion_calls.ITERATED_PAGE_SIZE, timeout_s=timeout_s
            )
        )

    async def ended_deletes_page(
        self,
        which: deletions.DeletionFilter | None = None,
        page_token: str = "",
        *,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> deletions.DeletionPage:
        """Return one page of ended deletions, as `pending_deletes_page` does.

        Example: `(await client.ended_deletes_page(page_size=10)).items`
        """
        return await self._connections.run(
            self._calls.deletions_page(
                deletion_calls.ENDED, which, page_token, page_size=page_size, timeout_s=timeout_s
            )
        )

    async def retry_dead_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Make dead letters pending again, due now and with no failure counted; return how many.

        `which` None means all; a filter that names nothing is refused. After a lost answer the request is sent again
        and counts only what was left.
        Example: `await client.retry_dead_deletes(tarry.DeletionFilter(topic="flights"))`
        """
        return await self._connections.run(self._calls.retry_dead_deletes(which, timeout_s=timeout_s))

    async def purge_dead_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Forget dead letters, and leave the ledgers and objects that they name.

        Everything else is as in `retry_dead_deletes`.
        Example: `await client.purge_dead_deletes(tarry.DeletionFilter(deletion_ids=["3.17"]))`
        """
        return await self._connections.run(self._calls.purge_dead_deletes(which, timeout_s=timeout_s))

    async def deletion_stats(self, topic: str = "", *, timeout_s: float | None = None) -> deletions.DeletionStats:
        """Return how many deletions are in flight, of which kinds and since when; without a topic, those of all topics.

        Example: `(await client.deletion_stats()).in_flight`
        """
        return await self._connections.run(self._calls.deletion_stats(topic, timeout_s=timeout_s))

    def sweep_orphans(
        self,
        store: str,
        *,
        prefix: str = "",
        grace_ms: int | None = None,
        delete: bool = False,
        unknown_topics: bool = False,
        force: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncIterator[deletions.SweepStep]:
        """Search an object store for offloaded ledgers that no record names and no topic uses; yield the progress.

        - `store` is its name in the daemon's configuration.
        - `prefix` is what the names of the objects begin with.
        - `grace_ms` spares younger ones; None takes the daemon's.
        - `delete` records what was found, after everything was seen, so that the daemon deletes it.
        - `unknown_topics` includes topics whose used ledgers were never recorded.
        - `force` deletes even more than a fifth of the bytes.
        The last value has `done`. If the daemon is a standby, the owner that it names is asked instead. Nothing is
        retried: a failure is raised, and starting again is safe. Raises NotFound if the store is unknown, or NotOwner
        if the daemon does not own every shard.
        Example: `async for step in client.sweep_orphans("archive"): print(step.counts.orphaned.size_bytes)`
        """
        plan = self._calls.sweep_orphans(
            store,
            prefix=prefix,
            grace_ms=grace_ms,
            delete=delete,
            unknown_topics=unknown_topics,
            force=force,
            timeout_s=timeout_s,
        )
        return self._connections.receive(plan, deletions.SweepStep.from_message)
