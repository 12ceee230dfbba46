"""What is sent on a stream, for threads and for an event loop: in its order, and joined where that is wanted."""

from __future__ import annotations

import pytest

from tarry import in_threads, on_event_loop


async def sent(kind: str, joined_bytes: int, *messages: bytes) -> list[bytes]:
    """What leaves when all of it was put before anything is taken."""
    if kind == "threads":
        of_threads = in_threads.Outbox(joined_bytes)
        for message in messages:
            of_threads.put(message)
        of_threads.close()
        return list(of_threads)
    of_loop = on_event_loop.Outbox(joined_bytes)
    for message in messages:
        of_loop.put(message)
    of_loop.close()
    return [message async for message in of_loop]


@pytest.mark.parametrize("kind", ["threads", "event loop"])
@pytest.mark.parametrize(
    ("joined_bytes", "leaves"),
    [(0, [b"aa", b"b", b"cc", b"d"]), (3, [b"aab", b"ccd"]), (4, [b"aabcc", b"d"]), (100, [b"aabccd"])],
)
async def test_what_is_ready_is_one_message_until_it_is_large(
    kind: str, joined_bytes: int, leaves: list[bytes]
) -> None:
    assert await sent(kind, joined_bytes, b"aa", b"b", b"cc", b"d") == leaves


def test_in_threads_what_was_held_back_is_joined_when_it_is_due() -> None:
    outbox = in_threads.Outbox(100)
    messages: list[bytes | None] = [b"a", None, b"b"]
    for each in messages:
        outbox.put_after(0, iter([each]).__next__)
    outbox.put(b"c")
    outbox.put_after(3_600, lambda: b"never")
    outbox.close()
    assert sorted(b"".join(outbox).decode()) == ["a", "b", "c"]
