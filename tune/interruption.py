"""Signals that ask a run to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interruptible"]


@contextmanager
def interruptible(stop: threading.Event) -> Iterator[None]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request to stop; the second interrupts.

    A batch system whose time is up terminates, a closed terminal hangs up; `nohup` has asked not to hear of that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]

    def request(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        for number in before:
            signal.signal(number, signal.default_int_handler)

    for number in before:
        signal.signal(number, request)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
