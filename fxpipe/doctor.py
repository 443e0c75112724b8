"""Doctor: ``python -m fxpipe doctor`` checks a cluster in parts, in turn; after a part fails, the others still run."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, median_low
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from fxpipe.compiler import compile
from fxpipe.device import cores, versions
from fxpipe.distributed.activity import announced
from fxpipe.distributed.grid import abbreviated
from fxpipe.distributed.link_speed import link_speeds
from fxpipe.distributed.processes import connect, init, process_place
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.torch_transport import facts_of
from fxpipe.distributed.traffic import DATA_AXIS
from fxpipe.distributed.transport import failing_together
from fxpipe.errors import RunError, describe_error, printable
from fxpipe.hardware import DEVICE, Hardware, measure, name_of_this_device, sheet_of
from fxpipe.policies import Checks
from fxpipe.progress import progress
from fxpipe.run.forward_backward import ForwardBackward
from fxpipe.schedules.comparison import compare
from fxpipe.small_file import write_whole

TIMEOUT = 60.0
"""The most seconds that a wait may take."""
ON_A_GPU, ON_A_CPU = (2**24, 4096, 1024), (2**20, 256, 64)
"""The elements of a large message, the width of a layer, and the rows of a micro-batch."""
_MOST_PIPE, _ALONE = 8, 4  # default pipe ranks: at most, for several processes; and for a single process
_UNITS = {"µs": 1e-6, "GB": 1e9, "GB/s": 1e9, "TFLOP/s": 1e12}

_SPEEDS, _TIMES = ("GB/s", "TFLOP/s"), ("µs",)
BESIDE, PEAKS = "beside plain PyTorch", ("flops_16", "bandwidth")
SLOW = 1.5
"""A rank is slow if it takes this many times the median rank's time; a step, this many times its plan's."""
REACHED = 0.5
"""The fraction of a data sheet's figures that programs reach, as in ``Hardware.named``: less is slow."""

Figures = dict[str, Any]
"""A figure's name, with the unit in brackets → a number or text: ``{"launch [µs]": 4.0, "torch": "2.13.0"}``."""


