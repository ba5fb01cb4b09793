"""Readers of vLLM's message queue leave the cores to whoever computes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from vllm.distributed.device_communicators import shm_broadcast

from assay_kernels.vllm_plugin.cpu import waiting


class Poller:
    """Instead of zmq's: what was it asked to wait for, and does a message come?"""

    def __init__(self) -> None:
        self.timeouts: list[int | None] = []

    def poll(self, timeout: int | None) -> list[Any]:
        self.timeouts.append(timeout)
        return []


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    plain = shm_broadcast.SpinCondition
    monkeypatch.setattr(shm_broadcast, "SpinCondition", plain)  # restored afterwards
    waiting.spare_the_cores()
    assert shm_broadcast.SpinCondition is not plain
    context = zmq.Context()
    condition = shm_broadcast.SpinCondition(True, context, f"ipc://{tmp_path}/nobody-writes")
    condition.poller = Poller()
    yield condition
    # vLLM leaves them to the process's end; a context that is collected with open sockets aborts.
    sockets = ("local_notify_socket", "write_cancel_socket", "read_cancel_socket")
    for name in sockets:
        getattr(condition, name).close(linger=0)
    context.term()


def test_a_message_that_comes_at_once_is_polled_for(reader: Any) -> None:
    reader.record_read()
    reader.wait(5000)
    assert reader.poller.timeouts == []


@pytest.mark.parametrize("limit", [None, 5000])
def test_within_a_step_the_reader_rests_and_soon_looks_again(
    reader: Any, limit: int | None
) -> None:
    """A lost wake-up must not cost the five seconds after which vLLM looks again."""
    reader.last_read = time.monotonic() - 0.1
    reader.wait(limit)
    assert reader.poller.timeouts == [waiting.REST_MS]


def test_an_idle_server_is_not_woken_a_thousand_times_a_second(reader: Any) -> None:
    reader.last_read = time.monotonic() - 5
    reader.wait(5000)
    assert reader.poller.timeouts == [5000]


def test_installing_it_twice_changes_nothing(reader: Any) -> None:
    first = shm_broadcast.SpinCondition
    waiting.spare_the_cores()
    assert shm_broadcast.SpinCondition is first
