"""``fxpipe.choose``: its plans are those of ``fxpipe.preview``, and its best is the best of a loop over ``preview``."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
import fxpipe.capture.capturing
from fxpipe.__main__ import main, size
from fxpipe.choosing import LITTLE
from tests.thinned import in_turn

WIDTH, BLOCKS, ROWS = 1024, 4, 16
H100 = fxpipe.Hardware.named("h100", memory=None)


class Tower(nn.Module):
    """Equal blocks and a small head, all in float32."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks)
        ]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x).square().mean()
        return out


class Towers(nn.Module):
    """Two towers side by side, as in CLIP, of 1 and 3 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Tower(1), Tower(3)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        out: Tensor = self.image(image) * self.text(text)
        return out


def on_meta(make: type[nn.Module], tokens: int = 512) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model without memory, and a batch of 1 row."""
    names = ["x"] if make is Tower else ["image", "text"]
    with torch.device("meta"):
        return make(), {name: torch.zeros(1, tokens, WIDTH) for name in names}


def rows_of(example: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    return {name: tensor.repeat(rows, 1, 1) for name, tensor in example.items()}


def every_preview(model: nn.Module, example: dict[str, Tensor], ranks: int, **options: Any) -> Iterator[fxpipe.Preview]:
    """The previews of all splits into a pipeline and replicas, of 2^k micro-batches each, with each ``zero``."""
    for pipe, count in itertools.product([1, 2, 4], [1, 2, 4, 8, 16]):
        data = ranks // pipe
        if ROWS // data % count:
            continue
        topo = fxpipe.Topology([("pipe", pipe), ("data", data)])
        for zero in range(4 if data > 1 else 1):
            yield fxpipe.preview(
                model,
                topo,
                boundaries="auto",
                microbatches=count,
                zero=zero,
                example_kwargs=rows_of(example, ROWS // data),
                **options,
            )


@pytest.mark.long
@pytest.mark.parametrize(("make", "memory"), in_turn([Tower, Towers], [None, 0.6e9]))
def test_the_best_plan_is_that_of_a_loop_over_previews(make: type[nn.Module], memory: float | None) -> None:
    model, example = on_meta(make)
    hardware = replace(H100, memory=memory)
    choice = fxpipe.choose(
        model, ranks=4, rows=ROWS, hardware=hardware, recompute=False, offload=False, example_kwargs=example
    )
    loop = every_preview(model, example, 4, hardware=hardware)
    best = min(preview.seconds or 0.0 for preview in loop if preview.fits is not False)
    assert best <= choice.best.seconds <= best / (1 - LITTLE)
    assert choice.fits


def test_plans_are_those_of_preview_to_the_byte_and_the_microsecond() -> None:
    model, example = on_meta(Towers)
    choice = fxpipe.choose(
        model, ranks=4, rows=ROWS, hardware="h100", memory=0.4e9, ranks_per_node=2, example_kwargs=example
    )
    assert len(choice.plans) > 1
    for plan in choice.plans:
        rows = plan.rows * plan.options["microbatches"]
        options = {**plan.given, **plan.options}
        alone = fxpipe.preview(model, plan.topo, example_kwargs=rows_of(example, rows), **options)
        assert plan.preview.as_dict() == alone.as_dict()
        assert f"{plan.preview}" == f"{alone}"


def test_each_size_of_a_microbatch_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, capture = list[Any](), fxpipe.capture.capturing.capture_in_part
    monkeypatch.setattr(
        fxpipe.capture.capturing,
        "capture_in_part",
        lambda request, *args: captured.append(request.example["x"].shape) or capture(request, *args),
    )
    model, example = on_meta(Tower)
    choice = fxpipe.choose(model, ranks=8, rows=ROWS, hardware="h100", memory=2e9, example_kwargs=example)
    assert len(captured) == len(set(captured)) <= len({plan.rows for plan in choice.plans}) + len(choice.refused)


def test_memory_goes_before_the_memory_of_the_hardware() -> None:
    model, example = on_meta(Tower)
    given = {"ranks": 4, "rows": 16, "example_kwargs": example, "recompute": False, "offload": False}
    whole = fxpipe.choose(model, hardware="h100", **given)
    part = fxpipe.choose(model, hardware="h100", memory=whole.best.bytes * 0.7, **given)
    assert (whole.best.preview.memory, part.best.preview.memory) == (80e9, whole.best.bytes * 0.7)
    assert part.fits
    assert part.best.bytes <= whole.best.bytes * 0.7
    assert f'hardware=fxpipe.Hardware.named("h100", memory={whole.best.bytes * 0.7})' in part.best.code


def test_the_nearest_plan_and_what_makes_it_fit_where_none_fits() -> None:
    model, example = on_meta(Tower, tokens=8)
    state = sum(parameter.numel() for parameter in model.parameters()) * 16  # value, gradient, Adam's two moments
    memory = 0.9 * state / 2  # half of the state on each of 2 ranks is too much, and a quarter on 4 ranks is not
    choice = fxpipe.choose(model, ranks=2, rows=8, zero=0, hardware="h100", memory=memory, example_kwargs=example)
    assert not choice.fits
    text = f"{choice}"
    assert "no plan fits" in text
    remedies = dict(choice.remedies)
    assert remedies["4 ranks"].fits
    assert "with 4 ranks: " in text


def test_options_that_the_call_gives_are_kept() -> None:
    model, example = on_meta(Tower)
    choice = fxpipe.choose(
        model, ranks=4, rows=16, axes={"pipe": (2,)}, zero=2, microbatches=4, hardware="h100", example_kwargs=example
    )
    for plan in choice.plans:
        assert (plan.topo.size("pipe"), plan.topo.size("data")) == (2, 2)
        assert (plan.options["zero"].level, plan.options["microbatches"], plan.rows) == (2, 4, 2)


def test_the_call_to_paste_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    loss_fn = nn.functional.mse_loss
    choice = fxpipe.choose(
        model,
        ranks=2,
        axes={"data": (1,)},
        hardware="h100",
        loss_fn=loss_fn,
        example_kwargs={"input": x, "target": target},
    )
    scope: dict[str, Any] = {"fxpipe": fxpipe, "torch": torch, "model": model, "loss_fn": loss_fn}
    scope["batch"] = {"input": x, "target": target}
    exec(choice.best.code, scope)
    forward_backward = scope["forward_backward"]
    assert forward_backward(x, target=target) == loss_fn(model(x), target)
    assert "boundaries='auto'" in choice.best.code


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ranks": 0}, "ranks is 0; it is a whole number of at least 1"),
        ({"hardware": fxpipe.Hardware(memory=1e9)}, "hardware= has no speeds"),
        ({"example_kwargs": None}, "needs the shapes of a batch"),
        ({"rows": 7, "axes": {"data": (4,)}}, "divides the 7 rows"),
        ({"axes": {"tensor": ()}}, "axis -> the sizes to try"),
        ({"memory": "80G"}, "a number of bytes, as 80e9"),
        ({"batch_dim": {"x": fxpipe.Packed(2)}}, "batch_dim= packs x"),
        ({"schedule": "none"}, "none"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], words: str) -> None:
    model, example = on_meta(Tower)
    given = {"ranks": 4, "rows": 16, "hardware": "h100", "example_kwargs": example}
    with pytest.raises(fxpipe.FxpipeError, match=words):
        fxpipe.choose(model, **{**given, **wrong})


@pytest.mark.parametrize(("wrong", "words"), [("x", "model is 'x'"), (nn.Linear, r"write Linear\(\.\.\.\)")])
def test_values_that_are_no_model_are_refused(wrong: Any, words: str) -> None:
    with pytest.raises(fxpipe.RunError, match=words):
        fxpipe.choose(wrong, ranks=2, hardware="h100", example_args=(torch.zeros(4, 4),))


def test_sizes_of_the_command_line() -> None:
    sizes = [size(text) for text in ("80e9", "80G", "80GB", "75GiB", "512M")]
    assert sizes == [80e9, 80e9, 80e9, 75 * 2**30, 512e6]
    for wrong in ("80X", "80KT", "80i"):
        with pytest.raises(ValueError, match=wrong):
            size(wrong)


def test_the_command_prints_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    command = "choose tests.forecast.test_choose:tower --ranks 4 --rows 16 --memory 3G --hardware h100 --zero 1"
    assert main(command.split()) == 0
    text = capsys.readouterr().out
    assert "plans are simulated" in text
    assert "zero=1" in text
    assert 'fxpipe.Hardware.named("h100", memory=3000000000.0)' in text


def tower() -> tuple[nn.Module, dict[str, Tensor]]:
    return on_meta(Tower)
