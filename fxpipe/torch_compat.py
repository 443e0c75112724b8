"""Torch compat: wraps torch's private names, and names that differ between torch 2.12 and 2.15.

No other file uses private names of torch, except the tables of an ``nn.Module`` (``MODULE_TABLES``), which torch cannot
rename, since pickled modules contain the names. A new torch version has to be compared with this file alone. Unless a
comment says otherwise, a name is the same in all four versions and has no public replacement. The names are looked up
before anything imports them (``PRIVATE``), so that an ImportError lists all that a new torch lacks.
"""

# ruff: noqa: E402, F401  (other files take what is imported here)

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import inspect
import operator
import os
import pkgutil
import re
import socket
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch
import torch.distributed as dist

from fxpipe.device import shared_name, with_shared_names
from fxpipe.small_file import Budget

TESTED = "2.12", "2.13", "2.14", "2.15"
"""The versions of torch that ``.ci/versions`` runs the tests with."""
PRIVATE = {
    "torch": "_assert _assert_async _foreach_norm Tensor._backward_hooks Tensor._base "
    "Tensor._make_wrapper_subclass Tensor._post_accumulate_grad_hooks Tensor._version UntypedStorage._cdata "
    "nn.Module._compiled_call_impl "
    "nn.modules.batchnorm._BatchNorm nn.modules.batchnorm._NormBase nn.modules.dropout._DropoutNd "
    "nn.utils.parametrizations._SpectralNorm autograd.Variable._execution_engine.run_backward "
    "autograd.profiler._is_profiler_enabled distributions.Distribution._validate_args ops.aten._assert_async.msg "
    "ops.aten._assert_scalar.default ops.aten._assert_tensor_metadata.default ops.aten._local_scalar_dense.default "
    "ops.aten._make_dual.default ops.aten._to_copy.default ops.aten._unpack_dual.default ops.aten.add.Tensor._schema",
    "torch._C": "DisableTorchFunction PyTorchFileReader _disabled_torch_function_impl _get_mkldnn_enabled "
    "_functorch.is_functorch_wrapped_tensor _len_torch_function_stack _set_grad_enabled _set_mkldnn_enabled "
    "_storage_Use_Count",
    "torch._functorch.apis": "vmap_impl",
    "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket",
    "torch._subclasses.fake_tensor": "DataDependentOutputException DynamicOutputShapeException FakeTensor "
    "FakeTensorMode UnsupportedFakeTensorException UnsupportedOperatorException",
    "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
    "torch.distributed.distributed_c10d": "_get_default_store _get_split_source _process_group_name "
    "_resolve_process_group",
    "torch.fx.experimental._config": "backed_size_oblivious patch",
    "torch.fx.experimental.proxy_tensor": "PythonKeyTracer get_proxy_mode get_proxy_slot",
    "torch.nn.modules.module": "_global_backward_pre_hooks _global_backward_hooks _global_forward_hooks "
    "_global_forward_pre_hooks",
    "torch.nn.modules._functions": "BackwardHookFunction",
    "torch.utils.checkpoint": "_checkpoint_without_reentrant_generator_impl|_checkpoint_without_reentrant_generator",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch.utils._pytree": "GetAttrKey MappingKey SUPPORTED_NODES SequenceKey TreeSpec keystr register_pytree_node "
    "tree_flatten tree_flatten_with_path tree_is_leaf tree_leaves tree_map tree_map_only tree_structure tree_unflatten",
    # Imported at their first use, as this takes a second; if the version is not TESTED, they are looked up at once.
    "torch._dynamo.backends.common": "aot_autograd",
    "torch._dynamo.source": "LocalSource",
    "torch._export.passes.replace_autocast_with_hop_pass": "replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass": "replace_set_grad_with_hop_pass",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.fsdp": "fully_shard.state",
    "torch.distributed.tensor.debug": "_clear_sharding_prop_cache",
    "torch.fx.experimental.symbolic_shapes": "GuardOnDataDependentSymNode SYMPY_INTERP ShapeEnv.evaluate_expr "
    "ShapeEnv.produce_guards SymT.SIZE make_symbol statically_known_true",
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
}
"""Module → the private or undocumented names in it that fxpipe uses; ``a|b``: of one of two versions of torch."""


