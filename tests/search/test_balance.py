"""The automatic balance: it keeps the model's meaning, and no cut that was thought of by hand is better."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import passes
from fxpipe.errors import PartitionError
from fxpipe.graph.program import Program, called_in, is_compute
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.graph.topological import topological_order
from fxpipe.hardware import REFERENCE, Hardware
from fxpipe.passes.blocks import Blocks, blocks
from fxpipe.passes.chain import chain, check
from fxpipe.schedules import with_costs
from fxpipe.search import choose
from fxpipe.search.block_graph import Block, BlockGraph, BlockValue, work_of_program, work_of_stages
from fxpipe.search.choose import Balanced, balance, coarsened, whole_modules
from fxpipe.search.memory import Account
from fxpipe.search.moves import search
from fxpipe.search.node_costs import NodeCost, NodeCosts, ParameterCost, costs_from_shapes
from fxpipe.search.segments import Line, depth_first, entries, partition
from fxpipe.search.segments import balanced as cuts_of
from fxpipe.search.simulated_layouts import Judge, StageLayout
from fxpipe.specs import TensorSpec
from fxpipe.trace import Request, capture
from tests.capturing import run_stages
from tests.device import DEVICE
from tests.models import Layers
from tests.thinned import ALL, every

SLOW_LINK = Hardware(link=1e6, latency=0.0)
FLOPS = Hardware(flops=1e9, flops_16=1e9, bandwidth=1e30, launch=0.0, link=1e12, latency=1e-9)
"""Products count, hops hardly."""


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype, torch.empty(shape, device="meta").stride(), DEVICE, False)


def program_of(model: nn.Module, tracer: str = "symbolic", **example: Any) -> Program:
    names = Request.signature(model, None).parameters
    example = example or {name: spec(4, 8) for name in names}
    request = Request(model, tuple(example), example=example)
    return chain(passes.before_balance(), capture(request, tracer))


def balanced(model: nn.Module, ranks: int, microbatches: int = 8, **options: Any) -> Balanced:
    """The balance of a model of inputs x, and y where it takes two, of 4 rows of 8 numbers."""
    names = Request.signature(model, None).parameters
    example = {name: spec(4, 8) for name in names}
    program = program_of(model, **example)
    hardware = options.pop("hardware", FLOPS)
    return balance(program, ranks, microbatches, costs_from_shapes(program, example, hardware=hardware), **options)


def stage_graph(found: Balanced) -> StageGraph:
    program = chain((passes.name_stages,), found.program)
    check(program, "balance")
    return passes.split(program)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# --- models ---


class Layer(nn.Module):
    def __init__(self, width: int = 8, factor: int = 1) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, factor * width),
            nn.Linear(factor * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Chain(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Towers(nn.Module):
    """Two towers and a join. ``factor``: how many times as wide as the text's an image layer is."""

    def __init__(self, image: int, text: int, factor: int = 1) -> None:
        super().__init__()
        self.image = nn.ModuleList(Layer(factor=factor) for _ in range(image))
        self.text = nn.ModuleList(Layer() for _ in range(text))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.image:
            x = layer(x)
        for layer in self.text:
            y = layer(y)
        return (x @ y.t()).square().mean()


class InPlace(Layers):
    """Writes that a cut must not separate from what reads around them."""

    names, width = "a b c d", 8

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        early = h * 2
        view = h[:, :4]
        view.mul_(3)
        k = self.b(h) + early
        k[:, 0] = 1.0
        return self.d(torch.tanh(self.c(k))).square().mean()


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4))
        self.shared = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        for layer in self.layers:
            x = x + layer(x)
        return self.shared(self.shared(x) * 2).square().mean()


class Shapes(Layers):
    names, width = "a b c", 8

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        rows = h.shape[0]
        k = self.b(h).reshape(rows, 2, 4)
        mask = torch.ones(rows, 1) * (x[:, :1] > -1)
        return (self.c(k.reshape(rows, 8)) * mask).sum() / rows


class Decoder(nn.Module):
    """Every layer of the second half reads what the first half made."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(4))
        self.decoder = nn.ModuleList(Layer() for _ in range(4))
        self.keys = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x)
        for layer, key in zip(self.decoder, self.keys, strict=True):
            y = layer(y + key(x))
        return y.square().mean()


MODELS: dict[str, Any] = {
    "chain": lambda: Chain(6),
    "towers": lambda: Towers(4, 3),
    "in place": InPlace,
    "statistics": Statistics,
    "shapes": Shapes,
    "decoder": Decoder,
}
SEVERAL_USES = {"decoder"}
"""Where a value is used more than once by another stage than its maker's, its gradient is a sum in another order."""


