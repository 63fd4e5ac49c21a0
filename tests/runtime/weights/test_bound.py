"""Weights that are shared with a module, that age, and that are loaded again."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from small_programs import f32, softmax_program
from torch import nn

from tune_model.runtime.program import Concatenate, Pack, Program, Transpose, Weight
from tune_model.runtime.weights.bound import BoundWeights
from tune_model.runtime.weights.checkpoint import WeightSource
from tune_model.runtime.weights.transforms import WeightError

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Three projections of one input, one that is packed, one transposed, one read as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.packed, self.turned, self.plain, self.again = (
            nn.Linear(8, n, bias=False) for n in (4, 6, 16, 5, 3, 16)
        )


MERGED = Weight("qk", f32(10, 8), ("q.weight", "k.weight"), (Concatenate(0),))
PACKED = Weight("packed", f32(16, 8), ("packed.weight",), (Pack("mkldnn"),))
AGAIN = Weight("again", f32(16, 8), ("again.weight",), (Pack("mkldnn"),))
TURNED = Weight("turned", f32(5, 8, strides=(1, 5)), ("turned.weight",), (Transpose(),))
PLAIN = Weight("plain", f32(3, 8), ("plain.weight",))
ALL = (MERGED, PACKED, AGAIN, TURNED, PLAIN)


def programs(*weights: Weight) -> list[Program]:
    return [msgspec.structs.replace(softmax_program(), weights=weights)]


def multiplied(packed: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(torch.eye(8), packed, None, "none", [], "").T


def check_values(bound: BoundWeights, module: Layer) -> None:
    tensors = bound.tensors
    assert torch.equal(tensors["qk"], torch.cat([module.q.weight, module.k.weight]))
    assert torch.equal(tensors["turned"], module.turned.weight)
    assert torch.equal(tensors["plain"], module.plain.weight)
    torch.testing.assert_close(multiplied(tensors["packed"]), module.packed.weight.detach())
    torch.testing.assert_close(multiplied(tensors["again"]), module.again.weight.detach())


def test_parameters_become_views_of_what_was_made_of_them():
    module = Layer()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    kept = dict(module.named_parameters())
    bound = BoundWeights(programs(*ALL), module, CPU, share=True)
    check_values(bound, module)
    assert module.q.weight.data_ptr() == bound.tensors["qk"].data_ptr()
    assert module.k.weight.data_ptr() == bound.tensors["qk"][4:].data_ptr()
    assert module.turned.weight.stride() == (1, 5)
    assert all(torch.equal(p, before[name]) and p is kept[name] for name, p in module.named_parameters())
    shared = bound.shared()
    assert shared.copied == ("again.weight", "packed.weight")
    assert (shared.shared_bytes, shared.copied_bytes) == ((10 + 5 + 3) * 8 * 4, 2 * 16 * 8 * 4)


def test_training_a_shared_module_trains_the_weights():
    module = Layer()
    bound = BoundWeights(programs(MERGED, PLAIN), module, CPU, share=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = module.q(torch.ones(1, 8)).sum() + module.plain(torch.ones(1, 8)).sum()
    loss.backward()
    optimizer.step()
    assert torch.equal(bound.tensors["qk"][:4], module.q.weight)
    assert bound.stale(thorough=True) == ()


def test_without_sharing_a_module_is_left_alone():
    module = Layer()
    addresses = [p.data_ptr() for p in module.parameters()]
    bound = BoundWeights(programs(*ALL), module, CPU)
    assert [p.data_ptr() for p in module.parameters()] == addresses
    assert bound.shared().copied == ("again.weight", "k.weight", "packed.weight", "q.weight", "turned.weight")


def in_place(module: Layer) -> None:
    with torch.no_grad():
        module.k.weight.add_(1)


def loaded(module: Layer) -> None:
    module.k.load_state_dict({"weight": torch.zeros(6, 8)})


def pointed_elsewhere(module: Layer) -> None:
    module.k.weight.data = torch.zeros(6, 8)


def assigned(module: Layer) -> None:
    module.k.weight = torch.nn.Parameter(torch.zeros(6, 8), requires_grad=False)


def assigned_by_loading(module: Layer) -> None:
    module.k.load_state_dict({"weight": torch.zeros(6, 8)}, assign=True)


def through_data(module: Layer) -> None:
    """As adapters are merged by some tools; torch's version counter does not move."""
    module.k.weight.data += 0.5


@pytest.mark.parametrize("change", [in_place, loaded, pointed_elsewhere, assigned, assigned_by_loading])
def test_copies_that_are_out_of_date_are_named(change: object):
    module = Layer()
    bound = BoundWeights(programs(*ALL), module, CPU)
    assert bound.stale() == ()
    change(module)
    assert bound.stale() == ("k.weight",)


def test_a_parameter_that_lies_nowhere_any_more_is_named():
    """Asking a sparse one for its address ended every later call in an error of torch's."""
    module = Layer()
    bound = BoundWeights(programs(*ALL), module, CPU)
    module.k.weight = nn.Parameter(module.k.weight.detach().to_sparse())
    assert bound.stale() == bound.stale(thorough=True) == ("k.weight",)
    with pytest.raises(WeightError, match=r"weight 'k\.weight' is a tensor of layout torch\.sparse_coo"):
        bound.reload()


def test_changes_without_a_version_are_found_by_a_thorough_look():
    module = Layer()
    bound = BoundWeights(programs(*ALL), module, CPU)
    through_data(module)
    assert bound.stale() == ()
    assert bound.stale(thorough=True) == ("k.weight",)


