"""The settings of jobs: the daemon's own file, where the store is, and one store for a process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from batch.engine import job_settings
from batch.engine.job_settings import Settings
from batch.engine.store_of import store_of
from storage_backends.object_store import NotFound
from storage_backends.storage_settings import SettingsError


def test_the_daemons_own_file_is_read_and_its_other_sections_passed_over(tmp_path: Path) -> None:
    config = tmp_path / "tarryd.toml"
    config.write_text("[server]\nport = 1\n[store]\npath = '/srv/tarry'\n[bucket]\nmerge_rows_max = 7\n")
    environment = {"TARRY_COLLECTION__GRACE_S": "5", "TARRY_SERVER__PORT": "2"}
    found = job_settings.load(config, ["bucket.form=compatible"], environment=environment)
    assert (found.store.path, found.bucket.merge_rows_max) == ("/srv/tarry", 7)
    assert (found.bucket.form, found.collection.grace_s) == ("compatible", 5.0)


def test_inside_its_own_sections_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "tarryd.toml"
    config.write_text("[store]\npaht = '/srv/tarry'\n")
    with pytest.raises(SettingsError, match=r"store\.paht.*did you mean store\.path"):
        job_settings.load(config, environment={})


def test_a_local_path_is_absolute_since_tasks_run_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert job_settings.load(store="some/where", environment={}).store.path == str(tmp_path / "some/where")


def test_a_place_is_a_path_or_an_s3_url_and_comes_before_every_other_setting() -> None:
    environment = {"TARRY_STORE__PATH": "/other", "TARRY_STORE__KIND": "local"}
    found = job_settings.load(
        None, ["store.s3.bucket=other"], store="s3://delays/root/a/", environment=environment
    ).store
    assert (found.kind, found.s3.bucket, found.s3.prefix) == ("s3", "delays", "root/a")
    assert job_settings.load(store="/srv/tarry", environment={"TARRY_STORE__KIND": "s3"}).store.kind == "local"


@pytest.mark.parametrize("wrong", ["", "s3://", "gs://bucket/root", "s3://bucket/root?x=1"])
def test_a_place_that_is_none_is_an_error(wrong: str) -> None:
    with pytest.raises(SettingsError, match="--store"):
        job_settings.load(store=wrong, environment={})


def test_settings_travel_to_tasks_as_they_are() -> None:
    found = job_settings.load(store="s3://delays/root", environment={})
    assert pickle.loads(pickle.dumps(found)) == found == Settings(store=found.store)


def test_a_process_opens_a_store_once(tmp_path: Path) -> None:
    place = job_settings.load(store=str(tmp_path), environment={})
    assert store_of(place) is store_of(job_settings.load(store=str(tmp_path), environment={}))


def test_a_directory_that_is_not_there_is_never_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="the directory does not exist"):
        store_of(job_settings.load(store=str(tmp_path / "typo"), environment={}))
    assert not (tmp_path / "typo").exists()
