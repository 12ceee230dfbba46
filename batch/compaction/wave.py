"""A wave of runs that the engine does, while the driver commits the wave before it.

Owns: the thread in which the engine runs. Does not own: which runs it has (`waves`), what they do (`merge_task`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from batch.compaction.merge_task import FailedRun, MergeTask, WrittenRun, merge_run
from batch.compaction.waves import Work
from batch.engine.engine_port import Engine, WorkFailed

Report = WrittenRun | FailedRun


class Wave:
    """Begins at once. `done`: told in another thread how many tasks have ended; what it raises ends the wave."""

    def __init__(
        self, engine: Engine, works: Sequence[Work], tasks: Sequence[MergeTask], done: Callable[[int], None]
    ) -> None:
        self.works = works
        self.failure: WorkFailed | None = None
        """Why some tasks have no report."""
        self._engine = engine
        self._tasks = tasks
        self._done = done
        self._reports: list[tuple[Work, Report]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="wave", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for place, report in self._engine.run(merge_run, self._tasks, self._done):
                self._reports.append((self.works[place], report))
        except WorkFailed as failure:
            self.failure = failure
        except BaseException as error:  # noqa: BLE001 - it is raised where the reports are asked for
            self._error = error

    def end(self) -> None:
        """Waits until it has ended."""
        self._thread.join()

    def reports(self) -> list[tuple[Work, Report]]:
        """Waits for its end. Tasks that have no report are those that `failure` ended. Raises what `done` raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._reports
