"""A step runs the operators of plain PyTorch: libraries that ask whether they are traced are told that they run."""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.torch_compat.operators import TorchDispatchMode
from tests.hf import WORDS, llama
from tests.models import Inputs

ONE = fxpipe.Topology([("pipe", 1)])
OWN = frozenset(
    "_local_scalar_dense _to_copy arange clamp clone div empty fill_ full lift_fresh_copy mul ne ones_like "
    "promote_types stack sum zeros".split()
)
"""Operators that a step needs for its loss, the count of labels and constants, or whose results nothing uses."""
FAMILIES = "Llama Whisper BERT".split()
MORE = "Qwen2 Mistral GPT-2 CLIP T5".split()


class Operators(TorchDispatchMode):
    """Counts operators, and calls of attention by all that they are given; views and ``OWN`` do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = str(func.overloadpacket.__name__), (*args, *(kwargs or {}).items())
        if "scaled_dot_product" in name:
            name += str([tuple(one.shape) if isinstance(one, Tensor) else one for one in given])
        if not func.is_view and name not in OWN:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], Any]) -> Counter[str]:
    with Operators() as operators:
        call()
    return operators.count


def gradients(model: Any) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_step(forward_backward: Any, plain: nn.Module, batch: Inputs, loss_of: Callable[..., Tensor]) -> None:
    """Also of the losses and gradients, in bits."""
    forward_backward.step_microbatches([((), batch)])  # captures
    for model in (forward_backward, plain):
        model.zero_grad()
    found, wanted = list[Tensor](), list[Tensor]()
    ours = counted(lambda: found.append(forward_backward.step_microbatches([((), batch)])))

    def step() -> None:
        wanted.append(loss_of(plain, batch))
        wanted[0].backward()

    theirs = counted(step)
    assert ours == theirs, {name: (ours[name], theirs[name]) for name in ours | theirs if ours[name] != theirs[name]}
    torch.testing.assert_close(found[0], wanted[0].detach(), rtol=0, atol=0)
    torch.testing.assert_close(gradients(forward_backward), gradients(plain), rtol=0, atol=0)


class Asks(nn.Module):
    """As libraries do. ``Traced`` code has twice the result."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.reads, self.layer = reads, nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        is_fake = isinstance(x, torch._subclasses.FakeTensor)
        if is_fake or torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return fxpipe.stage_boundary(self.layer(x)).sum() * 2
        y = fxpipe.stage_boundary(self.layer(x)).sum()
        return y * 2 if self.reads and y.item() != 0 else y


@pytest.mark.parametrize("tracer", ["export", "record"])
@pytest.mark.parametrize("reads", [False, True])
def test_code_for_traces_is_captured_only_where_no_graph_can_hold_the_code_of_a_run(tracer: Any, reads: bool) -> None:
    """torch's own encoder layer, which asks too, is told the truth: its code for runs has no gradients."""
    torch.manual_seed(0)
    model, x = Asks(reads), torch.randn(2, 3, 8)
    plain = copy.deepcopy(model)
    forward_backward = fxpipe.compile(model, ONE, microbatches=1, tracer=tracer, example_args=(x,))
    found, wanted = forward_backward(x), plain(x)
    wanted.backward()
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=0)
    torch.testing.assert_close(gradients(forward_backward), gradients(plain), rtol=0, atol=0)


@pytest.mark.parametrize("tracer", ["auto", "export", "record"])
def test_packed_rows_keep_their_mask_and_other_rows_get_none_again(tracer: Any) -> None:
    """Positions begin again where a text does. Captured without, as most batches are."""
    torch.manual_seed(0)
    model, ids = llama(), torch.randint(3, WORDS, (2, 9))
    plain, whole = copy.deepcopy(model), torch.arange(9).expand(2, 9)
    packed = torch.cat([torch.arange(4), torch.arange(5)]).expand(2, 9)
    batch = {"input_ids": ids, "labels": ids, "position_ids": whole}
    forward_backward = fxpipe.compile(model, ONE, microbatches=1, tracer=tracer, example_kwargs=batch)
    for positions in (whole, packed, whole):
        loss = forward_backward(**batch | {"position_ids": positions})
        plain_loss = plain(**batch | {"position_ids": positions}).loss.detach()
        torch.testing.assert_close(loss, plain_loss, rtol=1e-6 if tracer != "auto" else 0, atol=0)


def test_a_preview_on_the_meta_device_counts_the_attention_that_runs() -> None:
    model, ids = llama(), torch.randint(3, WORDS, (2, 9))

    def preview(device: str) -> str:
        batch = dict.fromkeys(("input_ids", "labels"), ids.to(device))
        return str(fxpipe.preview(model.to(device), ONE, microbatches=2, example_kwargs=batch))

    assert preview("cpu") == preview("meta")


def full(batch: Inputs) -> Inputs:
    """The batch without padding."""
    return {name: torch.ones_like(value) if name == "attention_mask" else value for name, value in batch.items()}


SMALL = set(
    "add all any bitwise_not bitwise_or_ cat constant_pad_nd copy_ cumsum eq flip floor_divide gt index index_put_ "
    "index_select lt nonzero ones prod repeat_interleave slice_backward sub upsample_nearest2d".split()
)
"""Operators on masks, positions and counts, of which a step of stages runs some again to answer forward's questions."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("Mixtral", torch.bfloat16), ("DeepSeek-V3", torch.bfloat16)),
        *((name, torch.float32) for name in ("LLaVA", "wav2vec2, CTC", "DETR")),
    ],
)
def test_only_small_operators_run_more_often_than_in_plain_pytorch(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others run less often, such as LLaVA's last layer of vision. In float32 torch cannot trace grouped products."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
    found = importlib.import_module("attention").differing(name, dtype)
    assert {operator for operator, (ours, theirs) in found.items() if ours > theirs} <= SMALL, found
    if dtype is torch.bfloat16:
        assert not found


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_a_step_runs_the_operators_of_plain_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured without padding, then with padding, then without a mask."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
    family = importlib.import_module("families").FAMILIES[name]
    model = family.model()
    plain, padded = copy.deepcopy(model), family.batch(0, torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"microbatches": 1, "batch_dim": family.rules, "loss_fn": family.loss}
    forward_backward = fxpipe.compile(model, ONE, example_kwargs=full(padded), **options)
    for batch in (full(padded), padded, {key: value for key, value in padded.items() if key != "attention_mask"}):
        assert_same_step(forward_backward, plain, batch, family.loss_of)
