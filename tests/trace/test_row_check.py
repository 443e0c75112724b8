"""Where the loss of micro-batches apart is not that of the batch: a warning at compile, and for a sum a refusal."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.thinned import in_turn
from tests.two_ranks import TWO

ROWS = 16
GENERATOR = torch.Generator().manual_seed(0)
X, T = torch.randn(ROWS, 8, generator=GENERATOR), torch.randn(ROWS, 6, generator=GENERATOR)
Y = torch.randint(4, (ROWS,), generator=GENERATOR)
PADDED = torch.where(torch.arange(ROWS) % 5 == 1, -100, Y)


class Towers(nn.Module):
    """Two towers and a contrastive loss (Radford et al., 2021)."""

    def __init__(self, rate: float = 0.0, gather: str | None = None) -> None:
        super().__init__()
        self.image, self.text, self.drop, self.gather = nn.Linear(8, 8), nn.Linear(6, 8), nn.Dropout(rate), gather

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        image, text = F.normalize(self.drop(self.image(x)), dim=-1), F.normalize(self.text(text), dim=-1)
        options: Any = {"gather": self.gather} if self.gather else {}
        image, text = fxpipe.stage_boundary((image, text), name="loss", **options)
        return F.cross_entropy(5 * image @ text.T, torch.arange(image.shape[0], device=image.device))


class Classes(nn.Module):
    """``form``: what is returned; ``norm``: with batch statistics."""

    def __init__(self, form: str = "mean", norm: bool = False) -> None:
        super().__init__()
        self.up, self.drop, self.down, self.form = nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 4), form
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.down(fxpipe.stage_boundary(self.drop(self.norm(self.up(x)).relu()), name="down"))
        if self.form == "drawn":
            kept = (torch.rand(y.shape, device=y.device) < 0.5) & (y != -100)
            return fxpipe.Sum((F.cross_entropy(logits, y, reduction="none") * kept).sum(), kept.sum())
        if self.form == "sum":
            return fxpipe.Sum(F.cross_entropy(logits, y, reduction="sum"), (y != -100).sum())
        if self.form == "logits":
            return logits
        return F.cross_entropy(logits, y, reduction="sum" if self.form == "total" else "mean")


TOLD = "together", "in two dimensions"


def warned(model: nn.Module, *batch: Tensor, microbatches: int = 4, **options: Any) -> tuple[list[str], str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forward_backward = fxpipe.compile(
            model, fxpipe.Topology([("pipe", 2)]), microbatches=microbatches, example_args=batch, **options
        )
    told = [str(one.message) for one in caught if any(words in str(one.message) for words in TOLD)]
    return told, str(forward_backward.stages)


@pytest.mark.parametrize(
    ("rate", "microbatches", "tracer"), in_turn([0.0, 0.3], [4, ROWS], ["symbolic", "export", "record"])
)
def test_a_contrastive_loss_without_gather_is_warned_of(rate: float, microbatches: int, tracer: str) -> None:
    (told,), _ = warned(Towers(rate), X, T, microbatches=microbatches, tracer=tracer)
    assert 'gather="batch"' in told


def test_it_has_the_loss_of_two_micro_batches_together_and_apart() -> None:
    """Of one row each: apart, beside a row like it, the loss is ln 2."""
    model = Towers()
    (told,), _ = warned(model, X, T, microbatches=ROWS)
    together, apart = map(float, re.findall(r"loss ([\d.]+) together and ([\d.]+) apart", told)[0])
    assert apart == pytest.approx(math.log(2), rel=1e-3)
    assert together != pytest.approx(apart, rel=1e-3)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_with_gather_nothing_is_said(microbatches: int) -> None:
    assert warned(Towers(gather="batch"), X, T, microbatches=microbatches)[0] == []


@pytest.mark.parametrize(
    ("model", "labels", "options"),
    [
        (Classes(), Y, {}),
        (Classes("sum"), PADDED, {}),
        (Classes("drawn"), PADDED, {"tracer": "record"}),
        (Classes(), PADDED, {"loss_weight": lambda x, y: (y != -100).sum()}),
        (Classes("total"), Y, {"microbatches": 1}),
        (Towers(), T, {"microbatches": 1}),
    ],
)
def test_where_rows_do_not_interact_nothing_is_said(model: nn.Module, labels: Tensor, options: Any) -> None:
    """Dropout included; and with one micro-batch there is nothing to leave out."""
    assert warned(model, X, labels, **options)[0] == []


def test_a_mean_over_labels_that_are_not_ignored_is_warned_of() -> None:
    (told,), _ = warned(Classes(), X, PADDED)
    assert "return fxpipe.Sum(total, count), or give loss_weight=" in told


def test_batch_statistics_are_a_line_of_the_stages() -> None:
    told, stages = warned(Classes(norm=True), X, Y)
    assert told == []
    assert "batch statistics are those of a micro-batch" in stages


# --- a loss that is a sum over rows, of which a step would train 1/m ---


class Coder(nn.Module):
    """A variational autoencoder, and its loss in the form of torch's published example."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.logvar, self.up = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.mean(x), self.logvar(x)
        drawn = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.up(fxpipe.stage_boundary(drawn)).sigmoid(), mean, logvar


