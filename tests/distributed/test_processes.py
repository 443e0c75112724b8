"""init: what the environment means, and where processes meet."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fxpipe.distributed import processes
from fxpipe.distributed.processes import (
    ProcessPlace,
    _gpu,
    _store,
    first_host,
    init,
    local_store,
    slurm_place,
    slurm_port,
    torchrun_place,
)
from fxpipe.errors import RunError, TopologyError
from tests.device import DEVICE
from tests.distributed.environment import LAUNCHER_PREFIXES, TORCHRUN, clean_environment
from tests.pool import forking
from tests.scripts import Scripts

SECONDS = 200.0  # for anything that starts processes

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "1234567",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own process may have been started by one."""
    for name in [*TORCHRUN, *(name for name in os.environ if name.startswith(LAUNCHER_PREFIXES))]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def set_variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


# --- what the variables mean ---

AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
SET = {"MASTER_ADDR": "head", "MASTER_PORT": "4000", "WORLD_SIZE": "8"}
ON_TORCHRUN = ProcessPlace(5, 8, 1, "host0", 29500)
ON_SLURM = ProcessPlace(5, 8, 1, "gpu07", slurm_port(1234567), gpu_may_be_private=True, job="1234567.0")


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (TORCHRUN, ON_TORCHRUN),
        (TORCHRUN | AGENT | {"LOCAL_WORLD_SIZE": "8"}, ON_TORCHRUN._replace(restarts=2)),
        (TORCHRUN | AGENT | {"LOCAL_WORLD_SIZE": "4"}, ON_TORCHRUN),  # it counts those of its own node alone
        (SLURM, ON_SLURM),
        (SLURM | SET, ON_SLURM._replace(address="head", port=4000, job="")),
    ],
)
def test_variables_say_where_a_process_stands(environ: dict[str, str], place: ProcessPlace) -> None:
    assert (torchrun_place(environ) or slurm_place(environ)) == place


def test_each_step_of_a_job_has_a_port_of_its_own() -> None:
    places = [slurm_place(SLURM | {"SLURM_STEP_ID": str(step)}) for step in range(100)]
    assert len({place.port for place in places if place is not None}) == 100
    assert places[3] is not None
    assert places[3].job == "1234567.3"


NO_LIST = r"SLURM_STEP_NODELIST is .* MASTER_ADDR"
NO_GPU = ProcessPlace(7, 8, 5, "host0", 29500, gpu_may_be_private=True)
NO_PLACE: list[tuple[Callable[[], object], str]] = [
    (
        lambda: torchrun_place({"WORLD_SIZE": "4"}),
        'WORLD_SIZE is "4", but RANK is not set: start the script',
    ),
    (lambda: _gpu(NO_GPU, 4), "local rank 5 has no GPU, for this process sees 4"),
    *((partial(first_host, hosts, "SLURM_STEP_NODELIST"), NO_LIST) for hosts in ("", ",node1", "node[1-]", "a b")),
    (partial(first_host, "node[1]x[", "SLURM_STEP_NODELIST"), NO_LIST),
]