# --- meaning ---


@pytest.mark.parametrize(("name", "ranks"), every(4, list(itertools.product(MODELS, [3, 2, 1]))))
def test_a_balanced_model_computes_what_the_model_computes(name: str, ranks: int) -> None:
    plain, cut_up = MODELS[name](), MODELS[name]()
    cut_up.load_state_dict(plain.state_dict())
    found = balanced(cut_up, ranks)
    graph = stage_graph(found)
    assert sorted(set(found.placement)) == list(range(ranks))
    assert len(found.placement) == len(graph)
    inputs = {name: torch.randn(4, 8) for name in graph.inputs}
    expected = plain(**{name: value.clone() for name, value in inputs.items()})
    result = run_stages(graph, inputs)
    assert torch.equal(result, expected)
    expected.backward()
    result.backward()
    for parameter, gradient in gradients(cut_up).items():
        wanted = gradients(plain)[parameter]
        assert (gradient is None) == (wanted is None)
        if gradient is not None and name in SEVERAL_USES:
            torch.testing.assert_close(gradient, wanted)
        elif gradient is not None and wanted is not None:
            assert torch.equal(gradient, wanted), parameter
    for buffer, value in cut_up.named_buffers():
        assert torch.equal(value, plain.get_buffer(buffer)), buffer


def test_more_ranks_than_pieces() -> None:
    with pytest.raises(PartitionError, match=r"9 pipe ranks, but the program has \d pieces"):
        balanced(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), 9)


# --- quality ---


def test_two_equal_towers_run_beside_each_other() -> None:
    found = balanced(Towers(2, 2), 4)
    m, whole = 8, sum(found.outcome.costs.forward) + sum(found.outcome.costs.backward)
    assert found.outcome.seconds < 0.95 * (m + 3) * whole / 4  # less than the chain of them takes


def test_a_tiny_tower_shares_a_rank_with_a_part_of_the_large_one() -> None:
    model = Towers(8, 2, factor=16)
    found = balanced(model, 4)
    graph = stage_graph(found)
    on_rank: list[set[str]] = [set() for _ in range(4)]
    for stage, rank in zip(graph, found.placement, strict=True):
        on_rank[rank] |= {name.split(".")[0] for name in stage.parameters}
    (shared,) = [towers_here for towers_here in on_rank if "text" in towers_here]
    assert "image" in shared


def test_tied_layers_stay_together_where_that_costs_nothing() -> None:
    """Two sources and two sinks of equal time: which source shares a rank with which sink is all the same."""
    for sink in (2, 3):
        work = work_of([2.0] * 4, [(0, 2), (1, 2), (0, 3), (1, 3)], tied=[(0, sink)], size=10**6, result=(2, 3))
        given = replace(work, blocks_are_stages=True)
        rank_of = search(given, 2, 4, with_costs("1f1b"), None).best.layout.rank_of
        assert rank_of[0] == rank_of[sink]


@pytest.mark.parametrize("family", ["1f1b", "greedy"])
def test_the_family_that_is_going_to_run_is_the_one_that_is_simulated(family: str) -> None:
    found = balanced(Towers(1, 1), 2, microbatches=4, schedule=family)
    graph = stage_graph(found)
    table = fxpipe.schedules.build(
        with_costs(family, found.outcome.costs),
        graph.stage_edges,
        4,
        found.placement,
        backward=[stage.has_backward for stage in graph],
        tied=graph.tied,
    )
    assert table.simulate(found.outcome.costs).makespan == pytest.approx(found.outcome.seconds)


def test_what_is_printed_is_the_choice_and_three_others_with_time_and_bytes() -> None:
    head, _, *rows, last = str(balanced(Towers(2, 1), 2)).splitlines()
    assert head.split() == "how stages planned bubble peak of a rank, MiB stages of each rank".split()
    assert "peak of a rank, MiB" in head
    firsts, others = rows[::2], rows[1::2]  # a line a rank
    assert [line.split("  ")[0] for line in firsts] == ["chosen", "runner-up 1", "runner-up 2", "runner-up 3"]
    assert all("rank 0: " in line for line in firsts)
    assert all("rank 1: " in line for line in others)
    times = [float(time) for line in firsts for time in re.findall(r"([\d.]+) ms  ", line.partition("  rank")[0])]
    assert len(times) == 4
    assert times == sorted(times)
    assert "16 bytes for each trained parameter" in last


