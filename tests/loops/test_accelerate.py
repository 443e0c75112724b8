"""Accelerate's part of a loop under torchrun on CPUs, as its page shows it: one process prints and writes."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.test_processes import free_port
from tests.scripts import Scripts
from tests.whole.test_readme import ROOT, blocks

SEEN = """
seen = [accelerator.num_processes, topo.data_size, accelerator.is_main_process, len(accelerator.trackers)]
open(f"seen-{accelerator.process_index}", "w").write(" ".join(map(str, [*seen, f"{loss:.4f}"])))
"""
"""In a file of each process: lines that four processes print at once may be mixed."""


def test_the_page_runs_under_torchrun(tmp_path: Path, scripts: Scripts) -> None:
    block = next(each for each in blocks(ROOT / "examples" / "other_loops.md", "python") if "Accelerator" in each)
    (tmp_path / "page.py").write_text(block.replace("accelerator.end_training()", SEEN))
    torchrun = ["-m", "tests.torchrun", "--nproc-per-node", "4", "--master-port", str(free_port())]
    printed = scripts.run([*torchrun, "page.py"], tmp_path).splitlines()
    assert sum(line.startswith("loss ") for line in printed) == 1
    seen = [path.read_text().rpartition(" ") for path in tmp_path.glob("seen-*")]
    assert sorted(first for first, _, _ in seen) == ["4 2 False 0", "4 2 False 0", "4 2 False 0", "4 2 True 1"]
    assert len({loss for _, _, loss in seen}) == 1
