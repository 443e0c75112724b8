"""Virtual time: what things take, when they are over, and host collectives that bring the hosts' clocks together."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated_gpu import _device

fix, trace, counts = _device.fix, _device.trace, _device.counts
now, host_now = _device.now, _device.host_now

HOST_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast", "reduce")


def costs(**given: float) -> dict[str, float]:
    """Sets those that are given; all of them."""
    return _device.costs(given)  # type: ignore[no-any-return]


DEFAULTS = costs()
STRUCTURE = {name: math.inf if "bytes" in name or name == "flops" else 0.0 for name in DEFAULTS}
"""Nothing takes any time but what is fixed, and ``sim::work``."""


def align(group: dist.ProcessGroup | None = None) -> float:
    """Waits for the device and for all ranks; the latest of their clocks, which is the time of all then."""
    torch.cuda.synchronize()
    latest = torch.tensor([now()], dtype=torch.float64, device="cpu")
    if dist.is_initialized():
        _plain_all_reduce(latest, dist.ReduceOp.MAX, group=group)
    _device.host_reaches(float(latest))
    return float(latest)


class _Timed:
    """The work of a host collective, which is over at the time of the last rank's call, and the wire's latency."""

    def __init__(self, work: dist.Work, last: dist.Work, latest: torch.Tensor) -> None:
        self._work, self._last, self._latest = work, last, latest

    def wait(self, *limit: Any) -> bool:
        done = self._last.wait(*limit) and self._work.wait(*limit)
        _device.host_reaches(float(self._latest) + costs()["wire_latency"])
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_plain_all_reduce = dist.all_reduce


def _timed(call: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def collective(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given, group = next(iter(bound.arguments.values())), bound.arguments["group"]
        first = given[0] if isinstance(given, list) else given
        if not isinstance(first, torch.Tensor) or first.device.type != "cpu":
            return call(*args, **options)
        latest = torch.tensor([host_now()], dtype=torch.float64, device="cpu")
        last = _plain_all_reduce(latest, dist.ReduceOp.MAX, group=group, async_op=True)
        async_op, bound.arguments["async_op"] = bound.arguments["async_op"], True
        work = call(*bound.args, **bound.kwargs)
        if work is None:  # this rank is not of the group
            return None
        timed = _Timed(work, last, latest)
        return timed if async_op else timed.wait() and None

    return collective


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.backward_takes = inputs[2]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.sim.work(gradient, ctx.backward_takes, 0.0), None, None


torch.library.register_autograd("sim::work", _backward, setup_context=_keep)
for name in set(HOST_COLLECTIVES) & set(dir(dist)):
    timed = _timed(getattr(dist, name))
    setattr(dist, name, timed)
    setattr(dist.distributed_c10d, name, timed)
