"""Stages compiled by a function of the user's, such as ``torch.compile``, on the ranks that run them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.distributed.activity import phase
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import Stage
from fxpipe.passes.analysis.effects import operator_name
from fxpipe.plan.joint_graph import InHalves

StageCompiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiled_lazily(stage: Stage, stage_compiler: StageCompiler) -> Stage:
    """The same stage, its function replaced by ``stage_compiler(module)`` when it first runs, and from then on.

    The compiler is given the stage's ``fx.GraphModule``, or its function where the user wrote it, and returns what is
    called with the same arguments for the same tuple. Only processes that run the stage compile it, once: a compiler
    that tells shapes apart, as ``torch.compile`` does, is asked again by its own guards.
    """
    if is_compiled(stage):
        return stage
    original = stage.module if isinstance(stage.module, fx.GraphModule) else stage.function
    if isinstance(original, fx.GraphModule):
        _check_writes(original, stage.name)
    return dataclasses.replace(stage, function=_Compiled(stage.name, original, stage_compiler))


def _check_writes(module: fx.GraphModule, name: str) -> None:
    """RunError for a write that AOTAutograd of torch 2.12 to 2.15 loses: into a 0-dimensional float64 on the CPU."""
    for node in module.graph.nodes:
        written = node.args[0] if node.args and operator_name(node).endswith("_") else None  # as copy_ and mul_ do
        if not isinstance(written, fx.Node) or written.op != "get_attr":
            continue
        held = operator.attrgetter(str(written.target))(module)
        if isinstance(held, Tensor) and held.dim() == 0 and held.dtype == torch.float64 and held.device.type == "cpu":
            raise RunError(
                f"stage {name!r} writes {written.target}, a number in float64 without dimensions, which torch.compile "
                "may leave as it was: give it shape (1,), or float32, or leave out stage_compiler="
            )


def is_compiled(stage: Stage) -> bool:
    """Whether ``compiled_lazily`` has made it."""
    return isinstance(stage.function, _Compiled)


def compiled_in_halves(stage: Stage) -> Stage:
    """A stage that ``compiled_lazily`` has made, with the function of ``Stage.deferring``, compiled in three."""
    assert isinstance(stage.function, _Compiled)
    return dataclasses.replace(stage, deferring=stage.function.in_halves)


class _Compiled:
    """A stage's function, or a graph that was made of it, compiled when it is first called."""

    def __init__(self, name: str, original: Callable[..., Any], stage_compiler: StageCompiler) -> None:
        self._name, self._original, self._stage_compiler = name, original, stage_compiler
        self._has_run = False

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self._has_run:
            outputs: tuple[Any, ...] = self._function(*inputs)
            return outputs
        with phase(f"the compiling of stage {self._name}"):  # which may last, and others wait for what it returns
            outputs = self._function(*inputs)
        self._has_run = True
        return outputs

    @cached_property
    def _function(self) -> Callable[..., Any]:
        function = self._stage_compiler(self._original)
        if not callable(function):
            raise RunError(
                f"stage_compiler returned {function!r:.80} for stage {self._name!r}; return a callable that takes the "
                "stage's inputs and returns the tuple that the stage does"
            )
        return function

    @cached_property
    def in_halves(self) -> InHalves:
        """The same in three: its forward, and the two halves of its backward."""
        return InHalves(self._original, lambda module: _Compiled(self._name, module, self._stage_compiler))

    def __repr__(self) -> str:
        return f"stage {self._name}, compiled by {self._stage_compiler!r}"
