"""Subcommands of the benchmarks run, in a short form, and print what a formula or plain PyTorch says."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.scripts import Scripts
from tests.thinned import ALL

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?"


def replays_what_it_simulated(printed: str) -> None:
    """The ratios of the table are those of its times, and what is replayed has the same."""
    rows = [line.split("|") for line in printed.splitlines() if "| ImageBind-huge" in line]
    a, b, _, d = (float(cell.replace(",", "")) for cell in rows[0][4:8])
    for place, time in ((7, a), (8, b)):
        assert abs(float(rows[1][place]) - time / d) < 0.02


class Case(NamedTuple):
    """``check``: a pattern of what the command prints, or what is given it. ``long``: runs with FXPIPE_ALL=1 alone.
    ``simulated``: on simulated GPUs."""

    command: str
    check: str | Callable[[str], None]
    long: bool = False
    simulated: bool = False


def rows(printed: str, beginning: str, count: int) -> list[list[float]]:
    """The numbers of the last ``count`` lines that begin so, behind that."""
    found = re.findall(rf"^\|? *(?:{beginning})(?=\s)(.*)$", printed, re.MULTILINE)
    assert len(found) >= count, printed
    return [[float(number) for number in re.findall(rf"(?<!\S){NUMBER}(?!\S)", line)] for line in found[-count:]]


def simulated_as_the_page_says(printed: str) -> None:
    """examples/stages_on_ranks.md, 16 micro-batches."""
    assert rows(printed, r"16 +trained", 3)[1][:5] == [2, 144, 86.25, 75, 75]
    assert rows(printed, r"16 +frozen", 3)[2][:5] == [4, 121, 80.5, 73, 73]


def gains_by_order_and_room(printed: str) -> None:
    """examples/schedules_uneven.md: for each of four kinds of batches the makespan, and its gain over 1F1B."""
    for way, gains in (
        ("as samples come", (1, 1, 1, 1)),
        ("in order", (1.07, 1.16, 1.22, 1.30)),
        ("2x in flight", (1.14, 1.19, 1.27, 1.30)),
        ("in order, 2x in flight", (1.20, 1.29, 1.40, 1.52)),
        ("lower bound", (1.24, 1.34, 1.49, 1.74)),
    ):
        (figures,) = re.findall(rf"^{way}  +(.*)$", printed, re.MULTILINE)
        assert tuple(map(float, re.findall(r"×(\S+)", figures))) == gains


def sleeps_as_long(printed: str) -> None:
    """8 micro-batches of 20 ms forward and 40 ms backward."""
    for compute, *_ in rows(printed, "[0-4]", 5):
        assert 480 <= compute < 2 * 480


def parts_sum_to_the_step(printed: str) -> None:
    table, _, _ = printed.partition("medians over the rounds")
    for step, *parts in rows(table, "[01]", 2):
        assert step == pytest.approx(sum(parts[:5]), abs=0.05)


def operators_sum_to_all(printed: str) -> None:
    whole = rows(printed, "in all", 1)[0]
    kinds = ("attention", "copies, sums", "other operators", "outside of operators", "products")
    parts = [rows(printed, kind, 1)[0] for kind in kinds]
    for column, total in enumerate(whole):
        assert sum(part[column] for part in parts) == pytest.approx(total, abs=0.5)


def saves_four_units(printed: str) -> None:
    """1F1B takes 30 units of 60 ms, ZB-H1 26; simulated at costs that a machine stretches."""
    for name, units in (("1f1b", 30), ("zb_h1", 26)):
        simulated, median, *_ = rows(printed, name, 1)[0]
        assert 60 * units <= simulated < 1.5 * 60 * units
        assert median > 60 * units


def ratios_are_of_the_medians(printed: str) -> None:
    for plain, halves in zip(rows(printed, "1f1b", 3), rows(printed, "zb_h1", 3), strict=True):
        assert plain[-1] == 1
        assert halves[-1] == pytest.approx(halves[1] / plain[1], rel=0.01)


def grown(*names: str) -> Callable[[str], None]:
    """A row of seconds for each, with as many figures as sizes, that takes more where the size is 16 times as large."""

    def check(printed: str) -> None:
        for name in names:
            found = re.search(rf"^{re.escape(name)} +all +((?:\d+, )+\d+)  +((?:{NUMBER}, )+{NUMBER}) ", printed, re.M)
            assert found, (name, printed)
            sizes, seconds = ([float(one) for one in group.split(", ")] for group in found.groups())
            assert len(sizes) == len(seconds) == 4
            assert seconds[-1] >= seconds[0] >= 0

    return check


def phases_sum_to_the_first_step(printed: str) -> None:
    phases = re.findall(rf"^\S.*? {{2,}}{NUMBER}$", printed, re.MULTILINE)
    figures = {name.strip(): float(number) for name, number in (line.rsplit(maxsplit=1) for line in phases)}
    total, _ = figures.pop("to the first step"), figures.pop("MiB")
    assert total == pytest.approx(sum(figures.values()), abs=0.3)


def sends_what_formulas_say(printed: str) -> None:
    """16 blocks as 4 stages on ranks 0, 1, 0, 1. In units of a block's output for 8 micro-batches, 32 KiB.

    5, 4 and 4 outputs of stages 0, 1 and 2 go to the other rank, and of stage 0 two gradients each come back.
    """
    least, gradients = 5 + 4 + 4, 5 * 2 + 4 + 4
    ranks, a_rank, loss, gradient, parameter, *sent, ratio = rows(printed, "attention", 1)[0]
    assert (ranks, a_rank) == (2, 2)
    assert loss <= 5e-6
    assert max(gradient, parameter) <= 1e-6
    assert sent == [32 * least, 32 * least, 32 * gradients, 32 * least]
    assert ratio == pytest.approx((least + gradients) / (2 * least), abs=0.01)


def takes_what_its_plan_says(printed: str) -> None:
    """To the digits that are printed, and to 9 beyond those."""
    found = rows(printed, r"\S+, m 16.*?\)(?: 1 frozen)?", 40)
    assert all(planned == virtual and abs(more) < 1e-9 for _, planned, virtual, more in found)


def launches_as_often_as_torch(printed: str) -> None:
    """A step takes two launches an action more than torch's at most; so much more is on streams, but for events."""
    for *_, more in rows(printed, "1f1b|interleaved_1f1b|zb_h1", 6 + 24)[:6]:
        assert more <= 2
    puts = re.findall(r"^(\w+) +(\d) +(fxpipe|torch) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\S+)$", printed, re.MULTILINE)
    assert len(puts) == 24
    assert max(float(each[-1]) for each in puts if each[2] == "fxpipe") < 33
    for ours, theirs in zip(puts[::2], puts[1::2], strict=True):
        actions = 16 * (3 if ours[0] == "zb_h1" else 4 if ours[0] == "interleaved_1f1b" else 2)
        kernels, copies, _, messages, waits = (int(a) - int(b) for a, b in zip(ours[3:-1], theirs[3:-1], strict=True))
        assert kernels + copies + messages + waits <= 2 * actions


