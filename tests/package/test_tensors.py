import json
import struct

import pytest
import torch
from safetensors.torch import load, save

from tune_model.package.format.tensors import DTYPES, list_tensors, read_tensors, tensor_chunks, tensors_size
from tune_model.package.format.wire import ArtifactError
from tune_model.runtime.weights.checkpoint import STORED_DTYPES

TENSORS = {
    "f32": torch.randn(3, 5),
    "flag": torch.tensor(True),
    "bf16": torch.randn(4).bfloat16(),
    "empty": torch.empty(0, 3),
    "complex": torch.randn(2, dtype=torch.complex64),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "f8": torch.randn(7).to(torch.float8_e4m3fn),
}


def packed(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(bytes(chunk) for chunk in tensor_chunks(tensors))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[n].dtype == t.dtype
        and found[n].shape == t.shape
        and torch.equal(found[n].contiguous().view(-1).view(torch.uint8), t.contiguous().view(-1).view(torch.uint8))
        for n, t in expected.items()
    )


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_come_back(copy: bool):
    data = packed(TENSORS)
    assert len(data) == tensors_size(TENSORS)
    assert same(read_tensors(memoryview(data), list_tensors(memoryview(data), "x"), copy=copy), TENSORS)


def test_the_library_of_the_format_reads_it():
    assert same(load(packed(TENSORS)), TENSORS)


def test_a_file_of_the_library_is_read():
    data = memoryview(save({name: tensor.contiguous() for name, tensor in TENSORS.items()}))
    assert same(read_tensors(data, list_tensors(data, "x"), copy=True), TENSORS)


def test_order_of_names_does_not_matter():
    assert packed(TENSORS) == packed(dict(reversed(TENSORS.items())))


def test_a_copy_is_the_callers_own():
    data = bytearray(packed({"a": torch.zeros(2)}))
    tensor = read_tensors(memoryview(data), list_tensors(memoryview(data), "x"), copy=True)["a"]
    data[-1] = 63
    assert torch.equal(tensor, torch.zeros(2))


def forged(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWICE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
HOSTILE = {
    "nothing": b"",
    "a header longer than the file": struct.pack("<Q", 1 << 62) + b"{}",
    "a header that is no JSON": forged(b"hello there"),
    "a header that is a list": forged([1, 2]),
    "an unknown dtype": forged({"a": tensor("F128")}),
    "a negative size": forged({"a": tensor(shape=(-2,))}),
    "sizes whose product overflows": forged({"a": tensor(shape=(1 << 40, 1 << 40))}),
    "a size that is no number": forged({"a": tensor(shape=("2",))}),
    "offsets beyond the data": forged({"a": tensor(shape=(4,), offsets=(0, 16))}),
    "offsets backwards": forged({"a": tensor(offsets=(8, 0))}),
    "a hole": forged({"a": tensor(shape=(1,), offsets=(4, 8))}),
    "overlapping tensors": forged({"a": tensor(), "b": tensor()}),
    "data that nobody owns": forged({"a": tensor(shape=(1,), offsets=(0, 4))}),
    "a field too many": forged({"a": {**tensor(), "run": "this"}}),
    "free text": forged({"__metadata__": {"a": "b"}, "a": tensor()}),
    "a name twice": forged(TWICE),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_headers_that_describe_something_else(data: bytes):
    with pytest.raises(ArtifactError):
        list_tensors(memoryview(data), "constants.safetensors")


def test_a_lazy_conjugate_is_written_as_it_reads():
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    data = memoryview(packed({"z": conjugate, "part": conjugate.imag}))
    found = read_tensors(data, list_tensors(data, "x"), copy=True)
    assert torch.equal(found["z"], conjugate)
    assert torch.equal(found["part"], conjugate.imag)


def test_dtypes_are_those_that_checkpoints_have():
    assert DTYPES == STORED_DTYPES