def lacking(modules: Iterable[str]) -> list[str]:
    """The names of ``PRIVATE`` in these modules that the installed torch does not have; imports the modules."""
    names = [(module, name) for module in modules for name in PRIVATE[module].split()]
    return [
        f"{module}.{name}" for module, name in names if not any(_is_there(module, choice) for choice in name.split("|"))
    ]


def _is_there(module: str, name: str) -> bool:
    try:
        pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError):
        return False
    return True


IS_TESTED = ".".join(torch.__version__.split(".")[:2]) in TESTED
if _gone := lacking([module for module in PRIVATE if not IS_TESTED or module in sys.modules]):
    raise ImportError(
        f"torch {torch.__version__} no longer has {', '.join(_gone)}, which fxpipe uses; "
        f"install torch {TESTED[0]} to {TESTED[-1]}, or a newer fxpipe"
    )

from torch import Tensor, fx, nn
from torch._functorch import apis as vmap_home  # torch.vmap calls its vmap_impl
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # of torch.ops.aten.add.Tensor, .add
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.amp.autocast_mode import _enter_autocast as enter_autocast  # export puts these into a graph
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.autograd.graph import GradientEdge
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, get_proxy_mode, get_proxy_slot  # export's
from torch.nn.modules import module as module_calls
from torch.nn.modules._functions import BackwardHookFunction  # of modules with backward hooks
from torch.utils import _pytree as pytree  # trees of containers; documented, but private
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

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

# --- tensors and operators

aten = torch.ops.aten

TO_COPY = aten._to_copy.default
"""The operator that ``.to()`` runs."""

ZERO = aten.zero_.default
DUAL_NUMBERS = (aten._make_dual.default, aten._unpack_dual.default)
"""Operators of a level of forward-mode differentiation. Export of 2.12 records no level; later versions refuse."""

NUMBER_READ: Any = torch.ops.aten._local_scalar_dense.default
"""The operator by which Python reads a tensor's number: ``item``, ``float``, ``bool``."""
FOREACH_NORM: Any = torch._foreach_norm
"""The norm of each tensor of a list; ``torch.nn.utils.get_total_norm`` calls this function."""


def given_to_total_norm(caller: types.FrameType | None) -> int:
    """The number of tensors passed to ``torch.nn.utils.get_total_norm``, if it is among the callers; otherwise 0."""
    for _ in range(_BETWEEN):
        if caller is None:
            return 0
        if caller.f_code is _TOTAL_NORM:
            return len(caller.f_locals["tensors"])
        caller = caller.f_back
    return 0


_TOTAL_NORM, _BETWEEN = inspect.unwrap(torch.nn.utils.get_total_norm).__code__, 8
"""The most frames between: a list comprehension's before Python 3.12, and those of modes, such as a default device."""


