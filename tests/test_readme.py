"""README says what happens: its code runs as it stands, and its table is what that code prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_code_of_the_readme_runs_and_prints_its_table(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    table = re.search(r"```\n(rank.*?)```", README, re.DOTALL)
    assert table is not None
    assert result.stdout.startswith(table[1])


def test_the_files_of_the_tour_exist() -> None:
    tour = README[README.index("## A tour of the files") :]
    names = re.findall(r"`([\w/]+\.py|[\w/]+/)`", tour)
    found = [(ROOT / name).exists() or (ROOT / "fxpipe" / name).exists() for name in names]
    assert names
    assert all(found), [name for name, there in zip(names, found, strict=True) if not there]
