"""Patching: replaces functions and attributes while a model is traced, and refuses code that a capture would record
wrong.

Takes: rows (owner, name, value in its place) from the tracers. Gives: contexts in which the values are in place, and
the ``TraceError`` with the fact, the remedy, and the user's line.

The file has three parts:

1. Refusals: ``refuse`` makes the error, and ``refusing`` makes a function that raises it when user code calls it.
2. Questions: ``as_in_run`` answers code that asks whether it is traced.
3. Calls: ``handled`` gives each call of a module's method to a handler.

``replaced`` in ``fxpipe.patches`` makes and undoes every replacement of these parts, and of the tracers. Tracers
replace nothing in another way. examples/tracing_replaces.md gives the reasons:

- All tracers: ``__setattr__`` and ``__getattribute__`` of nn.Module, ``Function.apply``, the generator of checkpoints,
  ``__call__`` and opaque methods of the model's classes, ``__getattribute__`` of classes with attributes that regions
  set.
- ``symbolic`` refuses inference mode, autocast and reentrant checkpoints, and records ``zeros``, ``ones``, ``empty``,
  ``rand``, ``randn``.
- ``export`` refuses inference mode, reentrant checkpoints, ``autograd.grad``, ``backward``, hooks on tensors,
  ``fork_rng``, and parameters from outside of the model.
- ``export`` also sees ``register_buffer``, ``Tensor.data``, numbers and truth values of symbols, ``len`` in users'
  modules, and how torch makes and decides on sizes. It leaves out two passes for modes.
- ``record`` refuses ``backward``, records autocast and ``vmap``, and leaves out checks of values.
- ``export`` and ``record`` replace parameters and buffers, silence two loggers, and answer ``is_compiling``,
  ``is_exporting`` and ``torch._subclasses``.

Replacements are for the whole process. The modes and the recorder of boundaries are of the thread that captures.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn

from fxpipe.device import kinds
from fxpipe.errors import TraceError
from fxpipe.patches import replaced
from fxpipe.torch_compat.export import import_dynamo
from fxpipe.torch_compat.fakes import fake_home
from fxpipe.user_line import LINE, current_line, definition, is_users

Given = TypeVar("Given")
Made = TypeVar("Made")
KEEPS = "tracer='record' keeps it"
UNREGISTERED = (
    "a tensor that needs a gradient and is no parameter of the model is used in forward, or in loss_fn",
    "register it as an nn.Parameter of the model, or pass the module that holds it as loss_fn= itself",
)
LEAKED = (
    "forward keeps a tensor outside of the model's modules, in a global, a class or a cache such as "
    "functools.lru_cache's, and keeps now what it has made while it was captured, without numbers; empty it "
    "(cache_clear()), and make the tensor in forward each time, or keep it in a buffer"
)
ONCE = "which would happen once, while tracing"
DRAWN = (
    "random numbers are drawn or seeded {where}, by Python's, NumPy's or torch's generator or by the model's own, and "
    "what was drawn would be the same ever after"
)

BACKWARD = torch.autograd.backward
"""torch's own function, read before any patch, since a model may have bound that function, too."""


# --- 1. Refusals ---


def refuse(fact: str, instead: str) -> TraceError:
    """The TraceError with the fact, the remedy and the user's current line. The caller raises it."""
    line = current_line()
    return TraceError(f"{fact}; {instead}" + (f"\n{line}" if line else ""))


def refusing(fact: str, instead: str) -> Callable[..., Any]:
    """A function that raises ``refuse(fact, instead)`` at each call, to put in place of a function of torch."""

    def called(*args: Any, **kwargs: Any) -> Any:
        raise refuse(fact, instead)

    return called


def refuse_changes(root: nn.Module, changes: Iterable[str], instead: str, line: str = "") -> None:
    """TraceError for the first attribute that forward has changed; ``line``: the user's line that did so, if known."""
    for name in changes:
        at = line or definition(type(root).forward)
        raise TraceError(f"forward changes {type(root).__name__}.{name}, {ONCE}; {instead}\n{at}")


def backward_hooks(module: nn.Module) -> list[Any]:
    """The hooks on a module's gradients. These hooks never run if a tracer traces through the module."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


refuse_backward = refusing(
    "forward calls backward, which adds to .grad beside the step",
    "take gradients with torch.autograd.grad, where all that they go through is in one stage",
)


refuse_checkpoint = refusing("forward uses activation checkpointing, and what it saves would be lost", KEEPS)


@contextlib.contextmanager
def plain_modes(grad: bool) -> Iterator[None]:
    """A context with grad mode set to ``grad``, and inference mode and autocast off. Captures record changes to it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        for device in kinds():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