def test_a_candidate_is_told_by_the_modules_of_each_rank() -> None:
    chosen = [line.partition("  rank")[2].split(";")[0] for line in str(given_stages(FiveStages(), 2)[0]).splitlines()]
    assert chosen[2:4] == [" 0: words to squeeze, layers.0", " 1: layers.1 to 3"]
    assert chosen[4:6] == [" 0: words to squeeze, layers.1", " 1: layers.0, layers.2 to 3"]
    assert ": a part of layers.1, layers.1.down, layers.2" in str(balanced(Chain(3), 2)).partition("runner-up")[0]


def test_a_candidate_says_how_it_came_about_and_what_each_stage_takes() -> None:
    found, _ = given_stages(FiveStages(), 2)
    costs = found.outcome.costs
    first = [stage for stage, rank in enumerate(found.placement) if rank == 0]
    forward, backward = (
        " + ".join(f"{seconds[stage] * 1e3:.3g}" for stage in first) for seconds in (costs.forward, costs.backward)
    )
    (line,) = (line for line in str(found).splitlines() if line.startswith("chosen"))
    assert line.endswith(f"; F {forward}, B {backward} ms")
    assert " on each rank" in line


# --- memory ---


def test_peak_bytes_are_parameters_with_their_state_and_what_is_in_flight() -> None:
    model = Chain(4)
    found = balanced(model, 1, microbatches=4)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    saved = sum(found.outcome.costs.activation_bytes or ())
    assert found.outcome.peak_bytes == (16 * parameters + saved,)  # 1F1B on one rank holds one micro-batch


def test_where_nothing_fits_the_least_that_was_found_is_told() -> None:
    with pytest.raises(
        PartitionError, match=r"no balance fits into 1,000 bytes a rank; the least .* [\d,]+ bytes"
    ) as e:
        balanced(Chain(6), 3, memory=1000)
    least = float(str(e.value).split("take is ")[1].split(" bytes")[0].replace(",", ""))
    assert max(balanced(Chain(6), 3, memory=least + 1).outcome.peak_bytes) <= least + 1


# --- given stages ---


