"""Decisions: answers for forward during an export, when it reads values of fake tensors, or symbolic sizes.

Takes: the answers that are known for the micro-batch (question's key → bool, number or list). Gives: contexts in which
reads of values return these answers, and in which ``len`` of a tensor stays symbolic.

1. Forward reads a value: ``if mask.all():``, ``int(lengths.max())``, ``mask.nonzero()``.
2. If torch knows the value without numbers, it is returned.
3. Otherwise the computation of the value in the graph is described by a digest. The digest is the question's key, so
   that equal computations have one answer, wherever they are written.
4. If ``answers`` has the key, the answer is returned and noted in ``used``.
5. If not, ``Asked`` ends forward. The export then returns the asked value, and a program that computes it for later
   batches.

Values of floating-point tensors are never asked for, except for a truth value.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.graph.question import Answer, QuestionKind
from fxpipe.patches import replaced
from fxpipe.snapshots.contents import users_modules
from fxpipe.torch_compat.fakes import FakeTensor
from fxpipe.torch_compat.sizes import SIZE_DECISIONS, fix_size, is_unbacked, known_truth
from fxpipe.trace.export.graph_so_far import computation_of, computed
from fxpipe.user_line import current_line


class Asked(BaseException):
    """Ends a run of forward that reads the unknown ``value``; a BaseException, so that no user's handler catches it.

    ``key``: the key of the answer in ``answers``; "" if the value has no description that identifies it.
    """

    def __init__(self, value: Any, kind: QuestionKind, key: str) -> None:
        super().__init__()
        self.value, self.kind, self.key, self.line = value, kind, key, current_line()


class Decisions(TorchFunctionMode):
    """Answers forward's questions by ``answers``, question's key → answer; raises ``Asked`` if the key is missing.

    Forward may ask for truth values, ``if mask.all():``. With ``numbers``, forward may also ask for numbers,
    ``int(lengths.max())``, and for the number of rows that an operation selects, ``mask.nonzero()``.
    """

    def __init__(self, answers: Mapping[str, Answer], numbers: bool) -> None:
        super().__init__()
        self._known, self._numbers = answers, numbers
        self.used: dict[str, Answer] = {}
        """Question's key → answer, in the order of the first questions."""
        self._nodes: dict[Any, str] = {}
        self._symbols: dict[str, str] = {}  # the symbol of a value → the description of the value's computation

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """While this context is open, forward's questions are answered."""
        symbolic: list[tuple[Any, str, QuestionKind]] = [(torch.SymBool, "__bool__", "truth")]
        symbolic += [(torch.SymInt, name, "number") for name in ("__int__", "__index__") if self._numbers]
        patches = [(owner, name, self._instead_of(getattr(owner, name), kind)) for owner, name, kind in symbolic]
        with replaced(patches), self:
            yield

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # 1. and 2. a value that forward reads and torch knows
        kind = ASKS.get(function)
        if kind is not None and _is_asked(args[0]) and (known := computed(function, args[0])) is not None:
            return known
        # 3. to 5. a value that only the inputs decide
        if kind is not None and self._answers(kind, args[0]):
            is_truth = kind == "number" and args[0].dtype == torch.bool
            return _as_lists(self._asked(args[0], "truth" if is_truth else kind, self._made(args[0])))
        if self._numbers and function is Tensor.__getitem__:
            args = args[0], self._by_places(args[1])
        result = function(*args, **kwargs)
        # a symbol has no history of its own: this notes the computation of its tensor
        if function is Tensor.item and isinstance(result, _SYMBOLIC):
            self._symbols[str(result.node.expr)] = self._made(args[0])
        self._note_sizes(result)
        return result

    def _answers(self, kind: QuestionKind, value: Any) -> bool:
        return _is_asked(value) and (kind == "truth" or (self._numbers and not value.is_floating_point()))

    def _by_places(self, index: Any) -> Any:
        """The index with the selected positions in place of each mask, so that their number depends on the mask alone,
        and not on the indexed tensor."""
        indices: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            is_mask = isinstance(part, Tensor) and part.dtype == torch.bool and part.dim() and _is_asked(part)
            places = part.nonzero(as_tuple=True) if is_mask else (part,)
            self._note_sizes(places if is_mask else ())
            indices += places
        return tuple(indices)

    def _note_sizes(self, result: Any) -> None:
        """Notes, and with ``numbers`` asks for, the result's sizes that depend on tensor values."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            for dim, size in enumerate(tensor.shape if isinstance(tensor, Tensor) else ()):
                if isinstance(size, torch.SymInt) and is_unbacked(size):
                    origin = self._made(tensor)
                    self._symbols[str(size.node.expr)] = origin = origin and f"size {dim} of {origin}"
                    if self._numbers:
                        fix_size(size, int(self._asked(size, "number", origin)))

    def _made(self, tensor: Tensor) -> str:
        """A digest of the operations that make the tensor in the exported graph; "" if some of them are unknown."""
        return computation_of(tensor, self._nodes, torch.ops.fxpipe.boundary.default)

    def _asked(self, value: Any, kind: QuestionKind, origin: str) -> Answer:
        """The known answer; ``Asked`` if there is none. ``origin``: the digest of the value's computation, or ""."""
        # the key describes the computation, and not the line: equal computations have equal answers
        key = origin and f"{kind} of {origin}"
        if key not in self._known:
            raise Asked(value, kind, key)
        return self.used.setdefault(key, self._known[key])

    def _instead_of(self, original: Callable[[Any], Any], kind: QuestionKind) -> Callable[[Any], Any]:
        """In place of a method of a symbolic number: asks for the number if it depends on the values of inputs."""

        def ask(symbol: Any) -> Any:
            if not is_unbacked(symbol):
                return original(symbol)
            if kind == "truth" and (truth := known_truth(symbol)) is not None:
                return truth
            text = _SYMBOL.sub(lambda match: self._symbols.get(match[0]) or "?", str(symbol.node.expr))
            return self._asked(symbol, kind, "" if "?" in text else text)

        return ask