def ends_alike_and_does_not_grow(printed: str) -> None:
    """Of 300 steps, killed twice; files and threads are counted, and memory may grow by a heap's pieces."""
    undisturbed, killed = re.findall(r"^(?:undisturbed|killed): (\w+)$", printed, re.MULTILINE)
    assert undisturbed == killed
    assert len(re.findall("^killed  ", printed, re.MULTILINE)) == 3
    _, _, memory, _, files, _, threads = rows(printed, "undisturbed +0 to", 1)[0]
    assert memory < 20
    assert (files, threads) <= (0, 0)


CASES = [
    Case("compatibility.py --only ViT --page page.md", r"^ViT: export as it comes \S+ \S+ s$"),
    Case("choose.py llama_7b --ranks 8 --preview", r"\n +1 +8 +8 x 1 +1 node +3\.97 s (?s:.*), the same figures\n"),
    Case("compile_cost.py actions --divided 500", grown("actions, 1f1b, 8 ranks", "actions, zb_h1, 8 ranks")),
    Case("compile_cost.py nodes --divided 100", grown("nodes, symbolic", "nodes, export", "nodes, record")),
    Case("compile_cost.py stages --divided 4", grown("stages, a rank each", "stages on 4 ranks"), long=True),
    Case("compile_cost.py --models GPT-2", phases_sum_to_the_first_step),
    Case("balance.py --layers 16 --rounds 1", r"\nauto, 16 layers, s +\d", long=True),
    Case("compile_llama.py 2x16 --rounds 1", r"\n2x16: peak ÷ parameters +\d", long=True),
    Case("depth_connected.py attention --ranks 2 --stages 2", sends_what_formulas_say),
    Case("encoder_on_all_ranks.py table", simulated_as_the_page_says),
    Case("uneven_microbatches.py", gains_by_order_and_room),
    Case("groups.py --measure", r'"calls of new_group": 9, "connections of rank 0": 2205, .*x data 2": 8}\n$'),
    Case("gpu.py --device cpu --small --rounds 2", r"\nGPT-2 .*without a GPU .*\nCLIP .*without a GPU .*\n"),
    Case("lengths.py --processes --steps 6 Llama", r"\nLlama +[1-9]\d* .* -\n", long=True),
    Case("kinds_of_batch.py --only GPT-2", r"\n\| GPT-2 +\| export +\| as it comes \| 20 +\| 0 +\|", long=True),
    Case("llama_7b.py --auto", r"\n6\.74B parameters \(12\.6 GiB\), none of them made\n"),
    Case("opaque_regions.py local wav2vec2", r"(?s)\nwav2vec2 (0\.0|\S+e-0[6-9]) .*\nwav2vec2 (0\.0|\S+e-0[6-9]) "),
    Case("opaque_regions.py told SmolVLM", r"\] {'model\.get_image_features': 'whole'}\n$"),
    Case("scale.py schedule --stages 16", r"\nactions +2048\n"),
    Case("scale.py preview --ranks 256 --layers 16", r"\nseconds +\d+\.\d+\n", long=True),
    Case("scale.py heartbeat", r"\n16384 ranks: part of a core +0\.[01]\d*\n", long=True),
    Case("soak.py --steps 300 --kills 2", ends_alike_and_does_not_grow),
    Case("step_profile.py sleep --rounds 2", sleeps_as_long),
    Case("step_profile.py gpt --rounds 2 --width 64", parts_sum_to_the_step),
    Case("step_profile.py collectives --rounds 1", r"all-gather \d+\.\d+, maximum \d+\.\d+, broadcast \d"),
    Case("virtual_time.py plan", takes_what_its_plan_says, simulated=True),
    Case("virtual_time.py host", launches_as_often_as_torch, simulated=True),
    Case(
        "vlm.py --models ImageBind-huge --ranks 4 --encoder frozen --measure --rounds 1",
        replays_what_it_simulated,
        long=True,
    ),
    Case("zero_bubble.py sleep --rounds 1", saves_four_units, long=True),
    Case("zero_bubble.py gpt --rounds 1 --width 64", ratios_are_of_the_medians),
    Case("zero_bubble.py profile --rounds 1 --width 64", operators_sum_to_all),
]