class Doctor:
    """A rank's checks. Ranks exchange their figures over the transport ``_control``, which no check uses otherwise."""

    def __init__(self, pipe: int | None, ranks_per_node: int | None) -> None:
        self._device, process = init(TIMEOUT), process_place()
        world = process.world_size if process else pipe or _ALONE
        pipe = pipe or next(size for size in range(_MOST_PIPE, 0, -1) if world % size == 0)
        self._topology = Topology.fit(world, pipe=pipe, ranks_per_node=ranks_per_node)
        self._control = connect(self._topology, 2 * TIMEOUT)  # other ranks may still wait in a part that failed here
        self._plain: tuple[nn.Module, dict[str, Any]] | None = None
        self._step: ForwardBackward | None = None
        self._module, self._microbatches = torch.get_device_module(self._device), 2 * pipe
        self._numbers, self._width, self._rows = ON_A_CPU if self._device.type == "cpu" else ON_A_GPU

    def check_up(self, path: str | None) -> None:
        """Prints all ranks' figures, and writes them as JSON. A collective call; RunError if a part has failed."""
        parts, links = dict[str, dict[str, Any]](), [self.links] * (self._control.pipe_rank is not None)
        for call in (self.versions, self.nodes, self.device, *links, self.plain, self.pipeline, self.overlap):
            name = call.__name__
            parts[name] = self._run(name, call)
            if self._control.rank == 0:  # now: a communicator's timeout may end this process in a later part
                print(printable(_table(name, **parts[name])), flush=True)
        if self._control.rank:
            return
        measured = _measured([figures for part in parts.values() for figures in part["ranks"]])
        hardware = Hardware(**measured)
        print(hardware if links else f"links need several processes, as torchrun starts them\n{hardware}")
        if path is not None:
            figures = {DEVICE: name_of_this_device(), **measured}
            report = {"topology": repr(self._topology), "parts": parts, "hardware": figures}
            write_whole(path, json.dumps(report, indent=1) + "\n")
        if failed := [name for name, part in parts.items() if any(part["errors"])]:
            raise RunError(f"failed: {', '.join(failed)}")

    def _run(self, name: str, part: Callable[[Figures], None]) -> dict[str, Any]:
        start, figures, error = time.perf_counter(), Figures(), ""
        with announced(f"doctor: {name}"), progress(f"checking {name}"):
            try:
                part(figures)
            except Exception as failure:
                error = describe_error(failure)
            ranks, errors = zip(*self._control.gather("all", (figures, error)), strict=True)
        if name == self.plain.__name__ and any(errors):
            self._plain = None  # on all ranks, so that no rank compiles alone
        verdicts = {what: verdict(name, what, values) for what, values in _by_rank(ranks).items()}
        if any(errors) and BESIDE in verdicts:
            verdicts[BESIDE] = "wrong"
        return {"seconds": time.perf_counter() - start, "ranks": ranks, "errors": errors, "verdicts": verdicts}

    def versions(self, figures: Figures) -> None:
        facts = facts_of(self._topology, {}).items()
        figures |= {name.removeprefix("the version of "): str(fact) for name, fact in facts}
        figures |= versions()

    def nodes(self, figures: Figures) -> None:
        """Names of hosts and devices. A node is a host, unless the command says how many ranks a node has."""
        hosts = self._control.gather("all", platform.node())  # first: all ranks must call gather
        figures |= {"host": platform.node(), "device": getattr(self._module, "get_device_name", platform.machine)()}
        count = hosts.count(hosts[0])
        if self._topology.ranks_per_node is None and count < len(hosts):
            if hosts != [host for host in hosts[::count] for _ in range(count)]:
                raise RunError(f"write --ranks-per-node: hosts have not equally many ranks each, in a row: {hosts}")
            self._topology = Topology(self._topology.axes, count)
        figures["ranks in a node"] = self._topology.ranks_per_node or self._topology.world_size

    def device(self, figures: Figures) -> None:
        units = {"bandwidth": "GB/s", "host_link": "GB/s", "launch": "µs", "memory": "GB", "host_memory": "GB"}
        measured = [(name, units.get(name, "TFLOP/s"), value) for name, value in measure().items()]
        figures |= {f"{name} [{unit}]": value / _UNITS[unit] for name, unit, value in measured}
        if self._device.type != "cpu" and (sheet := sheet_of(name_of_this_device())) is not None:
            peak = Hardware.named(sheet)
            shares = [(name, 100 * value / getattr(peak, name)) for name, _, value in measured if name in PEAKS]
            figures |= {f"{name}, of the data sheet of {sheet} [%]": share for name, share in shares}

    def links(self, figures: Figures) -> None:
        """Speeds of links. A failure closes this part's own transport on all ranks, and leaves ``_control`` open."""
        topology, free = self._topology, getattr(self._module, "mem_get_info", None)
        pairs, before = list(pairwise(range(topology.size("pipe")))), free()[0] if free else 0
        transport = connect(topology, TIMEOUT)
        with failing_together(transport, transport.abort):
            transport.open([*pairs, *(pair[::-1] for pair in pairs)], ())
            figures["process groups"] = len(transport.process_groups())
            figures |= {"their memory [GB]": (before - free()[0]) / 1e9} if free else {}
            figures |= link_speeds(transport, topology.ranks_per_node or topology.world_size, self._numbers)
        transport.close()

    def plain(self, figures: Figures) -> None:
        """Plain PyTorch's loss and gradients, with a layer per stage, for all replicas' micro-batches in turn."""
        width, count, replicas = self._width, self._microbatches, self._topology.data_size
        loss = torch.zeros((), device=self._device)
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(self._topology.size("pipe")))
        model = nn.Sequential(*layers).to(self._device)
        for replica in range(replicas):
            numbers, shape = torch.Generator(self._device).manual_seed(replica), (count * self._rows, width)
            batch = {name: torch.randn(shape, device=self._device, generator=numbers) for name in ("input", "target")}
            for x, target in zip(*(whole.chunk(count) for whole in batch.values()), strict=True):
                part = nn.functional.mse_loss(model(x), target) * (1 / (count * replicas))
                torch.autograd.backward(part)
                loss += part.detach()
            if replica == self._topology.data_rank:
                self._batch = batch
        figures["loss"] = loss.item()
        self._plain = model, {"loss": loss, **{name: parameter.grad for name, parameter in model.named_parameters()}}
        model.zero_grad(set_to_none=True)

    def pipeline(self, figures: Figures) -> None:
        """Compares a pipeline's loss and gradients with the loss and gradients of ``plain``."""
        if self._plain is None:
            raise RunError("there is nothing to compare with")
        (model, expected), loss_fn = self._plain, nn.functional.mse_loss
        options: dict[str, Any] = {"microbatches": self._microbatches, "checks": Checks(timeout=TIMEOUT)}
        cuts = [name for name, _ in model.named_children()][1:]
        self._step = step = compile(model, self._topology, loss_fn=loss_fn, boundaries=cuts, **options)
        real = {"loss": step(**self._batch)} | {name: parameter.grad for name, parameter in step.named_parameters()}
        pairs = [(tensor, expected[name]) for name, tensor in real.items()]
        worst = torch.stack([(tensor - other).abs().max() / other.abs().max() for tensor, other in pairs]).max().item()
        figures[BESIDE] = f"at most {worst:.1e} of the largest number apart" if worst else "equal bits"
        if not worst <= (1e-5 if self._topology.data_size > 1 else 0.0):  # NaN, too; replicas are summed in any order
            raise RunError("loss or gradients are not those of plain PyTorch")

    def overlap(self, figures: Figures) -> None:
        """Compares a step of the pipeline with the schedule, simulated at the costs that the step measured."""
        if self._step is None:
            raise RunError("no pipeline was compiled")
        step, rank, topology = self._step, self._control.pipe_rank, self._topology
        step.record_timeline()
        step(**self._batch)  # warms up
        watch = getattr(self._module, "set_sync_debug_mode", lambda mode: None)
        watch("warn")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            step(**self._batch)
        watch("default")
        waited = (each for each in warned if "synchronizing" in str(each.message))
        waits = [f"{Path(each.filename).name}:{each.lineno}" for each in waited]
        figures["host waits"] = ", ".join(waits) or "none, as far as the device tells"
        exposed = sum(row.exposed for row in step.traffic().rows if row.scope in DATA_AXIS)
        timeline = step.timeline()
        costs, simulate = timeline.costs, timeline.schedule.simulate
        figures["makespan [ms]"] = timeline.makespan * 1e3
        if rank is not None:  # a single process runs all ranks in turns: nothing overlaps
            planned = simulate(costs).makespan
            figures |= {"forward, median stage [ms]": median(costs.forward) * 1e3, "hop [ms]": costs.comm * 1e3}
            figures |= {"planned at these [ms]": planned * 1e3, "longer [%]": (timeline.makespan / planned - 1) * 100}
            ratio, processes = timeline.makespan / planned, topology.ranks_per_node or topology.world_size
            if self._device.type == "cpu" and ratio > SLOW and processes > (count := cores()):
                turns = f"{processes} processes take turns on {count} core{'s' * (count > 1)}"
                says = f"{ratio:.1f} × the plan says nothing of a cluster"
                figures["why"] = f"{turns}, and in the plan they compute at once: {says}"
            # The bubble is a rank's waiting time in a plan whose messages take no time.
            share = compare(simulate(replace(costs, comm=0.0)), timeline).shares[rank]
            figures["exposed: messages [ms]"] = max(share.waiting - share.planned_waiting, 0.0) * 1e3
            figures["exposed: gradients [ms]"] = exposed * 1e3