plain_results: Any = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` for subclasses: results computed from the subclass are plain tensors."""


def recast(tensor: Tensor, kind: type[Tensor]) -> Tensor:
    """The tensor, in the same memory, as an instance of ``kind``; a DTensor as a subclass of ``kind`` and DTensor."""
    spec, shard = (getattr(tensor, name, None) for name in ("_spec", "_local_tensor"))
    return tensor.as_subclass(kind) if spec is None else _spread(kind)(shard, spec, requires_grad=False)


@functools.cache
def _spread(kind: type[Tensor]) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor if kind is Tensor else type(kind.__name__, (kind, DTensor), {})


def wrapper(
    cls: type[Tensor],
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
) -> Any:
    """A tensor of a subclass, without memory; the subclass's ``__torch_dispatch__`` runs the tensor's operators."""
    return Tensor._make_wrapper_subclass(cls, tuple(size), strides, dtype=dtype, device=device)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def one_level(value: Any, *leaves: type) -> tuple[list[Any], pytree.TreeSpec]:
    """Flattens only the outermost container. Instances of ``leaves`` are leaves."""
    # torch leaves is_leaf in a reference cycle, which would keep a value alive; a number keeps nothing alive
    outermost = id(value)
    return pytree.tree_flatten(value, lambda node: id(node) != outermost or isinstance(node, leaves))


def storage_id(tensor: Tensor) -> int:
    """The id of a tensor's storage, equal for tensors that share memory, also on the meta device."""
    return id_of_storage(tensor.untyped_storage())


id_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
"""The tensor that a view is of; None of another tensor."""
saved_version: Callable[[Tensor], int] = operator.attrgetter("_version")
"""``version_of`` a tensor that autograd saves, which is no inference tensor."""


def version_of(tensor: Tensor) -> int:
    """The number of in-place writes to a tensor; 0 for inference tensors, which do not count writes."""
    return 0 if tensor.is_inference() else tensor._version


def block_mask_rows(value: object) -> int | None:
    """The number of rows of a ``BlockMask`` of flex_attention; None for other values."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # without this import no BlockMask exists
    return int(value.kv_num_blocks.shape[0]) if flex is not None and isinstance(value, flex.BlockMask) else None


def block_mask_part(mask: Any, start: int, size: int) -> Any:
    """Rows ``start`` to ``start + size`` of a ``BlockMask``; a slice of a BlockMask itself drops ``mask_mod``."""
    part, mask_mod = mask[start : start + size], mask.mask_mod
    part.mask_mod = lambda b, h, q, kv: mask_mod(b + start, h, q, kv)
    return part


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


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks on its gradient; hooks after accumulation into ``.grad`` do not count."""
    return bool(tensor._backward_hooks)


@contextlib.contextmanager
def gradients_through(hooks: Iterable[tuple[Tensor, Callable[[Tensor], Tensor]]]) -> Iterator[None]:
    """While this context is open, each hook replaces the gradient of its tensor."""
    tables: list[Any] = [
        (tensor, tensor._backward_hooks, tensor.register_hook(hook))  # type: ignore[no-untyped-call]
        for tensor, hook in hooks
    ]
    try:
        yield
    finally:
        for tensor, before, handle in tables:
            handle.remove()
            tensor._backward_hooks = before  # for an empty table autograd would call Python in each backward


def hook_tables(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """The hook tables that ``nn.Module.__call__`` checks before it calls only ``forward``; always the same objects."""
    own = [vars(module)[name] for name in HOOK_TABLES]
    before, behind = module_calls._global_forward_pre_hooks, module_calls._global_forward_hooks
    return *own, before, behind, module_calls._global_backward_pre_hooks, module_calls._global_backward_hooks


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(tensor: Tensor) -> list[Callable[..., Any]]:
    """The hooks on a tensor's gradient, and those after its accumulation into ``.grad``."""
    return [hook for table in _HOOKS for hook in (getattr(tensor, table) or {}).values()]


def share_hooks(source: Tensor, target: Tensor) -> None:
    """Has ``target`` call the hooks of ``source``, those that are registered or removed later, too."""
    for table in _HOOKS:
        if getattr(source, table) is None:
            setattr(source, table, OrderedDict())
        setattr(target, table, getattr(source, table))


def holders_of(tensor: Tensor) -> tuple[object, object]:
    """Counts C++'s references to a tensor, and those to its memory. Counts of a torch without them equal no others."""
    count = getattr(tensor, "_use_count", object)
    return count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def undone_by_hooks(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict after the hooks that the modules' ``load_state_dict`` calls first."""
    undone = dict(state)
    for path, module in model.named_modules(remove_duplicate=False):
        for hook in vars(module)["_load_state_dict_pre_hooks"].values():
            hook(undone, f"{path}." if path else "", {}, True, [], [], [])
    return undone


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor on the CPU; ``.numpy()`` would need NumPy and run an operator under modes."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def schema_of(operator: Any) -> Any:
    """The schema of an operator's overload, which marks written arguments; None for a higher-order operator."""
    return getattr(operator, "_schema", None)


# --- captures

no_function_modes: Callable[[], Any] = torch._C.DisableTorchFunction
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""The function that export puts into a graph for ``torch.no_grad()``."""

ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_async.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
"""Operators that only check values."""
CHECKS = (torch._assert, torch._assert_async)
"""Functions of users' code that only check values."""
DISTRIBUTION_CHECKS = torch.distributions.Distribution, "_validate_args"
"""The attribute in which ``set_default_validate_args`` stores whether distributions check their arguments' values."""

fake_home: Any = importlib.import_module("torch._subclasses")
"""The module from which other libraries take the class ``FakeTensor``, to ask whether they are traced."""
CAPTURE_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
CHECKPOINT_GENERATOR = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",  # 2.14 and later, which do not call the other
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(checkpointing, name)
)
"""The generator that ``torch.utils.checkpoint.checkpoint`` runs around its function with ``use_reentrant=False``."""


def checkpoint_options(generator: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of ``checkpoint`` among the arguments of its generator: 2.14 has an option more than 2.13."""
    bound = inspect.signature(generator).bind(*args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in ("fn", "args", "kwargs")}


def function_apply() -> Callable[..., Any]:
    """``torch.autograd.Function.apply`` with the class as its first argument; since 2.14 apply has no ``__func__``."""
    apply = vars(torch.autograd.Function)["apply"]
    return getattr(apply, "__func__", apply)  # type: ignore[no-any-return]


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without the check for ``torch.func`` and ``torch.vmap``, for calls outside of these."""
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return, misc]


def run_backward(roots: Sequence[GradientEdge], seeds: Sequence[Tensor | None]) -> None:
    """Runs ``torch.autograd.backward``. If no seed is None, calls the engine directly, without the checks in Python:
    the engine compares types and shapes itself."""
    # For a missing seed torch makes a seed of ones, and checks that the root is a scalar.
    for seed in seeds:
        if seed is None:
            torch.autograd.backward(roots, seeds)
            return
    if roots:
        _run_engine(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)


_run_engine = torch.autograd.Variable._execution_engine.run_backward


def profiler_runs() -> bool:
    """Whether torch.profiler or a profiler of torch.autograd records now."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


is_functorch: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is a wrapper of ``torch.vmap`` or another transform of torch.func."""


def import_dynamo() -> None:
    """Imports TorchDynamo, which stores torch's functions at its import; has to run before any of them is patched."""
    importlib.import_module("torch._dynamo")


def aot_compiled(
    module: Any,
    inputs: Sequence[Any],
    forward: Callable[[Any, Sequence[Any]], Callable[..., Any]],
    backward: Callable[[Any, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A graph of TorchDynamo, compiled by AOTAutograd; ``forward`` and ``backward`` compile its two graphs.

    Both get a graph and inputs like the graph's own. Imports here, since the modules import TorchDynamo.
    """
    functorch: Any = importlib.import_module("functorch.compile")
    backends: Any = importlib.import_module("torch._dynamo.backends.common")

    def boxed(make: Callable[[Any, Sequence[Any]], Callable[..., Any]]) -> Callable[..., Any]:
        return lambda graph, like: functorch.make_boxed_func(make(graph, like))

    backend = backends.aot_autograd(
        fw_compiler=boxed(forward),
        bw_compiler=boxed(backward),
        partition_fn=functorch.min_cut_rematerialization_partition,
    )
    return backend(module, inputs)  # type: ignore[no-any-return]


def guard_on_data() -> type[Exception]:
    """The error that export raises if forward branches on a value. Imported here, since the module imports sympy."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


def hint_of(size: Any) -> Any:
    """The value of a symbolic number at capture; None if only a run determines it. Returns other values unchanged."""
    node = getattr(size, "node", None)
    if node is None:
        return size
    if node.has_hint():
        return node.hint
    return int(node.expr) if node.expr.is_Integer else None  # the expression may have become a constant


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


def _node_of(value: Any) -> Any:
    """The node of torch.export's graph that computes a tensor; None for a value that export does not record."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(value, mode.tracer, None) if mode is not None and isinstance(value, Tensor) else None
    return None if slot is None else slot.proxy.node


def computation_of(value: Tensor, digests: dict[Any, str], passing: Any) -> str:
    """A digest of the graph that computes a tensor in torch.export, equal for equal graphs; "" for unknown graphs.

    ``digests``: node → digest, of one export. ``passing``: an operator that returns its arguments. The digest counts
    earlier in-place writes to integer and boolean tensors, after which the same operators may give other values.
    """
    mode, last = get_proxy_mode(), _node_of(value)
    if mode is None or last is None:
        return ""
    # A node's digest is computed from its operator and its arguments' digests, so equal graphs have equal digests.
    writes = 0
    for node in last.graph.nodes:
        if node in digests:
            pass
        elif node.op == "get_attr":
            constant = getattr(getattr(mode.tracer, "root", None), str(node.target))
            with no_dispatch_modes():
                digests[node] = f"{constant.dtype} {constant.tolist()}" if isinstance(constant, Tensor) else node.name
        elif node.target is operator.getitem and node.args[0].target is passing:
            digests[node] = digests[node.args[0].args[0][node.args[1]]]
        else:
            shape = getattr(node.meta.get("val"), "shape", "")
            target = f"{node.name} {shape}" if node.op == "placeholder" else str(node.target)
            told = fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: digests.get(leaf, str(leaf)))
            text = with_shared_names(str(told))
            digests[node] = hashlib.blake2b(f"{target} {text}".encode(), digest_size=8).hexdigest()
        schema = getattr(node.target, "_schema", None)
        fake = node.meta.get("val")
        writes += schema is not None and schema.is_mutable and isinstance(fake, Tensor) and not fake.is_floating_point()
    return f"{digests[last]} {writes}"


def is_unbacked(number: Any) -> bool:
    """Whether a symbolic number is a tensor's value, or computed from such values, and so is not known at capture."""
    return hint_of(number) is None and bool(number.node.expr.free_symbols)


def known_truth(truth: Any) -> bool | None:
    """A symbolic truth value as the ranges of its symbols decide: no size is negative. None if only values decide."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(truth):
        return True
    return False if statically_known_true(torch.sym_not(truth)) else None  # type: ignore[no-untyped-call]


def fix_size(size: Any, number: int) -> None:
    """Makes export take a size that depends on a value for ``number``."""
    size.node.shape_env.size_like.discard(size.node.expr)  # export assumes that a size_like symbol is not 0 or 1
    torch._check(size == number)  # type: ignore[no-untyped-call]


def size_guards(values: Sequence[Tensor]) -> list[str]:
    """The guards of a capture on the symbolic sizes of its inputs, ``values``, as Python expressions.

    The expressions call ``size()``, ``stride()`` and ``storage_offset()`` of ``L['t0']`` and so on: see ``holds_for``.
    """
    from torch._dynamo.source import LocalSource

    sizes: Iterator[Any] = (size for value in values for size in value.shape if isinstance(size, torch.SymInt))
    shape_env = next(sizes).node.shape_env
    sources = [LocalSource(f"t{index}") for index in range(len(values))]
    # produce_guards_expression would join the guards by "and", without parentheses around a guard with "or"
    guards: list[str] = shape_env.produce_guards(list(values), sources, ignore_static=False)
    return guards


def holds_for(expression: str | types.CodeType, tensors: Mapping[str, Any]) -> bool:
    """Whether a guard, or a part of a guard, holds for ``tensors``; False for a guard that divides by a size of 0."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    try:
        return bool(eval(expression, SYMPY_INTERP, {"L": tensors}))
    except ZeroDivisionError:
        return False


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Disables oneDNN, as ``torch.backends.mkldnn.flags(enabled=False)``, which would warn of TF32 on every call."""
    before: bool = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def sizes_like_any() -> Iterator[None]:
    """While the context is open, symbolic sizes may be 0 or 1 like any other number, unless a guard distinguishes them.
    torch would still assume positive sizes, and would simplify ``max(size, 1)`` to the size without a guard."""
    symbolic_shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    make = symbolic_shapes.make_symbol

    def symbol(prefix: Any, number: int, **assumptions: Any) -> Any:
        is_size = prefix is symbolic_shapes.SymT.SIZE and assumptions.pop("positive", None)
        return make(prefix, number, **assumptions, **({"nonnegative": True} if is_size else {}))

    # torch looks up this function by its name in the module, at each call.
    symbolic_shapes.make_symbol = symbol
    try:
        with fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            yield
    finally:
        symbolic_shapes.make_symbol = make


def size_decisions() -> tuple[type, str]:
    """The class and the name of the method that evaluates a condition on a symbolic size and records a guard. Instances
    have ``guards`` and ``replacements``, symbol → expression. Imported here, since the module imports sympy."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv, "evaluate_expr"


def mode_passes() -> Iterator[tuple[Any, str]]:
    """Export's two passes that move a region of another grad or autocast mode into a subgraph: (module, function)."""
    for name in ("replace_set_grad_with_hop_pass", "replace_autocast_with_hop_pass"):
        yield importlib.import_module(f"torch._export.passes.{name}"), name


# --- processes

# 2.12 has only the older name, which 2.13 deprecates.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


default_store: Callable[[], dist.distributed_c10d.Store] = dist.distributed_c10d._get_default_store
"""Returns the store of the default process group."""


def connection_of(store: Any) -> socket.socket | None:
    """A duplicate of a TCPStore client's socket, for the caller to close; its ``shutdown`` ends a call that waits for
    the store. None for another kind of store."""
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    match = re.search(r"client=TCPClient\(SocketImpl\(fd=(\d+)", repr(store))  # torch shows the fd nowhere else
    return socket.socket(fileno=os.dup(int(match[1]))) if match is not None else None


def groups_of_call(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[dist.ProcessGroup]:
    """The process groups that a call of an operator communicates over; empty unless the operator is a collective."""
    if getattr(operator, "namespace", "") not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return []
    home: Any = dist.distributed_c10d
    declared = schema_of(operator).arguments
    # A collective takes its group as an object or by name; the schema shows in which argument.
    arguments = {**dict(zip((argument.name for argument in declared), args, strict=False)), **kwargs}
    groups = []
    for argument in declared:
        if str(argument.type).endswith("c10d.ProcessGroup"):
            groups.append(dist.ProcessGroup.unbox(arguments[argument.name]))
        elif argument.name == "group_name":
            groups.append(home._resolve_process_group(arguments[argument.name]))
    return groups


def group_of_members(ranks: Sequence[int], name: str, **options: Any) -> dist.ProcessGroup:
    """Makes a process group by calls of its members alone; ``name``: unique among groups, and equal on all members.

    ``new_group(use_local_synchronization=True)`` takes no name. It names a group by the process's number of groups,
    which differs by process; and on NCCL it would split a communicator of all ranks, so that all ranks must call it.
    transformers' LLaVA needs such a group if only one replica gets a batch without images: that replica then has a link
    between two ranks that the other replicas never have.
    """
    home: Any = dist.distributed_c10d
    # While new_group runs, torch takes the name and the source of a split from these functions.
    own = home._process_group_name, home._get_split_source
    home._process_group_name, home._get_split_source = lambda *args, **kwargs: name, lambda group: None
    try:
        created: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, **options)
        return created
    finally:
        home._process_group_name, home._get_split_source = own


@contextlib.contextmanager
def ranks_without_processes(count: int) -> Iterator[None]:
    """In this context, torch.distributed runs as rank 0 of ``count`` ranks, whose collectives move nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor would take these groups for those of equal meshes in a later world.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


# --- checkpoints: the content of torch's ``.metadata`` file

METADATA_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "MetadataIndex StorageMeta".split()
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""(module, name) of the classes whose instances are pickled in ``.metadata`` with their attributes."""
METADATA_FUNCTIONS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}
"""(module, name) of the functions that the pickle calls with a single argument."""


def checked_zip(file: IO[bytes]) -> IO[bytes]:
    """Returns a ``torch.save`` file, at its start. ValueError if its unpacked records have more bytes than the file."""
    file.seek(0, 2)
    budget = Budget(file.tell(), "bytes")
    file.seek(0)
    reader = torch._C.PyTorchFileReader(file)
    # torch 2.12 cannot report the sizes, so that they count as 0.
    budget.spend(sum(map(getattr(reader, "get_record_size", lambda name: 0), reader.get_all_records())))
    file.seek(0)
    return file


def storage_info(file: str, offset: int, length: int) -> Any:
    """The file, offset and length in bytes of a part of a tensor. Imports torch.distributed.checkpoint at the call."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


# --- FSDP2: torch.distributed.pipelining calls the same functions


def fsdp_state(module: Any) -> Any:
    """The FSDP state of a module; modules that were sharded together share a state."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]


def fsdp_set_up(module: Any) -> None:
    """Runs FSDP2's lazy initialisation, which otherwise runs at a module's first forward."""
    fsdp_state(module)._lazy_init()


def fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups, each gathered and reduced together; each has ``fsdp_params`` and ``post_backward()``."""
    return list(fsdp_state(module)._fsdp_param_groups)


@contextlib.contextmanager
def fsdp_without_hooks(shards: Sequence[Any]) -> Iterator[None]:
    """Keeps FSDP2 from calling hooks after accumulation on the shards: the unsharded parameters have called them."""
    tables = [shard._post_accumulate_grad_hooks for shard in shards]
    for shard in shards:
        shard._post_accumulate_grad_hooks = None
    try:
        yield
    finally:
        for shard, table in zip(shards, tables, strict=True):
            shard._post_accumulate_grad_hooks = table


def fsdp_end_backward(root: Any) -> None:
    """Runs a root's callback after the last backward; afterwards the shards have their gradients."""
    state = fsdp_state(root)
    if hasattr(state._state_ctx, "manual_backward_finalization_active"):  # 2.15: set by hooks that ran
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def fsdp_forget(root: Any) -> None:
    """Frees unsharded parameters after a forward without a backward: ``root.reset_iter_state()``, which 2.12 lacks."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = fsdp_state(root)
    idle = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common").TrainingState.IDLE
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    for part in state._state_ctx.all_states:
        part._modules_to_run_forward.clear()
        for each in (part, *part._fsdp_param_groups):
            each._training_state = idle
        for group in part._fsdp_param_groups:
            group._post_forward_indices.clear()
            group._to_sharded()


def default_device() -> str:
    """The name of ``torch.get_default_device()``, with a fast path: a default other than CPU is a function mode."""
    return shared_name(torch.get_default_device()) if torch._C._len_torch_function_stack() else "cpu"


def is_constant(value: Any) -> bool:
    """Whether a value in torch.export depends on no inputs, parameters or random numbers, and so is always the same."""
    last = _node_of(value)
    # Walks back through the nodes that the value is computed from, until a node may change.
    waiting, seen = [] if last is None else [last], set()
    while waiting:
        node = waiting.pop()
        tags = getattr(node.target, "tags", ())
        if node.op in ("placeholder", "get_attr") or torch.Tag.nondeterministic_seeded in tags:
            return False
        seen.add(node)
        waiting += [before for before in node.all_input_nodes if before not in seen]
    return last is not None


def computed(function: Callable[[Tensor], Any], value: Tensor) -> Any:
    """What a function such as ``bool`` returns for a constant in torch.export, which is computed; None for another
    tensor, and if the graph has written into a tensor so far."""
    last = _node_of(value)
    if not is_constant(value) or any(getattr(schema_of(node.target), "is_mutable", False) for node in last.graph.nodes):
        return None

    @functools.cache
    def run(node: Any) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), run)
        return node.target(*args, **kwargs)

    with no_function_modes(), no_dispatch_modes():
        return function(run(last))
