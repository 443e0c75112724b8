"""The automatic balance against ten placements by hand, on graphs of CLIP's and mT5's shapes; and how long it takes.

    python examples/benchmarks/balance.py                      # 3 models on 4, 5, 8 and 16 ranks, then the scaling
    python examples/benchmarks/balance.py --models vit-b/32 --ranks 4 8
    python examples/benchmarks/balance.py --layers 80 --before FOLDER    # "auto" of a 70B Llama, in turns

Needs transformers. The models are built on the meta device and captured by `export`, so that nothing of their size is
allocated; what a node takes follows from its shapes (see fxpipe/hardware.py for the reference). Every
placement is simulated with the same costs, hops and table, 1F1B on the graph with 4 micro-batches a rank. Placements
by hand cut between layers, as one does with stage_boundary; where a rank then has two parts that are not connected,
the better of one stage and of two counts for them; - where there are too few layers. Times are of the processor, in one
thread.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import transformers
import turns
from tabulate import tabulate
from torch import Tensor, fx, nn

import fxpipe
from fxpipe import passes
from fxpipe.errors import FxpipeError
from fxpipe.graph.program import Program
from fxpipe.passes.chain import chain
from fxpipe.schedules import with_costs
from fxpipe.search.block_graph import BlockGraph, work_of_program
from fxpipe.search.choose import balance
from fxpipe.search.moves import connected
from fxpipe.search.node_costs import NodeCosts, costs_from_shapes
from fxpipe.search.segments import between, partition
from fxpipe.search.simulated_layouts import Judge, StageLayout
from fxpipe.specs import TensorSpec
from fxpipe.trace import Request, capture

FAMILY = "1f1b"
MICROBATCHES_A_RANK = 4


# --- the models ---


def spec(*shape: int, dtype: torch.dtype = torch.long) -> TensorSpec:
    return TensorSpec(shape, dtype, torch.empty(shape, device="meta").stride(), "cpu", False)


def clip(patch: int, width: int, layers: int, text_width: int, rows: int) -> tuple[nn.Module, dict[str, object]]:
    text = {"hidden_size": text_width, "intermediate_size": 4 * text_width, "num_attention_heads": text_width // 64}
    image = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
    config = transformers.CLIPConfig(
        text_config=text | {"num_hidden_layers": 12, "projection_dim": text_width},
        vision_config=image | {"num_hidden_layers": layers, "patch_size": patch, "projection_dim": text_width},
        projection_dim=text_width,
    )
    batch = {
        "input_ids": spec(rows, 77),
        "pixel_values": spec(rows, 3, 224, 224, dtype=torch.float32),
        "attention_mask": spec(rows, 77),
    }
    with torch.device("meta"):
        return transformers.CLIPModel(config), batch | {"return_loss": True}


def mt5() -> tuple[nn.Module, dict[str, object]]:
    config = transformers.MT5Config(d_model=768, d_kv=64, d_ff=2048, num_layers=12, num_heads=12, vocab_size=250112)
    with torch.device("meta"):
        model = transformers.MT5ForConditionalGeneration(config)
    return model, {"input_ids": spec(8, 512), "attention_mask": spec(8, 512), "labels": spec(8, 512)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, object]]]] = {
    "vit-l/14": lambda: clip(14, 1024, 24, 768, 16),
    "vit-b/32": lambda: clip(32, 768, 12, 512, 64),
    "mt5-base": mt5,
}


def captured(model: nn.Module, batch: dict[str, object]) -> tuple[Program, NodeCosts]:
    """The program that is balanced, and what its nodes take."""
    example = {name: value for name, value in batch.items() if isinstance(value, TensorSpec)}
    fixed = {name: value for name, value in batch.items() if not isinstance(value, TensorSpec)}
    names = tuple(name for name in Request.signature(model, None).parameters if name in example)
    program = capture(Request(model.train(), names, fixed, example=example), "export")
    program = chain(passes.before_balance(), program)
    return program, costs_from_shapes(program, example)


# --- by hand ---


@dataclass(frozen=True)
class Layers:
    """The layers of a model in the order of the data, as one who cuts by hand sees them."""

    work: BlockGraph
    layer_of: tuple[int, ...]
    """Block → layer."""
    first: int
    """How many layers the first tower has: the image's, the encoder's."""
    seconds: tuple[float, ...]
    parameters: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.seconds)


def layers_of(program: Program, work: BlockGraph, first_tower: str, second_tower: str, layer: str) -> Layers:
    """Layers by the paths of the modules that nodes were called in; what has none goes with what it is made from."""
    paths = {node.name: _path(node) for node in program.graph.nodes}
    names = [f"{tower}.{layer}.{n}" for tower in (first_tower, second_tower) for n in range(len(paths))]
    present = {name for path in paths.values() for name in path}
    names = [name for name in names if name in present]
    number = {name: place for place, name in enumerate(names)}
    first = sum(name.startswith(f"{first_tower}.") for name in names)
    found: list[int | None] = [None] * len(work)
    for block, made in enumerate(work.blocks):
        inside = [number[name] for node in made.nodes for name in paths[node] if name in number]
        early = [path for node in made.nodes for path in paths[node]]
        if inside:
            found[block] = max(inside)
        elif not work.sources[block]:
            found[block] = first if any(path.startswith(second_tower) for path in early) else 0
        else:
            behind = max(found[source] or 0 for source in work.sources[block])
            found[block] = first if behind < first and any(p.startswith(second_tower) for p in early) else behind
    layer_of = tuple(place or 0 for place in found)
    seconds, held = [0.0] * len(names), [set[int]() for _ in names]
    for block, place in enumerate(layer_of):
        seconds[place] += work.blocks[block].seconds
        held[place] |= work.blocks[block].cost.parameters
    sizes = tuple(float(sum(work.costs.parameters[key].count for key in keys)) for keys in held)
    return Layers(work, layer_of, first, tuple(seconds), sizes)


def _path(node: fx.Node) -> list[str]:
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def by(weights: Sequence[float], ranks: int) -> list[int]:
    """Consecutive groups whose greatest weight is least; each rank has one."""
    sums = list(accumulate(weights, initial=0.0))
    cost = between(sums)
    cuts = partition(lambda behind: cost, min(ranks, len(weights))) or ()
    greatest = max(sums[end] - sums[start] for start, end in pairwise((0, *cuts)))
    bound, rank, begin, found = greatest * (1 + 1e-9), 0, 0.0, []
    for place in range(len(weights)):
        left = len(weights) - place
        if place and rank < ranks - 1 and (sums[place + 1] - begin > bound or left <= ranks - 1 - rank):
            rank, begin = rank + 1, sums[place]
        found.append(rank)
    return found


def even(count: int, ranks: int) -> list[int]:
    return [place * ranks // count for place in range(count)]


def two(first: list[int], second: list[int], offset: int) -> list[int]:
    return [*first, *(offset + rank for rank in second)]


def clip_by_hand(layers: Layers, ranks: int) -> dict[str, list[int]]:
    """Layer → rank. Image layers come first; what joins the towers is with the last layer of the text."""
    image, text, time_of, size_of = layers.first, len(layers) - layers.first, layers.seconds, layers.parameters
    share = sum(time_of[:image]) / sum(time_of)
    most = min(max(round(share * ranks), 1), ranks - 1)
    half = ranks // 2
    last = even(image, ranks)
    return {
        "equal layers, image then text": even(image + text, ranks),
        "equal layers, text then image": turned(even(image + text, ranks), text),
        "text alone on a rank": two(even(image, ranks - 1), [0] * text, ranks - 1),
        "text with the last of the image": [*last, *[ranks - 1] * text],
        "text with the first of the image": [*last, *[0] * text],
        "by parameters, image then text": by(size_of, ranks),
        "by parameters, text then image": turned(by([*size_of[image:], *size_of[:image]], ranks), text),
        "by time, image then text": by(time_of, ranks),
        "ranks in proportion to time": two(even(image, most), even(text, ranks - most), most),
        "half of the ranks each": two(even(image, half), even(text, ranks - half), half),
    }


def turned(ranks: list[int], text: int) -> list[int]:
    """Ranks of text then image, as those of image then text."""
    return [*ranks[text:], *ranks[:text]]


def mt5_by_hand(layers: Layers, ranks: int) -> dict[str, list[int]]:
    """Layer → rank. Encoder layers come first; the last decoder layer has the head with it."""
    encoder, decoder, time_of, size_of = layers.first, len(layers) - layers.first, layers.seconds, layers.parameters
    share = sum(time_of[:encoder]) / sum(time_of)
    most = min(max(round(share * ranks), 1), ranks - 1)
    half, body = ranks // 2, encoder + decoder - 1
    return {
        "equal layers": even(encoder + decoder, ranks),
        "half of the ranks each": two(even(encoder, half), even(decoder, ranks - half), half),
        "by parameters": by(size_of, ranks),
        "by time": by(time_of, ranks),
        "ranks in proportion to time": two(even(encoder, most), even(decoder, ranks - most), most),
        "in proportion, each by time": two(by(time_of[:encoder], most), by(time_of[encoder:], ranks - most), most),
        "the last layer and the head alone": [*even(body, ranks - 1), ranks - 1],
        "the same, the others by time": [*by(time_of[:body], ranks - 1), ranks - 1],
        "the decoder on one rank": [*even(encoder, ranks - 1), *[ranks - 1] * decoder],
        "the encoder on one rank": [*[0] * encoder, *(1 + rank for rank in even(decoder, ranks - 1))],
    }


def by_hand(judge: Judge, layers: Layers, rank_of_layer: Sequence[int]) -> float | None:
    """The makespan of a placement by hand; None where a rank gets no layer, or stages wait for each other."""
    work = layers.work
    rank_of = [rank_of_layer[layer] for layer in layers.layer_of]
    pieces = [2 * rank + (layer >= layers.first) for rank, layer in zip(rank_of, layers.layer_of, strict=True)]
    choices = []
    for groups in (rank_of, pieces, [connected(work, rank_of).find(block) for block in range(len(work))]):
        layout = acyclic(work, groups, rank_of)
        outcome = judge.outcome(layout) if layout is not None else None
        choices += [outcome.seconds] if outcome is not None else []
    return min(choices, default=None)


def acyclic(work: BlockGraph, group_of: Sequence[int], rank_of: Sequence[int]) -> StageLayout | None:
    """The layout with a stage for each group, numbered in topological order; None where there is none."""
    rank = {group: rank_of[block] for block, group in enumerate(group_of)}
    before: dict[int, set[int]] = {group: set() for group in rank}
    for value in work.values:
        for target in value.targets:
            if group_of[target] != group_of[value.source]:
                before[group_of[target]].add(group_of[value.source])
    order: list[int] = []
    while len(order) < len(before):
        ready = [group for group in sorted(before) if group not in order and before[group] <= set(order)]
        if not ready:
            return None
        order += ready
    number = {group: place for place, group in enumerate(order)}
    stage_of = tuple(number[group] for group in group_of)
    return StageLayout(stage_of, tuple(rank[group] for group in order), "by hand")


# --- the tables ---


def against_hands(name: str, ranks: Sequence[int]) -> bool:
    """Prints a model's table; whether no placement by hand was better."""
    start = time.process_time()
    program, costs = captured(*MODELS[name]())
    ready = time.process_time() - start
    work = work_of_program(program, costs)
    if name.startswith("vit"):
        layers = layers_of(program, work, "vision_model", "text_model", "encoder.layers")
    else:
        layers = layers_of(program, work, "encoder", "decoder", "block")
    hand = clip_by_hand if name.startswith("vit") else mt5_by_hand
    columns: dict[str, list[str]] = {}
    won = True
    for count in ranks:
        start = time.process_time()
        found = balance(program, count, MICROBATCHES_A_RANK * count, costs, FAMILY)
        took = time.process_time() - start
        judge = Judge(work, with_costs(FAMILY), MICROBATCHES_A_RANK * count, None)
        columns.setdefault("fxpipe", []).append(f"{1e3 * found.outcome.seconds:.1f}")
        for label, rank_of_layer in hand(layers, count).items():
            seconds = by_hand(judge, layers, rank_of_layer)
            won = won and (seconds is None or found.outcome.seconds <= seconds * (1 + 1e-9))
            columns.setdefault(label, []).append("-" if seconds is None else f"{1e3 * seconds:.1f}")
        columns.setdefault("seconds to find it", []).append(f"{took:.1f}")
    print(f"{name}: {len(program.graph.nodes):,} nodes, captured and costed in {ready:.1f} s; simulated makespan, ms")
    headers = ["", *(f"{count} ranks" for count in ranks)]
    rows = [(label, *cells) for label, cells in columns.items()]
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * len(ranks))))
    print(f"no placement by hand is better: {won}\n")
    return won


