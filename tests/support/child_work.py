"""What children do in the tests of child processes: in a module of its own, so that spawned ones can import it."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path


def linger(pids: Path) -> None:
    """Start a process in a session of its own whose parent is gone, as daemons do; write down its number."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    with pids.open("a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
    os._exit(0)


def work(connection: Connection, pids: Path) -> None:
    """Do what the messages say."""
    with pids.open("a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        what = connection.recv()
        connection.send_bytes(b"begun")
        match what:
            case "linger":
                linger(pids)
                while len(pids.read_text(encoding="ascii").split()) < 2:
                    time.sleep(0.01)
            case "abort":
                os.write(2, b"assertion failed\x00\x1b[31m\n")
                os.abort()
            case "exit":
                sys.exit(7)
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1000)
            case "allocate":
                hoard = []
                while True:
                    hoard.append(bytearray(64 << 20))
            case "shout":
                for _ in range(200):
                    sys.stdout.write("x" * (1 << 20))
                sys.stdout.flush()
            case "half":
                os.write(connection.fileno(), b"\x00\x00\x10\x00only the start")
        connection.send_bytes(b"done")


def start_and_wait(pids: Path) -> None:
    """Be a tuner: have a child that has started another process, tell, and wait to be killed."""
    from tune_model.tune.processes.child import Child

    child = Child(work, (pids,), "test")
    child.connection.send("linger")
    child.connection.recv_bytes()
    child.connection.recv_bytes()
    with pids.open("a", encoding="ascii") as file:
        file.write(f"{child.process.pid}\n")
    time.sleep(1000)


if __name__ == "__main__":
    start_and_wait(Path(sys.argv[1]))
