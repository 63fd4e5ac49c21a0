import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from small_programs import f32, softmax_program
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tune_model.runtime.program import Cast, Concatenate, Pack, Program, TensorType, Transpose, Weight
from tune_model.runtime.weights.checkpoint import CheckpointError, open_checkpoint
from tune_model.runtime.weights.transforms import WeightError, bind_weights, check_sources, read_sources


def program(*weights: Weight, name: str = "forward") -> Program:
    return msgspec.structs.replace(softmax_program(), name=name, weights=weights)


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(4, 8), "b.weight": torch.randn(6, 8), "c.weight": torch.randn(8)}


A, B = Weight("a", f32(4, 8), ("a.weight",)), Weight("b", f32(6, 8), ("b.weight",))


def test_plain_weights_stay_the_callers_memory():
    source = tensors()
    bound = bind_weights([program(A, B)], source, "cpu")
    assert bound["a"].data_ptr() == source["a.weight"].data_ptr()
    assert set(bound) == {"a", "b"}


def test_transforms_apply_in_order():
    source = tensors()
    both = Weight("ab", f32(10, 8), ("a.weight", "b.weight"), (Concatenate(0),))
    turned = Weight("bt", f32(6, 8, strides=(1, 6)), ("b.weight",), (Transpose(),))
    half = Weight("h", TensorType("bfloat16", (8,)), ("c.weight",), (Cast("bfloat16"),))
    bound = bind_weights([program(both, turned, half)], source, "cpu")
    assert torch.equal(bound["ab"], torch.cat([source["a.weight"], source["b.weight"]]))
    assert torch.equal(bound["bt"], source["b.weight"])
    assert bound["bt"].stride() == (1, 6)
    assert torch.equal(bound["h"], source["c.weight"].bfloat16())


def test_equal_weights_of_several_programs_are_made_once():
    merged = Weight("ab", f32(10, 8), ("a.weight", "b.weight"), (Concatenate(0),))
    again = Weight("other_name", f32(10, 8), ("a.weight", "b.weight"), (Concatenate(0),))
    bound = bind_weights([program(merged, name="prefill"), program(merged, again, name="decode")], tensors(), "cpu")
    assert bound["ab"].data_ptr() == bound["other_name"].data_ptr()


@pytest.mark.parametrize(("layout", "rows"), [("mkldnn", None), ("mkl:5", 5)])
def test_packed_weights_multiply_as_the_plain_ones_do(layout: str, rows: int | None):
    source = tensors()
    bound = bind_weights([program(Weight("b", f32(6, 8), ("b.weight",), (Pack(layout),)))], source, "cpu")
    x = torch.randn(5, 8)
    if rows is None:
        out = torch.ops.mkldnn._linear_pointwise(x, bound["b"], None, "none", [], "")
    else:
        out = torch.ops.mkl._mkl_linear(x, bound["b"], source["b.weight"], None, rows)
    torch.testing.assert_close(out.double(), x.double() @ source["b.weight"].double().T, atol=1e-5, rtol=1e-5)


def test_a_sign_that_is_noted_beside_the_memory_counts():
    """torch negates such a view when it is read; its memory has the other sign, and kernels read memory."""
    value = torch.randn(4, 8)
    bound = bind_weights([program(A)], {"a.weight": torch._neg_view(value)}, "cpu")
    assert not bound["a"].is_neg()
    assert torch.equal(bound["a"], -value)


def test_lazily_conjugated_tensors_are_copied():
    """Whoever reads their memory would read the other imaginary parts."""
    held = torch.randn(3, 4, dtype=torch.complex64).conj()
    weight = Weight("z", TensorType("complex64", (3, 4)), ("z",))
    found = bind_weights([program(weight)], {"z": held}, "cpu")["z"]
    assert not found.is_conj()
    assert torch.equal(found, held)


