"""Calls that a recorder sees as wholes: submodules, and autograd functions."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError
from fxpipe.graph.like import TensorLike
from fxpipe.torch_compat import no_function_modes, pytree
from fxpipe.trace.fake import outside
from fxpipe.trace.opaque.region_calls import RegionCall
from fxpipe.trace.patching import patched
from fxpipe.trace.record.emit import effects_of
from fxpipe.trace.record.frame import Frame, collapse, enter
from fxpipe.trace.record.functions import functions_watched
from fxpipe.trace.record.opaque import Applied, Method, Name, kept_method, method_in
from fxpipe.trace.record.recorder import NeedsValues, Recorder
from fxpipe.trace.record.rehearsal import Rehearsed, rehearse
from fxpipe.trace.record.tape import Touched, tensors
from fxpipe.trace.record.touched import PythonState
from fxpipe.trace.record.whole import Wholes, held_by
from fxpipe.trace.state.attributes import AssignedBuffers, CallAttributes, watching_attributes
from fxpipe.trace.user_line import current_line, definition


class Calls:
    """Patches what calls go through, for the time of a run, and decides which are opaque.

    ``real``: the model's own tensors by name. ``descend``: submodules that are not opaque. ``limit``: how many
    bytes of parameters a submodule may hold that is opaque. ``before``: the plain attributes of the model before
    the capture (``plain_attributes``); ``excused``: those that kept calls have changed in an earlier run. ``cuts``:
    the submodules that are cut from outside. ``methods``: those that are opaque, and why they cannot be recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        module: nn.Module,
        real: Mapping[str, Tensor],
        descend: frozenset[str],
        limit: int | None,
        before: Mapping[str, Any],
        excused: frozenset[str],
        cuts: frozenset[str] = frozenset(),
        methods: Mapping[Name, str] = MappingProxyType({}),
    ) -> None:
        self.opaque: dict[str, nn.Module] = {}
        self._recorder, self._descend, self._limit = recorder, descend, limit
        self._paths = {id(vars(part)): path for path, part in module.named_modules()}
        self._owners = {type(part): _call_owner(type(part)) for part in module.modules()}
        self._root, self._cuts, self._methods = module, cuts, methods
        self._before = before
        self.excused = set(excused)
        """Attributes that were changed inside of opaque calls, which change them in every step."""
        self.reset: dict[str, str] = {}
        """Plain attributes in opaque submodules, as something else has set them, and the lines where."""
        self._thread = threading.get_ident()
        self.lines: dict[str, str] = {}
        """Where forward has set an attribute last, by its name in the model."""
        self._buffers, self.own = AssignedBuffers(), CallAttributes()
        self.in_call: set[str] = set()
        """Attributes that forward sets before it reads them."""
        stand_ins = [*module.named_parameters(), *module.named_buffers()]
        self._real_of = {id(tensor): real[name] for name, tensor in stand_ins}
        self._wholes = Wholes(recorder, module, self._paths, self._buffers, self.lines)
        self.storages = self._wholes.storages

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While it is open, calls are seen; boundaries from outside belong around it."""
        with contextlib.ExitStack() as stack:
            owners: list[type[nn.Module]] = [nn.Module, *self._owners.values()]
            for owner in dict.fromkeys(owners):
                stack.enter_context(patched(owner, "__call__", self._call_of(owner)))
            for path, name in self._methods:
                owner = type(self._root.get_submodule(path))
                stack.enter_context(patched(owner, name, self._method_of(owner, name)))
            stack.enter_context(functions_watched(self._recorder, self._is_ours, self._apply))
            stack.callback(self._buffers.put_back)
            stack.enter_context(watching_attributes(self._paths, self._note_attribute, self.own))
            stack.enter_context(self._recorder.blocks.counting())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(patched(torch, "_check_tensor_all_with", _unchecked))
            yield
            self._check_backward_hooks("", self._root)

    def write_buffers(self) -> None:
        """Writes the buffers that forward has set."""
        self._buffers.write(self._recorder.on_line)

    def _is_ours(self) -> bool:
        recorder = self._recorder
        return threading.get_ident() == self._thread and not recorder.paused and not recorder.is_running

    def _note_attribute(self, module: nn.Module, name: str, value: Any, path: str) -> bool:
        if not self._is_ours():
            return False
        full = f"{path}.{name}" if path else name
        self.lines[full] = current_line()
        if self._buffers.assign(module, name, value, full):
            return True
        if isinstance(value, Tensor) and self.own.take(module, name, value, self._recorder.is_constant(value)):
            self.in_call.add(full)
        return False

    # submodules

    def _call_of(self, owner: type[nn.Module]) -> Callable[..., Any]:
        original = vars(owner)["__call__"]

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = functools.partial(original, module)
            path = self._paths.get(id(vars(module)))
            if not path or self._owners.get(type(module)) is not owner or not self._is_ours():
                return inner(*args, **kwargs)
            return self._call_module(path, module, inner, args, kwargs)

        return call

    def _call_module(
        self, path: str, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recorder = self._recorder
        frame = enter(recorder, path, module, args, kwargs, self._buffers.count)
        frame.reset = {**self.reset, **self.reset_in(module)}
        around, recorder.stack = recorder.stack, {**recorder.stack, path: type(module)}
        try:
            with recorder.touched.noting() as touched:
                result = inner(*args, **kwargs)
        except NeedsValues as error:
            recorder.stack = around
            self.note_method(error)
            return self._rehearsed(frame, inner, args, kwargs, path, error)
        finally:
            recorder.stack = around
        recorder.check_random()
        self._look_at_state(frame, touched)
        if self._wholes.is_whole(frame, result, touched) and self._may_be_kept(frame):
            return self._keep_whole(frame, result, touched)
        self._check_backward_hooks(path, module)
        return result

    def _may_be_kept(self, frame: Frame) -> bool:
        assert frame.module is not None
        held = sum(tensor.numel() * tensor.element_size() for tensor in frame.module.parameters())
        return frame.path not in self._descend and (self._limit is None or held <= self._limit)

    def _keep_whole(self, frame: Frame, result: Any, touched: Touched) -> Any:
        """The result of a call that is one operation."""
        recorder = self._recorder
        assert frame.module is not None
        self.reset = frame.reset
        self.excused |= {f"{self._paths[owner]}.{name}" for owner, name in frame.changes if owner in self._paths}
        made = [tensor for tensor in tensors(result) if id(tensor) not in frame.given]
        hooked, is_stateful = _has_hooks(frame.module), touched.is_stateful
        skips = not made and any(True for _ in frame.module.parameters())  # a layer, and not an nn.Identity
        if not made and not hooked and not is_stateful and not skips and len(recorder.tape) == frame.start:
            return result
        effects = effects_of(touched, frame.tensors, result, self.storages)
        if is_stateful or skips:
            result = pytree.tree_map_only(Tensor, lambda leaf: self._as_made(frame, leaf), result)
        collapse(recorder, frame, frame.path, result, touched, effects, kept=bool(effects.writes or hooked or not made))
        return result

    def _as_made(self, frame: Frame, tensor: Tensor) -> Tensor:
        """A tensor that a call returns; where it was given, another that stands for what it may return next time."""
        with no_function_modes():
            return tensor.view_as(tensor) if id(tensor) in frame.given else tensor

    def _check_backward_hooks(self, path: str, module: nn.Module) -> None:
        if module._backward_hooks or module._backward_pre_hooks:
            hook = next(iter([*module._backward_hooks.values(), *module._backward_pre_hooks.values()]))
            self._recorder.problem(
                f"{path or type(module).__name__} has backward hooks and is traced through, so they would never run",
                f"put the hook on a submodule that holds no boundary\n{definition(hook)}",
            )

    # methods

    def note_method(self, error: NeedsValues) -> None:
        """Notes in an error which method it has come through."""
        error.method = error.method or method_in(error, self._paths)

    def _method_of(self, owner: type[nn.Module], name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(vars(module)), "")
            if (path, name) not in self._methods or not self._is_ours():
                return original(module, *args, **kwargs)
            return self._call_method(path, module, name, args, kwargs)

        return call

    def _call_method(
        self, path: str, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A method that cannot be recorded, as one call; NeedsValues where it cannot be that, either."""
        frame = enter(self._recorder, f"{path}.{name}".lstrip("."), None, args, kwargs, self._buffers.count)
        kept = kept_method(module, name, path, self._cuts)
        frame.module, frame.reset = kept, dict(self.reset)
        target = f"{name}_{len(self.opaque)}"
        self.opaque[target] = kept
        try:
            return self._rehearsed(frame, kept, args, kwargs, target, self._needs(path, name))
        except NeedsValues as error:
            if isinstance(error.__cause__, FxpipeError):
                raise
            raise self._needs(path, name) from error  # it needs more than is left of the submodule

    def _needs(self, path: str, name: str) -> NeedsValues:
        """Why a method cannot be recorded, as an earlier run has met it."""
        error = NeedsValues(self._methods[path, name])
        error.method = path, name
        return error

    def rehearses(self) -> bool:
        """Whether what is called now is run on made-up numbers; what holds a region is not to be opaque by that."""
        self._recorder.regions += self._recorder.paused
        return self._recorder.paused

    def keep_region(self, call: RegionCall) -> tuple[Tensor, ...]:
        """What stands for the tensors that an opaque call returns, as the user has asked for."""
        recorder, reads = self._recorder, set(call.seen.reads)
        call.kept.of_one_type = True
        frame = enter(recorder, call.region.name, None, tuple(call.values), {}, self._buffers.count)
        frame.place = replace(frame.place, stack={**frame.place.stack, call.region.path: nn.Module})
        recorder.regions += 1
        result = tuple(map(recorder.fake.made, call.seen.likes))
        touched = Touched({storage for storage, (_, name) in self.storages.items() if name in reads}, draws_random=True)
        collapse(recorder, frame, call.target, result, touched, call.effects, kept=True)
        return result

    # autograd functions

    def _apply(
        self,
        function: type[torch.autograd.Function],
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        recorder = self._recorder
        inner = functools.partial(apply, function)
        name = f"{function.__name__}_{len(self.opaque)}"
        frame = enter(recorder, function.__name__, None, args, kwargs, self._buffers.count)
        self.opaque[name] = Applied(function)
        try:
            with recorder.touched.noting() as touched:
                result = inner(*args, **kwargs)
        except NeedsValues as error:
            return self._rehearsed(frame, inner, args, kwargs, name, error)
        touched.is_stateful |= recorder.random_moved()
        if self._wholes.is_whole(frame, result, touched):
            effects = effects_of(touched, frame.tensors, result, self.storages)
            collapse(recorder, frame, name, result, touched, effects, kept=False)
        else:
            recorder.problem(
                f"torch.autograd.Function {function.__name__} is applied in a way that cannot be recorded: it uses or "
                "writes a tensor beside those that it returns, or is given what is no tensor and no plain value",
                "apply it inside a submodule that holds no boundary, which then runs as a whole",
            )
        return result

    # what looks at values

    def _rehearsed(
        self,
        frame: Frame,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: str,
        error: NeedsValues,
    ) -> Any:
        """The result of a call that cannot run on fake tensors; the error where it cannot be opaque either."""
        recorder = self._recorder
        once = error.asked or not error.tried  # an error of the user's would be met again and again
        if (
            not self._wholes.is_untouched(frame)
            or self._wholes.is_swapped(frame)
            or frame.path in self._descend
            or not once
        ):
            raise error
        error.tried = True
        recorder.paused = True
        states: list[bool] = []

        def watched(*args: Any, **kwargs: Any) -> Any:
            state = None if frame.module is None else PythonState(frame.module)
            result = inner(*args, **kwargs)
            states.append(state is not None and (bool(state.changes()) or state.drawn()))
            return result

        try:
            found = rehearse(watched, args, kwargs, frame.module, self._real_of, outside)
        except Exception as failure:
            if not error.asked:
                raise error from failure
            fact = f"{frame.path} cannot run by itself on made-up inputs, either: {failure}"
            again = NeedsValues(f"{error}\n{fact}")
            again.method = error.method
            raise again from failure
        finally:
            recorder.paused = False
        if not self._wholes.is_untouched(frame) or self._wholes.writes_elsewhere(frame, found.touched):
            raise error
        self.reset = frame.reset
        found.touched.is_stateful |= any(states)
        # another branch may draw: a vector quantiser puts random rows in place of codes that died
        found.touched.draws_random |= bool(found.touched.reads & self.storages.keys())
        if isinstance(frame.module, Method):  # of the parts that it uses, it may use more another time
            used = (part for part in frame.module.parts.children() if held_by(part) & found.touched.reads)
            found.touched.reads |= set().union(*map(held_by, used))
        result = self._faked(frame, found)
        effects = effects_of(found.touched, frame.tensors, result, self.storages)
        shares = tuple(sorted({*effects.shares, *found.shares.values()}))
        effects = replace(effects, shares=shares, is_rehearsed=True)
        collapse(recorder, frame, target, result, found.touched, effects, kept=True)
        return result

    def _faked(self, frame: Frame, found: Rehearsed) -> Any:
        """What a rehearsed call returns; with the memory of an argument where it may share that."""

        def faked(number: int, like: TensorLike) -> Tensor:
            shared = frame.tensors[found.shares[number]] if number in found.shares else None
            if shared is None or shared.dtype != like.dtype or shared.requires_grad < like.requires_grad:
                return self._recorder.fake.made(like)
            with no_function_modes():
                shared = shared if like.requires_grad else shared.detach()
                return shared.as_strided(like.shape, like.stride)

        leaves, spec = pytree.tree_flatten(found.result)
        made = [None if like is None else faked(number, like) for number, like in enumerate(leaves)]
        return pytree.tree_unflatten(made, spec)

    # what no operation shows

    def _look_at_state(self, frame: Frame, touched: Touched) -> None:
        """Notes whether a call has changed attributes or drawn Python's random numbers: it must run once."""
        assert frame.python is not None
        frame.changes = frame.python.changes()
        with outside():
            touched.is_stateful |= bool(frame.changes) or frame.python.drawn()
        self._recorder.touched.note(touched)

    def reset_in(self, module: nn.Module) -> dict[str, str]:
        """Plain attributes in a submodule that are not what they were before the capture, and the lines where set."""
        return {
            name: self.lines.get(name, "")
            for name, value in plain_attributes(self._wholes.parts_of(module)).items()
            if name not in self.excused and self._before.get(name) != value
        }


def plain_attributes(parts: Iterable[tuple[str, nn.Module]]) -> dict[str, tuple[type, Any]]:
    """The attributes of submodules that hold a truth value, a number, a word or None, with their types, by name."""
    return {
        f"{path}.{name}": (type(value), value)
        for path, part in parts
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str, type(None)))
    }


def _unchecked(error: type[Exception], condition: Tensor, message: Any = None) -> None:
    """Assertions on the values of tensors are not a part of the program."""


def _call_owner(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module's outermost ``__call__`` is written in."""
    return next(base for base in kind.__mro__ if "__call__" in vars(base))


def _has_hooks(module: nn.Module) -> bool:
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )
