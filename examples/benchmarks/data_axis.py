"""The data axis: fxpipe's zero=0, 1 and 2 against torch's DDP and ZeroRedundancyOptimizer, on two "nodes".

    sudo python examples/benchmarks/data_axis.py               # 4 processes, then 2: under 5 minutes
    sudo python examples/benchmarks/data_axis.py --rounds 2    # half the time

A node is a network namespace with two ranks in it; a veth pair joins the two at 1 Gbit/s each way (tc's token bucket
filter), while the ranks of a node talk over its loopback, untouched. That needs root and iproute2. Without them the
ranks share this machine's loopback, nothing is throttled, and the benchmark says so. Namespaces are named after this
process, removed however it ends, and those that an earlier run had no time to remove are removed first.

The model is eight square linear layers, 52 MB of gradients. 896 rows a rank were measured to make its backward longer
than its reduction (0.8 s against 0.66 s on two cores shared by four ranks), so that there is something to hide behind;
both are measured anew and printed. The contestants take turns in one run, and times are medians over all timed steps,
of the slowest rank. In a turn a step is taken that nobody times, then two that follow at once: what a step leaves to
the next one, as a parameter gather does, is paid inside of what is timed.

Columns: "exposed" is the step less the same step without communication: forward and backward without synchronisation in
the same turn, and a plain AdamW on as many elements as a rank steps. "between nodes" is what one node sends per step,
by the veth's counters, headers and acknowledgements included. Beside both stands what fxpipe's traffic() says of rank
0; its bytes are a ring's, and gloo's reduce-scatter moves as many as an all-reduce.

A second part has two ranks on one node, without throttling.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fxpipe

WIDTH, LAYERS, ROWS = 1280, 8, 896
RATE = "1gbit"
TIMED_STEPS = 2  # of a turn
LINK = "fxlink"  # the veth's name in each namespace
PREFIX = "fxpipe-data-axis"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
ADAMW = {"lr": 1e-4}
SECONDS = (205, 55)  # for the two parts, start and report included
GRACE = 20  # seconds behind those, after which all is ended by force


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


# --- contestants ---


@dataclass
class Contestant:
    """One way to train the model, and what was measured of it."""

    name: str
    step: Callable[[], object]
    alone: Callable[[], object]
    """Forward and backward, without communication."""
    optimizer_bytes: Callable[[], int]
    stepped: float = 1.0
    """The part of the parameters that a rank steps."""
    settle: Callable[[], object] = lambda: None
    """Waits for what a step has left under way."""
    traffic: Callable[[], Any] | None = None
    seconds: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    """By turn: a step less its forward and backward alone."""
    link_bytes: list[float] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    """What traffic() said after each turn."""


def torch_contestant(
    name: str, batch: tuple[Tensor, Tensor], microbatches: int, sharded: bool, ranks: int
) -> Contestant:
    """DDP with AdamW, whole or sharded over all ranks by ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(Layers(), gradient_as_bucket_view=True)
    optimizer: Any
    if sharded:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    parts = list(zip(*(tensor.tensor_split(microbatches) for tensor in batch), strict=True))

    def forward_backward(synchronised: bool) -> None:
        for place, part in enumerate(parts):
            last = synchronised and place == len(parts) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (model(*part) * (len(part[0]) / len(batch[0]))).backward()

    def step() -> None:
        optimizer.zero_grad()
        forward_backward(synchronised=True)
        optimizer.step()

    def alone() -> None:
        optimizer.zero_grad()
        forward_backward(synchronised=False)

    kept = optimizer.optim if sharded else optimizer
    return Contestant(name, step, alone, partial(state_bytes, kept), 1 / ranks if sharded else 1.0)


