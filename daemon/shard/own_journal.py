"""The journal of a shard as its owner has it: what writes it, and since when the owner was certain to be that.

Owns: that its parts belong together, and end together.
Does not own: any of them, and what is staged for it (`shard_staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from daemon.errors import InvariantViolated
from daemon.shard.confirmation import ProbedConfirmation
from daemon.shard.journal_writer import JournalWriter, WrittenSlot
from daemon.shard.shard_claim import ShardClaim
from daemon.shard.shard_tip import KnownTip, TipProbe
from daemon.shard.slot_sender import Section, SlotSender, SlotWriter
from daemon.surroundings.environment import Environment
from storage_backends import commit
from storage_backends.formats.manifest import ShardManifest
from storage_backends.formats.shard_slot import ShardSlot


class OwnJournal(SlotWriter):
    """The journal of the shard of `claim`. `written` hears of each slot that is certain, and confirms the epoch by its
    sending time.
    """

    def __init__(
        self,
        claim: ShardClaim,
        tip: KnownTip,
        shard_log: commit.ManifestLog[ShardManifest],
        environment: Environment,
        *,
        written: Callable[[WrittenSlot], None],
    ) -> None:
        self._shard = claim.shard
        self.confirmation = ProbedConfirmation(
            claim.shard,
            TipProbe(shard_log, tip, environment.pools.journal.run),
            confirmed_at_s=claim.confirmed_at_s,
            clock=environment.clock.elapsed_s,
            sleep=environment.sleep,
            jitter=environment.jitter,
        )
        self._writer = JournalWriter(
            environment.store,
            shard=claim.shard,
            epoch=claim.epoch,
            last_slot=claim.last_slot,
            run=environment.pools.journal.run,
            clock=environment.clock.elapsed_s,
            sleep=environment.sleep,
            jitter=environment.jitter,
            new_id=environment.new_id,
            written=written,
        )
        self.sender = SlotSender(
            self,
            self.confirmation,
            clock=environment.clock.elapsed_s,
            sleep=environment.sleep,
            linger_s=environment.linger_s,
        )

    async def write(self, sections: Sequence[Section]) -> Sequence[ShardSlot]:
        """Writes the section of the shard; a slot of a journal has no other. Raises as `JournalWriter.write`."""
        section = sections[0]
        if len(sections) > 1 or section.shard != self._shard:
            raise InvariantViolated(f"shard {self._shard}: a slot of shards {[each.shard for each in sections]}")
        return (await self._writer.write(section.records, section.deletions),)

    def close(self) -> None:
        """Nothing is written or confirmed any more."""
        self._writer.close()
        self.confirmation.close()
