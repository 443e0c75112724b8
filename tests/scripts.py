"""Runs Python programs as ``python`` would, in new processes forked from one that has imported torch and fxpipe.

No more than what any program with fxpipe comes to import is there beforehand, so that it still fails for an import that
it lacks. What it launches is forked from it, where users' processes are spawned: each would import torch for seconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 600.0  # for a program, the start of the server included

_SERVER = """
import atexit, gc, json, multiprocessing, os, runpy, sys, threading
import tests.device, torch, torch._dynamo, torch.distributed.fsdp, fxpipe

for name in fxpipe.__all__:
    getattr(fxpipe, name)
fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda *_: fork
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(job["folder"])
for number, name in enumerate(("stdin", "stdout", "stderr")):
    os.dup2(os.open(job[name], os.O_RDWR | os.O_CREAT), number)
program, *sys.argv[1:] = job["arguments"]
if program == "-m":
    sys.path[0], program = "", sys.argv.pop(1)
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    sys.argv[0], sys.path[0] = program, os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")
threading._shutdown()  # the end of a program that succeeds, but for a second in which all of torch is taken apart
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
"""
"""Takes a job a line and answers with its exit status; the break leads on in the child."""


class Scripts:
    """The server, started when it is first needed; every wait is bounded."""

    def __init__(self, **environment: str) -> None:
        self._environment = {**os.environ, **environment}
        self._server: subprocess.Popen[str] | None = None

    def run(self, arguments: list[str], folder: Path) -> str:
        """What the program prints; AssertionError with what it writes to stderr where it fails."""
        status, printed, told = self.outcome(arguments, folder)
        assert status == 0, f"exit status {status}\n{told}"
        return printed

    def outcome(self, arguments: list[str], folder: Path) -> tuple[int, str, str]:
        """The program's exit status, what it prints, and what it writes to stderr."""
        files = {"stdin": os.devnull, "stdout": str(folder / "stdout.txt"), "stderr": str(folder / "stderr.txt")}
        status = self._done({"arguments": arguments, "folder": str(folder), **files})
        printed, told = (Path(files[name]).read_text() for name in ("stdout", "stderr"))
        for name in ("stdout", "stderr"):
            os.unlink(files[name])
        return status, printed, told

    def close(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None

    def _done(self, job: dict[str, Any]) -> int:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(job), file=self._server.stdin, flush=True)
        ended = False
        try:
            ended = bool(select.select([self._server.stdout], [], [], SECONDS)[0])
        finally:  # also where the test's own limit interrupts the wait: the server would answer the next test with this
            if not ended:
                self.close()
        assert ended, f"{job['arguments']} did not end within {SECONDS:.0f} seconds"
        return int(self._server.stdout.readline() or -1)
