"""``python -m fxpipe``: schedules and topologies on paper, without torch or torchrun; previews, and checkpoints."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, cast

from tabulate import tabulate

from fxpipe.command_line import MICROBATCHES, parser
from fxpipe.distributed.topology import Topology
from fxpipe.errors import FxpipeError, RunError, ScheduleError, nearest
from fxpipe.schedules import SCHEDULES, ScheduleName, build
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import GATHERED
from fxpipe.schedules.families.zb_v import folded
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.table import table
from fxpipe.validation import shown


def _planned(args: argparse.Namespace, family: str) -> Timeline:
    """A family's table for the options' stages, and when its actions run. Without ``--edges`` a chain, of ``--stages``
    or of as many as ``--placement`` has."""
    if args.edges is None and args.stages is None and args.placement is None:
        args.parser.error("which stages? write --stages 4 for a chain, or --edges 0-1,1-4,2-3,3-4")
    mentioned = 1 + max((stage for edge in args.edges or () for stage in edge), default=0)
    stages = args.stages if args.stages is not None else max(mentioned, len(args.placement or ()))
    for stage in args.recompute or ():
        if not 0 <= stage < stages:
            args.parser.error(f"--recompute names stage {stage}; they are 0 to {stages - 1}")
    return build(
        cast(ScheduleName, family),
        tuple(itertools.pairwise(range(stages))) if args.edges is None else args.edges,
        MICROBATCHES if args.microbatches is None else args.microbatches,
        args.placement,
        stages,
        costs=_costs(args, stages),
        in_flight=args.in_flight,
        memory=args.memory,
        gather=args.gather,
        gather_cost=args.gather_cost,
        recompute=args.recompute and [stage in args.recompute for stage in range(stages)],
    ).planned()


def _costs(args: argparse.Namespace, stages: int) -> Costs:
    times = args.forward, args.backward, args.weight, args.comm
    return Costs.of(max(stages, 0), *times, args.bytes, args.input_bytes, args.deferred_bytes)


# --- show ---


def _show(args: argparse.Namespace) -> None:
    if args.communication and args.csv is None:
        args.parser.error("--communication says how to write a file; add --csv PATH")
    timeline = _read(args, args.what) if _is_file(args.what) else _planned(args, args.what)
    if args.csv is not None:
        timeline.schedule.to_csv(args.csv, communication=args.communication)
    for path, write in ((args.svg, timeline.to_svg), (args.html, timeline.to_html), (args.trace, timeline.to_trace)):
        if path is not None:
            write(path)
    print(table(timeline, full=args.full))


def _is_file(what: str) -> bool:
    return what.lower().endswith(".csv")


def _read(args: argparse.Namespace, path: str) -> Timeline:
    """A file's table, which must verify."""
    for option in ("stages", "placement", "microbatches", "in-flight", "memory", "gather", "recompute", "gather-cost"):
        if getattr(args, option.replace("-", "_")) is not None:
            args.parser.error(f"--{option} is for the families, which make a table; {path} has one")
    schedule = Schedule.from_csv(path, args.edges)
    schedule.verify()
    return schedule.simulate(_costs(args, len(schedule.placement)))


# --- compare ---


def _compare(args: argparse.Namespace) -> None:
    families = tuple(dict.fromkeys(args.families)) or tuple(filter(partial(_is_for, args), SCHEDULES))
    files = [path for path in families if _is_file(path)]
    if 0 < len(files) < len(families):
        args.parser.error(f"{files[0]} is a table of its own stages; compare files with files, or families")
    rows: list[list[str]] = []
    failed: dict[str, ScheduleError] = {}
    for family in families:
        try:
            rows.append([family, *_figures(_read(args, family))[1:]] if files else _figures(_planned(args, family)))
        except ScheduleError as error:  # a family that this graph is not for leaves the others standing
            failed[family] = error
    if not rows:
        raise next(iter(failed.values()))
    headers = ["schedule", "makespan", "lower bound", "bubble", "peak in flight", "summed over stages", "peak bytes"]
    shown = headers if args.bytes is not None else headers[:-1]
    print(tabulate(rows, shown, disable_numparse=True, colalign=["left", *["right"] * (len(shown) - 1)]))
    for family, refusal in failed.items():
        print(f"fxpipe: {family}: {str(refusal).splitlines()[0]}", file=sys.stderr)


