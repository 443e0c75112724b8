"""Bell: what waits for a signal while the main thread waits inside of torch, where Python handles none."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading


class Bell:
    """Rings for each signal that has a handler in Python. Of a process whose main thread has made it."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._never = seconds, threading.Event()
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._before = -1
        if threading.current_thread() is threading.main_thread():
            ours, theirs = self._ends = socket.socketpair()
            ours.settimeout(seconds)
            theirs.setblocking(False)
            self._before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def hears_ctrl_c(self) -> bool:
        """Waits for some seconds, or for a signal: whether it was one that ends what the main thread does."""
        if self._ends is None:
            self._never.wait(self._seconds)
            return False
        try:
            rung = self._ends[0].recv(64)
        except TimeoutError:
            return False
        except OSError:  # closed as this process ends
            self._never.wait(self._seconds)
            return False
        if rung and self._before >= 0:
            with contextlib.suppress(OSError):
                os.write(self._before, rung)
        return signal.SIGINT in rung and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def close(self) -> None:
        """Signals go where they went before."""
        if self._ends is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.set_wakeup_fd(-1) == self._ends[1].fileno():
            signal.set_wakeup_fd(self._before)
        for end in self._ends:
            end.close()
