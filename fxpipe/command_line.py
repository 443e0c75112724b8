"""Arguments: what the words of ``python -m fxpipe`` mean. The commands themselves are in ``__main__``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fxpipe.schedules import SCHEDULES

T = TypeVar("T")
Edges = tuple[tuple[int, int], ...]
Run = Callable[[argparse.Namespace], None]

MICROBATCHES = 8

_OVERVIEW = """\
examples:
  python -m fxpipe show 1f1b --stages 4 -m 8
  python -m fxpipe compare --edges 0-1,1-4,2-3,3-4 --forward 1,2,1,2,1 --backward 2,4,2,4,2
  python -m fxpipe topology pipe=2,tensor=2,data=4 --ranks-per-node 8
"""
_SHOW = """\
examples:
  python -m fxpipe show 1f1b --edges 0-1,1-4,2-3,3-4 -m 8
  python -m fxpipe show interleaved_1f1b --stages 8 --placement 0,1,2,3,0,1,2,3 --comm 0.1
  python -m fxpipe show 1f1b --edges 0-1,1-4,2-3,3-4 -m 16 --gather 4:4 --svg gathered.svg
  python -m fxpipe show 1f1b --stages 4 --csv mine.csv      # then edit it, and
  python -m fxpipe show mine.csv --full
"""
_COMPARE = """\
examples:
  python -m fxpipe compare --stages 8 -m 32
  python -m fxpipe compare 1f1b zb_h1 --stages 4 --bytes 2e9
  python -m fxpipe compare 1f1b greedy --edges 0-1,1-4,2-3,3-4 --forward 1,3,1,1,1 --backward 2,6,2,2,2
"""
_TOPOLOGY = """\
examples:
  python -m fxpipe topology pipe=2,tensor=2,data=4
  python -m fxpipe topology pipe=4,data=16 --ranks-per-node 8
"""
_PREVIEW = """\
the function makes what is previewed: it returns (model, example_args), (model, example_kwargs) or the model alone;
make the model under torch.device("meta"), and nothing is allocated. Behind the batch it may return a dict of options of
fxpipe.preview, which words of this command go ahead of: (model, batch, {"boundaries": {"model.visual": {"whole":
torch.empty(196, 64, device="meta")}}, "batch_dim": ...}); None for no batch

examples:
  python -m fxpipe preview train:model_and_batch --pipe 8 --data 8 --boundaries auto
  python -m fxpipe preview train:model_and_batch --pipe 8 --data 8 --ranks-per-node 8 --zero 1 --bf16 --hardware h100
"""
_CHECKPOINT = """\
examples:
  python -m fxpipe checkpoint show run
  python -m fxpipe checkpoint show run/step-000812
  python -m fxpipe checkpoint verify run
  python -m fxpipe checkpoint export run exported --config config.json
"""


# --- words ---


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return number


def _list(text: str, one: Callable[[str], T]) -> tuple[T, ...]:
    """``1,2,1``"""
    return tuple(one(part) for part in text.split(","))


def _one_or_list(text: str, one: Callable[[str], T]) -> T | tuple[T, ...]:
    """``1``: the same for all; ``1,2,1``: one for each."""
    return _list(text, one) if "," in text else one(text)


def _place(text: str) -> int | tuple[int, ...]:
    """``0``, or ``0+1+2`` for a stage on three ranks."""
    ranks = tuple(map(_whole, text.split("+")))
    return ranks if len(ranks) > 1 else ranks[0]


def _edges(text: str) -> Edges:
    """``0-1,1-2``; nothing at all for stages that nothing connects."""
    edges = []
    for part in text.split(",") if text else ():
        source, dash, target = part.strip().partition("-")
        if not (dash and source.isdecimal() and target.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is no edge; write pairs of stage numbers, as in 0-1,1-2")
        edges.append((_whole(source), _whole(target)))
    return tuple(edges)


def _gather(text: str) -> dict[int, int | None]:
    """``4``: stage 4 once for all micro-batches; ``4:8``: for 8 of them at a time."""
    groups: dict[int, int | None] = {}
    for part in text.split(","):
        stage, colon, size = part.strip().partition(":")
        groups[_whole(stage)] = _whole(size) if colon else None
    return groups


def _axes(text: str) -> tuple[tuple[str, int], ...]:
    """``pipe=2,data=4``, outermost first."""
    axes = []
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not (name and equals):
            raise argparse.ArgumentTypeError(f"{part!r} is no axis; write names and sizes, as in pipe=2,data=4")
        axes.append((name, _whole(size)))
    return tuple(axes)


_INT_LIST = partial(_list, one=_whole)
_INT_EACH = partial(_one_or_list, one=_whole)
_PLACES = partial(_list, one=_place)
_PAIR = partial(_list, one=_number)
_COST = partial(_one_or_list, one=_number)


# --- the parser ---


def parser(show: Run, compare: Run, topology: Run, preview: Run, checkpoint: Run) -> argparse.ArgumentParser:
    """The parser of the command line; each command's arguments come with ``run``, the function given here for it."""
    whole = argparse.ArgumentParser(
        prog="python -m fxpipe",
        description="Schedules and topologies on paper: no torch, no torchrun, no model. Previews, and checkpoints.",
        epilog=_OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    _add_show(_command(commands, "show", show, "print a schedule's table and figures", _SHOW))
    _add_compare(_command(commands, "compare", compare, "schedules side by side, a line each", _COMPARE))
    _add_topology(_command(commands, "topology", topology, "print a topology's groups of ranks", _TOPOLOGY))
    _add_preview(_command(commands, "preview", preview, "what a model would hold and take on each rank", _PREVIEW))
    _add_checkpoint(_command(commands, "checkpoint", checkpoint, "show, verify or export what is saved", _CHECKPOINT))
    return whole


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Run,
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="FAMILY_OR_CSV", help=f"{', '.join(SCHEDULES)}; or a file, *.csv")
    _add_graph(parser)
    _add_costs(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--full", action="store_true", help="the whole table, however wide it is")
    output.add_argument("--csv", metavar="PATH", help="write the table, in torch.distributed.pipelining's cells")
    output.add_argument("--communication", action="store_true", help="with --csv: sends and receives, too")
    output.add_argument("--svg", metavar="PATH", help="write a picture to scale")
    output.add_argument("--html", metavar="PATH", help="write a page to look around in")
    output.add_argument("--trace", metavar="PATH", help="write a trace for Perfetto or chrome://tracing")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "families",
        nargs="*",
        metavar="FAMILY_OR_CSV",
        help=f"out of {', '.join(SCHEDULES)}; without: all that fit; or files, *.csv",
    )
    _add_graph(parser)
    _add_costs(parser)


