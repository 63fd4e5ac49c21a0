"""Operators inside fused forms, by themselves."""

import small_models
from small_programs import call, f32

from tune_model.extract.bare import bare_form, with_bare_forms
from tune_model.extract.plan import extract
from tune_model.runtime.program import Apply, Form, Parameter, bind_form, fingerprint


def test_a_single_operator_is_its_own_bare_form():
    """So an operator that the model runs alone and one inside a fused step are the same task."""
    plan = extract(small_models.decoder("llama"), check=False).plan
    singles = [f for p in plan.programs for f in p.forms.values() if len(f.body) == 1 and bare_form(f) is not None]
    assert {f.body[0].op for f in singles} == {"aten.linear.default", "aten.rms_norm.default"}
    for form in singles:
        assert bare_form(form) == form


def test_the_linear_of_a_fused_form():
    form = Form(
        "matmul",
        ("d0",),
        (Parameter("a0", f32("d0", 8)), Parameter("a1", f32(6, 8), "weight"), Parameter("a2", f32("d0", 6))),
        (
            call("aten.linear.default", "@a0", "@a1", results=("t0",)),
            call("aten.add.Tensor", "@a2", "@t0", results=("t1",)),
        ),
        (Parameter("t1", f32("d0", 6)),),
    )
    bare = bare_form(form)
    assert bare is not None
    assert bare.parameters == form.parameters[:2]
    assert bare.body == (call("aten.linear.default", "@a0", "@a1", results=("t0",)),)
    assert bare.results == (Parameter("t0", f32("d0", 6)),)
    assert bind_form(bare, (3,)).results[0].type.shape == (3, 6)


def test_the_norm_behind_a_residual():
    form = Form(
        "reduction",
        ("d0",),
        (Parameter("a0", f32("d0", 8)), Parameter("a1", f32("d0", 8)), Parameter("a2", f32(8), "weight")),
        (
            call("aten.add.Tensor", "@a0", "@a1", results=("t0",)),
            call("aten.rms_norm.default", "@t0", (8,), "@a2", 1e-5, results=("t1",)),
        ),
        (Parameter("t0", f32("d0", 8)), Parameter("t1", f32("d0", 8))),
    )
    bare = bare_form(form)
    assert bare is not None
    assert [p.role for p in bare.parameters] == ["activation", "weight"]
    assert bare.body == (call("aten.rms_norm.default", "@a0", (8,), "@a1", 1e-5, results=("t0",)),)
    assert bare.results == (Parameter("t0", f32("d0", 8)),)


def test_forms_without_one_operator_have_none():
    pointwise = Form(
        "pointwise",
        ("d0",),
        (Parameter("a0", f32("d0")),),
        (call("aten.relu.default", "@a0", results=("t0",)),),
        (Parameter("t0", f32("d0")),),
    )
    assert bare_form(pointwise) is None


def test_bare_forms_are_tuned_on_request_and_run_by_nobody():
    request = small_models.decoder("llama")
    plain, asked = (extract(request, check=False, operators=o).plan for o in (False, True))
    before, after = {t.key: t for t in plain.tasks}, {t.key: t for t in asked.tasks}
    assert before.keys() < after.keys()
    assert [p.steps for p in asked.programs] == [p.steps for p in plain.programs]
    new = [after[key] for key in after.keys() - before.keys()]
    assert {t.task.form.body[0].op for t in new} >= {"aten.linear.default"}
    assert all(site.occurrences == 0 for task in new for site in task.sites)
    lightest = min(t.weight for t in plain.tasks)
    assert all(0 < task.weight < lightest for task in new)
    for program in asked.programs:
        applied = {s.form for s in program.steps if isinstance(s, Apply)}
        bare = {fingerprint(b) for f in program.forms.values() if (b := bare_form(f)) is not None}
        assert bare <= program.forms.keys()
        assert program.forms.keys() - applied <= bare
        assert with_bare_forms(program) == program
