"""SIGTERM and Ctrl-C: finish the step, save, leave. The second time: leave at once."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class Interruption:
    """While entered, remembers a signal that asks the run to end.

    The first SIGINT or SIGTERM sets `signal_number`; a second one, of either kind, ends the process
    as if it had not been caught. Outside the main thread nothing is caught.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal_number = number