def _add_topology(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("axes", type=_axes, metavar="AXES", help="names and sizes, outermost first: pipe=2,data=4")
    parser.add_argument(
        "--ranks-per-node", type=_whole, metavar="N", help="how many consecutive ranks reach each other fast; all"
    )


def _add_preview(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MODULE:FUNCTION", help="what makes the model and one batch, of all rows")
    grid = parser.add_argument_group("ranks, the pipeline outermost")
    grid.add_argument("--pipe", type=_whole, required=True, metavar="N", help="ranks of a pipeline")
    grid.add_argument("--data", type=_whole, default=1, metavar="N", help="replicas; 1")
    grid.add_argument("--ranks-per-node", type=_whole, metavar="N", help="how many reach each other fast; all")
    options = parser.add_argument_group("options of fxpipe.compile")
    options.add_argument("--boundaries", metavar="NAME,…", help='submodules that are cut before, or "auto"')
    options.add_argument("-m", "--microbatches", type=_whole, metavar="N", help="4 for each rank of a pipeline")
    options.add_argument("--schedule", metavar="FAMILY", help=f"{', '.join(SCHEDULES)}; 1f1b")
    options.add_argument("--tracer", metavar="NAME", help="auto, symbolic, export or record; auto")
    options.add_argument("--zero", type=_whole, metavar="N", help="0 to 3; 0")
    options.add_argument("--zero-scope", metavar="WHERE", help="node or data; node")
    options.add_argument("--bf16", action="store_true", help="precision=fxpipe.Precision()")
    options.add_argument("--recompute", choices=("all", "auto"), help="what is recomputed")
    options.add_argument("--memory", type=_number, metavar="BYTES", help="memory_per_rank=, as in 80e9")
    options.add_argument("--optimizer", metavar="NAME", help="a class of torch.optim; adamw")
    options.add_argument("--hardware", metavar="NAME_OR_JSON", help="a GPU, or a file of fxpipe.Hardware.measured")
    parser.add_argument("--json", metavar="PATH", help="write the figures")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("show", "verify", "export"), help="show it, read it all, or write safetensors")
    parser.add_argument("path", metavar="PATH", help="the folder of a run, or of one of its checkpoints")
    parser.add_argument("out", nargs="?", metavar="OUT", help="of export: the folder to write model.safetensors into")
    parser.add_argument("--config", metavar="JSON", help="of export: the config.json of from_pretrained, to go along")
    parser.add_argument("--prefix", default="", help="of export: only names that begin with it, and without it")


def _add_graph(parser: argparse.ArgumentParser) -> None:
    graph = parser.add_argument_group("stages")
    graph.add_argument("--edges", type=_edges, metavar="A-B,…", help="the stage graph, as in 0-1,1-4,2-3,3-4")
    graph.add_argument("--stages", type=_whole, metavar="N", help="how many; without --edges they are a chain")
    graph.add_argument("-m", "--microbatches", type=_whole, metavar="N", help=f"how many micro-batches; {MICROBATCHES}")
    graph.add_argument(
        "--placement",
        type=_PLACES,
        metavar="R,…",
        help="the rank of each stage, as in 0,1,0,1, or its ranks, 0+1,0,1",
    )
    graph.add_argument(
        "--gather", type=_gather, metavar="S[:K],…", help="stage S runs once for K micro-batches, or for all of them"
    )
    graph.add_argument(
        "--recompute", type=_INT_LIST, metavar="S,…", help="stages that run their forward again for their backward"
    )
    graph.add_argument("--in-flight", type=_INT_EACH, metavar="N[,…]", help="the most micro-batches a stage may hold")
    graph.add_argument("--memory", type=_COST, metavar="N[,…]", help="the most bytes a rank may hold; needs --bytes")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs of a micro-batch, one number or one per stage (1,2,1)")
    costs.add_argument("--forward", type=_COST, default=1, metavar="T[,…]", help="1")
    costs.add_argument("--backward", type=_COST, default=2, metavar="T[,…]", help="the whole of it; 2")
    costs.add_argument("--weight", type=_COST, metavar="T[,…]", help="the part of backward that W does; half")
    costs.add_argument("--comm", type=_number, default=0, metavar="T", help="the latency of a hop between ranks; 0")
    costs.add_argument("--gather-cost", type=_PAIR, metavar="F,B", help="of a group, at the stages of --gather")
    costs.add_argument("--bytes", type=_COST, metavar="N[,…]", help="what a stage holds of it from forward to backward")
    costs.add_argument(
        "--deferred-bytes", type=_COST, metavar="N[,…]", help="what it holds of it between I and W; --bytes"
    )
    costs.add_argument("--input-bytes", type=_COST, metavar="N[,…]", help="what it keeps of it where it is recomputed")
