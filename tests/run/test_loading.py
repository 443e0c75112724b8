"""``fxpipe.load``: the newest whole checkpoint, or a refusal that leaves everything as it was."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import fxpipe
from fxpipe.checkpoint.files.commands import export
from fxpipe.checkpoint.files.manifest import MANIFEST
from fxpipe.checkpoint.gathering import agreed
from fxpipe.errors import CheckpointError
from fxpipe.run import loading
from fxpipe.sharding.optimizer_class import ELEMENTWISE, initial_state
from fxpipe.torch_compat.groups import default_store
from fxpipe.torch_compat.operators import TorchDispatchMode
from fxpipe.torch_compat.tensors import tensors_in
from tests.pool import Pool


class Two(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(fxpipe.stage_boundary(self.first(x))).square().mean()


class Trained:
    """A model with an optimizer and a schedule of learning rates."""

    def __init__(self, seed: int = 0, width: int = 8, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = fxpipe.compile(Two(width), fxpipe.Topology([("pipe", 2)]), microbatches=2, **options)
        self.optimizer = self.model.optimizer(torch.optim.AdamW, lr=0.1)
        self.scheduler = StepLR(self.optimizer, 2)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 4))
        self.optimizer.step()
        self.scheduler.step()
        return float(loss)

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        options = {"scheduler": self.scheduler, **options}
        return fxpipe.save(folder, self.model, self.optimizer, step=step, **options).result()

    def load(self, folder: Path) -> dict[str, Any]:
        return fxpipe.load(folder, self.model, self.optimizer, scheduler=self.scheduler)

    def values(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def check_unchanged(run: Trained, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.values().items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    run = Trained()
    for step in (1, 2):
        run.step()
        run.save(tmp_path, step, extra={"at": step})
    return tmp_path


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


HARM: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flipped, "was altered|was cut or altered"),
    "cut": (cut, "and its manifest expects|was cut or altered"),
    "gone": (Path.unlink, "No such file"),
}


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", MANIFEST])
@pytest.mark.parametrize("harm", sorted(HARM))
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_taken(folder: Path, name: str, harm: str) -> None:
    change, message = HARM[harm]
    change(folder / "step-000002" / name)
    run = Trained(1)
    with pytest.warns(RuntimeWarning, match=rf"({message}).* Going on from the one before: .*step-000001"):
        assert run.load(folder) == {"at": 1, "step": 1}
    if (name, harm) != (MANIFEST, "gone"):  # a folder without one is no checkpoint, and holds none
        before = run.values()
        with pytest.raises(CheckpointError, match=message):
            run.load(folder / "step-000002")
        check_unchanged(run, before)


def test_the_latest_one_of_its_name_and_the_folder_are_the_same(folder: Path) -> None:
    run = Trained(1)
    assert [run.load(path)["at"] for path in (folder, folder / "latest", folder / "step-000001")] == [2, 2, 1]


def test_a_folder_without_checkpoints_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing has no checkpoint of fxpipe\.save; .*required=False"):
        Trained().load(tmp_path / "nothing")


# --- what does not fit


def loaded_while_another_job_deletes(folder: Path) -> str:
    """The class of the error, where the checkpoint goes once rank 0 has found it whole and before rank 1 goes on."""
    run, store, its_loading = Trained(), default_store(), loading._Loading
    run.save(folder, 1)
    run.model._transport._inner.timeout = 2.0  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patched:

        def found(*arguments: Any) -> Any:
            store.set("found", "")
            return its_loading(*arguments)

        def deleted(gathering: Any, path: Path, make: Callable[[], Any]) -> Any:
            values = agreed(gathering, path, make)
            if make.__name__ == "check":
                store.wait(["found"])
                shutil.rmtree(path)
            return values

        if run.model._transport.rank:
            patched.setattr(loading, "agreed", deleted)
        else:
            patched.setattr(loading, "_Loading", found)
        with pytest.raises(fxpipe.FxpipeError) as raised:
            run.load(folder)
    return type(raised.value).__name__


def test_a_checkpoint_that_another_job_deletes_meanwhile_is_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """One rank alone was told, and the others waited for it until the deadline."""
    assert pool.run(loaded_while_another_job_deletes, tmp_path, ranks=2) == ["CheckpointError"] * 2


def test_another_models_checkpoint_is_refused_and_changes_nothing(folder: Path) -> None:
    wide = Trained(1, width=9)
    before = wide.values()
    with pytest.raises(CheckpointError, match=r"first\.bias has shape \[9\], .* has \[8\]|has shape \[9"):
        wide.load(folder)
    check_unchanged(wide, before)


class Three(Two):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(2))


def test_what_a_checkpoint_has_beyond_the_model_is_not_lost(tmp_path: Path) -> None:
    more = fxpipe.compile(Three(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
    fxpipe.save(tmp_path, more, None, step=1)
    with pytest.raises(CheckpointError, match=r"has 1 tensors of a model that this one has not, first 'more'"):
        fxpipe.load(tmp_path, Trained().model)
    less = Trained()
    less.save(tmp_path / "less", 1)
    with pytest.raises(CheckpointError, match=r"has no 'model\.more'"):
        fxpipe.load(tmp_path / "less", more)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_masters_are_what_was_saved_and_not_what_the_model_rounds_it_to(folder: Path, when: str) -> None:
    """The model alone is loaded, to be trained on in half precision, before or behind the optimizer is made."""
    saved, precise = Trained(), Trained(1, precision=fxpipe.Precision())
    saved.load(folder)
    if when == "before":
        torch.manual_seed(1)
        options: dict[str, Any] = {"precision": fxpipe.Precision()}
        precise.model = fxpipe.compile(Two(), fxpipe.Topology([("pipe", 2)]), microbatches=2, **options)
        fxpipe.load(folder, precise.model)
        precise.optimizer = precise.model.optimizer(torch.optim.AdamW, lr=0.1)
    else:
        fxpipe.load(folder, precise.model)
    masters = precise.optimizer.state_dict()["state"]
    for name, value in saved.values().items():
        assert not torch.equal(value, value.to(torch.bfloat16))
        assert torch.equal(masters[name]["master"], value)


@pytest.mark.parametrize("plain", [True, False])
def test_a_run_may_get_its_scheduler_later(tmp_path: Path, plain: bool) -> None:
    rates = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = fxpipe.compile(Two(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
        make = torch.optim.AdamW(model.parameters(), lr=0.1) if plain else model.optimizer(torch.optim.AdamW, lr=0.1)
        if seed:
            scheduler = StepLR(make, 1, gamma=0.5)
            fxpipe.load(tmp_path, model, make)
        else:
            fxpipe.save(tmp_path, model, make, step=0)
            scheduler = StepLR(make, 1, gamma=0.5)
        for _ in range(2):
            stepped(model, {"one": make})
            scheduler.step()
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1] == [0.025] * len(rates[0])


class Tied(Two):
    """``last`` bears its weight under another name, too, which an optimizer does not know."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.again = nn.Linear(width, 1)
        self.again.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.first(x))
        return (self.last(h) + self.again(h)).square().mean()


