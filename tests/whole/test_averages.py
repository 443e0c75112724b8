"""Teachers that average their students, and what comes of the parameters that a rank does not hold."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import fxpipe
from tests.device import DEVICE
from tests.pool import Pool
from tests.whole.test_readme import ROOT, blocks

STEPS, RANKS = 3, 3
PAGE: dict[str, Any] = {"copy": copy, "fxpipe": fxpipe, "nn": nn, "torch": torch, "Tensor": Tensor, "F": nn.functional}
exec("from __future__ import annotations\n" + "\n".join(blocks(ROOT / "examples/averages.md", "py")), PAGE)
Teaching: Any = PAGE["Teaching"]


class MeanTeacher(Teaching):
    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (student - teacher).square().mean()


class Byol(Teaching):
    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Linear(4, 4)

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        return 2 - 2 * nn.functional.cosine_similarity(self.predictor(student), teacher).mean()


MODELS = {"mean teacher": MeanTeacher, "BYOL": Byol, "DINO": PAGE["Dino"], "MoCo": PAGE["Moco"]}


def seeded(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, 6, generator=generator)) for _ in range(STEPS)]


def plainly(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = seeded(name)
    optimizer, averages = torch.optim.SGD(model.parameters(), lr=0.1), AveragedModel(model)
    for one, other in batches():
        optimizer.zero_grad()
        for part in zip(one.chunk(4), other.chunk(4), strict=True):
            (model(*part) / 4).backward()
        optimizer.step()
        PAGE["average"](model, model, 0.9)
        averages.update_parameters(model)
    return model.state_dict(), dict(averages.module.named_parameters())


def piped(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, pipe = seeded(name), fxpipe.Topology([("pipe", RANKS)])
    forward_backward = fxpipe.compile(model, pipe, microbatches=4, placement=PAGE["PLACEMENT"])
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    averages = AveragedModel(forward_backward.module)
    for batch in batches():
        optimizer.zero_grad()
        forward_backward(*batch)
        optimizer.step()
        PAGE["average"](forward_backward, model, 0.9)
        if [*forward_backward.parameters()]:  # torch takes no module without any
            averages.update_parameters(forward_backward.module)
    return forward_backward.state_dict(full=True), dict(averages.module.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_teacher_and_an_averaged_model_are_plain_pytorchs(name: str, pool: Pool) -> None:
    wanted, wanted_averages = plainly(name)
    found: dict[str, Tensor] = {}
    for state, averages in pool.run(piped, name, ranks=RANKS):
        torch.testing.assert_close(state, wanted, rtol=0, atol=0)
        found |= averages
    torch.testing.assert_close(found, {name: wanted_averages[name] for name in found}, rtol=0, atol=0)
    assert found.keys() == wanted_averages.keys()


# --- what a rank does not hold


def teacher_elsewhere() -> Any:
    """Uses of what this rank does not hold, and what each comes to; the last rank holds no teacher."""
    model = seeded("mean teacher")
    apart = PAGE["PLACEMENT"] | {"teacher.below": 1, "teacher.above": 0}
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", RANKS)]), microbatches=4, placement=apart)
    forward_backward(*batches()[0])
    held = dict(forward_backward.named_parameters())
    pairs = [(t, s) for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True)]
    away = next(p for name, p in model.named_parameters() if name not in held)
    assert isinstance(away, nn.Parameter)
    assert (away.shape, away.device.type) == (away.data.shape, DEVICE)
    assert torch.zeros_like(away).sum() == 0
    assert copy.deepcopy(model).teacher.below.weight.shape == (8, 6)
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
        "loaded": lambda: model.load_state_dict(seeded("mean teacher").state_dict()),
        "norm": lambda: sum(p.grad.norm() for p in model.parameters() if p.grad is not None),
        "clipped": lambda: nn.utils.clip_grad_norm_(list(model.parameters()), 1.0),
        "averaged": lambda: AveragedModel(model).update_parameters(model),
    }
    found = {}
    for name, use in uses.items():
        with torch.no_grad():
            try:
                found[name] = use()
            except Exception as error:
                found[name] = str(error)
    return found


def test_a_use_of_what_another_rank_holds_names_its_stage_and_rank(pool: Pool) -> None:
    for found in pool.run(teacher_elsewhere, ranks=RANKS):
        for name, told in found.items():
            assert re.search(r"is held by pipe rank [012] \(stage \w+\.\w+\)", str(told)), (name, told)
