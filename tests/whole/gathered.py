"""A two-tower model whose loss is over all rows it is given, in the forms in which users write it; and what plain
PyTorch makes of it, on the whole batch at once, or concatenating what its micro-batches have made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Action, Schedule, stage_boundary
from fxpipe.schedules.kinds import Kind

EDGES = ((0, 1), (1, 3), (2, 3))
"""lower → upper → loss, text → loss."""
PAIR = tuple[Tensor, Tensor]


class Contrastive(nn.Module):
    """Four stages: the image tower in two, the text tower, and symmetric InfoNCE over all rows."""

    gather: Any = "batch"
    group: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper, self.text = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(math.log(2.0)))

    def towers(self, image: Tensor, text: Tensor) -> PAIR:
        x = stage_boundary(torch.tanh(self.lower(image)), name="upper")
        return F.normalize(self.upper(x), dim=-1), F.normalize(self.text(text), dim=-1)

    def forward(self, image: Tensor, text: Tensor) -> Any:
        v, t = self.towers(image, text)
        v = stage_boundary(v, name="loss", gather=self.gather, group=self.group)
        t = stage_boundary(t, gather=self.gather, group=self.group)
        return self.loss(v, t)

    def loss(self, v: Tensor, t: Tensor) -> Any:
        logits = self.scale.exp() * v @ t.T
        own = torch.arange(v.shape[0], device=v.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class OverReplicas(Contrastive):
    gather = "global"


class InGroups(Contrastive):
    group = 2


class LocalLoss(Contrastive):
    """Each replica's own rows against all, as OpenCLIP's local_loss with gather_with_grad. ``replica``: a number for
    each row, which tells where the own rows stand among all."""

    def forward(self, image: Tensor, text: Tensor, replica: Tensor) -> Any:
        v, t = self.towers(image, text)
        all_v, all_t, everyones = stage_boundary((v, t, replica), name="loss", gather="global")
        v, t, own = stage_boundary((v, t, replica), gather="batch")
        place = (everyones < own[0]).sum() + torch.arange(v.shape[0], device=v.device)
        scale = self.scale.exp()
        return (F.cross_entropy(scale * v @ all_t.T, place) + F.cross_entropy(scale * t @ all_v.T, place)) / 2


class AsSum(Contrastive):
    """A sum, so that groups count by their rows."""

    group = 2

    def loss(self, v: Tensor, t: Tensor) -> Any:
        return fxpipe.Sum(super().loss(v, t) * v.shape[0], v.shape[0])


class InADict(Contrastive):
    group = 2

    def loss(self, v: Tensor, t: Tensor) -> Any:
        loss = super().loss(v, t)
        return {"loss": loss, "twice": 2 * loss.detach()}


def model(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().double()


def batch(rows: int, number: int = 0) -> PAIR:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(rows, width, generator=generator, dtype=torch.float64) for width in (6, 5))  # type: ignore[return-value]


def cut(values: Sequence[Tensor], microbatches: int) -> list[PAIR]:
    return list(zip(*(value.tensor_split(microbatches) for value in values), strict=True))  # type: ignore[arg-type]


def store_all(placement: Sequence[int], microbatches: int, group: int | None = None) -> Schedule:
    """All forwards, the loss of each group, all backwards."""
    m, size = microbatches, group or microbatches
    forwards = [Action(stage, Kind.F, i) for stage in (0, 1, 2) for i in range(m)]
    backwards = [Action(stage, Kind.B, i) for stage in (2, 1, 0) for i in range(m)]
    loss = [Action(3, op, start, size) for start in range(0, m, size) for op in (Kind.F, Kind.B)]
    order = [*forwards, *loss, *backwards]
    rows = tuple(tuple(a for a in order if placement[a.stage] == rank) for rank in range(max(placement) + 1))
    return Schedule(rows, EDGES, tuple(placement), (True,) * 4, m, name="store-all")


def by_hand(plain: Contrastive, parts: Sequence[PAIR]) -> Tensor:
    """The loop that concatenates: each micro-batch's towers, the loss of all of them, each micro-batch's backward."""
    made = [plain.towers(*part) for part in parts]
    whole = [torch.cat([one[side].detach() for one in made]).requires_grad_() for side in (0, 1)]
    loss: Tensor = plain.loss(*whole)
    loss.backward()
    rows = [len(one[0]) for one in made]
    gradients = [value.grad.split(rows) for value in whole]  # type: ignore[union-attr]
    for place, one in enumerate(made):
        torch.autograd.backward(one, (gradients[0][place], gradients[1][place]))
    return loss.detach()
