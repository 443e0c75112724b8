"""Question: a value that a model's forward asks for, and that its inputs alone decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError
from fxpipe.stage.modes import Autocast, within
from fxpipe.torch_compat import pytree

QuestionKind = Literal["truth", "number", "list"]
Answer = bool | int | tuple[Any, ...]
Answers = tuple[tuple[str, Answer], ...]
"""(question's key, answer), in the order in which forward asks."""


@dataclass(frozen=True)
class Question:
    """``if attention_mask.all():``, for a micro-batch: the graph from the inputs to the value, and the line.

    ``before``: the answers after which forward asks this question; after others the question may not even be defined.
    """

    key: str
    """A digest of the graph, the same on all ranks."""
    line: str
    before: Answers
    inputs: tuple[str, ...]
    sizes: tuple[tuple[str, int, int, int], ...]
    """(input, index of its leaf, dimension, size) of the only sizes for which the graph is valid."""
    run: nn.Module = field(compare=False, repr=False)
    kind: QuestionKind = "truth"
    autocast: tuple[Autocast, ...] = ()
    compute: torch.dtype | None = None
    """The dtype to which floating-point inputs are cast beforehand."""
    writes: bool = False
    """Whether the graph writes into tensors, even only into copies."""

    def answer(self, values: Mapping[str, Any]) -> Answer | None:
        """Returns the answer for a micro-batch; None if an input of the question is missing in ``values``, or has
        another size."""
        inputs = {name: values.get(name) for name in self.inputs}
        leaves = {name: pytree.tree_leaves(value) for name, value in inputs.items()}
        # the graph is valid only for these sizes, as captures are
        fits = (leaves[name][index].shape[dim] == size for name, index, dim, size in self.sizes)
        if any(value is None for value in inputs.values()) or not all(fits):
            return None
        cast = pytree.tree_map_only(Tensor, self._cast, [*inputs.values()])
        with torch.no_grad(), within(self.autocast):
            value = self.run.forward(*cast)[0]  # a call would print errors for batches of other kinds
        of_kind: dict[QuestionKind, Callable[[Any], Answer]] = {"truth": bool, "number": int, "list": _as_tuples}
        return of_kind[self.kind](value)

    def _cast(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone() if self.writes else tensor
        return tensor.to(self.compute) if self.compute is not None and tensor.is_floating_point() else tensor


def _as_tuples(value: Any) -> Any:
    value = value.tolist() if isinstance(value, Tensor) else value
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


class Unanswered(FxpipeError):
    """A capture needs an unanswered fact about the inputs. ``key`` identifies the fact, the same on all ranks.

    ``question``: the question whose answer is needed; None if descriptions with Python's values answer. ``numbers``:
    whether the capture may ask for numbers."""

    def __init__(self, key: str, line: str, numbers: bool, question: Question | None = None) -> None:
        super().__init__(f"what is captured depends on the inputs' values ({key})\n{line}")
        self.key, self.numbers, self.question = key, numbers, question
