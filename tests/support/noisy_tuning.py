"""The two_layers model tuned with times drawn as a device gives them: noise, drift, and a planted slowdown."""

from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
import two_layers
from devices import cuda_target

from tune_model.extract.task import NumericRules, Plan, PlannedTask, Site, Task, task_key
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import bind_form, fingerprint
from tune_model.tune.candidate import Candidate
from tune_model.tune.choice import Choice, Measurement, Tuning
from tune_model.tune.measuring.interval import paired_ratio, percentile
from tune_model.tune.target import Target

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
ROUNDS = 31
EXTERN = Candidate("aten")
LOOPS = Candidate("cpp_small", (("unroll", 8),))


class Weather(msgspec.Struct, frozen=True):
    """What a machine does to the times of one run.

    Attributes:
        seed: Of everything random.
        noise: Of a single sample, relative.
        drift: The whole machine is so much slower than usual.
        wander: From task to task the machine's speed varies so much.
        slower: Factor on the winners' times, by number of rows; a planted regression.
    """

    seed: int = 0
    noise: float = 0.01
    drift: float = 1.0
    wander: float = 0.02
    slower: dict[int, float] = {}


def noisy_tuning(weather: Weather, *, rows: tuple[int, ...] = ROWS, target: Target | None = None) -> Tuning:
    """Draw a final of every task: every third task keeps the plain operators, the others win by a factor of 1.5."""
    random = Random(weather.seed)  # noqa: S311 (repeatable noise)
    form = fingerprint(two_layers.FORM)
    planned: list[PlannedTask] = []
    choices: list[Choice] = []
    for number, count in enumerate(rows):
        task = Task(bind_form(two_layers.FORM, (count,)), NumericRules())
        site = Site("forward", (("batch", count),), form, (count,), 2)
        label = f"matmul {count}x8x8 f32 + relu"
        planned.append(PlannedTask(task_key(task), label, task, (site,), 2.0, 128 * count, 640))
        speed = weather.drift * random.lognormvariate(0.0, weather.wander)
        rounds = [speed * random.lognormvariate(0.0, weather.noise) for _ in range(ROUNDS)]
        base = [3.0 * count * r * random.lognormvariate(0.0, weather.noise) for r in rounds]
        factor = weather.slower.get(count, 1.0) / 1.5
        fast = [3.0 * count * factor * r * random.lognormvariate(0.0, weather.noise) for r in rounds]
        choices.append(_choice(task_key(task), base, fast, wins=number % 3 != 2))
    plan = Plan((two_layers.program(),), tuple(planned), (), ())
    return Tuning(plan, target or two_layers.target(), tuple(choices), {}, 0, 0, 0.0)


def recorded_tuning(rows: list[dict[str, Any]], side: str, slower: Mapping[str, float] | None = None) -> Tuning:
    """Return one of two tunings that a file of `tests/data` recorded, with a planted slowdown of some tasks."""
    planned, choices = [], []
    form = fingerprint(two_layers.FORM)
    for count, row in enumerate(rows, start=1):
        task = Task(bind_form(two_layers.FORM, (count,)), NumericRules())
        key, found = task_key(task), row[side]
        site = Site("forward", (("batch", count),), form, (count,), 2)
        planned.append(PlannedTask(key, row["task"], task, (site,), row["weight"], row["flops"], row["size_bytes"]))
        factor = (slower or {}).get(row["task"], 1.0)
        low, median, high, samples = found["timing"]
        timing = Measurement(LOOPS, low * factor, median * factor, high * factor, samples, "final")
        gain_low, gain_high = (gain / factor for gain in found["gain"])
        choices.append(
            Choice(
                key,
                LOOPS,
                Kernel(two_layers.FORM.body),
                found["us"] * factor,
                found["extern_us"],
                gain_low,
                gain_high,
                (timing,),
                (),
                found["status"],
            )
        )
    return Tuning(Plan((two_layers.program(),), tuple(planned), (), ()), cuda_target(), tuple(choices), {}, 0, 0, 0.0)


def _choice(task: str, base: list[float], fast: list[float], *, wins: bool) -> Choice:
    measurements = (_measurement(EXTERN, base), _measurement(LOOPS, fast))
    kernel = Kernel(two_layers.FORM.body)
    baseline_us = percentile(base, 0.5)
    if not wins:
        return Choice(task, EXTERN, kernel, baseline_us, baseline_us, 1.0, 1.0, measurements[:1], (), "no gain")
    gain = paired_ratio(base, fast)
    return Choice(
        task, LOOPS, kernel, percentile(fast, 0.5), baseline_us, gain.low, gain.high, measurements, (), "tuned"
    )


def _measurement(candidate: Candidate, samples: list[float]) -> Measurement:
    low, middle, high = (percentile(samples, share) for share in (0.2, 0.5, 0.8))
    return Measurement(candidate, middle, low, high, len(samples), "final")