def fxpipe_contestant(
    name: str, batch: tuple[Tensor, Tensor], microbatches: int, topology: fxpipe.Topology, zero: int, scope: str
) -> Contestant:
    compiled = partial(fxpipe.compile, topo=topology, microbatches=microbatches)
    forward_backward = compiled(Layers(), zero=fxpipe.Zero(zero, scope))
    optimizer = forward_backward.optimizer(torch.optim.AdamW, **ADAMW)
    # zero=2 and 3 reduce in every call, synchronised or not; what they compute is what zero=1 does.
    silent = compiled(Layers(), zero=fxpipe.Zero(1, scope)) if zero > 1 else forward_backward

    def step() -> None:
        optimizer.zero_grad()
        forward_backward(*batch)
        optimizer.step()

    def alone() -> None:
        silent.zero_grad()
        silent.set_requires_gradient_sync(False)
        silent(*batch)
        silent.set_requires_gradient_sync(True)

    groups = topology.shard_groups() if scope == "node" else topology.groups("data")
    return Contestant(
        name,
        step,
        alone,
        partial(state_bytes, optimizer),
        1 / len(groups[0]) if zero else 1.0,
        settle=forward_backward.state_dict,
        traffic=forward_backward.traffic,
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def contestants(ranks: int, per_node: int, microbatches: int, wanted: Sequence[str]) -> list[Contestant]:
    """All of them, or those whose name holds one of the ``wanted`` words. Each has a model of its own."""
    torch.manual_seed(dist.get_rank())
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    topology = fxpipe.Topology([("pipe", 1), ("data", ranks)], ranks_per_node=per_node)
    of_torch = partial(torch_contestant, batch=batch, microbatches=microbatches, ranks=ranks)
    of_fxpipe = partial(fxpipe_contestant, batch=batch, microbatches=microbatches, topology=topology)
    makers: dict[str, Callable[..., Contestant]] = {
        DDP: partial(of_torch, sharded=False),
        GLOBAL: partial(of_torch, sharded=True),
        ZERO_0: partial(of_fxpipe, zero=0, scope="node"),
        LOCAL: partial(of_fxpipe, zero=1, scope="node"),
        "fxpipe zero=1, data": partial(of_fxpipe, zero=1, scope="data"),
        "fxpipe zero=2, node": partial(of_fxpipe, zero=2, scope="node"),
        "fxpipe zero=2, data": partial(of_fxpipe, zero=2, scope="data"),
    }
    if ranks == per_node:  # one node: there is no scope to choose
        makers = {name: makers[name] for name in (DDP, ZERO_0)}
    return [make(name) for name, make in makers.items() if not wanted or any(word in name for word in wanted)]


DDP, GLOBAL, ZERO_0, LOCAL = "DDP", "DDP + ZeroRedundancyOptimizer", "fxpipe zero=0", "fxpipe zero=1, node"


# --- taking turns, in each rank's process ---


def slowest(seconds: float) -> float:
    """Over all ranks; they meet here."""
    at_most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(at_most, dist.ReduceOp.MAX)
    return at_most.item()


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def together(action: Callable[[], object]) -> float:
    """The seconds of the slowest rank, where all begin together."""
    dist.barrier()
    return slowest(timed(action))


def sent() -> int:
    """Bytes that this node has sent to the other one; 0 where it has no link."""
    counter = Path(f"/sys/class/net/{LINK}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def take_turn(contestant: Contestant) -> None:
    """The step without communication; then one step to come in, and the timed ones, back to back."""
    alone = together(contestant.alone)
    dist.barrier()
    before = sent()
    contestant.step()
    mine = [timed(contestant.step) for _ in range(TIMED_STEPS)]
    contestant.settle()
    dist.barrier()
    contestant.link_bytes.append((sent() - before) / (1 + TIMED_STEPS))
    steps = [slowest(seconds) for seconds in mine]
    contestant.seconds += steps
    contestant.exposed.append(statistics.mean(steps) - alone)
    if contestant.traffic is not None:
        contestant.told.append(contestant.traffic())


def race(field: Sequence[Contestant], rounds: int, deadline: float) -> dict[float, float]:
    """``rounds`` rounds, fewer where time runs out; the median seconds of a plain AdamW per part of the parameters."""
    rules = {part: plain_adamw(part) for part in {contestant.stepped for contestant in field}}
    seconds: dict[float, list[float]] = {part: [] for part in rules}
    for contestant in field:  # warm up
        contestant.step()
        contestant.settle()
    for _ in range(rounds):
        start = time.monotonic()
        for contestant in field:
            take_turn(contestant)
        for part, step in rules.items():
            seconds[part].append(together(step))
        if slowest(2 * time.monotonic() - start) > deadline:  # no time for another round as long as this one
            break
    return {part: statistics.median(times) for part, times in seconds.items()}


def plain_adamw(part: float) -> Callable[[], object]:
    """AdamW over the first parameters, ``part`` of them all."""
    parameters = [p for layer in Layers().layers[: round(part * LAYERS)] for p in layer.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    step = torch.optim.AdamW(parameters, **ADAMW).step
    step()  # makes its state
    return step


def backward_and_reduction(ranks: int) -> str:
    """How long a backward takes, and an all-reduce of all of its gradients: medians, of the slowest rank."""
    model, x, y = Layers(), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    whole = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    backward, reduction = [], []
    for _ in range(4):
        loss = model(x, y)
        backward.append(together(loss.backward))
        reduction.append(together(partial(dist.all_reduce, whole)))
    times = [statistics.median(seconds[1:]) for seconds in (backward, reduction)]
    return (
        f"{ranks} ranks, gradients of {megabytes(4 * whole.numel())} MB: "
        f"a backward takes {times[0]:.2f} s, an all-reduce of all gradients {times[1]:.2f} s"
    )


def work(ranks: int, per_node: int, rounds: int, seconds: int, arguments: argparse.Namespace) -> None:
    """What a rank's process does."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    deadline = time.monotonic() + seconds
    torch.set_num_threads(1)
    fxpipe.init()
    introduction = backward_and_reduction(ranks)
    field = contestants(ranks, per_node, arguments.microbatches, arguments.only)
    adamw = race(field, rounds, deadline)
    if field and dist.get_rank() == 0:
        report(introduction, field, adamw, ranks // per_node)
    dist.barrier()
    # Seen once in 30 runs: DDP's end joins gloo's threads while it holds the GIL, for which one of them waits.
    os._exit(0)


def end_with_parent() -> None:
    """The parent holds the other end of stdin, and never writes."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


# --- what it came to ---


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def report(introduction: str, field: Sequence[Contestant], adamw: dict[float, float], nodes: int) -> None:
    medians = {contestant.name: statistics.median(contestant.seconds) for contestant in field}
    print(f"\n{introduction}; {len(field[0].exposed)} rounds")
    headers = (
        "",
        "step ms",
        "range",
        "÷ DDP",
        "exposed ms",
        "traffic()",
        "optimizer MB",
        "between nodes MB",
        "traffic()",
    )
    rows = [row(contestant, medians, adamw, nodes) for contestant in field]
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 8)))
    for claim in claims(medians, nodes):
        print(claim)
    sys.stdout.flush()


