import pickle
import random

import pytest

from tune_model.runtime.kernel import CpuLaunch, Kernel
from tune_model.tune.candidate import Built, Rejected
from tune_model.tune.device import Passed, Samples
from tune_model.tune.processes.answers import Answer, AnswerError, decode_answer, encode_answer

ANSWERS = [
    Answer(None),
    Answer(Passed(0.001)),
    Answer(Passed(float("inf"))),
    Answer(Rejected("wrong", "error 0.5"), broken=True),
    Answer(Samples((1.0, 2.5), disturbed=True)),
    Answer((Samples((1.0,)), Rejected("crash", "gone"), Samples(()))),
    Answer(Built(Kernel((CpuLaunch("ab", "run", ("a0", "t0"), ("a0.size0",)),)), {"ab": b"\x7fELF"}, 12, 8, 0.5)),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_come_back_as_they_were(answer: Answer):
    assert decode_answer(encode_answer(answer)) == answer


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('executed')",)


GARBAGE = [
    b"",
    b"garbage",
    pickle.dumps(Bomb()),
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 100_000,
    encode_answer(ANSWERS[4])[:-1],
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused_and_nothing_of_it_runs(data: bytes):
    with pytest.raises(AnswerError):
        decode_answer(data)


def test_damaged_answers_are_refused_or_read_as_answers():
    dice = random.Random(6)  # noqa: S311 (repeatable)
    for _ in range(2000):
        data = bytearray(encode_answer(dice.choice(ANSWERS)))
        data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            assert isinstance(decode_answer(bytes(data)), Answer)
        except AnswerError:
            continue
