"""A cache of captures: what is found in it is what would have been captured, and what is no capture is passed over."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

import fxpipe
from fxpipe import RunError, Topology, passes, stage_boundary
from fxpipe.graph.plain_data import decode, encode
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.passes.chain import chain
from fxpipe.torch_compat import pytree
from fxpipe.trace import capture
from fxpipe.trace.cached import facts, folder, tracer
from tests.capturing import run_stages
from tests.harness import cut
from tests.pool import Pool
from tests.thinned import every
from tests.trace.test_export import CASES, Two, assert_trains_alike, exported, stages_of, vectors

TWO = Topology([("pipe", 2)])


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once it is called, an export fails the test."""

    def export(request: Any) -> Program:
        raise AssertionError("captured anew")

    return lambda: monkeypatch.setattr(tracer, "export", export)


def facts_of(program: Program) -> list[Any]:
    """All that later passes read of the nodes; what a tensor is like in its place."""
    nodes = [
        (node.name, node.op, node.target, node.args, node.kwargs, sorted(node.meta.items()))
        for node in program.graph.nodes
    ]

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return repr(value)
        return type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad

    return [[like(leaf) for leaf in pytree.tree_leaves(node)] for node in nodes]


NEVER_KEPT = {"numbers", "constants", "containers"}
"""A number that only running shows, a tensor that is no buffer, an input of a class of the user's."""


@pytest.mark.parametrize("name", every(5, sorted(CASES)))
def test_what_is_found_is_what_was_captured_and_trains_as_plain_pytorch(
    name: str, tmp_path: Path, no_export: Callable[[], None]
) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    plain, options = copy.deepcopy(model), {"training": False, **case.options}
    fresh = exported(model, case.batch(), **options)
    first = exported(model, case.batch(), cache=str(tmp_path), **options)
    assert len(os.listdir(tmp_path)) == (name not in NEVER_KEPT)
    if name in NEVER_KEPT:
        return
    no_export()
    second = exported(model, case.batch(), cache=str(tmp_path), **options)
    assert facts_of(first) == facts_of(second) == facts_of(fresh)
    assert second.result == fresh.result
    assert second.constants.keys() == fresh.constants.keys()
    one, other = (str(chain(passes.default(), program, callbacks=())) for program in (second, fresh))
    assert one == other  # which ranks compare
    graph = stages_of(second)
    for _ in range(2):
        assert_trains_alike(graph, model, plain, case.batch())


def compiled(model: nn.Module, batch: Any, path: Path, **options: Any) -> fxpipe.ForwardBackward:
    return fxpipe.compile(model, TWO, microbatches=2, tracer="export", example_kwargs=batch, cache=path, **options)


