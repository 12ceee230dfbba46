"""Properties in a simulated run: each subscription is given those that tell its policy.

Owns: which properties go with a policy, in which runs, and that each manifest agrees with the object that it names.
Does not own: when policies change (`nacking`, `key_sharing`), and what a daemon has in memory (`quiet`).
"""

from __future__ import annotations

from collections.abc import Iterator

from storage_backends.formats import manifest
from storage_backends.formats.manifest import NamedValues, SubscriptionPolicy, TopicManifest

# In runs of some seeds.
SEEDS_A_RUN, RUN = 8, 5


def are_given(seed: int) -> bool:
    return seed % SEEDS_A_RUN == RUN


def of_policy(policy: SubscriptionPolicy) -> NamedValues:
    """Of a policy that sets nothing there are none."""
    return () if policy == SubscriptionPolicy() else (("policy", repr(policy)),)


class StoredProperties:
    """Told of every object with properties that was written, and of the manifests of topics. `given`: whether
    subscriptions are given any.
    """

    def __init__(self) -> None:
        self.given = False
        self._written: dict[str, dict[int, NamedValues]] = {}

    def of(self, policy: SubscriptionPolicy) -> NamedValues:
        """What a client gives with a policy."""
        return of_policy(policy) if self.given else ()

    def written(self, key: str, body: bytes) -> None:
        stored = manifest.decode_properties(body).subscriptions
        self._written[key] = {each.subscription_id: each.properties for each in stored}

    def flaws(self, landed: TopicManifest) -> Iterator[str]:
        """What the manifest says that it cannot."""
        if not self.given:
            return
        expected = {each.subscription_id: of_policy(each.policy) for each in landed.subscriptions}
        expected = {number: named for number, named in expected.items() if named}
        reference = landed.properties_object
        found = {} if reference is None else self._written.get(reference.name)
        if found is None:
            yield f"its properties {reference} were not written"
        elif found != expected:
            yield f"its properties are {found}, its policies make them {expected}"
