"""The record tracer: what it notes of submodules that it calls as they are, and what it keeps of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.graph.program import Program, is_boundary
from tests.capturing import assert_equal, called, capture_by, run_stages, staged, step
from tests.device import DEVICE
from tests.thinned import every
from tests.trace.test_small_models import CASES, Block, Hooked, vectors


def recorded(name: str) -> Program:
    return capture_by("record", CASES[name].model(), CASES[name].batch(0))


def test_a_submodule_without_a_boundary_is_noted_with_what_it_does() -> None:
    program = recorded("submodules")
    written = [f"first.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert program.effects["first"].writes == tuple(written)
    assert not program.effects["first"].draws_random
    assert sum(is_boundary(node) for node in program.graph.nodes) == 1
    first = next(node for node in program.graph.nodes if node.name == "first")
    assert first.meta["val"].shape == (4, 6)
    assert "h = stage_boundary(self.first(x))" in first.stack_trace
    effects = recorded("branches inside").effects["branch"]
    assert (effects.writes, effects.draws_random, effects.shares) == (("branch.seen",), True, (0,))


@pytest.mark.parametrize("name", ["checkpoints", "reentrant checkpoints"])
def test_a_checkpointed_function_is_noted_with_what_it_does(name: str) -> None:
    effects = recorded(name).effects
    assert effects["checkpoint_0"].writes[0] == "a.norm.running_mean"
    assert effects["checkpoint_1"].draws_random
    assert effects["checkpoint_1"].reads == ("scale", "b.0.weight", "b.0.bias")


def test_writes_that_nothing_reads_are_no_part_of_the_program() -> None:
    assert not any(node.name.startswith(("zeros", "setitem")) for node in recorded("whatever way").graph.nodes)


def test_hooks_on_submodules_run_as_often_as_in_the_model() -> None:
    model = Hooked()
    program = capture_by("record", model, vectors(0))
    assert model.calls == []
    step(model, lambda: run_stages(staged(program), vectors(0)))
    assert model.calls == ["forward", "backward"]


def bytes_after(call: Callable[[], Any]) -> int:
    """The bytes that a forward leaves allocated: what is saved for backward, and its result."""
    if DEVICE == "cuda":
        before, result = torch.cuda.memory_allocated(), call()
        count = torch.cuda.memory_allocated() - before
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = call()
        count = sum(event.self_cpu_memory_usage for event in profile.events())
    assert result is not None
    return count


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("reentrant", every(2, [False, True]))
def test_a_checkpointed_transformer_saves_no_more_than_in_plain_pytorch(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=32, n_embd=64, n_layer=6, n_head=4, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).train()
    mask = torch.ones(4, 32, dtype=torch.long)
    mask[1, 20:] = 0
    inputs = {"input_ids": torch.arange(4 * 32).view(4, 32) % 16, "attention_mask": mask}
    inputs["labels"] = inputs["input_ids"]
    plainly = bytes_after(lambda: model(**inputs)["loss"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    cuts = {"transformer.h.2": "before", "transformer.h.4": "before"}
    graph = staged(capture_by("record", model, inputs, cuts=cuts))
    expected, found = bytes_after(lambda: model(**inputs)["loss"]), bytes_after(lambda: run_stages(graph, inputs))
    assert found < 1.05 * expected < 0.2 * plainly
    wanted = step(model, lambda: {"loss": model(**inputs)["loss"], "logits": None})
    assert_equal(step(model, lambda: run_stages(graph, inputs)), wanted)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(Block() for _ in range(5)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.tower(x) - y  # type: ignore[no-any-return]


def test_a_named_cut_leaves_the_submodule_behind_it_whole() -> None:
    cuts = {"tower.2": "before", "tower.3.inner": "after"}
    names = called(capture_by("record", Deep(), vectors(0), cuts=cuts))
    assert names[2] == "tower.2"
    assert [name for name in names if name.startswith("tower.3")] == ["tower.3.inner", "tower.3.norm"]
