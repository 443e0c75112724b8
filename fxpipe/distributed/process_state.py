"""Process state: what the system says of a process on this machine: running, stopped or gone."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A process, so that no later one is taken for it. ``machine``: what has the same numbers for its processes;
    empty where the system does not say. ``started``: in ticks since the machine started."""

    machine: str
    pid: int
    started: int


def this_process() -> ProcessId:
    """This very process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ProcessId("", os.getpid(), 0)
    found = _stat(os.getpid())
    return ProcessId(machine, os.getpid(), found[1] if found else 0)


def state_of(process: ProcessId, seen_from: ProcessId) -> str:
    """ "running", "stopped" (by SIGSTOP or its like), "ended" (and its parent has not looked yet), "gone", or "" where
    nobody can say: it is on another machine."""
    if not seen_from.machine or process.machine != seen_from.machine:
        return ""
    found = _stat(process.pid)
    if found is None or found[1] != process.started:
        return "gone"
    return {"T": "stopped", "Z": "ended", "X": "ended"}.get(found[0], "running")


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time, by proc(5); None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
