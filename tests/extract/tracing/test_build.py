import sys

import pytest
import torch
from small_models import Mixed, make_mixed

from tune_model.extract.request import FactorySource
from tune_model.extract.tracing.build import build_factory, make_fake, parameters_on_meta, weight_names
from tune_model.extract.tracing.front_end import SourceError


def test_parameters_take_no_memory_and_buffers_are_real():
    with parameters_on_meta():
        module = Mixed()
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert torch.equal(module.offset, torch.arange(8.0))
    assert Mixed().inner.weight.device.type == "cpu"


def test_fake_tensors_keep_what_is_tied_tied():
    with parameters_on_meta():
        module = Mixed()
    built = make_fake(module).module
    assert built.tied.weight is built.inner.weight
    assert type(built.inner.weight.data).__name__ == "FakeTensor"
    assert torch.equal(built.offset, torch.arange(8.0))


def test_tied_weights_share_the_first_name():
    assert weight_names(Mixed())["tied.weight"] == "inner.weight"


def test_a_factory_is_found_in_its_search_path(tmp_path):
    (tmp_path / "zoo_of_models.py").write_text("import torch\nclass Zoo:\n    make = lambda: torch.nn.Linear(4, 2)\n")
    before = list(sys.path)
    module = build_factory(FactorySource("zoo_of_models:Zoo.make", str(tmp_path)), "bfloat16")
    assert module.weight.dtype == torch.bfloat16
    assert module.weight.is_meta
    assert not module.training
    assert sys.path == before


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("no_colon", "expected package.module:callable"),
        ("no_such_module_anywhere:make", "could not be imported: No module named"),
        ("small_models:no_such_function", "could not be imported"),
        ("small_models:SIZES", "is a dict; expected a callable"),
        ("small_models:decoder", "failed: TypeError"),
        ("builtins:dict", "returned a dict; expected a torch.nn.Module"),
    ],
)
def test_factories_fail_with_one_clear_error(factory, says):
    with pytest.raises(SourceError, match=says):
        build_factory(FactorySource(factory), "float32")


def test_a_missing_search_path_is_named():
    with pytest.raises(SourceError, match="is not a folder"):
        build_factory(FactorySource("m:f", "/no/such/folder"), "float32")


def test_real_parameters_on_request():
    assert not build_factory(FactorySource("small_models:make_mixed"), "float32", real=True).inner.weight.is_meta
    assert isinstance(make_mixed(), Mixed)


def test_a_lazy_module_that_was_called_has_its_weights():
    module = build_factory(FactorySource("bad_models:Initialised"), "float32", real=True)
    assert module.linear[0].weight.shape == (8, 8)
    with pytest.raises(SourceError, match=r"whose linear\.0\.weight is not initialised"):
        build_factory(FactorySource("bad_models:Lazy"), "float32", real=True)


@pytest.mark.parametrize("real", [False, True])
def test_complex_tensors_keep_their_dtype(real):
    """`Module.to` makes them real, with a warning."""
    module = build_factory(FactorySource("small_models:make_rotated"), "bfloat16", real=real)
    assert module.project.weight.dtype == torch.bfloat16
    assert module.turns.dtype == torch.complex64
    assert build_factory(FactorySource("small_models:make_complex"), "float16", real=real).weight.is_complex()
