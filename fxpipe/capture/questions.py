"""Questions: captures find the questions that forward asks about its inputs; ranks answer them per micro-batch.

Takes a program that computes the value that forward asks for, such as ``mask.all()``. Gives a ``Question``: a graph
that each rank runs on its own micro-batches.

1. A capture reaches a question that has no answer, and calls ``ask``, which raises ``Unanswered``.
2. The state notes the question (``asking``), and each rank answers it for its micro-batches (``answers``).
3. The capture starts again with the answers, and meets the next question, or ends.

A question that depends on more than inputs and constants is no question: ``ask`` returns, and the tracer refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxpipe.errors import RunError
from fxpipe.graph.program import Program
from fxpipe.graph.question import Answer, Answers, Question, Unanswered
from fxpipe.graph.topological import reachable
from fxpipe.passes import alias_groups, erase_boundaries, mark_copies
from fxpipe.specs import TensorSpec
from fxpipe.torch_compat import pytree
from fxpipe.trace import Request
from fxpipe.user_line import place_in

MOST_QUESTIONS = 16
"""The most questions about one micro-batch."""


@dataclass(frozen=True)
class Questions:
    """The questions that captures have asked so far, in their order."""

    asked: Mapping[tuple[Answers, str], Question] = field(default_factory=dict)
    """(the answers before a question, its key) → the question."""
    numbers: bool = False
    """Whether forward may also ask for numbers, because the model cannot be captured otherwise."""
    by_value: bool = False
    """Whether a capture is valid only for some Python numbers, so that descriptions of batches include numbers."""

    def answers(self, values: Mapping[str, Any]) -> Answers:
        """The answers for a micro-batch with these inputs; some may be missing."""
        # In forward's order: the questions after ``if mask.all():`` depend on the answer to it.
        facts: dict[str, Answer] = {}
        for question in self.asked.values():
            if question.key not in facts and all(facts.get(key, other) == other for key, other in question.before):
                try:
                    answer = question.answer(values)
                except Exception:  # this question is for another kind of micro-batch
                    answer = None
                if answer is not None:
                    facts[question.key] = answer
        return tuple(facts.items())

    def ask(self, request: Request, program: Program, query: Any, before: Answers) -> None:
        """Raises ``Unanswered`` with a new question, which a program computes; returns if the value depends on more
        than inputs. RunError if no rank was given the inputs of a known question.

        ``query``: the kind of value, the key and the line. ``before``: the answers that forward already has.
        """
        question = None if len(before) == MOST_QUESTIONS else _question_of(program, query, before, request)
        if question is None:
            return
        if (before, question.key) in self.asked:
            raise RunError(
                f"forward asks for values of {' and '.join(map(repr, question.inputs))}, and no rank of the pipe group "
                f"was given them, or they cannot be computed: pass them on one rank at least\n{question.line}"
            )
        raise Unanswered(question.key, question.line, request.asks_numbers, question)

    def asking(self, error: Unanswered) -> Questions:
        """The questions with the question that ``error`` left unanswered, which each micro-batch then answers."""
        if error.question is None:
            return replace(self, numbers=error.numbers, by_value=True)
        key = error.question.before, error.question.key
        return replace(self, numbers=error.numbers, asked={**self.asked, key: error.question})

    def only(self, used: Collection[Answers]) -> Questions:
        """The questions that captures with one of these answers have asked."""
        keys = {key for answers in used for key, _ in answers}
        return replace(self, asked={path: each for path, each in self.asked.items() if each.key in keys})

    def line(self, key: str) -> str:
        """The user's line that asks the question of a key, as "if mask.all(): (model.py:12)"."""
        line = next(question.line for question in self.asked.values() if question.key == key)
        return f"{line.splitlines()[-1].strip()} ({place_in(line)})"

    def described(self, answers: Answers) -> list[str]:
        """The user's lines that ask the questions behind these answers, in order, under a heading."""
        asking = dict.fromkeys(f"  {self.line(key)}" for key, _ in answers)
        head = "each outcome of these takes a capture, and a step waits for a GPU to know it:"
        return [head, *asking] if asking else []


def _question_of(program: Program, query: Any, before: Answers, request: Request) -> Question | None:
    """The question that a program computes; None if the answer depends on more than inputs and constants.

    (a) The nodes that the answer needs. (b) Their graph. (c) The sizes for which the graph is valid.
    """
    if not query.key:
        return None
    # (a) Only nodes that every stage could copy: deterministic functions of inputs and constants.
    program = mark_copies(erase_boundaries(program))
    written = alias_groups(program).written
    needed = _needed(program, written)
    for node in needed:
        if node.op == "get_attr" and node.target not in program.constants:
            return None
        if node.op.startswith("call_") and (node.name not in program.copied or "modes" in node.meta):
            return None
    # (b) The graph of these nodes, which each rank runs on its own micro-batches.
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    for node in program.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    constants = {str(node.target): program.constants[str(node.target)] for node in graph.nodes if node.op == "get_attr"}
    writes = any(node.name in group for node in needed for group in written)
    run, inputs = fx.GraphModule(constants, graph), tuple(str(n.target) for n in graph.nodes if n.op == "placeholder")
    # (c) The question is valid for these sizes, which the capture did not keep symbolic.
    modes = request.autocast, request.compute
    varying = request.varying if program.holds_for is not None else ()
    sizes = tuple(
        (name, index, dim, size)
        for name in inputs
        for index, leaf in enumerate(pytree.tree_leaves((request.example or {})[name]))
        for dim, size in enumerate(leaf.shape if isinstance(leaf, TensorSpec) else ())
        if (name, index, dim) not in varying
    )
    return Question(query.key, query.line, before, inputs, sizes, run, query.kind, *modes, writes)


def _needed(program: Program, written: Collection[frozenset[str]]) -> set[fx.Node]:
    """The nodes from which a program's output is computed, and the nodes that write into them. Other work of forward,
    such as an opaque region or a batch norm's statistics, is left out."""
    nodes = {node.name: node for node in program.nodes}

    def before(node: fx.Node) -> list[fx.Node]:
        groups = (group for group in written if node.name in group)
        return [*node.all_input_nodes, *(nodes[name] for group in groups for name in group)]

    return set(reachable([program.graph.output_node()], before))
