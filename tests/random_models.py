"""Random branching models, each made from its seed alone, which print as the lines that they run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary

WIDTH, ROWS = 4, 7


@dataclass(frozen=True)
class Line:
    """``targets = op(*operands)``; ``layer`` is its parameters' place, if it has any."""

    targets: tuple[str, ...]
    op: str
    operands: tuple[str, ...]
    layer: int = -1

    def __str__(self) -> str:
        layer = f"[{self.layer}]" if self.layer >= 0 else ""
        return f"{', '.join(self.targets)} = {self.op}{layer}({', '.join(self.operands)})"


def turned(a: Tensor) -> Tensor:
    """A transposed view crosses a boundary."""
    return stage_boundary(a.unflatten(-1, (2, 2)).transpose(1, 2)).flatten(1)


def times_rows_of(a: Tensor, b: Tensor) -> Tensor:
    """A number crosses wherever ``b`` is in another stage."""
    return a * (b.shape[0] / 4)


PLAIN: dict[str, Callable[..., Any]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "detach": lambda a: a.detach(),
    "relu_": lambda a: F.relu(a + 0.1, inplace=True),
    "swap": lambda a: torch.cat(a.chunk(2, -1)[::-1], -1),
    "turned": turned,
    "add": torch.add,
    "multiply": torch.mul,
    "subtract": torch.sub,
    "mask": lambda a, b: a * (b > 0),
    "rows": times_rows_of,
    "boundary": stage_boundary,
    "pair": lambda a, b: stage_boundary((a, b)),
    "dict": lambda a, b: tuple(stage_boundary({"a": a, "b": [b, None]}).values()),
}
"""Operations without parameters; "layer", "join" and "scale" have some."""
ONE = ["tanh", "sin", "relu_", "swap", "turned", "layer", "layer", "layer", "scale"]
TWO = ["add", "multiply", "subtract", "mask", "rows", "join", "join"]


class RandomModel(nn.Module):
    """``lines`` run from top to bottom; the loss is over every value that no line uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
        self.lines = _Writer(random.Random(seed)).lines
        used = {operand for line in self.lines for operand in line.operands}
        self.sinks = [target for line in self.lines for target in line.targets if target not in used]
        count = 1 + max(line.layer for line in self.lines)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(count))
        self.scales = nn.ParameterList(torch.rand(WIDTH) for _ in range(count))

    def forward(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        values = {"x": x, "z": z}
        for line in self.lines:
            result = self._run(line, *(values[name] for name in line.operands))
            if len(line.targets) == 1:
                values[line.targets[0]] = result
            elif line.op == "dict":
                values[line.targets[0]], (values[line.targets[1]], _) = result
            else:
                values[line.targets[0]], values[line.targets[1]] = result
        return sum((values[name] - y).square().mean() for name in self.sinks)

    def _run(self, line: Line, *operands: Tensor) -> Any:
        if line.op == "layer":
            return self.layers[line.layer](*operands)
        if line.op == "join":
            return self.joins[line.layer](torch.cat(operands, -1))
        if line.op == "scale":
            return operands[0] * self.scales[line.layer].exp()
        return PLAIN[line.op](*operands)

    def __str__(self) -> str:
        return "\n".join([f"RandomModel({self.seed})", *map(str, self.lines), f"loss over {', '.join(self.sinks)}"])


class _Writer:
    """Writes 4 to 14 operations on two inputs; a third of their results are cut off by a boundary.

    In nine of ten models a value has at most two uses, so that most of them can be compared to the last bit.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.lines = [Line(("v0",), "layer", ("x",), 0)]
        self._free = ["v0"]  # values that may be used
        self._uses: dict[str, int] = {}
        self._sparse = draw.random() < 0.9
        self._layers = 1
        for place in range(1, draw.randint(5, 15)):
            self._operation(f"v{place}")
            if draw.random() < 0.1 and len(self._free) > 1:
                self._pair(f"p{place}")

    def _operation(self, name: str) -> None:
        draw = self.draw
        op = draw.choice(ONE if draw.random() < 0.55 else TWO)
        if not self._free:
            op, operands = "layer", [draw.choice("xz")]
        elif op in TWO:
            operands = [first := self._value(), "z" if draw.random() < 0.1 else self._value(first)]
        elif op == "layer" and draw.random() < 0.2:
            operands = [draw.choice("xz")]
        else:
            operands = [self._value()]
            op = "detach" if draw.random() < 0.03 else op
        self.lines.append(Line((name,), op, tuple(operands), self._layer(op)))
        if draw.random() < 0.35:
            self.lines.append(Line((f"{name}b",), "boundary", (name,)))
            name = f"{name}b"
        self._free.append(name)

    def _pair(self, name: str) -> None:
        """Two values cross one boundary; what stood in front of it may go around it, too."""
        pair = self.draw.sample(self._free, 2)
        if self._sparse:
            self._free = [value for value in self._free if value not in pair]
        names = f"{name}l", f"{name}r"
        self.lines.append(Line(names, self.draw.choice(["pair", "dict"]), tuple(pair)))
        self._free += names

    def _value(self, but: str = "") -> str:
        """Mostly a recent one, so that models are deep as well as wide."""
        known = [value for value in self._free if value != but or not self._sparse]
        if not known:
            return "z"
        value = self.draw.choice(known[-4:] if self.draw.random() < 0.6 else known)
        self._uses[value] = self._uses.get(value, 0) + 1
        if self._sparse and self._uses[value] == self.draw.choice([1, 1, 1, 2]):
            self._free.remove(value)
        return value

    def _layer(self, op: str) -> int:
        if op not in ("layer", "join", "scale"):
            return -1
        if not self._sparse and self.draw.random() < 0.1:
            return self.draw.randrange(self._layers)  # the same parameters once more
        self._layers += 1
        return self._layers - 1


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(ROWS, WIDTH, generator=generator) for name in ("x", "z", "y")}


def staged(number: int, fewest: int) -> Iterator[tuple[int, fxpipe.StageGraph]]:
    """Seeds of models that train, and have so many stages or more, and those stages."""
    for seed in range(1000 * number, 1000 * number + 1000):
        model = RandomModel(seed)
        if model(**batch(0)).requires_grad:  # not everything is detached
            with contextlib.suppress(fxpipe.PartitionError):
                stages = fxpipe.compile(model, fxpipe.Topology([("pipe", 1)])).stages
                if len(stages) >= fewest:
                    yield seed, stages
