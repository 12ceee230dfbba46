"""The properties of a topic's subscriptions as an object that its manifests name.

Owns: reading the one of a manifest, and writing a new one.
Does not own: its form (`formats.manifest`), when there is a new one (`topic_changes`), and that manifests name it
(`storage_backends.topic_manifest`).

The daemon does nothing by them: they are for people and applications. An object is written once, before the manifest
that names it, and is never changed: manifests carry its reference on until the properties change.
"""

from __future__ import annotations

from collections.abc import Mapping

from daemon.errors import Corruption
from storage_backends import object_store, topic_manifest
from storage_backends.crash_points import crash_point
from storage_backends.formats import format_errors, manifest
from storage_backends.formats.manifest import NamedValues, ObjectReference

# By subscription id, of those that have any.
PropertiesById = Mapping[int, NamedValues]


def read(store: object_store.ObjectStore, reference: ObjectReference) -> PropertiesById:
    """What the object holds. Raises Corruption when it is damaged or missing, and the store's errors."""
    try:
        body = store.get(reference.name)
        manifest.check_bytes(reference, body, "properties")
        stored = manifest.decode_properties(body)
    except format_errors.FormatError as error:
        raise Corruption(f"properties {reference.name}: {error}") from error
    except (object_store.NotFound, object_store.Damaged) as error:
        raise Corruption(f"properties {error}") from error
    return {each.subscription_id: each.properties for each in stored.subscriptions}


def write(store: object_store.ObjectStore, properties: PropertiesById, *, key: str, base: int) -> ObjectReference:
    """Puts the object. May be repeated: it is the same."""
    of_subscriptions = (
        manifest.SubscriptionProperties(subscription_id=number, properties=named)
        for number, named in sorted(properties.items())
    )
    body = manifest.encode_properties(manifest.Properties(subscriptions=tuple(of_subscriptions)))
    crash_point("properties.before_put")
    store.put(key, body)
    crash_point("properties.after_put")
    return topic_manifest.reference_to(key, base, body)
