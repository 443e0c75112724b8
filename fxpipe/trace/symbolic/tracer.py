"""The symbolic tracer: torch.fx with torch.nn modules as leaves. It needs no example batch.

Takes: a ``Request`` without shapes. Gives: a ``Program`` that is valid for any sizes, with one node for each call of a
torch.nn module, of a torch function or of a tensor's method.

1. Each input becomes a proxy, or a container of fixed values and proxies.
2. The tracer calls the model. Operations on proxies become nodes; calls of torch.nn modules, opaque regions and
   boundaries become one node each.
3. Before each node, ``_SymbolicGuard`` checks that nothing has happened that no node records: random draws, changes of
   autocast.
4. Real tensors that forward uses become constants, parameters or buffers of the program.

For example ``self.up(x).relu() + 1`` becomes::

    %up : call_module[target=up](args = (%x,))
    %relu : call_method[target=relu](args = (%up,))
    %add : call_function[target=operator.add](args = (%relu, 1))

It does not know sizes, values or classes of tensors, so code that branches on them is refused. All code that torch.fx
would silently record wrong is refused at the user's line: a number drawn once, a write that would happen once,
autocast, an ``autograd.Function``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.fx.proxy import TraceError as FxTraceError

from fxpipe.errors import FxpipeError, TraceError
from fxpipe.graph.boundary import Gather, boundary, recording, words
from fxpipe.graph.program import IN_PLACE_NAMES, Effects, Program
from fxpipe.graph.stage_graph import first_names
from fxpipe.patches import Replacement
from fxpipe.snapshots.snapshot import storage_of
from fxpipe.specs import ObjectSpec
from fxpipe.stage.modes import Modes, ambient_autocast, within
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.export import import_dynamo
from fxpipe.torch_compat.operators import TorchDispatchMode, schema_of
from fxpipe.torch_compat.tensors import tensors_in, version_of
from fxpipe.trace.attributes import CaptureGuard
from fxpipe.trace.cuts.cutting import check_boundaries, crossing, cutting
from fxpipe.trace.opaque.region_calls import RegionCall, Regions
from fxpipe.trace.patching import BACKWARD, DRAWN, UNREGISTERED, backward_hooks, refuse, refuse_backward
from fxpipe.trace.request import Request
from fxpipe.user_line import calls_isinstance, current_line, line_of


def symbolic(request: Request) -> Program:
    """Captures the model by calling forward on proxies.

    Args:
        request: its example and shapes are not used, except for containers with fixed values and for strings.

    Raises:
        TraceError: where proxies fail, or where a proxy would be wrong; with the user's line.
    """
    # the steps happen inside of trace(): see create_args_for_root, create_node, call_module and create_arg
    tracer = _Tracer(request)
    try:
        with (
            within(request.autocast),
            tracer.guard.tracing(_recorded_factories(tracer)),
            recording(tracer.record_boundary),
            tracer.regions.as_nodes(),
            cutting(request.module, request.cuts, request.may_lack_cuts),
        ):
            graph = tracer.trace(request.module)
            check_boundaries(tracer.graph, tracer.boundaries)
    except FxpipeError:
        raise
    except Exception as error:
        raise TraceError(_explain(error)) from error
    return Program(
        request.module,
        graph,
        constants=tracer.constants,
        tracer="symbolic",
        holds_for_any_size=True,
        opaque=tracer.regions.opaque,
        sets=tracer.guard.own.taken,
        computed_with=tracer.guard.computed_with(),
        effects=tracer.effects,
    )


def _explain(error: Exception) -> str:
    """The reason of an error inside forward, in words, with the user's line: an ordinary exception is often due to a
    proxy."""
    line = line_of(error)
    at = f"\n{line}" if line else ""
    if isinstance(error, FxTraceError) and "control flow" in str(error):
        return (
            "forward branches on the value of a tensor (or on a size), which a symbolic trace cannot follow; "
            f"use torch.where, or move the branch out of the model{at}"
        )
    return f"the symbolic tracer cannot follow the model: {error}{at}"


class _Proxy(fx.Proxy):
    """A value of the traced program. It records ``x += y`` and ``x[i] = y`` as in-place writes."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class that ``isinstance`` in user code sees: a model tensor's own; TraceError for any other value."""
        if not calls_isinstance():
            return type(self)
        node = vars(self).get("node")
        if node is None or "class" not in node.meta:  # not a tensor of the model
            raise refuse(
                "forward asks for the class of a value, as isinstance does, which a symbolic trace does not know",
                "give an example batch (example_args=), so that another tracer can answer, or leave the question out",
            )
        return node.meta["class"]

    def __hash__(self) -> int:
        # ``value in {1, 2}`` would silently be false, and ``table.get(value)`` the default
        raise refuse(
            "forward looks a value up in a set or a dict, and a symbolic trace does not know the value",
            "give an example batch (example_args=), so that another tracer can answer, or move it out of the model",
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer", "root", "attr", "_node"):
            raise refuse(f"forward sets .{name} of a tensor, which is not recorded", "write into it in place")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("_is_param", "_is_buffer"):  # isinstance(x, nn.Parameter) reads these
            raise AttributeError(name)
        if "node" in vars(self) and name in self.node.meta.get("absent", ()):
            return None  # an input object lacks this attribute: a proxy cannot answer ``is None``
        return _Attribute(self, name)


class _Attribute(_Proxy, fx.proxy.Attribute):
    """An attribute of a proxy: the value of ``x.T`` or ``x.data``, or a method such as ``x.add_`` before its call.

    The first use creates its node, in the grad mode in which forward read the attribute.
    """

    def __init__(self, root: fx.Proxy, attr: str) -> None:
        super().__init__(root, attr)
        vars(self)["asked"] = torch.is_grad_enabled()

    @property
    def node(self) -> Node:  # type: ignore[override]
        with torch.set_grad_enabled(vars(self)["asked"]):
            return super().node


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[_Proxy, Any], Any]:
    """The method of a proxy for ``x += y``, which records the operator in place. fx's proxy would record ``x + y``."""

    def method(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in IN_PLACE_NAMES:
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """torch.fx's tracer, with the model's names for tensors, and with all values as ``_Proxy``.

    It overrides: the arguments of the root (inputs of the request), nodes (modes and lines), leaf modules (torch.nn),
    tensors (by identity, so that tied parameters are one node), and adds boundaries and opaque regions.
    """

    proxy_buffer_attributes = True

    def __init__(self, request: Request) -> None:
        super().__init__()
        module = request.module
        self.request = request
        self.guard = _SymbolicGuard(request)
        self.constants: dict[str, Tensor] = {}
        self.effects: dict[str, Effects] = {}
        self._sources: dict[str, Node] = {}
        self._names = first_names(module)
        self.boundaries = 0
        self.regions = Regions(request, lambda leaf: isinstance(leaf, (fx.Proxy, Tensor)), self._keep_region)
        self._held = {id(part): _tensors_in(part) for part in module.modules()}

    # inputs and the call

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[[], Any], list[Any]]:
        # 1. and 2. the inputs, and the call
        values = {name: self._input(name) for name in self.request.inputs}
        return lambda: self.request.call(values), []

    def _input(self, name: str) -> Any:
        """The stand-in for an input: a proxy, or a container of fixed values and of proxies for all other leaves."""
        proxy = self.create_proxy("placeholder", name, (), {})
        if name not in self.request.fixed_leaves or self.request.example is None:
            return proxy
        leaves, spec = pytree.tree_flatten_with_path(self.request.example[name])

        def stand_in(path: Any, leaf: Any, is_fixed: bool) -> Any:
            if is_fixed and not isinstance(leaf, ObjectSpec):
                return leaf
            value = reduce(lambda inner, key: key.get(inner), path, proxy)
            if is_fixed:
                value.node.meta["absent"] = leaf.absent
            return value

        pairs = zip(leaves, self.request.fixed_leaves[name], strict=True)
        return pytree.tree_unflatten([stand_in(path, leaf, is_fixed) for (path, leaf), is_fixed in pairs], spec)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Adds a node with its grad mode and the user's line, after the guard's check. TraceError for ``backward``."""
        self.guard.check()  # 3. nothing else has happened
        if (kind, target) == ("call_method", "backward") or target is BACKWARD:
            refuse_backward()
        # node.meta holds the grad mode if it differs from the grad mode around the call
        node = super().create_node(kind, target, *args, **kwargs)
        if (grad := torch.is_grad_enabled()) != self.request.training:
            node.meta["modes"] = Modes(grad)
        if kind != "placeholder":  # no line of user code makes a placeholder
            node.stack_trace = current_line()
        return node

    def proxy(self, node: Node) -> fx.Proxy:
        return _Proxy(node, self)

    # modules

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Records a call of a leaf as one node, and runs any other module.

        TraceError for a leaf whose parameters were swapped, or which contains a cut; and for a module that is traced
        through and has backward hooks.
        """
        # modules of the loss function are no submodules of the model: the tracer traces through them
        is_submodule = m is not self.root and self.submodule_paths is not None and m in self.submodule_paths
        if is_submodule and self.is_leaf_module(m, ""):
            self._refuse_swapped(m)
            self._refuse_hidden_cut(m)
        else:
            _refuse_backward_hooks(m)
        if not is_submodule:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the module is a leaf: a torch.nn module, but no nn.Sequential and none with a user's module in it."""
        return not isinstance(m, nn.Sequential) and all(
            part.__module__.startswith(("torch.nn", "torch.ao.nn")) for part in m.modules()
        )

    def _refuse_swapped(self, module: nn.Module) -> None:
        """TraceError if ``torch.func.functional_call`` swapped the module's tensors: a stage would use its own."""
        for part in module.modules():
            if _tensors_in(part) != self._held.get(id(part)):
                raise refuse(
                    f"{type(module).__name__} is called with other parameters or buffers than its own",
                    "give an example batch (example_args=): the export tracer records them",
                )

    def _refuse_hidden_cut(self, module: nn.Module) -> None:
        """TraceError for a cut inside a torch.nn module: the module is a leaf, so the trace would lose the cut."""
        for path in self.request.cuts:
            inner = self.request.module.get_submodule(path)
            if inner is not module and any(inner is part for part in module.modules()):
                raise refuse(
                    f"boundaries= names {path}, which is a part of a {type(module).__name__} that a symbolic trace "
                    "takes as a leaf",
                    "name that module itself, or give an example batch, so that another tracer can look inside",
                )

    def _keep_region(self, call: RegionCall) -> list[Any]:
        """Proxies for the tensors that an opaque call returns, whatever their shapes."""
        returned: Any = self.create_proxy("call_module", call.target, tuple(call.values), {})
        node, path = returned.node, call.region.path
        self.effects[node.name] = call.effects
        node.meta["val"] = tuple(call.seen.specs)  # the planner fakes the result from these if the call cannot run
        node.meta["nn_module_stack"] = {**(node.meta.get("nn_module_stack") or {}), path: (path, nn.Module)}
        return [returned[index] for index in range(len(call.seen.specs))]

    # tensors

    def create_arg(self, a: Any) -> Any:
        """The graph's argument for a value: a ``get_attr`` node for a tensor. TraceError for a random generator."""
        if isinstance(a, Tensor):  # 4. a real tensor
            return self._source(a)
        if isinstance(a, torch.Generator):
            raise refuse(
                "forward draws from a torch.Generator, which cannot stand in a graph",
                'leave generator= out, or draw inside an opaque submodule, boundaries={"the submodule": "whole"}',
            )
        return super().create_arg(a)

    def _source(self, tensor: Tensor) -> Node:
        """The ``get_attr`` node of a tensor: under the model's first name for it, or as a new constant. TraceError for
        a tensor that requires a gradient and is no parameter of the model."""
        name = self._names.get(id(tensor))
        if name is None:
            if tensor.requires_grad:
                raise refuse(*UNREGISTERED)
            name = self._names[id(tensor)] = f"_constant{len(self.constants)}"
            self.constants[name] = tensor
            self.guard.keep(tensor)
        # one node for each tensor, whichever of its names forward uses
        if name not in self._sources:
            self._sources[name] = self.create_node("get_attr", name, (), {})
            self._sources[name].meta["class"] = type(tensor)
        return self._sources[name]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """The value of a module's attribute that forward reads: one proxy for each parameter and buffer, other values
        as they are."""
        # torch.fx calls this method for each module attribute that forward reads
        if isinstance(attr_val, Tensor) and id(attr_val) in self._names:
            name = self._names[id(attr_val)]
            if name not in parameter_proxy_cache:
                parameter_proxy_cache[name] = self.proxy(self._source(attr_val))
            return parameter_proxy_cache[name]
        return attr_val

    # boundaries

    def record_boundary(self, value: Any, name: str | None, gather: Gather | None) -> Any:
        """The proxies after a boundary: all traced tensors in ``value`` go through one ``boundary`` node."""

        def carry(proxies: list[Any]) -> list[Any]:
            self.boundaries += 1
            behind: Any = self.create_proxy("call_function", boundary, (proxies, *words(name, gather)), {})
            return [behind[position] for position in range(len(proxies))]

        return crossing(value, lambda leaf: isinstance(leaf, fx.Proxy), carry)


