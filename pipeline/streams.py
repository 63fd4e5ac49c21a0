"""Standard output and error of the command: readers that leave early, and code of others that prints.

What a command prints is for whoever reads it; what it does (tune, write, judge) goes on without one.
"""

import contextlib
import errno
import io
import os
import sys
from typing import Any, TextIO

__all__ = ["outlive_readers", "prints_of_others"]


class _Stream(io.FileIO):
    """A file that goes nowhere from when its reader (head, a pager, a closed terminal) is gone or its disk full."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_terminal = os.isatty(descriptor)

    def write(self, data: Any, /) -> int:
        """Write, or pretend to when nobody reads it.

        Raises:
            OSError: The system refused, once; what is still buffered is lost without another error when Python ends.
        """
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if not (isinstance(error, BrokenPipeError) or (self._is_terminal and error.errno == errno.EIO)):
                raise OSError(error.errno, error.strerror, "standard output or error") from error
            return len(memoryview(data).cast("B"))


def outlive_readers() -> None:
    """Let this process's standard output and error be closed by their readers without an error."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # closed, or a test's
    if not isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
        return stream
    stream.flush()
    raw = _Stream(stream.fileno())
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def prints_of_others() -> contextlib.AbstractContextManager[TextIO]:
    """Return a context for code that may print, a model's for instance: it prints to standard error.

    Standard output is the command's own: a table, or JSON that a program reads.
    """
    return contextlib.redirect_stdout(sys.stderr)
