"""Modules: the tables of an ``nn.Module``, classes of torch.nn that have no public name, and compiled modules.

The names are the same in 2.13 to 2.15.
"""

# ruff: noqa: F401  (other files take what is imported here)

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_calls
from torch.nn.modules._functions import BackwardHookFunction  # of modules with backward hooks
from torch.optim import optimizer as optimizers

MODULE_TABLES = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks", "_forward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks"),
)
HOOK_TABLES = [name for name in MODULE_TABLES if name.endswith("_hooks")]
RECURRENT_CACHES = ("_flat_weights", "_flat_weight_refs")
"""Caches of torch.nn's recurrent layers, which the layers rebuild when they do not fit."""
DROPOUTS: type[nn.Module] = nn.modules.dropout._DropoutNd
BATCH_STATISTICS: type[nn.Module] = nn.modules.batchnorm._NormBase
BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
SPECTRAL_NORM: type[nn.Module] = nn.utils.parametrizations._SpectralNorm


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has made or changed the module."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """While the context is open, modules and functions that ``torch.compile`` has compiled run their Python."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; the import would take a second
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def compiled_parts(model: nn.Module) -> list[str]:
    """The paths of submodules, and of functions in modules' attributes, that ``torch.compile`` has compiled."""
    paths: list[str] = []
    for path, part in model.named_modules():
        if is_compiled(part):
            paths.append(path)
        else:
            functions = {name: value for name, value in vars(part).items() if isinstance(value, types.FunctionType)}
            compiled = [name for name, value in functions.items() if "_torchdynamo_orig_callable" in vars(value)]
            paths += [f"{path}.{name}".strip(".") for name in compiled]
    return paths


def hook_tables(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """The hook tables that ``nn.Module.__call__`` checks before it calls only ``forward``; always the same objects."""
    own = [vars(module)[name] for name in HOOK_TABLES]
    before, behind = module_calls._global_forward_pre_hooks, module_calls._global_forward_hooks
    return *own, before, behind, module_calls._global_backward_pre_hooks, module_calls._global_backward_hooks


def undone_by_hooks(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict after the hooks that the modules' ``load_state_dict`` calls first."""
    undone = dict(state)
    for path, module in model.named_modules(remove_duplicate=False):
        for hook in vars(module)["_load_state_dict_pre_hooks"].values():
            hook(undone, f"{path}." if path else "", {}, True, [], [], [])
    return undone


@contextlib.contextmanager
def without_step_hooks() -> Iterator[None]:
    """Within, no step of an optimizer runs the hooks that torch keeps for the steps of all optimizers."""
    tables: tuple[dict[int, Any], ...] = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, own in zip(tables, hooks, strict=True):
            table.update(own)