ASKS: dict[Any, QuestionKind] = {
    **dict.fromkeys((Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero), "truth"),
    **dict.fromkeys((Tensor.__int__, Tensor.__index__, Tensor.item), "number"),
    Tensor.tolist: "list",
}
"""The functions that ask for a tensor's values."""


_SYMBOL = re.compile(r"\b(?:u|zuf)\d+\b")
"""torch's name of a symbol for a tensor's value."""
_SYMBOLIC = (torch.SymBool, torch.SymInt, torch.SymFloat)


def _as_lists(answer: Any) -> Any:
    """An answer as ``Tensor.tolist`` gives it: answers have tuples, as they are keys."""
    return list(map(_as_lists, answer)) if isinstance(answer, tuple) else answer


def _is_asked(value: Any) -> bool:
    """Whether the value is a fake tensor without a known constant, so that forward must ask for its value."""
    return isinstance(value, FakeTensor) and value.constant is None


# --- sizes of varying dimensions, which a capture keeps symbolic ---


def symbolic_lengths() -> contextlib.AbstractContextManager[None]:
    """While this context is open, ``len()`` of a tensor is symbolic in users' modules, as ``shape[0]`` is.

    transformers' ``CLIPModel`` needs this, as its loss calls ``torch.arange(len(logits))``. A tensor's ``__len__``
    cannot return a symbol, since Python's ``len()`` converts the result to an int. The replacement is put into users'
    modules, and not into ``builtins``, since torch._dynamo keeps references to the builtins for good.
    """
    return replaced((vars(module), "len", _length) for module in users_modules() if "len" not in vars(module))


def _length(value: Any, /) -> Any:
    """``len``, but the symbolic size of a tensor whose first dimension is symbolic."""
    is_symbolic = isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt)
    return value.shape[0] if is_symbolic else len(value)


@contextlib.contextmanager
def fixing_lines() -> Iterator[list[tuple[str, bool]]]:
    """Collects, while this context is open, the user lines (in traceback form) that fix a symbolic size to a number.

    Each line has a flag: whether it fixed the size itself, and not a number computed from the size.

    It wraps the method with which torch decides a condition on symbolic sizes. A condition that leaves a new guard on a
    number, or replaces a symbol by a number, has fixed something. Comparisons, whose answer is a bool, only add guards.
    """
    env, name = SIZE_DECISIONS
    decide, lines = getattr(env, name), list[tuple[str, bool]]()

    def fixed(self: Any) -> int:  # the count of symbols that have become numbers
        return sum(bool(expression.is_number) for expression in self.replacements.values())

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        # a new guard of a non-bool answer, or a newly replaced symbol, shows a size that has become a number
        before = len(self.guards), fixed(self)
        answer = decide(self, *args, **kwargs)
        is_truth = isinstance(answer, bool) or getattr(answer, "is_Boolean", False)
        of_size = fixed(self) > before[1]
        if of_size or (len(self.guards) > before[0] and not is_truth):
            lines.append((current_line(), of_size))
        return answer

    with replaced([(env, name, noting)]):
        yield lines