def of_coder(out: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    made, mean, logvar = out
    likelihood = F.binary_cross_entropy(made, target.sigmoid(), reduction="sum")
    return likelihood - 0.5 * torch.sum(1 + logvar - mean.square() - logvar.exp())


TOTAL = nn.CrossEntropyLoss(reduction="sum")
SUMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any] | None, Tensor]] = {
    "of the model": (lambda: Classes("total"), None, Y),
    "a module's": (lambda: Classes("logits"), lambda y, target: TOTAL(y, target), Y),
    "with a norm": (lambda: Classes("total", norm=True), None, Y),
    "and a regulariser": (lambda: Classes("logits"), lambda y, target: 1 + TOTAL(y, target), Y),
    "of a published example": (Coder, of_coder, X),
}


@pytest.mark.parametrize(("kind", "tracer"), in_turn(list(SUMS), ["symbolic", "export", "record"]))
def test_a_sum_is_refused_with_what_trains_it(kind: str, tracer: str) -> None:
    make, loss_fn, target = SUMS[kind]
    inputs = (X, target) if isinstance(make(), Classes) else (X,)
    options: dict[str, Any] = {"example_kwargs": {"target": target}, "loss_fn": loss_fn} if loss_fn else {}
    with pytest.raises(
        fxpipe.RunError, match=r"the loss is a sum over rows.* fxpipe\.Sum\(total, rows\).* rate of SGD"
    ):
        warned(make(), *inputs, tracer=tracer, **options)


def test_without_an_example_a_sum_is_refused_that_the_graph_shows() -> None:
    with pytest.raises(fxpipe.RunError, match=r"the loss is a sum over rows.* 1/3 of the sum"):
        fxpipe.compile(Classes("logits"), TWO, microbatches=3, loss_fn=TOTAL)


def test_what_the_refusal_names_trains_the_sum_divided_by_the_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    (TOTAL(plain(X), Y) / ROWS).backward()
    options: dict[str, Any] = {
        "loss_fn": lambda y, target: fxpipe.Sum(TOTAL(y, target), y.shape[0]),
        "boundaries": ["1"],
    }
    compiled = fxpipe.compile(model, TWO, microbatches=3, example_args=(X,), example_kwargs={"target": Y}, **options)
    compiled(X, target=Y)
    for name, parameter in compiled.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0])
def test_a_contrastive_loss_of_two_rows_is_no_sum(scale: float) -> None:
    """With equal rows it is ln 2 for two rows and ln 4 for four: 2 ln 2, as a sum would be."""
    model = Towers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    warned(model, X, T, microbatches=8)


def test_a_loss_that_is_divided_by_a_number_of_the_batch_is_not_judged() -> None:
    class Divided(Classes):
        def forward(self, x: Tensor, y: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]
            total: Tensor = super().forward(x, y)
            return total / count

    assert warned(Divided("total"), X, Y, torch.tensor(4))[0] == []


# --- a model that cannot run, as it is on the meta device: shapes tell ---


def filled(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_rows_against_rows_on_the_meta_device_are_warned_of_by_their_line(tracer: str) -> None:
    def told(make: Callable[[], nn.Module], *batch: Tensor) -> list[str]:
        with torch.device("meta"):
            model = make()
        return warned(model, *batch, tracer=tracer, init_fn=filled)[0]

    (text,) = told(Towers, X, T)
    assert "a value of shape [4, 4] has rows of the micro-batch in two dimensions" in text
    assert "5 * image @ text.T" in text
    assert told(lambda: Towers(gather="batch"), X, T) == []
    assert told(Classes, X, Y) == []
