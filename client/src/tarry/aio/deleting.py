"""Two-phase deletion (PIP-186), on the event loop.

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
        """As `tarry.Client.record_pending_deletes`."""
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
        """As `tarry.Client.record_in_use`."""
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
        """As `tarry.Client.forget_in_use`."""
        return await self._connections.run(
            self._calls.forget_in_use(topic, ledger_id, ledger_type=ledger_type, uuid=uuid, timeout_s=timeout_s)
        )

    def pending_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[deletions.Deletion]:
        """As `tarry.Client.pending_deletes`."""
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
        """As `tarry.Client.pending_deletes_page`."""
        return await self._connections.run(
            self._calls.deletions_page(
                deletion_calls.PENDING, which, page_token, page_size=page_size, timeout_s=timeout_s
            )
        )

    def dead_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[deletions.Deletion]:
        """As `tarry.Client.dead_deletes`."""
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
        """As `tarry.Client.dead_deletes_page`."""
        return await self._connections.run(
            self._calls.deletions_page(deletion_calls.DEAD, which, page_token, page_size=page_size, timeout_s=timeout_s)
        )

    def ended_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[deletions.Deletion]:
        """As `tarry.Client.ended_deletes`."""
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
        """As `tarry.Client.ended_deletes_page`."""
        return await self._connections.run(
            self._calls.deletions_page(
                deletion_calls.ENDED, which, page_token, page_size=page_size, timeout_s=timeout_s
            )
        )

    async def retry_dead_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> int:
        """As `tarry.Client.retry_dead_deletes`."""
        return await self._connections.run(self._calls.retry_dead_deletes(which, timeout_s=timeout_s))

    async def purge_dead_deletes(
        self, which: deletions.DeletionFilter | None = None, *, timeout_s: float | None = None
    ) -> int:
        """As `tarry.Client.purge_dead_deletes`."""
        return await self._connections.run(self._calls.purge_dead_deletes(which, timeout_s=timeout_s))

    async def deletion_stats(self, topic: str = "", *, timeout_s: float | None = None) -> deletions.DeletionStats:
        """As `tarry.Client.deletion_stats`."""
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
        """As `tarry.Client.sweep_orphans`."""
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
