"""Schedules and topologies on paper: no torch, no torchrun, no model. Previews, checkpoints, links.

examples:
  python -m fxpipe show 1f1b --stages 4 -m 8
  python -m fxpipe compare --edges 0-1,1-4,2-3,3-4 --forward 1,2,1,2,1 --backward 2,4,2,4,2
  python -m fxpipe topology pipe=2,tensor=2,data=4 --ranks-per-node 8
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, cast

from tabulate import tabulate

from fxpipe import __version__
from fxpipe.distributed.topology import Topology
from fxpipe.errors import FxpipeError, RunError, ScheduleError, nearest, printable
from fxpipe.schedules import SCHEDULES, ScheduleName, build, placement_for
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import GATHERED
from fxpipe.schedules.families.zero_bubble import folded
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.table import table
from fxpipe.validation import shown

MICROBATCHES = 8


# --- the tables of show and compare ---


def _planned(args: argparse.Namespace, family: str) -> Timeline:
    """The timeline of a family's table for the stages of the options. Without ``--edges`` the stages form a chain, of
    ``--stages`` stages or as many as ``--placement`` has."""
    if args.edges is None and args.stages is None and args.placement is None:
        args.parser.error("which stages? write --stages 4 for a chain, or --edges 0-1,1-4,2-3,3-4")
    if args.ranks is not None and args.placement is not None:
        args.parser.error("--placement says itself how many ranks there are; leave --ranks out")
    # Stages are numbered from 0, so the largest number in the options gives the least number of stages.
    mentioned = 1 + max((stage for edge in args.edges or () for stage in edge), default=0)
    stages = args.stages if args.stages is not None else max(mentioned, len(args.placement or ()))
    for option in ("recompute", "offload"):
        for stage in getattr(args, option) or ():
            if not 0 <= stage < stages:
                args.parser.error(f"--{option} names stage {stage}; they are 0 to {stages - 1}")
    return build(
        cast(ScheduleName, family),
        tuple(itertools.pairwise(range(stages))) if args.edges is None else args.edges,
        MICROBATCHES if args.microbatches is None else args.microbatches,
        args.placement if args.ranks is None else _on_ranks(args, family, stages),
        stages,
        costs=_costs(args, stages),
        in_flight=args.in_flight,
        memory=args.memory,
        gather=args.gather,
        gather_cost=args.gather_cost,
        recompute=args.recompute and [stage in args.recompute for stage in range(stages)],
        offload=args.offload and [stage in args.offload for stage in range(stages)],
    ).planned()


def _on_ranks(args: argparse.Namespace, family: str, stages: int) -> tuple[int, ...]:
    """The rank of each stage: as the family's form has it, or else neighbours together, as many on each rank."""
    if not 0 < args.ranks <= stages:
        args.parser.error(f"--ranks {args.ranks} of {stages} stages; each rank has a stage or more")
    return placement_for(family, stages, args.ranks) or tuple(stage * args.ranks // stages for stage in range(stages))


def _costs(args: argparse.Namespace, stages: int) -> Costs:
    times = args.forward, args.backward, args.weight, args.comm
    return Costs.of(max(stages, 0), *times, args.bytes, args.input_bytes, args.deferred_bytes, args.copy)


# --- show ---


def _show(args: argparse.Namespace) -> None:
    """Print a schedule's table and figures.

    examples:
      python -m fxpipe show 1f1b --edges 0-1,1-4,2-3,3-4 -m 8
      python -m fxpipe show interleaved_1f1b --stages 8 --ranks 4 --comm 0.1
      python -m fxpipe show 1f1b --edges 0-1,1-4,2-3,3-4 -m 16 --gather 4:4 --svg gathered.svg
      python -m fxpipe show 1f1b --stages 4 --csv mine.csv      # then edit it, and
      python -m fxpipe show mine.csv --full
    """
    if args.communication and args.csv is None:
        args.parser.error("--communication says how to write a file; add --csv PATH")
    timeline = _read(args, args.what) if _is_file(args.what) else _planned(args, args.what)
    writers: dict[str, Callable[[str], None]] = {
        "csv": partial(timeline.schedule.to_csv, communication=args.communication),
        "svg": timeline.to_svg,
        "html": timeline.to_html,
        "trace": timeline.to_trace,
    }
    for kind, write in writers.items():
        if (path := getattr(args, kind)) is not None:
            write(path or f"{Path(args.what).stem}.{'json' if kind == 'trace' else kind}")
    print(table(timeline.schedule, lambda: timeline, full=args.full))


def _is_file(what: str) -> bool:
    return what.lower().endswith(".csv")


def _read(args: argparse.Namespace, path: str) -> Timeline:
    """The timeline of a file's table; raises unless the table verifies."""
    for option in "stages ranks placement microbatches in-flight memory gather recompute offload gather-cost".split():
        if getattr(args, option.replace("-", "_")) is not None:
            args.parser.error(f"--{option} is for the families, which make a table; {path} has one")
    schedule = Schedule.from_csv(path, args.edges)
    schedule.verify()
    return schedule.simulate(_costs(args, len(schedule.placement)))


# --- compare ---


def _compare(args: argparse.Namespace) -> None:
    """Schedules side by side, a line each.

    examples:
      python -m fxpipe compare --stages 8 -m 32
      python -m fxpipe compare 1f1b zb_h1 --stages 4 --bytes 2e9
      python -m fxpipe compare 1f1b greedy --edges 0-1,1-4,2-3,3-4 --forward 1,3,1,1,1 --backward 2,6,2,2,2
    """
    families = tuple(dict.fromkeys(args.families)) or tuple(filter(partial(_is_for, args), SCHEDULES))
    # A file has its own stages; a family makes a table for the stages of the options. To list both in one table would
    # compare different graphs.
    files = [path for path in families if _is_file(path)]
    if 0 < len(files) < len(families):
        args.parser.error(f"{files[0]} is a table of its own stages; compare files with files, or families")
    rows: list[list[str]] = []
    failed: dict[str, ScheduleError] = {}
    for family in families:
        try:
            rows.append([family, *_figures(_read(args, family))[1:]] if files else _figures(_planned(args, family)))
        except ScheduleError as error:  # a family may not support this graph; the others are compared
            failed[family] = error
    if not rows:
        raise next(iter(failed.values()))
    headers = ["schedule", "makespan", "lower bound", "bubble", "peak in flight", "summed over stages", "peak bytes"]
    shown = headers if args.bytes is not None else headers[:-1]
    print(printable(tabulate(rows, shown, disable_numparse=True, colalign=["left", *["right"] * (len(shown) - 1)])))
    for family, refusal in failed.items():
        print(f"fxpipe: {family}: {str(refusal).splitlines()[0]}", file=sys.stderr)


def _is_for(args: argparse.Namespace, family: str) -> bool:
    """Whether ``compare`` without names includes a family: some need gathered stages or a folded chain."""
    if family in GATHERED:
        return args.gather is not None
    return family not in ("zb_v", "v_min") or (
        args.edges is None and args.placement == folded(len(args.placement or ()) // 2)
    )


def _figures(timeline: Timeline) -> list[str]:
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
    return [timeline.schedule.name, *figures]


# --- topology ---


def _topology(args: argparse.Namespace) -> None:
    """Print a topology's groups of ranks.

    examples:
      python -m fxpipe topology pipe=2,tensor=2,data=4
      python -m fxpipe topology pipe=4,data=16 --ranks-per-node 8
    """
    print(Topology(args.axes, args.ranks_per_node))


# --- preview ---


def _preview(args: argparse.Namespace) -> None:
    r"""What a model would hold and take on each rank.

    the function makes what is previewed: it returns (model, example_args), (model, example_kwargs) or the model alone;
    make the model under torch.device("meta"), and nothing is allocated. Behind the batch it may return a dict of
    options of fxpipe.preview, which words of this command go ahead of: (model, batch, {"boundaries": {"model.visual":
    {"whole": torch.empty(196, 64, device="meta")}}, "batch_dim": ...}); None for no batch

    examples:
      python -m fxpipe preview train:model_and_batch --pipe 8 --data 8 --boundaries auto
      python -m fxpipe preview train:model_and_batch --pipe 8 --data 8 --ranks-per-node 8 --zero 1 --bf16 \
        --hardware h100
    """
    import fxpipe  # fxpipe.preview needs torch

    model, batch, options = _made_by(args.what)
    axes = [("pipe", args.pipe), *([("data", args.data)] if args.data != 1 else [])]
    topology = Topology(axes, args.ranks_per_node)
    written = {**_options(args), "hardware": _hardware(args.hardware, options.get("hardware"), args.memory)}
    given = {**options, **{name: value for name, value in written.items() if value is not None}}
    if args.rows is not None:
        from fxpipe.choosing import RepeatedExample
        from fxpipe.compiler import PreviewArguments

        batch = RepeatedExample(PreviewArguments(model, topology, **_example(batch), **given)).batch(args.rows)
    preview = fxpipe.preview(model, topology, **_example(batch), **given)
    if args.json is not None:
        preview.to_json(args.json)
    print(preview)


def _choose(args: argparse.Namespace) -> None:
    r"""The best plans of a model on a number of ranks, in order, and the call to paste.

    the function returns (model, batch) or (model, batch, options), as for preview; the rows of its batch are repeated.
    --microbatches, --zero, --recompute and --offload are chosen where they are left out

    examples:
      python -m fxpipe choose train:model_and_batch --ranks 64 --rows 512 --hardware h100 --ranks-per-node 8 --bf16
      python -m fxpipe choose train:model_and_batch --ranks 8 --memory 24G --hardware rtx4090 --zero 0
    """
    import fxpipe  # fxpipe.choose needs torch

    model, batch, options = _made_by(args.what)
    alike = "ranks", "rows", "memory", "ranks_per_node"
    written = {**_options(args), **{name: getattr(args, name) for name in alike}}
    written["hardware"] = _hardware(args.hardware, options.get("hardware"), None)
    given = {**options, **{name: value for name, value in written.items() if value is not None}}
    print(fxpipe.choose(model, **_example(batch), **given))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of preview and choose. None: the command line leaves it out, and the function's own option, or else
    the default, applies."""
    from fxpipe import Precision, Zero

    names = args.boundaries if args.boundaries in (None, "auto") else args.boundaries.split(",")
    is_given = args.zero is not None or args.zero_scope is not None
    return {
        **{name: getattr(args, name) for name in ("microbatches", "schedule", "tracer", "optimizer")},
        "boundaries": names,
        "zero": Zero(args.zero or 0, args.zero_scope or "node") if is_given else None,
        "precision": Precision() if args.bf16 else None,
        "recompute": {"all": True}.get(args.recompute, args.recompute),
        "offload": {"all": True}.get(args.offload, args.offload),
    }


def _example(batch: Any) -> dict[str, Any]:
    return {"example_kwargs" if isinstance(batch, Mapping) else "example_args": batch}


def _hardware(written: str | None, made: Any, memory: float | None) -> Any:
    """``--hardware``, or else the function's own ``hardware``; with ``--memory`` in place of its memory."""
    from fxpipe.hardware import Hardware  # needs torch

    given = Hardware.read(written) if written and written.lower().endswith(".json") else written or made
    return given if memory is None else replace(Hardware.of(given), memory=memory)


def _made_by(what: str) -> tuple[Any, Any, Mapping[str, Any]]:
    """The model, the batch or None, and the options of ``fxpipe.preview``, that ``module:function`` returns."""
    name, colon, function = what.partition(":")
    if not (name and colon and function):
        raise RunError(f"{what!r} is no function; write its module and its name, as in train:model_and_batch")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's module is the user's error and keeps its traceback.
        if error.name is None or not name.startswith(error.name):
            raise
        raise RunError(f"there is no module {error.name!r} in {os.getcwd()} or on Python's path") from None
    make = getattr(module, function, None)
    if not callable(make):
        functions = [other for other, value in vars(module).items() if isinstance(value, types.FunctionType)]
        raise RunError(f"{name} has no function {function!r}{nearest(function, functions)}")
    try:
        value = make()
    except OSError as error:  # the user's error must not look like an error of an option's file
        raise RunError(f"{what} failed: {type(error).__name__}: {error}") from error
    model, batch, options = (*value, None, None)[:3] if isinstance(value, tuple) else (value, None, None)
    if not isinstance(batch, (tuple, list, Mapping, NoneType)) or not isinstance(options, (Mapping, NoneType)):
        raise RunError(
            f"{what} returned {shown(value)}; return (model, (x, y)), (model, {{'x': x}}), the model alone, or options "
            "of fxpipe.preview behind the batch: (model, batch, {'boundaries': ...})"
        )
    return model, batch, options or {}


# --- checkpoint ---


def _checkpoint(args: argparse.Namespace) -> None:
    """Show, verify or export what is saved.

    examples:
      python -m fxpipe checkpoint show run
      python -m fxpipe checkpoint show run/step-000812
      python -m fxpipe checkpoint verify run
      python -m fxpipe checkpoint export run exported --config config.json
    """
    from fxpipe.checkpoint.files import commands  # needs torch

    path = Path(args.path)
    if (args.what == "export") != (args.out is not None):
        args.parser.error("write checkpoint export PATH OUT, with the folder to write into; the others take PATH alone")
    if args.what == "export":
        text = commands.export(path, Path(args.out), None if args.config is None else Path(args.config), args.prefix)
    else:
        text = {"show": commands.show, "verify": commands.verify}[args.what](path)
    print(printable(text))


# --- bisect ---


def _bisect(args: argparse.Namespace) -> None:
    """The first number in which two recorded runs differ.

    examples:
      python -m fxpipe bisect runs/a runs/b
      python -m fxpipe bisect runs/plain runs/pipeline --rtol 1e-5
    """
    from fxpipe.numerics.comparison import bisect  # needs torch

    print(printable(str(bisect(args.first, args.second, rtol=args.rtol))))


# --- doctor ---


def _doctor(args: argparse.Namespace) -> None:
    """Measure links, devices and a small pipeline where it is started.

    at most two minutes; a part that fails names itself, and the others go on. A bug report should hold what this prints

    examples:
      torchrun --nproc-per-node 8 -m fxpipe doctor --json doctor.json
      python -m fxpipe preview train:model_and_batch --pipe 8 --hardware doctor.json
    """
    from fxpipe.doctor import Doctor  # needs torch

    Doctor(args.pipe, args.ranks_per_node).check_up(args.json)


# --- types of options: argparse names these functions when they raise a ValueError, "invalid edges value" ---


def whole_numbers(text: str) -> tuple[int, ...]:
    """``1,2,1``"""
    return tuple(map(int, text.split(",")))


def limits(text: str) -> int | tuple[int, ...] | str:
    """``1``: the same for all; ``1,2,1``: one for each; ``2x``."""
    return text if text == "2x" else whole_numbers(text) if "," in text else int(text)


def costs(text: str) -> float | tuple[float, ...]:
    """``1``: the same for all; ``1,2,1``: one for each."""
    return tuple(map(float, text.split(","))) if "," in text else float(text)


def size(text: str) -> float:
    """``80e9``, ``80G`` and ``80GB``: 80 · 10^9 bytes; ``75GiB``: 75 · 2^30 bytes."""
    number = text.rstrip("KMGTiB")
    unit = text[len(number) :]
    if unit and unit not in _SIZES:
        raise ValueError(text)  # argparse names the option
    return float(number) * _SIZES.get(unit, 1.0)


_SIZES = {
    **{f"{unit}{end}": 1000.0**power for power, unit in enumerate("KMGT", 1) for end in ("", "B")},
    **{f"{unit}iB": 1024.0**power for power, unit in enumerate("KMGT", 1)},
}


def placement(text: str) -> tuple[int | tuple[int, ...], ...]:
    """``0,1,0+1``: the third stage is on two ranks."""
    places = [tuple(map(int, part.split("+"))) for part in text.split(",")]
    return tuple(ranks if len(ranks) > 1 else ranks[0] for ranks in places)


def edges(text: str) -> tuple[tuple[int, int], ...]:
    """``0-1,1-2``; an empty text for stages without edges."""
    pairs = [part.split("-") for part in text.split(",")] if text else []
    return tuple((int(source), int(target)) for source, target in pairs)


def groups(text: str) -> dict[int, int | None]:
    """``4``: stage 4 runs once for all micro-batches; ``4:8``: stage 4 runs for 8 micro-batches at a time."""
    parts = (part.partition(":") for part in text.split(","))
    return {int(stage): int(size) if colon else None for stage, colon, size in parts}


def axes(text: str) -> tuple[tuple[str, int], ...]:
    """``pipe=2,data=4``, outermost first."""
    parts = [part.split("=") for part in text.split(",")]
    try:
        return tuple((name.strip(), int(size)) for name, size in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} has no names and sizes; write pipe=2,data=4") from None


# --- the parser ---


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments. An error prints the usage of the command; an unknown option is named with the nearest."""
    whole, commands = _parser()
    command = commands.get(words[0]) if words else None
    if command is None:
        return whole.parse_args(words)
    options = re.findall(r"--[a-z0-9-]+", command.format_help())
    for word in itertools.takewhile(lambda word: word != "--", words[1:]):
        option = word.partition("=")[0]
        if option.startswith("--") and option not in options:  # first: argparse first says which others are missing
            hint = nearest(option, options)
            command.error(f"unknown option {option}{hint if 'did you mean' in hint else ''}")
    return command.parse_args(words[1:])


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parsers of the command line and of its commands. Arguments have ``run``, the function of the command.

    The help is in docstrings, of this module and of the commands' functions: a summary, then examples. Python has none
    of it under ``-OO``.
    """
    summary, _, examples = (__doc__ or "").partition("\n\n")
    whole = argparse.ArgumentParser(
        prog="python -m fxpipe",
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"fxpipe {__version__}")
    whole.set_defaults(run=lambda args: whole.print_help())
    commands = whole.add_subparsers(metavar="COMMAND")
    for name, run, add_arguments in (
        ("show", _show, _add_show),
        ("compare", _compare, _add_compare),
        ("topology", _topology, _add_topology),
        ("preview", _preview, _add_preview),
        ("choose", _choose, _add_choose),
        ("checkpoint", _checkpoint, _add_checkpoint),
        ("bisect", _bisect, _add_bisect),
        ("doctor", _doctor, _add_doctor),
    ):
        summary, _, examples = inspect.cleandoc(run.__doc__ or "").partition("\n\n")
        command = commands.add_parser(
            name,
            help=summary[:1].lower() + summary[1:].rstrip("."),
            description=summary,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(run=run, parser=command)
        add_arguments(command)
    return whole, commands.choices


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="FAMILY_OR_CSV", help=f"{', '.join(SCHEDULES)}; or a file, *.csv")
    _add_graph(parser)
    _add_costs(parser)
    add = parser.add_argument_group("output").add_argument
    add("--full", action="store_true", help="the whole table, however wide it is")
    add("--communication", action="store_true", help="with --csv: sends and receives, too")
    for option, what in (
        ("--csv", "the table, in torch.distributed.pipelining's cells"),
        ("--svg", "a picture to scale"),
        ("--html", "the picture as a page"),
        ("--trace", "a trace for Perfetto or chrome://tracing"),
    ):
        add(option, nargs="?", const="", metavar="PATH", help=f"write {what}; without PATH, under the family's name")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("families", nargs="*", metavar="FAMILY_OR_CSV", help=f"{', '.join(SCHEDULES)}; or files, *.csv; all that fit")
    _add_graph(parser)
    _add_costs(parser)


def _add_topology(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("axes", type=axes, metavar="AXES", help="names and sizes, outermost first: pipe=2,data=4")
    add("--ranks-per-node", type=int, metavar="N", help="how many consecutive ranks reach each other fast; all")


def _add_preview(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MODULE:FUNCTION", help="what makes the model and one batch")
    add = parser.add_argument_group("ranks, the pipeline outermost, and rows").add_argument
    add("--pipe", type=int, required=True, metavar="N", help="ranks of a pipeline")
    add("--data", type=int, default=1, metavar="N", help="replicas; 1")
    _add_nodes_and_rows(add)
    _add_options(parser)
    parser.add_argument("--json", metavar="PATH", help="write the figures")


def _add_choose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MODULE:FUNCTION", help="what makes the model and a batch, of any rows")
    add = parser.add_argument_group("ranks and rows").add_argument
    add("--ranks", type=int, required=True, metavar="N", help="how many")
    _add_nodes_and_rows(add)
    _add_options(parser)


def _add_nodes_and_rows(add: Callable[..., argparse.Action]) -> None:
    add("--ranks-per-node", type=int, metavar="N", help="how many reach each other fast; all")
    add("--rows", type=int, metavar="N", help="rows of a batch, over all replicas; as many as the function's batch")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("options of fxpipe.compile").add_argument
    add("--boundaries", metavar="NAME,…", help='submodules that are cut before, or "auto"')
    add("-m", "--microbatches", type=int, metavar="N", help="4 for each rank of a pipeline")
    add("--schedule", metavar="FAMILY", help=f"{', '.join(SCHEDULES)}; 1f1b")
    add("--tracer", metavar="NAME", help="auto, symbolic, export or record; auto")
    add("--zero", type=int, metavar="N", help="0 to 3; 0")
    add("--zero-scope", metavar="WHERE", help="node or data; node")
    add("--bf16", action="store_true", help="precision=fxpipe.Precision()")
    add("--recompute", choices=("all", "layers", "auto"), help="what is recomputed")
    add("--offload", choices=("all", "auto"), help="what waits in the host's memory")
    add("--memory", type=size, metavar="BYTES", help="the limit of a rank, 80e9, 80G or 75GiB; that of --hardware")
    add("--optimizer", metavar="NAME", help="a class of torch.optim; adamw")
    add("--hardware", metavar="NAME_OR_JSON", help="a GPU, or a file of fxpipe.Hardware.measured")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("show", "verify", "export"), help="show it, read it all, or write safetensors")
    parser.add_argument("path", metavar="PATH", help="the folder of a run, or of one of its checkpoints")
    parser.add_argument("out", nargs="?", metavar="OUT", help="of export: the folder to write model.safetensors into")
    parser.add_argument("--config", metavar="JSON", help="of export: the config.json of from_pretrained, to go along")
    parser.add_argument("--prefix", default="", help="of export: only names that begin with it, and without it")


def _add_bisect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="FOLDER", help="a folder of forward_backward.record_values or record_plain")
    parser.add_argument("second", metavar="FOLDER", help="that of the run to compare")
    parser.add_argument("--rtol", type=float, default=0.0, metavar="R", help="differences up to R are close; 0")


def _add_graph(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("stages").add_argument
    add("--edges", type=edges, metavar="A-B,…", help="the stage graph, as in 0-1,1-4,2-3,3-4")
    add("--stages", type=int, metavar="N", help="how many; without --edges they are a chain")
    add("-m", "--microbatches", type=int, metavar="N", help=f"how many micro-batches; {MICROBATCHES}")
    add("--ranks", type=int, metavar="N", help="how many; as many as stages")
    add("--placement", type=placement, metavar="R,…", help="each stage's rank, as in 0,1,0,1, or its ranks, 0+1,0,1")
    add("--gather", type=groups, metavar="S[:K],…", help="stage S runs once for K micro-batches, or for all of them")
    add("--recompute", type=whole_numbers, metavar="S,…", help="stages that run their forward again for their backward")
    add("--offload", type=whole_numbers, metavar="S,…", help="stages whose activations may wait in the host's memory")
    add("--in-flight", type=limits, metavar="N[,…]", help="the most micro-batches of a stage, or 2x: twice as many")
    add("--memory", type=costs, metavar="N[,…]", help="the most bytes a rank may hold; needs --bytes")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("costs of a micro-batch, one number or one per stage (1,2,1)").add_argument
    add("--forward", type=costs, default=1, metavar="T[,…]", help="1")
    add("--backward", type=costs, default=2, metavar="T[,…]", help="the whole of it; 2")
    add("--weight", type=costs, metavar="T[,…]", help="the part of backward that W does; half")
    add("--comm", type=float, default=0, metavar="T", help="what a message between two ranks takes; 0")
    add("--copy", type=costs, metavar="T[,…]", help="a copy of its activations to the host, and back; as long as F")
    add("--gather-cost", type=costs, metavar="F,B", help="of a group, at the stages of --gather")
    add("--bytes", type=costs, metavar="N[,…]", help="what a stage holds of it from forward to backward")
    add("--deferred-bytes", type=costs, metavar="N[,…]", help="what it holds of it between I and W; --bytes")
    add("--input-bytes", type=costs, metavar="N[,…]", help="what it keeps of it where it is recomputed")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pipe", type=int, metavar="N", help="ranks of a pipeline, the others being replicas; as many as 8")
    add("--ranks-per-node", type=int, metavar="N", help="how many reach each other fast; those of a host")
    add("--json", metavar="PATH", help="write all ranks' figures; --hardware of preview takes the file")


# --- running it ---


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code: 0; 1 for an error of fxpipe or of a file; 2 for bad usage."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without "×" must not raise
    try:
        try:
            args = _parsed(sys.argv[1:] if arguments is None else arguments)
            args.run(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # now: at Python's exit, an error of a closed pipe cannot be caught
    except BrokenPipeError:  # the reader has closed the pipe
        _forget_output()
    except KeyboardInterrupt:
        return 130
    except FxpipeError as error:
        print(f"fxpipe: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        _forget_output()
        what = f"{error.filename}: {error.strerror}" if error.filename is not None else error
        print(f"fxpipe: {what}", file=sys.stderr)
        return 1
    return 0


def _forget_output() -> None:
    """Redirects stdout to the null device if a flush fails, so that Python does not write the rest again at exit."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
