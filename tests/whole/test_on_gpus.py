"""Published models train on simulated GPUs as plain PyTorch trains them on the same device, to the bit if none is tied.

Each rank compares what it has; the device fails the call where it finds a race or memory that was freed too early.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxpipe
from tests.distributed.test_processes import free_port
from tests.gpus import Gpus
from tests.harness import Run, assert_same, compiled, cut, replica_of
from tests.models import Inputs
from tests.scripts import Scripts
from tests.whole.test_readme import blocks

pytest.importorskip("transformers")

from tests.hf import MODELS, SGD, Around, HFCase, drop_what_is_only_rounding, step_plainly, trained_plainly

STEPS = 5
SECONDS = 300.0  # for a call: the first one imports transformers in each worker
TIED = 1e-6
ROUNDED = 1e-3  # bfloat16 has steps of 2**-8

Build = Callable[[], nn.Module]
Plainly = Callable[[HFCase, Sequence[Inputs], Around], Run]


def as_it_is(build: Build) -> nn.Module:
    return build()


def checkpointed(build: Build) -> nn.Module:
    model: Any = build()
    model.gradient_checkpointing_enable()
    return model


def with_adapters(build: Build) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(build(), config)  # type: ignore[arg-type]


def in_bfloat16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16)


def trained_with_masters(case: HFCase, batches: Sequence[Inputs], around: Around) -> Run:
    """Forward and backward in bfloat16; gradients add up, and the optimizer steps, in float32."""
    masters = case.model().train()
    rounded = copy.deepcopy(masters)
    pairs = list(zip(masters.parameters(), rounded.parameters(), strict=True))
    for _, parameter in pairs:
        parameter.data = parameter.data.bfloat16()
        parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
    optimizer = case.optimizer(masters.parameters(), **case.optimizer_options)
    run = Run()
    for batch in batches:
        rounded.zero_grad()
        run.losses.append(step_plainly(case, rounded, batch, around)[0])
        for master, parameter in pairs:
            master.grad = parameter.grad
        optimizer.step()
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)
    run.state = rounded.state_dict()
    return run


@dataclass(frozen=True)
class Row:
    """A model of ``MODELS``, what is done to it, and how it is compiled.

    ``data``: its replicas. ``pinned``: a DataLoader's batches. ``tolerance``: 0 for equal to the last bit.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    done: Callable[[Build], nn.Module] = as_it_is
    around: Around = contextlib.nullcontext
    plainly: Plainly = trained_plainly
    pinned: bool = False
    data: int = 1
    tolerance: float = 0.0

    def case(self) -> HFCase:
        case = MODELS[self.model]
        build = partial(self.done, case.build)
        case = replace(case, build=lambda: build().cuda(), ranks=2)
        return replace(case, **SGD) if self.tolerance else case


AUTO: Mapping[str, Any] = {"boundaries": "auto"}
RECORD: Mapping[str, Any] = {"tracer": "record"}  # the fastest, where it does not matter what captures
MASTERS: Mapping[str, Any] = RECORD | {"precision": fxpipe.Precision()}
ADAPTED: Mapping[str, Any] = RECORD | {"boundaries": {"base_model.model.model.layers.*": {"every": 1}}}
ROWS: Mapping[str, Row] = {
    "Llama by record": Row("Llama", RECORD),
    "Llama in bfloat16": Row("Llama", MASTERS, plainly=trained_with_masters, tolerance=ROUNDED),
    "GPT-2 by auto": Row("GPT-2", AUTO, tolerance=TIED),
}
MORE: Mapping[str, Row] = {
    "Llama by export": Row("Llama", {"tracer": "export"}),
    "Llama checkpointed": Row("Llama", RECORD, checkpointed),
    "Llama under autocast": Row("Llama", RECORD, around=in_bfloat16, tolerance=ROUNDED),
    "Llama, pinned batches": Row("Llama", RECORD, pinned=True),
    "Llama with adapters": Row("Llama", ADAPTED, with_adapters),
    "T5": Row("T5", RECORD, tolerance=TIED),
    "LLaVA": Row("LLaVA", RECORD),
    "LLaVA by auto": Row("LLaVA", AUTO, tolerance=TIED),
    "LLaVA, pinned batches": Row("LLaVA", RECORD, pinned=True),
    **{
        f"Llama, two replicas, zero={zero}": Row("Llama", RECORD | {"zero": zero}, data=2, tolerance=1e-6)
        for zero in range(4)
    },
}


