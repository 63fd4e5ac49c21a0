import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_programs import MAX_LENGTH, language_model

from tune_model.runtime.generation.buckets import Buckets, Chunk, buckets_of

GRIDS = {"prefill": {"batch": (1,), "sequence": (4, 8)}, "decode": {"batch": (1, 3), "context": (4, 16)}}


def buckets(*, rows: int = 8, slots: int = 1024, chunk: int = 512, exact: bool = False) -> Buckets:
    return Buckets(exact, rows, slots, (1, 3, 8), (64, 1024), (100, 512), chunk)


def test_a_step_runs_on_tuned_numbers_of_rows_and_powers_of_two():
    assert [buckets().batch(n) for n in range(1, 9)] == [1, 2, 3, 4, 8, 8, 8, 8]
    assert buckets(rows=6).batch(5) == 6
    assert buckets().batches_all() == (1, 2, 3, 4, 8)
    assert [buckets(exact=True).batch(n) for n in range(1, 9)] == list(range(1, 9))


@pytest.mark.parametrize(("length", "tuned"), [(0, 64), (64, 64), (200, 64), (300, 1024), (1024, 1024), (8000, 1024)])
def test_contexts_are_the_nearest_tuned_ones(length: int, tuned: int):
    assert buckets().context(length) == tuned


def test_contexts_that_nobody_tuned_are_powers_of_two():
    bare = buckets()._replace(contexts=())
    assert [bare.context(n) for n in (1, 2, 3, 5, 9, 17, 1000)] == [1, 2, 4, 8, 16, 32, 1024]


@given(st.integers(1, 1024), st.integers(0, 1023))
def test_padding_is_bounded(length: int, start: int):
    room = 1024 - start
    if length <= room:
        size = buckets().sequence(length, room)
        assert length <= size <= room
        assert size - length < 16 or size <= 1.25 * length


def test_lengths_are_few():
    assert len({buckets().sequence(n, 100_000) for n in range(1, 4097)}) <= 4 * 12
    assert buckets().sequence(97, 1024) == 100  # tuned
    assert buckets(exact=True).sequence(97, 1024) == 97


@given(st.integers(1, 1024), st.sampled_from([100, 512, 1024]))
def test_parts_make_up_the_prompt(length: int, chunk: int):
    parts = buckets(chunk=chunk).chunks(length)
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == length
    assert all(p.stop - p.start <= p.size <= 1024 - p.start for p in parts)


def test_a_models_buckets():
    found = buckets_of(language_model("prefill"), GRIDS, rows=2, slots=MAX_LENGTH, exact=False, chunked=True)
    assert found == Buckets(False, 2, MAX_LENGTH, (1,), (4, 16), (4, 8), 8)
    assert found.chunks(19) == [Chunk(0, 8, 8), Chunk(8, 16, 8), Chunk(16, 19, 4)]
    whole = buckets_of(language_model("prefill"), {}, rows=2, slots=MAX_LENGTH, exact=False, chunked=True)
    assert whole.chunk == MAX_LENGTH
    assert whole.chunks(19) == [Chunk(0, 19, MAX_LENGTH)]
