"""Averages of a model beside it, and parameters that a rank does not hold: EMA teachers, MoCo's queue, DINO's centre."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.harness import engine_of

MOMENTUM, STEPS, RANKS = 0.9, 5, 3
PLACEMENT = {"student.below": 0, "teacher.below": 0, "student.above": 1, "teacher.above": 1, "compare": 2}
"""A teacher's stages on its student's ranks."""


class Teaching(nn.Module):
    """A student and its teacher, of two stages each, and what compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.ModuleDict({"below": nn.Linear(6, 8), "above": nn.Linear(8, 4)})
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        below = fxpipe.stage_boundary(self.student.below(one).relu(), name="student.above")
        student = self.student.above(below)
        below = fxpipe.stage_boundary(self.teacher.below(other).relu(), name="teacher.above")
        teacher = self.teacher.above(below)
        return self.compare(*fxpipe.stage_boundary((student, teacher), name="compare"))

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        """As a mean teacher does."""
        return (student - teacher).square().mean()


class Byol(Teaching):
    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Linear(4, 4)

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        return 2 - 2 * nn.functional.cosine_similarity(self.predictor(student), teacher).mean()


class Dino(Teaching):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        wanted = ((teacher - self.centre) / 0.04).softmax(-1)
        self.centre.lerp_(teacher.mean(0), 0.1)
        return -(wanted * (student / 0.1).log_softmax(-1)).sum(-1).mean()


class Moco(Teaching):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", nn.functional.normalize(torch.randn(16, 4), dim=-1))

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        query, key = nn.functional.normalize(student, dim=-1), nn.functional.normalize(teacher, dim=-1)
        logits = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone().T], dim=1)
        self.queue.copy_(torch.cat([key, self.queue[: -key.shape[0]]]))  # the newest come first
        return nn.functional.cross_entropy(logits / 0.2, torch.zeros_like(logits[:, 0], dtype=torch.long))


MODELS = (Teaching, Byol, Dino, Moco)


def seeded(make: Callable[[], Teaching]) -> Teaching:
    torch.manual_seed(0)
    return make()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, 6, generator=generator)) for _ in range(STEPS)]


def averaged(parameters: Any, model: Teaching) -> None:
    with torch.no_grad():
        for name, parameter in parameters:
            if name.startswith("teacher."):
                parameter.lerp_(model.get_parameter(name.replace("teacher.", "student.")), 1 - MOMENTUM)


def plainly(make: Callable[[], Teaching]) -> dict[str, Tensor]:
    model = seeded(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one, other in batches():
        optimizer.zero_grad()
        for part in zip(one.chunk(4), other.chunk(4), strict=True):
            (model(*part) / 4).backward()
        optimizer.step()
        averaged(model.named_parameters(), model)
    return model.state_dict()


def piped(make: Callable[[], Teaching], zero: int) -> dict[str, Tensor]:
    model = seeded(make)
    pipe = fxpipe.Topology([("pipe", RANKS)])
    forward_backward = fxpipe.compile(model, pipe, microbatches=4, placement=PLACEMENT, zero=zero)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        forward_backward(*batch)
        optimizer.step()
        averaged(forward_backward.named_parameters(), model)
    return forward_backward.state_dict(full=True)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("engine", ["local", "distributed"])
def test_teachers_are_plain_pytorchs(make: Any, engine: str, request: pytest.FixtureRequest) -> None:
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    for state in run(RANKS, piped, make, 0):
        torch.testing.assert_close(state, plainly(make), rtol=0, atol=0)


# --- what a rank does not hold


def teacher_elsewhere() -> Any:
    """Uses of what this rank does not hold, and what each comes to; the last rank holds no teacher."""
    model = seeded(Teaching)
    apart = PLACEMENT | {"teacher.below": 1, "teacher.above": 0}
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", RANKS)]), microbatches=4, placement=apart)
    forward_backward(*batches()[0])
    held = dict(forward_backward.named_parameters())
    pairs = [(t, s) for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True)]
    away = next(p for name, p in model.named_parameters() if name not in held)
    assert away.shape == away.data.shape and away.device.type == "cpu" and isinstance(away, nn.Parameter)
    assert torch.zeros_like(away).sum() == 0 and copy.deepcopy(model).teacher.below.weight.shape == (8, 6)
    model.zero_grad()
    uses: dict[str, Callable[[], Any]] = {
        "loop": lambda: [t.mul_(0.5).add_(s) for t, s in pairs],
        "data": lambda: [t.data.mul_(0.5).add_(s.data) for t, s in pairs],
        "foreach": lambda: torch._foreach_lerp_([t.data for t, _ in pairs], [s.data for _, s in pairs], 0.5),
        "copied": lambda: [copy.deepcopy(model).teacher.above.weight.copy_(t) for t, s in pairs],
        "initialised": lambda: nn.init.zeros_(away),
        "saved": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "numpy": lambda: away.detach().numpy(),
        "forward": lambda: model(*batches()[0]),
        "loaded": lambda: model.load_state_dict(seeded(Teaching).state_dict()),
        "norm": lambda: sum(p.grad.norm() for p in model.parameters() if p.grad is not None),
        "clipped": lambda: nn.utils.clip_grad_norm_(list(model.parameters()), 1.0),
        "averaged": lambda: torch.optim.swa_utils.AveragedModel(model).update_parameters(model),
    }
    found = {}
    for name, use in uses.items():
        with torch.no_grad():
            try:
                found[name] = use()
            except Exception as error:
                found[name] = str(error)
    return found


def test_a_use_of_what_another_rank_holds_names_its_stage_and_rank(pool: Any) -> None:
    for found in pool.run(teacher_elsewhere, ranks=RANKS):
        for name, told in found.items():
            assert re.search(r"is held by pipe rank [012] \(stage \w+\.\w+\)", str(told)), (name, told)