class Layer(nn.Module):
    """12 nodes, as in a transformer's layer: two residual branches."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down, self.middle = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + torch.softmax(self.query(h) @ self.key(h).transpose(-1, -2), -1) @ h
        return x + self.down(torch.relu(self.up(self.middle(x))))


class Towers(nn.Module):
    def __init__(self, layers: int, width: int = 64):
        super().__init__()
        self.image = nn.ModuleList(Layer(width) for _ in range(2 * layers // 3))
        self.text = nn.ModuleList(Layer(width) for _ in range(layers - 2 * layers // 3))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for layer in self.image:
            image = layer(image)
        for layer in self.text:
            text = layer(text)
        return (image * text).mean()


def scaling(sizes: Sequence[int], ranks: int) -> None:
    """Prints how long the parts take for graphs of so many nodes."""
    rows = []
    for size in sizes:
        model = Towers(size // 13)
        example = {name: spec(2, 16, 64, dtype=torch.float32) for name in ("image", "text")}
        program = capture(Request(model, ("image", "text"), example=example), "symbolic")
        program = chain(passes.before_balance(), program)
        start = time.process_time()
        costs = costs_from_shapes(program, example)
        costed = time.process_time()
        found = balance(program, ranks, MICROBATCHES_A_RANK * ranks, costs, FAMILY)
        end = time.process_time()
        nodes = len(program.graph.nodes)
        whole = end - start
        rows.append((f"{nodes:,}", f"{costed - start:.2f}", f"{end - costed:.2f}", f"{1e3 * whole / nodes:.2f}"))
        assert found.outcome.seconds > 0
    headers = ["nodes", "costs, s", "balance, s", "ms a node"]
    print(f"two towers on {ranks} ranks")
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=["right"] * 4))


# --- "auto" for many equal layers


def balanced(layers: int) -> turns.Figures:
    """Processor seconds of a preview with ``boundaries="auto"`` of a Llama of this many layers, on 16 ranks."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(vocab_size=128256, num_hidden_layers=layers, use_cache=False, **shape)
    with torch.device("meta"):
        model, ids = transformers.LlamaForCausalLM(config), torch.zeros(64, 4096, dtype=torch.long)
    pipe = fxpipe.Topology([("pipe", 16)])
    start = time.process_time()
    fxpipe.preview(
        model,
        pipe,
        boundaries="auto",
        microbatches=64,
        hardware="h100",
        example_kwargs={"input_ids": ids, "labels": ids},
    )
    return {f"auto, {layers} layers, s": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 5, 8, 16])
    parser.add_argument("--nodes", type=int, nargs="*", default=[1000, 2000, 5000, 10000])
    parser.add_argument("--layers", type=int, help='measures "auto" for a Llama of this many layers, and nothing else')
    parser.add_argument("--before", type=Path, help="with --layers: an earlier checkout, measured in turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--point", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(balanced(arguments.layers)))
        return
    if arguments.layers:
        point = ["--layers", str(arguments.layers), "--point"]
        print(turns.table(turns.in_turns(__file__, point, arguments.before, arguments.rounds)))
        return
    won = [against_hands(name, arguments.ranks) for name in arguments.models]
    if arguments.nodes:
        scaling(arguments.nodes, ranks=8)
    if not all(won):
        raise FxpipeError("a placement by hand was better")


if __name__ == "__main__":
    main()