@pytest.mark.parametrize(("ask", "says"), NO_PLACE)
def test_what_says_no_place_is_refused(ask: Callable[[], object], says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        ask()


@pytest.mark.parametrize(
    ("launcher", "changes", "says"),
    [
        (TORCHRUN, {"RANK": "five"}, 'RANK is "five": it must be a whole number from 0 to 7'),
        (TORCHRUN, {"RANK": "8"}, 'RANK is "8": it must be a whole number from 0 to 7'),
        (TORCHRUN, {"WORLD_SIZE": "0"}, 'WORLD_SIZE is "0": it must be a whole number from 1 up'),
        (TORCHRUN, {"MASTER_PORT": "http"}, 'MASTER_PORT is "http": it must be a whole number from 1 to 65535'),
        (TORCHRUN, {"MASTER_ADDR": "", "LOCAL_RANK": ""}, 'RANK is "5", but LOCAL_RANK, MASTER_ADDR has no value'),
        (SLURM, {"SLURM_NTASKS": "8(x2)"}, 'SLURM_NTASKS is "8(x2)"'),
        (SLURM, {"SLURM_PROCID": "8"}, 'SLURM_PROCID is "8": it must be a whole number from 0 to 7'),
        (SLURM, {"SLURM_JOB_NODELIST": "gpu[07"}, 'SLURM_JOB_NODELIST is "gpu[07"'),
        (SLURM, {"SLURM_STEP_NODELIST": "[]"}, 'SLURM_STEP_NODELIST is "[]"'),
    ],
)
def test_malformed_variables_are_named(
    set_variables: Callable[..., None], launcher: dict[str, str], changes: dict[str, str], says: str
) -> None:
    set_variables(**launcher | changes)
    with pytest.raises(TopologyError, match=re.escape(says)):
        init()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # inside a job, but not under srun
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {name: value for name, value in SLURM.items() if name != "SLURM_NTASKS"},
    ],
)
def test_elsewhere_a_process_is_alone(environ: dict[str, str]) -> None:
    assert torchrun_place(environ) is None
    assert slurm_place(environ) is None


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node[03-05,9]", "node03"),
        ("login1,node[1-2]", "login1"),
        ("rack[2-3]node[05-09]", "rack2node05"),
        ("gpu-[1-2]-ib.cluster,x", "gpu-1-ib.cluster"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_ports_of_jobs_are_unprivileged_and_not_ephemeral() -> None:
    ports = {slurm_port(job) for job in range(100_000)}
    assert min(ports) >= 1024
    assert max(ports) < 32768
    assert slurm_port(41) != slurm_port(42)


# --- devices ---


@pytest.mark.parametrize(("local_rank", "count", "gpu"), [(0, 1, 0), (3, 4, 3), (3, 1, 0)])  # srun shows but one
def test_the_gpu_is_that_of_the_local_rank(local_rank: int, count: int, gpu: int) -> None:
    assert _gpu(ProcessPlace(7, 8, local_rank, "host0", 29500, gpu_may_be_private=count == 1), count) == gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_with_cuda_the_device_is_bound_and_both_backends_work() -> None:
    script = (
        "import fxpipe.distributed.processes, torch, torch.distributed as dist\n"
        "device = fxpipe.distributed.processes.init()\n"
        "for place in ('cpu', device):\n"
        "    dist.all_reduce(torch.ones(1, device=place))\n"
        "from fxpipe.distributed.topology import Topology\n"
        "topo = Topology([('pipe', 1), ('data', 1)])\n"
        "for axis in ('pipe', 'tensor', 'model'):\n"
        "    dist.all_reduce(torch.ones(1, device=device), group=topo.group(axis))\n"
        "print(device, torch.cuda.current_device(), dist.get_backend_config(), topo.mesh.device_type)\n"
        "dist.destroy_process_group()\n"
    )
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
    }
    assert run_all(script, [environ]) == ["cuda:0 0 cpu:gloo,cuda:nccl cuda"]


# --- init in processes of its own ---

MEET = """
import sys, torch, torch.distributed as dist
from fxpipe.distributed.processes import init
device = init()
assert init() == device
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
# One write, so that lines of several processes do not mix.
sys.stdout.write(f"{dist.get_rank()} {dist.get_world_size()} {dist.get_backend()} {device} {total.item()}\\n")
dist.destroy_process_group()
"""


HERE = "cpu:gloo,cuda:nccl cuda:{}" if DEVICE == "cuda" else "gloo cpu"
BOTH_MEET = [f"{rank} 2 {HERE.format(rank)} 3.0" for rank in (0, 1)]


