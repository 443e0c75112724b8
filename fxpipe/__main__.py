"""``python -m fxpipe``: schedules and topologies on paper, without torch, torchrun or a model."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from tabulate import tabulate

from fxpipe.costs import Costs
from fxpipe.errors import FxpipeError, ScheduleError, TopologyError, nearest
from fxpipe.schedule import Schedule
from fxpipe.schedules import SCHEDULES, build
from fxpipe.show import table
from fxpipe.timeline import Timeline
from fxpipe.topology import Topology

T = TypeVar("T", int, float)
Edges = tuple[tuple[int, int], ...]

_MICROBATCHES = 8
# What is still drawn in some seconds: a slip of the hand must not eat the machine.
_MOST_ACTIONS = 1_000_000
_MOST_RANKS = 1_000_000

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
  python -m fxpipe show zb_h1 --stages 4 --forward 1 --backward 2 --weight 1 --svg zb_h1.svg
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


# --- what the words of a command line mean ---


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


def _edges(text: str) -> Edges:
    """``0-1,1-2``; nothing at all for stages that nothing connects."""
    edges = []
    for part in text.split(",") if text else ():
        source, dash, target = part.strip().partition("-")
        if not (dash and source.isdecimal() and target.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is no edge; write pairs of stage numbers, as in 0-1,1-2")
        edges.append((_whole(source), _whole(target)))
    return tuple(edges)


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
_COST = partial(_one_or_list, one=_number)


class _Graph(NamedTuple):
    """What the options say about the stages."""

    edges: Edges
    stages: int
    placement: tuple[int, ...] | None
    microbatches: int

    @staticmethod
    def of(args: argparse.Namespace) -> _Graph:
        """Without ``--edges`` a chain, of ``--stages`` or of as many as ``--placement`` has."""
        if args.edges is None and args.stages is None and args.placement is None:
            args.parser.error("which stages? write --stages 4 for a chain, or --edges 0-1,1-4,2-3,3-4")
        mentioned = 1 + max((stage for edge in args.edges or () for stage in edge), default=0)
        stages = args.stages if args.stages is not None else max(mentioned, len(args.placement or ()))
        microbatches = _MICROBATCHES if args.microbatches is None else args.microbatches
        actions = 2 * max(stages, mentioned) * microbatches
        if max(actions, stages, mentioned, microbatches, *(args.placement or ())) > _MOST_ACTIONS:
            args.parser.error(f"a table of {actions:,} actions; this command goes up to {_MOST_ACTIONS:,}")
        edges = tuple(itertools.pairwise(range(stages))) if args.edges is None else args.edges
        return _Graph(edges, stages, args.placement, microbatches)


def _costs(args: argparse.Namespace, stages: int) -> Costs:
    return Costs.of(max(stages, 0), args.forward, args.backward, args.weight, args.comm, args.bytes)


def _planned(args: argparse.Namespace, family: str, graph: _Graph) -> Timeline:
    """A family's table for the options' stages, and when its actions run."""
    costs = _costs(args, graph.stages)
    schedule = build(
        family,
        graph.edges,
        graph.microbatches,
        graph.placement,
        graph.stages,
        costs=costs,
        in_flight=args.in_flight,
        memory=args.memory,
    )
    return schedule.simulate(costs)


# --- show ---


def _show(args: argparse.Namespace) -> None:
    if args.communication and args.csv is None:
        args.parser.error("--communication says how to write a file; add --csv PATH")
    if args.what.lower().endswith(".csv"):
        timeline = _read(args)
    else:
        _check_family(args.what)
        timeline = _planned(args, args.what, _Graph.of(args))
    if args.csv is not None:
        timeline.schedule.to_csv(args.csv, communication=args.communication)
    for path, write in ((args.svg, timeline.to_svg), (args.html, timeline.to_html), (args.trace, timeline.to_trace)):
        if path is not None:
            write(path)
    print(table(timeline, full=args.full))


def _read(args: argparse.Namespace) -> Timeline:
    """A file's table, which must verify."""
    shaping = {
        "--stages": args.stages,
        "--placement": args.placement,
        "--microbatches": args.microbatches,
        "--in-flight": args.in_flight,
        "--memory": args.memory,
    }
    for option, value in shaping.items():
        if value is not None:
            args.parser.error(f"{option} is for the families, which make a table; {args.what} has one")
    schedule = Schedule.from_csv(args.what, args.edges)
    schedule.verify()
    return schedule.simulate(_costs(args, len(schedule.placement)))


def _check_family(name: str) -> None:
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}{nearest(name, SCHEDULES)}; the name of a file ends in .csv")


# --- compare ---


