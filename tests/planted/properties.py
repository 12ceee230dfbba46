"""The object of a topic's properties, each of its rules broken at the place where it lives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from daemon.owner import collection_pass
from daemon.shard.topic_changes import TopicChanges
from daemon.topic import stored_topic
from storage_backends import topic_manifest
from tests.planted.bug import Bug
from tests.simulation.faults import Trouble
from tests.simulation.run import Directed


def properties_are_written_after_the_manifest_that_names_them(patch: pytest.MonkeyPatch) -> None:
    """I2: a manifest names an object that is not there."""
    write, set_subscriptions = stored_topic.write_properties, TopicChanges._set_subscriptions
    late: list[Any] = []

    class Later:
        def put(self, key: str, body: bytes) -> None:
            late.append((key, body))

    def unwritten(store: Any, body: Any, *, key: str, base: int) -> Any:
        return write(Later(), body, key=key, base=base)  # type: ignore[arg-type]

    async def then_written(self: TopicChanges, *arguments: Any) -> None:
        await set_subscriptions(self, *arguments)
        while late:
            await self._environment.run(functools.partial(self._environment.store.put, *late.pop()))

    patch.setattr(stored_topic, "write_properties", unwritten)
    patch.setattr(TopicChanges, "_set_subscriptions", then_written)


def properties_that_are_named_are_collected(patch: pytest.MonkeyPatch) -> None:
    """R4: an object is deleted that a manifest names."""
    names_in = topic_manifest.names_in

    def forgetting(tip: Any) -> Any:
        return names_in(dataclasses.replace(tip, properties_object=None))

    patch.setattr(collection_pass, "TOPIC", dataclasses.replace(collection_pass.TOPIC, named=forgetting))


def a_change_of_properties_leaves_no_tombstone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topic_manifest, "_replaced", lambda before, after: ())


def properties_of_before_stay_named(patch: pytest.MonkeyPatch) -> None:
    apply = topic_manifest.SetSubscriptions.apply

    def applied(self: topic_manifest.SetSubscriptions, tip: Any) -> Any:
        return apply(dataclasses.replace(self, properties_object=tip.properties_object), tip)

    patch.setattr(topic_manifest.SetSubscriptions, "apply", applied)


def properties_are_not_read_when_a_topic_is_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stored_topic, "read_properties", lambda store, reference: {})


GIVEN = Directed(nacks=0.5, properties=True)
# The owner is killed between the object and the manifest that would name it.
KILLED = dataclasses.replace(GIVEN, troubles=(Trouble("kill", "put", "/properties/", 1, False, 0.3),))

BUGS = (
    Bug("properties", properties_are_written_after_the_manifest_that_names_them, GIVEN),
    Bug("properties", properties_that_are_named_are_collected, GIVEN),
    Bug("properties", a_change_of_properties_leaves_no_tombstone, GIVEN),
    Bug("properties", properties_of_before_stay_named, GIVEN),
    Bug("properties", properties_are_not_read_when_a_topic_is_loaded, KILLED, seed=3),
)