def precise_run(folder: Path) -> dict[str, Tensor]:
    """Three steps in bfloat16; the values that were stepped, under all names of the model."""
    torch.manual_seed(0)
    model = fxpipe.compile(Tied(), fxpipe.Topology([("pipe", 2)]), microbatches=2, precision=fxpipe.Precision())
    both = {
        "one": model.optimizer(torch.optim.AdamW, "first.*", lr=0.1),
        "other": model.optimizer(torch.optim.AdamW, ["last.*", "again.bias"], lr=0.1),
    }
    for _ in range(3):
        stepped(model, both)
    with torch.no_grad():
        dict(model.named_parameters())["first.bias"][0] = 7.0  # by hand, behind the optimizer's back
    fxpipe.save(folder, model, both, step=3)
    masters = {name: entry["master"] for one in both.values() for name, entry in one.state_dict()["state"].items()}
    masters["first.bias"] = torch.cat([torch.tensor([7.0]), masters["first.bias"][1:]])
    assert not any(torch.equal(value, value.bfloat16().float()) for value in masters.values())
    return {**masters, "again.weight": masters["last.weight"]}


def read_alone(folder: Path) -> dict[str, Tensor]:
    model = fxpipe.compile(Tied(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
    fxpipe.load(folder, model)
    return model.state_dict()


def read_into_half(folder: Path) -> dict[str, Tensor]:
    model = fxpipe.compile(Tied(), fxpipe.Topology([("pipe", 2)]), microbatches=2, precision=fxpipe.Precision())
    fxpipe.load(folder, model)
    masters = {n: e["master"] for n, e in model.optimizer(torch.optim.SGD, lr=0.1).state_dict()["state"].items()}
    return {**masters, "again.weight": masters["last.weight"]}


def read_with_optimizers(folder: Path) -> dict[str, Tensor]:
    """Which have no masters: they step the model's own values."""
    model = fxpipe.compile(Tied(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
    one = model.optimizer(torch.optim.AdamW, "first.*", lr=0.2)
    other = model.optimizer(torch.optim.AdamW, ["last.*", "again.bias"], lr=0.2)
    fxpipe.load(folder, model, {"one": one, "other": other})
    assert one.param_groups[0]["lr"] == 0.1
    assert one.state_dict()["state"]["first.weight"]["step"] == 3
    return model.state_dict()


def read_as_weights(folder: Path) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Tied()
    return fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=2, checkpoint=folder).state_dict()


def read_exported(folder: Path) -> dict[str, Tensor]:
    export(folder, folder / "out", None, "")
    return dict(pytest.importorskip("safetensors.torch").load_file(folder / "out" / "model.safetensors"))


@pytest.mark.parametrize(
    "read", [read_alone, read_into_half, read_with_optimizers, read_as_weights, read_exported], ids=lambda f: f.__name__
)
def test_a_model_that_was_kept_rounded_comes_back_with_its_masters_bits(
    tmp_path: Path, read: Callable[[Path], dict[str, Tensor]]
) -> None:
    """Where nobody else has them; and with what was written since, where that is not what they round to."""
    wanted = precise_run(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = read(tmp_path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].to(value.device), value) for name, value in wanted.items())


def switching(run: Trained) -> torch.optim.lr_scheduler.LRScheduler:
    """Whose second part is asked for its closed form when it begins, and counts with what Counter alone has."""
    first = torch.optim.lr_scheduler.LinearLR(run.optimizer, total_iters=2)
    second = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [1, 2])
    return torch.optim.lr_scheduler.SequentialLR(run.optimizer, [first, second], milestones=[3])


@pytest.mark.filterwarnings("ignore:.*(epoch parameter|Detected call)")
def test_a_scheduler_of_several_goes_on(tmp_path: Path) -> None:
    rates: list[list[Any]] = []
    for seed in (0, 1):
        run = Trained(seed)
        run.scheduler = switching(run)  # type: ignore[assignment]
        if seed:
            run.load(tmp_path)
        else:
            run.step()
            run.save(tmp_path, 1)
        rates.append([(run.step(), run.scheduler.get_last_lr())[1] for _ in range(6)])
    assert rates[0] == rates[1]


def test_a_part_that_was_not_saved_is_asked_for_in_vain_and_one_that_was_is_told(tmp_path: Path) -> None:
    run = Trained()
    run.save(tmp_path / "without", 1, scheduler=None)
    with pytest.raises(CheckpointError, match="has no state of scheduler: it was saved without scheduler="):
        run.load(tmp_path / "without")
    run.save(tmp_path / "with", 1)
    with pytest.warns(RuntimeWarning, match=r"has the state of the scheduler, which nobody has asked for"):
        fxpipe.load(tmp_path / "with", run.model, run.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxpipe.load(tmp_path / "with", run.model)  # to evaluate it


# --- safety


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def signed(checkpoint: Path, name: str, content: bytes) -> None:
    """A file changed by who can make a manifest."""
    (checkpoint / name).write_bytes(content)
    told = json.loads((checkpoint / MANIFEST).read_text())
    told["checkpoint"]["files"][name] = [len(content), [zlib.crc32(content)]]
    told["crc32"] = zlib.crc32(json.dumps(told["checkpoint"], sort_keys=True).encode())
    (checkpoint / MANIFEST).write_text(json.dumps(told))


@pytest.mark.parametrize("source", ["load", "checkpoint"])
def test_a_hostile_checkpoint_runs_nothing(folder: Path, source: str) -> None:
    signed(folder / "step-000002", ".metadata", pickle.dumps(Runs(folder / "ran")))
    run = Trained(1)
    given = run.load if source == "load" else lambda path: Trained(1, checkpoint=path)
    with pytest.raises(CheckpointError, match=r"\.metadata is not what torch.* it names (io|_io)\.open"):
        given(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"ranks": [{"extra": "a"}], "trees": {}}',
        b'{"ranks": [{"extra": "a", "run": "a", "random": "a", "scheduler": "a"}], "trees": {"a": {"call": 1}}}',
        b'{"ranks": [{"extra": "a", "run": "a", "random": "a", "scheduler": "a"}], "trees": {"a": {"tensor": "b"}}}',
        b'{"ranks": [{"extra": "a", "run": "a", "random": "a", "scheduler": "a"}], "trees": {"a": {"dict": 3}}}',
        b'{"ranks": [{"extra": "a", "run": "a", "random": "a", "scheduler": "a"}], "trees": {"a": %s}}'
        % (b"[" * 800 + b"]" * 800),
    ],
)
def test_altered_plain_data_is_refused(folder: Path, content: bytes) -> None:
    signed(folder / "step-000002", "state.json", content)
    with pytest.raises(CheckpointError, match=r"altered|lacks the tensor"):
        Trained(1).load(folder)


