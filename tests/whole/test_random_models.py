"""300 random branching models with random boundaries and placements: no hang, and the gradients of plain PyTorch.

A model is made from its seed alone, and printed where it fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxpipe
from fxpipe import PartitionError, Topology, stage_boundary
from fxpipe.graph.operators import handoff, private
from tests.harness import Engine, accumulate, cut, distributed, gradients_of, local, strict
from tests.pool import Pool
from tests.thinned import ALL

MODELS = 300 if ALL else 20
IN_PROCESSES = 20 if ALL else 2
WIDTH, ROWS, MICROBATCHES, STEPS = 4, 7, 3, 2
TOLERANCE = 1e-6  # of the largest gradient, where a sum is in another order


# --- models ---


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


# --- which of them, and where they run ---


@dataclass(frozen=True)
class Draw:
    """A model that compiles into two stages or more, and where its stages are placed."""

    seed: int
    ranks: int
    placement: tuple[tuple[str, int], ...]
    exact: bool
    """Whether it is compared to the last bit."""
    refused: int
    """How many seeds before this one gave a model that is refused."""


@cache
def drawn(number: int, most_ranks: int = 4, fewest_ranks: int = 2) -> Draw:
    refused = 0
    for seed in range(1000 * number, 1000 * number + 1000):
        model = RandomModel(seed)
        if not model(**batch(0)).requires_grad:
            continue  # everything is detached
        try:
            stages = fxpipe.compile(model, Topology([("pipe", 1)])).stages
        except PartitionError:
            refused += 1
            continue
        if len(stages) >= fewest_ranks:
            draw = random.Random(seed)
            ranks = draw.randint(fewest_ranks, min(most_ranks, len(stages)))
            places = [*range(ranks), *(draw.randrange(ranks) for _ in range(len(stages) - ranks))]
            draw.shuffle(places)
            placement = tuple(zip(stages.names, places, strict=True))
            return Draw(seed, ranks, placement, _is_exact(stages), refused)
    raise AssertionError("no model with stages in 1000")


def _is_exact(stages: fxpipe.StageGraph) -> bool:
    """Whether autograd can add up every gradient in plain PyTorch's order.

    Not where several stages own a parameter, and not where a stage uses a value more than once that it does not make
    and that is used elsewhere, too.
    """
    owners = [name for stage in stages for name in stage.parameters]
    if len(owners) != len(set(owners)):
        return False
    for stage in stages:
        nodes = [node for node in stage.module.graph.nodes if node.op == "placeholder"]
        for node, edge in zip(nodes, stage.inputs, strict=True):
            if isinstance(edge, fxpipe.graph.stage_graph.Edge) and _uses(node) > 1 and _is_used_elsewhere(stages, edge):
                return False
    return True


def _is_used_elsewhere(stages: fxpipe.StageGraph, edge: fxpipe.graph.stage_graph.Edge) -> bool:
    node = next(node for node in stages[edge.source].module.graph.nodes if node.name == edge.value)
    by_its_maker = any(user.op != "output" and user.target is not handoff for user in node.users)
    targets = {other.target for other in stages.edges if (other.source, other.value) == (edge.source, edge.value)}
    return by_its_maker or len(targets) > 1


def _uses(node: fx.Node) -> int:
    """How often a value is an argument."""
    count = 0
    for user in node.users:
        found: list[fx.Node] = []
        fx.node.map_arg((user.args, user.kwargs), found.append)
        count += _uses(user) if user.target is private else found.count(node)
    return count


# --- running them ---

Steps = list[tuple[Tensor, dict[str, Tensor | None]]]


def steps(draw: Draw, schedule: str) -> Steps:
    """The loss and this rank's gradients of two steps: the second knows what its messages look like."""
    forward_backward = fxpipe.compile(
        RandomModel(draw.seed),
        Topology([("pipe", draw.ranks)]),
        microbatches=MICROBATCHES,
        placement=dict(draw.placement),
        schedule=schedule,
    )
    done = []
    for number in range(STEPS):
        forward_backward.zero_grad()
        loss = forward_backward(**batch(number))
        done.append((loss, gradients_of(forward_backward.named_parameters())))
    return done