@pytest.mark.parametrize("change", [pointed_elsewhere, assigned, assigned_by_loading])
def test_parameters_that_leave_shared_memory_are_named(change: object):
    module = Layer()
    bound = BoundWeights(programs(*ALL), module, CPU, share=True)
    in_place(module)
    assert bound.stale() == ()
    change(module)
    assert bound.stale() == ("k.weight",)
    bound.reload()
    assert bound.stale(thorough=True) == ()


def test_sources_that_are_gone_are_not_asked():
    bound = BoundWeights(programs(*ALL), Layer().state_dict(), CPU)
    assert bound.stale(thorough=True) == ()
    with pytest.raises(WeightError, match="pass the ones to load"):
        bound.reload()


@pytest.mark.parametrize("share", [False, True])
def test_reloading_writes_where_weights_are_and_replaces_what_cannot_be(share: bool):
    module = Layer()
    bound = BoundWeights(programs(*ALL), module, CPU, share=share)
    before = bound.tensors
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    assert len(bound.stale()) == 6
    replaced = bound.reload()
    check_values(bound, module)
    assert bound.stale(thorough=True) == ()
    assert replaced == ({"packed", "again"} if share else {"packed", "again", "plain"})
    assert all(bound.tensors[n] is before[n] for n in before if n not in replaced)


def test_reloading_another_model_leaves_the_first_one_alone(tmp_path: Path):
    module, other = Layer(), Layer()
    bound = BoundWeights(programs(*ALL), module, CPU)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    bound.reload(tmp_path)
    check_values(bound, other)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def wrong_shape(tensors: dict[str, torch.Tensor]) -> str:
    tensors["plain.weight"] = torch.zeros(3, 9)
    return r"weight 'plain' is \[3, 9\]"


def wrong_dtype(tensors: dict[str, torch.Tensor]) -> str:
    tensors["plain.weight"] = torch.zeros(3, 8, dtype=torch.int64)
    return "weight 'plain.weight' is torch.int64; expected torch.float32"


def missing(tensors: dict[str, torch.Tensor]) -> str:
    del tensors["plain.weight"]
    return "1 of 6 weights are missing"


@pytest.mark.parametrize("spoil", [wrong_shape, wrong_dtype, missing])
@pytest.mark.parametrize("stored", ["file", "state dict", "module"])
def test_reloading_what_does_not_fit_changes_nothing(tmp_path: Path, spoil: Callable[..., str], stored: str):
    """Weights were overwritten one by one until the wrong one came: half the old model and half the new."""
    module = Layer()
    bound = BoundWeights(programs(*ALL), module, CPU)
    before = bound.tensors
    tensors = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    message = spoil(tensors)  # the last one that is made
    source: WeightSource = tensors
    if stored == "file":
        save_file(tensors, tmp_path / "model.safetensors")
        source = tmp_path
    elif stored == "module":
        source = nn.Module()
        for name, tensor in tensors.items():
            layer = nn.Module()
            layer.register_buffer("weight", tensor)
            source.add_module(name.split(".", maxsplit=1)[0], layer)
    with pytest.raises(WeightError, match=message):
        bound.reload(source)
    check_values(bound, module)
    assert all(bound.tensors[name] is before[name] for name in before)
    with torch.no_grad():
        module.k.weight.add_(1)
    assert bound.stale() == ("k.weight",)
    bound.reload()  # still from the module that was there
    check_values(bound, module)


def test_after_other_weights_the_first_module_is_not_asked_again(tmp_path: Path):
    """`reload()` after `reload(path)` brought the old weights back."""
    module, other = Layer(), Layer()
    bound = BoundWeights(programs(*ALL), module, CPU)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    bound.reload(tmp_path)
    with pytest.raises(WeightError, match="pass the ones to load"):
        bound.reload()
    check_values(bound, other)


PEAK = """
import sys, msgspec, torch
from pathlib import Path
sys.path.insert(0, {support!r})
from small_programs import f32, softmax_program
from tune_model.runtime.weights.bound import BoundWeights
from tune_model.runtime.program import Concatenate, Pack, Transpose, Weight

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

def program(layers):
    weights = []
    for i in layers:
        weights.append(Weight(f"qkv{{i}}", f32(768, 1024), (f"q{{i}}", f"k{{i}}", f"v{{i}}"), (Concatenate(0),)))
        weights.append(Weight(f"t{{i}}", f32(512, 1024, strides=(1, 512)), (f"t{{i}}",), (Transpose(),)))
        weights.append(Weight(f"p{{i}}", f32(512, 1024), (f"p{{i}}",), {pack}))
    return msgspec.structs.replace(softmax_program(), weights=tuple(weights))

# What the libraries take once in a process (oneDNN's code for this processor, threads) is not the model's.
first = BoundWeights([program(range(1))], Path({folder!r}), torch.device("cpu"))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
before = status("VmRSS")
bound = BoundWeights([program(range(1, {layers}))], Path({folder!r}), torch.device("cpu"))
print((status("VmHWM") - before) * 1024 / bound.size_bytes)
"""


@pytest.mark.parametrize("pack", ["()", "(Pack('mkldnn'),)"], ids=["plain", "packed"])
def test_loading_takes_little_more_memory_than_the_model(tmp_path: Path, pack: str):
    """Peak resident memory of loading, over 140 MB of weights that are merged, transposed and packed."""
    layers = 21
    shapes = {"q": 256, "k": 256, "v": 256, "t": 512, "p": 512}
    save_file(
        {f"{n}{i}": torch.ones(rows, 1024) for i in range(layers) for n, rows in shapes.items()},
        tmp_path / "model.safetensors",
    )
    support = str(Path(__file__).resolve().parent.parent / "support")
    code = PEAK.format(support=support, layers=layers, pack=pack, folder=str(tmp_path))
    path = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert 0.95 < float(done.stdout) < 1.15
