"""``python -m fxpipe`` as a user's shell runs it: what it prints, exit codes, files, pipes; and never torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.__main__ import main
from fxpipe.checkpoint.files.manifest import Manifest
from fxpipe.checkpoint.files.writer import RankPlan
from fxpipe.distributed.topology import Topology
from fxpipe.parameters.weights import Weights
from fxpipe.schedules import SCHEDULES, build
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, WORKED, chain
from tests.run.test_loading import Trained

ROOT = Path(__file__).parents[1]
EDGES = "--edges", "0-1,1-4,2-3,3-4"
BALANCED_CHAIN = "--stages", "4", "-m", "8"  # F = 1, B = 2

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which torch cannot be imported."""
    (tmp_path / "no_torch").mkdir()
    (tmp_path / "no_torch" / "torch.py").write_text("raise ImportError('the command line imported torch')\n")
    paths = [str(tmp_path / "no_torch"), str(ROOT)]
    # Unbuffered, argparse itself would meet a pipe that is closed, and pass over it.
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120", "PYTHONUNBUFFERED": ""}


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Run:
    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            cwd=tmp_path,
            env=environment | more,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
        )

    return run


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The same in this process, which has torch: for what a process of its own adds nothing to. A test of each command
    runs one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def called(*arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            code = main(list(arguments))
        except SystemExit as end:  # as argparse ends
            code = int(end.code or 0)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return called


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fxpipe", *arguments]


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """What a command printed that went well."""
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def told(done: subprocess.CompletedProcess[str], code: int) -> str:
    """What a command said that did not."""
    assert done.returncode == code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def cells(text: str) -> list[list[str]]:
    """The actions of each line that has any."""
    found = [re.findall(r"\b\d+[FBIW]\d+\b", line) for line in text.splitlines()]
    return [line for line in found if line]


# --- show ---


def test_show_prints_table_bubble_makespan_and_peaks(run: Run) -> None:
    text = printed(run("show", "1f1b", *BALANCED_CHAIN, "--full"))
    assert cells(text) == [list(map(str, row)) for row in build("1f1b", chain(4), 8).rows]
    assert "27.3%" in text  # (p − 1) / (m + p − 1)
    assert "33" in text  # (m + p − 1)(F + B)
    for peak in ("0 4", "1 3", "2 2", "3 1"):
        assert peak in text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_shown(family: str, called: Run) -> None:
    text = printed(called("show", family, "--stages", "4", "-m", "4", "--placement", "0,1,0,1", "--full"))
    assert family in text
    assert cells(text) == [list(map(str, row)) for row in build(family, chain(4), 4, (0, 1, 0, 1)).rows]


def test_stages_without_edges_are_a_chain_and_a_placement_says_how_many(called: Run) -> None:
    by_stages = printed(called("show", "1f1b", "--stages", "4", "--placement", "0,1,0,1"))
    by_edges = printed(called("show", "1f1b", "--edges", "0-1,1-2,2-3", "--placement", "0,1,0,1"))
    assert printed(called("show", "1f1b", "--placement", "0,1,0,1")) == by_stages == by_edges


@pytest.mark.parametrize(
    ("family", "placement"), [("1f1b", "0,0,1,1"), ("interleaved_1f1b", "0,1,0,1"), ("zb_v", "0,1,1,0")]
)
def test_a_number_of_ranks_will_do(family: str, placement: str, called: Run) -> None:
    wanted = printed(called("show", family, "--stages", "4", "--placement", placement))
    assert printed(called("show", family, "--stages", "4", "--ranks", "2")) == wanted


def test_without_a_command_it_prints_its_help(called: Run) -> None:
    assert "show      print a schedule's table and figures" in printed(called())
    assert printed(called("--version")) == f"fxpipe {fxpipe.__version__}\n"


def test_limits_are_kept_by_the_family_that_looks_at_them(called: Run) -> None:
    """1 in flight: one micro-batch after another, each p(F + B)."""
    greedy = "show", "greedy", "--stages", "3", "-m", "2"
    for limit in (["--in-flight", "1"], ["--memory", "2", "--bytes", "2"]):
        assert re.search(r"makespan\D+18\b", printed(called(*greedy, *limit)))


# --- files ---


def test_a_table_that_was_written_is_shown_again(run: Run, tmp_path: Path) -> None:
    first = printed(run("show", "zb_h1", *EDGES, "--csv", "zb_h1.csv", "--full"))
    assert Schedule.from_csv(tmp_path / "zb_h1.csv", WORKED).rows == build("zb_h1", WORKED, 8).rows
    assert printed(run("show", "zb_h1.csv", *EDGES, "--full")) == first


@pytest.mark.parametrize(
    ("option", "beginning"), [("--svg", "<svg"), ("--html", "<!doctype html"), ("--trace", "{")], ids=str
)
def test_pictures_and_traces_are_written(option: str, beginning: str, called: Run, tmp_path: Path) -> None:
    first = printed(called("show", "1f1b", "--stages", "3"))
    assert printed(called("show", "1f1b", "--stages", "3", option, "picture")) == first
    written = (tmp_path / "picture").read_text(encoding="utf-8")
    assert beginning in written[:200].lower()
    assert printed(called("show", "1f1b", "--stages", "3", option)) == first
    (named,) = tmp_path.glob("1f1b.*")
    assert named.read_text(encoding="utf-8") == written


# --- compare ---


def lines_of(text: str) -> dict[str, list[str]]:
    """First word of a line → the others."""
    return {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words}


def test_compare_takes_families_and_costs(run: Run) -> None:
    """(m + p − 1)(F + B) = 9 · 5; 1F1B's first rank holds p micro-batches, GPipe's m."""
    costs = "--forward", "2", "--backward", "3", "--bytes", "5"
    text = printed(run("compare", "1f1b", "gpipe", "--stages", "2", *costs))
    lines = lines_of(text)
    assert lines["1f1b"] == ["45", "45", "11.1%", "2", "3", "10"]
    assert lines["gpipe"] == ["45", "45", "11.1%", "8", "16", "40"]
    assert text.index("1f1b") < text.index("gpipe")
    assert set(lines) & set(FAMILIES) == {"1f1b", "gpipe"}


def test_a_family_that_refuses_leaves_the_others_in_the_table(called: Run) -> None:
    """With room for one micro-batch a rank, greedy takes turns, 8 · 2(F + B), and 1F1B, which holds two, says no."""
    done = called("compare", "1f1b", "greedy", "--stages", "2", "--bytes", "5", "--memory", "5")
    assert done.returncode == 0
    assert lines_of(done.stdout)["greedy"] == ["48", "27", "50.0%", "1", "2", "5"]
    assert done.stderr.startswith("fxpipe: 1f1b: 1f1b holds 10 bytes on rank 0, memory=5")


def test_tables_in_files_are_compared_with_each_other(called: Run, tmp_path: Path) -> None:
    """1F1B's and GPipe's rows of above, read again."""
    files = [tmp_path / f"{name}.csv" for name in ("1f1b", "gpipe")]
    for file in files:
        assert called("show", file.stem, "--stages", "2", "--csv", str(file)).returncode == 0
    costs = "--forward", "2", "--backward", "3"
    lines = lines_of(printed(called("compare", *map(str, files), *costs)))
    assert lines[str(files[0])] == ["45", "45", "11.1%", "2", "3"]
    assert lines[str(files[1])] == ["45", "45", "11.1%", "8", "16"]
    assert "compare files with files" in told(called("compare", "1f1b", str(files[0]), "--stages", "2"), 2)


# --- topology ---


def test_topology_is_printed(run: Run) -> None:
    axes = [("pipe", 2), ("tensor", 2), ("data", 4)]
    assert printed(run("topology", "pipe=2,tensor=2,data=4")) == f"{Topology(axes)}\n"
    assert printed(run("topology", "pipe=2,tensor=2,data=4", "--ranks-per-node", "8")) == f"{Topology(axes, 8)}\n"


# --- checkpoint ---


def test_checkpoints_are_shown_verified_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = Trained()
    trained.save(tmp_path / "run", 1, best=True)
    trained.step()
    trained.save(tmp_path / "run", 2)
    assert main(["checkpoint", "show", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["step-000002", "2"], ["step-000001", "(best)"]]
    assert main(["checkpoint", "show", "run/step-000002"]) == 0
    assert re.search(r"model: 4 tensors, 49 numbers\n(.*\n)*first\.weight +\[8, 4\] +float32", capsys.readouterr().out)
    assert main(["checkpoint", "verify", "run"]) == 0
    assert capsys.readouterr().out.startswith("step-000002: whole, step 2, 3 files\nstep-000001: whole")
    (tmp_path / "config.json").write_text("{}")
    assert main(["checkpoint", "export", "run", "out", "--config", "config.json"]) == 0
    assert capsys.readouterr().out == "out/model.safetensors: 4 tensors of step 2\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    for name, tensor in Weights.open(tmp_path / "out" / "model.safetensors").entries.items():  # by the library
        assert tensor.shape == trained.values()[name].shape
        assert torch.equal(Weights.open(tmp_path / "out").read(name), trained.values()[name])
    assert main(["checkpoint", "export", "run", "first", "--prefix", "first."]) == 0
    assert Weights.open(tmp_path / "first").names == ("bias", "weight")
    capsys.readouterr()
    data = tmp_path / "run" / "step-000002" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    assert main(["checkpoint", "verify", "run"]) == 1
    assert re.match(r"fxpipe: step-000002: .* was altered.*\nstep-000001: whole", capsys.readouterr().err)


# --- help ---


def test_names_of_a_file_tell_a_terminal_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, folder = "\x1b]0;title\x07\x9b2J", tmp_path / "step-000001"
    plan = RankPlan({"model": {name: torch.zeros(2)}}, 0)
    plan.settle([plan.message()])
    folder.mkdir()
    files = plan.finish(folder, [plan.write(folder)])
    Manifest(1, 1, "today\x1b[2J", "run", (), {}, files).write(folder)
    for path, code in ((folder, 0), (tmp_path, 0), (tmp_path / "\x1b[2J", 1)):
        assert main(["checkpoint", "show", str(path)]) == code
        printed = "".join(capsys.readouterr())
        assert not {"\x1b", "\x07", "\x9b"} & set(printed)
        assert r"\x1b[2J" in printed
    assert main(["checkpoint", "show", str(folder)]) == 0
    assert r"\x1b]0;title\x07\x9b2J" in capsys.readouterr().out


@pytest.mark.parametrize("about", [(), ("show",), ("compare",), ("topology",)], ids=str)
def test_the_examples_in_the_help_run(about: Sequence[str], called: Run) -> None:
    text = printed(called(*about, "--help"))
    assert text.startswith("usage: python -m fxpipe")
    examples = re.findall(r"^  python -m fxpipe (.*)$", text, re.MULTILINE)
    assert 2 <= len(examples) <= 5
    for line in examples:
        printed(called(*line.split("#")[0].split()))


def test_a_table_that_is_refused_is_printed_with_the_cell_in_brackets(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n")
    assert "[1F1]" in told(run("show", "mine.csv"), 1)


# --- pipes ---


def start(environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> None:
    """Closes the reading end, and expects a quiet end."""
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 0


BIG = "show", "gpipe", "--stages", "32", "-m", "64", "--full"  # far more than a pipe holds


@pytest.mark.parametrize("arguments", [BIG, ("--help",)], ids=str)
def test_a_pipe_that_closes_before_anything_is_written_is_a_quiet_end(
    arguments: Sequence[str], environment: dict[str, str], tmp_path: Path
) -> None:
    ended(start(environment, tmp_path, *arguments))


def test_a_pipe_that_closes_after_the_first_line_is_a_quiet_end(environment: dict[str, str], tmp_path: Path) -> None:
    process = start(environment, tmp_path, *BIG)
    assert process.stdout is not None
    assert len(process.stdout.readline()) > 100
    ended(process)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*BIG), cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "fxpipe: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_of_any_encoding_will_do(encoding: str, run: Run) -> None:
    printed(run("topology", "pipe=2,data=64", PYTHONIOENCODING=encoding))  # it has an ellipsis


# --- gathered stages ---


def test_a_gathered_stage_is_shown_with_what_was_chosen(called: Run) -> None:
    """1 + 8 forwards, F and B of the join, 8 backwards and the first stage's last."""
    text = printed(called("show", "1f1b", *EDGES, "-m", "8", "--gather", "4", "--full"))
    assert "1f1b (store_all): 5 stages" in text
    assert "4F0-7" in text
    assert "makespan 30 F (lower bound 30 F)" in text


def test_groups_of_given_size_and_cost_are_compared(called: Run) -> None:
    lines = lines_of(printed(called("compare", *EDGES, "-m", "16", "--gather", "4:4")))
    assert set(SCHEDULES) - {"zb_v", "v_min"} <= set(lines)
    assert lines["store_all"] == ["51", "51", "20.0%", "16", "68"]
    done = called("compare", "store_all", *EDGES, "-m", "8", "--gather", "4", "--gather-cost", "5,7")
    assert lines_of(printed(done))["store_all"][0] == "39"


# --- preview ---

MAKERS = """
import fxpipe
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Flatten(0))

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model()[:4]
    def forward(self, x):
        return self.layers(x).square().mean()

def both():
    return Loss(), (torch.zeros(16, 8, device="meta"),)

def unread():
    return open("/nowhere/at/all")

def wrong():
    return Loss(), 3

class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.see, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
    def look(self, pixels, grid):
        return torch.stack([part.mean(0) for part in self.see(pixels).split(grid.tolist())])
    def forward(self, pixels, grid):
        return self.head(self.look(pixels, grid)).square().mean()

OPTIONS = {
    "boundaries": {"look": {"whole": torch.empty(4, 8, device="meta")}, "head": "before"},
    "batch_dim": {"pixels": fxpipe.Packed("grid")}, "microbatches": 2, "zero": 3,
}

def with_options():
    with torch.device("meta"):
        model = Looks()
    return model, {"pixels": torch.zeros(24, 8), "grid": torch.full((8,), 3)}, OPTIONS

def on_an_l40s():
    return Loss(), (torch.zeros(16, 8, device="meta"),), {"hardware": "l40s"}

def no_dict():
    return Loss(), None, "auto"
"""
TWO = "--pipe", "2", "--data", "2", "--boundaries", "layers.2"


@pytest.fixture
def makers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "makers_of_models.py").write_text(MAKERS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("makers")
def test_preview_prints_and_writes_what_fxpipe_preview_tells(tmp_path: Path, called: Run) -> None:
    options = "--zero", "1", "--hardware", "h100", "--memory", "1e6", "--bf16", "--json", "told.json"
    text = printed(called("preview", "makers_of_models:both", *TWO, *options))
    import makers_of_models  # type: ignore[import-not-found]

    wanted = fxpipe.preview(
        makers_of_models.Loss(),
        Topology([("pipe", 2), ("data", 2)]),
        boundaries=["layers.2"],
        example_args=makers_of_models.both()[1],
        zero=1,
        hardware=fxpipe.Hardware.named("h100", memory=1e6),
        precision=fxpipe.Precision(),
    )
    assert text.splitlines()[-4:] == str(wanted).splitlines()[-4:]
    assert json.loads((tmp_path / "told.json").read_text()) == json.loads(json.dumps(wanted.as_dict()))


@pytest.mark.usefixtures("makers")
def test_preview_takes_options_from_the_function_and_words_go_ahead_of_them(called: Run) -> None:
    text = printed(called("preview", "makers_of_models:with_options", *TWO[:4], "--zero", "1"))
    import makers_of_models

    model, batch, options = makers_of_models.with_options()
    topology = Topology([("pipe", 2), ("data", 2)])
    assert text.rstrip() == str(fxpipe.preview(model, topology, example_kwargs=batch, **options | {"zero": 1})).rstrip()
    assert "look: opaque, and cannot run without numbers" in text


@pytest.mark.usefixtures("makers")
def test_preview_repeats_the_rows_of_the_functions_batch(called: Run) -> None:
    text = printed(called("preview", "makers_of_models:both", *TWO, "--rows", "72"))
    import makers_of_models

    topology, whole = Topology([("pipe", 2), ("data", 2)]), torch.zeros(72, 8, device="meta")
    wanted = fxpipe.preview(makers_of_models.Loss(), topology, boundaries=["layers.2"], example_args=(whole,))
    assert text.rstrip() == str(wanted).rstrip()


@pytest.mark.usefixtures("makers")
def test_preview_takes_hardware_from_a_file(tmp_path: Path, called: Run) -> None:
    figures = {"flops": 1e9, "flops_16": 1e9, "bandwidth": 1e9, "link": 1e6}
    (tmp_path / "here.json").write_text(json.dumps(figures))
    assert "a step takes" in printed(called("preview", "makers_of_models:both", *TWO, "--hardware", "here.json"))


@pytest.mark.usefixtures("makers")
@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("--memory 1e6", fxpipe.Hardware.named("l40s", memory=1e6)),
        ("--memory 1e6 --hardware l4", fxpipe.Hardware.named("l4", memory=1e6)),
        ("--hardware l4", "l4"),
        ("", "l40s"),
    ],
)
def test_a_memory_on_the_command_line_goes_ahead_of_that_of_the_hardware(words: str, made: Any, called: Run) -> None:
    text = printed(called("preview", "makers_of_models:on_an_l40s", *TWO, *words.split()))
    import makers_of_models

    topology = Topology([("pipe", 2), ("data", 2)])
    model, example, _ = makers_of_models.on_an_l40s()
    wanted = fxpipe.preview(model, topology, boundaries=["layers.2"], example_args=example, hardware=made)
    assert text.rstrip() == str(wanted).rstrip()


# --- what goes wrong is told, with an exit code, and is never a traceback ---

FOUR, WORKED_EXAMPLE = ("--stages", "4"), ("show", "1f1b", *EDGES, "-m", "8")
USAGE: dict[str, Sequence[str]] = {
    "FAMILY_OR_CSV": ("show",),
    "which stages? write --stages 4 for a chain, or --edges 0-1,1-4,2-3,3-4": ("show", "1f1b"),
    "unknown option --comm-cost": ("show", "1f1b", *FOUR, "--comm-cost", "1"),
    "invalid int value: 'four'": ("show", "1f1b", "--stages", "four"),
    "invalid costs value: '1,'": ("show", "1f1b", *FOUR, "--forward", "1,"),
    "invalid edges value: '0>1'": ("show", "1f1b", "--edges", "0>1"),
    "add --csv PATH": ("show", "1f1b", *FOUR, "--communication"),
    "--microbatches is for the families": ("show", "good.csv", "-m", "4"),
    "'pipe' has no names and sizes; write pipe=2,data=4": ("topology", "pipe"),
    "--recompute names stage 5; they are 0 to 4": (*WORKED_EXAMPLE, "--recompute", "5"),
    "--ranks 5 of 4 stages": ("show", "1f1b", *FOUR, "--ranks", "5"),
    "leave --ranks out": ("show", "1f1b", *FOUR, "--ranks", "2", "--placement", "0,0,1,1"),
    "write checkpoint export PATH OUT": ("checkpoint", "export", "run"),
    "the others take PATH alone": ("checkpoint", "verify", "run", "out"),
    "invalid choice: 'draw'": ("checkpoint", "draw", "run"),
}
PREVIEW = "preview {} --pipe 2 --data 2 --boundaries layers.2"
REFUSED: dict[str, Sequence[str]] = {
    "unknown schedule '1f1'; did you mean \"1f1b\"?": ("show", "1f1", *FOUR),
    "none.csv: No such file or directory": ("show", "none.csv"),
    "bad.csv, line 2, cell 1: '1f0' is no action": ("show", "bad.csv"),
    "binary.csv is no CSV file in UTF-8": ("show", "binary.csv"),
    "rank 1 waits at 1B0 for 1F0 on rank 1": ("show", "stuck.csv"),
    "the edges form a cycle": ("show", "1f1b", "--edges", "0-1,1-0"),
    "leaves a rank without stages": ("show", "1f1b", "--placement", "0,2"),
    "a cost is a finite number, 0 or more": ("show", "1f1b", *FOUR, "--comm", "-1"),
    "none/x.csv: No such file": ("show", "1f1b", *FOUR, "--csv", "none/x.csv"),
    'unknown axis "pip"; did you mean "pipe"?': ("topology", "pip=2"),
    "does not divide the 8 ranks": ("topology", "pipe=2,data=4", "--ranks-per-node", "3"),
    "gathered in groups of 3, which do not divide 8 micro-batches": (*WORKED_EXAMPLE, "--gather", "4:3"),
    "gather_cost= is of the stages of gather=, and there is none": (*WORKED_EXAMPLE, "--gather-cost", "1,2"),
    "nowhere has no checkpoint of fxpipe.save": ("checkpoint", "show", "nowhere"),
    **{
        fact: PREVIEW.format(what).split()
        for fact, what in {
            "there is no module 'no_such_module' in": "no_such_module:both",
            "has no function 'bot'; did you mean \"both\"?": "makers_of_models:bot",
            "; return (model, (x, y)), (model, {'x': x})": "makers_of_models:wrong",
            "or options of fxpipe.preview behind the batch": "makers_of_models:no_dict",
            "makers_of_models:unread failed: FileNotFoundError: [Errno 2]": "makers_of_models:unread",
            "hardware is 'h1000'; write one of v100": "makers_of_models:model --hardware h1000",
            "optimizer is 'adamv', which torch.optim has not": "makers_of_models:both --optimizer adamv",
            "rows is 0; it is a whole number of at least 1": "makers_of_models:both --rows 0",
            "the rows of the example cannot be repeated": "makers_of_models:with_options --rows 8",
            "repeating rows needs the shapes of a batch": "makers_of_models:model --rows 8",
        }.items()
    },
}


@pytest.mark.usefixtures("makers")
@pytest.mark.parametrize("fact", [*USAGE, *REFUSED])
def test_what_is_wrong_is_told_with_its_exit_code(fact: str, called: Run, tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text("0F0,0B0\n1F0,1B0\n")
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1f0,1B0\n")
    (tmp_path / "stuck.csv").write_text("0F0,0B0\n1B0,1F0\n")
    (tmp_path / "binary.csv").write_bytes(b"\x89PNG\r\n\x1a\n")
    if fact in USAGE:
        message, beginning = told(called(*USAGE[fact]), 2), "usage: python -m fxpipe"
    else:
        message, beginning = told(called(*REFUSED[fact]), 1), "fxpipe: "
    assert message.startswith(beginning)
    assert fact in " ".join(message.split())


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("preview --pip 2", 'unknown option --pip; did you mean "--pipe"?'),
        ("preview --foo=1", "unknown option --foo"),
        ("topology pipe=2 data=4", "unrecognized arguments: data=4"),
        ("show 1f1b -z 4", "unrecognized arguments: -z 4"),
    ],
)
def test_what_a_command_does_not_know_is_told_with_its_usage(words: str, end: str, called: Run) -> None:
    message = told(called(*words.split()), 2)
    command = f"python -m fxpipe {words.split()[0]}"
    assert message.startswith(f"usage: {command} ")
    assert message.endswith(f"{command}: error: {end}\n")
