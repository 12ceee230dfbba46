"""What hand-outs leave by, when it is full."""

from __future__ import annotations

from daemon.topic.open_streams import Waiter


class FullOutlet:
    """Has no room until the test says so."""

    def __init__(self) -> None:
        self._waiting: list[Waiter] = []
        self._has_room = False

    def takes(self, stream: Waiter) -> bool:
        if not self._has_room:
            self._waiting.append(stream)
        return self._has_room

    def make_room(self) -> None:
        """For whatever comes from now on."""
        self._has_room = True
        for stream in self._waiting:
            stream.notify()
