"""The example CronJob asks `tarry-spark` for what there is, and treats its exit statuses as they are meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from batch.cli import entry
from batch.compaction import tally
from batch.engine import job_settings

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = REPOSITORY / "deploy" / "kubernetes" / "compaction-cronjob.yaml"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """By kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(FILE.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def job(objects: dict[str, Any]) -> Any:
    return objects["CronJob"]["spec"]["jobTemplate"]["spec"]


@pytest.fixture(scope="module")
def pod(job: Any) -> Any:
    return job["template"]["spec"]


def test_one_job_at_a_time(objects: dict[str, Any]) -> None:
    spec = objects["CronJob"]["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert len(spec["schedule"].split()) == 5
    assert spec["timeZone"] == "Etc/UTC"


def test_conflicts_are_tried_again_and_errors_are_not(job: Any, pod: Any) -> None:
    rules = job["podFailurePolicy"]["rules"]
    by_status = {
        status: rule["action"]
        for rule in rules
        if "onExitCodes" in rule and rule["onExitCodes"]["operator"] == "In"
        for status in rule["onExitCodes"]["values"]
    }
    assert by_status == {tally.EXIT_ERROR: "FailJob", 2: "FailJob", tally.EXIT_CONFLICTS: "Count"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {
        container["name"] for container in pod["containers"]
    }
    # What a drained node ends is none of the tries.
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert job["backoffLimit"] > 0
    # Kubernetes refuses a policy for pods that start again by themselves.
    assert pod["restartPolicy"] == "Never"


def test_the_options_are_those_of_the_command(pod: Any, objects: dict[str, Any], tmp_path: Path) -> None:
    (container,) = pod["containers"]
    program, name = container["command"]
    assert program == "tarry-spark"
    config = tmp_path / "tarryd.toml"
    config.write_text(objects["ConfigMap"]["data"]["tarryd.toml"])
    arguments = [each.replace("/etc/tarry/tarryd.toml", str(config)) for each in container["args"]]
    command = entry.cli.get_command(entry.cli.make_context("tarry-spark", [name]), name)
    assert command is not None
    given = command.make_context(name, arguments).params
    assert (given["engine"], given["as_json"], given["config"]) == ("local", True, config)
    assert given["deadline"] < objects["CronJob"]["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"]
    store = job_settings.load(config, environment={}).store
    assert (store.kind, store.s3.bucket) == ("s3", "delays")


def test_what_the_job_writes_and_reads_is_mounted(pod: Any, objects: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/etc/tarry"]]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    metrics = next(each for each in container["args"] if each.startswith("--metrics-file=")).partition("=")[2]
    assert str(Path(metrics).parent) in mounts
    assert metrics.endswith(".prom")
    # The root of the file system is read only, and the engine's processes meet in the folder of temporary files.
    assert "/tmp" in mounts
    assert pod["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]


def test_the_user_is_that_of_the_image(pod: Any) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    assert f"--uid {pod['securityContext']['runAsUser']} " in dockerfile
    assert 'ARG EXTRAS=""' in dockerfile
