"""Vision-language models on 4, 8 and 16 ranks: the encoder in stage 0, in a chain, on single ranks, on all ranks.

    python examples/benchmarks/vlm.py                                      # simulated: all models, half an hour
    python examples/benchmarks/vlm.py --models PaliGemma-3B --ranks 8      # half a minute
    python examples/benchmarks/vlm.py --measure                            # and measured, on 8 processes and less

Models are built on the meta device with published shapes (vlm_models.py), so that nothing of their size is allocated.
A step has 32 micro-batches of one sample: an image of the model's native size and 512 text tokens. Whisper, CLIP and
ImageBind have several samples in a micro-batch and their own numbers of tokens. No region is opaque, for sizes are
fixed. Costs are from shapes, in bfloat16 with float32 masters and AdamW, on H100s: NVLink up to 8 ranks, and for 16
the network between two nodes. All layouts run 1F1B, without recomputation:

(a) by layers: the encoder in stage 0, and as many language layers on each rank, as Megatron-LM has it; or one fewer
    beside the embedding and one fewer beside the head, as torchtitan has it: the faster of the two. Of the models
    without a language model as many layers on each rank, one tower behind another.
(b) by time: all layers as a chain, cut where its slowest rank takes least.
(c) single ranks: ``boundaries="auto"`` where each stage is on one rank.
(d) several ranks: ``boundaries="auto"``, which puts an encoder on all ranks where a step is then 3 % shorter.

Memory is that of parameters, gradients, optimizer and activations. Measured stages sleep instead of computing, as long
as (a) takes 4 seconds; times are medians over the rounds, of the slowest rank.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from balance import acyclic, by, even, spec
from sleeping import Stage, in_turns
from tabulate import tabulate
from vlm_models import OTHERS, VLMS, Built, Unit

import fxpipe
from fxpipe import passes
from fxpipe.graph.program import Program, called_in
from fxpipe.passes.chain import chain
from fxpipe.schedules import with_costs
from fxpipe.search.block_graph import BlockGraph, work_of_program
from fxpipe.search.choose import balance
from fxpipe.search.memory import Account
from fxpipe.search.moves import connected
from fxpipe.search.node_costs import NodeCosts, costs_from_shapes
from fxpipe.search.segments import depth_first
from fxpipe.search.simulated_layouts import Judge, LayoutOutcome
from fxpipe.trace import Request, capture

FAMILY, MICROBATCHES, RANKS_PER_NODE = "1f1b", 32, 8
HARDWARE = fxpipe.Hardware.named("h100")
SLEPT = 4.0
"""Seconds that a measured step of (a) is to take."""
MOST_PROCESSES = 8
MODELS = {**VLMS, **OTHERS}
WAYS = "abcd"


@dataclass(frozen=True)
class Costed:
    """A model that is captured and costed. ``unit_of``: block → the number of its unit."""

    name: str
    trained: bool
    built: Built
    program: Program
    costs: NodeCosts
    work: BlockGraph
    unit_of: tuple[int, ...]

    @property
    def unit_seconds(self) -> list[float]:
        seconds = [0.0] * len(self.built.units)
        for block, unit in zip(self.work.blocks, self.unit_of, strict=True):
            seconds[unit] += block.seconds
        return seconds


def costed(name: str, trained: bool, ranks: int) -> Costed:
    with torch.device("meta"):
        built = MODELS[name].build()
    built.model.get_submodule(built.frozen).requires_grad_(trained)
    whole = ("words", "labels", "text")
    example = {
        name: spec(*shape, dtype=torch.long if name in whole else torch.float32) for name, shape in built.batch.items()
    }
    program = capture(Request(built.model.train(), tuple(example), {}, example=example), "symbolic")
    program = chain(passes.before_balance(), program)
    wire = dataclasses.replace(HARDWARE, link=HARDWARE.wire(ranks > RANKS_PER_NODE))
    account = Account(precision=fxpipe.Precision())
    costs = costs_from_shapes(program, example, hardware=wire, compute=torch.bfloat16, account=account)
    work = work_of_program(program, costs)
    return Costed(name, trained, built, program, costs, work, units(program, work, built.units))


def units(program: Program, work: BlockGraph, names: Sequence[Unit]) -> tuple[int, ...]:
    """Block → unit. What stands between modules goes with the last unit that it needs."""
    number = {path: place for place, unit in enumerate(names) for path in unit}
    paths = {node.name: called_in(node) for node in program.graph.nodes}
    found = [0] * len(work)
    for block in depth_first(work):
        inside = [number[path] for node in work.blocks[block].nodes for path in paths[node] if path in number]
        found[block] = max(inside, default=max((found[source] for source in work.sources[block]), default=0))
    return tuple(found)


# --- layouts ---


def by_layers(model: Costed, ranks: int) -> list[list[int]]:
    """Unit → rank, in two ways."""
    count, encoder = len(model.built.units), model.built.encoder
    if model.name in OTHERS:
        return [even(count, ranks)]
    layers = count - encoder - 1
    return [[0] * encoder + numbers + [ranks - 1] for numbers in (even(layers, ranks), beside_ends(layers, ranks))]


def beside_ends(layers: int, ranks: int) -> list[int]:
    """As torchtitan's ``generate_llm_fqn_per_model_part``: embedding and head count as a layer each, and what is left
    over goes to the first ranks."""
    least, more = divmod(layers + 2, ranks)
    sizes = [least + (rank < more) - (rank == 0) - (rank == ranks - 1) for rank in range(ranks)]
    return [rank for rank, size in enumerate(sizes) for _ in range(size)]


def by_hand(judge: Judge, model: Costed, ways: Sequence[Sequence[int]]) -> LayoutOutcome:
    """The best of these, each with a stage a rank, or one for each connected part of a rank."""
    found = []
    for rank_of_unit in ways:
        rank_of = [rank_of_unit[unit] for unit in model.unit_of]
        parts = connected(model.work, rank_of)
        for groups in (rank_of, [parts.find(block) for block in range(len(rank_of))]):
            layout = acyclic(model.work, groups, rank_of)
            outcome = None if layout is None else judge.outcome(layout)
            found += [] if outcome is None else [outcome]
    return min(found, key=lambda outcome: outcome.seconds)


def outcomes(model: Costed, ranks: int, memory: float | None = None) -> dict[str, LayoutOutcome]:
    """``memory``: the bytes of a rank that (c) and (d) keep within."""
    judge = Judge(model.work, with_costs(FAMILY), MICROBATCHES, None)
    single, several = (
        balance(model.program, ranks, MICROBATCHES, model.costs, FAMILY, memory, several=several).outcome
        for several in (False, True)
    )
    hand = (by_hand(judge, model, ways) for ways in (by_layers(model, ranks), [by(model.unit_seconds, ranks)]))
    return dict(zip(WAYS, (*hand, single, several), strict=True))


# --- tables ---


@dataclass(frozen=True)
class Row:
    """What a model comes to. ``measured``: the seconds of each way that was measured."""

    name: str
    trained: bool
    ranks: int
    found: dict[str, LayoutOutcome]
    measured: dict[str, float]

    def over_d(self, way: str) -> float:
        return self.found[way].seconds / self.found["d"].seconds

    def cells(self) -> list[str]:
        several = any(not isinstance(place, int) for place in self.found["d"].layout.rank_of)
        times = [f"{1e3 * self.found[way].seconds:,.0f}" for way in WAYS]
        bubbles = " ".join(f"{100 * self.found[way].bubble:.0f}" for way in WAYS)
        memory = " ".join(f"{self.found[way].most_bytes / 2**30:.0f}" for way in WAYS)
        encoder, chosen = "trained" if self.trained else "frozen", "yes" if several else "no"
        ratios = [f"{self.over_d(way):.2f}" for way in WAYS[:3]]
        return [str(self.ranks), self.name, encoder, *times, chosen, bubbles, memory, *ratios]


HEADERS = ["ranks", "model", "encoder", *(f"({way}) ms" for way in WAYS), "on all ranks", "bubble, %", "GiB"]
HEADERS += [f"{way}/d" for way in WAYS[:3]]


def table(rows: Sequence[Row]) -> str:
    aligned = ("right", "left", "left", *["right"] * 4, "left", *["right"] * 5)
    return tabulate([row.cells() for row in rows], HEADERS, "github", disable_numparse=True, colalign=aligned)


def means(rows: Sequence[Row]) -> str:
    """Geometric means of the VLMs and of the others, for each number of ranks."""
    found = []
    for ranks in dict.fromkeys(row.ranks for row in rows):
        for what, names in (("vision-language models", VLMS), ("the others", OTHERS)):
            ours = [row for row in rows if row.ranks == ranks and row.name in names]
            ratios = [[row.over_d(way) for row in ours] for way in WAYS[:3]]
            if ours:
                shown = [f"{statistics.geometric_mean(ratio):.2f}" for ratio in ratios]
                found.append([str(ranks), what, str(len(ours)), *shown, f"{min(map(min, ratios)):.2f}"])
    headers = ["ranks", "geometric means", "rows", *HEADERS[-3:], "the least of all"]
    return tabulate(found, headers, "github", disable_numparse=True, colalign=("right", "left", *["right"] * 5))


# --- measured ---


@dataclass(frozen=True)
class Replay:
    """A table of stages that sleep. ``seconds``: forward and backward of each."""

    schedule: fxpipe.Schedule
    seconds: tuple[tuple[float, float], ...]
    trained: tuple[bool, ...]

    @staticmethod
    def of(model: Costed, outcome: LayoutOutcome, scale: float) -> "Replay":
        costs, trained = outcome.costs, [False] * outcome.layout.stages
        for block, stage in zip(model.work.blocks, outcome.layout.stage_of, strict=True):
            trained[stage] |= block.cost.trains
        seconds = tuple((scale * a, scale * b) for a, b in zip(costs.forward, costs.backward, strict=True))
        return Replay(dataclasses.replace(outcome.schedule, costs=None), seconds, tuple(trained))

    def compiled(self) -> fxpipe.ForwardBackward:
        edges, count = self.schedule.edges, len(self.seconds)
        stages = {
            f"s{n}": Stage(*both, is_last=n == count - 1, trained=trained)
            for n, (both, trained) in enumerate(zip(self.seconds, self.trained, strict=True))
        }
        fed = {target for _, target in edges}
        inputs = {f"s{n}": ["x"] for n in range(count) if n not in fed}
        graph = fxpipe.StageGraph.from_callables(stages, [(f"s{a}", f"s{b}") for a, b in edges], inputs)
        placement = {f"s{n}": place for n, place in enumerate(self.schedule.placement)}
        topology = fxpipe.Topology([("pipe", len(self.schedule.rows))])
        options = {"placement": placement, "schedule": self.schedule}
        return fxpipe.compile(graph, topology, microbatches=MICROBATCHES, **options)


def run(replays: dict[str, Replay], rounds: int, path: str) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    contestants = {way: replay.compiled() for way, replay in replays.items()}
    seconds = in_turns(contestants, torch.ones(4 * MICROBATCHES, 128), rounds)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps({way: statistics.median(times) for way, times in seconds.items()}))
    for one in contestants.values():
        one.close()


def measured(model: Costed, found: dict[str, LayoutOutcome], rounds: int) -> dict[str, float]:
    """The median seconds of (a), (b) and (d), in the units of the simulation."""
    scale = SLEPT / found["a"].seconds
    replays = {way: Replay.of(model, found[way], scale) for way in "abd"}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/seconds.json"
        fxpipe.launch(run, len(found["a"].schedule.rows), replays, rounds, path)
        return {way: seconds / scale for way, seconds in json.loads(Path(path).read_text()).items()}


def of_measured(rows: Sequence[Row]) -> str:
    """Medians beside the makespans: what is summed behind the last backward is not replayed."""
    found = []
    for row in rows:
        ratios = [row.measured[way] / row.found[way].makespan for way in "abd"]
        over = [row.measured[way] / row.measured["d"] for way in "ab"]
        simulated = [row.found[way].makespan / row.found["d"].makespan for way in "ab"]
        encoder = "trained" if row.trained else "frozen"
        found.append([str(row.ranks), row.name, encoder, *(f"{one:.2f}" for one in (*ratios, *simulated, *over))])
    headers = ["ranks", "model", "encoder", *(f"({way}) measured / simulated" for way in "abd")]
    headers += ["a/d simulated", "b/d simulated", "a/d measured", "b/d measured"]
    aligned = ("right", "left", "left", *["right"] * 7)
    return tabulate(found, headers, "github", disable_numparse=True, colalign=aligned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--encoder", nargs="*", choices=["trained", "frozen"], default=["trained", "frozen"])
    parser.add_argument("--memory", type=float, help="GB of a rank that (c) and (d) keep within")
    parser.add_argument("--measure", action="store_true", help="replay those of at most 8 ranks with processes")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each way")
    arguments = parser.parse_args()
    begin, rows = time.perf_counter(), []
    memory = None if arguments.memory is None else arguments.memory * 1e9
    for ranks in arguments.ranks:
        for name in arguments.models:
            for encoder in arguments.encoder:
                start = time.perf_counter()
                model = costed(name, encoder == "trained", ranks)
                found = outcomes(model, ranks, memory)
                took = time.perf_counter() - start
                replayed = arguments.measure and ranks <= MOST_PROCESSES
                slept = measured(model, found, arguments.rounds) if replayed else {}
                rows.append(Row(name, encoder == "trained", ranks, found, slept))
                shown = ", ".join(f"({way}) {1e3 * found[way].seconds:,.0f} ms" for way in WAYS)
                print(f"{name}, {encoder}, {ranks} ranks: {shown}; {took:.0f} s", file=sys.stderr, flush=True)
    print(f"{table(rows)}\n\n{means(rows)}")
    if arguments.measure:
        print(f"\n{of_measured([row for row in rows if row.measured])}")
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
