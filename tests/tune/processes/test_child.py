"""Whatever a child does, nothing of it is left, and how it ended is known."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import child_work
import pytest
import torch
from tuning_fakes import alive

from tune_model.tune.processes import child as child_module
from tune_model.tune.processes import tree
from tune_model.tune.processes.child import Child, Ending, Limits
from tune_model.tune.processes.tree import spinning_threads


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def numbers(pids: Path) -> list[int]:
    return [int(line) for line in pids.read_text(encoding="ascii").split()] if pids.exists() else []


class Subject:
    """A child and the numbers of all processes it made."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.pids = folder / "pids"
        self.child = Child(child_work.work, (self.pids,), "test", limits)

    def ask(self, what: str) -> None:
        self.child.connection.send(what)
        assert self.child.connection.recv_bytes() == b"begun"

    def ended(self) -> Ending:
        with pytest.raises((EOFError, OSError)):
            self.child.connection.recv_bytes()
        return self.child.post_mortem()


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[Subject]:
    subject = Subject(tmp_path)
    yield subject
    subject.child.kill()


def test_processes_that_hid_from_their_parents_are_ended_with_the_worker(subject: Subject):
    subject.ask("linger")
    assert subject.child.connection.recv_bytes() == b"done"
    worker, daemon = numbers(subject.pids)
    assert alive(daemon)
    subject.child.kill()
    assert not alive(worker)
    assert not alive(daemon)
    assert not alive(subject.child.process.pid or 0)
    assert not subject.child.noise.exists()


def test_processes_that_a_crashed_worker_leaves_are_ended_without_being_told(subject: Subject):
    subject.ask("linger")
    assert subject.child.connection.recv_bytes() == b"done"
    subject.ask("abort")
    ending = subject.ended()
    assert ending.how == "killed by SIGABRT"
    assert ending.words == "assertion failed??[31m"
    assert not ending.is_out_of_memory
    assert not [pid for pid in numbers(subject.pids) if alive(pid)]


def test_nothing_outlives_a_tuner_that_is_killed(tmp_path: Path):
    pids = tmp_path / "pids"
    support = str(Path(child_work.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([support, *sys.path])}
    tuner = subprocess.Popen([sys.executable, child_work.__file__, str(pids)], env=environment)
    try:
        assert wait_until(lambda: len(numbers(pids)) == 3, 60)
        assert all(alive(pid) for pid in numbers(pids))
    finally:
        tuner.kill()
        tuner.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in numbers(pids)))


def test_one_that_ignores_signals_is_ended_at_once(subject: Subject):
    subject.ask("hang")
    began = time.monotonic()
    subject.child.kill()
    assert time.monotonic() - began < 60  # of the 1000 it would take
    assert not [pid for pid in numbers(subject.pids) if alive(pid)]


def test_an_exit_code_is_told(subject: Subject):
    subject.ask("exit")
    assert subject.ended().how == "exited with 7"


def test_memory_beyond_the_limit_is_refused_to_it_and_told(tmp_path: Path):
    subject = Subject(tmp_path, Limits(memory_bytes=512 << 20))
    try:
        subject.ask("allocate")
        ending = subject.ended()
        assert ending.is_out_of_memory
        assert "MemoryError" in ending.words
    finally:
        subject.child.kill()


def test_one_that_shouts_fills_no_disk(tmp_path: Path):
    subject = Subject(tmp_path, Limits(file_bytes=1 << 20))
    try:
        subject.ask("shout")
        assert wait_until(lambda: subject.child.noise.stat().st_size > 0)
        subject.child.post_mortem()
        assert subject.child.noise.stat().st_size <= 1 << 20
    finally:
        subject.child.kill()


def test_half_a_message_does_not_block_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child_module, "_MESSAGE_S", 1.0)
    subject = Subject(tmp_path)
    try:
        subject.ask("half")
        began = time.monotonic()
        with pytest.raises(OSError, match="temporarily unavailable"):
            subject.child.connection.recv_bytes()
        assert time.monotonic() - began < 60  # it would be for ever
    finally:
        subject.child.kill()


def test_threads_that_do_not_come_to_rest_are_seen():
    """One call that takes a second or more, and never needs the interpreter meanwhile."""
    work = ("sha256", b"", b"", 4_000_000)
    thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=work)
    thread.start()
    assert thread.native_id in spinning_threads()
    thread.join()
    assert thread.native_id not in spinning_threads()


class Looks:
    """Which threads run each time that somebody looks, and a clock that its sleeps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *others: set[int]) -> None:
        self.now = 0.0
        self.others = iter(others)
        self.last: set[int] = set()
        monkeypatch.setattr(tree, "_running_threads", self.look)
        monkeypatch.setattr(tree, "time", self)

    def look(self) -> set[int]:
        self.last = next(self.others, self.last)
        return {threading.get_native_id(), *self.last}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_nobody_waits_where_no_other_thread_runs(monkeypatch: pytest.MonkeyPatch):
    looks = Looks(monkeypatch, set())
    assert spinning_threads() == []
    assert looks.now == 0


def test_a_thread_that_was_seen_at_rest_once_is_not_spinning(monkeypatch: pytest.MonkeyPatch):
    """Two take turns; a third one goes on."""
    looks = Looks(monkeypatch, {1, 2, 3}, {1, 3}, {2, 3})
    assert spinning_threads() == [3]
    assert looks.now == pytest.approx(tree._SPIN_S, abs=0.01)
    looks = Looks(monkeypatch, {1, 2}, {1}, {2})
    assert spinning_threads() == []
    assert looks.now == pytest.approx(0.004)


def test_openmps_threads_come_to_rest():
    torch.randn(2048, 2048) @ torch.randn(2048, 2048)
    assert wait_until(lambda: spinning_threads() == [])
