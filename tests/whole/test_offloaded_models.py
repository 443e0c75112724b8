"""Offload changes no bit: models train with it as plain PyTorch does, or as without it, whatever else is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from tests.device import DEVICE
from tests.graphs import FAMILIES
from tests.harness import Engines, Run, assert_same, assert_trains, compiled, replica_of, stepped, trained
from tests.models import CASES, RANDOM, Case
from tests.offloading import Offloading, leaving
from tests.pool import Pool
from tests.thinned import ALL, in_turn, pairwise

LONG = pytest.mark.long
Params = list[Any]


def few(cases: list[tuple[Any, ...]], step: int) -> Params:
    """Each ``step``-th case, and of the others each second for ``-m long``."""
    numbers = [number for number in range(len(cases)) if ALL or number % step == 0 or number % 2]
    return [pytest.param(*cases[number], marks=[LONG] * (number % step > 0)) for number in numbers]


@pytest.mark.parametrize(
    ("name", "engine", "family"),
    few(in_turn(list(CASES), ["local", "strict 0", "strict 1", "distributed"], FAMILIES), 9),
)
def test_three_steps_equal_plain_pytorch(name: str, engine: str, family: str, engines: Engines) -> None:
    assert_trains(CASES[name], engines(engine), schedule=Offloading(family))


def run(case: Case, offload: bool, autocast: bool, family: str, options: dict[str, Any]) -> Run:
    """Two steps on the topology of the options; each replica takes its rows."""
    batches = case.batches(2)
    if "topology" in options and options["topology"].size("data") > 1:
        half = replica_of(options["topology"])
        batches = [{name: value.chunk(2)[half] for name, value in batch.items()} for batch in batches]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        return trained(case, batches, schedule=Offloading(family) if offload else family, **options)


def assert_equal(got: Any, wanted: Any, what: str) -> None:
    for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
        if isinstance(other, Tensor):
            assert_same(one, other, what)
        else:
            assert one == other, what


SMALL = {
    "transformer layers": CASES["transformer layers"],
    "dropout": RANDOM["dropout"],
    "tied": CASES["tied"],
    "views": CASES["views"],
}


@pytest.mark.parametrize(
    ("name", "tracer", "autocast", "family"),
    few(pairwise(list(SMALL), ["symbolic", "export", "record"], [False, True], ["1f1b", "zb_h1", "gpipe"]), 5),
)
def test_tracers_and_autocast_change_no_bit(name: str, tracer: str, autocast: bool, family: str) -> None:
    case = replace(SMALL[name], ranks=1, placement=None)
    options = {"tracer": tracer, "example_kwargs": case.batch()}
    got, wanted = (run(case, offload, autocast, family, options) for offload in (True, False))
    assert_equal(vars(got), vars(wanted), name)


@pytest.mark.parametrize(
    ("name", "zero", "axes", "family"),
    few(
        pairwise(
            ["transformer layers", "tied", "chain"],
            [0, 1, 2, 3],
            [[("pipe", 1), ("data", 2)], [("pipe", 2)], [("pipe", 2), ("data", 2)]],
            ["1f1b", "zb_h1", "gpipe"],
        ),
        6,
    ),
)
def test_zero_and_replicas_change_no_bit(name: str, zero: int, axes: Any, family: str, pool: Pool) -> None:
    topology = fxpipe.Topology(axes)
    if topology.size("data") == 1:
        zero = 0
    case = replace(CASES[name], ranks=topology.size("pipe"), placement=None, rows=8)
    ran = [
        pool.run(
            run,
            case,
            offload,
            False,
            family,
            {"topology": topology, "zero": zero, "microbatches": 2},
            ranks=topology.world_size,
        )
        for offload in (True, False)
    ]
    for got, wanted in zip(*ran, strict=True):
        assert_equal(vars(got), vars(wanted), name)


@pytest.mark.parametrize("engine", ["local", "distributed"])
@pytest.mark.parametrize("family", ["zb_h1", "zb_v"])
def test_what_w_needs_leaves_and_a_chain_trains_as_plain_pytorch(family: str, engine: str, engines: Engines) -> None:
    case = replace(CASES["chain"], ranks=2)
    if family == "zb_v":
        names = compiled(case).schedule.stage_names
        case = replace(case, placement=dict(zip(names, [0, 1, 1, 0], strict=True)))
    assert_trains(case, engines(engine), schedule=Offloading(family))


def test_recomputed_stages_and_offloaded_stages_of_one_table() -> None:
    assert_trains(CASES["chain"], schedule=Offloading("1f1b"), recompute=["layer1", "layer3"])


# --- Hugging Face ---


def hf_case(name: str) -> Any:
    pytest.importorskip("transformers")
    from tests.hf import MODELS

    return MODELS[name]


def checkpointed(build: Callable[[], nn.Module]) -> nn.Module:
    model: Any = build()
    model.gradient_checkpointing_enable()
    return model


def with_lora(build: Callable[[], nn.Module]) -> nn.Module:
    """Frozen layers with adapters beside them."""
    model = build()
    for module in list(model.modules()):
        for child, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and child in ("q_proj", "v_proj"):
                setattr(module, child, Lora(layer))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    return model


class Lora(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.adapter_in = nn.Linear(layer.in_features, 2, bias=False)
        self.adapter_out = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.adapter_out(self.adapter_in(x))  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "family", "change"),
    [
        ("Llama", "1f1b", None),
        ("Llama", "zb_h1", None),
        ("Llama", "1f1b", checkpointed),
        ("Llama", "zb_h1", with_lora),
        ("GPT-2", "gpipe", None),
        ("CLIP", "1f1b", None),
        ("T5", "1f1b", checkpointed),
        ("Mixtral", "1f1b", None),
        ("LLaVA", "1f1b", None),
    ],
)
def test_models_of_transformers_train_with_the_same_bits(name: str, family: str, change: Any) -> None:
    case = hf_case(name)
    if change is not None:
        case = replace(case, build=partial(change, case.build))
    options = {"boundaries": case.boundaries, "example_kwargs": case.batch(), "tracer": "record"}
    assert_equal(
        *(vars(trained(case, case.batches(2), schedule=each, **options)) for each in (Offloading(family), family)), name
    )


@pytest.mark.long
def test_a_run_goes_on_from_its_state_with_the_same_bits() -> None:
    """With an evaluation between, and batches of other sizes."""
    case, runs = CASES["transformer layers"], []
    batches = [case.batch(number, rows) for number, rows in enumerate((10, 7, 12))]
    for schedule in (Offloading("1f1b"), "1f1b"):
        first = compiled(case, schedule=schedule)
        stepped(first, case, batches)
        first.evaluate(**batches[0])
        again = compiled(case, schedule=schedule)
        again.load_state_dict(first.state_dict(full=True))
        runs.append(stepped(again, case, batches))
    assert_equal(vars(runs[0]), vars(runs[1]), "the second half")


# --- the option, on whole programs ---

HARDWARE = fxpipe.Hardware(flops=1e12, host_link=1e18)
"""Copies take no time, so that ``offload=True`` saves memory."""


def with_peft(build: Callable[[], nn.Module]) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(build(), config)  # type: ignore[no-any-return]


def case_of(name: str) -> Case:
    if name in CASES:
        return CASES[name]
    base, _, change = name.partition(" ")
    if base == "Qwen3-MoE":
        from tests.hf import qwen3_moe

        return replace(hf_case("Qwen2"), build=qwen3_moe)
    case = hf_case(base)
    if change == "checkpointed":
        return replace(case, build=partial(checkpointed, case.build))  # type: ignore[no-any-return]
    if change == "by peft":
        boundaries = {f"base_model.model.{path}": where for path, where in case.boundaries.items()}
        return replace(case, build=partial(with_peft, case.build), boundaries=boundaries)  # type: ignore[no-any-return]
    return case  # type: ignore[no-any-return]


def offloading(case: Case, choice: str, topology: fxpipe.Topology, options: dict[str, Any]) -> dict[str, Any]:
    """The options with which activations leave: all that may, named stages, or as few as fit the memory."""
    if choice == "True":
        return {"offload": True}
    plan, least = (fxpipe.preview(case.model(), topology, offload=each, **options) for each in (False, True))
    if choice == "names":
        return {"offload": list(plan.graph.names)[::2]}
    peaks = [max(rank.total for rank in each.ranks) for each in (plan, least)]
    return {"offload": "auto", "hardware": replace(HARDWARE, memory=sum(peaks) / 2)}


def whole_run(name: str, choice: str | None, axes: Any = (("pipe", 2),), zero: int = 0) -> list[Any]:
    """Steps of several sizes, an evaluation, and a run that goes on from the saved state."""
    case, runs, state = case_of(name), list[Any](), dict[str, Any]()
    topology = fxpipe.Topology(axes)
    options: dict[str, Any] = {"microbatches": 4, "example_kwargs": case.batch(), "hardware": HARDWARE, "zero": zero}
    options |= {"loss_fn": case.loss_fn, "placement": None, "schedule": "gpipe", **case.options}
    if hasattr(case, "boundaries"):
        options |= {"boundaries": case.boundaries, "tracer": "record"}
    if choice is not None:
        options |= offloading(case, choice, topology, options)
    batches = [case.batch(number, rows) for number, rows in enumerate((8, 4, 6))]
    for _ in range(2):
        forward_backward = compiled(case, topology=topology, **options)
        assert bool(forward_backward.schedule.dependencies.offloaded) == (choice is not None)
        if state:
            forward_backward.load_state_dict(state)
        runs.append(vars(stepped(forward_backward, case, batches)))
        runs.append(forward_backward.evaluate(**batches[1]))
        state = forward_backward.state_dict(full=True)
    return runs


WHOLE = ["LLaVA", "Qwen3-MoE", "GPT-2", "Llama checkpointed", "Llama by peft", "U-Net"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "choice", "ranks"), in_turn(WHOLE, ["True", "names", "auto"], [2, 1, 2, 2]))
def test_the_option_changes_no_bit(name: str, choice: str, ranks: int, pool: Pool) -> None:
    run = partial(pool.run, whole_run, ranks=2) if ranks == 2 else whole_run
    assert_equal(*(run(name, each) for each in (choice, None)), name)


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_option_changes_no_bit_of_replicas(zero: int, pool: Pool) -> None:
    axes = (("pipe", 1), ("data", 2))
    runs = (pool.run(whole_run, "transformer layers", each, axes, zero, ranks=2) for each in ("True", None))
    assert_equal(*runs, f"zero={zero}")


@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Longformer", "wav2vec2"])
def test_the_option_changes_no_bit_beside_opaque_regions(name: str) -> None:
    """Batches and micro-batches have other sizes each time."""
    pytest.importorskip("transformers")
    from tests.opaque_regions import STUDIES, train

    options = {"schedule": "gpipe", "hardware": HARDWARE}
    for in_one in (True, False):
        with leaving() as left:
            got, wanted = (train(STUDIES[name], 2, 1, 0, in_one, offload=each, **options) for each in (True, False))
        assert sum(each.tensors for each in left) > 100
        del got["stages"], wanted["stages"]
        assert_equal(got, wanted, name)
