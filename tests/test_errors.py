"""The error types, and the ends of their messages."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, errors
from fxpipe.capture import questions
from fxpipe.progress import log

PAGE = Path(__file__).parents[1] / "examples" / "errors.md"


def test_every_error_is_shown_on_the_page_which_is_run() -> None:
    shown = "".join(re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    kinds = {kind.__name__ for kind in errors.FxpipeError.__subclasses__() if kind.__module__ == errors.__name__}
    assert kinds <= set(re.findall(r"^(\w+): ", shown, re.MULTILINE))


PUBLIC = tuple(kind for kind in errors.FxpipeError.__subclasses__() if kind.__name__ in fxpipe.__all__)


class Asking(nn.Module):
    """Asks ``what`` between two layers that are in two stages."""

    def __init__(self, what: Callable[[nn.Linear, Tensor], object]) -> None:
        super().__init__()
        self.below, self.above, self.what = nn.Linear(4, 4), nn.Linear(4, 1), what

    def forward(self, x: Tensor, given: object = None) -> Tensor:
        h = x if self.what(self.below, x) else -x
        return self.above(fxpipe.stage_boundary(self.below(h))).mean()  # type: ignore[no-any-return]


INTERNAL: dict[str, list[Callable[[nn.Linear, Tensor], object]]] = {
    "Asked": [lambda layer, x: layer.weight.sum() > x.sum(), lambda layer, x: x.max() > 9 or np.random.rand()],
    "Unanswered": [lambda layer, x: all((x * number).sum() > -99 for number in range(4))],
    "_Unknown": [lambda layer, x: True],
    "Differs": [],  # the layer is traced as usual
    "Unrepeatable": [],
}
"""Exception of fxpipe that is of no public class → what leads to it."""


def test_every_other_exception_becomes_one_of_a_public_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MOST_QUESTIONS", 2)
    sources = [path.read_text() for folder in ("fxpipe", "passes") for path in (PAGE.parents[1] / folder).rglob("*.py")]
    classes = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    bases = {node.name: [ast.unparse(base) for base in node.bases] for node in classes}
    raised, public = {"Exception", "BaseException"}, {kind.__name__ for kind in PUBLIC}
    for _ in range(3):  # the deepest class is as many classes below
        public |= {name for name in bases if public.intersection(bases[name])}
        raised |= {name for name in bases.keys() - public if raised.intersection(bases[name])}
    assert raised - {"Exception", "BaseException", "FxpipeError"} == set(INTERNAL)
    for name, asked in INTERNAL.items():
        batch: dict[str, Any] = {"x": torch.ones(4, 4), "given": iter(()) if name == "_Unknown" else None}
        for what in asked:
            with pytest.raises(PUBLIC):
                fxpipe.compile(Asking(what), Topology([("pipe", 2)]), microbatches=2, example_kwargs=batch)


@pytest.mark.parametrize(
    ("name", "known", "end"),
    [
        ("1f1", ["gpipe", "1f1b"], '; did you mean "1f1b"?'),
        ("zigzag", ["gpipe", "1f1b"], '; known: "gpipe", "1f1b"'),
        ("zigzag", [], ""),
    ],
)
def test_nearest_names_the_likeliest_or_else_the_first(name: str, known: list[str], end: str) -> None:
    assert errors.nearest(name, known) == end


def test_of_many_names_the_first_are_listed_and_the_rest_counted() -> None:
    told = errors.nearest("zigzag", (f"layer.{number}" for number in range(100_000)))
    assert told.startswith('; known: "layer.0", "layer.1", ')
    assert told.endswith(" more")
    assert len(told) < 1000
    assert errors.nearest("z" * 10**6, ["gpipe"]) == '; known: "gpipe"'


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    cls = errors.ScheduleError
    told = str(cls("begin " + "x" * 10**6 + " end"))
    assert len(told) < errors.MOST_TOLD + 1
    assert told.startswith("begin xxx")
    assert told.endswith("xxx end")
    assert "980,070 characters left out" in told
    assert str(cls("as it is")) == "as it is"
    assert str(pickle.loads(pickle.dumps(cls(told)))) == str(cls(told))


def test_what_is_told_of_any_error_is_bounded_with_its_notes() -> None:
    error = ValueError("x" * 10**6)
    error.add_note("y" * 10**6)
    assert len(errors.describe_error(error)) < errors.MOST_TOLD + 1


def test_what_an_error_quotes_tells_a_terminal_nothing() -> None:
    """Names come from files and models; lines and tabs are the message's own."""
    error = errors.CheckpointError("no \x1b[31m\x9b\u202e\n\t“é”")
    assert str(error) == "no \\x1b[31m\\x9b\\u202e\n\t“é”"
    with pytest.raises(ValueError, match="of theirs") as raised, errors.noted(lambda: "in stage \x1b"):
        raise ValueError("of theirs")
    assert raised.value.__notes__ == ["in stage \\x1b"]
    assert errors.describe_error(ValueError("\x1b")) == "ValueError: \\x1b"


def test_what_a_model_names_tells_a_terminal_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bell = "\x07\x1b[31m"

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return fxpipe.stage_boundary(output, name=bell).square().mean()

    topology, example = fxpipe.Topology([("pipe", 2)]), torch.ones(4, 2)
    options: dict[str, Any] = {"loss_fn": loss_fn, "microbatches": 2, "example_args": (example,)}
    preview = fxpipe.preview(torch.nn.Linear(2, 2), topology, **options)
    forward_backward = fxpipe.compile(torch.nn.Linear(2, 2), topology, **options)
    forward_backward.record_timeline()
    forward_backward(example)
    stages = forward_backward.stages
    for shown in (preview, stages, *stages, forward_backward.schedule, forward_backward.timeline()):
        print(shown, repr(shown))
    log(bell)
    printed = "".join(capsys.readouterr())
    assert not {"\x07", "\x1b"} & set(printed)
    assert printed.count(r"\x07\x1b[31m") > 8
