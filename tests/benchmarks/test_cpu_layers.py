"""CPU by layer: what a stack belongs to, the account of threads, and stacks for those who draw them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import cpu_layers, sampled_program
from benchmarks.cpu_layers import ENGINE, EXECUTORS, JOURNAL, LOOP, METRICS, WIRE, Threads

STARTED = ("daemon.command:run", "asyncio.base_events:BaseEventLoop.run_forever")
STEP = (*STARTED, "asyncio.base_events:BaseEventLoop._run_once", "asyncio.events:Handle._run")


@pytest.mark.parametrize(
    ("layer", "inner"),
    [
        (LOOP, ()),
        (WIRE, ("daemon.grpc_services.subscribe:SubscribeStream._send",)),
        (
            ENGINE,
            (
                "daemon.grpc_services.subscribe:SubscribeStream._send",
                "daemon.core.decisions.topic_state:Topic.take",
                "numpy:all",
            ),
        ),
        (
            JOURNAL,
            ("daemon.topic.served_topic:ServedTopic.add", "daemon.group_commit.shard_slots:ShardSlots.stage"),
        ),
        (
            METRICS,
            (
                "daemon.core.decisions.topic_state:Topic.take",
                "daemon.metrics:Metrics.handed_out",
                "asyncio.locks:Event.set",
            ),
        ),
    ],
)
def test_a_stack_is_of_the_layer_of_its_innermost_function_that_has_one(layer: str, inner: tuple[str, ...]) -> None:
    assert cpu_layers.layer_of((*STEP, *inner)) == layer


def test_what_the_loop_used_is_divided_by_samples_and_other_threads_have_what_they_used() -> None:
    engine = (*STEP, "daemon.core.decisions.topic_state:Topic.take")
    used = Threads(main_s=4.0, executors_s=2.0, grpc_s=0.0)
    cpu_s = cpu_layers.by_layer([STEP, engine, engine, engine], used)
    assert (cpu_s[ENGINE], cpu_s[LOOP], cpu_s[EXECUTORS], sum(cpu_s.values())) == (3.0, 1.0, 2.0, 6.0)
    assert cpu_layers.folded([STEP, engine, engine, engine], used).splitlines() == [
        f"{LOOP};asyncio.base_events:BaseEventLoop._run_once;asyncio.events:Handle._run 1",
        (
            f"{LOOP};asyncio.base_events:BaseEventLoop._run_once;asyncio.events:Handle._run;"
            "daemon.core.decisions.topic_state:Topic.take 3"
        ),
        f"{EXECUTORS} 2",
    ]


def test_the_threads_of_a_process_used_what_the_process_used() -> None:
    process_s, before = time.process_time(), cpu_layers.read_threads(os.getpid())
    sum(number * number for number in range(1_000_000))
    used = cpu_layers.read_threads(os.getpid()).since(before)
    assert used.main_s > 0
    assert used.main_s + used.executors_s + used.grpc_s <= time.process_time() - process_s


def test_a_program_that_is_sampled_notes_where_it_spends_cpu(tmp_path: Path) -> None:
    busy, samples = tmp_path / "busy.py", tmp_path / "samples"
    busy.write_text("import sys, time\ndef spin():\n    while time.thread_time() < float(sys.argv[1]): pass\nspin()\n")
    command = sampled_program.program(samples, (sys.executable, "-P", str(busy), "0.3"))
    subprocess.run(command, check=True, timeout=300)
    stacks = list(sampled_program.read_stacks(samples, 0, sampled_program.clock_s()))
    assert stacks
    assert any(stack[-1] == "__main__:spin" for stack in stacks)
