"""torch.export: the graph that it records, and the functions that it puts into the graph; the same in 2.13 to 2.15."""

# ruff: noqa: F401  (other files take what is imported here)

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.amp.autocast_mode import _enter_autocast as enter_autocast  # export puts these into a graph
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, get_proxy_mode, get_proxy_slot

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""The function that export puts into a graph for ``torch.no_grad()``."""


def import_dynamo() -> None:
    """Imports TorchDynamo, and makes its table of functions that it handles itself, which it would make at its first
    compilation. Both store functions of torch, so this has to run before any of them is patched."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._dynamo.variables.torch").TorchInGraphFunctionVariable._get_handlers()


@contextlib.contextmanager
def module_calls_ended() -> Iterator[None]:
    """A context around module calls in an export: after a BaseException, removes the calls inside the context from
    export's stack. Otherwise export would consider the module that raised as still running."""
    mode = get_proxy_mode()
    # Export pops a module only if the module's call returns or raises an Exception.
    running: dict[Any, Any] = {} if mode is None else mode.tracer.module_stack
    before = len(running)
    try:
        yield
    finally:
        while len(running) > before:
            running.popitem()


def traced_graph() -> fx.Graph | None:
    """The graph that torch.export is making; None outside of its trace."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def node_of(value: Any) -> Any:
    """The node of torch.export's graph that computes a tensor; None for a value that export does not record."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(value, mode.tracer, None) if mode is not None and isinstance(value, Tensor) else None
    return None if slot is None else slot.proxy.node


def mode_passes() -> Iterator[tuple[Any, str]]:
    """Export's two passes that move a region of another grad or autocast mode into a subgraph: (module, function)."""
    for name in ("replace_set_grad_with_hop_pass", "replace_autocast_with_hop_pass"):
        yield importlib.import_module(f"torch._export.passes.{name}"), name
