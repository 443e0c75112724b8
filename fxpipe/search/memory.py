"""Memory: computes the bytes of a rank's parameters from ``zero``, ``precision`` and the data axis.

n elements, c bytes each in stages, g bytes as gradients, m bytes as masters, s optimizer states, over S sharding ranks:

          parameters   gradients    optimizer          whole while a step runs
  zero=0  n c          n g          n (m + s m)        -
  zero=1  n c          n g + n g/S  n (m + s m)/S      -
  zero=2  n c          n g/S        n (m + s m)/S      3 n g: collected gradients, and two buckets being reduced
  zero=3  n m/S        n m/S        n s m/S            n (c + g): gathered, and not reduced yet

n/S is the share of the fullest rank. With zero=3, all shards have equally many rows of the first dimension, padding
included, and a parameter without dimensions is not sharded. With zero=1 and 2, an optimizer that does not step elements
independently steps whole parameters, which are dealt to ranks by size. A parameter that no stage uses is never stepped,
and zero=3 does not shard it. Masters (the m without s) exist if the master type of ``precision`` is not the compute
type. Without ``precision`` all values have the parameter's own type. A frozen parameter has neither gradient nor state.
Rajbhandari et al., "ZeRO", https://arxiv.org/abs/1910.02054, table 1, which counts gradients in 16 bits.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from torch import Tensor

from fxpipe.distributed.grid import BATCH
from fxpipe.distributed.topology import Topology
from fxpipe.options import Options
from fxpipe.precision import Precision


@dataclass(frozen=True)
class StaticBytes:
    """Bytes on one rank. ``whole``: further, unsharded bytes while a step runs."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    whole: float = 0.0

    @property
    def sum(self) -> float:
        return float(sum(astuple(self)))

    def __add__(self, other: StaticBytes) -> StaticBytes:
        return StaticBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Account:
    """How parameters are counted. ``shards``: the number of ranks that shard them. ``states``: the number of optimizer
    state values per element; Adam has two."""

    zero: int = 0
    shards: int = 1
    precision: Precision | None = None
    states: float = 2.0

    @staticmethod
    def from_options(options: Options, topology: Topology) -> Account:
        """The account for ``zero`` and ``precision`` on a topology, with Adam's two moments. If groups
        differ in their number of ranks, the smallest group counts."""
        if topology.size(BATCH) == 1:
            return Account(0, 1, options.precision)
        groups = topology.groups(BATCH) if options.sharding.scope == "data" else topology.shard_groups()
        return Account(options.sharding.level, min(map(len, groups)), options.precision)

    def part_of(self, count: int, rows: int) -> float:
        """The number of a parameter's ``count`` elements on the fullest rank. ``rows``: 0 if it has no dimension."""
        # zero=1 and 2 cut flat buckets anywhere; FSDP2 (zero=3) cuts each parameter by rows, and pads the last shard.
        if self.zero != 3:
            return count / self.shards
        return count // rows * -(-rows // self.shards) if rows else count

    def bytes_of(
        self, count: int, element: int, trained: bool, floating: bool = True, part: float | None = None
    ) -> StaticBytes:
        """The bytes of ``count`` elements, ``element`` bytes each in stages. ``part``: the number of elements in a
        rank's shard; None: an even share."""
        mixed = self.precision if floating else None
        gradient = element if mixed is None else mixed.gradient.itemsize
        master = element if mixed is None else mixed.master.itemsize
        part = count / self.shards if part is None else part
        # Masters are a second copy of the parameters, except with zero=3, which keeps only the masters.
        is_copied = mixed is not None and mixed.master != mixed.compute and self.zero != 3
        state = (part if self.zero else count) * (master * is_copied + self.states * master * trained)
        if self.zero == 3:
            whole = count * (element + gradient * trained)
            return StaticBytes(part * master, part * master * trained, state, whole)
        # After a backward, zero=1 holds whole gradients and the rank's part of their sums, zero=2 only the part.
        gradients = {0: count, 1: count + part, 2: part}[self.zero] * gradient
        whole = 3 * count * gradient if self.zero == 2 else 0
        return StaticBytes(count * element, gradients * trained, state, whole * trained)

    def __str__(self) -> str:
        each = self.bytes_of(1, 4 if self.precision is None else self.precision.compute.itemsize, trained=True)
        of = "float32" if self.precision is None else f"{self.precision.compute}".removeprefix("torch.")
        sharded = f", zero={self.zero} over {self.shards} ranks" if self.zero else ""
        return (
            f"{each.sum:g} bytes for each trained parameter of {of}: value, gradient and the optimizer's state{sharded}"
        )


@dataclass(frozen=True)
class ParameterPart:
    """A rank's part of a parameter that ``parallelize=`` spreads: the fullest rank's number of elements. ``gathered``:
    the elements that FSDP2 gathers while a step runs; 0 without FSDP2. ``summed_over``: the ranks that sum their
    gradients of the part, FSDP2's ranks if it shards the parameter. ``exchanged_over``: the expert ranks among which
    tokens travel to the parameter and back, if it is spread over them."""

    count: int
    gathered: int
    summed_over: tuple[int, ...]
    exchanged_over: tuple[int, ...]

    def bytes_of(self, element: int, states: float, trained: bool) -> StaticBytes:
        """The bytes of the part, ``element`` bytes each. No bucket of ``zero`` has it."""
        size = float(self.count * element)
        return StaticBytes(size, size * trained, size * states * trained, self.gathered * element * (1 + trained))


def rows_of(parameter: Tensor) -> int:
    """The size of a parameter's first dimension; 0 if it has no dimension."""
    return parameter.shape[0] if parameter.ndim else 0
