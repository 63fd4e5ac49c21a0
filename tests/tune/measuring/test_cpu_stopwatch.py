import time
from collections.abc import Callable

from tune_model.tune.measuring.contention import Contention
from tune_model.tune.measuring.cpu_stopwatch import CpuStopwatch
from tune_model.tune.measuring.policy import Rung

RUNG = Rung(50.0, 10, least=6)


class Crowded(Contention):
    """Other processes take the core during the samples that `is_busy` says (from 0)."""

    def __init__(self, is_busy: Callable[[int], bool]) -> None:
        self.is_busy = is_busy
        self.reads = 0
        self.waited = 0.0

    def waited_us(self) -> float:
        sample, is_end = divmod(self.reads, 2)
        self.reads += 1
        if is_end and self.is_busy(sample):
            self.waited += 1e6
        return self.waited


def compare(is_busy: Callable[[int], bool], rung: Rung = RUNG):  # type: ignore[no-untyped-def]
    crowded = Crowded(is_busy)
    watch = CpuStopwatch(crowded)
    calls = [watch.prepare(lambda _number: None, 1) for _ in range(2)]
    return watch.compare(calls, rung, 3), crowded.reads // 2


def test_an_idle_machine_gives_what_was_asked_for():
    samples, taken = compare(lambda _sample: False)
    assert [(len(s.us), s.disturbed, s.doubtful) for s in samples] == [(10, False, False)] * 2
    assert taken == 20


def test_rounds_that_anyone_lost_are_left_out_for_all_and_taken_again():
    samples, taken = compare(lambda sample: sample % 8 == 3)
    assert [(len(s.us), s.doubtful) for s in samples] == [(10, False)] * 2
    assert taken > 20


def test_a_machine_that_stays_busy_gives_doubtful_times_after_a_bounded_number_of_rounds():
    samples, taken = compare(lambda sample: sample >= 10)
    assert [(len(s.us), s.disturbed, s.doubtful) for s in samples] == [(20, True, True)] * 2
    assert taken == 40


def test_few_undisturbed_rounds_do_when_no_more_can_be_had():
    samples, _ = compare(lambda sample: sample >= 14)
    assert [(len(s.us), s.disturbed, s.doubtful) for s in samples] == [(7, False, False)] * 2


def test_long_calls_are_sampled_less():
    watch = CpuStopwatch(Crowded(lambda _sample: False))
    calls: list[int] = []

    def slow(number: int) -> None:
        calls.append(number)
        time.sleep(0.006)

    found = watch.time(watch.prepare(slow, 4), Rung(500.0, 20, least=3, most_us=10_000.0))
    assert len(found.us) == 3
    assert len(calls) == 2 + 3  # once to warm up, once to estimate
    assert min(found.us) >= 6000.0


def test_copies_take_turns():
    watch = CpuStopwatch(Crowded(lambda _sample: False))
    seen: list[int] = []
    watch.time(watch.prepare(seen.append, 3), Rung(20.0, 4))
    assert set(seen) == {0, 1, 2}
