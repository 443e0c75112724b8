"""Optimizer class: finds how an optimizer class steps tensors, and which state it keeps for a parameter."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fxpipe.errors import RunError, nearest
from fxpipe.sharding.parameter_groups import options_of
from fxpipe.tensors.dtensors import is_dtensor
from fxpipe.tensors.pieces import in_parts
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.modules import without_step_hooks
from fxpipe.torch_compat.operators import NUMBER_READ, TorchDispatchMode
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.validation import shown

OptimizerMaker = Callable[..., torch.optim.Optimizer]
"""An optimizer class, or a function that returns an optimizer: ``cls(groups, **kw)``."""

Entry = dict[str, Any]
"""An optimizer's state of a parameter, by the optimizer's keys."""

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)
"""Classes that update each element independently, so that a rank can step a slice. Others get whole tensors."""

REFUSED = {
    torch.optim.LBFGS: "takes the parameters of the whole model as one vector, and calls for its loss again and again",
    torch.optim.SparseAdam: "steps sparse gradients alone, and those of a bucket are dense",
}


def is_elementwise(cls: OptimizerMaker) -> bool:
    """Whether this class itself, not a subclass, is known to update each element independently."""
    return unwrapped(cls) in ELEMENTWISE


def check_class(cls: OptimizerMaker, copies: bool) -> None:
    """RunError if ``cls`` cannot step pieces. ``copies``: the pieces are parts of parameters, or masters."""
    maker = unwrapped(cls)
    if not callable(maker):
        hint = f"; write torch.optim.{maker}" if isinstance(maker, str) and hasattr(torch.optim, maker) else ""
        raise RunError(f"cls is {shown(maker)}; it is a class of optimizers, such as torch.optim.AdamW{hint}")
    for refused, why in REFUSED.items():
        if isinstance(maker, type) and issubclass(maker, refused) and (copies or refused is torch.optim.LBFGS):
            raise RunError(f"torch.optim.{refused.__name__} {why}; write torch.optim.AdamW, say")


def made_by(cls: OptimizerMaker, groups: list[dict[str, Any]], kw: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Returns ``cls(groups, **kw)``. Its errors become RunErrors that name the call and its arguments."""
    arguments = "".join(f", {name}={shown(value)}" for name, value in kw.items())
    called = f"{getattr(unwrapped(cls), '__name__', cls)}(params{arguments})"
    try:
        optimizer = cls(groups, **kw)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise RunError(f"{called} failed: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RunError(f"{called} made {shown(optimizer)}, which is no torch.optim.Optimizer")
    return optimizer


def unwrapped(cls: OptimizerMaker) -> Any:
    """Returns the function inside ``functools.partial``."""
    while isinstance(cls, functools.partial):
        cls = cls.func
    return cls


def initial_state(
    make: OptimizerMaker, options: Mapping[str, Any], like: Tensor, shared: bool = False, kind: Any = None
) -> Entry:
    """Returns the state of a tensor like ``like`` that was never stepped, with the keys that a first step makes.

    Optimizers make their state in the first step, which for a gradient of 0 leaves zeros; values that count steps, or
    decay, are set back. Random draws of the step do not change the random state. Integer tensors have no state.
    ``shared``: whether elements may share memory, only to be read. ``kind``: the class, if ``make`` is no class.
    """
    if not (like.is_floating_point() or like.is_complex()):
        return {}
    is_plain = type(like) in (Tensor, torch.nn.Parameter)
    is_one = is_plain and is_elementwise(kind or make)  # one element has the state of all
    scratch = like.new_zeros((1,) * like.ndim) if is_one else torch.zeros_like(like)
    optimizer = _begun(make, options, scratch)
    state: Entry = dict(optimizer.state[scratch])
    # The step has increased the count, multiplied NAdam's product of momenta, and set ASGD's rate.
    starts = {"step": 0, "mu_product": 1, "eta": options.get("lr", optimizer.defaults.get("lr"))}
    for key, value in starts.items():
        if isinstance(state.get(key), Tensor):
            state[key].fill_(value)
        elif key in state:
            state[key] = value
    for key, value in state.items():
        if is_one and isinstance(value, Tensor) and value.ndim:
            spread = value.expand_as(like)
            state[key] = spread if shared else torch.empty_like(like, dtype=value.dtype).copy_(spread)
    return state


def _begun(make: OptimizerMaker, options: Mapping[str, Any], scratch: Tensor) -> torch.optim.Optimizer:
    optimizer = make([{**copy.deepcopy(dict(options)), "params": [scratch]}])  # a step may write into option values
    # Adagrad makes its state in the constructor; other optimizers in a step, here with a gradient of 0.
    if not optimizer.state:
        zeros = torch.zeros_like(scratch)
        scratch.grad = zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros
        device = scratch.device
        devices = () if device.type == "cpu" else (device,)
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type), without_step_hooks():
            optimizer.step()
    return optimizer


