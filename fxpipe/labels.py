"""Labels: what a step does, by the table's own names, in a profile of ``torch.profiler``; only while one is made."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from fxpipe.torch_compat import profiler_runs

_NOTHING = nullcontext()


def label(what: str) -> AbstractContextManager[object]:
    """A region ``fxpipe what`` of the profile, where one is made."""
    return record_function(f"fxpipe {what}") if profiler_runs() else _NOTHING
