"""The export tracer with a cache before it."""

from __future__ import annotations

from fxpipe.graph.plain_data import decode
from fxpipe.graph.program import Program
from fxpipe.progress import tell
from fxpipe.schedules.no_gc import paused
from fxpipe.trace.cached import folder as folders
from fxpipe.trace.cached.not_kept import NotKept
from fxpipe.trace.cached.program_data import encoded, program_of
from fxpipe.trace.cached.rehearsed import RunOnFakes, check_same, rehearse
from fxpipe.trace.export.tracer import export
from fxpipe.trace.request import Request


@paused()
def export_or_cached(request: Request) -> Program:
    """What ``export`` captures, or has captured before: the same nodes by the same names. TraceError as there.

    Kept are captures of one shape, without regions: whatever else there is, is captured anew each time.
    """
    if request.cache is None or request.varying or request.whole:
        return export(request)
    try:
        rehearsal = rehearse(request)
    except NotKept as why:
        return _told_why(export(request), request.cache, why)
    found = _read(request, request.cache, rehearsal)
    return found if found is not None else _kept(export(request), request, request.cache, rehearsal)


def _read(request: Request, folder: str, rehearsal: RunOnFakes) -> Program | None:
    data = folders.read(folder, rehearsal.key)
    if data is None:
        return None
    try:
        return program_of(data, request, rehearsal)
    except Exception as error:  # whatever parts that fit nothing make the graph raise
        folders.unusable(folder, rehearsal.key, error)
        return None


def _kept(program: Program, request: Request, folder: str, rehearsal: RunOnFakes) -> Program:
    """The program as it will be read, so that ranks that read it and those that captured it have the same."""
    try:
        body = encoded(program)
        again = program_of(decode(body, "the capture"), request, rehearsal)
        if (str(again), again.result, encoded(again)) != (str(program), program.result, body):
            raise NotKept("it is not the same when it is read")
        check_same(again, request, rehearsal)
    except Exception as why:  # whatever a graph holds that cannot be read again
        return _told_why(program, folder, why)
    folders.write(folder, rehearsal.key, body)
    return again


def _told_why(program: Program, folder: str, why: Exception) -> Program:
    kind = "" if isinstance(why, NotKept) else f"{type(why).__name__}: "
    tell(f"fxpipe: the capture is not kept in {folder}: {kind}{str(why)[:200]}")
    return program
