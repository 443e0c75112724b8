"""The loops of examples/ run as they stand, go on where they were cut short, and their pages show what they do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.test_processes import free_port
from tests.scripts import Scripts
from tests.whole.test_readme import ROOT, blocks

EXAMPLES = ROOT / "examples"
LOOP = EXAMPLES / "training_loop.py"


def arguments(folder: Path, steps: int, calls: int = 2) -> list[str]:
    return [str(LOOP), str(folder), "--steps", str(steps), "--calls", str(calls)]


ON_FOUR = """
import runpy, sys, fxpipe

def run_rank():
    sys.argv = sys.argv[sys.argv.index("--") + 1 :]
    runpy.run_path(sys.argv[0], run_name="__main__")

fxpipe.launch(run_rank, 4)
"""


def test_the_page_shows_pieces_of_the_script() -> None:
    def stripped(text: str) -> str:
        return re.sub(r"^\s+", "", text, flags=re.MULTILINE)

    shown = blocks(LOOP.with_suffix(".md"), "python")
    assert len(shown) > 5
    assert [block for block in shown if stripped(block) not in stripped(LOOP.read_text())] == []


KILLED = """
import builtins, os, runpy, signal, sys

def told(line, said=print, **options):
    said(line, **options)
    if line.startswith("step 60:"):
        os.kill(os.getpid(), signal.SIGKILL)

builtins.print = told
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_loop_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path: Path, scripts: Scripts) -> None:
    undisturbed = scripts.run(arguments(tmp_path / "undisturbed", 60, calls=1), tmp_path).splitlines()
    assert [line.partition(":")[0] for line in undisturbed] == ["step 20", "step 40", "step 60"]
    (tmp_path / "killed.py").write_text(KILLED)
    with pytest.raises(AssertionError, match="exit status -9"):
        scripts.run(["killed.py", *arguments(tmp_path / "killed", 60, calls=1)], tmp_path)
    resumed = scripts.run(arguments(tmp_path / "killed", 60, calls=1), tmp_path).splitlines()
    # from step 40, or from step 20, which was complete before step 40 was written
    assert resumed in (undisturbed[1:], undisturbed[2:])


def test_the_loop_goes_on_with_another_number_of_processes(tmp_path: Path, scripts: Scripts) -> None:
    (tmp_path / "four.py").write_text(ON_FOUR)
    assert scripts.run(["four.py", "--", *arguments(tmp_path / "run", 20)], tmp_path).count("step") == 1
    (line,) = scripts.run(arguments(tmp_path / "run", 40), tmp_path).splitlines()
    assert line.startswith("step 40:")


# --- torchrun

SHORT = """
import os, signal, sys, torch, fxpipe

folder = sys.argv[1]
device = fxpipe.init()
torch.manual_seed(0)
layers = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1), torch.nn.Flatten(0)
model = torch.nn.Sequential(*layers).to(device)
forward_backward = fxpipe.compile(
    model,
    fxpipe.Topology([("pipe", 2)]),
    microbatches=2,
    boundaries=["2"],
    loss_fn=lambda output, target: (output - target).square().mean(),
)
optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.1)
losses = fxpipe.load(folder, forward_backward, optimizer, required=False).get("losses", [])
dies = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ["RANK"] == "1"
while len(losses) < 6:
    optimizer.zero_grad()
    x = torch.ones(4, 4, device=device) * len(losses)
    losses.append(forward_backward(x, target=x.sum(dim=1)).item())
    optimizer.step()
    if len(losses) == 4 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(losses) % 2 == 0:
        fxpipe.save(folder, forward_backward, optimizer, step=len(losses), extra={"losses": losses})
if os.environ.get("RANK", "0") == "0":
    print(losses)
"""


def test_torchrun_starts_a_run_again_which_goes_on_to_the_bit(tmp_path: Path, scripts: Scripts) -> None:
    (tmp_path / "short.py").write_text(SHORT)
    torchrun = ["-m", "tests.torchrun", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [*torchrun, "--master-port", str(free_port()), "short.py", str(tmp_path / "killed")]
    status, printed, told = scripts.outcome(command, tmp_path)
    assert status == 0, told
    assert "exitcode: -9" in told  # it was killed
    assert printed == scripts.run(["short.py", str(tmp_path / "undisturbed")], tmp_path)  # in one process


# --- each script on two ranks, beyond saves, evaluations and the end of its training

PROGRAMS = {
    "train_clip.py": ["--steps", "6", "--save-every", "2", "--resume", "run"],
    "train_vlm.py": ["--steps", "6", "--save-every", "2", "--resume", "run"],
    "training_loop.py": ["run", "--steps", "40", "--calls", "1"],
    "hf_trainer.py": [],
    "finetune_hf.py": [],
}
SHORTER = """
import runpy, sys
from dataclasses import replace

path = sys.argv.pop()
example = runpy.run_path(path)
if path.endswith("hf_trainer.py"):
    trainer = example["main"]("run", epochs=3)
    print("loss", trainer.evaluate()["eval_loss"])
else:
    tasks = {name: replace(task, steps=4) for name, task in example["TASKS"].items()}
    example["train"].__globals__.update(RANKS=2, TASKS=tasks)
    example["run"]()
"""
"""For those without arguments: fewer steps, with saves and evaluations among them. ``zero.py`` runs with its page."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_prints_on_two_ranks_what_it_prints_in_one_process(
    name: str, tmp_path: Path, scripts: Scripts
) -> None:
    if "sklearn" in (EXAMPLES / name).read_text():
        pytest.importorskip("sklearn")
    command = [*([] if PROGRAMS[name] else ["shorter.py"]), str(EXAMPLES / name), *PROGRAMS[name]]
    torchrun = ["-m", "tests.torchrun", "--nproc-per-node", "2", "--master-port", str(free_port())]
    lines = []
    for number, start in enumerate(([], torchrun)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "shorter.py").write_text(SHORTER)
        lines.append(scripts.run([*start, *command], folder).strip().splitlines()[-1])
    wanted, got = (list(map(float, re.findall(r"\d+\.\d+", line))) for line in lines)
    assert len(got) >= 1
    assert got == pytest.approx(wanted, rel=0.02)  # the cut found for four ranks and for two rounds in another order