# --- 2. Questions ---


def as_in_run(capture: Callable[[Given], Made]) -> Callable[[Given], Made]:
    """A tracer that tells code that asks whether it is traced that it runs.

    In a run transformers' models leave out a mask that hides nothing, so that attention takes less time and memory.

    1. The tracer captures, and every question of users' code gets the answer of a run.
    2. If it refuses a line, and some code has asked, it captures again. The file of that line, with all that it calls,
       now gets the true answer.
    3. If the same file is refused again, or no line is known, all files get the true answer.

    The loop ends: each turn adds a file, or all files, and it raises the error if nobody asked.
    """

    def captured(given: Given) -> Made:
        import_dynamo()  # later compilations would use the replaced questions
        traced: tuple[str, ...] = ()
        while True:
            asked: list[str] = []
            try:
                with _told(asked, traced):
                    return capture(given)
            except TraceError as error:
                if not asked:
                    raise
                file = line["file"] if (line := LINE.search(str(error))) else ""
                traced += ("" if file in traced else file,)  # "" begins every path

    return captured


def _told(asked: list[str], traced: tuple[str, ...]) -> AbstractContextManager[None]:
    """While this context is open, ``torch.compiler`` and the class of fake tensors tell users' code that it runs.

    Adds each such question to ``asked``. Files whose path begins with an entry of ``traced``, with all that they call,
    get the true answer; so do torch and fxpipe, and functions named ``warn…``.
    """

    def answer(name: str, true: Any, in_run: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name in (name, "__getattr__"):  # wrappers of the question
            frame = frame.f_back
        codes = (caller.f_code for caller, _ in traceback.walk_stack(frame))
        # for a warning, transformers would look for padding in the ids of each micro-batch
        told = (code.co_filename.startswith(traced) or code.co_name.startswith("warn") for code in codes)
        if not is_users(frame.f_code.co_filename) or any(told):
            return true()
        asked.append(name)
        return in_run

    class Home(ModuleType):
        def __getattr__(self, name: str) -> Any:
            true = functools.partial(getattr, fake_home, name)
            return answer(name, true, type(None)) if name == "FakeTensor" else true()

    asks = [getattr(torch.compiler, name) for name in ("is_compiling", "is_exporting")]
    patches = [(torch.compiler, ask.__name__, functools.partial(answer, ask.__name__, ask, False)) for ask in asks]
    return replaced([*patches, (torch, "_subclasses", Home("_subclasses"))])


# --- 3. Calls ---

Key = tuple[int, str]
"""(the id of a module's ``__dict__``, which torch.export's stand-in for the module shares; the name of a method)"""
Handler = Callable[[Key, Callable[..., Any], Any, Any], Any]
"""(method's key, the unpatched method, args, kwargs) → the call's result."""


def handled(methods: Iterable[tuple[nn.Module, str]], handle: Handler) -> AbstractContextManager[None]:
    """While this context is open, ``handle`` gets each call of these methods. It patches the modules' classes.

    A class is patched, and not the module: Python looks up ``__call__`` on the class, and torch.export calls a stand-in
    that shares the module's ``__dict__`` and derives from its class. Other modules of the class call the unpatched
    method. Contexts nest: the inner context's handler gets the call first, and its ``inner`` is the outer context's.

    Args:
        methods: (module, name of a method or of a property whose value is a function).
        handle: see ``Handler``. It decides whether, and with which arguments, the unpatched method runs.
    """
    owners: dict[Key, type] = {(id(vars(module)), method): type(module) for module, method in methods}

    def patch(owner: type, method: str) -> Any:
        """The replacement of a method, or a property whose value is a function, on its class."""
        own, plain = vars(owner).get(method), getattr(owner, method)

        def called(module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            key = id(vars(module)), method
            # if a class and its base are both patched, a call gets here twice: the module's own class handles the call
            return handle(key, inner, args, kwargs) if owners.get(key) is owner else inner(*args, **kwargs)

        if isinstance(plain, property):  # its value is a function
            return property(lambda module: functools.partial(called, module, plain.__get__(module)), plain.fset)

        @functools.wraps(plain)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # super() is looked up at each call, since torch.fx patches nn.Module.__call__ after this patch
            inner = getattr(super(owner, module), method) if own is None else own.__get__(module)
            return called(module, inner, *args, **kwargs)

        return call

    patches = {(owner, method): patch(owner, method) for (_, method), owner in owners.items()}
    return replaced((owner, method, call) for (owner, method), call in patches.items())
