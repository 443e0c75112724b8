"""Two recorded runs: what is equal is told equal on any ranks, and each fault that was put in is found at its place."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe import __main__ as command_line
from fxpipe.errors import RunError
from fxpipe.numerics.recording import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE
from tests import hf
from tests.pool import Pool, RankFailed

STEPS, MICROBATCHES = 2, 4


class Net(nn.Module):
    """Four stages, and a head whose weight is the first layer's."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8, bias=False)
        self.fault = fault
        weight = self.layers[0].weight
        self.head.weight = nn.Parameter(weight.detach().clone()) if fault == "untied" else weight
        if fault == "weight":
            with torch.no_grad():
                self.layers[1].weight[2] += 1e-3

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = fxpipe.stage_boundary(x) if number else x
            if self.fault == "bf16" and number == 1:
                x = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).float()
            else:
                x = layer(x)
            x = torch.tanh(F.dropout(x, 0.2) if self.fault == "dropout" and number == 1 else x)
            if self.fault == "twice" and number == 1:
                x = 2 * x - x.detach()  # the same bits, and twice the gradient
        return F.cross_entropy(self.head(fxpipe.stage_boundary(x)), y)


def batch(step: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + step)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 8, (16,), generator=generator)


Axes = tuple[tuple[str, int], ...]


