"""Families, a device and a plan for testing the tuner without compilers or hardware. Importable by spawned children."""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tune_model.extract.task import NumericRules, Plan, PlannedTask, Site, Task, task_key
from tune_model.runtime.kernel import CpuLaunch, Kernel
from tune_model.runtime.program import (
    Apply,
    Call,
    Form,
    Input,
    Output,
    Parameter,
    Program,
    Ref,
    TensorType,
    Weight,
    bind_form,
    fingerprint,
)
from tune_model.tune.candidate import ALL_KINDS, Built, Candidate, Config, Effort, Rejected
from tune_model.tune.device import Bench, Device, Passed, Samples
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.target import CpuTarget, Target


class FakeClock:
    """Seconds that pass when a test says so, and on no machine otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


TARGET = CpuTarget("x86_64", ("avx2",), "Test CPU", 1, 1 << 20, 1 << 25, "g++ 12.2", "2.13")


class FakeFamily:
    """Every configuration is the same launch with other `code`; a `RecordedDevice` does not run it."""

    version = 1
    kinds = ALL_KINDS

    def __init__(self, name: str, configs: tuple[Config, ...], layout: str = "") -> None:
        self.name = name
        self.configs = configs
        self.layout = layout

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        return None

    def start(self, task: Task, target: Target) -> Config:
        return self.configs[0]

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        yield from self.configs

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        layouts = (("a1", self.layout),) if self.layout else ()
        code = repr((self.name, config)).encode()
        name = hashlib.sha256(code).hexdigest()
        step = CpuLaunch(name, "run", ("a0", "a1", "t0"))
        return Built(Kernel((step,), layouts=layouts), {name: code})


class Wide(FakeFamily):
    """A family that races a corner of its space only, its last two configurations."""

    def start(self, task: Task, target: Target) -> Config:
        return self.configs[-1]

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        yield from self.configs if effort is Effort.THOROUGH else self.configs[:-3:-1]


class Moody(FakeFamily):
    """A family whose builds misbehave as their configuration says."""

    def __init__(self, *moods: str) -> None:
        super().__init__("moody", tuple((("mood", mood),) for mood in moods))

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        match dict(config)["mood"]:
            case "crash":
                os.write(2, b"assertion failed: register allocator\n")
                os.abort()
            case "hang":
                time.sleep(1000)
            case "raise":
                msg = "no such instruction\nand a long dump"
                raise RuntimeError(msg)
            case "refuse":
                return Rejected("shared memory", "needs 245760 bytes, limit 232448")
        return super().build(task, config, target)


class Held(FakeFamily):
    """Builds nothing before the file `go` is in its folder, and writes down there what it builds."""

    def __init__(self, name: str, configs: tuple[Config, ...], folder: Path) -> None:
        super().__init__(name, configs)
        self.folder = folder

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        with (self.folder / "built").open("a") as file:
            file.write(f"{dict(config)['n']}")
        return super().build(task, config, target)


class Refusing(FakeFamily):
    """Accepts nothing."""

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        return Rejected("unsupported", "only float8")


class RecordedDevice:
    """Replays times from a table as if it were a device: candidate label prefix -> microseconds.

    Attributes:
        asked: Every message, in order.
    """

    def __init__(self, times: dict[str, float], wrong: tuple[str, ...] = (), fail_open: bool = False) -> None:
        self.times = times
        self.wrong = wrong
        self.fail_open = fail_open
        self.asked: list[tuple[str, str]] = []
        self.is_open = False

    def _us(self, candidate: Candidate) -> float:
        return self.times[candidate.family] + sum(float(v) for _, v in candidate.config if isinstance(v, int | float))

    def open(self, bench: Bench) -> Passed | Rejected:
        self.asked.append(("open", task_key(bench.task)))
        if self.fail_open:
            return Rejected("out of memory", "tried to allocate 1 TB")
        self.is_open = True
        return Passed(0.001)

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        assert self.is_open
        self.asked.append(("check", candidate.family))
        return Rejected("wrong", "error 0.5") if candidate.family in self.wrong else Passed(0.001)

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        assert self.is_open
        self.asked.append(("time", candidate.family))
        return Samples((self._us(candidate),) * rung.samples)

    def compare(self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung) -> tuple[Samples | Rejected, ...]:
        assert self.is_open
        self.asked.append(("compare", " ".join(c.family for c, _ in candidates)))
        wobble = [1.0 + 0.001 * (i % 5) for i in range(rung.samples)]
        return tuple(Samples(tuple(self._us(c) * w for w in wobble)) for c, _ in candidates)

    def finish(self) -> None:
        self.is_open = False

    def close(self) -> None:
        self.asked.append(("close", ""))


class Hostile:
    """A device that dies or hangs when a candidate's name says so; a shy one fails only in company."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner

    def open(self, bench: Bench) -> Passed | Rejected:
        return self.inner.open(bench)

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        if candidate.family == "aborts":
            os.write(2, b"Assertion `false' failed.\n")
            os.abort()
        if candidate.family == "hangs":
            time.sleep(1000)
        return self.inner.check(candidate, built)

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        if candidate.family == "late":
            os.abort()
        return self.inner.time(candidate, built, rung)

    def compare(
        self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung
    ) -> tuple[Samples | Rejected, ...] | Rejected:
        if any(c.family == "late" for c, _ in candidates):
            os.abort()
        if any(c.family == "shy" for c, _ in candidates):
            return Rejected("stray write", "wrote around its results")
        return self.inner.compare(candidates, rung)

    def finish(self) -> None:
        self.inner.finish()

    def close(self) -> None:
        self.inner.close()


def open_hostile(_target: Target, _index: int) -> Device:
    """Open a hostile recorded device (in the child)."""
    return Hostile(RecordedDevice({"aten": 10.0, "good": 5.0, "aborts": 1.0, "hangs": 1.0, "late": 1.0, "shy": 1.0}))


def linear_form() -> Form:
    """A linear layer over (d0, 16) with 32 rows of weights."""
    return Form(
        "matmul",
        ("d0",),
        (
            Parameter("a0", TensorType("float32", ("d0", 16))),
            Parameter("a1", TensorType("float32", (32, 16)), "weight"),
        ),
        (Call("aten.linear.default", (Ref("a0"), Ref("a1")), results=("t0",)),),
        (Parameter("t0", TensorType("float32", ("d0", 32))),),
    )


def linear_plan(*sizes: int, form: Form | None = None) -> Plan:
    """A one-layer program with a task for each batch size."""
    form = linear_form() if form is None else form
    key = fingerprint(form)
    program = Program(
        "forward",
        (),
        (Input("x", form.parameters[0].type),),
        (Weight("w", form.parameters[1].type, ("layer.weight",)),),
        (),
        {key: form},
        (Apply(key, ("x", "w"), ("y",), ("batch",)),),
        {"y": form.results[0].type},
        (Output("y", "y"),),
    )
    tasks = []
    for size in sizes:
        task = Task(bind_form(form, (size,)), NumericRules())
        site = Site("forward", (("batch", size),), key, (size,), 1)
        tasks.append(PlannedTask(task_key(task), f"matmul {size}x16x32", task, (site,), 1.0, size * 1024, 4096))
    return Plan((program,), tuple(tasks), (), ())


def without_times(value: msgspec.Struct) -> bytes:
    """Encode a `Tuning` without the counts and seconds of the run itself."""
    return msgspec.json.encode(msgspec.structs.replace(value, builds=0, measured=0, seconds=0.0, repeated=0))


def alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
