"""The server that workers are forked from, as a fork of the tests' process behind its collection.

Python's own starts as a new process, which imports torch and transformers in seconds; and of the tests' modules it has
none, so that each worker imports them. It is started as ever where ``can`` says no, or where this one has ended.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Iterable
from multiprocessing import connection, forkserver

import torch


def can() -> bool:
    """Whether a fork has all that this process has: on Linux, no thread of Python's beside this one, nothing that
    traces lines, as coverage and debuggers do, and no accelerator. From Python 3.14 on, the server is told a key."""
    alone = threading.active_count() == 1 and sys.gettrace() is None
    return sys.platform == "linux" and sys.version_info < (3, 14) and alone and not torch.accelerator.is_available()


def start(preload: Iterable[str]) -> None:
    """Before any test has run, for then there are threads, of which a fork has none. ``preload``: imported first."""
    for name in preload:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")
    listener.bind(address)
    listener.listen()
    alive, alive_here = os.pipe()
    number = os.fork()
    if not number:
        try:
            os.close(alive_here)
            _serve(listener.detach(), alive)
        except Exception:
            sys.__excepthook__(*sys.exc_info())
        finally:
            os._exit(0)  # never back into pytest
    os.close(alive)
    listener.close()
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_here, number


def _serve(listener: int, alive: int) -> None:
    """Until the tests' process has ended. What workers raise in threads is not for pytest, which is theirs no more."""
    threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
    torch.manual_seed(0)
    forkserver.main(listener, alive, [])
