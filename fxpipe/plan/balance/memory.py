"""Memory: what a rank holds of its parameters, by ``zero``, ``precision`` and data axis. Arithmetic.

Of n elements, c bytes each as stages run them, g as gradients, m as masters, s states, over S ranks that shard:

          parameters   gradients    optimizer          whole while a step runs
  zero=0  n c          n g          n (m + s m)        -
  zero=1  n c          n g + n g/S  n (m + s m)/S      -
  zero=2  n c          n g/S        n (m + s m)/S      3 n g: what is collected, and two buckets being reduced
  zero=3  n m/S        n m/S        n s m/S            n (c + g): gathered, and not reduced yet

n/S is what the fullest rank has. With zero=3 a shard has as many rows of the first dimension as any other's, padding
included, and what has none stays whole. With zero=1 and 2 an optimizer that steps no elements by themselves has whole
parameters, dealt out by size. What no stage uses is never stepped, and with zero=3 not sharded.
Masters (the m alone) are there with a ``precision`` whose master type is not the compute type. Without ``precision``
all are of the parameter's own type. A frozen parameter has neither gradient nor state.
Rajbhandari et al., "ZeRO", https://arxiv.org/abs/1910.02054, table 1, where gradients are counted in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from torch import Tensor

from fxpipe.distributed.topology import Topology
from fxpipe.options import Options
from fxpipe.precision import Precision


@dataclass(frozen=True)
class Held:
    """Bytes on one rank. ``whole``: what is there beside the rest while a step runs."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    whole: float = 0.0

    @property
    def sum(self) -> float:
        return float(sum(astuple(self)))

    def __add__(self, other: Held) -> Held:
        return Held(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Account:
    """How parameters are counted. ``shards``: among how many ranks they are sharded. ``states``: how many numbers an
    optimizer keeps of each: Adam two."""

    zero: int = 0
    shards: int = 1
    precision: Precision | None = None
    states: float = 2.0

    @staticmethod
    def of(options: Options, topology: Topology) -> Account:
        """What ``zero``, ``zero_scope`` and ``precision`` come to on a topology, with Adam's two moments. Where data
        groups have more ranks in one node than in another's, those that share least."""
        if topology.size("data") == 1:
            return Account(0, 1, options.precision)
        groups = topology.groups("data") if options.zero_scope == "data" else topology.shard_groups()
        return Account(options.zero, min(map(len, groups)), options.precision)

    def part_of(self, count: int, rows: int) -> float:
        """Of so many elements, in so many rows (0 where there is no dimension), those that the fullest rank has."""
        # zero=1 and 2 cut flat buckets anywhere; FSDP2 (zero=3) cuts each parameter by rows, and pads the last rank's.
        if self.zero != 3:
            return count / self.shards
        return count // rows * -(-rows // self.shards) if rows else count

    def held(self, count: int, element: int, trained: bool, floating: bool = True, part: float | None = None) -> Held:
        """Bytes that ``count`` elements take, of ``element`` bytes each as stages run them. ``part``: how many of them
        a rank shards; None: all alike."""
        mixed = self.precision if floating else None
        gradient = element if mixed is None else mixed.gradient.itemsize
        master = element if mixed is None else mixed.master.itemsize
        part = count / self.shards if part is None else part
        # Masters are a copy beside the parameters, but for zero=3, which keeps the masters alone.
        is_copied = mixed is not None and mixed.master != mixed.compute and self.zero != 3
        state = (part if self.zero else count) * (master * is_copied + self.states * master * trained)
        if self.zero == 3:
            whole = count * (element + gradient * trained)
            return Held(part * master, part * master * trained, state, whole)
        # Behind a backward zero=1 holds whole gradients and its own part of their sums, zero=2 the part alone.
        gradients = {0: count, 1: count + part, 2: part}[self.zero] * gradient
        whole = 3 * count * gradient if self.zero == 2 else 0
        return Held(count * element, gradients * trained, state, whole * trained)

    def __str__(self) -> str:
        each = self.held(1, 4 if self.precision is None else self.precision.compute.itemsize, trained=True)
        of = "float32" if self.precision is None else f"{self.precision.compute}".removeprefix("torch.")
        sharded = f", zero={self.zero} over {self.shards} ranks" if self.zero else ""
        return (
            f"{each.sum:g} bytes for each trained parameter of {of}: value, gradient and the optimizer's state{sharded}"
        )


def rows_of(parameter: Tensor) -> int:
    """The size of its first dimension; 0 where it has none."""
    return parameter.shape[0] if parameter.ndim else 0


def dealt(sizes: Sequence[int], ranks: int) -> list[int]:
    """Who steps each of what is stepped whole: the rank that has least so far, the largest first (Graham, 1969)."""
    loads, owner = [0] * ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owner[place] = loads.index(min(loads))
        loads[owner[place]] += sizes[place]
    return owner
