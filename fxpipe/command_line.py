"""Arguments: what the words of ``python -m fxpipe`` mean. The commands themselves are in ``__main__``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from fxpipe.schedules import SCHEDULES

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


# --- words: argparse names these functions where one raises a ValueError, "invalid edges value" ---


def whole_numbers(text: str) -> tuple[int, ...]:
    """``1,2,1``"""
    return tuple(map(int, text.split(",")))


def limits(text: str) -> int | tuple[int, ...]:
    """``1``: the same for all; ``1,2,1``: one for each."""
    return whole_numbers(text) if "," in text else int(text)


def costs(text: str) -> float | tuple[float, ...]:
    """``1``: the same for all; ``1,2,1``: one for each."""
    return tuple(map(float, text.split(","))) if "," in text else float(text)


def placement(text: str) -> tuple[int | tuple[int, ...], ...]:
    """``0,1,0+1``: the third stage is on two ranks."""
    places = [tuple(map(int, part.split("+"))) for part in text.split(",")]
    return tuple(ranks if len(ranks) > 1 else ranks[0] for ranks in places)


def edges(text: str) -> tuple[tuple[int, int], ...]:
    """``0-1,1-2``; nothing at all for stages that nothing connects."""
    pairs = [part.split("-") for part in text.split(",")] if text else []
    return tuple((int(source), int(target)) for source, target in pairs)


def groups(text: str) -> dict[int, int | None]:
    """``4``: stage 4 once for all micro-batches; ``4:8``: for 8 of them at a time."""
    parts = (part.partition(":") for part in text.split(","))
    return {int(stage): int(size) if colon else None for stage, colon, size in parts}


def axes(text: str) -> tuple[tuple[str, int], ...]:
    """``pipe=2,data=4``, outermost first."""
    parts = [part.split("=") for part in text.split(",")]
    return tuple((name.strip(), int(size)) for name, size in parts)


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
    parser.add_argument("axes", type=axes, metavar="AXES", help="names and sizes, outermost first: pipe=2,data=4")
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="how many consecutive ranks reach each other fast; all"
    )


def _add_preview(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MODULE:FUNCTION", help="what makes the model and one batch, of all rows")
    grid = parser.add_argument_group("ranks, the pipeline outermost")
    grid.add_argument("--pipe", type=int, required=True, metavar="N", help="ranks of a pipeline")
    grid.add_argument("--data", type=int, default=1, metavar="N", help="replicas; 1")
    grid.add_argument("--ranks-per-node", type=int, metavar="N", help="how many reach each other fast; all")
    options = parser.add_argument_group("options of fxpipe.compile")
    options.add_argument("--boundaries", metavar="NAME,…", help='submodules that are cut before, or "auto"')
    options.add_argument("-m", "--microbatches", type=int, metavar="N", help="4 for each rank of a pipeline")
    options.add_argument("--schedule", metavar="FAMILY", help=f"{', '.join(SCHEDULES)}; 1f1b")
    options.add_argument("--tracer", metavar="NAME", help="auto, symbolic, export or record; auto")
    options.add_argument("--zero", type=int, metavar="N", help="0 to 3; 0")
    options.add_argument("--zero-scope", metavar="WHERE", help="node or data; node")
    options.add_argument("--bf16", action="store_true", help="precision=fxpipe.Precision()")
    options.add_argument("--recompute", choices=("all", "auto"), help="what is recomputed")
    options.add_argument("--memory", type=float, metavar="BYTES", help="memory_per_rank=, as in 80e9")
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
    graph.add_argument("--edges", type=edges, metavar="A-B,…", help="the stage graph, as in 0-1,1-4,2-3,3-4")
    graph.add_argument("--stages", type=int, metavar="N", help="how many; without --edges they are a chain")
    graph.add_argument("-m", "--microbatches", type=int, metavar="N", help=f"how many micro-batches; {MICROBATCHES}")
    graph.add_argument(
        "--placement",
        type=placement,
        metavar="R,…",
        help="the rank of each stage, as in 0,1,0,1, or its ranks, 0+1,0,1",
    )
    graph.add_argument(
        "--gather", type=groups, metavar="S[:K],…", help="stage S runs once for K micro-batches, or for all of them"
    )
    graph.add_argument(
        "--recompute", type=whole_numbers, metavar="S,…", help="stages that run their forward again for their backward"
    )
    graph.add_argument("--in-flight", type=limits, metavar="N[,…]", help="the most micro-batches a stage may hold")
    graph.add_argument("--memory", type=costs, metavar="N[,…]", help="the most bytes a rank may hold; needs --bytes")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs of a micro-batch, one number or one per stage (1,2,1)")
    group.add_argument("--forward", type=costs, default=1, metavar="T[,…]", help="1")
    group.add_argument("--backward", type=costs, default=2, metavar="T[,…]", help="the whole of it; 2")
    group.add_argument("--weight", type=costs, metavar="T[,…]", help="the part of backward that W does; half")
    group.add_argument("--comm", type=float, default=0, metavar="T", help="the latency of a hop between ranks; 0")
    group.add_argument("--gather-cost", type=costs, metavar="F,B", help="of a group, at the stages of --gather")
    group.add_argument("--bytes", type=costs, metavar="N[,…]", help="what a stage holds of it from forward to backward")
    group.add_argument(
        "--deferred-bytes", type=costs, metavar="N[,…]", help="what it holds of it between I and W; --bytes"
    )
    group.add_argument("--input-bytes", type=costs, metavar="N[,…]", help="what it keeps of it where it is recomputed")