def recorded(folder: Path, axes: Axes = (("pipe", 1),), fault: str = "", full: bool = False, **options: Any) -> None:
    """Trains ``Net`` on this rank of ``axes``, and records the run."""
    if any(size > 1 for _, size in axes):
        fxpipe.init()
    topology = fxpipe.Topology(axes)
    replicas, replica = topology.data_size, topology.data_rank
    eps = options.pop("eps", 1e-8)
    seed = options.pop("seed", 0)
    forward_backward = fxpipe.compile(Net(fault), topology, microbatches=MICROBATCHES // replicas, **options)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-2, eps=eps)
    with forward_backward.record_values(folder, full=full):
        for step in range(STEPS):
            x, y = (part.chunk(replicas)[replica] for part in batch(step, seed))
            optimizer.zero_grad()
            forward_backward(x, y)
            optimizer.step()


def plain(folder: Path, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with fxpipe.record_plain(model, folder) as run:
        for step in range(STEPS):
            optimizer.zero_grad()
            for number, (x, y) in enumerate(zip(*(part.chunk(MICROBATCHES) for part in batch(step)), strict=True)):
                with run.microbatch(number):
                    (model(x, y) / MICROBATCHES).backward()
            optimizer.step()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    recorded(folder)
    return folder


# per step: x, y, 3 values, 3 gradients and a loss a micro-batch; 6 parameters and their gradients; 6 at the beginning
TENSORS = STEPS * (MICROBATCHES * 9 + 2 * 6) + 6


def test_a_run_is_equal_to_itself_and_to_plain_pytorch(reference: Path, tmp_path: Path) -> None:
    recorded(tmp_path / "again", full=True)
    plain(tmp_path / "plain", Net())
    again = fxpipe.bisect(reference, tmp_path / "again")
    assert (again.first, again.equal) == (None, TENSORS)
    assert str(again) == f"no difference: {TENSORS} tensors have equal bits"
    # A tied weight's gradient is a sum over two stages here, and over the whole backward there.
    against_plain = fxpipe.bisect(tmp_path / "plain", reference, rtol=1e-6)
    assert (against_plain.first, against_plain.equal + against_plain.close) == (None, TENSORS - STEPS * MICROBATCHES)
    assert (against_plain.only_in_first, against_plain.only_in_second) == ((), ("loss",))


RUNS: dict[str, tuple[Axes, dict[str, Any]]] = {
    "4 stages": ((("pipe", 4),), {"schedule": "zb_h1"}),
    "recompute": ((("pipe", 2),), {"recompute": True, "tracer": "export", "example_args": batch(0)}),
    "zero 1": ((("pipe", 2), ("data", 2)), {"zero": 1}),
    "zero 2": ((("data", 2),), {"zero": 2}),
    "zero 3": ((("data", 2),), {"zero": 3}),
}


@pytest.mark.parametrize("run", RUNS)
def test_ranks_schedules_and_zero_are_the_same_run(run: str, reference: Path, pool: Pool, tmp_path: Path) -> None:
    axes, options = RUNS[run]
    pool.run(partial(recorded, **options), tmp_path, axes, ranks=math.prod(size for _, size in axes))
    # Replicas, and the owners of the tied weight, add gradients up in another order.
    found = fxpipe.bisect(reference, tmp_path, rtol=1e-5)
    assert found.first is None, str(found)
    assert found.equal + found.close == TENSORS
    exact = fxpipe.bisect(reference, tmp_path).first
    assert exact is None or exact.entry.kind == PARAMETER_GRADIENT


def drifted(folder: Path) -> None:
    """Two replicas, of which the second changes a weight by itself."""
    fxpipe.init()
    topology = fxpipe.Topology([("data", 2)])
    forward_backward = fxpipe.compile(Net(), topology, microbatches=2)
    with forward_backward.record_values(folder):
        for step in range(STEPS):
            forward_backward(*(part.chunk(2)[topology.data_rank] for part in batch(step)))
            if step == 0 and topology.data_rank:
                with torch.no_grad():
                    dict(forward_backward.named_parameters())["layers.2.bias"][3] += 0.5


def test_a_rank_with_another_weight_is_named(reference: Path, pool: Pool, tmp_path: Path) -> None:
    pool.run(drifted, tmp_path, ranks=2)
    found = fxpipe.bisect(tmp_path, tmp_path)
    assert found.first is not None
    assert str(found.first).startswith(
        f"step 0: the parameter `layers.2.bias` is not the same on ranks 0 and 1 of {tmp_path}: it differs by about "
    )


FAULTS: dict[str, tuple[Callable[[Path], None], tuple[int, int, str, str]]] = {
    "a weight": (lambda folder: recorded(folder, fault="weight"), (-1, -1, PARAMETER, "layers.1.weight")),
    "a stage in bf16": (lambda folder: recorded(folder, fault="bf16"), (0, 0, VALUE, "tanh_1")),
    "a gradient scaled twice": (lambda folder: recorded(folder, fault="twice"), (0, 0, GRADIENT, "tanh")),
    "an optimizer's epsilon": (lambda folder: recorded(folder, eps=1e-3), (0, -1, PARAMETER, "layers.0.weight")),
    "a weight that is tied on one side": (
        lambda folder: recorded(folder, fault="untied"),
        (0, -1, PARAMETER_GRADIENT, "layers.0.weight"),
    ),
    "other rows": (lambda folder: recorded(folder, seed=1), (0, -1, PARAMETER_GRADIENT, "layers.0.weight")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_its_place(fault: str, reference: Path, tmp_path: Path) -> None:
    record, place = FAULTS[fault]
    record(tmp_path)
    found = fxpipe.bisect(reference, tmp_path)
    assert found.first is not None
    entry = found.first.entry
    assert (entry.step, entry.microbatch, entry.kind, entry.name) == place, str(found)
    assert bool(found.other_rows) == (fault == "other rows")


def test_another_seed_of_dropout_is_found_behind_it(tmp_path: Path) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.random.fork_rng():
            net = Net("dropout")
        forward_backward = fxpipe.compile(net, fxpipe.Topology([("pipe", 1)]), microbatches=MICROBATCHES)
        with forward_backward.record_values(tmp_path / str(seed)):
            forward_backward(*batch(0))
    found = fxpipe.bisect(tmp_path / "1", tmp_path / "2").first
    assert found is not None
    assert (found.entry.microbatch, found.entry.kind, found.entry.boundary) == (0, VALUE, "boundary 1, value 0")


def test_what_is_printed(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, fault="bf16", full=True)
    assert command_line.main(["bisect", str(reference), str(tmp_path)]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    place = "step 0, micro-batch 0: the value `tanh_1` (tanh, boundary 1, value 0)"
    assert re.fullmatch(rf"{re.escape(place)} differs by about 0\.00\d of its norm; 9 tensors .* equal bits", first), (
        first
    )
    recorded(tmp_path / "exact", full=True)
    exact = fxpipe.bisect(tmp_path / "exact", tmp_path).first
    assert exact is not None
    assert exact.is_exact
    x = batch(0)[0].chunk(MICROBATCHES)[0]
    values = []
    for net in (Net(), Net("bf16")):
        h = torch.tanh(net.layers[0](x))
        layer = net.layers[1]
        is_low = net.fault == "bf16"
        out = F.linear(h.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).float() if is_low else layer(h)
        values.append(torch.tanh(out))
    largest = (values[0].double() - values[1].double()).abs().max() / values[0].double().abs().max()
    assert exact.relative == float(largest)


def test_a_run_that_begins_again_in_its_folder_counts_alone(reference: Path, pool: Pool, tmp_path: Path) -> None:
    recorded(tmp_path, fault="bf16")
    recorded(tmp_path)
    assert fxpipe.bisect(reference, tmp_path).equal == TENSORS
    pool.run(recorded, tmp_path / "two", (("pipe", 2),), ranks=2)
    with pytest.raises(RunError, match="has the values of a run on more ranks"):
        recorded(tmp_path / "two")


def test_folders_that_are_no_run(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no recorded values; record_values"):
        fxpipe.bisect(reference, tmp_path)
    (tmp_path / "rank00000.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(RunError, match="line 1, is no recorded value"):
        fxpipe.bisect(reference, tmp_path)


def test_a_missing_rank_is_said(pool: Pool, tmp_path: Path) -> None:
    pool.run(partial(recorded, zero=2), tmp_path, (("data", 2),), ranks=2)
    (tmp_path / "rank00001.jsonl").unlink()
    with pytest.raises(RunError, match=r"of the 64 elements of the .* in step 0: the file of a rank is missing"):
        fxpipe.bisect(tmp_path, tmp_path)


class Skip(nn.Module):
    """A value is read around a boundary, and another crosses a boundary behind which nothing reads it."""

    def __init__(self, cuts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.cuts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), cuts

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layers[0](x)
        fxpipe.stage_boundary(h.sin())
        inner = torch.tanh(self.layers[1](fxpipe.stage_boundary(h) if self.cuts == 2 else h))
        return F.cross_entropy(self.layers[2](fxpipe.stage_boundary(inner)) + h, y)


def test_a_value_that_is_read_around_a_boundary(tmp_path: Path) -> None:
    for cuts in (1, 2):
        model = fxpipe.compile(Skip(cuts), fxpipe.Topology([("pipe", 1)]), microbatches=MICROBATCHES)
        optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
        with model.record_values(tmp_path / str(cuts)):
            for step in range(STEPS):
                optimizer.zero_grad()
                model(*batch(step))
                optimizer.step()
    plain(tmp_path / "plain", Skip(2))
    # Of the gradient of h, stage 1 sends the skip's share back in one run, and stages 1 and 2 all of it in the other.
    found = fxpipe.bisect(tmp_path / "1", tmp_path / "2")
    assert found.first is None, str(found)
    assert found.only_in_first == ("the gradient of layers_0 from 1 of 2 uses (layers.0)",)
    assert found.only_in_second == ("the gradient of layers_0 (layers.0)",)
    found = fxpipe.bisect(tmp_path / "plain", tmp_path / "2")
    assert found.first is None, str(found)
    assert found.only_in_first == ("boundary 0, value 0", "the gradient of boundary 1, value 0")
    assert found.only_in_second == ("loss", "the gradient of layers_0 (layers.0)")


def test_a_mask_that_only_a_capture_has_does_not_move_the_values_behind_it(tmp_path: Path) -> None:
    """T5 makes no mask in plain PyTorch where nothing is masked, and a mask where a tracer runs it."""
    cuts, batch = ["encoder.block.1", "decoder.block.1"], hf.translated(4, torch.Generator().manual_seed(0))
    del batch["attention_mask"]
    torch.manual_seed(0)
    model, options = hf.t5(), {"microbatches": 1, "boundaries": cuts, "example_kwargs": batch}
    with fxpipe.record_plain(model, tmp_path / "plain", boundaries=cuts) as run, run.microbatch(0):
        model(**batch).loss.backward()
    step = fxpipe.compile(model, fxpipe.Topology([("pipe", 1)]), **options)
    model.zero_grad()
    with step.record_values(tmp_path / "piped"):
        step(**batch)
    found = fxpipe.bisect(tmp_path / "plain", tmp_path / "piped", rtol=1e-5)
    assert found.first is None, str(found)
    assert [name for name in found.only_in_second if name.startswith("boundary")] == []


def test_another_tracer_or_another_cut_is_no_difference(tmp_path: Path) -> None:
    """Tracers number the values in ways of their own: GPT-2's `add_7` leaves block 0 in one, and block 1 in another."""
    batch = hf.causal(8, torch.Generator().manual_seed(0))
    runs: dict[str, dict[str, Any]] = {
        "export": {"tracer": "export", "boundaries": hf.layers("transformer.h", 1, 2)},
        "record": {"tracer": "record", "boundaries": hf.layers("transformer.h", 1, 2)},
        "later": {"tracer": "record", "boundaries": hf.layers("transformer.h", 2, 3)},
    }
    for name, options in runs.items():
        torch.manual_seed(0)
        step = fxpipe.compile(
            hf.gpt2(), fxpipe.Topology([("pipe", 1)]), microbatches=2, example_kwargs=batch, **options
        )
        with step.record_values(tmp_path / name):
            step(**batch)
    for name in ("record", "later"):
        found = fxpipe.bisect(tmp_path / "export", tmp_path / name, rtol=1e-5)
        assert found.first is None, str(found)
    for name, cut in (("plain", "transformer.h.1"), ("elsewhere", "transformer.h.2")):
        torch.manual_seed(0)
        model = hf.gpt2()
        with fxpipe.record_plain(model, tmp_path / name, boundaries=[cut]) as run:
            for number, ids in enumerate(batch["input_ids"].chunk(2)):
                with run.microbatch(number):
                    model(input_ids=ids).logits.sum().backward()
    found = fxpipe.bisect(tmp_path / "plain", tmp_path / "elsewhere")
    assert found.first is None, str(found)
    assert "boundary 0 before transformer.h.1, value 0" in found.only_in_first


@pytest.mark.parametrize("full", [False, True])
def test_another_type_is_named_and_its_rows_are_the_same(full: bool, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            layer.weight.copy_(layer.weight.bfloat16())
        layer.to(dtype)
        with fxpipe.record_plain(layer, tmp_path / str(dtype), full=full) as run, run.microbatch(0):
            layer(batch(0)[0].to(dtype)).sum().backward()
    found = fxpipe.bisect(tmp_path / "torch.float32", tmp_path / "torch.bfloat16", rtol=1e-4)
    assert found.first is not None
    assert found.other_rows == ()
    assert re.match(r"step 0, micro-batch 0: the input `input` differs by .*, as float32 and bfloat16; ", str(found))


def test_a_gradient_that_one_run_lacks_is_called_a_gradient(reference: Path, tmp_path: Path) -> None:
    net = Net()
    net.layers[1].bias.requires_grad_(False)
    plain(tmp_path, net)
    assert "the gradient of the parameter layers.1.bias" in fxpipe.bisect(reference, tmp_path).only_in_first


class Attention(nn.Module):
    """A bias of keys has no gradient: softmax takes it away, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 4, 8)
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)).square().mean()


def test_a_gradient_that_is_rounding_alone_is_no_difference(tmp_path: Path) -> None:
    for parts in (1, 4):
        model = Attention()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with fxpipe.record_plain(model, tmp_path / str(parts)) as run:
            for step in range(STEPS):
                optimizer.zero_grad()
                for number, part in enumerate(batch(step)[0].chunk(parts)):
                    with run.microbatch(number):
                        (model(part) / parts).backward()
                optimizer.step()
    found = fxpipe.bisect(tmp_path / "1", tmp_path / "4", rtol=1e-3)
    assert found.first is None, str(found)
    assert found.rounding == ("key.bias",)
    assert "the gradients of 1 parameters are rounding alone, first key.bias" in str(found)
    exact = fxpipe.bisect(tmp_path / "1", tmp_path / "4")
    assert "key.bias" in {difference.entry.name for difference in exact.differences}


def test_what_record_plain_cannot_record_is_refused(tmp_path: Path) -> None:
    compiled: Any = torch.compile(Net(), backend="eager")
    wrapped = pytest.raises(RunError, match=r"given a OptimizedModule; give it the model inside, its \._orig_mod")
    with wrapped, fxpipe.record_plain(compiled, tmp_path):
        pass
    not_called = pytest.raises(RunError, match="was not called in micro-batch 0")
    with not_called, fxpipe.record_plain(Net(), tmp_path) as run, run.microbatch(0):
        pass


def test_another_process_that_records_into_the_folder_is_refused(pool: Pool, tmp_path: Path) -> None:
    """As two ranks of DistributedDataParallel would."""
    refused = pytest.raises(RankFailed, match="is being recorded to by another process")
    with fxpipe.record_plain(Net(), tmp_path), refused:
        pool.run(plain, tmp_path, Net(), ranks=1)


@pytest.mark.parametrize("full", [False, True])
def test_other_bits_are_a_difference_though_its_size_is_not_seen(full: bool, tmp_path: Path) -> None:
    """Projections of a change by d and of one by -d cancel for some elements; an inf is no nan."""
    layers = [nn.Linear(4, 1, bias=False) for _ in range(8)]
    orders = ("0123", "1023", "2103", "3120", "0213", "0321", "inf", "nan")
    for layer, order in zip(layers, orders, strict=True):
        values = [*map(float, order)] if order.isdigit() else [0.0, 1.0, 2.0, float(order)]
        layer.weight.data = torch.tensor([values])
        with fxpipe.record_plain(layer, tmp_path / order, full=full):
            pass
    for order in orders[1:-1]:
        assert fxpipe.bisect(tmp_path / "0123", tmp_path / order).first is not None
    found = fxpipe.bisect(tmp_path / "inf", tmp_path / "nan", rtol=1.0).first
    assert found is not None
    assert found.relative == math.inf


def test_steps_that_only_one_run_has_are_named(reference: Path, tmp_path: Path) -> None:
    model = fxpipe.compile(Net(), fxpipe.Topology([("pipe", 1)]), microbatches=MICROBATCHES)
    with model.record_values(tmp_path):
        model(*batch(0))
        with pytest.raises(RunError, match="is being recorded to already; give each model a folder of its own"):
            recorded(tmp_path)
    assert fxpipe.bisect(reference, tmp_path).only_in_first == ("step 1",)
