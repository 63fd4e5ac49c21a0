"""From a request to tasks, on whole models."""

import hashlib
from collections import Counter
from typing import Any

import msgspec
import pytest
import small_models
import torch

from tune_model.extract.checking.equivalence import check_equivalence
from tune_model.extract.plan import Extraction, extract, lower
from tune_model.extract.regions.group import Grouping
from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.extract.task import Plan
from tune_model.runtime.program import Apply


def plan_of(request: Request) -> Plan:
    return extract(request, check=False).plan


def kinds(plan: Plan) -> list[Counter[str]]:
    return [Counter(p.forms[s.form].kind for s in p.steps if isinstance(s, Apply)) for p in plan.programs]


@pytest.fixture(scope="module")
def llama() -> Extraction:
    return extract(small_models.decoder("llama"))


def test_a_llama_layer_is_eight_regions(llama: Extraction):
    """Norm, qkv, rotation, attention, o with residual, norm, gated up, down with residual; per model the angles, the
    last norm and the head, and when decoding the greedy choice. The first norm looks its rows up in the embedding."""
    expected = Counter(matmul=2 * 4 + 1, reduction=2 * 2 + 1, pointwise=2 + 1, attention=2)
    assert kinds(llama.plan) == [expected, expected + Counter(reduction=1)]
    assert {s.op for s in llama.plan.skipped} == {"aten.index.Tensor"}
    bodies = [[c.op for c in f.body] for p in llama.plan.programs for f in p.forms.values() if f.kind == "reduction"]
    assert ["aten.embedding.default", "aten.rms_norm.default"] in bodies


def test_phases_share_forms(llama: Extraction):
    prefill, decode = llama.plan.programs
    forms = prefill.forms | decode.forms
    different = [forms[key] for key in set(prefill.forms) ^ set(decode.forms)]
    assert Counter(form.kind for form in different) == Counter(attention=2, reduction=1)
    assert [c.op for form in different if form.kind == "reduction" for c in form.body] == ["aten.argmax.default"]


def test_tasks_do_not_grow_with_layers(llama: Extraction):
    deep = plan_of(small_models.decoder("llama", num_hidden_layers=5))
    assert {t.key for t in deep.tasks} == {t.key for t in llama.plan.tasks}
    assert sum(t.weight for t in deep.tasks) > 2 * sum(t.weight for t in llama.plan.tasks)


def test_task_keys_do_not_depend_on_library_versions(llama: Extraction):
    """Equal under transformers 5.17 and 5.24. Records go by these keys: change them knowingly."""
    keys = "".join(sorted(t.key for t in llama.plan.tasks))
    assert hashlib.sha256(keys.encode()).hexdigest()[:12] == "4084d2d9d798"


def test_weights_are_merged_in_both_phases_alike(llama: Extraction):
    merged = [{w.sources for w in p.weights if len(w.sources) > 1} for p in llama.plan.programs]
    assert merged[0] == merged[1]
    assert sorted(len(s) for s in merged[0]) == [2, 2, 3, 3]


def residuals(plan: Plan) -> list[list[str]]:
    """What the regions that add a residual are, per program."""
    return [
        sorted({f.kind for f in p.forms.values() if any(c.op == "aten.add.Tensor" for c in f.body)} - {"pointwise"})
        for p in plan.programs
    ]


def test_the_other_groupings_are_rivals_where_they_are_asked_for(llama: Extraction):
    assert llama.plan.rivals == ()
    found = extract(small_models.decoder("llama"), widest=Grouping(sums_with_norms=True))
    assert msgspec.structs.replace(found.plan, rivals=(), notes=()) == msgspec.structs.replace(llama.plan, notes=())
    assert {k: v.tolist() for k, v in found.constants.items()} == {k: v.tolist() for k, v in llama.constants.items()}
    sums = [f"{name}: residual sums with the norms" for name in ("prefill", "decode")]
    assert [rival.what for rival in found.plan.rivals] == [sums[1], sums[0], "; ".join(sums)]
    assert residuals(found.plan) == [["matmul"], ["matmul"]]
    assert [residuals(rival.plan) for rival in found.plan.rivals] == [
        [["matmul"], ["reduction"]],
        [["reduction"], ["matmul"]],
        [["reduction"], ["reduction"]],
    ]
    for rival in found.plan.rivals:
        assert kinds(rival.plan) == kinds(found.plan)
        for mine, other in zip(found.plan.programs, rival.plan.programs, strict=True):
            assert (mine.inputs, mine.outputs, mine.weights) == (other.inputs, other.outputs, other.weights)
            assert mine.constants == other.constants
    # Both groupings were compared with the eager model.
    count = [int(plan.notes[-1].split("float32: ")[1].split()[0]) for plan in (llama.plan, found.plan)]
    assert count[1] == 2 * count[0]