def _by_rank(ranks: Sequence[Figures]) -> Mapping[str, Mapping[int, Any]]:
    """A figure's name → rank → its value, for the ranks that have one."""
    names = dict.fromkeys(name for figures in ranks for name in figures)
    return {name: {rank: each[name] for rank, each in enumerate(ranks) if name in each} for name in names}


def verdict(part: str, what: str, values: Mapping[int, Any]) -> str:
    """Returns "good", "slow: …" or "wrong: …"; empty if there is nothing to compare the figure with. ``values``: by
    rank."""
    unit = what.removesuffix("]").partition(" [")[2]
    if what == BESIDE:
        return "good"
    if what == "host waits":
        return "" if all(text.startswith("none") for text in values.values()) else "slow: the host waits for the device"
    if what == "longer [%]":
        ratio = 1 + max(values.values()) / 100
        return "good" if ratio <= SLOW else f"slow: {ratio:.1f} × the plan"
    if "data sheet" in what:
        slow = [rank for rank, share in values.items() if share < 100 * REACHED]
        return f"slow: {_named(slow, 'is', 'are')} below half of the data sheet" if slow else "good"
    if part == "versions" and len(values) > 1:
        return "good" if len({*values.values()}) == 1 else "wrong: the ranks differ"
    if len(values) == 1 or part not in ("device", "links") or unit not in (*_SPEEDS, *_TIMES):
        return ""
    times = {rank: 1 / max(value, 1e-9) if unit in _SPEEDS else value for rank, value in values.items()}
    usual = median_low(times.values())
    slow = [rank for rank, seconds in times.items() if seconds > SLOW * usual]
    most = f"{max(times.values()) / usual:.1f} × the median" if slow else ""
    return f"slow: {_named(slow, 'takes', 'take up to')} {most}" if slow else "good"


