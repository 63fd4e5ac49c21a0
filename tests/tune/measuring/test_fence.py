import pytest
import torch

from tune_model.tune.measuring.fence import ZONE_BYTES, Fences, StrayWriteError, digest
from tune_model.tune.measuring.inputs import copy_layout

CPU = torch.device("cpu")


def raw(elements: torch.Tensor) -> torch.Tensor:
    """All bytes that belong to the same memory."""
    return torch.empty(0, dtype=torch.uint8).set_(elements.untyped_storage())  # type: ignore[call-overload]


def test_a_tensor_between_fences_is_aligned_as_it_would_be_alone():
    fences = Fences()
    elements = fences.allocate(7, torch.bfloat16, CPU)
    assert elements.shape == (7,)
    assert elements.data_ptr() % 64 == raw(elements).data_ptr() % 64
    elements.fill_(3.0)
    fences.check(["t0"])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (ZONE_BYTES - 1, "1 bytes before t0, the nearest 1 away"),
        (ZONE_BYTES - 64, "1 bytes before t0, the nearest 64 away"),
        (ZONE_BYTES + 14, "1 bytes behind t0, the nearest 1 away"),
        (-1, f"1 bytes behind t0, the nearest {ZONE_BYTES} away"),
    ],
)
def test_a_single_byte_outside_shows(place: int, message: str):
    fences = Fences()
    elements = fences.allocate(7, torch.bfloat16, CPU)
    raw(elements)[place] = 1
    with pytest.raises(StrayWriteError, match=message):
        fences.check(["t0"])
    fences.check(["t0"])  # the next candidate is not blamed for it


def test_writes_between_the_rows_of_a_result_show():
    fences = Fences()
    elements = fences.allocate(3 * 8, torch.float32, CPU)
    view = elements.as_strided((3, 5), (8, 1), elements.storage_offset())
    fences.close([view])
    view.fill_(1.0)
    fences.check(["t0"])
    elements[6] = 1.0
    with pytest.raises(StrayWriteError, match="between the rows of t0"):
        fences.check(["t0"])


def test_a_copy_lies_between_fences_with_its_strides_and_gaps():
    fences = Fences()
    value = torch.arange(40.0).as_strided((4, 5), (9, 1))
    copy = copy_layout(value, fences.allocate)
    assert torch.equal(copy, value)
    assert copy.stride() == value.stride()
    fences.check(["a0"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("count", [1, 8, 1001])
def test_a_digest_follows_every_element(dtype: torch.dtype, count: int):
    value = torch.zeros(count, dtype=dtype)
    seen = {digest(value)}
    for place in {0, count // 2, count - 1}:
        value[place] = 1
        seen.add(digest(value))
    assert len(seen) == 1 + len({0, count // 2, count - 1})


def test_a_digest_covers_gaps_and_needs_no_alignment():
    memory = torch.zeros(100, dtype=torch.int8)
    value = memory[3:].as_strided((4, 5), (9, 1), 3)
    before = digest(value)
    memory[10] = 1
    assert digest(value) != before
    assert digest(torch.empty(0)) is None