def _is_for(args: argparse.Namespace, family: str) -> bool:
    """Whether a family is compared without being asked for: some are for gathered stages or a folded chain alone."""
    if family in GATHERED:
        return args.gather is not None
    return family != "zb_v" or (args.edges is None and args.placement == folded(len(args.placement or ()) // 2))


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
    print(Topology(args.axes, args.ranks_per_node))


# --- preview ---


def _preview(args: argparse.Namespace) -> None:
    import fxpipe  # whose preview needs torch

    model, batch, options = _made_by(args.what)
    hardware = args.hardware
    axes = [("pipe", args.pipe), *([("data", args.data)] if args.data != 1 else [])]
    names = args.boundaries if args.boundaries in (None, "auto") else args.boundaries.split(",")
    names_alike = "microbatches", "schedule", "tracer", "zero", "zero_scope", "optimizer"
    written = {
        **{name: getattr(args, name) for name in names_alike},
        "boundaries": names,
        "precision": fxpipe.Precision() if args.bf16 else None,
        "recompute": {"all": True}.get(args.recompute, args.recompute),
        "memory_per_rank": args.memory,
        "hardware": fxpipe.Hardware.read(hardware) if (hardware or "").lower().endswith(".json") else hardware,
    }
    preview = fxpipe.preview(
        model,
        Topology(axes, args.ranks_per_node),
        example_args=batch if isinstance(batch, (tuple, list)) else None,
        example_kwargs=batch if isinstance(batch, Mapping) else None,
        **{**options, **{name: value for name, value in written.items() if value is not None}},
    )
    if args.json is not None:
        preview.to_json(args.json)
    print(preview)


def _made_by(what: str) -> tuple[Any, Any, Mapping[str, Any]]:
    """The model, the batch or None, and the options of ``fxpipe.preview``, that ``module:function`` returns."""
    name, colon, function = what.partition(":")
    if not (name and colon and function):
        raise RunError(f"{what!r} is no function; write its module and its name, as in train:model_and_batch")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise RunError(f"there is no module {error.name!r} in {os.getcwd()} or on Python's path") from None
    made = getattr(module, function, None)
    if not callable(made):
        raise RunError(f"{name} has no function {function!r}{nearest(function, vars(module))}")
    try:
        found = made()
    except OSError as error:  # what is the user's is not reported as if it were an option's file
        raise RunError(f"{what} failed: {type(error).__name__}: {error}") from error
    model, batch, options = (*found, None, None)[:3] if isinstance(found, tuple) else (found, None, None)
    if not isinstance(batch, (tuple, list, Mapping, NoneType)) or not isinstance(options, (Mapping, NoneType)):
        raise RunError(
            f"{what} returned {shown(found)}; return (model, (x, y)), (model, {{'x': x}}), the model alone, or options "
            "of fxpipe.preview behind the batch: (model, batch, {'boundaries': ...})"
        )
    return model, batch, options or {}


# --- checkpoint ---


def _checkpoint(args: argparse.Namespace) -> None:
    from fxpipe.parameters.checkpoint import commands  # which needs torch

    path = Path(args.path)
    if (args.what == "export") != (args.out is not None):
        args.parser.error("write checkpoint export PATH OUT, with the folder to write into; the others take PATH alone")
    if args.what == "export":
        print(commands.export(path, Path(args.out), None if args.config is None else Path(args.config), args.prefix))
    else:
        print({"show": commands.show, "verify": commands.verify}[args.what](path))


# --- running it ---


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code: 0; 1 where fxpipe refuses or a file fails; 2 for bad usage."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without "×" is no reason to fail
    try:
        try:
            args = parser(_show, _compare, _topology, _preview, _checkpoint).parse_args(arguments)
            args.run(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, and not when Python ends, where a closed pipe cannot be caught
    except BrokenPipeError:  # the reader has seen enough
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
    """What could not be written must not be tried again when Python ends."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