class FiveStages(nn.Module):
    """Stages with many parameters and little work, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(8, 256)
        self.squeeze = nn.Linear(256, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = fxpipe.stage_boundary(self.squeeze(self.words(x[:1])).expand(4, 8) + x)
        for layer in self.layers[:-1]:
            for _ in range(8):
                x = layer(x)
            x = fxpipe.stage_boundary(x)
        return self.layers[-1](x).square().mean()


def given_stages(model: nn.Module, ranks: int, **options: Any) -> tuple[Balanced, StageGraph]:
    example = {name: spec(4, 8) for name in Request.signature(model, None).parameters}
    program = chain(passes.default(), capture(Request(model, tuple(example), example=example)))
    costs = costs_from_shapes(program, example, hardware=FLOPS)
    return balance(program, ranks, 8, costs, **options), passes.split(program)


def costs_of_program(program: Program) -> NodeCosts:
    return costs_from_shapes(program, {name: spec(4, 8) for name in program.inputs}, hardware=FLOPS)


def test_given_stages_and_every_placement_of_them() -> None:
    found, _ = given_stages(FiveStages(), 2)
    judge = Judge(work_of_stages(found.program, costs_of_program(found.program)), with_costs("1f1b"), 8, None)
    every = [
        judge.outcome(StageLayout(tuple(range(5)), ranks))
        for ranks in itertools.product(range(2), repeat=5)
        if len(set(ranks)) == 2 and ranks[0] == 0
    ]
    assert found.outcome.seconds == pytest.approx(min(outcome.seconds for outcome in every if outcome is not None))


def test_a_stage_is_reckoned_with_its_own_copies() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale @ self.scale
            h = fxpipe.stage_boundary(self.a(x) @ scale)
            return (self.b(h) @ scale).sum()

    found, _ = given_stages(Copies(), 2)
    work = work_of_stages(found.program, costs_of_program(found.program))
    assert [sum(node.startswith("matmul") for node in block.nodes) for block in work.blocks] == [2, 2]


# --- borders of modules, and names ---


def layers_of(found: Balanced, layer: str) -> list[set[int]]:
    """The stages that the nodes of each layer are in."""
    stages: dict[str, set[int]] = {}
    for node in found.program.graph.nodes:
        for path in called_in(node):
            if path.rpartition(".")[0] == layer and node.name in found.program.stage_of:
                stages.setdefault(path, set()).add(found.program.stage_of[node.name])
    return list(stages.values())


def test_layers_stay_whole_where_cutting_them_gains_little() -> None:
    """Of 16 equal layers and a little beside them, four ranks have four each: a cut elsewhere gains less than 1 %."""
    found = balanced(Chain(16), 4)
    assert [len(stages) for stages in layers_of(found, "layers")] == [1] * 16
    assert "between modules" in found.outcome.layout.origin


def test_layers_are_cut_where_that_gains_more_than_three_percent() -> None:
    """Three layers for two ranks: 2 to 1 whole, 1.5 to 1.5 cut, a quarter less."""
    found = balanced(Chain(3), 2)
    assert max(len(stages) for stages in layers_of(found, "layers")) > 1


def test_a_module_that_is_called_twice_with_others_between_is_not_left_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again, self.parts = Layer(), nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            x = self.again(x)
            for part in self.parts:
                x = part(x)
            return self.again(x).square().mean()

    program = program_of(Twice())
    work = work_of_program(program, costs_of_program(program))
    pieces = whole_modules(program, work, work.seconds() / 4)
    made = work.merged(pieces)
    assert len(depth_first(made)) == len(made) == len(set(pieces)) < len(work)


def test_a_stage_is_called_by_the_greatest_module_that_it_alone_runs() -> None:
    class Headed(nn.Module):
        """A small norm opens what is mostly a wide layer."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.wide = nn.LayerNorm(8), nn.Linear(8, 64)
            self.small, self.head = nn.Linear(64, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = fxpipe.stage_boundary(self.wide(self.norm(x)))
            return self.head(self.small(h)).mean()  # type: ignore[no-any-return]

    _, graph = given_stages(Headed(), 2)
    assert graph.names == ("wide", "small")


# --- blocks ---


def block_with(found: Blocks, node: str) -> tuple[str, ...]:
    return next(names for names in found.nodes if node in names)


def test_blocks_are_every_node_once_and_acyclic() -> None:
    for name in MODELS:
        program = program_of(MODELS[name]())
        found = blocks(program)
        names = [node for block in found.nodes for node in block]
        expected = [n.name for n in program.graph.nodes if is_compute(n) and n.name not in program.copied]
        assert sorted(names) == sorted(expected)
        work = BlockGraph(
            tuple(plain_block(0.0) for _ in found.nodes),
            tuple(BlockValue(s, t, 0) for _, s, t in found.values),
            found.result,
            NodeCosts({}),
        )
        numbers = range(len(work))
        assert len(topological_order(dict(enumerate(numbers)), work.after(numbers))) == len(work)


def test_who_reads_a_value_before_it_is_written_stays_with_the_write() -> None:
    found = blocks(program_of(InPlace()))
    assert {"a", "mul", "mul_"} <= set(block_with(found, "mul_"))
    assert "c" not in block_with(found, "mul_")


def test_a_module_that_writes_its_buffers_twice_is_one_block_with_what_lies_between() -> None:
    found = blocks(program_of(Statistics()))
    assert {"shared", "mul", "shared_1"} <= set(block_with(found, "shared"))
    assert "layers_0_0" not in block_with(found, "shared")


# --- orders and segments, against all there are ---


def plain_block(seconds: float, saved: Sequence[int] = (), parameters: Sequence[int] = ()) -> Block:
    keys = frozenset(saved), frozenset(parameters)
    return Block(("",), NodeCost(seconds / 3, seconds * 2 / 3, saved=keys[0], parameters=keys[1], trains=True))


def work_of(
    seconds: Sequence[float],
    edges: Sequence[tuple[int, int]],
    tied: Sequence[tuple[int, ...]] = (),
    size: int = 8,
    result: tuple[int, ...] = (),
    saved: int = 0,
) -> BlockGraph:
    """A work of blocks of so many seconds; the last makes the result, or ``result``. ``tied``: groups that share a
    parameter of that size. ``saved``: the bytes that each keeps."""
    held = {key: ParameterCost(size, size // 4, True) for key in range(len(tied))}
    made = [
        plain_block(time, [number], [key for key, group in enumerate(tied) if number in group])
        for number, time in enumerate(seconds)
    ]
    costs = NodeCosts({}, dict.fromkeys(range(len(made)), saved), held, SLOW_LINK)
    values = tuple(
        BlockValue(source, tuple(target for start, target in edges if start == source), size)
        for source in range(len(seconds))
        if any(start == source for start, _ in edges)
    )
    return BlockGraph(tuple(made), values, result or (len(seconds) - 1,), costs)


def random_work(draw: random.Random, count: int) -> BlockGraph:
    edges = [(a, b) for a in range(count) for b in range(a + 1, count) if draw.random() < 0.4 or b == count - 1]
    return work_of([draw.choice([1.0, 2.0, 5.0]) for _ in range(count)], edges)


def test_given_stages_fit_where_equal_bytes_of_parameters_do() -> None:
    """The bytes in flight are those of a graph, not of a chain; the cut by what a chain holds takes 45.6 MB."""
    seconds = [1.22e-3, 7.09e-3, 1.43e-3, 7.3e-3, 6.7e-3]
    megabytes, in_flight = [28, 7, 16, 23, 18], [0, 3.6, 0.8, 3.37, 7.05]  # parameters with 16 bytes for each
    held = {n: ParameterCost(4 * count, count, True) for n, count in enumerate(int(m / 16e-6) for m in megabytes)}
    costs = NodeCosts({}, {n: int(size * 1e6) for n, size in enumerate(in_flight)}, held, REFERENCE)
    blocks_ = tuple(plain_block(3 * time, [n], [n]) for n, time in enumerate(seconds))
    values = tuple(BlockValue(a, (b,), 10_000) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3), (2, 4)))
    work = BlockGraph(blocks_, values, (4,), costs, blocks_are_stages=True)
    found = search(work, 3, 4, with_costs("1f1b"), 45e6)
    assert max(found.best.peak_bytes) <= 45e6


def cut_choices(count: int, segments: int) -> list[tuple[int, ...]]:
    return [(*ends, count) for ends in itertools.combinations(range(1, count), segments - 1)]


def test_the_greatest_segment_costs_as_little_as_in_any_cut() -> None:
    draw = random.Random(2)
    for _ in range(60):
        count = draw.randint(1, 9)
        segments = draw.randint(1, count)
        costs = [torch.rand(count + 1, count + 1, dtype=torch.float64) for _ in range(segments)]

        def greatest(ends: tuple[int, ...], costs: list[Tensor] = costs) -> float:
            pairs = list(itertools.pairwise((0, *ends)))
            return max(float(costs[len(pairs) - 1 - place][pair]) for place, pair in enumerate(pairs))

        limited = [cost.masked_fill(torch.ones_like(cost).tril() > 0, torch.inf) for cost in costs]
        ends = partition(limited.__getitem__, segments)
        assert ends is not None
        assert greatest(ends) == min(map(greatest, cut_choices(count, segments)))
    assert partition(lambda behind: limited[0], count + 1) is None


def test_segments_fit_their_room_with_what_they_hold_in_flight() -> None:
    line = Line(work_of([1.0] * 6, [(a, a + 1) for a in range(5)], saved=100), tuple(range(6)))
    assert next(cuts_of(line, 2)) == (3, 6)
    assert next(cuts_of(line, 2, 8, memory=400)) == (2, 6)  # 2 blocks × 2 in flight, 4 × 1


def test_an_encoder_stays_apart_in_a_coarse_work_though_an_embedding_takes_next_to_nothing() -> None:
    """Blocks 0 to 299 are the encoder, 300 the embedding, which the language blocks from 301 on need beside it."""
    edges = [(block, block + 1) for block in range(699) if block not in (299, 300)] + [(299, 301), (300, 301)]
    work = work_of([1e-6 if block == 300 else 1.0 for block in range(700)], edges)
    pieces = coarsened(work, 4)
    coarse = work.merged(pieces)
    assert len(coarse) < 300
    depends = entries(coarse)
    seconds = dict.fromkeys(depends, 0.0)
    for bits, block in zip(depends, coarse.blocks, strict=True):
        seconds[bits] += block.seconds
    assert sorted(seconds.values()) == pytest.approx([1e-6, 300, 399])


def test_no_cut_in_program_order_is_better() -> None:
    draw = random.Random(5)
    for _ in range(12 if ALL else 5):
        count, ranks = draw.randint(4, 8), draw.randint(2, 3)
        work = random_work(draw, count)
        found = search(work, ranks, 6, with_costs("1f1b"), None)
        judge = Judge(work, with_costs("1f1b"), 6, None)
        for ends in cut_choices(count, ranks):
            stage_of = tuple(sum(block >= end for end in ends) for block in range(count))
            outcome = judge.outcome(StageLayout(stage_of, tuple(range(ranks))))
            assert outcome is not None
            assert found.best.seconds <= outcome.seconds * 1.0001


def test_a_parameter_on_two_ranks_costs_its_sum() -> None:
    work = work_of([1.0, 1.0], [(0, 1)], tied=[(0, 1)], size=10**6)
    judge = Judge(work, with_costs("1f1b"), 4, None)
    apart = judge.outcome(StageLayout((0, 1), (0, 1)))
    assert apart is not None
    assert apart.seconds == pytest.approx(apart.schedule.simulate(apart.costs).makespan + 10**6 / 1e6)
    assert apart.peak_bytes == (16 * 250_000, 16 * 250_000)


def test_gradients_of_the_same_ranks_are_summed_together_in_the_type_that_precision_says() -> None:
    """Two parameters of 500,000 numbers, which stages run with in bfloat16 and sum in float32."""
    work = work_of([1.0, 1.0], [(0, 1)], tied=[(0, 1), (0, 1)])
    held = {key: ParameterCost(10**6, 5 * 10**5, trained=True) for key in (0, 1)}
    slow = replace(SLOW_LINK, latency=10.0)
    precise = replace(work.costs, parameters=held, account=Account(precision=fxpipe.Precision()), hardware=slow)
    work = replace(work, costs=precise)
    outcome = Judge(work, with_costs("1f1b"), 4, None).outcome(StageLayout((0, 1), (0, 1)))
    assert outcome is not None
    sums = 2 * (2 - 1) / 2 * (10.0 + 2 * 5 * 10**5 * 4 / 1e6)
    assert outcome.seconds - outcome.makespan == pytest.approx(sums)


def test_a_step_takes_no_less_than_its_busiest_link() -> None:
    """Two values of 5 MB from rank 0 to rank 1 in each of 4 micro-batches, over a link of 1 MB a second, and as many
    gradients back, with F = 1/3 and B = 2/3. Rank 0 runs stages 1 and 0 by turns, and posts the receives of the next
    two gradients between them: the link waits for three backwards of stage 1. Behind the last gradient are two."""
    work = work_of([1.0, 1.0, 1.0], [(0, 2), (1, 2)], size=5 * 10**6)
    outcome = Judge(work, with_costs("gpipe"), 4, None).outcome(StageLayout((0, 1, 2), (0, 0, 1)))
    assert outcome is not None
    assert outcome.seconds == pytest.approx(1 / 3 + 4 * 10 + 1 / 3 + 2 / 3 + 4 * 10 + (3 + 2) * 2 / 3)


# --- thousands of nodes ---


def long_towers(nodes: int) -> tuple[Program, NodeCosts]:
    example = {"x": spec(4, 8), "y": spec(4, 8)}
    program = program_of(Towers(nodes // 10, nodes // 10), **example)
    return program, costs_from_shapes(program, example)


def pieces(program: Program, costs: NodeCosts) -> int:
    """Of the work that the search is given."""
    work = work_of_program(program, costs)
    return len(work.merged(coarsened(work, 8)))


def test_more_nodes_than_pieces_are_balanced_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "GRAINS", 32)
    monkeypatch.setattr(choose, "GRAINS_A_RANK", 6)
    program, costs = long_towers(90)
    assert len(work_of_program(program, costs)) > pieces(program, costs)
    assert len(set(balance(program, 2, 4, costs).placement)) == 2


@pytest.mark.parametrize("halves", [True, False])
def test_backwards_in_halves_are_simulated_where_stages_can_run_them(
    halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy has I and W where it may hold few bytes, and knows what W keeps."""
    monkeypatch.setattr("fxpipe.search.moves.MORE_ACTIONS", 2000)
    program = program_of(Chain(6))
    costs = costs_from_shapes(program, {"x": spec(4, 8)}, hardware=FLOPS, halves=halves)
    found = balance(program, 3, 8, costs, with_costs("greedy", memory=5000.0)).outcome.schedule
    assert bool(found.dependencies.halves) is halves


# --- a stage on all ranks ---


class Lens(nn.Module):
    """An encoder of the first input beside the layers of the second; ``inside``: what stands in it."""

    def __init__(self, layers: int, inside: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Layer(factor=3), inside, Layer(factor=3))
        self.words = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y = self.words(y) + self.encoder(x)
        for layer in self.layers:
            y = layer(y)
        return y.square().mean()


def test_an_encoder_is_on_all_ranks_where_that_gains_more_than_three_percent() -> None:
    model = Lens(4, nn.Identity())
    one_each = balanced(model, 2)
    found = balanced(model, 2, several=True)
    assert found.outcome.seconds < 0.97 * one_each.outcome.seconds
    assert "ranks 0, 1: encoder; F " in str(found).partition("runner-up")[0]
    (number,) = (stage for stage, place in enumerate(found.placement) if place == (0, 1))
    inside = {node.name for node in found.program.graph.nodes if "encoder" in called_in(node)}
    assert {name for name, stage in found.program.stage_of.items() if stage == number} == inside
    state = 16 * sum(parameter.numel() for parameter in model.encoder.parameters())
    assert all(
        most > state for most in found.outcome.peak_bytes
    )  # value, gradient and AdamW's state, on each of its ranks
    chain = balanced(Chain(4), 2, several=True)
    assert all(isinstance(place, int) for place in chain.placement)


@pytest.mark.parametrize(
    "options", [{"zero": 3}, {"parallelize": lambda stage, mesh: None}], ids=["zero=3", "function"]
)
def test_an_encoder_whose_parameters_are_sharded_is_on_all_ranks_likewise(options: dict[str, Any]) -> None:
    batch = (torch.zeros(32, 8), torch.zeros(32, 8))
    defaults: dict[str, Any] = {"boundaries": "auto", "microbatches": 8, "example_args": batch, "hardware": FLOPS}
    found = fxpipe.compile(Lens(4, nn.Identity()), fxpipe.Topology([("pipe", 2)]), **defaults, **options)
    assert found.stages.placement == ((0, 1), 0, 1)
    assert found.stages.names[0] == "encoder"


def test_a_long_encoder_on_all_ranks_is_several_stages_which_fill_shorter_gaps() -> None:
    """An encoder of 24 s in 8 blocks, beside an embedding in front of four language blocks of 3 s each."""
    edges = [(block, block + 1) for block in (*range(7), *range(9, 12))] + [(7, 9), (8, 9)]
    work = work_of([3.0] * 8 + [1e-3] + [3.0] * 4, edges)
    found = search(work, 4, 16, with_costs("1f1b"), None, several=True)
    spread = [stage for stage, place in enumerate(found.best.layout.rank_of) if place == (0, 1, 2, 3)]
    assert len(spread) == 4
    encoder = [stage for stage in found.best.layout.stage_of if stage in spread]
    assert encoder == sorted([*spread, *spread])  # two blocks in each
    one = [other for other in found.others if "beside a stage on all ranks" in other.layout.origin]
    assert found.best.seconds < 0.97 * one[0].seconds
    assert found.best.seconds == pytest.approx(16 * work.seconds() / 4, rel=1e-3)  # next to no bubble


def test_it_is_not_where_it_writes_a_buffer_or_memory_is_short() -> None:
    written = balanced(Lens(4, nn.BatchNorm1d(8)), 2, several=True)
    assert written.program.stage_of["encoder_1"] not in {
        stage for stage, place in enumerate(written.placement) if isinstance(place, tuple)
    }
    model = Lens(4, nn.Identity())
    room = max(balanced(model, 2).outcome.peak_bytes)
    assert max(balanced(model, 2, several=True, memory=room).outcome.peak_bytes) <= room


def test_given_stages_are_on_all_ranks_likewise() -> None:
    class Given(Lens):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y = fxpipe.stage_boundary(self.words(y) + fxpipe.stage_boundary(self.encoder(x)))
            for layer in self.layers:
                y = fxpipe.stage_boundary(layer(y))
            return y.square().mean()

    model = Given(4, nn.Identity())
    found, _ = given_stages(model, 2, several=True, memory=1e9)
    assert found.placement[0] == (0, 1)
    found, _ = given_stages(model, 2, several=True)  # nobody has said how much a rank may hold
    assert all(isinstance(place, int) for place in found.placement)