# --- beside torch's own


def test_a_checkpoint_is_a_source_of_weights(folder: Path) -> None:
    """``checkpoint=`` takes the model out of the newest one, and nothing of the optimizer."""
    saved = Trained(1)
    saved.load(folder)
    with torch.device("meta"):
        model = Two()
    for path in (folder, folder / "latest", folder / "step-000002"):
        read = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=2, checkpoint=path)
        assert all(torch.equal(tensor, saved.values()[name]) for name, tensor in read.state_dict().items())
    for harm, message in ((flipped, "was altered: the crc32"), (cut, "and its manifest expects")):
        harm(folder / "step-000002" / "__0_0.distcp")
        with pytest.raises(CheckpointError, match=message):
            fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=2, checkpoint=folder)
    flipped(folder / "step-000001" / ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata was altered: the crc32"):
        fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=2, checkpoint=folder / "step-000001")


def test_several_optimizers_and_torchs_own_go_on(tmp_path: Path) -> None:
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = fxpipe.compile(Two(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
        both = {
            "first": model.optimizer(torch.optim.AdamW, "first.*", lr=0.1),
            "last": torch.optim.AdamW([p for n, p in model.named_parameters() if n.startswith("last")], lr=0.2),
        }
        steps = range(3) if seed == 0 else range(0)
        for _ in steps:
            stepped(model, both)
        if seed == 0:
            fxpipe.save(tmp_path, model, both, step=3)
        else:
            fxpipe.load(tmp_path, model, both)
        losses.append([stepped(model, both) for _ in range(3)])
    assert losses[0] == losses[1]


def stepped(model: Any, optimizers: dict[str, Any]) -> float:
    model.zero_grad()
    loss = model(torch.randn(4, 4))
    for optimizer in optimizers.values():
        optimizer.step()
    return float(loss)


def test_what_of_optimizers_is_left_is_told(tmp_path: Path) -> None:
    """One of two of them: the run would go on without its state."""
    run = Trained()
    fxpipe.save(tmp_path / "both", run.model, {"one": run.optimizer, "other": run.optimizer}, step=1)
    with pytest.warns(RuntimeWarning, match=r"values of optimizers that nobody has asked for, first optim\.other\."):
        fxpipe.load(tmp_path / "both", run.model, {"one": run.optimizer})


# --- optimizers that are not quite as they were


Made = tuple[Any, torch.optim.Optimizer]


def made(seed: int, plain: bool, frozen: bool = False, lr: Any = 0.1, cls: Any = torch.optim.AdamW, **o: Any) -> Made:
    """A model and its optimizer of all parameters, torch's own or fxpipe's."""
    torch.manual_seed(seed)
    whole = Two()
    whole.first.requires_grad_(not frozen)
    model = fxpipe.compile(whole, fxpipe.Topology([("pipe", 2)]), microbatches=1, **o)
    return model, cls(model.parameters(), lr=lr) if plain else model.optimizer(cls, lr=lr)


def one_step(run: Made) -> float:
    run[1].zero_grad()
    loss = run[0](torch.ones(4, 4))
    run[1].step()
    return float(loss)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("trained", [(False, True, True), (True, False, True)], ids=str)
def test_what_is_frozen_for_some_steps_goes_on_as_in_plain_pytorch(
    tmp_path: Path, plain: bool, trained: tuple[bool, bool, bool]
) -> None:
    """Where an optimizer makes a parameter's state when it first steps it, and ``load_state_dict`` fills every
    parameter's. ``trained``: whether the first layer is, before the save, in the step behind it, and in the last."""
    wanted = Two()
    optimizer = torch.optim.AdamW(wanted.parameters(), lr=0.1)
    for number in range(4):
        wanted.first.requires_grad_(trained[max(0, number - 1)])
        optimizer.zero_grad()
        wanted(torch.ones(4, 4)).backward()
        optimizer.step()
    first = made(0, plain, frozen=not trained[0])
    for _ in range(2):
        one_step(first)
    fxpipe.save(tmp_path, *first, step=2)
    second = made(1, plain, frozen=not trained[1])
    fxpipe.load(tmp_path, *second)
    one_step(second)
    for parameter in second[0].parameters():
        parameter.requires_grad_(trained[2])
    one_step(second)
    found = second[0].state_dict()
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in wanted.state_dict().items())


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("tensor_then", [True, False])
def test_a_learning_rate_comes_as_it_was_saved(tmp_path: Path, plain: bool, tensor_then: bool) -> None:
    """As torch's load_state_dict takes it: a number or a tensor, whatever this optimizer was made with."""
    rates = [torch.tensor(0.1), 0.2] if tensor_then else [0.1, torch.tensor(0.2)]
    first = made(0, plain, lr=rates[0])
    one_step(first)
    fxpipe.save(tmp_path, *first, step=1)
    second = made(1, plain, lr=rates[1])
    fxpipe.load(tmp_path, *second)
    found = second[1].param_groups[0]["lr"]
    assert isinstance(found, Tensor) == tensor_then
    assert float(found) == pytest.approx(0.1)
    assert [one_step(second) for _ in range(2)] == [one_step(first) for _ in range(2)]


@pytest.mark.parametrize("plain", [True, False])
def test_a_run_that_was_loaded_in_inference_mode_is_trained_on(tmp_path: Path, plain: bool) -> None:
    first = made(0, plain)
    one_step(first)
    fxpipe.save(tmp_path, *first, step=1)
    second = made(1, plain)
    with torch.inference_mode():
        fxpipe.load(tmp_path, *second)
    assert [one_step(second) for _ in range(3)] == [one_step(first) for _ in range(3)]


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            {"plain": False},
            {"plain": False, "cls": torch.optim.SGD},
            r"no 'optim\.param_groups\.0\.momentum': .* class",
        ),
        (
            {"plain": False, "cls": torch.optim.SGD},
            {"plain": False},
            r"no 'optim\.param_groups\.0\.betas': .* of another",
        ),
        ({"plain": False}, {"plain": True}, r"one is torch's own and the other of forward_backward\.optimizer"),
        (None, {"plain": False}, r"has no state of optimizer= \(optim\): it was saved without it"),
    ],
)
def test_an_optimizer_of_another_kind_is_refused_and_nothing_changes(
    tmp_path: Path, then: dict[str, Any] | None, now: dict[str, Any], message: str
) -> None:
    first = made(0, **(then or {"plain": False}))
    one_step(first)
    fxpipe.save(tmp_path, first[0], first[1] if then else None, step=1)
    second = made(1, **now)
    before = {name: value.clone() for name, value in second[0].state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        fxpipe.load(tmp_path, *second)
    assert all(torch.equal(value, before[name]) for name, value in second[0].state_dict().items())


def test_costs_that_were_recorded_come_back(tmp_path: Path) -> None:
    run = Trained()
    run.model.record_timeline()
    run.step()
    run.save(tmp_path, 1)
    again = Trained(1)
    again.load(tmp_path)
    assert again.model.reschedule("gpipe").microbatches == 2  # without a step that was recorded
    again.save(tmp_path, 2)
    third = Trained(2)
    third.load(tmp_path)
    wanted = json.loads((tmp_path / "step-000001" / "state.json").read_text())
    found = json.loads((tmp_path / "step-000002" / "state.json").read_text())
    digests = [read["ranks"][0]["run"] for read in (wanted, found)]
    one, other = (dict(read["trees"][digest]["dict"]) for read, digest in zip((wanted, found), digests, strict=True))
    assert one["costs"] == other["costs"] is not None


class Allocations(TorchDispatchMode):
    """Counts the bytes of new memory that operators return, in blocks of ``least`` bytes or more."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.bytes = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage.nbytes() >= self.least:
                self.bytes += storage.nbytes()
        return result


def test_a_load_allocates_the_state_once_and_what_it_reads(tmp_path: Path) -> None:
    run = Trained(width=512)
    run.step()
    run.save(tmp_path, 1)
    size = 4 * 512 * 4  # bytes of the largest parameter, of which the file has a value and two moments
    new = Trained(seed=1, width=512)
    with Allocations(size) as counted:
        new.load(tmp_path)
    assert counted.bytes == 2 * size + 3 * size
    moments = [state.optimizer.state[state.model.module.last.weight]["exp_avg_sq"] for state in (run, new)]
    assert torch.equal(*moments)


@pytest.mark.parametrize("cls", sorted(ELEMENTWISE, key=str))
@pytest.mark.parametrize("like", [torch.empty(6), torch.empty(2, 3), torch.empty(2, 3, 4, 5).mT])
def test_the_state_before_a_first_step_has_an_elements_memory(cls: Any, like: Tensor) -> None:
    options: dict[str, Any] = {"lr": 0.5, **({"momentum": 0.9} if cls is torch.optim.SGD else {})}
    parameter = nn.Parameter(torch.zeros_like(like))
    plain = cls([parameter], **options)
    parameter.grad = torch.zeros_like(parameter)
    plain.step()
    state = initial_state(cls, options, like, shared=True)
    assert state.keys() == plain.state[parameter].keys()
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(state)) <= 8 * len(state)
    for key, value in initial_state(cls, options, like).items():
        after = plain.state[parameter][key]  # counts have gone on there
        if after.ndim:
            assert torch.equal(value, after)
            assert (value.dtype, value.stride()) == (after.dtype, after.stride())