def test_compile_finds_a_capture_and_checks_it_against_the_model(tmp_path: Path, no_export: Callable[[], None]) -> None:
    torch.manual_seed(0)
    model, batch = Two(), vectors()
    plain = copy.deepcopy(model)
    compiled(copy.deepcopy(model), batch, tmp_path)
    no_export()
    forward_backward = compiled(model, batch, tmp_path)
    assert "checked" in str(forward_backward.stages)
    loss = forward_backward(**batch)
    wanted = sum(plain(x, y) / 2 for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True))
    wanted.backward()
    assert torch.equal(loss, wanted.detach())
    for (name, tensor), reference in zip(forward_backward.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(tensor.grad, reference.grad), name


def test_a_later_shape_is_found_too_and_evaluation_has_a_capture_of_its_own(
    tmp_path: Path, no_export: Callable[[], None]
) -> None:
    model = Two()
    for attempt in range(2):
        forward_backward = compiled(copy.deepcopy(model), vectors(), tmp_path, check_capture=False)
        forward_backward.evaluate(**vectors())
        assert len(os.listdir(tmp_path)) == 2
        no_export()
        assert attempt < 2


class Scaled(Two):
    factor = 1.0

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return super().loss(h, y) * self.factor


def test_an_attribute_that_changes_after_a_capture_was_found_is_followed(
    tmp_path: Path, no_export: Callable[[], None]
) -> None:
    torch.manual_seed(0)
    model, batch = Scaled(), vectors()
    compiled(copy.deepcopy(model), batch, tmp_path)
    trebled = copy.deepcopy(model)
    trebled.factor = 3.0
    compiled(trebled, batch, tmp_path)
    no_export()
    forward_backward = compiled(model, batch, tmp_path)
    once = forward_backward(**batch)
    model.factor = 3.0
    thrice = forward_backward(**batch)
    torch.testing.assert_close(thrice, 3 * once)
    assert len(os.listdir(tmp_path)) == 2


class Told(Two):
    """Asks each time what it shall do."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        super().__init__()
        self.asked = asked

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(h, y)
        return loss * 3 if self.asked() else loss


def one_by_one(answers: Iterable[bool]) -> Callable[[], bool]:
    return iter(answers).__next__


ASKED: dict[str, Callable[[], bool]] = {
    "the first call": one_by_one(itertools.chain([True], itertools.repeat(False))),
    "every other call": one_by_one(itertools.cycle([True, False])),
    "a call that is traced": lambda: get_proxy_mode() is not None,
    "a call that is not": lambda: get_proxy_mode() is None,
}


@pytest.mark.parametrize("name", ASKED)
def test_what_does_something_else_in_each_call_or_while_it_is_traced_is_not_kept(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exported(Told(ASKED[name]), vectors(), cache=str(tmp_path))
    assert not os.listdir(tmp_path)
    assert "forward does something else each time it is called, or while" in capfd.readouterr().err


class OfNumbers(Two):
    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.b(self.b(h)) * torch.tensor([1.0, 2.0] * 3) + torch.arange(6)
        return super().loss(h.float().relu_(), y) + torch.zeros(())


def test_numbers_and_casts_in_forward_are_kept(tmp_path: Path, no_export: Callable[[], None]) -> None:
    fresh = exported(OfNumbers(), vectors())
    exported(OfNumbers(), vectors(), cache=str(tmp_path))
    no_export()
    found = exported(OfNumbers(), vectors(), cache=str(tmp_path))
    assert facts_of(found) == facts_of(fresh)
    assert [*map(torch.Tensor.tolist, found.constants.values())] == [[1.0, 2.0] * 3]


def test_what_cannot_be_kept_is_captured_all_the_same_and_a_line_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    held = torch.ones(6)

    class Holding(Two):
        def loss(self, h: Tensor, y: Tensor) -> Tensor:
            return super().loss(h * held, y)

    program = exported(Holding(), vectors(), cache=str(tmp_path))
    assert list(program.constants) == ["_constant0"]
    assert program.constants["_constant0"] is held
    assert not os.listdir(tmp_path)
    told = capfd.readouterr().err
    assert "is not kept" in told
    assert "shape [6] that is neither an input nor one of the model's" in told


@functools.lru_cache
def made_once(width: int) -> Tensor:
    return torch.ones(width)


class Remembering(Two):
    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return super().loss(h * made_once(6), y)


@pytest.mark.parametrize("with_cache", [False, True])
def test_a_tensor_that_is_kept_from_call_to_call_is_refused_with_a_cache_as_without(
    with_cache: bool, tmp_path: Path
) -> None:
    made_once.cache_clear()
    with pytest.raises(fxpipe.TraceError, match=r"and keeps now what it has made while it was captured.*cache_clear"):
        fxpipe.compile(
            *(Remembering(), TWO), tracer="export", example_kwargs=vectors(), cache=tmp_path if with_cache else None
        )
    made_once.cache_clear()
    assert not os.listdir(tmp_path)


# --- the folder ---


def kept(path: Path) -> Path:
    """The one file in it, of a ``Two``."""
    exported(Two(), vectors(), cache=str(path))
    (file,) = path.iterdir()
    return file


def rewritten(file: Path, change: Callable[[Any], Any]) -> None:
    """The file with other data, whose header fits it."""
    header, _, body = file.read_bytes().partition(b"\n")
    told = json.loads(header)
    data = decode(body, "the file")
    body = encode(change(data) or data)
    told["sha256"] = hashlib.sha256(body).hexdigest()
    file.write_bytes(json.dumps(told).encode() + b"\n" + body)


def with_target(word: str) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        next(node for node in data["nodes"] if node[1] == "operator aten::mse_loss.default")[1] = word

    return change


def with_code_for_a_name(data: Any) -> None:
    """A stage is Python code, in which what is given by name stands as it is."""
    next(node for node in data["nodes"] if "mse_loss" in node[1])[4]["reduction=1) or exit(1) or dict(x"] = 1


def with_a_huge_constant(data: Any) -> None:
    data["constants"]["huge"] = (torch.float32, (2**50,), torch.device("cpu"), b"")


def with_other_source(data: Any) -> None:
    next(node for node in data["nodes"] if node[0] == "get_attr")[1] = "a.forward"


def with_a_part(data: Any) -> None:
    """An operator of which no fact is told would be run to find one."""
    next(node for node in data["nodes"] if "mse_loss" in node[1])[5].clear()


def without_facts(data: Any) -> None:
    data["facts"] = []


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "empty": lambda file: file.write_bytes(b""),
    "a bit that flipped": lambda file: file.write_bytes(file.read_bytes().replace(b"mse_loss", b"mse_losr")),
    "no JSON": lambda file: file.write_bytes(b"\x80\x04pickled"),
    "other JSON": lambda file: file.write_text("[1, 2]\n{}"),
    "nested beyond measure": lambda file: file.write_text("[" * 100_000),
    "of another key": lambda file: file.write_bytes(file.read_bytes().replace(b'"key": "', b'"key": "0')),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
    "an operator that is none": lambda file: rewritten(file, with_target("operator aten::nothing.default")),
    "no operator": lambda file: rewritten(file, with_target("operator load_library::x.default")),
    "a function of Python's": lambda file: rewritten(file, with_target("function os.system")),
    "an operator that opens files": lambda file: rewritten(file, with_target("operator aten::from_file.default")),
    "an operator that prints": lambda file: rewritten(file, with_target("operator prim::Print.default")),
    "an operator that seeds": lambda file: rewritten(file, with_target("operator aten::manual_seed.default")),
    "an operator for other ranks": lambda file: rewritten(
        file, with_target("operator _c10d_functional::wait_tensor.default")
    ),
    "code": lambda file: rewritten(file, with_code_for_a_name),
    "a constant without numbers": lambda file: rewritten(file, with_a_huge_constant),
    "an attribute that is no tensor": lambda file: rewritten(file, with_other_source),
    "an operator in place of a part": lambda file: rewritten(file, with_a_part),
    "without facts": lambda file: rewritten(file, without_facts),
    "no program": lambda file: rewritten(file, lambda data: {"nodes": 3}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_no_capture_is_passed_over_with_a_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kept(tmp_path)
    DAMAGES[name](file)
    capfd.readouterr()
    fresh, exports = tracer.export, list[int]()
    monkeypatch.setattr(tracer, "export", lambda request: (exports.append(1), fresh(request))[1])
    exported(Two(), vectors(), cache=str(tmp_path))
    assert exports
    told = capfd.readouterr().err
    assert f"{file} cannot be used (" in told
    if file.is_file():  # and is a capture again
        exported(Two(), vectors(), cache=str(tmp_path))
        assert len(exports) == 1


def test_check_capture_finds_a_file_that_says_what_the_model_does_not(tmp_path: Path) -> None:
    """A header that fits can be made by anybody."""
    batch = vectors()
    compiled(Two(), batch, tmp_path, check_capture=False)
    (file,) = tmp_path.iterdir()
    rewritten(file, with_target("operator aten::l1_loss.default"))
    with pytest.raises(fxpipe.TraceError, match="loss"):
        compiled(Two(), batch, tmp_path)


def test_a_cache_of_other_versions_is_told_of_and_never_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kept(tmp_path)
    capfd.readouterr()
    others = {**facts.versions(), "torch": "9.9"}
    monkeypatch.setattr(folder, "versions", lambda: others)
    exported(Two(), vectors(), cache=str(tmp_path))
    told = capfd.readouterr().err
    assert f"{file} was captured by torch {torch.__version__}; captured anew by " in told
    assert "torch 9.9" in told
    assert len(os.listdir(tmp_path)) == 2  # both are kept


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_captured(
    tmp_path: Path, no_export: Callable[[], None]
) -> None:
    no_export()
    (tmp_path / "file").write_text("")
    for call in (fxpipe.compile, fxpipe.preview):
        with pytest.raises(RunError, match=r"cache='.*file' is no folder that captures can be kept in: "):
            call(Two(), TWO, tracer="export", example_kwargs=vectors(), cache=tmp_path / "file")
    with pytest.raises(RunError, match="cache is 3; it is the path of a folder"):
        fxpipe.preview(Two(), TWO, cache=3)  # type: ignore[arg-type]


def test_a_folder_may_be_below_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fxpipe.preview(Two(), TWO, tracer="export", example_kwargs=vectors(), cache="~/kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    forward_backward = compiled(Two(), vectors(), Path("kept"), check_capture=False)
    monkeypatch.chdir(tmp_path / "later")
    forward_backward.evaluate(**vectors())
    assert len(os.listdir(tmp_path / "kept")) == 2
    assert not os.listdir()


def test_any_source_of_fxpipe_is_a_part_of_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace" / "cached").mkdir(parents=True)
    (tmp_path / "graph.py").write_text("1")
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "trace" / "cached" / "facts.py"))
    before = facts.versions.__wrapped__()
    (tmp_path / "graph.py").write_text("2")
    assert facts.versions.__wrapped__() != before


def test_what_cannot_be_read_again_is_captured_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: Any) -> Program:
        raise ValueError("cannot be made")

    monkeypatch.setattr(tracer, "program_of", unreadable)
    assert exported(Two(), vectors(), cache=str(tmp_path)).tracer == "export"
    assert "is not kept in" in capfd.readouterr().err
    assert not os.listdir(tmp_path)


def test_a_disk_that_is_full_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    exported(Two(), vectors(), cache=str(tmp_path))
    assert "a capture could not be kept" in capfd.readouterr().err
    assert not os.listdir(tmp_path)


def test_who_reads_while_others_write_reads_all_or_nothing(tmp_path: Path) -> None:
    key, data, over = "k" * 64, {"numbers": list(range(10_000))}, threading.Event()

    def write() -> None:
        while not over.is_set():
            folder.write(str(tmp_path), key, encode(data))

    writers = [threading.Thread(target=write) for _ in range(2)]
    folder.write(str(tmp_path), key, encode(data))
    for writer in writers:
        writer.start()
    found = [folder.read(str(tmp_path), key) for _ in range(50)]
    over.set()
    for writer in writers:
        writer.join(60)
    assert found == [data] * 50
    assert len(os.listdir(tmp_path)) == 1


# --- together ---


def a_step_with_a_cache_of_its_own(path: str) -> tuple[float, list[str]]:
    """Rank 0 finds the capture, and rank 1 does not."""
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(
        Two(), TWO, microbatches=2, tracer="export", example_kwargs=vectors(), cache=f"{path}/{os.environ['RANK']}"
    )
    torch.manual_seed(1)
    return float(forward_backward(**vectors())), os.listdir(f"{path}/{os.environ['RANK']}")


def test_a_rank_that_finds_a_capture_and_one_that_does_not_agree(tmp_path: Path, pool: Pool) -> None:
    torch.manual_seed(0)
    model = Two()
    alone = compiled(model, vectors(), tmp_path / "0")
    before = os.listdir(tmp_path / "0")
    torch.manual_seed(1)
    wanted = float(alone(**vectors()))
    assert pool.run(a_step_with_a_cache_of_its_own, str(tmp_path), ranks=2) == [(wanted, before)] * 2


def test_a_model_without_memory_is_previewed_from_a_cache(tmp_path: Path, no_export: Callable[[], None]) -> None:
    def previewed() -> str:
        with torch.device("meta"):
            model = Two()
            batch = vectors()
        options: dict[str, Any] = {"microbatches": 2, "hardware": "h100", "cache": tmp_path}
        return str(fxpipe.preview(model, TWO, tracer="export", example_kwargs=batch, **options))

    first = previewed()
    no_export()
    assert previewed() == first


def test_what_symbolic_captures_needs_no_cache(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.b(stage_boundary(self.a(x))), y)

    told = fxpipe.preview(Plain(), TWO, example_kwargs=vectors(), cache=tmp_path)
    assert "symbolic" in str(told.graph)
    assert not os.listdir(tmp_path)
    assert not capfd.readouterr().err


# --- models of Hugging Face ---


@pytest.mark.parametrize("name", every(6, ["Llama", "CLIP", "T5", "BERT", "GPT-2", "Mixtral"]))
def test_a_model_of_hugging_face_is_found_and_trains_as_plain_pytorch(
    name: str, tmp_path: Path, no_export: Callable[[], None]
) -> None:
    pytest.importorskip("transformers")
    from tests.hf import MODELS, request_of

    case = MODELS[name]
    torch.manual_seed(0)
    model = case.build()
    batch = cut(case.batch(0), case.microbatches)[0]
    request = request_of(model, batch, case.boundaries)
    fresh = capture(replace(request, cache=str(tmp_path)), "export")
    assert len(os.listdir(tmp_path)) == 1
    no_export()
    found = capture(replace(request, cache=str(tmp_path)), "export")
    assert facts_of(found) == facts_of(fresh)
    one, other = (str(chain(passes.default(), program, callbacks=())) for program in (found, fresh))
    assert one == other
    loss, gradients = trained_by(stages_of(found), model, batch)
    wanted, as_fresh = trained_by(stages_of(fresh), model, batch)
    assert torch.equal(loss, wanted)
    assert torch.equal(loss, model(**batch)["loss"])
    assert len(gradients) == len(as_fresh) == len([*model.parameters()])
    assert all(map(torch.equal, gradients, as_fresh))


def trained_by(graph: StageGraph, model: nn.Module, batch: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradients of all parameters; zeros where there is none."""
    model.zero_grad()
    loss = run_stages(graph, batch)["loss"]
    loss.backward()
    return loss, [torch.zeros(()) if one.grad is None else one.grad for one in model.parameters()]
