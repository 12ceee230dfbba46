"""The object stores and owners of deletions: arrays of tables, and what they must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon import config, errors, settings
from storage_backends import storage_settings

STORE = '[[deletion.object_stores]]\nname = "{name}"\ndrivers = ["{driver}"]\n'
S3 = '[deletion.object_stores.s3]\nbucket = "{bucket}"\n'
COLD = STORE.format(name="cold", driver="aws-s3") + S3.format(bucket="b1")
DISK = STORE.format(name="disk", driver="filesystem") + 'kind = "local"\npath = "{path}"\n'
BROKERS = '[[deletion.owners]]\nname = "brokers"\ntopic_prefixes = ["persistent://t/"]\ndelete_url = "http://h/d"\n'


def load(tmp_path: Path, text: str, *overrides: str) -> config.Config:
    path = tmp_path / "tarryd.toml"
    path.write_text(text, encoding="utf-8")
    return config.load(path, environment={}, overrides=overrides)


def test_without_anything_nothing_is_deleted_by_the_daemon(tmp_path: Path) -> None:
    deletion = load(tmp_path, "").deletion
    assert (deletion.object_stores, deletion.owners) == ((), ())
    assert (deletion.parallelism, deletion.reconsume_later_seconds, deletion.max_retry_delete_count) == (4, 600, 10)
    assert deletion.two_phase_deletion_enabled


def test_stores_and_owners_are_read_in_their_order(tmp_path: Path) -> None:
    more = 'in_use_url = "https://h:8443/u?x=1"\ndrivers = ["tape"]\nauthorization_file = "t"\ninsecure = true\n'
    brokers = BROKERS + more + "timeout_s = 3\n"
    deletion = load(tmp_path, COLD + DISK.format(path=tmp_path / "offloaded") + brokers).deletion
    assert deletion.object_stores == (
        settings.DeletionObjectStore(name="cold", drivers=("aws-s3",), s3=storage_settings.S3(bucket="b1")),
        settings.DeletionObjectStore(
            name="disk", drivers=("filesystem",), kind="local", path=str(tmp_path / "offloaded")
        ),
    )
    assert deletion.owners == (
        settings.DeletionOwner(
            name="brokers",
            topic_prefixes=("persistent://t/",),
            drivers=("tape",),
            delete_url="http://h/d",
            in_use_url="https://h:8443/u?x=1",
            authorization_file="t",
            insecure=True,
            timeout_s=3.0,
        ),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            COLD + STORE.format(name="b", driver="x") + 'knd = "s3"\n',
            "deletion.object_stores[1].knd is not a setting; did you mean deletion.object_stores[1].kind?",
        ),
        (
            COLD + "regio = 'x'\n",
            "deletion.object_stores[0].s3.regio is not a setting; did you mean deletion.object_stores[0].s3.region?",
        ),
        (BROKERS + "s3 = 1\n", "deletion.owners[0].s3 is not a setting"),
        ("[deletion]\nowner = []\n", "deletion.owner is not a setting; did you mean deletion.owners?"),
        ("[deletion.owners]\nname = 'x'\n", "deletion.owners is an array of tables: [[deletion.owners]]"),
        ("[deletion]\nowners = [1]\n", "deletion.owners is an array of tables: [[deletion.owners]]"),
        (COLD + BROKERS + "timeout_s = 0\n", "deletion.owners[0].timeout_s is 0; it must be a number > 0"),
        (
            COLD + COLD.replace("b1", "b2").replace("cold", "two") + "attempts = 0\n",
            "deletion.object_stores[1].s3.attempts is 0; it must be an integer >= 1",
        ),
        (COLD.replace('["aws-s3"]', "[]"), "deletion.object_stores[0].drivers is []; it must be a list of length >= 1"),
        (
            COLD.replace('["aws-s3"]', '["a", ""]'),
            "deletion.object_stores[0].drivers[1] is ''; it must be a text of length >= 1",
        ),
        (COLD.replace('"cold"', '"a/b"'), "deletion.object_stores[0].name is 'a/b'"),
        ("[[deletion.object_stores]]\nname = 'x'\n", "deletion.object_stores[0] is {'name': 'x'}; drivers is not set"),
        (BROKERS.replace("http://h/d", "ftp://h/d"), "deletion.owners[0].delete_url is 'ftp://h/d'"),
        (BROKERS.replace("http://h/d", "http://user:secret@h/d"), "deletion.owners[0].delete_url is"),
        (BROKERS.replace("http://h/d", "http://h:65536/d"), "delete_url is 'http://h:65536/d', and 65536 is no port"),
        (BROKERS.replace("http://h/d", "http:///d"), "deletion.owners[0].delete_url is"),
        (BROKERS.replace("http://h/d", "http://h/a b"), "deletion.owners[0].delete_url is"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        load(tmp_path, text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (STORE.format(name="a", driver="d"), "deletion.object_stores[0].s3.bucket is not set"),
        (
            STORE.format(name="a", driver="d") + 'kind = "local"\n',
            "deletion.object_stores[0].path is not set, and deletion.object_stores[0].kind is 'local'",
        ),
        (COLD.replace("[deletion.object_stores.s3]", 'path = "x"\n[deletion.object_stores.s3]'), "path is 'x'"),
        (DISK.format(path="x") + S3.format(bucket="b"), "deletion.object_stores[0].s3 is set"),
        (
            COLD + COLD.replace("b1", "b2"),
            "deletion.object_stores[1] has name 'cold', which deletion.object_stores[0] has",
        ),
        (
            COLD + COLD.replace("cold", "hot") + 'prefix = "elsewhere"\nendpoint_url = "http://h"\n',
            "deletion.object_stores[1] has driver and bucket 'aws-s3, bucket b1', which deletion.object_stores[0] has",
        ),
        (
            DISK.format(path="x") + DISK.format(path="y").replace("disk", "other"),
            "deletion.object_stores[1] has driver and bucket 'filesystem, local', which deletion.object_stores[0] has",
        ),
        (
            BROKERS + BROKERS.replace("brokers", "others"),
            "deletion.owners[1] has topic prefix 'persistent://t/', which deletion.owners[0] has",
        ),
        (
            BROKERS + BROKERS.replace("persistent://t/", "u"),
            "deletion.owners[1] has name 'brokers', which deletion.owners[0] has",
        ),
        (
            (BROKERS + 'drivers = ["d"]\n')
            + (BROKERS + 'drivers = ["e", "d"]\n').replace("brokers", "others").replace("persistent://t/", "u"),
            "deletion.owners[1] has driver 'd', which deletion.owners[0] has",
        ),
        (BROKERS + 'authorization_file = "t"\n', "delete_url is 'http://h/d', and the authorization would go there"),
        (
            BROKERS.replace("http:", "https:") + 'authorization_file = "t"\nin_use_url = "http://h/u"\n',
            "in_use_url is 'http://h/u', and the authorization would go there",
        ),
        (BROKERS.replace("delete_url", "authorization_file"), "deletion.owners[0] has neither delete_url nor in_use"),
        (
            BROKERS.replace("topic_prefixes", "drivers").replace("delete_url", "in_use_url"),
            "deletion.owners[0].delete_url is not set, and deletion.owners[0].drivers are",
        ),
        (
            BROKERS.replace("topic_prefixes", "drivers") + 'in_use_url = "http://h/u"\n',
            "deletion.owners[0].topic_prefixes is not set, and deletion.owners[0].in_use_url is",
        ),
        (BROKERS.replace('["persistent://t/"]', "[]"), "deletion.owners[0] has neither topic_prefixes nor drivers"),
    ],
)
def test_tables_that_contradict_each_other_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        load(tmp_path, text)
    assert says in str(refused.value)


def test_stores_that_share_a_driver_or_a_bucket_are_told_apart(tmp_path: Path) -> None:
    other_bucket = COLD.replace("cold", "two").replace("b1", "b2")
    other_driver = COLD.replace("cold", "three").replace("aws-s3", "gcs")
    disk = DISK.format(path=tmp_path / "x").replace("filesystem", "aws-s3")
    assert len(load(tmp_path, COLD + other_bucket + other_driver + disk).deletion.object_stores) == 4


@pytest.mark.parametrize(
    ("own", "other", "overlap"),
    [
        ("root", "root", True),
        ("root", "root/../root/", True),
        ("root", "", True),
        ("root/deep/er", "root", True),
        ("root", "root/inside", True),
        ("root", "link/inside", True),
        ("root", "roots", False),
        ("root", "other", False),
        ("root/a", "root/b", False),
    ],
)
def test_a_local_store_and_the_daemons_own_are_apart(tmp_path: Path, own: str, other: str, overlap: bool) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "root")
    text = DISK.format(path=tmp_path / other)
    if overlap:
        with pytest.raises(errors.InvalidArgument, match=r"deletion\.object_stores\[0\] and store, .* overlap"):
            load(tmp_path, text, f"store.path={tmp_path / own}")
    else:
        load(tmp_path, text, f"store.path={tmp_path / own}")


@pytest.mark.parametrize(
    ("own", "other", "overlap"),
    [
        ("", "", True),
        ("tarry", "", True),
        ("", "offloaded", True),
        ("a/b", "a", True),
        ("a", "a/b", True),
        ("a", "ab", False),
        ("tarry", "offloaded", False),
    ],
)
def test_a_bucket_is_shared_with_the_daemons_own_under_other_prefixes_only(
    tmp_path: Path, own: str, other: str, overlap: bool
) -> None:
    given = ["store.kind=s3", "store.s3.bucket=b1", f"store.s3.prefix={own}"]
    text = f'{COLD}prefix = "{other}"\n'
    if overlap:
        with pytest.raises(errors.InvalidArgument, match="overlap"):
            load(tmp_path, text, *given)
    else:
        load(tmp_path, text, *given)
    for elsewhere in ("store.s3.bucket=b2", "store.s3.endpoint_url=http://h", "store.kind=local"):
        load(tmp_path, text, *given, elsewhere)


@pytest.mark.parametrize("override", ["deletion.owners=x", "deletion.object_stores=x", "deletion.owners.name=x"])
def test_only_the_file_sets_arrays_of_tables(tmp_path: Path, override: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        load(tmp_path, BROKERS, override)
    assert f"(from --set {override}) is an array of tables, which only the file sets" in str(refused.value)


def test_the_reference_shows_arrays_of_tables_as_such() -> None:
    reference = (Path(config.__file__).parent.parent / "docs" / "CONFIGURATION.md").read_text(encoding="utf-8")
    for heading in ("## `[[deletion.object_stores]]`", "## `deletion.object_stores.s3`", "## `[[deletion.owners]]`"):
        assert f"\n{heading}\n" in reference
    section = reference.partition("## `[[deletion.owners]]`")[2]
    assert "| `drivers` | `[]` | array of texts |" in section
    assert "| `delete_url` |  | URL, http or https |" in section