def test_misaligned_tensors_are_moved():
    memory = torch.randn(33)
    bound = bind_weights([program(A)], {"a.weight": memory[1:].view(4, 8)}, "cpu")
    assert bound["a"].data_ptr() % 64 == 0
    assert torch.equal(bound["a"], memory[1:].view(4, 8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(10, 8)
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        self.register_buffer("scale", torch.ones(3))


HEAD = Weight("head", f32(10, 8), ("lm_head.weight",))
EMBED = Weight("embed", f32(10, 8), ("model.embed_tokens.weight",))


def test_a_module_gives_tied_parameters_and_buffers_under_every_name():
    module = Tied()
    bound = bind_weights([program(HEAD, EMBED, Weight("s", f32(3), ("scale",)))], module, "cpu")
    assert bound["head"].data_ptr() == bound["embed"].data_ptr() == module.lm_head.weight.data_ptr()
    assert not bound["head"].requires_grad


@pytest.mark.parametrize(("kept", "asked"), [("model.embed_tokens.weight", HEAD), ("lm_head.weight", EMBED)])
def test_tied_embeddings_are_found_under_the_name_the_checkpoint_kept(kept: str, asked: Weight):
    value = torch.randn(10, 8)
    bound = bind_weights([program(HEAD, EMBED)], {kept: value}, "cpu")
    assert bound["head"].data_ptr() == bound["embed"].data_ptr() == value.data_ptr()
    assert torch.equal(bind_weights([program(asked)], {kept: value}, "cpu")[asked.name], value)


def test_a_prefix_on_either_side_is_seen_through():
    source = tensors()
    longer = {f"bert.{name}": value for name, value in source.items()} | {"classifier.weight": torch.randn(2)}
    assert torch.equal(bind_weights([program(A, B)], longer, "cpu")["a"], source["a.weight"])
    prefixed = [msgspec.structs.replace(w, sources=(f"model.{w.sources[0]}",)) for w in (A, B)]
    assert torch.equal(bind_weights([program(*prefixed)], source, "cpu")["b"], source["b.weight"])
    inner = {
        name.removeprefix("model."): value for name, value in Tied().state_dict().items() if name != "lm_head.weight"
    }
    assert bind_weights([program(HEAD, EMBED)], inner, "cpu")["head"].shape == (10, 8)


NOT_DENSE: dict[str, Tensor] = {
    "a tensor of layout torch.sparse_coo": torch.eye(4, 8).to_sparse(),
    "a tensor of layout torch.sparse_csr": torch.eye(4, 8).to_sparse_csr(),
    "a tensor of layout torch._mkldnn": torch.eye(4, 8).to_mkldnn(),
    "a quantised tensor (torch.qint8)": torch.quantize_per_tensor(torch.eye(4, 8), 0.1, 0, torch.qint8),
    "a nested tensor (torch.strided)": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "a nested tensor (torch.jagged)": torch.nested.nested_tensor([torch.zeros(2, 8)], layout=torch.jagged),
    "not initialised (of a lazy module)": nn.LazyLinear(4).weight,
    "a FakeTensor": FakeTensorMode().from_tensor(torch.eye(4, 8)),
}
"""Kinds of tensors whose elements do not lie at strides; each ended in a bare error of torch's."""

BAD = [
    ({"a.weight": torch.zeros(4, 8)}, "1 of 2 weights are missing from the checkpoint: b.weight; it has 1 names"),
    ({}, "2 of 2 weights are missing from the checkpoint: a.weight, b.weight"),
    ({**tensors(), "a.weight": torch.zeros(5, 8)}, "weight 'a' is [5, 8] (from a.weight [5, 8]); expected [4, 8]"),
    ({**tensors(), "a.weight": torch.zeros(4, 8).int()}, "is torch.int32; expected torch.float32"),
    ({**tensors(), "a.weight": torch.zeros(4, 8, device="meta")}, "has no values (it is on the meta device)"),
    *(
        (
            {**tensors(), "a.weight": other},
            f"weight 'a.weight' is {seen}; expected a dense tensor (torch.strided) of torch.float32",
        )
        for seen, other in NOT_DENSE.items()
    ),
    (
        {f"{m}.{name}": value for m in ("x", "y") for name, value in tensors().items()},
        "they could be under prefix 'x.' or 'y.'",
    ),
]


@pytest.mark.parametrize(("source", "message"), BAD, ids=[message for _, message in BAD])
def test_a_checkpoint_that_does_not_fit_is_one_clear_error(source: dict[str, Tensor], message: str):
    with pytest.raises(WeightError) as caught:
        bind_weights([program(A, B)], source, "cpu")
    assert message in str(caught.value)


def test_programs_that_disagree_are_refused():
    other = msgspec.structs.replace(A, transforms=(Transpose(),))
    with pytest.raises(WeightError, match="programs disagree about weight 'a'"):
        bind_weights([program(A), program(other, name="decode")], tensors(), "cpu")
    with pytest.raises(WeightError, match="expected mkldnn or mkl:ROWS"):
        bind_weights([program(msgspec.structs.replace(A, transforms=(Pack("mine"),)))], tensors(), "cpu")


def test_files_and_folders_of_safetensors(tmp_path: Path):
    source = tensors()
    save_file(source, tmp_path / "model.safetensors")
    one = bind_weights([program(A, B)], tmp_path / "model.safetensors", "cpu")
    folder = bind_weights([program(A, B)], str(tmp_path), "cpu")
    for bound in (one, folder):
        assert torch.equal(bound["a"], source["a.weight"])
        assert bound["b"].data_ptr() % 64 == 0


def test_sharded_checkpoints_are_read_through_their_index(tmp_path: Path):
    source = tensors()
    save_file({"a.weight": source["a.weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b.weight": source["b.weight"]}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a.weight": torch.zeros(4, 8)}, tmp_path / "unrelated.safetensors")
    names = {f"{n}.weight": f"model-0000{i}-of-00002.safetensors" for i, n in ((1, "a"), (2, "b"))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    bound = bind_weights([program(A, B)], tmp_path, "cpu")
    assert torch.equal(bound["a"], source["a.weight"])
    assert torch.equal(bound["b"], source["b.weight"])


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.bool, torch.uint8],
)
def test_every_dtype_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype):
    value = torch.arange(12).view(3, 4).to(dtype)
    save_file({"x": value, "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}, tmp_path / "w.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("x"), value)
    assert checkpoint.read("empty").shape == (0, 3)
    assert checkpoint.read("scalar").item() == 2.5


def header(entries: object, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


DEEP = b'{"x":' * 100_000
"""Nested deeper than Python recurses: a reader that lets `RecursionError` through ends in a traceback."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 16, "not a safetensors file"),
        ((5).to_bytes(8, "little") + b"nojson", "damaged safetensors header"),
        (header([1]), "damaged safetensors header"),
        (header(DEEP), "damaged safetensors header: maximum recursion depth"),
        (header({"x": {"dtype": "F32"}}), "damaged safetensors header"),
        (header({"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}), "dtype 'F99'"),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), "lies at 0 to 4; expected 8 bytes"),
        (header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}), "lies at -4 to 0"),
        (header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"abc"), "the file has"),
    ],
)
def test_damaged_files_are_one_clear_error(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_missing_paths_are_one_clear_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="holds no safetensors"):
        open_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for content, message in (
        ("{", "weight_map"),
        (DEEP.decode(), "weight_map: maximum recursion depth"),
        ('{"weight_map": {"x": "../y.safetensors"}}', "outside its folder"),
    ):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)
    index.write_text('{"weight_map": {"x": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone.safetensors: No such file"):
        open_checkpoint(tmp_path)


def test_sources_are_read_untransformed_under_the_programs_names():
    """What `output.weights: embed` stores: found under a prefix, each once, nothing else."""
    source = {f"model.{name}": tensor for name, tensor in tensors().items()}
    both = Weight("ab", f32(10, 8), ("a.weight", "b.weight"), (Concatenate(0),))
    read = read_sources([program(both), program(A, name="decode")], source)
    assert list(read) == ["a.weight", "b.weight"]
    assert torch.equal(read["b.weight"], source["model.b.weight"])


def test_sources_that_do_not_fit_are_refused_before_they_are_read_or_tuned_for():
    """Weights of a wrong shape were embedded in an artifact that could not be loaded."""
    wanted = [program(A, B)]
    check_sources(wanted, tensors())
    for wrong, message in (
        (
            {**tensors(), "b.weight": torch.zeros(5, 8)},
            r"'b' is \[5, 8\] \(from b.weight \[5, 8\]\); expected \[6, 8\]",
        ),
        ({**tensors(), "b.weight": torch.zeros(6, 8, dtype=torch.int32)}, "is torch.int32; expected torch.float32"),
        ({"a.weight": torch.zeros(4, 8)}, "b.weight"),
    ):
        for use in (check_sources, read_sources):
            with pytest.raises(WeightError, match=message):
                use(wanted, wrong)


def test_weights_of_another_kind_are_one_clear_error():
    """They were an AttributeError or a TypeError of the first tensor looked at."""
    with pytest.raises(CheckpointError, match="weights is a int; expected a module, a state dict or a path"):
        open_checkpoint(3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"weights\['a'\] is a list; expected a tensor"):
        open_checkpoint({"a": [1.0]})  # type: ignore[dict-item]