@pytest.mark.parametrize("case", [case for case in CASES if ALL or not case.long], ids=lambda case: case.command)
def test_a_subcommand_prints_what_is_so(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    script, *arguments = case.command.split()
    scripts: Scripts = request.getfixturevalue("gpu_scripts" if case.simulated else "scripts")
    printed = scripts.run([str(BENCHMARKS / script), *arguments], tmp_path)
    if callable(case.check):
        case.check(printed)
    else:
        assert re.search(case.check, printed), printed


# --- the models and layouts of vlm.py ---


@pytest.fixture
def vlm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("vlm")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("LLaVA-1.5-7B", 7.05),  # 7.06 with the 24th layer of its encoder, which does not run
        ("Qwen2.5-VL-7B", 8.29),
        ("PaliGemma-3B", 2.92),
        ("SmolVLM-2B", 2.25),
        ("Whisper-large-v3", 1.54),
        ("CLIP ViT-L/14", 0.43),
    ],
)
def test_models_have_as_many_parameters_as_their_papers_say(vlm: Any, name: str, billions: float) -> None:
    with torch.device("meta"):
        model = vlm.MODELS[name].build().model
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.011)


def test_no_layout_by_hand_is_better_and_costs_are_those_of_the_shapes(
    vlm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = vlm.VLMS["PaliGemma-3B"].vision.__class__
    vision, language = tower(2, 512, 2048, 8), tower(4, 512, 2048, 8, gated=True, causal=True)
    small = vlm.VLMS["PaliGemma-3B"].__class__(vision, 448, language, 1000)
    monkeypatch.setitem(vlm.MODELS, "small", small)
    monkeypatch.setitem(vlm.VLMS, "small", small)
    model = vlm.costed("small", True, 4)
    patches, tokens, width = 32**2, 32**2 + 512, 512
    products = patches * (3 * 14**2 * width + 2 * (4 * width**2 + 2 * width * 2048) + width * width)
    products += tokens * (4 * (4 * width**2 + 3 * width * 2048) + width * 1000)
    products += 2 * width * (2 * patches**2 + 4 * tokens**2)  # attention's two, without a mask
    assert sum(cost.flops for cost in model.costs.nodes.values()) == 2 * products

    found = vlm.outcomes(model, 4)
    row = vlm.Row("small", True, 4, found, {})
    assert row.over_d("a") > 1
    assert min(map(row.over_d, "bc")) > 0.999  # times that agree to four digits count as equal
    work = sum(model.unit_seconds)
    for outcome in found.values():
        assert outcome.makespan >= vlm.MICROBATCHES * work / 4
        replay = vlm.Replay.of(model, outcome, 2.0)
        assert all(replay.trained)
        assert sum(map(sum, replay.seconds)) == pytest.approx(2 * sum(outcome.costs.forward + outcome.costs.backward))
    assert f"{row.over_d('a'):.2f}" in vlm.means([row])