def row(contestant: Contestant, medians: dict[str, float], adamw: dict[float, float], nodes: int) -> tuple[str, ...]:
    median = medians[contestant.name]
    told = contestant.told
    return (
        contestant.name,
        milliseconds(median),
        f"{milliseconds(min(contestant.seconds))}-{milliseconds(max(contestant.seconds))}",
        f"{median / medians[DDP]:.2f}" if DDP in medians else "",
        milliseconds(statistics.median(contestant.exposed) - adamw[contestant.stepped]),
        milliseconds(statistics.median(traffic.exposed for traffic in told)) if told else "",
        megabytes(contestant.optimizer_bytes()),
        megabytes(statistics.median(contestant.link_bytes)) if sent() else "",
        megabytes(statistics.median(traffic.between for traffic in told)) if told and nodes > 1 else "",
    )


def claims(medians: dict[str, float], nodes: int) -> Iterator[str]:
    """What was expected, and whether it came."""
    expected = [(ZERO_0, DDP, 1.0)]
    if nodes > 1:
        expected += [(LOCAL, DDP, 1.15), (LOCAL, GLOBAL, 0.8)]
    for one, other, most in expected:
        if one in medians and other in medians:
            ratio = medians[one] / medians[other]
            verdict = "as expected" if ratio <= most else "MISSED"
            yield f"{one} / {other}: {ratio:.2f}, expected at most {most:.2f}: {verdict}"


