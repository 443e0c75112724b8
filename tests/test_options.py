"""Options: every option is declared in one place, and is in the signatures that an editor shows."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.options import RENAMED, Options
from fxpipe.policies import Checks, TracerName, Tracing, Zero, ZeroLevel, ZeroScope
from fxpipe.schedules import ScheduleName

FIELDS = {field.name: field.default for field in dataclasses.fields(Options)}


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword parameters of a function, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def test_compile_and_preview_take_the_options_with_their_defaults_and_in_their_order() -> None:
    assert len(FIELDS) == 23
    assert list(options_of(fxpipe.compile).items()) == list(FIELDS.items())
    assert list(options_of(fxpipe.preview).items()) == [*FIELDS.items(), ("optimizer", "adamw"), ("costs", None)]


@pytest.mark.parametrize(("function", "result"), [(fxpipe.compile, "ForwardBackward"), (fxpipe.preview, "Preview")])
def test_help_shows_each_parameter_with_its_type_and_its_default(function: Callable[..., Any], result: str) -> None:
    text = pydoc.plain(pydoc.render_doc(function))
    assert f"{function.__name__}(model: 'nn.Module | StageGraph', topo: 'Topology" in text
    for field in dataclasses.fields(Options):
        assert f"{field.name}: {field.type!r} = {field.default!r}" in text
    assert f") -> '{result}'" in text
    assert inspect.getdoc(function) in inspect.cleandoc(text.replace("\n    ", "\n"))


def test_the_docstring_of_compile_explains_each_option_in_three_lines_at_most() -> None:
    arguments = (inspect.getdoc(fxpipe.compile) or "").split("Args:\n")[1].split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (?:.*)(?:\n     .*)*", arguments, re.MULTILINE)
    assert entries == ["model", "topo", *FIELDS]
    lines = [entry.count("\n") + 1 for entry in re.split(r"\n(?=    \w)", arguments)]
    assert max(lines) <= 3


@pytest.mark.long
def test_a_type_checker_sees_the_parameters(tmp_path: Path) -> None:
    """mypy takes what fits and refuses the rest, as for a function with the options in its def."""
    calls = {
        "compile(model, topo, zero=1, boundaries=['0'])": "",
        "compile(model=model, topo=topo)": "",
        "preview(model, topo, optimizer='sgd')": "",
        "compile(model, topo, zeroo=1)": 'Unexpected keyword argument "zeroo" for "compile"; did you mean "zero"?',
        "compile(model, topo, microbatches='4')": 'Argument "microbatches" to "compile" has incompatible type "str"',
        "compile(model)": 'Missing positional argument "topo" in call to "compile"',
        "compile(model, topo, None)": 'Too many positional arguments for "compile"',
    }
    pytest.importorskip("mypy")
    head = ["import fxpipe", "from torch import nn", "model, topo = nn.Linear(3, 3), fxpipe.Topology([('pipe', 1)])"]
    script = tmp_path / "script.py"
    script.write_text("\n".join([*head, *(f"fxpipe.{call}" for call in calls)]) + "\n")
    words = "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", ".mypy_cache", str(script)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    told = dict(re.findall(r"script.py:(\d+): error: (.*)", done.stdout))
    for number, wanted in enumerate(calls.values(), len(head) + 1):
        assert told.get(str(number), "").startswith(wanted) if wanted else str(number) not in told, done.stdout


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fxpipe.compile(None), "compile() missing a required argument: 'topo'"),  # type: ignore[call-arg, arg-type]
        (
            lambda: fxpipe.preview(1, 2, zeroo=1),
            "preview() got an unexpected keyword argument 'zeroo'; did you mean \"zero\"?",
        ),  # type: ignore[call-arg, arg-type]
        (lambda: fxpipe.compile(1, 2, 3), "compile() too many positional arguments"),  # type: ignore[call-arg, arg-type]
    ],
)
def test_wrong_arguments_are_a_type_error_of_the_function(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(told)}$"):
        call()


def test_a_type_checker_knows_the_names_that_there_are() -> None:
    assert set(get_args(ScheduleName)) == set(fxpipe.SCHEDULES)
    assert set(get_args(TracerName)) == set(fxpipe.TRACERS)
    for level, scope in itertools.product(get_args(ZeroLevel), get_args(ZeroScope)):
        assert Options(zero=Zero(level, scope=scope)).sharding.level == level


def test_functions_are_compared_by_their_names_and_lines() -> None:
    class Rows:
        def __call__(self, x: torch.Tensor) -> float:
            return float(len(x))

    assert Options(hardware=fxpipe.Hardware(link=2.0)).facts["hardware"].startswith("Hardware(flops=None,")
    assert [Options(loss_fn=one()).facts["loss_fn"] for one in (Rows, nn.MSELoss)] == ["Rows", "MSELoss"]
    weights = [Options(loss_weight=lambda x, k=k: k * x) for k in range(2)] + [Options(loss_weight=lambda x: x)]
    first, second, other = (one.facts["loss_weight"] for one in weights)
    assert first == second != other


def test_what_compile_alone_needs_is_not_held_beyond_it() -> None:
    options = Options(zero=1, example_args=[1], init_fn=print, checkpoint="here")
    assert options.has_example
    after = options.for_calls()
    assert (after.has_example, after.init_fn, after.checkpoint, after.sharding) == (False, None, None, Zero(1))


@pytest.mark.parametrize(("asked", "ranks", "count"), [(None, 1, 1), (None, 4, 16), (3, 4, 3)])
def test_a_batch_is_cut_into_as_many_as_asked_for_or_four_a_rank(asked: int | None, ranks: int, count: int) -> None:
    assert Options(microbatches=asked).microbatches_on(ranks) == count


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"microbatches": "4"}, "microbatches is '4'; it is a whole number"),
        ({"microbatches": 0}, "microbatches is 0; it is a whole number of at least 1"),
        ({"zero": 4}, "zero is 4; it is 0, 1"),
        ({"checks": False}, "checks is False; it is fxpipe.Checks(...)"),
        ({"batch_dim": "1"}, "batch_dim is '1'; it is a dimension"),
        ({"placement": [0, 1]}, "placement is [0, 1]; it is a dict stage name -> pipe rank"),
        ({"hardware": 80e9}, 'hardware is 80000000000.0; it is the name of a GPU, such as "h100", or fxpipe.Hardware'),
        ({"example_kwargs": (torch.ones(2),)}, "it is a dict input name -> value"),
        ({"passes": fxpipe.passes.partition}, "it is a list of functions Program -> Program"),
        ({"tracer": fxpipe.TRACERS["export"]}, "it is a name out of fxpipe.TRACERS"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(option: dict[str, Any], told: str) -> None:
    with pytest.raises(fxpipe.RunError, match=re.escape(told)):
        fxpipe.compile(nn.Linear(3, 3), fxpipe.Topology([("pipe", 1)]), **option)


def test_what_can_be_meant_is_taken() -> None:
    inputs = {"x": torch.ones(2, 3)}
    taken = Options(
        microbatches=np.int64(2),
        checks=Checks(batches=1),  # type: ignore[arg-type]
        tracer=Tracing(check=np.True_),  # type: ignore[arg-type]
        zero=Zero(np.int64(1), bucket_mb=np.float32(3)),  # type: ignore[arg-type]
        example_args=inputs.values(),
    )
    assert taken.microbatches_on(4) == 2
    assert taken.has_example


@pytest.mark.parametrize(
    ("policy", "field", "wrong", "told"),
    [
        (Zero, "level", 4, "fxpipe.Zero: level is 4; it is 0, 1"),
        (Zero, "scope", "rack", 'scope is \'rack\'; it is "node" or "data"'),
        (Zero, "bucket_mb", 0, "bucket_mb is 0; it is a size above 0, in MiB"),
        (Tracing, "name", 3, "name is 3; it is a name out of fxpipe.TRACERS"),
        (Tracing, "opaque", "no", "opaque is 'no'; it is True or False"),
        (Checks, "nonfinite", True, 'nonfinite is True; it is "warn" or "raise"'),
        (Checks, "timeout", -1, "timeout is -1; it is a number of seconds above 0"),
    ],
)
def test_a_policy_refuses_what_it_cannot_mean(policy: Any, field: str, wrong: Any, told: str) -> None:
    with pytest.raises(fxpipe.RunError, match=re.escape(told)):
        policy(**{field: wrong})


@pytest.mark.parametrize("name", RENAMED)
def test_an_option_under_its_old_name_is_a_type_error_with_what_to_write(name: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{name}= is an option of fxpipe 0.2; write {RENAMED[name]}")):
        fxpipe.compile(nn.Linear(3, 3), fxpipe.Topology([("pipe", 1)]), **{name: 1})
    option, _, policy = RENAMED[name].partition("=")
    Options(**{option: eval(policy, {"fxpipe": fxpipe})})