def on_device(batch: Inputs) -> Inputs:
    return {k: v.to("cuda", non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def train(name: str) -> None:
    """A rank's losses of its row, and the state at its end, are plain PyTorch's."""
    row = {**ROWS, **MORE}[name]
    case, topology = row.case(), fxpipe.Topology([("data", row.data), ("pipe", 2)])
    fxpipe.init()
    batches = [case.batch(number) for number in range(STEPS)]
    whole = [on_device(batch) for batch in batches]
    mine = replica_of(topology)
    parts = [cut(batch, row.data)[mine] for batch in batches]
    given = DataLoader(parts, batch_size=None, pin_memory=True) if row.pinned else parts  # type: ignore[arg-type]
    options: dict[str, Any] = {"topology": topology, "microbatches": case.microbatches // row.data}
    options |= {"boundaries": case.boundaries, "example_kwargs": on_device(parts[0])} | row.options
    with row.around():
        step = compiled(case, **options)
    optimizer, losses = step.optimizer(case.optimizer, **case.optimizer_options), []
    for batch in given:
        optimizer.zero_grad()
        with row.around():
            losses.append(step(**on_device(batch)))
        optimizer.step()
    got, wanted = Run(losses, state=step.state_dict(full=True)), row.plainly(case, whole, row.around)
    for number, (loss, expected) in enumerate(zip(losses, wanted.losses, strict=True)):
        assert_same(loss, expected, f"loss of step {number}", row.tolerance)
    assert got.state.keys() == wanted.state.keys()
    if row.tolerance:
        for run in [got, wanted]:
            drop_what_is_only_rounding(run)
    for key, expected in wanted.state.items():
        assert_same(got.state[key].to(expected.device), expected, key, 10 * row.tolerance)


@pytest.mark.parametrize("name", list(ROWS))
def test_a_model_trains_as_in_plain_pytorch(name: str, gpus: Gpus) -> None:
    gpus.run(train, name, seconds=SECONDS)


@pytest.mark.parametrize("name", list(MORE))
def test_more_models_train_as_in_plain_pytorch(name: str, gpus: Gpus) -> None:
    gpus.run(train, name, ranks=2 * MORE[name].data, seconds=SECONDS)


# --- programs, in processes of their own ---

ROOT = Path(__file__).parents[2]
WATCHED = str(ROOT / "tests" / "simulated_gpu" / "__main__.py")


def run(scripts: Scripts, folder: Path, ranks: int, *program: str) -> str:
    """What it prints; fails where a device has found a fault."""
    torchrun = ["-m", "tests.torchrun", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    return scripts.run([*torchrun, WATCHED, *program], folder)


def losses(scripts: Scripts, folder: Path, ranks: int, *program: str) -> list[str]:
    name = "-".join(["losses", str(ranks), *program[1:]])
    run(scripts, folder, ranks, str(ROOT / "examples" / program[0]), *program[1:], "--losses", name)
    return (folder / name).read_text().split()


def test_programs_of_the_readme_run(gpu_scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "readme.py").write_text("\n".join(blocks(ROOT / "README.md", "python")))
    assert "on 3 ranks, 4 micro-batches" in run(gpu_scripts, tmp_path, 3, "readme.py")


@pytest.mark.timeout(1200)
def test_programs_train_clip_to_the_bit(gpu_scripts: Scripts, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    one, *others = (losses(gpu_scripts, tmp_path, ranks, "train_clip.py", "--steps", "5") for ranks in (1, 2, 4))
    assert len(one) == 5
    assert others == [one, one]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_train_a_llava_as_plain_pytorch_does(ranks: int, gpu_scripts: Scripts, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    plain = losses(gpu_scripts, tmp_path, 1, "train_vlm.py", "--plain", "--steps", "5")
    assert len(plain) == 5
    got = losses(gpu_scripts, tmp_path, ranks, "train_vlm.py", "--steps", "5")
    assert list(map(float.fromhex, got)) == pytest.approx(list(map(float.fromhex, plain)), rel=1e-6)
