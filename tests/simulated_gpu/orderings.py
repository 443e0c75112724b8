"""Orderings: what orders streams in fxpipe, one by one, and which scenario notices where it is not there.

What orders threads of the host alone, or is but a part of a call that nothing works without, has no row.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import fxpipe

ROOT = Path(fxpipe.__file__).parent
RACE, LIFETIME = r"\d race ", r"\d lifetime "
NOT_FINITE, OTHER = "the loss of step 0 is nan", "is off by"


class Ordering(NamedTuple):
    """``before`` stands once in the file; ``after`` is it without the ordering. ``noticed``: a regular expression for
    what the scenario of that name, of ``SCENARIOS``, says then."""

    file: str
    before: str
    after: str
    scenario: str
    noticed: str = RACE


@contextlib.contextmanager
def removed(ordering: Ordering) -> Iterator[None]:
    """Takes the ordering out of the one function that it stands in, in this process, and puts it back."""
    path, (name, before, after, *_) = ROOT / ordering.file, ordering
    source = path.read_text()
    assert source.count(before) == 1, f"{name} has {before!r} {source.count(before)} times"
    old, new = (_functions(compile(text, path, "exec")) for text in (source, source.replace(before, after)))
    [changed] = [each for each in old if old[each] != new[each]]
    module = importlib.import_module(f"fxpipe.{name.removesuffix('.py').replace('/', '.')}")
    found = reduce(getattr, changed.split("."), module)
    function: Any = inspect.unwrap(getattr(found, "fget", found))  # that of a property
    assert function.__code__ == old[changed]
    function.__code__ = new[changed]
    try:
        yield
    finally:
        function.__code__ = old[changed]


def _functions(code: CodeType) -> dict[str, CodeType]:
    """The code of a module's functions and methods, by qualified name."""
    found: dict[str, CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= {inner.co_qualname: inner} if inner.co_flags & inspect.CO_OPTIMIZED else _functions(inner)
    return found


_TABLE: Mapping[str, Sequence[tuple[str, ...]]] = {
    "device.py": [
        ("event.synchronize()", "pass", "pipe", NOT_FINITE),
        ("torch.accelerator.current_stream(device).", "torch.Stream(device).", "pipe", NOT_FINITE),
    ],
    "distributed/collective.py": [
        ("torch.accelerator.current_stream().record_event(), None", "torch.Stream().record_event(), None", "zero 0"),
        ("stream.wait_event(before)", "pass", "zero 1, two nodes"),
        ("before = stream.record_event()", "pass", "zero 1, two nodes"),
        ("torch.accelerator.current_stream().wait_event(end)", "pass", "zero 0"),
        ("self._wait, before, failure, steps", "self._wait, before, failure, ()", "zero 1", LIFETIME),
    ],
    "distributed/torch_transport.py": [
        (
            "mine, sent, strict=True)]:\n            work.wait()",
            "mine, sent, strict=True)]:\n            pass",
            "pipe",
            LIFETIME,
        ),
        ("else:\n                    work.wait()", "else:\n                    pass", "zero 0"),
        ("if not on_host:\n            work.wait()", "if not on_host:\n            pass", "zero 0"),
    ],
    "distributed/traffic.py": [("result = self._work.wait()", "result = None", "zero 0")],
    "stage/awaiting.py": [
        ("_wait(self._waits, self._waits if unknown else map(id, value.parameters()))", "pass", "zero 1"),
        ("_wait(self._waits, [id(value)])", "pass", "zero 1"),
    ],
    "parameters/ownership.py": [
        ('"a parameter for the state dict").wait()', '"a parameter for the state dict")', "zero 3")
    ],
    "batch/group_inputs.py": [('"what a stage gathers").wait()', '"what a stage gathers")', "gathered")],
    "run/exchange.py": [
        (
            "self._header = self._header, None\n        work.wait()",
            "self._header = self._header, None\n        pass",
            "pipe",
        ),
        ("pop(self, ()):\n            work.wait()", "pop(self, ()):\n            pass", "pipe", LIFETIME),
        ("for work, _ in works:\n            work.wait()", "for work, _ in works:\n            pass", "pipe"),
        ("wire.release()", "pass", "pipe", LIFETIME),
    ],
    "run/forward_backward.py": [("self._reducer.settle()\n        return", "pass\n        return", "zero 1")],
    "run/step/step_outcome.py": [('[summed], "the losses").wait()', '[summed], "the losses")', "zero 2, spread")],
    "sharding/distributed_optimizer.py": [
        ("torch.accelerator.current_stream(moving[0]).synchronize()", "pass", "pipe, offload", OTHER),
        ("self._store.settle()\n        # 2", "pass\n        # 2", "zero 1, two updates"),
    ],
    "sharding/flat_bucket.py": [
        ("self._works.pop(0).wait()", "self._works.pop(0)", "zero 2, four micro-batches", LIFETIME),
        (
            "for work in self._works:\n                work.wait()",
            "for work in self._works:\n                pass",
            "pipe, tied",
        ),
        ("self.gathering.wait()", "pass", "zero 1"),
    ],
    "sharding/fsdp.py": [("fsdp_end_backward(root)", "pass", "fully_shard")],
    "sharding/fully_sharded.py": [
        ("self._all_gather.wait()", "pass", "zero 3"),
        ("if self.waits:\n            self.wait()", "if self.waits:\n            pass", "zero 3"),
        ("self.work.wait()", "pass", "zero 3"),
        ("fsdp_end_backward(self.shell)", "pass", "zero 3"),
    ],
    "sharding/reducer.py": [
        (
            "bucket.wait()\n                bucket.start_across()",
            "pass\n                bucket.start_across()",
            "zero 2, spread",
        ),
        ("bucket.wait()\n            bucket.scale", "pass\n            bucket.scale", "zero 0"),
        (
            "in self._live:\n                bucket.wait()",
            "in self._live:\n                pass",
            "zero 0, sums of two calls",
        ),
        ("bucket.settle()", "pass", "zero 1"),
        ("bucket.settle)\n            for bucket", "lambda: None)\n            for bucket", "zero 1"),
    ],
}
ORDERINGS = [Ordering(file, *row) for file, rows in _TABLE.items() for row in rows]