def plain_steps(seed: int) -> Steps:
    model = RandomModel(seed)
    done = []
    for number in range(STEPS):
        model.zero_grad()
        loss, _ = accumulate(lambda _, part: model(**part), cut(batch(number), MICROBATCHES))
        done.append((loss, gradients_of(model.named_parameters())))
    return done


def check(draw: Draw, engine: Engine, name: str, schedule: str) -> None:
    story = f"{RandomModel(draw.seed)}\nplacement {dict(draw.placement)}, {name} engine, {schedule}"
    try:
        results = engine(draw.ranks, steps, draw, schedule)
    except Exception as error:
        raise AssertionError(f"{error}\n{story}") from error
    wanted = plain_steps(draw.seed)
    for rank, result in enumerate(results):
        for step in range(STEPS):
            _compare(result[step], wanted[step], 0.0 if draw.exact else TOLERANCE, f"rank {rank}\n{story}")
    owned = set().union(*(gradients for result in results for _, gradients in result))
    assert owned == wanted[0][1].keys(), story


def _compare(got: Any, wanted: Any, tolerance: float, story: str) -> None:
    (loss, gradients), (wanted_loss, wanted_gradients) = got, wanted
    largest = max(g.abs().max().item() for g in wanted_gradients.values() if g is not None)
    assert torch.equal(loss, wanted_loss), f"loss {loss} instead of {wanted_loss} on {story}"
    for name, gradient in gradients.items():
        known = wanted_gradients[name]
        assert (gradient is None) == (known is None), f"gradient of {name} is {gradient}, not {known}, on {story}"
        if gradient is not None and known is not None and not torch.equal(gradient, known):
            gap = (gradient - known).abs().max().item()
            assert gap <= tolerance * largest, f"gradient of {name} is off by {gap:.3g} on {story}"


def _groups(count: int, size: int) -> Sequence[range]:
    return [range(start, start + size) for start in range(0, count, size)]


def engines_of(number: int) -> list[tuple[Engine, str]]:
    """One process that plays all ranks, and ranks in a random order; one of both, unless all cases run."""
    both = [(local, "local"), (strict(number), f"strict {number}")]
    return both if ALL else [both[number % 2]]


@pytest.mark.parametrize("numbers", _groups(MODELS, 10), ids=lambda numbers: f"{numbers[0]}-{numbers[-1]}")
def test_random_models_have_the_gradients_of_plain_pytorch(numbers: range) -> None:
    for number in numbers:
        for engine, name in engines_of(number):
            check(drawn(number), engine, name, "1f1b")


@pytest.mark.parametrize("numbers", _groups(MODELS, 10)[:: 1 if ALL else 2], ids=lambda n: f"{n[0]}-{n[-1]}")
def test_so_have_they_with_backwards_in_two_halves(numbers: range) -> None:
    for number in numbers:
        for engine, name in engines_of(number):
            check(drawn(number), engine, name, "zb_h1")


@pytest.mark.parametrize("number", range(IN_PROCESSES))
def test_random_models_have_the_gradients_of_plain_pytorch_in_four_processes(number: int, pool: Pool) -> None:
    for schedule in ("1f1b", "zb_h1") if ALL else (("1f1b", "zb_h1")[number % 2],):
        check(drawn(number, fewest_ranks=4), distributed(pool), "distributed", schedule)


def test_few_random_models_are_refused_and_most_are_compared_to_the_last_bit() -> None:
    draws = [drawn(number) for number in range(MODELS)]
    assert sum(draw.refused for draw in draws) <= MODELS // 20
    assert sum(draw.exact for draw in draws) > MODELS // 2
    assert {draw.ranks for draw in draws} == {2, 3, 4}