# --- nodes: network namespaces ---


@dataclass(frozen=True)
class Node:
    """Where the processes of a node run: a prefix of their command, and their variables."""

    command: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def why_not_throttled() -> str | None:
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} (Debian: apt install iproute2)"
    return None if os.geteuid() == 0 else "network namespaces need root"


def shell(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def throttled_nodes() -> Iterator[list[Node]]:
    """Two namespaces joined by a veth pair, gone in the end."""
    names = [f"{PREFIX}-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            shell("ip", "netns", "add", name)
        shell("ip", "link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            shell("ip", "-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            for device in ("lo", LINK):
                shell("ip", "-n", name, "link", "set", device, "up")
            bucket = ("tbf", "rate", RATE, "burst", "256kb", "latency", "100ms")
            shell("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", LINK, "root", *bucket)
        meeting = (("GLOO_SOCKET_IFNAME", LINK), ("MASTER_ADDR", ADDRESSES[0]))
        yield [Node(("ip", "netns", "exec", name), meeting) for name in names]
    finally:
        for name in names:
            remove(name)


def remove(name: str) -> None:
    """Ends what still runs in a namespace, and deletes it, and with it the link."""
    listed = subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(("ip", "netns", "delete", name), capture_output=True)


def remove_leftovers() -> None:
    """Namespaces of runs whose process is gone."""
    listed = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True)
    for name, pid in re.findall(rf"^({PREFIX}-(\d+)-[ab])\b", listed.stdout, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            remove(name)


# --- processes ---


def run(nodes: Sequence[Node], rounds: int, seconds: int, forwarded: Sequence[str]) -> None:
    """Starts two ranks in each node and waits for them; all are gone when this returns or raises.

    ``seconds``: no round begins that would end later; a little later than that all is ended by force.
    """
    per_node = 2
    ranks = per_node * len(nodes)
    numbers = [str(number) for number in (ranks, per_node, rounds, seconds)]
    port = free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            node = nodes[rank // per_node]
            command = (*node.command, sys.executable, __file__, *forwarded, "--work", *numbers)
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank % per_node),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONWARNINGS": "ignore",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            } | dict(node.variables)
            processes.append(subprocess.Popen(command, env=os.environ | variables, stdin=subprocess.PIPE))
        wait_for(processes, time.monotonic() + seconds + GRACE)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def wait_for(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended well; SystemExit where one fails, or time is up."""
    while any(process.poll() is None for process in processes):
        failed = [(rank, process.returncode) for rank, process in enumerate(processes) if process.returncode]
        if failed:
            raise SystemExit(f"rank {failed[0][0]} ended with exit status {failed[0][1]}")
        if time.monotonic() > deadline:
            raise SystemExit("time is up: ended")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="contestants whose name holds one of these words")
    parser.add_argument("--work", type=int, nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work, arguments)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is cleaned up
    forwarded = sys.argv[1:]
    reason = why_not_throttled()
    if reason is None:
        remove_leftovers()
        print(f"Two nodes of two ranks, {RATE} between them.", flush=True)
        with throttled_nodes() as nodes:
            run(nodes, arguments.rounds, SECONDS[0], forwarded)
    else:
        print(f"Two nodes of two ranks in name only, nothing throttled: {reason}.", flush=True)
        run([Node(), Node()], arguments.rounds, SECONDS[0], forwarded)
    print("\nOne node of two ranks, nothing throttled.", flush=True)
    run([Node()], 2 * arguments.rounds, SECONDS[1], forwarded)


if __name__ == "__main__":
    main()
