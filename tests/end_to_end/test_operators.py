"""An engine with a model of its own: layer by layer on the kernels of an artifact tuned for single operators."""

import small_models
import torch
from torch.nn import functional
from untuned import untuned

from tune_model.extract.plan import extract
from tune_model.package.contents import build_replay
from tune_model.package.verification.original import build_original
from tune_model.runtime.tuned import ModelParts, TunedModel


def test_every_linear_layer_and_norm_of_the_model_is_answered():
    request = small_models.decoder("llama")
    found = extract(request, check=False, operators=True)
    original = build_original(request, None, torch.device("cpu"))
    parts = ModelParts(found.plan.programs, found.constants, build_replay(untuned(found.plan)), {})
    tuned = TunedModel(parts, original, "cpu")
    state = original.state_dict()
    layer = {n.removeprefix("model.layers.0."): t for n, t in state.items() if n.startswith("model.layers.0.")}
    merged = {
        "qkv": torch.cat([layer[f"self_attn.{n}_proj.weight"] for n in "qkv"]),
        "o": layer["self_attn.o_proj.weight"],
        "gate_up": torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]),
        "down": layer["mlp.down_proj.weight"],
        "head": state["lm_head.weight"],
    }
    expected, made = {}, {}
    with torch.no_grad():
        inputs = {name: torch.randn(2, 8, w.shape[1]) for name, w in merged.items()}
        expected = {name: functional.linear(inputs[name], w) for name, w in merged.items()}
        with tuned.operators():
            made = {name: functional.linear(inputs[name], w) for name, w in merged.items()}
            norm = functional.rms_norm(inputs["o"], (64,), layer["input_layernorm.weight"], 1e-6)
    for name in merged:
        torch.testing.assert_close(made[name], expected[name])
    torch.testing.assert_close(norm, functional.rms_norm(inputs["o"], (64,), layer["input_layernorm.weight"], 1e-6))
    rows = [row for row in tuned.coverage().rows() if row.program == "operators"]
    assert sum(row.calls for row in rows) == len(merged) + 1
    assert {row.outcome for row in rows} == {"exact"}
