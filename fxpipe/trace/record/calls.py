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
from fxpipe.torch_compat import pytree
from fxpipe.trace.attributes import WatchedAttributes
from fxpipe.trace.fake import is_fake, outside, unrecorded
from fxpipe.trace.patching import patched
from fxpipe.trace.record.differentiated import leads_around
from fxpipe.trace.record.emit import effects_of
from fxpipe.trace.record.functions import functions_watched
from fxpipe.trace.record.methods import Name, kept_method, method_in
from fxpipe.trace.record.opaque import Applied, Method
from fxpipe.trace.record.recorder import Frame, NeedsValues, Recorder
from fxpipe.trace.record.rehearsal import Given, Rehearsed, rehearse
from fxpipe.trace.record.tape import PLAIN, Operation, Source, Touched, paths, tensors
from fxpipe.trace.record.touched import PythonState
from fxpipe.trace.snapshot import storage_of
from fxpipe.trace.user_line import definition


class Calls:
    """Patches what calls go through, for the time of a run, and decides which are kept whole.

    ``real``: the model's own tensors by name. ``descend``: submodules that are not kept whole. ``limit``: how many
    bytes of parameters a submodule may hold that is kept whole. ``before``: the plain attributes of the model before
    the capture (``plain_attributes``); ``excused``: those that kept calls have changed in an earlier run. ``cuts``:
    the submodules that are cut from outside. ``methods``: those that are kept whole, and why they cannot be recorded.
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
        """Attributes that were changed inside of calls that are kept whole, which change them in every step."""
        self.reset: dict[str, str] = {}
        """Plain attributes in submodules that are kept whole, as something else has set them, and the lines where."""
        self._tables = {id(table): dict(table) for part in module.modules() for table in _tables(part)}
        self._thread = threading.get_ident()
        self._attributes = WatchedAttributes(self._paths, self._is_ours)
        self._buffers = self._attributes.buffers
        stand_ins = [*module.named_parameters(), *module.named_buffers()]
        self._real_of = {id(tensor): real[name] for name, tensor in stand_ins}
        self.storages: dict[int, str] = {}
        """The memory of the model's tensors, and their first names."""
        for name, tensor in stand_ins:
            self.storages.setdefault(storage_of(tensor), name)

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
            stack.enter_context(self._attributes.watched())
            stack.enter_context(self._recorder.blocks.counting())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(patched(torch, "_check_tensor_all_with", _unchecked))
            yield
            self._check_backward_hooks("", self._root)

    @property
    def lines(self) -> Mapping[str, str]:
        """Where forward has set an attribute last, by its name in the model."""
        return self._attributes.lines

    def write_buffers(self) -> None:
        """Writes the buffers that forward has set."""
        self._buffers.write(self._recorder.on_line)

    def _is_ours(self) -> bool:
        recorder = self._recorder
        return threading.get_ident() == self._thread and not recorder.paused and not recorder.is_running

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
        frame = recorder.enter(path, module, args, kwargs, self._buffers.count)
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
        is_stateful = self._look_at_state(frame, touched)
        if self._is_whole(frame, result, touched, is_stateful) and self._may_be_kept(frame):
            return self._keep_whole(frame, result, touched, is_stateful)
        self._check_backward_hooks(path, module)
        return result

    def _may_be_kept(self, frame: Frame) -> bool:
        assert frame.module is not None
        held = sum(tensor.numel() * tensor.element_size() for tensor in frame.module.parameters())
        return frame.path not in self._descend and (self._limit is None or held <= self._limit)

    def _keep_whole(self, frame: Frame, result: Any, touched: Touched, is_stateful: bool) -> Any:
        """The result of a call that is one operation. ``is_stateful``: whether it may be another one in each step."""
        recorder = self._recorder
        assert frame.module is not None
        self.reset = frame.reset
        self.excused |= {f"{self._paths[owner]}.{name}" for owner, name in frame.changes if owner in self._paths}
        made = [tensor for tensor in tensors(result) if id(tensor) not in frame.given]
        hooked = _has_hooks(frame.module)
        reads_later = hooked or recorder.hooks > frame.hooks
        skips = not made and any(True for _ in frame.module.parameters())  # a layer, and not an nn.Identity
        if not made and not hooked and not is_stateful and not skips and len(recorder.tape) == frame.start:
            return result
        effects = effects_of(touched, frame.tensors, result, self.storages)
        if is_stateful or skips:
            result = pytree.tree_map_only(Tensor, lambda leaf: self._as_made(frame, leaf), result)
        if reads_later:  # hooks may keep what the call is given, and read it in backward
            effects = replace(effects, unread=())
        recorder.collapse(frame, frame.path, result, touched, effects, kept=bool(effects.writes or hooked or not made))
        return result

    def _as_made(self, frame: Frame, tensor: Tensor) -> Tensor:
        """A tensor that a call returns; where it was given, another that stands for what it may return next time."""
        with unrecorded():
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
        frame = self._recorder.enter(f"{path}.{name}".lstrip("."), None, args, kwargs, self._buffers.count)
        kept = kept_method(module, name, path, self._cuts)
        frame.module, frame.reset = kept, dict(self.reset)
        target = f"{name}_{len(self.opaque)}"
        self.opaque[target] = kept
        try:
            return self._rehearsed(frame, kept, args, kwargs, target, NeedsValues(self._methods[path, name]))
        except NeedsValues as error:
            if isinstance(error.__cause__, FxpipeError):
                raise
            raise NeedsValues(self._methods[path, name]) from error  # it needs more than is left of the submodule

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
        frame = recorder.enter(function.__name__, None, args, kwargs, self._buffers.count)
        self.opaque[name] = Applied(function)
        try:
            with recorder.touched.noting() as touched:
                result = inner(*args, **kwargs)
                touched.reads |= {storage_of(tensor) for tensor in frame.tensors}  # backward may, by what ctx keeps
        except NeedsValues as error:
            return self._rehearsed(frame, inner, args, kwargs, name, error)
        if self._is_whole(frame, result, touched, is_stateful=False):
            effects = effects_of(touched, frame.tensors, result, self.storages)
            recorder.collapse(frame, name, result, touched, effects, kept=False)
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
        """The result of a call that cannot run on fake tensors; the error where it cannot be kept whole either."""
        recorder = self._recorder
        once = error.asked or not error.tried  # an error of the user's would be met again and again
        if not self._is_untouched(frame) or self._is_swapped(frame) or frame.path in self._descend or not once:
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
        if not self._is_untouched(frame) or self._writes_elsewhere(frame, found.touched):
            raise error
        self.reset = frame.reset
        found.touched.draws_random |= any(states)
        if isinstance(frame.module, Method):  # of the parts that it uses, it may use more another time
            used = (part for part in frame.module.parts.children() if self._held_by(part) & found.touched.reads)
            found.touched.reads |= set().union(*map(self._held_by, used))
        result = self._faked(frame, found)
        effects = effects_of(found.touched, frame.tensors, (), self.storages)
        effects = replace(effects, shares=found.shares, unread=(), is_rehearsed=True)
        recorder.collapse(frame, target, result, found.touched, effects, kept=True)
        return result

    def _faked(self, frame: Frame, found: Rehearsed) -> Any:
        def faked(leaf: Any) -> Any:
            if isinstance(leaf, Given):  # on other values it may be something else
                return self._as_made(frame, frame.tensors[leaf.place])
            return self._recorder.fake.made(leaf) if isinstance(leaf, TensorLike) else leaf

        return pytree.tree_map(faked, found.result, is_leaf=lambda leaf: isinstance(leaf, (TensorLike, Given)))

    # what can be kept whole

    def _is_untouched(self, frame: Frame) -> bool:
        """Whether a call has done nothing yet that forbids to keep it whole."""
        return (frame.boundaries, frame.assigned) == (self._recorder.boundaries, self._buffers.count) and frame.opaque

    def _is_whole(self, frame: Frame, result: Any, touched: Touched, is_stateful: bool) -> bool:
        """Whether a call can be one operation: tensors and plain values go in and out, by arguments and result.

        ``is_stateful``: whether a plain value that it returns may be another one in the next step.
        """
        return (
            self._is_untouched(frame)
            and not self._is_swapped(frame)
            and not self._recorder.hooked.keys() & frame.given
            and not (is_stateful and any(not isinstance(leaf, (Tensor, type(None))) for _, leaf in paths(result)))
            and frame.place.modes == self._recorder.place().modes
            and touched.reads & set(self.storages) <= self._reachable(frame)
            and not self._writes_elsewhere(frame, touched)
            and self._is_closed(frame)
            and not self._differentiates_around(frame)
            and all(self._can_leave(frame, leaf) for _, leaf in paths(result))
        )

    def _is_swapped(self, frame: Frame) -> bool:
        """Whether the submodule holds other tensors than the model has given it: ``torch.func.functional_call``."""
        if frame.module is None:
            return False
        return any(
            tensor is not self._tables[id(table)].get(name)
            and f"{path}.{name}" not in self.lines  # a buffer that is set
            for path, part in self._parts_of(frame.module)
            for table in _tables(part)
            for name, tensor in table.items()
        )

    def _parts_of(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The submodules of a module that the model has had from the start, with their paths in the model."""
        for part in module.modules():
            if id(vars(part)) in self._paths:
                yield self._paths[id(vars(part))], part

    # what no operation shows

    def _look_at_state(self, frame: Frame, touched: Touched) -> bool:
        """Whether a call has changed attributes or drawn Python's random numbers: it must run once, on what it got."""
        assert frame.python is not None
        frame.changes = frame.python.changes()
        with outside():
            is_stateful = bool(frame.changes) or frame.python.drawn()
        if is_stateful:
            touched.draws_random = True
            touched.reads |= {storage_of(tensor) for tensor in frame.tensors}
        return is_stateful

    def reset_in(self, module: nn.Module) -> dict[str, str]:
        """Plain attributes in a submodule that are not what they were before the capture, and the lines where set."""
        return {
            name: self.lines.get(name, "")
            for name, value in plain_attributes(self._parts_of(module)).items()
            if name not in self.excused and self._before.get(name) != value
        }

    def _reachable(self, frame: Frame) -> set[int]:
        """The memory that a call may read: what its submodule holds, and what it is given."""
        return self._own(frame) | {storage_of(tensor) for tensor in frame.tensors}

    def _own(self, frame: Frame) -> set[int]:
        return set() if frame.module is None else self._held_by(frame.module)

    def _held_by(self, module: nn.Module) -> set[int]:
        return {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def _writes_elsewhere(self, frame: Frame, touched: Touched) -> bool:
        foreign = (set(self.storages) - self._own(frame)) | {storage_of(tensor) for tensor in frame.tensors}
        return bool(touched.writes & foreign)

    def _is_closed(self, frame: Frame) -> bool:
        """Whether its operations use no value from outside that it was not given."""
        recorder = self._recorder
        given = {recorder.value_of(tensor).key for tensor in frame.tensors}
        for operation in recorder.tape[frame.start :]:
            for value in operation.values if isinstance(operation, Operation) else ():
                maker = value.maker
                inside = maker.kind == "get_attr" if isinstance(maker, Source) else maker.serial >= frame.serial
                if not inside and value.key not in given:
                    return False
        return True

    def _differentiates_around(self, frame: Frame) -> bool:
        """Whether it takes a gradient by what reaches it in more than one way."""
        recorder = self._recorder
        by = recorder.differentiated[frame.differentiated :]
        return bool(by) and leads_around(recorder.tape[: frame.start], by, map(recorder.value_of, frame.tensors))

    def _can_leave(self, frame: Frame, leaf: Any) -> bool:
        """Whether something may be a part of what a call returns."""
        if not isinstance(leaf, Tensor):
            return isinstance(leaf, PLAIN)
        if id(leaf) in frame.given:
            return True
        value = self._recorder.known(leaf)
        if value is None:  # made by what no torch function mode sees, such as TorchScript
            return is_fake(leaf)
        made_here = isinstance(value.maker, Operation) and value.maker.serial >= frame.serial
        return made_here and storage_of(leaf) not in self.storages


def plain_attributes(parts: Iterable[tuple[str, nn.Module]]) -> dict[str, tuple[type, Any]]:
    """The attributes of submodules that hold a truth value, a number, a word or None, with their types, by name."""
    return {
        f"{path}.{name}": (type(value), value)
        for path, part in parts
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str, type(None)))
    }


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


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
