"""Each subcommand of a benchmark runs, in a short form, and prints what a formula or plain PyTorch says."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

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
    """``check``: a pattern of what the command prints, or what is given it. ``long``: runs with FXPIPE_ALL=1 alone."""

    command: str
    check: str | Callable[[str], None]
    long: bool = False


def rows(printed: str, beginning: str, count: int) -> list[list[float]]:
    """The numbers of the last ``count`` lines that begin so, behind that."""
    found = re.findall(rf"^\|? *(?:{beginning})(?=\s)(.*)$", printed, re.MULTILINE)
    assert len(found) >= count, printed
    return [[float(number) for number in re.findall(rf"(?<!\S){NUMBER}(?!\S)", line)] for line in found[-count:]]


def simulated_as_the_page_says(printed: str) -> None:
    """examples/stages.md, 16 micro-batches."""
    assert rows(printed, r"16 +trained", 3)[1][:5] == [2, 144, 86.25, 75, 75]
    assert rows(printed, r"16 +frozen", 3)[2][:5] == [4, 121, 80.5, 73, 73]


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

    attention: 5, 4 and 4 outputs of stages 0, 1 and 2 go to the other rank. Of stages 1 and 3, 2, and 3 that is read
    by 2, 1 and 1. shared: 3 hops, and keys and values, from stage 1 to stage 2. streams: 3 hops of 4 streams.
    """
    values = {"attention": 5 + 4 + 4, "shared": 3 + 1, "streams": 3 * 4}
    gradients = values | {"attention": 5 * 2 + 4 + 4}
    for name, least in values.items():
        ranks, a_rank, loss, gradient, parameter, *sent, ratio = rows(printed, name, 1)[0]
        assert (ranks, a_rank) == (2, 2)
        assert loss <= 5e-6
        assert max(gradient, parameter) <= 1e-6
        assert sent == [32 * least, 32 * least, 32 * gradients[name], 32 * least]
        assert ratio == pytest.approx((least + gradients[name]) / (2 * least), abs=0.01)


CASES = [
    Case("compatibility.py --only Llama --page page.md", r"^Llama: export as it comes \S+ \S+ s$"),
    Case("compile_cost.py actions --divided 500", grown("actions, 1f1b, 8 ranks", "actions, zb_h1, 8 ranks")),
    Case("compile_cost.py nodes --divided 100", grown("nodes, symbolic", "nodes, export", "nodes, record")),
    Case("compile_cost.py stages --divided 4", grown("stages, a rank each", "stages on 4 ranks"), long=True),
    Case("compile_cost.py --models GPT-2", phases_sum_to_the_first_step, long=True),
    Case("depth_connected.py attention shared streams --ranks 2 --stages 2", sends_what_formulas_say),
    Case("encoder_on_all_ranks.py table", simulated_as_the_page_says),
    Case("gpu.py --device cpu --small --rounds 2", r"\nGPT-2 .*without a GPU\nCLIP .*without a GPU\n", long=True),
    Case("lengths.py --processes --steps 6 Llama", r"\nLlama +[1-9]\d* .* -\n", long=True),
    Case("llama_7b.py --auto", r"\n6\.74B parameters \(12\.6 GiB\), none of them made\n", long=True),
    Case("opaque_regions.py local wav2vec2", r"(?s)\nwav2vec2 (0\.0|\S+e-0[6-9]) .*\nwav2vec2 (0\.0|\S+e-0[6-9]) "),
    Case("opaque_regions.py told SmolVLM", r"\] {'model\.get_image_features': 'whole'}\n$"),
    Case("step_profile.py sleep --rounds 2", sleeps_as_long),
    Case("step_profile.py gpt --rounds 2 --width 64", parts_sum_to_the_step),
    Case("step_profile.py collectives --rounds 1", r"all-gather \d+\.\d+, maximum \d+\.\d+, broadcast \d"),
    Case(
        "vlm.py --models ImageBind-huge --ranks 4 --encoder frozen --measure --rounds 1",
        replays_what_it_simulated,
        long=True,
    ),
    Case("zero_bubble.py sleep --rounds 1", saves_four_units, long=True),
    Case("zero_bubble.py gpt --rounds 1 --width 64", ratios_are_of_the_medians, long=True),
    Case("zero_bubble.py profile --rounds 1 --width 64", operators_sum_to_all),
]


@pytest.mark.parametrize("case", [case for case in CASES if ALL or not case.long], ids=lambda case: case.command)
def test_a_subcommand_prints_what_is_so(case: Case, tmp_path: Path, scripts: Scripts) -> None:
    script, *arguments = case.command.split()
    printed = scripts.run([str(BENCHMARKS / script), *arguments], tmp_path)
    if callable(case.check):
        case.check(printed)
    else:
        assert re.search(case.check, printed), printed


# --- are these all ---


def subcommands(script: Path) -> set[str]:
    """Words and flags that a script asks its command line for, and does something else then.

    ``"word" in arguments.parts``, ``sys.argv[1:2] == ["word"]``, ``add_parser("word")``, ``action="store_true"``, and
    the keys of a table whose names are the help of what has no dash.
    """
    tree = ast.parse(script.read_text())
    tables = {name: keys for node in tree.body for name, keys in literal_keys(node)}
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and re.search(r"argv|\bparts\b|arguments\.", ast.unparse(node)):
            asked = {ast.In: node.left, ast.Eq: node.comparators[0]}.get(type(node.ops[0]))
            found |= {one.value for one in strings(asked)} if isinstance(asked, ast.Constant | ast.List) else set()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            names = {one.value for one in strings(*node.args)}
            if node.func.attr == "add_parser" or given.get("action") == "'store_true'":
                found |= names
            elif node.func.attr == "add_argument" and not any(name.startswith("-") for name in names):
                for table in re.findall(r"join\((\w+)\)", given.get("help", "")):
                    found |= {key for key in tables.get(table, ()) if re.fullmatch("[a-z]+", key)}
    return found


def strings(*nodes: ast.AST | None) -> Iterator[ast.Constant]:
    for node in nodes:
        for one in ast.walk(node) if node else ():
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                yield one


def literal_keys(node: ast.stmt) -> Iterator[tuple[str, list[str]]]:
    """The name of a module's table, and its keys."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        yield ast.unparse(target), [one.value for key in node.value.keys for one in strings(key)]


def test_every_subcommand_is_tested() -> None:
    found = {(script.name, word) for script in BENCHMARKS.glob("*.py") for word in subcommands(script)}
    tested = {(script, word) for script, *words in (case.command.split() for case in CASES) for word in words}
    assert found - tested == set()


def test_subcommands_are_found_in_each_form(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
TABLE = {"one": 1, "Model 7B": 2}
parser.add_argument("what", help=f"{', '.join(TABLE)}")
parser.add_argument("--two", action="store_true")
parser.add_argument("--number", help=", ".join(TABLE), default=3)
commands.add_parser("three")
if "four" in arguments.parts or sys.argv[1:2] == ["five"] or "other" in text:
    pass
""")
    assert subcommands(script) == {"one", "--two", "three", "four", "five"}
