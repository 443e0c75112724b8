"""Calls that a recorder sees as a whole: of submodules, opaque regions, autograd functions, checkpointed functions.

Takes: a recorder and a ``RunPlan``. Gives: ``Calls.watched``, the context of a recorded run, and the names of the calls
that became one operation.

For a call of a submodule:

1. A ``Frame`` begins, and the submodule runs on fake tensors.
2. If the frame is whole, and the plan does not descend into the submodule, the call becomes one operation.
3. If not, its operations stay on the tape: the submodule is traced through.
4. If it needs values of tensors, a rehearsal on made-up numbers finds its shapes and memory, and it becomes one
   operation.

torch has no hook for calls of ``torch.utils.checkpoint.checkpoint`` and of the functions that ``torch.vmap`` returns,
and models bind both long before a capture. So this file patches private functions of torch inside of both. It also
recognizes torch's private autograd function of modules with backward hooks.

Calls in other threads run unchanged. So do calls inside of a torch function, and calls during a rehearsal.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from fxpipe.graph.stage_graph import all_tensors
from fxpipe.patches import Replacement, noting, replaced
from fxpipe.specs import TensorSpec
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.autograd import CHECKPOINT_GENERATOR, checkpoint_options, function_apply, vmap_home
from fxpipe.torch_compat.modules import BackwardHookFunction
from fxpipe.torch_compat.operators import DISTRIBUTION_CHECKS, no_function_modes
from fxpipe.trace.attributes import AssignedBuffers, CallAttributes, watching_attributes
from fxpipe.trace.fake import outside
from fxpipe.trace.opaque.region_calls import RegionCall
from fxpipe.trace.patching import Key, backward_hooks, handled, refuse_backward
from fxpipe.trace.record.emit import effects_of
from fxpipe.trace.record.frame import Frame, PythonState
from fxpipe.trace.record.opaque import Applied
from fxpipe.trace.record.recorder import NeedsValues, Recorder, SetAttribute
from fxpipe.trace.record.rehearsal import Rehearsal, Rehearsed
from fxpipe.trace.record.tape import Args, Kwargs, Touched, tensors
from fxpipe.trace.request import Request
from fxpipe.user_line import current_line, definition

Call = Callable[..., Any]


@dataclass(frozen=True)
class RunPlan:
    """How to run forward. A run that fails returns a better plan for the next run. Each field only grows stricter.

    ``descend``: the submodules that cannot be opaque. ``limit``: the most bytes of parameters in an opaque submodule.
    ``settled``: whether forward runs once beforehand, as it sets attributes and may do so only in its first call:
    transformers' models then install the hooks that collect their outputs. ``watch``: whether the run finds out which
    attributes opaque calls change, as hooks in them do. That takes time.
    """

    descend: frozenset[str] = frozenset()
    limit: int | None = None
    settled: bool = False
    watch: bool = False


class Calls:
    """Patches the functions that calls go through for the time of a run, and decides which calls are opaque.

    ``numbers``: the id of each fake tensor of the model → the real tensor.
    """

    def __init__(self, recorder: Recorder, request: Request, plan: RunPlan, numbers: Mapping[int, Tensor]) -> None:
        self.opaque: dict[str, nn.Module] = {}
        self.whole: set[str] = set()
        """The paths of the submodules whose calls were opaque, including calls that did nothing."""
        self._recorder, self._plan, self._numbers = recorder, plan, numbers
        self._root, self._is_leaf_module = request.module, request.is_leaf_module
        self._paths = {id(vars(part)): path for path, part in self._root.named_modules()}
        # the tensors before the run: other tensors later show a functional_call
        self._tensors = all_tensors(self._root)
        self._calls = itertools.count()
        self._set: set[str] = set()  # the names of attributes that forward has set
        self._thread = threading.get_ident()
        self._buffers, self.own = AssignedBuffers(), CallAttributes()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While this context is open, the recorder sees calls. Enter ``cutting`` inside of it, so that boundaries are
        outside of the calls."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self._patches()))
            parts = [(part, "__call__") for part in self._root.modules() if part is not self._root]
            stack.enter_context(handled(parts, self._call_module))
            stack.callback(self._buffers.put_back)
            stack.enter_context(watching_attributes(self._paths, self._note_attribute, self.own))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
            self._check_backward_hooks("", self._root)

    def _patches(self) -> Iterator[Replacement]:
        """The functions that are replaced while forward runs: see examples/tracing_replaces.md."""
        yield torch.autograd.Function, "apply", classmethod(functools.partial(self._applied, function_apply()))
        generator, vmap = vars(checkpointing)[CHECKPOINT_GENERATOR], vars(vmap_home)["vmap_impl"]
        yield checkpointing, CHECKPOINT_GENERATOR, functools.partial(self._non_reentrant, generator)
        yield vmap_home, "vmap_impl", functools.partial(self._vmapped, vmap)
        # a graph tells autocast blocks apart by their numbers: a block shares its casts of weights
        blocks, numbers = self._recorder.autocasts, itertools.count(1)
        yield torch.autocast, "__enter__", noting(lambda: blocks.append(next(numbers)), torch.autocast.__enter__)
        yield torch.autocast, "__exit__", noting(blocks.pop, torch.autocast.__exit__)
        yield Tensor, "backward", refuse_backward
        yield torch.autograd, "backward", refuse_backward
        # the program has no assertions on the values of tensors
        yield torch, "_check_tensor_all_with", lambda *_: None
        yield *DISTRIBUTION_CHECKS, False

    def write_buffers(self) -> None:
        """Writes the buffers that forward has set, as recorded operations with the lines of the assignments."""
        self._buffers.write(lambda line: replaced([(self._recorder, "line", line)]))

    def _is_ours(self) -> bool:
        """Whether a call is forward's own: in this thread, outside of a rehearsal, and not inside of a torch
        function."""
        recorder = self._recorder
        return threading.get_ident() == self._thread and not recorder.paused and not recorder.is_running

    def _note_attribute(self, module: nn.Module, name: str, value: Any, path: str) -> bool:
        """Whether an attribute that forward sets needs no more than this: a buffer becomes a write at the end of
        forward. Other attributes are set as usual. ``better_plan`` decides about an attribute that a later call
        would read."""
        recorder = self._recorder
        if not self._is_ours():
            return False
        full = f"{path}.{name}" if path else name
        self._set.add(full)
        if self._buffers.assign(module, name, value, full):
            recorder.marks += 1
            return True
        before, is_plain = vars(module).get(name), isinstance(value, (bool, int, float, str, type(None)))
        # only a tensor can be a cache: a number may steer a branch in the next call, and a list may grow
        is_constant = isinstance(value, Tensor) and recorder.is_constant(value)
        if not self.own.take(module, name, value, is_constant) or is_plain:
            is_other = is_plain and (type(before), before) != (type(value), value)
            recorder.sets.append(SetAttribute(full, current_line(), is_other))
        return False

    # submodules

    def _call_module(self, key: Key, inner: Call, args: Args, kwargs: Kwargs) -> Any:
        """Runs a call of a submodule, and records it as one operation if it can be one."""
        if not self._is_ours():
            return inner(*args, **kwargs)
        # 1. the call, in a frame
        recorder, path = self._recorder, self._paths[key[0]]
        module = self._root.get_submodule(path)
        try:
            with replaced(
                [(recorder, "stack", {**recorder.stack, f"{path}@{next(self._calls)}": (path, type(module))})]
            ):
                frame = Frame(recorder, path, module, args, kwargs)
                with outside():
                    python = PythonState(module, recorder.own_generators)
                with recorder.touched.noting() as touched:
                    result = inner(*args, **kwargs)
        except NeedsValues as error:  # 4. made-up numbers may help
            return self._rehearsed(frame, inner, args, kwargs, path, error)
        recorder.check_random()
        with outside():  # a call that changed attributes or drew Python's random numbers must run exactly once
            python.note(touched)
        recorder.touched.note(touched)
        # 2. one operation
        if self._may_be_kept(path, module) and not self._is_swapped(frame) and frame.is_whole(result, touched):
            return self._keep_whole(frame, module, result, touched)
        # 3. traced through
        self._check_backward_hooks(path, module)
        return result

    def _may_be_kept(self, path: str, module: nn.Module) -> bool:
        """Whether the plan allows the submodule to be one operation."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())
        limit = self._plan.limit
        return path not in self._plan.descend and (limit is None or size <= limit or self._is_leaf_module(path, module))

    def _keep_whole(self, frame: Frame, module: nn.Module, result: Any, touched: Touched) -> Any:
        """Records an opaque call as one operation, and returns its result."""
        recorder = self._recorder
        self.whole.add(frame.path)
        is_made = any(id(tensor) not in frame.argument_ids for tensor in tensors(result))
        hooked = any(
            part._forward_hooks or part._forward_pre_hooks or backward_hooks(part) for part in module.modules()
        )
        # A layer with parameters that returns its argument, as under layerdrop or in evaluation, may return another
        # tensor in the next call; an nn.Identity, without parameters, always returns its argument.
        skips = not is_made and any(True for _ in module.parameters())
        may_differ = touched.is_stateful or skips
        if not is_made and not hooked and not may_differ and len(recorder.tape) == frame.start:
            return result
        effects = effects_of(touched, frame.tensors, result, recorder.storages)
        if may_differ:  # later operations must use the call's result, and not its argument
            with no_function_modes():
                result = pytree.tree_map_only(
                    Tensor, lambda leaf: leaf.view_as(leaf) if id(leaf) in frame.argument_ids else leaf, result
                )
        stays = bool(effects.writes or hooked or not is_made)
        frame.collapse(frame.path, result, touched, effects, stays)
        return result

    def _check_backward_hooks(self, path: str, module: nn.Module) -> None:
        if hooks := backward_hooks(module):
            self._recorder.problem(
                f"{path or type(module).__name__} has backward hooks and is traced through, so they would never run",
                f"put the hook on a submodule that holds no boundary\n{definition(hooks[0])}",
            )

    def _is_swapped(self, frame: Frame) -> bool:
        """Whether the submodule holds other tensors than before the run, as under ``torch.func.functional_call``."""
        now = {} if frame.module is None else all_tensors(frame.module, frame.path)
        return any(tensor is not self._tensors.get(name) and name not in self._set for name, tensor in now.items())

    # regions

    def rehearses(self) -> bool:
        """Whether a rehearsal runs now. If so, ``marks`` rises: a call that holds a region cannot be one operation."""
        self._recorder.marks += self._recorder.paused
        return self._recorder.paused

    def keep_region(self, call: RegionCall) -> tuple[Tensor, ...]:
        """Records a region's call as one operation, and returns fake tensors for its results."""
        recorder, reads = self._recorder, set(call.seen.reads)
        call.opaque.of_one_type = True
        frame = Frame(recorder, call.region.name, None, tuple(call.values), {})
        frame.scope = replace(frame.scope, stack={**frame.scope.stack, call.region.path: (call.region.path, nn.Module)})
        recorder.marks += 1
        result = tuple(map(recorder.fake.result_of, call.seen.specs))
        read = {storage for storage, (_, name) in recorder.storages.items() if name in reads}
        frame.collapse(call.target, result, Touched(read, draws_random=True), call.effects, stays=True)
        return result

    # functions

    def _applied(self, apply: Call, function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        """``autograd.Function.apply`` for a recorded run. A reentrant checkpoint's function is recorded as a
        checkpointed part; the function of backward hooks changes no value; any other Function becomes one operation."""
        recorder = self._recorder
        if not self._is_ours():
            return apply(function, *args, **kwargs)
        if function is checkpointing.CheckpointFunction:  # runs with gradients on, as in backward
            run, preserve_rng_state, *inputs = args
            # as in torch: no result requires a gradient if no argument does; for other frozen parameters a model is
            # captured anew
            if not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
                with torch.no_grad():
                    return run(*inputs)
            with recorder.checkpointed(use_reentrant=True, preserve_rng_state=preserve_rng_state):
                return run(*inputs)
        if function is BackwardHookFunction:  # the module has backward hooks; values stay the same in forward
            results = apply(function, *args, **kwargs)
            for before, after in zip(args, results, strict=True):
                if isinstance(before, Tensor):
                    recorder.name(after, recorder.value_of(before))
            return results
        return self._apply(function, functools.partial(apply, function), args, kwargs)

    def _non_reentrant(self, generator: Call, *args: Any, **kwargs: Any) -> Iterator[None]:
        """The generator of a non-reentrant checkpoint: operations up to its end belong to one checkpointed part."""
        if self._is_ours():
            with self._recorder.checkpointed(use_reentrant=False, **checkpoint_options(generator, args, kwargs)):
                yield  # torch runs the function now
        else:
            yield from generator(*args, **kwargs)

    def _vmapped(self, inner: Call, *args: Any, **kwargs: Any) -> Any:
        """``torch.vmap``: inside of it the recorder records operators, which see all rows."""
        with self._recorder.operators() if self._is_ours() else contextlib.nullcontext():
            return inner(*args, **kwargs)

    def _apply(self, function: type[torch.autograd.Function], inner: Call, args: Args, kwargs: Kwargs) -> Any:
        """Records an autograd function's call as one operation, which keeps the function's own backward."""
        recorder = self._recorder
        name = f"{function.__name__}_{len(self.opaque)}"
        frame = Frame(recorder, function.__name__, None, args, kwargs)
        self.opaque[name] = Applied(function)
        try:
            with recorder.touched.noting() as touched:
                result = inner(*args, **kwargs)
        except NeedsValues as error:
            return self._rehearsed(frame, inner, args, kwargs, name, error)
        touched.is_stateful |= recorder.random_moved()
        if frame.is_whole(result, touched):
            effects = effects_of(touched, frame.tensors, result, recorder.storages)
            frame.collapse(name, result, touched, effects, stays=False)
        else:
            recorder.problem(
                f"torch.autograd.Function {function.__name__} is applied in a way that cannot be recorded: it uses or "
                "writes a tensor beside those that it returns, or is given what is no tensor and no plain value",
                "apply it inside a submodule that holds no boundary, which then runs as a whole",
            )
        return result

    # calls that read the values of tensors

    def _rehearsed(self, frame: Frame, inner: Call, args: Args, kwargs: Kwargs, target: str, error: NeedsValues) -> Any:
        """Rehearses a call that cannot run on fake tensors, and returns its result as fake tensors. It becomes one
        operation.

        Raises the error instead if the call cannot be one operation, or if the rehearsal fails: then the submodule
        around it tries, up to the model, whose error the user sees.
        """
        recorder = self._recorder
        again = error.tried and not error.reads_values  # every submodule around would fail with the same user's error
        if again or not frame.is_untouched() or self._is_swapped(frame) or frame.path in self._plan.descend:
            raise error
        error.tried = True
        try:
            # the recorder is paused while the call runs on real numbers
            with replaced([(recorder, "paused", True)]):
                own = recorder.own_generators
                rehearsed = Rehearsal(inner, args, kwargs, frame.module, self._numbers, own).outcome()
        except Exception as failure:
            if not error.reads_values:
                raise error from failure
            fact = f"{frame.path} cannot run by itself on made-up inputs, either: {failure}"
            raise NeedsValues(f"{error}\n{fact}") from failure
        touched = rehearsed.touched
        if not frame.is_untouched() or frame.writes_elsewhere(touched):
            raise error
        # another branch may draw random numbers: a vector quantiser replaces unused codes by random rows
        touched.draws_random |= bool(touched.reads & recorder.storages.keys())
        result = self._faked(frame, rehearsed)
        self.whole.add(frame.path)
        effects = effects_of(touched, frame.tensors, result, recorder.storages)
        shares = tuple(sorted({*effects.shares, *rehearsed.shares.values()}))
        effects = replace(effects, shares=shares, is_rehearsed=True)
        frame.collapse(target, result, touched, effects, stays=True)
        return result

    def _faked(self, frame: Frame, rehearsed: Rehearsed) -> Any:
        """Fake tensors for a rehearsed call's result; a tensor that may share an argument's memory is a view of it."""

        def faked(number: int, spec: TensorSpec) -> Tensor:
            shared = frame.tensors[rehearsed.shares[number]] if number in rehearsed.shares else None
            if shared is None or shared.dtype != spec.dtype or shared.requires_grad < spec.requires_grad:
                return self._recorder.fake.result_of(spec)
            with no_function_modes():
                shared = shared if spec.requires_grad else shared.detach()
                return shared.as_strided(spec.shape, spec.stride)

        # each leaf is None or the TensorSpec of a tensor
        leaves, tree = pytree.tree_flatten(rehearsed.result)
        values = [None if spec is None else faked(number, spec) for number, spec in enumerate(leaves)]
        return pytree.tree_unflatten(values, tree)