def first_options(make: OptimizerMaker, options: Mapping[str, Any], scratch: Tensor) -> dict[str, Any]:
    """Returns the options, and None for options that a first step adds; finds these by stepping ``scratch``."""
    with contextlib.suppress(Exception):
        return {**dict.fromkeys(options_of(_begun(make, options, scratch).param_groups[0])), **options}
    return dict(options)


def looks_across(make: OptimizerMaker, options: Mapping[str, Any]) -> bool | None:
    """Returns whether a tensor's step depends on another tensor's gradient, as in LAMB with its global norm. None if
    the optimizer cannot step matrices with given gradients."""
    # Step two tensors twice, with different gradients of the second: does the first tensor's result differ?
    first, second = (_trial(make, options, other) for other in (1.0, 1e3))
    return None if first is None or second is None else not torch.equal(first[0], second[0])


def steps_frozen(make: OptimizerMaker, options: Mapping[str, Any]) -> bool:
    """Returns whether a step may change a tensor that has no gradient any more."""
    trial = _trial(make, options, None)
    return trial is None or trial[1]


def _trial(make: OptimizerMaker, options: Mapping[str, Any], other: float | None) -> tuple[Tensor, bool] | None:
    """Makes 12 steps of two tensors. Returns the first, and whether the last 11 steps changed the second; None if the
    optimizer cannot make them. ``other``: the factor of the second tensor's gradients in these; None for no gradient.

    The 12 gradients differ in size and direction: Prodigy and D-Adaptation set their joint rate late, and with updates
    as long as the tensor itself a clipped gradient changes only the mix of the moments. The random state stays
    unchanged.
    """
    tensors, begun = torch.ones(2, 2, 2).unbind(), torch.ones(2, 2)
    try:
        with torch.no_grad(), torch.random.fork_rng(()), without_step_hooks():
            optimizer = make([{**copy.deepcopy(dict(options)), "params": list(tensors)}])
            torch.manual_seed(0)
            rising = torch.arange(1.0, 5.0)
            for step in range(12):
                gradient = (rising.roll(step) * (1 + step % 3)).view(2, 2)
                for tensor, factor in zip(tensors, (1.0, other if step else 1.0), strict=True):
                    tensor.grad = None if factor is None else gradient * factor
                optimizer.step()
                begun = begun if step else tensors[1].clone()
    except Exception:
        return None
    return tensors[0], not torch.equal(tensors[1], begun)


class NumbersOfParts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses a step that reads a number of which a rank has only its own part, such as the norm of a DTensor.

    torch's ``item()`` does not sum such a number over the ranks. ``kind``: the optimizer's class.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_spread = func is NUMBER_READ and is_dtensor(args[0]) and args[0].device_mesh.size() > 1
        if is_spread and not all(placement.is_replicate() for placement in args[0].placements):
            raise RunError(
                f"{self._kind} steps by a number computed from a whole parameter, such as its norm, but parallelize "
                "has spread the parameter, and each rank would step by the number of its own part; write "
                "torch.optim.AdamW for the parameters that are DTensors"
            )
        return func(*args, **(kwargs or {}))


def named_class(optimizer: str | OptimizerMaker) -> OptimizerMaker:
    """Returns the class of torch.optim with this name, ignoring case; returns a class or function unchanged.

    Raises:
        RunError: torch.optim has no such class, or it cannot be called.
    """
    make: Any = optimizer
    if isinstance(optimizer, str):
        kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
        by_name = {name.lower(): kind for name, kind in kinds.items() if torch.optim.Optimizer in kind.__mro__[1:]}
        if optimizer.lower() not in by_name:
            raise RunError(f"optimizer is {shown(optimizer)}, which torch.optim has not{nearest(optimizer, by_name)}")
        make = by_name[optimizer.lower()]
    if not callable(make):
        raise RunError(f'optimizer is {shown(make)}; write a name such as "adamw", or a class of optimizers')
    return cast(OptimizerMaker, make)


def states_of(make: OptimizerMaker) -> float:
    """Returns the state's numbers per stepped number: 2 for Adam. RunError if the optimizer cannot step a matrix."""
    like = torch.zeros(64, 64)
    try:
        entry = initial_state(make, {}, like)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise RunError(f"optimizer={shown(make)} cannot step a matrix of zeros: {error}") from error
    states = [tensor for tensor in tensors_in(entry) if tensor.ndim]
    return sum(leaf.nbytes for leaf in states) / like.nbytes


def is_initial(entry: Entry, initial: Entry) -> bool:
    """Whether a state equals the initial state of a parameter that was never stepped."""
    values, form = pytree.tree_flatten(in_parts(entry, ""))
    starts, wanted = pytree.tree_flatten(in_parts(initial, ""))
    return form == wanted and all(map(_equal, values, starts))


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and bool((value == other).all())
    return not isinstance(value, Tensor) and not isinstance(other, Tensor) and bool(value == other)
