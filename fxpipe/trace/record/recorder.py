"""The recorder: watches one run of forward on fake tensors, and writes its operations on a tape.

Takes: the fake tensors of the model, and calls of torch functions (as a ``TorchFunctionMode``). Gives: ``tape``, a list
of ``Operation`` and ``Obstacle``, ``constants``, and the number of ``boundaries``.

1. A torch function is called. Some calls have an answer already (a constant's truth), some become obstacles (hooks,
   gradients).
2. The function runs on fake tensors, for its shapes. ``TouchedMode`` notes the memory that its operators read and
   write.
3. If it made or wrote tensors, it goes on the tape: its target, its arguments as ``TapeValue``, its modes, its line.
4. The tensors that it returned are mapped to values of this operation, by their ids.

The recorder sees operations as torch functions (``F.linear``, ``Tensor.add_``), above autograd and autocast, so that a
graph of these functions computes the same as the model. A submodule that can be opaque becomes one operation.

Most code that it cannot record becomes an obstacle, and no error: an opaque call may turn out to contain it. It does
not decide which calls are opaque (``calls``), and makes no graph (``emit``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial, reduce
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.errors import TraceError
from fxpipe.graph.boundary import Gather, boundary, words
from fxpipe.graph.program import Effects
from fxpipe.graph.topological import reachable
from fxpipe.patches import replaced
from fxpipe.seeds import Generators, RandomState
from fxpipe.snapshots.snapshot import Snapshot, storage_of
from fxpipe.stage.opaque_call import PLAIN_LEAF
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.operators import CHECKS, TorchDispatchMode, no_function_modes
from fxpipe.trace.cuts.cutting import crossing
from fxpipe.trace.fake import FakeModel, is_fake, needs_values, outside
from fxpipe.trace.patching import BACKWARD, DRAWN, UNREGISTERED, refuse, refuse_backward
from fxpipe.trace.record.tape import (
    Args,
    Checkpoint,
    Kwargs,
    ModesNow,
    NamedSource,
    Obstacle,
    Operation,
    Surroundings,
    TapeValue,
    Touched,
    TouchedMode,
    accessed,
    mapped,
    name_of,
    paths,
    target_of,
    tensors,
)
from fxpipe.user_line import current_line

_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
_SAME_TENSOR = frozenset({"requires_grad_"})
"""Functions that change their argument and return it, without an operator that writes."""


class NeedsValues(TraceError):
    """Code that fake tensors cannot run, as they have no values: an opaque submodule may be able to run the code.

    ``reads_values``: Python code read a tensor's values. Otherwise an operation failed, maybe by an error of the user.
    """

    def __init__(self, message: str, reads_values: bool = True) -> None:
        super().__init__(message)
        self.reads_values = reads_values
        self.tried = False
        """Whether a rehearsal of a submodule on made-up inputs has failed."""


class SetAttribute(NamedTuple):
    """An attribute that forward has set: its name in the model, and the user's line. ``is_other``: whether forward
    replaced its value by another number, string, bool or None."""

    name: str
    line: str
    is_other: bool


class Recorder(TorchFunctionMode):
    """The tape of one run, and the map from fake tensors to values of the program.

    ``real``: the model's real tensors by name. ``stand_ins``: the fake tensors that replace them during the run.
    ``before``: snapshots of the model before the run; empty if the recorder need not watch which attributes calls set.
    """

    def __init__(
        self,
        fake: FakeModel,
        real: Mapping[str, Tensor],
        stand_ins: Mapping[str, Tensor],
        own: Generators,
        before: Sequence[Snapshot],
    ) -> None:
        super().__init__()
        self.fake, self._stand_ins, self._before = fake, stand_ins, before
        self.tape: list[Operation | Obstacle] = []
        self.constants: dict[str, Tensor] = {}
        self.boundaries = 0
        self.marks = 0
        """The number of boundaries, region calls and set buffers so far: no opaque call may contain any of these."""
        self.gradients = 0
        """How many times forward has called ``torch.autograd.grad``."""
        self.hooked: dict[int, Tensor] = {}
        """The tensors on which forward has registered gradient hooks, by id."""
        self.sets: list[SetAttribute] = []
        self.set_inside: set[str] = set()
        """The attributes that opaque calls have set; these calls set them in every step, too."""
        self.touched = TouchedMode()
        self.autocasts = [0]
        """The numbers of the open autocast blocks, innermost last; 0 stands for no block."""
        self.stack: dict[str, tuple[str, type]] = {}
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self._ended: dict[Checkpoint, str] = {}
        """A checkpointed part that a boundary has ended → the boundary's name."""
        self.paused = False
        """Whether the recorder ignores the operations that run now."""
        self.is_running = False
        """Whether a torch function runs now, which the recorder records as one operation."""
        self.serial = 0
        self._real_names = {id(tensor): name for name, tensor in real.items() if name in stand_ins}
        # the entry keeps the tensor alive, so that no other tensor gets its id
        self._values: dict[int, tuple[Tensor, TapeValue]] = {}
        self.line = ""
        """The user's line of the operations that run now; empty: the line that runs."""
        self._unmapped: NeedsValues | None = None
        """The error, found inside of ``torch.vmap``, for which the call cannot be recorded."""
        self.own_generators = own
        self._random = RandomState(own=own)
        self.storages: dict[int, tuple[int, str]] = {}
        """The storage of a model tensor → (its position in the model's order, its first name)."""
        for position, (name, tensor) in enumerate(stand_ins.items()):
            self.storages.setdefault(storage_of(tensor), (position, name))
            self.name(tensor, TapeValue(NamedSource("get_attr", name, tensor)))

    # tensors and values

    def name(self, tensor: Tensor, value: TapeValue) -> None:
        """Maps the tensor to a value of the program."""
        self._values[id(tensor)] = tensor, value

    def value_of(self, tensor: Tensor) -> TapeValue:
        """The program's value for a tensor. A tensor that no operation has made becomes a constant, or the parameter
        that it is.

        If the tensor was made inside of an opaque call that does not return it, it is an obstacle: the next run
        descends there.
        """
        entry = self._values.get(id(tensor))
        # no recorded operation has made this tensor
        if entry is None:
            entry = self._values[id(tensor)] = tensor, self._constant(tensor)
        # The operation is now inside an opaque call that does not return it: the next run traces through that call.
        maker = entry[1].maker
        if isinstance(maker, Operation) and maker.hidden_in is not None:
            path = maker.hidden_in
            fact = f"a tensor made inside of {path} is used elsewhere, and {path} does not return it"
            self.problem(fact, "", descend=path)
        return entry[1]

    def value_if_any(self, tensor: Tensor) -> TapeValue | None:
        """The program's value for a tensor, or None for a tensor that the recorder has not seen."""
        return self._values[id(tensor)][1] if id(tensor) in self._values else None

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on no input, parameter, opaque call or random number, so that it never changes."""
        own_value = self.value_if_any(tensor)
        if own_value is None:
            return False
        # back through the operations that computed the tensor, to the sources
        makers = reachable([own_value.maker], lambda maker: [value.maker for value in maker.values])
        return not any(
            isinstance(maker, NamedSource) or maker.kind == "call_module" or maker.touched.draws_random
            for maker in makers
        )

    def _constant(self, tensor: Tensor) -> TapeValue:
        """The value of a tensor that forward uses for the first time: a real parameter or buffer, or a constant."""
        if id(tensor) in self._real_names:
            return self.value_of(self._stand_ins[self._real_names[id(tensor)]])
        name = f"_constant{len(self.constants)}"
        if is_fake(tensor):
            self.problem(
                "a tensor is used that was not made by an operation of torch on known tensors, or in another way that "
                "cannot be recorded",
                "make it with torch's functions inside of forward",
            )
        elif tensor.requires_grad:
            self.problem(*UNREGISTERED)
        else:
            self.constants[name] = tensor
        return TapeValue(NamedSource("get_attr", name, tensor))

    def problem(self, fact: str, instead: str, descend: str | None = None) -> None:
        """Adds an obstacle with the user's line. ``descend``: the submodule to trace through in the next run, if that
        helps."""
        self.tape.append(Obstacle(str(refuse(fact, instead)), descend))

    def changes(self) -> frozenset[str]:
        """The names of the attributes that differ from the snapshots in ``before``."""
        return frozenset(name for snapshot in self._before for name in snapshot.changes())

    # operations

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(function, tuple(args), kwargs or {})

    def _call(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs one torch function on fake tensors, and records the call."""
        # 1. calls with an answer, and obstacles
        if self.paused:
            return function(*args, **kwargs)
        name = name_of(function)
        if name == "__iter__":
            return iter(self._call(Tensor.unbind, (args[0], 0), {}))
        if function in CHECKS and isinstance(args[0], Tensor):
            return None  # the program has no assertions on the values of tensors
        if function is Tensor.__bool__:
            certain = outcome(self.value_if_any(args[0]), self.tape, self.is_constant(args[0]))
            if certain is not None:
                return certain
        if name in _HOOKS:
            self.problem(f"forward calls {name} on a tensor, which is not recorded", _INSIDE)
        if function is BACKWARD:
            refuse_backward()
        if function is torch.autograd.grad:
            self.gradients += 1
            self.problem(
                "forward calls grad on a tensor, which is not recorded",
                f"{_INSIDE}, and that computes all that the gradient goes through",
            )
        if name.startswith("register_"):
            self.hooked[id(args[0])] = args[0]
        setter = accessed(function, "__set__")
        if setter == "requires_grad":
            self._call(Tensor.requires_grad_, args, kwargs)
            return None
        if setter is not None:
            self.problem(f"forward sets .{setter} of a tensor, which is not recorded", "write into it in place")
        return self._recorded(function, args, kwargs)

    def _run(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs a function on fake tensors, with the model's fake tensors in place of its real ones.

        ``NeedsValues`` if the function needs numbers, or fails with a RuntimeError: an opaque submodule around it may
        still run.
        """
        args, kwargs = mapped((args, kwargs), self._stand_in)
        self.is_running = True
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if needs_values(error):
                name = accessed(function, "__get__") or name_of(function)
                fact = f"forward looks at the values of a tensor ({name}) between submodules, and which they are is"
                raise NeedsValues(str(refuse(f"{fact} known only when it runs", _INSIDE))) from error
            if isinstance(error, RuntimeError):
                fact = f"the record tracer cannot follow the model: {type(error).__name__}: {error}"
                raise NeedsValues(f"{fact}\n{current_line()}", reads_values=False) from error
            raise
        finally:
            self.is_running = False

    def _stand_in(self, leaf: Any) -> Any:
        name = self._real_names.get(id(leaf))
        return leaf if name is None else self._stand_ins[name]

    def _recorded(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs a function, and appends it to the tape unless it only reads facts such as a shape, or returns its
        argument."""
        # 2. The function runs for its shapes; TouchedMode sees, operator by operator, which memory it touches.
        with self.touched.noting() as touched:
            result = self._run(function, args, kwargs)
        arguments = tensors((args, kwargs))
        written = frozenset(touched.writes & {storage_of(tensor) for tensor in arguments})
        if not written:  # the function may only read a shape and the like, or return its argument
            same = any(tensor is result for tensor in arguments) and name_of(function) not in _SAME_TENSOR
            if same or not tensors(result):
                return result
        # 3. the operation
        kind, target, args, kwargs = target_of(function, args, kwargs)
        operation = self.append(kind, target, self.as_values(args), self.as_values(kwargs), result, touched)
        if touched.writes & {storage_of(constant) for constant in self.constants.values()}:
            self.problem(
                "forward writes a tensor that is no buffer of the model, and all micro-batches would write the same",
                "make it from a traced tensor, as in x.new_zeros(...), or register it as a buffer",
            )
        operation.writes = written
        # 4. its values
        for path, leaf in paths(result):
            if isinstance(leaf, Tensor):
                self.name(leaf, TapeValue(operation, path))
        return result

    def append(
        self,
        kind: str,
        target: Any,
        args: Args,
        kwargs: Kwargs,
        result: Any,
        touched: Touched,
        scope: Surroundings | None = None,
        effects: Effects | None = None,
    ) -> Operation:
        """Adds an operation to the tape. ``scope``: where it runs; by default the present surroundings. TraceError if a
        boundary has already ended the checkpointed part that the operation belongs to."""
        self.check_random()
        self.touched.note(touched)  # the calls around this operation touch the same memory
        self.serial += 1
        scope = scope or self.scope()
        # a checkpointed part computes something after the boundary that seemed to be its end
        ended = next((self._ended[part] for part in scope.checkpoints if part in self._ended), None)
        if ended is not None:
            raise refuse(
                f"a boundary ({ended}) lies amid a function given to torch.utils.checkpoint, which runs as a whole: it "
                "computes both before and behind it",
                _AT_THE_EDGE,
            )
        result = pytree.tree_map(lambda leaf: leaf, result)  # forward may change the containers in its copy
        operation = Operation(kind, target, args, kwargs, result, scope, touched, self.serial, effects)
        self.tape.append(operation)
        return operation

    def scope(self) -> Surroundings:
        """The user's line, the modes, the submodules and the checkpoints around the present operation."""
        line, modes = self.line or current_line(), ModesNow.current(self.autocasts[-1])
        return Surroundings(line, modes, dict(self.stack), self.checkpoints)

    def as_values(self, arguments: Any) -> Any:
        """The arguments with a ``TapeValue`` for each tensor; an obstacle for an argument that no graph can hold."""
        return mapped(arguments, self._as_value)

    def _as_value(self, leaf: Any) -> Any:
        """The graph's argument for a leaf: a ``TapeValue`` for a tensor, a Python number for NumPy's; an obstacle for
        an object."""
        numpy = sys.modules.get("numpy")
        if isinstance(leaf, Tensor):
            return self.value_of(leaf)
        if numpy is not None and isinstance(leaf, numpy.generic):
            return leaf.item()
        if isinstance(leaf, torch.Generator):  # whose state no operation on fake tensors changes
            self.touched.note(Touched(generators={id(leaf)}))
        if not isinstance(leaf, PLAIN_LEAF):
            fact = f"a function of torch is given a {type(leaf).__name__}, which cannot stand in a graph"
            self.problem(fact, _INSIDE)
        return leaf

    def check_random(self) -> None:
        """Records an obstacle if code other than torch's operations drew random numbers since the last check."""
        if self.random_moved():
            instead = f"draw with torch (torch.rand(4)), pass the number in as an input, or {_INSIDE}"
            self.problem(DRAWN.format(where="in forward"), instead)

    def random_moved(self) -> bool:
        """Whether a generator has moved since the last call of this method, by code that is no operation of torch."""
        with outside():
            has_moved = bool(self._random.moved())
            self._random = RandomState(own=self.own_generators) if has_moved else self._random
            return has_moved

    # checkpoints, and torch.vmap

    def checkpointed(self, **options: Any) -> AbstractContextManager[None]:
        """While this context is open, recorded operations belong to one call of ``checkpoint`` with these options."""
        return replaced([(self, "checkpoints", (*self.checkpoints, Checkpoint(options, self.scope())))])

    @contextmanager
    def operators(self) -> Iterator[None]:
        """While this context is open, the recorder records torch's operators in place of torch's functions.

        Inside of ``torch.vmap`` a torch function sees one row, and an operator sees all rows, as when a model makes a
        mask of positions. Operators run below autograd, so the recorded graph would lose gradients.
        """
        with replaced([(self, "paused", True)]), _Operators(self):
            yield
        if self._unmapped is not None:
            raise self._unmapped

    def operator(self, operator: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs one operator on fake tensors, and records the call."""
        if any(tensor.requires_grad for tensor in tensors((args, kwargs))):
            fact = "forward uses torch.vmap on tensors that need a gradient, between submodules"
            # not raised here, as an exception through torch.vmap's C++ code would end the process
            self._unmapped = self._unmapped or NeedsValues(str(refuse(fact, _INSIDE)), reads_values=False)
        return self._recorded(operator, args, kwargs)

    # boundaries

    def record_boundary(self, value: Any, name: str | None, gather: Gather | None) -> Any:
        """The value after a boundary; a boundary at the edge of a checkpointed part lies outside of that part.

        A boundary comes before ``checkpoint(layer, x)`` if the layer has computed nothing yet. Otherwise it comes
        after, and ``append`` refuses operations that follow within the layer.
        """
        begun = {part for entry in self.tape if isinstance(entry, Operation) for part in entry.scope.checkpoints}
        self._ended |= dict.fromkeys((part for part in self.checkpoints if part in begun), name or "an unnamed one")
        behind = partial(self._behind, words(name, gather), gather is not None)
        # the boundary itself belongs to no checkpointed part, so that the graph can be cut there
        with replaced([(self, "checkpoints", ())]):
            return crossing(value, lambda leaf: isinstance(leaf, Tensor), behind)

    def _behind(self, options: tuple[Any, ...], gathers: bool, before: list[Tensor]) -> list[Tensor]:
        """New tensors for the values after a boundary."""
        self.boundaries += 1
        self.marks += 1
        if self.paused:
            return before  # ``marks`` shows that the submodule in rehearsal holds a boundary
        # a new tensor for each value: the old tensor stays a value of the stage before
        with no_function_modes(), torch.enable_grad():
            behind = [tensor.view_as(tensor) for tensor in before]
        values = [self.value_of(tensor) for tensor in before]
        for tensor, value in zip(before, values, strict=True):
            # a gathered number may depend on parameters alone, as ``logit_scale.exp()``, and then the stages compute
            # it after the boundary; an opaque call does not show whether the number does
            maker = value.maker
            if gathers and tensor.numel() == 1 and isinstance(maker, Operation) and maker.kind == "call_module":
                fact = f"what {maker.target} returns is one number, and is gathered"
                self.problem(fact, "compute it behind the boundary", descend=str(maker.target))
        operation = self.append("call_function", boundary, (values, *options), {}, behind, Touched())
        operation.stays = True
        for index, tensor in enumerate(behind):
            self.name(tensor, TapeValue(operation, (index,)))
        return behind


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operator(func, tuple(args), kwargs or {})


_INSIDE = "do it inside a submodule that holds no boundary, which then runs as a whole"
_AT_THE_EDGE = (
    "cut before the first submodule that such a function calls or after its last, checkpoint the parts before and "
    'behind the boundary, or let fxpipe find the cuts with boundaries="auto"'
)


# --- Branches that go the same way in every step ---


def outcome(value: TapeValue | None, tape: Sequence[Operation | Obstacle], is_constant: bool) -> bool | None:
    """The truth of a constant, if no operation has written; the result of ``torch.rand([]) < bound`` if all numbers in
    [0, 1) give the same result; else None.

    transformers' speech models and BART compare so with their ``layerdrop``, where 0 means off.
    """
    if is_constant and not any(entry.touched.writes for entry in tape if isinstance(entry, Operation)):
        with outside():
            return bool(_computed(value))
    compared = value.maker if value is not None else None
    if not isinstance(compared, Operation) or len(compared.args) != 2:
        return None
    drawn, bound = compared.args
    is_less = str(getattr(compared.target, "__name__", compared.target)) == "lt"
    maker = drawn.maker if isinstance(drawn, TapeValue) else None
    if not is_less or type(bound) not in (int, float) or not isinstance(maker, Operation):
        return None
    # no operation may have written the drawn number since
    memory = storage_of(maker.result) if maker.target in (torch.rand, torch.rand_like) else None
    if memory is None or any(memory in entry.touched.writes for entry in tape if isinstance(entry, Operation)):
        return None
    return None if 0 < bound < 1 else bound >= 1


def _computed(value: Any) -> Any:
    """The real tensor for a constant's value on the tape, by the operations that make it. They run on real tensors,
    each once."""

    @cache
    def result(maker: Any) -> Any:
        args, kwargs = mapped((maker.args, maker.kwargs), real)
        is_method = maker.kind == "call_method"
        return (getattr(args[0], maker.target) if is_method else maker.target)(*args[is_method:], **kwargs)

    def real(leaf: Any) -> Any:
        return reduce(getitem, leaf.path, result(leaf.maker)) if isinstance(leaf, TapeValue) else leaf

    return real(value)
