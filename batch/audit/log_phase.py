"""The logs of a root, from their listing to the end: what of them is damaged, and what shards lack.

Owns: reading every slot of every log once, and reading again what does not agree: the manifests of shards have been
read before the logs, and daemons go on.
Does not own: what is checked (`log_task`, `log_rules`), and the manifests (`driver`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from batch.audit import division, log_rules
from batch.audit.division import Job
from batch.audit.findings import Finding, Kind, Severity, Tally
from batch.audit.log_rules import AppliedTopic, ReadLog, Suspicion
from batch.audit.log_task import LogRun, LogSeen
from batch.engine.root import Root
from storage_backends import log_reading, object_store
from storage_backends.formats.manifest import ShardManifest
from storage_backends.log_reading import Verdict
from storage_backends.slot_log import SlotLogs

TRIES_MAX: Final = 5
"""So often what does not agree is read again; then it is counted as moved on."""

Do: TypeAlias = Callable[[str, Sequence[tuple[Job, int]]], Iterator[tuple[Job, Any]]]
Tips: TypeAlias = Mapping[int, ShardManifest | None]
"""By shard: the newest manifest, None where nobody ever owned it. One whose manifest cannot be read is not there."""


@dataclasses.dataclass(frozen=True, slots=True)
class LogPhase:
    """`tips` and `applied`: as they were read before. `do`: does jobs on the engine."""

    root: Root
    tips: Tips
    applied: Mapping[int, Sequence[AppliedTopic]]
    do: Do

    def run(self) -> Tally:
        """What was found beside what the jobs have found."""
        tally = Tally()
        listed = self._listed(tally)
        jobs = [job for log_id, numbers in listed.items() for job in division.log_runs(log_id, numbers)]
        runs: dict[str, list[LogSeen]] = {log_id: [] for log_id in listed}
        for job, seen in self.do("reading logs", jobs):
            if isinstance(job, LogRun):
                runs[job.log_id].append(seen)
        logs = {log_id: ReadLog.of(log_id, numbers, runs[log_id]) for log_id, numbers in listed.items()}
        tally.moved_on += sum(len(seen.absent) for each in runs.values() for seen in each)
        found = log_rules.suspicions(self.tips, logs, self.applied)
        if found:
            self._look_again(found, logs, tally)
        return tally

    # ---- what is listed

    def _listed(self, tally: Tally) -> dict[str, list[int]]:
        """The numbers of every log that has slots; what is among them and is no slot is told."""
        listed: dict[str, list[int]] = {}
        with _logs(self.root) as logs:
            for log_id in self._ids(logs, tally):
                try:
                    numbers = _numbers(logs, log_id)
                except object_store.Damaged as error:
                    _tell_astray(tally, error)
                else:
                    if numbers:
                        listed[log_id] = numbers
        return listed

    def _ids(self, logs: SlotLogs, tally: Tally) -> Iterable[str]:
        try:
            return sorted(logs.log_ids())
        except object_store.Damaged as error:
            _tell_astray(tally, error)
            # They are found by the manifests that name them.
            return sorted(frozenset().union(*(log_rules.logs_of(tip) for tip in self.tips.values() if tip)))

    # ---- what does not agree

    def _look_again(self, found: Sequence[Suspicion], logs: Mapping[str, ReadLog], tally: Tally) -> None:
        """Reads manifests, the logs concerned, and the manifests again, until nothing has changed meanwhile."""
        first = len(found)
        known = dict(logs)
        try:
            for _ in range(TRIES_MAX):
                before = self._tips_now()
                read = {log_id for each in found for log_id in each.logs}
                read |= {log_id for each in found for log_id in _named(before, each.shards)}
                for log_id in read:
                    self._read_again(log_id, known)
                found = log_rules.suspicions(before, known, self.applied)
                after = self._tips_now()
                if all(each.logs <= read and _stands(each.shards, before, after) for each in found):
                    for each in found:
                        tally.find(each.finding)
                    tally.moved_on += max(first - len(found), 0)
                    return
        except object_store.StoreError as error:
            tally.find(Finding(kind=Kind.UNREADABLE, severity=Severity.ERROR, object=error.key, detail=error.reason))
            return
        tally.moved_on += len(found)

    def _tips_now(self) -> Tips:
        tips: dict[int, ShardManifest | None] = {}
        for shard in self.tips:
            try:
                tip = self.root.shard_tip(shard)
            except object_store.Damaged:
                # It has come since: the next audit tells it.
                continue
            tips[shard] = None if tip is None else tip.manifest
        return tips

    def _read_again(self, log_id: str, known: dict[str, ReadLog]) -> None:
        """Here, and without findings: what is damaged was told. Raises the store's errors."""
        with _logs(self.root) as logs:
            numbers = _numbers(logs, log_id)
        if not numbers:
            known.pop(log_id, None)
            return
        seen = [job.run(self.root) for job, _ in division.log_runs(log_id, numbers)]
        known[log_id] = ReadLog.of(log_id, numbers, seen)


@contextlib.contextmanager
def _logs(root: Root) -> Iterator[SlotLogs]:
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="audit") as threads:
        yield root.logs(threads)


def _numbers(logs: SlotLogs, log_id: str) -> list[int]:
    slots = logs.log(log_id)
    try:
        return slots.numbers()
    finally:
        slots.close()


def _tell_astray(tally: Tally, error: object_store.Damaged) -> None:
    detail = f"{error.reason}: it stops the log from being read"
    tally.find(Finding(kind=Kind.FOREIGN, severity=Severity.ERROR, object=error.key, detail=detail))


def _named(tips: Tips, shards: Iterable[int]) -> Iterator[str]:
    for shard in shards:
        tip = tips.get(shard)
        if tip is not None:
            yield from log_rules.logs_of(tip)


def _stands(shards: Iterable[int], before: Tips, after: Tips) -> bool:
    """Whether the manifests of the shards say of the logs what they said."""
    for shard in shards:
        was, now = before.get(shard), after.get(shard)
        if was is None or now is None:
            if was is not now:
                return False
        elif log_reading.judged(was, now) is not Verdict.STANDS:
            return False
    return True
