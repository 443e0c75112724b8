"""Optimizer class: what a class of torch.optim, or what stands for one, says of how it steps and what it keeps."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fxpipe.checkpoint.files.pieces import in_parts
from fxpipe.errors import FxpipeError, RunError, nearest
from fxpipe.sharding.parameter_groups import options_of
from fxpipe.torch_compat import pytree, tensors_in
from fxpipe.validation import is_number, shown

OptimizerMaker = Callable[..., torch.optim.Optimizer]
"""A class of optimizers, or what stands for one: ``cls(groups, **kw)``."""

Entry = dict[str, Any]
"""What an optimizer keeps of one parameter, by its own keys."""

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)
"""Those that step each element by itself, so that a rank can step any part of a tensor. Others get whole tensors."""

REFUSED = {
    torch.optim.LBFGS: "takes the parameters of the whole model as one vector, and calls for its loss again and again",
    torch.optim.SparseAdam: "steps sparse gradients alone, and those of a bucket are dense",
}


def is_elementwise(cls: OptimizerMaker) -> bool:
    """Whether this very class is known to step each element by itself."""
    return unwrapped(cls) in ELEMENTWISE


def check_class(cls: OptimizerMaker, copies: bool) -> None:
    """Refuses what cannot step pieces. ``copies``: they are parts of parameters, or masters."""
    made = unwrapped(cls)
    if not callable(made):
        like = f"; write torch.optim.{made}" if isinstance(made, str) and hasattr(torch.optim, made) else ""
        raise RunError(f"cls is {shown(made)}; it is a class of optimizers, such as torch.optim.AdamW{like}")
    for refused, why in REFUSED.items():
        if isinstance(made, type) and issubclass(made, refused) and (copies or refused is torch.optim.LBFGS):
            raise RunError(f"torch.optim.{refused.__name__} {why}; write torch.optim.AdamW, say")


def made_by(cls: OptimizerMaker, groups: list[dict[str, Any]], kw: Mapping[str, Any]) -> torch.optim.Optimizer:
    """``cls(groups, **kw)``. What it refuses is the user's, and is reported with what it was given."""
    given = "".join(f", {name}={shown(value)}" for name, value in kw.items())
    called = f"{getattr(unwrapped(cls), '__name__', cls)}(params{given})"
    try:
        made = cls(groups, **kw)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise RunError(f"{called} failed: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise RunError(f"{called} made {shown(made)}, which is no torch.optim.Optimizer")
    for group in made.param_groups:
        check_numbers(RunError, group, made.defaults)
    return made


def check_numbers(kind: type[FxpipeError], group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ``kind`` where a group has no number under a name under which ``known`` has one."""
    for name, value in ((name, group.get(name, 0)) for name in known if is_number(known[name])):
        if isinstance(value, (str, type(None))) or (is_number(value) and value != value):
            raise kind(f"a parameter group has {name}={shown(value)}; it is a number")


def unwrapped(cls: OptimizerMaker) -> Any:
    """What stands behind ``functools.partial``."""
    while isinstance(cls, functools.partial):
        cls = cls.func
    return cls


def initial_state(make: OptimizerMaker, options: Mapping[str, Any], like: Tensor) -> Entry:
    """The state of a tensor like this one that has never been stepped, under the names that a first step gives it.

    Optimizers make their state in the first step, which for a gradient of 0 leaves zeros; what counts steps, or has
    decayed in it, is set back. What such a step draws, the random state does not show. Integers have none.
    """
    if not (like.is_floating_point() or like.is_complex()):
        return {}
    scratch = torch.zeros_like(like)
    optimizer = _begun(make, options, scratch)
    state: Entry = dict(optimizer.state[scratch])
    # That step has counted itself, multiplied NAdam's product of momenta, and set ASGD's rate.
    starts = {"step": 0, "mu_product": 1, "eta": options.get("lr", optimizer.defaults.get("lr"))}
    for key, value in starts.items():
        if isinstance(state.get(key), Tensor):
            state[key].fill_(value)
        elif key in state:
            state[key] = value
    return state


def _begun(make: OptimizerMaker, options: Mapping[str, Any], scratch: Tensor) -> torch.optim.Optimizer:
    optimizer = make([{**copy.deepcopy(dict(options)), "params": [scratch]}])  # a step may write into what they hold
    # Adagrad and its like have a state from the start; the others make it in a step, here one by a gradient of 0.
    if not optimizer.state:
        zeros = torch.zeros_like(scratch)
        scratch.grad = zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros
        device = scratch.device
        with torch.no_grad(), torch.random.fork_rng(() if device.type == "cpu" else (device,), device_type=device.type):
            optimizer.step()
    return optimizer


def first_options(make: OptimizerMaker, options: Mapping[str, Any], scratch: Tensor) -> dict[str, Any]:
    """The options, and None for those that a first step puts beside them, found by stepping ``scratch``."""
    with contextlib.suppress(Exception):
        return {**dict.fromkeys(options_of(_begun(make, options, scratch).param_groups[0])), **options}
    return dict(options)


def looks_across(make: OptimizerMaker, options: Mapping[str, Any]) -> bool | None:
    """Whether the step of one tensor depends on another's gradient, as by LAMB's norm over all, in one of 12 steps:
    found by stepping two. None where it cannot be: it steps no matrices by given gradients.

    12 steps, with gradients of other sizes and directions: Prodigy and D-Adaptation set their joint rate late, and an
    update as long as the tensor itself shows a clipped gradient only in how the moments mix. The random state is left
    alone.
    """

    # Two tensors are stepped, with other gradients of the second: does the first one come out otherwise?
    def stepped(other: float) -> Tensor:
        tensors = torch.ones(2, 2, 2).unbind()
        optimizer = make([{**copy.deepcopy(dict(options)), "params": list(tensors)}])
        torch.manual_seed(0)
        rising = torch.arange(1.0, 5.0)
        for step in range(12):
            gradient = (rising.roll(step) * (1 + step % 3)).view(2, 2)
            for tensor, factor in zip(tensors, (1.0, other if step else 1.0), strict=True):
                tensor.grad = gradient * factor
            optimizer.step()
        return tensors[0]

    try:
        with torch.no_grad(), torch.random.fork_rng(()):
            return not torch.equal(stepped(1.0), stepped(1e3))
    except Exception:
        return None


def named_class(optimizer: str | OptimizerMaker) -> OptimizerMaker:
    """The class of torch.optim with this name, in any case; a class or function is returned unchanged.

    Raises:
        RunError: torch.optim has no such class, or it cannot be called.
    """
    make: Any = optimizer
    if isinstance(optimizer, str):
        kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
        known = {name.lower(): kind for name, kind in kinds.items() if torch.optim.Optimizer in kind.__mro__[1:]}
        if optimizer.lower() not in known:
            raise RunError(f"optimizer is {shown(optimizer)}, which torch.optim has not{nearest(optimizer, known)}")
        make = known[optimizer.lower()]
    if not callable(make):
        raise RunError(f'optimizer is {shown(make)}; write a name such as "adamw", or a class of optimizers')
    return cast(OptimizerMaker, make)


def states_of(make: OptimizerMaker) -> float:
    """How many numbers an optimizer keeps for each that it steps: Adam two. RunError where it steps no matrix."""
    like = torch.zeros(64, 64)
    try:
        entry = initial_state(make, {}, like)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise RunError(f"optimizer={shown(make)} cannot step a matrix of zeros: {error}") from error
    kept = [tensor for tensor in tensors_in(entry) if tensor.ndim]
    return sum(leaf.nbytes for leaf in kept) / like.nbytes


def is_initial(entry: Entry, initial: Entry) -> bool:
    """Whether a state is that of a parameter that was never stepped."""
    values, form = pytree.tree_flatten(in_parts(entry, ""))
    starts, wanted = pytree.tree_flatten(in_parts(initial, ""))
    return form == wanted and all(map(_equal, values, starts))


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and bool((value == other).all())
    return not isinstance(value, Tensor) and not isinstance(other, Tensor) and bool(value == other)
