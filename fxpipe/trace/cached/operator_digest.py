"""A digest of one run of forward: every operator that it calls, on what, where, and in which modes.

What ``torch.export`` makes of a model is a function of such a run. Sources cannot tell it: a registry, a closure, a
patched function, an attribute's value or an environment variable change the graph, and no file.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fxpipe.graph.modes import ambient_autocast
from fxpipe.torch_compat import FakeTensor, TorchDispatchMode, bytes_of, pytree, schema_of
from fxpipe.trace.cached.not_kept import NotKept
from fxpipe.trace.fake import outside
from fxpipe.trace.patching import patched
from fxpipe.trace.user_line import is_users

_AS_THEY_ARE = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout),
    torch.memory_format,
)
"""Told by ``repr``, which differs where they do."""
LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""What ``torch.tensor([1.0])`` runs on its numbers."""
_DETACH = torch.ops.aten.detach.default
_NUMBERED = re.compile(r"%\d+~")


class OperatorDigest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is ``watching``, all that is dispatched goes into a hash.

    ``given``: name → tensor, of what an operator may be given beside results of others. ``paths``: a submodule's path,
    by the identity of its ``__dict__``.
    """

    def __init__(self, given: Iterable[tuple[str, Tensor]], paths: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.files: set[str] = set()
        """The user's files from which operators were called."""
        self.done: list[str] = []
        """What was computed, call by call, each told by what it was computed of, however often and from where."""
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []  # an identity is good as long as its object lives
        self._paths = paths
        self._hash = hashlib.sha256()
        self._known: dict[Any, str] = {}
        self._is_users: dict[str, bool] = {}
        self._refusal = ""
        for name, tensor in given:
            self._call(name, tensor)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """NotKept where something was met that is not told by a name, a number or a text, whoever caught the error."""
        handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            with (
                patched(torch.autocast, "__enter__", self._noting(torch.autocast.__enter__)),
                patched(torch.autocast, "__exit__", self._noting(torch.autocast.__exit__)),
                self,
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()
        if self._refusal:
            raise NotKept(self._refusal)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lift = operator in LIFTS and type(args[0]) is Tensor
        told = f"numbers {self._constant(args[0])}" if lift else f"{self._operator(operator)} {self._word(args)}"
        told += f" {self._word(kwargs)} {torch.is_grad_enabled()}"
        self._tell(f"{told} {self._line()}")
        result = operator(*args, **kwargs)
        if operator is _DETACH:  # torch.zeros(4) and its like call it, too, where they are no operators by themselves
            self._tell(self._result(result, self._tensor(args[0]).rpartition("~")[2].removesuffix("+")))
            return result
        self._tell(self._result(result, short := _short(told)))
        if operator.namespace != "prim":  # which only asks
            self.done.append(short)
        return result

    def value(self, leaf: Any) -> str:
        """A part of forward's result, in words; of an object, which no graph returns, its class."""
        return self._word(leaf) if isinstance(leaf, (Tensor, *_AS_THEY_ARE)) else f"a {type(leaf)}"

    def outline(self, leaves: Iterable[Any]) -> list[str]:
        """What tensors are computed of, however often that was."""
        return [_NUMBERED.sub("%", self._tensor(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    @property
    def operators(self) -> frozenset[Any]:
        """Those that were called."""
        return frozenset(self._known)

    # what is told

    def _tell(self, text: str) -> None:
        self._hash.update(text.encode("utf-8", "surrogatepass") + b"\n")

    def _operator(self, operator: Any) -> str:
        """Its signature, too: an operator of the user's own may have another one tomorrow."""
        if operator not in self._known:
            self._known[operator] = f"{operator} {schema_of(operator)}"
        return self._known[operator]

    def _word(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in _AS_THEY_ARE:
            return repr(value)
        if isinstance(value, (list, tuple)):
            opens = "[" if isinstance(value, list) else "("
            return f"{opens}{', '.join(map(self._word, value))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._word(part)}' for key, part in value.items())}}}"
        raise self._refuse(f"an operator is given a {type(value).__name__}")

    def _tensor(self, tensor: Tensor) -> str:
        name = self._names.get(id(tensor))
        if name is None:
            raise self._refuse(
                f"forward, or loss_fn, uses a tensor of shape {list(tensor.shape)} that is neither an input nor one "
                "of the model's parameters and buffers"
            )
        return f"{name}+" if tensor.requires_grad else name

    def _constant(self, tensor: Tensor) -> str:
        with outside():
            if tensor.layout is not torch.strided or tensor.is_meta:
                raise self._refuse(f"forward makes a tensor of numbers that is {tensor.layout} on {tensor.device}")
            numbers = hashlib.sha256(bytes_of(tensor.detach().cpu().contiguous())).hexdigest()
        return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device} {numbers}"

    def _result(self, value: Any, of: str) -> str:
        if isinstance(value, (list, tuple)):
            return ", ".join(self._result(part, f"{of}.{place}") for place, part in enumerate(value))
        if not isinstance(value, Tensor):
            return self._word(value)
        self._call(f"%{len(self._alive)}~{of}", value)  # a name anew where it is written in place
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"

    def _call(self, name: str, tensor: Tensor) -> None:
        self._alive.append(tensor)
        self._names[id(tensor)] = name

    def _refuse(self, why: str) -> NotKept:
        self._refusal = self._refusal or why
        return NotKept(why)

    # where and in which modes

    def _line(self) -> str:
        """The innermost line of user code that runs now."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._is_users:
                self._is_users[name] = is_users(name)
            if self._is_users[name]:
                self.files.add(name)
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._tell(f"into {self._paths.get(id(vars(module)), type(module))}")

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._tell(f"out of {self._paths.get(id(vars(module)), type(module))}")

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def change(region: Any, *args: Any) -> Any:
            result = original(region, *args)
            self._tell(f"autocast {region.device} {region.fast_dtype} {ambient_autocast()}")
            return result

        return change


def _short(told: str) -> str:
    return hashlib.blake2b(_NUMBERED.sub("%", told).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def fakes_of(named: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The fake tensors in inputs, with their names and places."""
    return [
        (f"input {name!r} {place}", leaf)
        for name, value in named.items()
        for place, leaf in enumerate(pytree.tree_leaves(value))
        if isinstance(leaf, FakeTensor)
    ]
