"""Materialise: models built on the meta device get values on the rank that holds them, and only there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError, RunError
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.parameters.materialise import check_no_meta, materialise, reset_parameters
from fxpipe.parameters.ownership import replace_tensors
from fxpipe.parameters.weights import Weights
from tests.pool import Pool
from tests.thinned import every

HERE = torch.get_default_device()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.norm(self.first(x)))
        return self.attention(h, h, h)[0]


class Net(nn.Module):
    """Blocks, and an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def everything(model: nn.Module) -> set[str]:
    return set(all_tensors(model))


def saved(model: nn.Module, folder: Path) -> Weights:
    torch.save(model.state_dict(), folder / "weights.pt")
    return Weights.open(folder)


def filled(model: nn.Module, names: set[str] | None = None, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of these names after ``reset_parameters``."""
    names = everything(model) if names is None else names
    materialise(model, names, HERE, reset_parameters, seed=seed)
    return {name: tensor.detach().clone() for name, tensor in all_tensors(model).items() if name in names}


# --- from a checkpoint


def test_a_checkpoint_makes_the_model_that_was_saved(tmp_path: Path) -> None:
    original = Net().eval()
    model = on_meta(Net).eval()
    materialise(model, everything(model), HERE, weights=saved(original, tmp_path))
    tokens = torch.arange(6)
    assert torch.equal(model(tokens), original(tokens))


def test_only_what_is_asked_for_gets_memory(tmp_path: Path) -> None:
    original, model = Net(), on_meta(Net)
    mine = {name for name in everything(model) if name.startswith("blocks.1.")}
    materialise(model, mine, HERE, weights=saved(original, tmp_path))
    for name, tensor in all_tensors(model).items():
        assert tensor.is_meta == (name not in mine)
        assert name not in mine or torch.equal(tensor, all_tensors(original)[name])


@pytest.mark.parametrize("alias", ["embedding.weight", "head.weight"])
def test_a_tied_tensor_stays_tied_whatever_name_the_checkpoint_has_it_under(alias: str, tmp_path: Path) -> None:
    original, model = Net(), on_meta(Net)
    state = original.state_dict()
    del state["head.weight" if alias == "embedding.weight" else "embedding.weight"]
    torch.save(state, tmp_path / "weights.pt")
    materialise(model, {"embedding.weight", "head.weight"}, HERE, weights=Weights.open(tmp_path))
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, original.head.weight)


def test_type_strides_requires_grad_and_attributes_are_kept(tmp_path: Path) -> None:
    original = nn.Conv2d(3, 4, 2)
    with torch.device("meta"):
        model = nn.Conv2d(3, 4, 2, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    model.weight.requires_grad_(False)
    model.weight.no_decay = True
    strides = model.weight.stride()
    materialise(model, everything(model), HERE, weights=saved(original, tmp_path))
    assert isinstance(model.weight, nn.Parameter)
    assert (model.weight.dtype, model.weight.requires_grad, model.weight.no_decay) == (torch.bfloat16, False, True)
    assert model.weight.stride() == strides != original.weight.stride()
    assert model.bias.requires_grad
    assert torch.equal(model.weight, original.weight.to(torch.bfloat16))


def test_a_module_that_keeps_a_list_of_its_parameters_runs(tmp_path: Path) -> None:
    original = nn.LSTM(3, 4, num_layers=2)
    model = on_meta(lambda: nn.LSTM(3, 4, num_layers=2))
    materialise(model, everything(model), HERE, weights=saved(original, tmp_path))
    x = torch.randn(5, 2, 3)
    assert torch.equal(model(x)[0], original(x)[0])


def test_a_real_model_is_loaded_in_place(tmp_path: Path) -> None:
    original, model = Net(), Net()
    before = all_tensors(model)
    untouched = model.head.bias.detach().clone()
    result = materialise(model, everything(model) - {"head.bias"}, HERE, weights=saved(original, tmp_path))
    assert result == {}
    assert all(tensor is before[name] for name, tensor in all_tensors(model).items())
    assert torch.equal(model.blocks[0].first.weight, original.blocks[0].first.weight)
    assert torch.equal(model.head.bias, untouched)


def test_a_stage_gets_the_new_tensors(tmp_path: Path) -> None:
    original, model = Block(), on_meta(Block)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("second.weight")
    graph.output(graph.call_function(torch.mul, (graph.call_module("first", (x,)), weight)))
    stage = torch.fx.GraphModule(model, graph)
    result = materialise(model, everything(model), HERE, weights=saved(original, tmp_path))
    replace_tensors(stage, result)
    check_no_meta(stage, "only")
    assert stage.get_parameter("second.weight") is model.second.weight
    rows = torch.randn(4, 4)
    assert torch.equal(stage(rows), original.first(rows) * original.second.weight)


def test_a_tensor_that_is_no_part_of_the_model_is_found() -> None:
    stage = nn.Module()
    stage.register_buffer("_tensor_constant0", torch.empty(3, device="meta"))
    with pytest.raises(
        RunError, match=r"stage middle uses a tensor of shape \[3\] \(_tensor_constant0\).*register_buffer"
    ):
        check_no_meta(stage, "middle")


# --- by init_fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_modules_of_torch_initialise_themselves(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 512, dtype=dtype)
    materialise(model, everything(model), HERE, reset_parameters)
    bound = 1 / 64**0.5  # kaiming_uniform_ with a = √5
    values = torch.view_as_real(model.weight) if dtype.is_complex else model.weight
    assert values.abs().max() <= bound * 1.01
    assert values.double().std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


def test_values_depend_on_seed_and_place_and_on_no_placement() -> None:
    before = torch.get_rng_state()
    whole = filled(on_meta(Net))
    assert torch.equal(torch.get_rng_state(), before)
    parts: dict[str, Tensor] = {}
    for prefixes in (("blocks.1", "head", "embedding"), ("blocks.0.second", "blocks.0.attention"), ("blocks.0",)):
        model = on_meta(Net)
        parts |= filled(model, {name for name in everything(model) if name.startswith(prefixes)})
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    assert not torch.equal(whole["blocks.0.first.weight"], whole["blocks.1.first.weight"])
    other = filled(on_meta(Net), seed=1)
    assert not torch.equal(other["blocks.0.first.weight"], whole["blocks.0.first.weight"])


@pytest.mark.parametrize("fill", [nn.init.trunc_normal_, nn.init.orthogonal_], ids=lambda fill: fill.__name__)
def test_writes_from_further_out_depend_on_no_placement_either(
    fill: Callable[[Tensor], Tensor],
) -> None:
    def from_root(module: nn.Module) -> None:
        if isinstance(module, Net):
            for parameter in module.parameters():
                fill(parameter) if parameter.dim() > 1 else nn.init.normal_(parameter)

    whole, last = on_meta(Net), on_meta(Net)
    names = {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    materialise(whole, names, HERE, from_root)
    materialise(last, {"blocks.1.second.weight", "head.bias"}, HERE, from_root)
    assert torch.equal(last.head.bias, whole.head.bias)
    assert torch.equal(last.blocks[1].second.weight, whole.blocks[1].second.weight)
    assert last.head.weight.is_meta
    values = torch.cat([parameter.flatten() for parameter in whole.parameters()])
    assert len(values.unique()) > 0.9 * len(values)


def test_an_init_fn_may_assign_new_tensors() -> None:
    def assign(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.full(module.weight.shape, 2.0))
        elif isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(torch.full(module.weight.shape, 3.0))

    model = on_meta(Net).half()
    names = {"embedding.weight", "head.weight", "blocks.0.second.weight"}
    materialise(model, names, HERE, assign)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.unique().tolist() == [2.0]  # the head comes after the embedding
    assert model.blocks[0].second.weight.dtype == torch.float16
    assert model.blocks[0].first.weight.is_meta


def test_what_a_checkpoint_lacks_is_made_and_told(tmp_path: Path) -> None:
    original, model = Net(), on_meta(Net)
    state = {name: tensor for name, tensor in original.state_dict().items() if name != "head.bias"}
    torch.save({**state, "old": torch.ones(1)}, tmp_path / "weights.pt")
    with pytest.warns(
        UserWarning, match=r"lacks 1 of the model's 26 tensors, first 'head.bias'; init_fn makes .* 'old'"
    ):
        materialise(model, everything(model), HERE, reset_parameters, Weights.open(tmp_path))
    assert torch.equal(model.head.weight, original.head.weight)  # which reset_parameters would have overwritten
    assert torch.equal(model.blocks[1].norm.weight, original.blocks[1].norm.weight)
    assert model.head.bias.abs().max() <= 1 / 4**0.5


def test_real_parts_of_a_model_are_not_initialised_again() -> None:
    model = on_meta(Net)
    model.blocks[0] = Block()
    before = {name: tensor.detach().clone() for name, tensor in all_tensors(model.blocks[0]).items()}

    def from_root(module: nn.Module) -> None:
        reset_parameters(module)
        if module is model:
            nn.init.zeros_(model.blocks[0].first.weight)

    materialise(model, everything(model), HERE, from_root)
    assert all(torch.equal(tensor, before[name]) for name, tensor in all_tensors(model.blocks[0]).items())


# --- what is told


def forget_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


def half_of_weight(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight[:2] = 0


@pytest.mark.parametrize(
    ("init_fn", "name", "message"),
    [
        (forget_bias, "head.bias", r"init_fn has not written head.bias of shape \[6\].*called on the Linear 'head'"),
        (
            half_of_weight,
            "blocks.0.first.weight",
            r"has not written all of blocks\.0\.first\.weight",
        ),
    ],
)
def test_what_init_fn_forgets_is_named(init_fn: Callable[[nn.Module], None], name: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        materialise(on_meta(Net), {name}, HERE, init_fn)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex128])
def test_buffers_of_every_type_are_seen_to_be_written_or_not(dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.register_buffer("table", torch.ones(3, dtype=dtype))
        return module

    with pytest.raises(RunError, match="has not written table"):
        materialise(on_meta(build), {"table"}, HERE, lambda module: None)
    written = on_meta(build)
    materialise(written, {"table"}, HERE, lambda module: module.table.copy_(torch.zeros(3)))
    assert torch.equal(written.table, torch.zeros(3, dtype=dtype))


def test_a_tensor_of_another_shape_from_init_fn() -> None:
    def wrong(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.zeros(1, 1))

    with pytest.raises(RunError, match=r"tensor of shape \[1, 1\] in the place of Linear.weight, which has \[2, 3\]"):
        materialise(on_meta(lambda: nn.Linear(3, 2)), {"weight"}, HERE, wrong)


def test_an_error_in_init_fn_comes_with_what_it_was_called_on() -> None:
    def look(module: nn.Module) -> None:
        if isinstance(module, Net):
            module.head.weight.sum().item()

    with pytest.raises(RuntimeError, match=r"item\(\)") as caught:
        materialise(on_meta(Net), {"head.bias"}, HERE, look)
    assert any("init_fn was called on the Net ''" in note for note in caught.value.__notes__)


def test_a_hook_that_would_be_lost() -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    model.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(RunError, match="weight is on the meta device and has a hook"):
        materialise(model, {"weight"}, HERE, reset_parameters)


@pytest.mark.parametrize("mine", [{"blocks.0.first.weight"}, {"head.bias"}])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("head.bias"), "lacks 1 of the model's 26 tensors, first 'head.bias'"),
        (lambda state: state.update({"head.biass": state.pop("head.bias")}), 'did you mean "head.biass"'),
        (lambda state: state.update({"head.bias": torch.zeros(7)}), r"head.bias has shape \[6\], .* has \[7\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_told_on_every_rank(
    change: Callable[[dict[str, Tensor]], object], message: str, mine: set[str], tmp_path: Path
) -> None:
    state = Net().state_dict()
    change(state)
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=message):
        materialise(on_meta(Net), mine, HERE, weights=Weights.open(tmp_path))


def test_a_checkpoint_with_other_names_is_not_taken_for_one_that_lacks_some(tmp_path: Path) -> None:
    torch.save({f"model.{name}": tensor for name, tensor in Net().state_dict().items()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"lacks 26 of the model's 26.*Weights.open\(path, rename=...\)"):
        materialise(on_meta(Net), {"head.bias"}, HERE, reset_parameters, Weights.open(tmp_path))
    renamed = Weights.open(tmp_path, rename=lambda name: name.removeprefix("model."))
    materialise(on_meta(Net), {"head.bias"}, HERE, weights=renamed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_values_depend_on_no_placement_either(tmp_path: Path) -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    whole, part = on_meta(Net), on_meta(Net)
    device = torch.device("cuda", torch.cuda.current_device())
    materialise(whole, everything(whole), device, reset_parameters)
    materialise(part, {"blocks.1.second.weight"}, device, reset_parameters)
    assert torch.equal(part.blocks[1].second.weight, whole.blocks[1].second.weight)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    again = on_meta(Net)
    materialise(again, everything(again), device, weights=saved(whole, tmp_path))
    assert all(torch.equal(tensor, all_tensors(whole)[name]) for name, tensor in all_tensors(again).items())


# --- memory


def four_stages() -> nn.Module:
    """56 MiB each."""
    return nn.ModuleDict({f"stage{place}": nn.Linear(4096, 3584) for place in range(4)})


def ones(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """A state dict of the model's shapes, for which no random numbers are drawn."""
    return {name: torch.ones(tensor.shape) for name, tensor in on_meta(build).state_dict().items()}


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def memory_of_materialise(source: str, rank: int) -> float:
    """The memory that the stage of a rank takes at most while it is made, as a multiple of what it then takes."""
    model = on_meta(four_stages)
    materialise(nn.Linear(4, 4, device="meta"), ["weight", "bias"], HERE, reset_parameters)  # what torch imports
    mine = {name for name in all_tensors(model) if name.startswith(f"stage{rank}.")}
    weights = None if source == "init_fn" else Weights.open(source)
    before = peak()
    materialise(model, mine, HERE, reset_parameters, weights)
    return (peak() - before) / sum(tensor.nbytes for name, tensor in all_tensors(model).items() if name in mine)


def in_new_processes(function: Callable[..., float], *args: Any, ranks: int) -> list[float]:
    """By rank, in processes whose peaks are no earlier test's."""
    fresh = Pool()
    try:
        return fresh.run(function, *args, ranks=ranks)
    finally:
        fresh.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(("kind", "rank"), every(3, [("safetensors", 3), ("torch", 2), ("init_fn", 1)]))
def test_a_rank_needs_little_more_memory_than_what_it_holds(kind: str, rank: int, tmp_path: Path) -> None:
    source = {"safetensors": str(tmp_path / "all.safetensors"), "torch": str(tmp_path / "all.pt")}.get(kind, kind)
    if kind == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(ones(four_stages), source)
    elif kind == "torch":
        torch.save(ones(four_stages), source)
    (needed,) = in_new_processes(memory_of_materialise, source, rank, ranks=1)
    assert 0.9 < needed <= 1.3
