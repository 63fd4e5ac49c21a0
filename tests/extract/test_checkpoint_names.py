import pytest
import torch
from small_models import SIZES
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tune_model.extract.checkpoint_names import checkpoint_names
from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.extract.tracing.transformers_model import trace_transformers
from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.replay import Replay
from tune_model.runtime.weights.transforms import bind_weights


def saved(tmp_path, model_type, auto=AutoModel, **fields):
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(model_type, **SIZES, **fields)).eval()
    model.save_pretrained(tmp_path)
    return model


@pytest.mark.parametrize(
    ("model_type", "fields", "inputs"),
    [
        ("vit", {"image_size": 32, "patch_size": 16}, {"pixel_values": torch.randn(2, 3, 32, 32)}),
        ("bert", {}, {"input_ids": torch.arange(10).view(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}),
    ],
)
def test_a_saved_folder_binds_by_the_names_in_its_files(tmp_path, model_type, fields, inputs):
    """A vision transformer is saved under names that its modules no longer have."""
    model = saved(tmp_path, model_type, **fields)
    phase = Phase("forward", {"batch": (2,)} if model_type == "vit" else {"batch": (2,), "sequence": (5,)})
    (trace,) = trace_transformers(Request(TransformersSource(folder=str(tmp_path)), "float32", "encoder", (phase,)))
    weights = bind_weights([trace.program], str(tmp_path), "cpu")
    seen = Executor(trace.program, weights, trace.constants, Replay({}), {}, "cpu").run(inputs)
    with torch.no_grad():
        expected = model(**inputs)
    assert torch.allclose(seen["last_hidden_state"], expected.last_hidden_state, atol=1e-5)


def test_names_that_did_not_change_are_not_listed(tmp_path):
    model = saved(tmp_path, "llama", AutoModelForCausalLM)
    assert checkpoint_names(model, str(tmp_path)) == {}
    assert checkpoint_names(model, None) == {}
    assert checkpoint_names(model, str(tmp_path.parent)) == {}