def _compare(args: argparse.Namespace) -> None:
    families = tuple(dict.fromkeys(args.families)) or tuple(SCHEDULES)
    for family in families:
        _check_family(family)
    graph = _Graph.of(args)
    rows: list[list[str]] = []
    failed: dict[str, ScheduleError] = {}
    for family in families:
        try:
            rows.append(_figures(family, _planned(args, family, graph)))
        except ScheduleError as error:  # a family that this graph is not for leaves the others standing
            failed[family] = error
    if not rows:
        raise next(iter(failed.values()))
    headers = ["schedule", "makespan", "lower bound", "bubble", "peak in flight", "summed over stages", "peak bytes"]
    shown = headers if args.bytes is not None else headers[:-1]
    print(tabulate(rows, shown, disable_numparse=True, colalign=["left", *["right"] * (len(shown) - 1)]))
    for family, refusal in failed.items():
        print(f"{family}: {str(refusal).splitlines()[0]}")


def _figures(family: str, timeline: Timeline) -> list[str]:
    peaks = timeline.peak_in_flight
    figures = [
        f"{timeline.makespan:g}",
        f"{timeline.lower_bound:g}",
        f"{timeline.bubble:.1%}",
        f"{max(peaks)}",
        f"{sum(peaks)}",
    ]
    if timeline.peak_bytes is not None:
        figures.append(f"{max(timeline.peak_bytes):,.0f}")
    return [family, *figures]


# --- topology ---


def _topology(args: argparse.Namespace) -> None:
    ranks = math.prod(size for _, size in args.axes)
    if ranks > _MOST_RANKS:
        raise TopologyError(f"{ranks:,} ranks; this command prints up to {_MOST_RANKS:,}")
    print(Topology(args.axes, args.ranks_per_node))


# --- the parser ---


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fxpipe",
        description="Pipeline schedules and topologies on paper: no torch, no torchrun, no model.",
        epilog=_OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_show(_command(commands, "show", _show, "print a schedule's table and figures", _SHOW))
    _add_compare(_command(commands, "compare", _compare, "schedules side by side, a line each", _COMPARE))
    _add_topology(_command(commands, "topology", _topology, "print a topology's groups of ranks", _TOPOLOGY))
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], None],
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
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"out of {', '.join(SCHEDULES)}; without: all")
    _add_graph(parser)
    _add_costs(parser)


def _add_topology(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("axes", type=_axes, metavar="AXES", help="names and sizes, outermost first: pipe=2,data=4")
    parser.add_argument(
        "--ranks-per-node", type=_whole, metavar="N", help="how many consecutive ranks reach each other fast; all"
    )


def _add_graph(parser: argparse.ArgumentParser) -> None:
    graph = parser.add_argument_group("stages")
    graph.add_argument("--edges", type=_edges, metavar="A-B,…", help="the stage graph, as in 0-1,1-4,2-3,3-4")
    graph.add_argument("--stages", type=_whole, metavar="N", help="how many; without --edges they are a chain")
    graph.add_argument(
        "-m", "--microbatches", type=_whole, metavar="N", help=f"how many micro-batches; {_MICROBATCHES}"
    )
    graph.add_argument(
        "--placement", type=_INT_LIST, metavar="R,…", help="the rank of each stage, as in 0,1,0,1; a rank for each"
    )
    graph.add_argument("--in-flight", type=_INT_EACH, metavar="N[,…]", help="the most micro-batches a stage may hold")
    graph.add_argument("--memory", type=_COST, metavar="N[,…]", help="the most bytes a rank may hold; needs --bytes")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs of a micro-batch, one number or one per stage (1,2,1)")
    costs.add_argument("--forward", type=_COST, default=1, metavar="T[,…]", help="1")
    costs.add_argument("--backward", type=_COST, default=2, metavar="T[,…]", help="the whole of it; 2")
    costs.add_argument("--weight", type=_COST, metavar="T[,…]", help="the part of backward that W does; half")
    costs.add_argument("--comm", type=_number, default=0, metavar="T", help="the latency of a hop between ranks; 0")
    costs.add_argument("--bytes", type=_COST, metavar="N[,…]", help="what a stage holds of it from forward to backward")


# --- running it ---


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code: 0; 1 where fxpipe refuses or a file fails; 2 for bad usage."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without "×" is no reason to fail
    try:
        try:
            args = _parser().parse_args(arguments)
            args.run(args)
            return 0
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, and not when Python ends, where a closed pipe cannot be caught
    except BrokenPipeError:  # the reader has seen enough
        _forget_output()
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        _forget_output()
        return _told(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error))
    except FxpipeError as error:
        return _told(str(error))


def _told(message: str) -> int:
    print(f"fxpipe: {message}", file=sys.stderr)
    return 1


def _forget_output() -> None:
    """What could not be written must not be tried again when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except AttributeError:
        pass  # no output at all


if __name__ == "__main__":
    sys.exit(main())
