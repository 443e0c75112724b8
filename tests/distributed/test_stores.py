"""Stores: reached by whom they are for, and by nobody else."""

from __future__ import annotations

import socket
import sys

import pytest
import torch.distributed as dist

from fxpipe.distributed.stores import job_store, local_store, restarted_store
from fxpipe.errors import RunError
from tests.distributed.test_processes import free_port

HOST = "127.0.0.1"


def test_a_local_store_is_met_at_its_port() -> None:
    store, port = local_store()
    store.set("key", "value")
    assert dist.TCPStore(HOST, port, is_master=False).get("key") == b"value"


@pytest.mark.skipif(sys.platform != "linux", reason="where all of 127.0.0.0/8 is this machine")
def test_a_local_store_listens_on_one_address_alone() -> None:
    store, port = local_store()
    everywhere = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    socket.create_connection(("127.0.0.2", everywhere.port), timeout=30).close()  # so that one can tell
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=30)
    del store


def test_the_processes_of_a_step_meet() -> None:
    port = free_port()
    first = job_store(HOST, port, 0, "7.0")
    first.set("key", "value")
    assert job_store(HOST, port, 1, "7.0").get("key") == b"value"


@pytest.mark.parametrize("other", ["8.0", "7.1"])
def test_the_store_of_another_job_is_told_by_both_their_names(other: str) -> None:
    port = free_port()
    first = job_store(HOST, port, 0, "7.0")
    with pytest.raises(
        RunError,
        match=rf"rank 1: port {port} .* job and step {other} give, is in use by job and step 7\.0; .*MASTER_PORT",
    ):
        job_store(HOST, port, 1, other)
    with pytest.raises(RunError, match=rf"rank 0: port {port} .* is not free to listen on: .*; set MASTER_PORT"):
        job_store(HOST, port, 0, other)
    del first


def test_a_store_that_is_no_job_s_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.distributed.stores._SECONDS_TO_SAY_WHOSE", 0.2)
    foreign = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RunError, match=r"rank 1: .* is somebody's who does not say whose job's: .*; set MASTER_PORT"):
        job_store(HOST, foreign.port, 1, "7.0")


def test_what_is_started_again_does_not_meet_those_that_have_died() -> None:
    first, port = local_store()
    first.set("address", "of a process that has died")
    again = [restarted_store(HOST, port, restarts, 30.0) for restarts in (1, 1, 2)]
    assert not again[0].check(["address"])
    again[0].set("address", "here")
    assert [store.check(["address"]) for store in again] == [True, True, False]