def _tensors_in(module: nn.Module) -> list[int]:
    """The ids of the module's own parameters and buffers, without the tensors of submodules."""
    return [id(tensor) for table in (module._parameters, module._buffers) for tensor in table.values()]


def _refuse_backward_hooks(module: nn.Module) -> None:
    if backward_hooks(module):
        raise refuse(
            f"{type(module).__name__} has backward hooks and is traced through, so they would never run",
            "put the hook on a torch.nn module, or on a tensor's or parameter's gradient",
        )


def _recorded_factories(tracer: fx.Tracer) -> list[Replacement]:
    """Patches that record ``torch.zeros(x.shape[0], 3)``: torch's parser accepts no proxy among separate sizes."""

    def recorded(factory: Callable[..., Any]) -> Callable[..., Any]:
        def call(*sizes: Any, **kwargs: Any) -> Any:
            if any(isinstance(size, fx.Proxy) for size in sizes) and len(sizes) > 1:
                return tracer.create_proxy("call_function", factory, (sizes,), kwargs)
            return factory(*sizes, **kwargs)

        return call

    return [(torch, name, recorded(getattr(torch, name))) for name in ("zeros", "ones", "empty", "rand", "randn")]


class _SymbolicGuard(CaptureGuard):
    """Watches one symbolic capture. The tracer calls ``check()`` before it records each node.

    Its three watchers: replaced functions (``tracing``), a dispatch mode that sees operations on real tensors
    (``_StateMode``), and comparisons of autocast and of random states (``check``).
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        tensors = [*request.module.parameters(), *request.module.buffers()]
        self._state = _StateMode(frozenset(storage_of(tensor) for tensor in tensors) - {0})

    @contextlib.contextmanager
    def tracing(self, factories: list[Replacement]) -> Iterator[None]:
        """While this context is open, code that a symbolic capture would record wrong raises TraceError."""
        self._autocast = ambient_autocast()
        import_dynamo()  # which the first operation under any dispatch mode would do, behind the patches
        torch.overrides.get_overridable_functions()  # torch caches these: cached patches would hold all parameters
        patches = [
            *factories,
            (torch.autograd.Function, "apply", classmethod(_refuse_function)),
            (torch.autocast, "__enter__", _refuse_autocast),
        ]
        with self.preserving():
            for snapshot in self.snapshots.values():
                self._state.names = snapshot.storages() | self._state.names
            self._state.model_storages = frozenset(self._state.names)
            with torch.set_grad_enabled(torch.is_grad_enabled()), self._state, self.forward(patches):
                yield
                self.check()

    def computed_with(self) -> tuple[tuple[str, Tensor, int], ...]:
        """(name, tensor, version) of each model tensor whose values the capture has used, so that they are fixed."""
        return tuple((name, tensor, version_of(tensor)) for name, tensor in self._state.computed_with.values())

    def keep(self, tensor: Tensor) -> None:
        """Forbids writes to a tensor that has become a constant of the program."""
        self._state.names.setdefault(storage_of(tensor), "a tensor that the program uses already")

    def check(self) -> None:
        """TraceError if forward set autocast without a ``with`` block, or drew random numbers that no node records."""
        if ambient_autocast() != self._autocast:
            _refuse_autocast()
        if self.random.moved():
            raise refuse(
                DRAWN.format(where="while tracing"),
                "draw with torch from a traced tensor (torch.rand_like(x)), or pass the number in as an input",
            )


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class _StateMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation on real tensors. It refuses random operations, writes to the model's tensors, and
    computations with the values of parameters and buffers.

    An operation on a proxy calls no operator, so what arrives here happens once, at capture. Computations with other
    tensors that the model holds, such as a table in an attribute, are allowed. ``computed_with`` keeps these tensors:
    fxpipe later refuses to run the capture if one of them was written since.
    """

    def __init__(self, changing: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changing = changing
        self.names: dict[int, str] = {}
        """Storage that forward may not write → the name of its tensor."""
        self.model_storages: frozenset[int] = frozenset()
        """The storages among ``names`` that belong to the model."""
        self.computed_with: dict[int, tuple[str, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise refuse(
                f"{func} draws random numbers while tracing, and they would be the same ever after",
                "draw from a traced tensor (torch.randn_like(x), x.new_empty(4, 8).normal_())",
            )
        # only real tensors get here: an operation on a proxy calls no operator
        for position, argument in enumerate(schema_of(func).arguments):
            value = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
            for tensor in tensors_in(value):
                self._check(func, tensor, storage_of(tensor), argument.is_write)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, tensor: Tensor, storage: int, is_write: bool) -> None:
        """TraceError if an operator may not touch this tensor; notes the model's tensors whose values it uses."""
        if is_write and storage in self.names:
            raise refuse(
                f"forward writes {self.names[storage]} while tracing, which would happen once",
                "write it as self.<name>.add_(...), which is recorded, or outside of forward",
            )
        # detach() and alias() compute nothing: the check comes at the use of the tensor that they return
        if storage in self._changing and func not in _ALIASES:
            raise refuse(
                f"forward computes with the values that {self.names[storage]} has while tracing, and the result would "
                "be the same ever after",
                "use it as self.<name>, which is recorded",
            )
        if storage in self.model_storages and func not in _ALIASES:
            self.computed_with.setdefault(storage, (self.names[storage], tensor))


def _refuse_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of ``autograd.Function.apply``: the graph would lose the backward."""
    raise refuse(
        f"torch.autograd.Function {function.__name__} is applied in forward, and its backward would be lost",
        "write it with differentiable operations, or give the stages as callables (StageGraph.from_callables)",
    )


def _refuse_autocast(self: Any = None) -> NoReturn:
    """Refuses any autocast block: even ``enabled=False``, without effect now, matters under a later call's autocast."""
    raise refuse("autocast is changed inside forward, which a symbolic trace cannot record", _AROUND)


_AROUND = "enter it around the call of forward_backward instead"