@pytest.mark.parametrize(("model_type", "usual"), [("llama", 8), ("qwen3", 9)])
def test_heads_may_be_made_within_the_attention_over_the_cache(model_type: str, usual: int):
    """A decoder layer at decode becomes seven regions, whether heads are rotated only or normed before."""
    request = small_models.decoder(model_type)
    found = extract(request, widest=Grouping(heads_with_attention=True))
    (rival,) = found.plan.rivals
    assert rival.what == "decode: rotary embedding within the attention"
    (prefill, decode), (same, fused) = kinds(found.plan), kinds(rival.plan)
    assert prefill == same
    assert sum((decode - fused).values()) == 2 * (usual - 7)
    assert fused["attention"] == 2
    labels = [t.label for t in rival.plan.tasks if t.task.form.kind == "attention" and t.label.endswith("embedding")]
    assert len(labels) == len(next(p for p in request.phases if p.name == "decode").grid["batch"])
    assert all(("+ rms_norm + rotary" in label) == (model_type == "qwen3") for label in labels)
    attention = next(t for t in rival.plan.tasks if t.label in labels)
    apart = next(t for t in found.plan.tasks if t.label == attention.label.partition(" +")[0])
    # What is read and written in between is saved, and the work is the same.
    assert attention.size_bytes < apart.size_bytes + sum(
        t.size_bytes for t in found.plan.tasks if "rotary" in t.label and t.sites[0].point == attention.sites[0].point
    )
    assert attention.flops > apart.flops


def test_a_model_without_residual_sums_before_norms_has_no_rivals():
    config = {"model_type": "vit", **small_models.SIZES, "image_size": 32, "patch_size": 8}
    config |= {"num_hidden_layers": 0}
    request = Request(TransformersSource(config=config), "float32", "forward", (Phase("forward", {"batch": (1,)}),))
    assert extract(request, check=False, widest=Grouping(True, True)).plan.rivals == ()


def test_constants_come_with_their_values(llama: Extraction):
    keys = {c.key for p in llama.plan.programs for c in p.constants}
    assert keys == set(llama.constants)
    assert all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in llama.constants.values())


def test_the_notes_say_that_the_programs_were_compared(llama: Extraction):
    assert "compared with the eager model" in llama.plan.notes[-1]


def test_a_bert_layer_is_seven_regions():
    config = {
        "model_type": "bert", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 32,
    }  # fmt: skip
    request = Request(
        TransformersSource(config=config), "float32", "encoder", (Phase("forward", {"batch": (1,), "sequence": (8,)}),)
    )
    (found,) = kinds(plan_of(request))
    assert found == Counter(matmul=2 * 4 + 1, reduction=2 * 2 + 1, attention=2, pointwise=1)


def test_lowered_programs_compute_what_the_model_computes():
    assert check_equivalence(small_models.decoder("qwen3"), lambda raw: lower(raw).trace)


OTHERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in set(small_models.DECODERS) - {"qwen3", "llama"}},
    "codegen": {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8},
    "glm4": {"head_dim": 16},
    "helium": {"head_dim": 16},
    "nemotron": {},
    "persimmon": {},
    "stablelm": {},
    "starcoder2": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(OTHERS))
def test_lowered_programs_compute_what_other_models_compute(model_type: str):
    assert check_equivalence(small_models.decoder(model_type, **OTHERS[model_type]), lambda raw: lower(raw).trace)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["siglip_vision_model", "dinov2", "beit"])
def test_lowered_programs_compute_what_vision_models_compute(model_type: str):
    """Siglip pools with one query per picture."""
    config = {"model_type": model_type, **small_models.SIZES, "image_size": 32, "patch_size": 8}
    request = Request(TransformersSource(config=config), "float32", "forward", (Phase("forward", {"batch": (1, 2)}),))
    assert check_equivalence(request, lambda raw: lower(raw).trace)