def _named(ranks: list[int], single: str, several: str) -> str:
    return f"rank {ranks[0]} {single}" if len(ranks) == 1 else f"ranks {abbreviated(ranks)} {several}"


def _table(
    name: str, seconds: float, ranks: Sequence[Figures], errors: Sequence[str], verdicts: Mapping[str, str]
) -> str:
    """A part's figures as a table: for numbers, the median and range over ranks; for a text, the ranks that have it."""
    failures = {rank: error for rank, error in enumerate(errors) if error}
    rows = []
    for what, values in [*_by_rank(ranks).items(), *[("FAILED", failures)] * bool(failures)]:
        words = {text: [rank for rank in values if values[rank] == text] for text in values.values()}
        if isinstance(next(iter(words)), str):
            each = [text + f", ranks {abbreviated(some)}" * (len(some) < len(ranks)) for text, some in words.items()]
            cells = ["\n".join(each), "", ""]
        else:
            cells = [f"{pick(values.values()):.4g}" for pick in (median, min, max)]
        rows.append([what, *cells, verdicts.get(what, "wrong")])
    heads = [name, f"{seconds:.1f} s", "least", "most", "verdict"]
    return tabulate(rows, heads, disable_numparse=True) + "\n"


def _measured(ranks: Sequence[Figures]) -> dict[str, float]:
    """The figures of ``Hardware``: the medians over ranks, to four digits. If no two ranks share a node, ``link`` is
    the speed between nodes."""
    measured = {}
    for name, values in _by_rank(ranks).items():
        what, _, unit = name.removesuffix("]").partition(" [")
        if unit in _UNITS:
            measured[what] = float(f"{median(values.values()) * _UNITS[unit]:.4g}")
    sources = {field.name: [field.name] for field in fields(Hardware)}
    links = "message inside", "all_reduce inside", "message between"
    sources["link"] = [f"{link} nodes: bandwidth" for link in links]
    sources["link_between"] = [f"{kind} between nodes: bandwidth" for kind in ("all_reduce", "message")]
    sources["latency"] = [f"message {where} nodes: latency" for where in ("inside", "between")]
    available = {figure: [name for name in names if name in measured] for figure, names in sources.items()}
    return {figure: measured[names[0]] for figure, names in available.items() if names}
