"""``python -m tests.faults [words]``: all cases, or those whose name has all the words; tells which went wrong."""

from __future__ import annotations

import sys
import time

from tests.faults.cases import cases
from tests.faults.harness import faults


def main() -> int:
    chosen = [fault for fault in cases() if all(word in str(fault) for word in sys.argv[1:])]
    wrong = 0
    for number, fault in enumerate(chosen, 1):
        begun = time.monotonic()
        found = faults(fault)
        wrong += bool(found)
        print(
            f"{number:3}/{len(chosen)} {'WRONG' if found else 'right'} {fault}, {time.monotonic() - begun:.1f} s",
            flush=True,
        )
        for line in found:
            print(f"      {line}")
    print(f"{len(chosen) - wrong} of {len(chosen)} cases are right")
    return bool(wrong)


if __name__ == "__main__":  # forked workers import this module, too
    sys.exit(main())
