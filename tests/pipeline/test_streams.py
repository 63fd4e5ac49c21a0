"""What a command prints when nobody is there any more to read it."""

import errno
import io
import os
import pty

import pytest

from tune_model.pipeline.streams import _outliving


def test_a_closed_terminal_is_no_error():
    """A tune whose terminal was closed ended with exit code 2 and no artifact."""
    master, slave = pty.openpty()
    original = io.TextIOWrapper(io.FileIO(slave, "w"))
    stream = _outliving(original)
    stream.write("read\n")
    stream.flush()
    assert os.read(master, 100) == b"read\r\n"
    os.close(master)
    for _ in range(2):
        stream.write("unread\n")
        stream.flush()
    stream.close()


def test_a_full_disk_is_an_error_once():
    original = io.TextIOWrapper(io.FileIO("/dev/full", "w"))
    stream = _outliving(original)
    stream.write("lost\n")
    with pytest.raises(OSError, match="standard output or error") as caught:
        stream.flush()
    assert caught.value.errno == errno.ENOSPC
    stream.flush()