def run_all(script: str, environs: list[dict[str, str]]) -> list[str]:
    """The outputs of one process for each environment, all running at once; none has to import torch."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in environs]
    processes = [
        forking().Process(target=run_in, args=(script, clean_environment(**environ), write), daemon=True)
        for environ, (_, write) in zip(environs, pipes, strict=True)
    ]
    outputs = []
    for process in processes:
        process.start()
    try:
        for read, _ in pipes:
            assert read.poll(SECONDS)
            outputs.append(read.recv())
    finally:
        for process in processes:
            process.kill()
            process.join(SECONDS)
    return outputs


def run_in(script: str, environ: dict[str, str], write: Connection) -> None:
    """What the script prints in this process, or its error."""
    os.environ.clear()
    os.environ.update(environ)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(script, {})
    except Exception:
        printed.write(traceback.format_exc())
    write.send(printed.getvalue().strip())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_without_variables_nothing_is_started() -> None:
    script = "import fxpipe.distributed.processes as w, torch.distributed as d; print(w.init(), d.is_initialized())"
    assert run_all(script, [{}]) == [f"{DEVICE}:0 False" if DEVICE == "cuda" else "cpu False"]


def test_init_joins_the_processes_of_torchrun_s_variables() -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environs = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    assert run_all(MEET, environs) == BOTH_MEET


def test_init_joins_the_processes_of_slurm_s_variables() -> None:
    shared = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_JOB_ID": str(os.getpid()),
        "WORLD_SIZE": "2",  # job scripts often set it for themselves
    }
    environs = [shared | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    assert run_all(MEET, environs) == BOTH_MEET


def test_init_joins_the_processes_of_torchrun(tmp_path: Path, scripts: Scripts) -> None:
    """And again once they were destroyed: torchrun's store outlives them, with their addresses."""
    (tmp_path / "meet.py").write_text(2 * MEET)
    printed = scripts.run(["-m", "tests.torchrun", "--standalone", "--nproc-per-node=2", "meet.py"], tmp_path)
    assert sorted(printed.splitlines()) == sorted(2 * BOTH_MEET)


@pytest.mark.parametrize(
    ("rank", "listens", "says"),
    [
        pytest.param(
            0,
            True,
            "rank 0 of 8 could not meet the others at 127.0.0.1:{}",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the same, but on the CPU"),
        ),
        (1, True, "at 127.0.0.1:{}: nobody has answered; check that"),  # torch's client waits without a limit
        (0, False, "7 of them have not come within 1 s, first rank 1; check that all"),
    ],
)
def test_processes_that_cannot_meet_say_where_they_tried(
    set_variables: Callable[..., None], monkeypatch: pytest.MonkeyPatch, rank: int, listens: bool, says: str
) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.0, raising=False)
    with socket.create_server(("", 0)) if listens else contextlib.nullcontext() as taken:
        port = taken.getsockname()[1] if taken else free_port()
        set_variables(**TORCHRUN | {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        with pytest.raises(RunError, match=says.format(port)):
            init(timeout=1)
    assert not dist.is_initialized()


def test_two_world_sizes_in_one_job_are_told_at_once() -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environs = [shared | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(2 + rank)} for rank in (0, 1)]
    first, second = run_all("from fxpipe.distributed.processes import init; init()", environs)  # of 300 s
    assert "WORLD_SIZE (or SLURM_NTASKS) is 2 here, and 3 on rank 1" in first
    assert "WORLD_SIZE (or SLURM_NTASKS) is 3 here, and 2 on rank 0" in second


# --- Stores: reached by whom they are for, and by nobody else ---

HOST = "127.0.0.1"


@pytest.mark.skipif(sys.platform != "linux", reason="where all of 127.0.0.0/8 is this machine")
def test_a_local_store_listens_on_one_address_alone() -> None:
    store, port = local_store()
    everywhere = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    socket.create_connection(("127.0.0.2", everywhere.port), timeout=30).close()  # so that one can tell
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=30)
    del store


def test_another_job_at_the_same_port_is_not_met() -> None:
    place = ProcessPlace(0, 2, 0, HOST, free_port(), job="7.0")
    first = _store(place, 30.0)
    assert first is not None
    first.set("address", "of job 7")
    found = {job: _store(place._replace(rank=1, job=job), 30.0) for job in ("7.0", "7.1")}
    assert [store.check(["address"]) for store in found.values() if store is not None] == [True, False]
    with pytest.raises(RuntimeError, match=r"(?i)address already in use"):
        _store(place._replace(job="8.0"), 30.0)


def test_what_is_started_again_does_not_meet_those_that_have_died() -> None:
    first, port = local_store()
    first.set("address", "of a process that has died")
    starts = [(0, 1), (1, 1), (0, 2), (0, 1)]  # rank 0 again, behind destroy_process_group
    again = [_store(ProcessPlace(rank, 2, rank, HOST, port, restarts=count), 30.0) for rank, count in starts]
    assert again[0] is not None
    assert not again[0].check(["address"])
    again[0].set("address", "here")
    assert [store.check(["address"]) for store in again if store is not None] == [True, True, False, False]
