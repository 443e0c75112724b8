"""Options: every option stands in one place, and in the signatures that an editor shows."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.options import Options, TracerName, Zero, ZeroScope
from fxpipe.schedules import ScheduleName
from tests.thinned import ALL

FIELDS = {field.name: field.default for field in dataclasses.fields(Options)}


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword parameters of a function, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def test_compile_takes_the_options_with_their_defaults_and_in_their_order() -> None:
    assert list(options_of(fxpipe.compile).items()) == list(FIELDS.items())


def test_preview_takes_some_of_them() -> None:
    own = {"optimizer": "adamw"}
    assert options_of(fxpipe.preview).items() <= (FIELDS | own).items()


def test_each_option_is_told_of_by_the_docstring_of_compile() -> None:
    told = inspect.getdoc(fxpipe.compile) or ""
    assert [name for name in FIELDS if name not in told] == []


def test_a_type_checker_knows_the_names_that_there_are() -> None:
    assert set(get_args(ScheduleName)) == set(fxpipe.SCHEDULES)
    assert set(get_args(TracerName)) == set(fxpipe.TRACERS)
    for zero, scope in itertools.product(get_args(Zero), get_args(ZeroScope)):
        assert Options(zero=zero, zero_scope=scope).zero == zero


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().zero = 2  # type: ignore[misc]


def by_rows(x: torch.Tensor, of: frozenset[str] = frozenset()) -> bool:
    return len(x) in {1, 2, 3} or "a" in {"a", "b", "c"} or (lambda y: y > 1.5)(x)


def test_what_functions_are_compared_by_is_the_same_in_every_process_and_tells_two_lambdas_apart() -> None:
    class Rows:
        def __call__(self, x: torch.Tensor) -> float:
            return float(len(x))

    assert re.fullmatch(r"Rows, code [0-9a-f]{16},", Options(loss_weight=Rows()).facts["loss_weight"])
    assert Options(hardware=fxpipe.Hardware(link=2.0)).facts["hardware"].startswith("Hardware(flops=None,")
    given = {"loss_weight": by_rows, "loss_fn": nn.MSELoss(), "stage_compiler": torch.compile, "init_fn": by_rows}
    facts = Options(**given).facts  # type: ignore[arg-type]
    assert re.fullmatch(r"by_rows, code [0-9a-f]{16},", facts["loss_weight"])
    assert re.fullmatch(r"MSELoss, code [0-9a-f]{16},", facts["loss_fn"])
    program = "import sys; sys.path[:0] = ['.']; from tests.test_options import by_rows; from fxpipe.options import "
    program += "describe_value; print(describe_value(by_rows))"
    assert {told_with_seed(program, seed) for seed in ((1, 2) if ALL else (1,))} == {facts["loss_weight"]}
    mean, total, whole = lambda x: x.mean(), lambda x: x.sum(), lambda x: 2 * x.sum()
    assert len({Options(loss_weight=one).facts["loss_weight"] for one in (mean, total, whole)}) == 3
    assert len({Options(loss_weight=lambda x, k=k: k * x).facts["loss_weight"] for k in range(3)}) == 1


def told_with_seed(program: str, seed: int) -> str:
    """What a new process prints, whose strings have other hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100, env=environment
    ).stdout.strip()


def test_what_compile_alone_needs_is_not_held_beyond_it() -> None:
    options = Options(zero=1, example_args=[1], init_fn=print, checkpoint="here")
    assert options.has_example
    after = options.for_calls()
    assert (after.has_example, after.init_fn, after.checkpoint, after.zero) == (False, None, None, 1)


@pytest.mark.parametrize(("asked", "ranks", "count"), [(None, 1, 1), (None, 4, 16), (3, 4, 3)])
def test_a_batch_is_cut_into_as_many_as_asked_for_or_four_a_rank(asked: int | None, ranks: int, count: int) -> None:
    assert Options(microbatches=asked).microbatches_on(ranks) == count


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"microbatches": "4"}, "microbatches is '4'; it is a whole number"),
        ({"microbatches": 0}, "microbatches=0; at least 1 is needed"),
        ({"zero": 4}, "zero=4; write 0, 1"),
        ({"check_batches": "no"}, "check_batches is 'no'; it is True or False"),
        ({"batch_dim": "1"}, "batch_dim is '1'; it is a dimension"),
        ({"placement": [0, 1]}, "placement is [0, 1]; it is a dict stage name -> pipe rank"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb is '25'; it is a size in MiB"),
        ({"memory_per_rank": 0}, "memory_per_rank=0; write a number above 0"),
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
        check_batches=1,
        check_capture=np.True_,
        bucket_cap_mb=np.float32(3),
        example_args=inputs.values(),
    )
    assert taken.microbatches_on(4) == 2
    assert taken.has_example
