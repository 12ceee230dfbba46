"""Two-phase deletion (PIP-186).

Owns: the calls of a client that owns ledgers or offloaded objects, and of who operates their deletion.
Does not own: requests and answers (`tarry.deletion_calls`), and performing them (`tarry.aio.connections`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from tarry import calls, columns, deletion_calls, deletions
from tarry.aio import connections, inspecting


class Deleting:
    """A part of `tarry.aio.Client`."""

    _connections: connections.Connections
    _calls: calls.Calls

    async def record_pending_deletes(
        self, topic: str, deletes: Iterable[deletions.PendingDelete], *, timeout_s: float | None = None
    ) -> deletions.RecordedDeletes:
        """Records, durably, ledgers of a topic that are to be deleted; from then on the daemon verifies and deletes.

        Only what is `recorded` may leave the owner's metadata; when it has, `forget_in_use` what was said to be in use.
        When this raises, nothing may leave: call again, which changes nothing of what is recorded. The topic need not
        be one of Tarry's. More than 1,000 are several requests. Raises ResourceExhausted: too many are pending.

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
        """Says that ledgers of a topic are in use: from the answer on no deletion of them begins.

        The answer names those that were too late. They must not be used: record their deletion and drop them, or say it
        again later, when the attempt is over, and look whether they are still there.

        `uuid`: of offloaded ledgers, one for all or one each; None = under whatever UUID. `replace`: these, and no
        others of their type, are in use, what an owner says when it starts; in one request, so at most as many as the
        client's `rows_per_request`. Raises ResourceExhausted: too many are in use.

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
        """Takes back that ledgers are in use, named as in `record_in_use`; returns how many were so.

        To be said when they have left the owner's metadata, not before: their deletions are pending again at once.
        After a lost answer it is sent again, and counts only what was left.

        Example: `await client.forget_in_use("flights", [8])`
        """
        return await self._connections.run(
            self._calls.forget_in_use(topic, ledger_id, ledger_type=ledger_type, uuid=uuid, timeout_s=timeout_s)
        )

    def pending_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[deletions.Deletion]:
        """Deletions that are not over, of each shard in the order in which they were recorded, fetched page by page.

        `which`: None = all.

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
        """One page of these, from the token of the page before on; `page_size` 0 = 100, at most 1,000. A page may be
        shorter, also empty, and have others behind it.

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
        """Dead letters: deletions that were given up; they stay until they are retried or purged. As `pending_deletes`.

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
        """One page of these, as `pending_deletes_page`.

        Example: `(await client.dead_deletes_page(page_size=10)).items`
        """
        return await self._connections.run(
            self._calls.deletions_page(deletion_calls.DEAD, which, page_token, page_size=page_size, timeout_s=timeout_s)
        )

    def ended_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[deletions.Deletion]:
        """What came of the last deletions that ended; the daemon keeps a limited number. As `pending_deletes`.

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
        """One page of these, as `pending_deletes_page`.

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
        """Dead letters are pending again, with no failure counted, and due now; returns how many.

        `which`: None = all; one that names nothing is refused. After a lost answer it is sent again, and counts only
        what was left.

        Example: `await client.retry_dead_deletes(tarry.DeletionFilter(topic="flights"))`
        """
        return await self._connections.run(self._calls.retry_dead_deletes(which, timeout_s=timeout_s))

    async def purge_dead_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Forgets dead letters, and leaves what they name where it is; the rest as `retry_dead_deletes`.

        Example: `await client.purge_dead_deletes(tarry.DeletionFilter(deletion_ids=["3.17"]))`
        """
        return await self._connections.run(self._calls.purge_dead_deletes(which, timeout_s=timeout_s))

    async def deletion_stats(self, topic: str = "", *, timeout_s: float | None = None) -> deletions.DeletionStats:
        """How many deletions are in flight, since when, and of what; without a topic those of all.

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
        """Looks in an object store for offloaded ledgers that no record names and nobody uses; each step tells how far.

        `store`: its name in the daemon's configuration. `prefix`: what the objects' names begin with. `grace_ms`:
        younger ones are left alone; None: the daemon's. `delete`: records what was found, when everything was seen, so
        that it is deleted. `unknown_topics`: also those of topics of which nobody has stated what they use. `force`:
        also when they are more than a fifth of the bytes. The last value has `done`. A daemon that stands by is not
        asked, but the owner that it names. Nothing is tried again: a failure is raised, and starting again is safe.
        Raises NotFound: no such store; NotOwner: the daemon does not own every shard.

        Example: `async for step in client.sweep_orphans("archive"): print(step.counts.orphaned.size_bytes)`
        """
        step = self._calls.sweep_orphans(
            store,
            prefix=prefix,
            grace_ms=grace_ms,
            delete=delete,
            unknown_topics=unknown_topics,
            force=force,
            timeout_s=timeout_s,
        )
        return self._connections.receive(step, deletions.SweepStep.from_message)
