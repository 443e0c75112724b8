"""Labels: names a step's actions, as in the table, in a profile of ``torch.profiler``; only while a profile is made."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from fxpipe.torch_compat.autograd import profiler_runs

_NOTHING = nullcontext()


def label(what: str) -> AbstractContextManager[object]:
    """A profiler region named ``fxpipe what``; while no profile is made, a context that does nothing."""
    return record_function(f"fxpipe {what}") if profiler_runs() else _NOTHING
