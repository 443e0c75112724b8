"""torchrun, whose workers are forked from it and not started anew: each would import torch for seconds.

``scripts.outcome(["-m", "tests.torchrun", *arguments], folder)`` runs torch's own agent in a process that has imported
torch, with the same variables, restarts, signals and exit codes.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import main


class Forked(subprocess.Popen[str]):
    """A process that runs ``python -u script arguments`` without starting Python."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        self.pid = os.fork()
        if not self.pid:
            _run(args[args.index("-u") + 1 :])
        self._child_created = True


def _run(arguments: Sequence[str]) -> None:
    """To its end, as Python runs a script; nothing of the agent that it is forked from is left to it."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        sys.argv[:] = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _popen(handler: SubprocessHandler, args: Sequence[str], env: Mapping[str, str]) -> Forked:
    """The child has the variables from the start; the agent's own are put back."""
    own = dict(os.environ)
    os.environ.update(env)
    try:
        return Forked(args)
    finally:
        os.environ.clear()
        os.environ.update(own)


if __name__ == "__main__":
    SubprocessHandler._popen = _popen  # type: ignore[assignment, method-assign]
    main()
