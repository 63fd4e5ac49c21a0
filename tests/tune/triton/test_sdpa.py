import pytest
import torch
from attention_forms import causal_form, decode_form, sdpa_form
from devices import cuda_target
from form_runs import fill, relative_error, run_body

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.kernel import CudaLaunch
from tune_model.runtime.operators.allowed import resolve
from tune_model.runtime.program import Call
from tune_model.tune.candidate import Effort
from tune_model.tune.families.sdpa import FAMILY


def tasks(form):
    return Task(form, NumericRules())


def backends(form) -> list[str]:
    return [str(dict(c)["backend"]) for c in FAMILY.configurations(tasks(form), cuda_target(), Effort.QUICK)]


def test_what_each_backend_can_take():
    assert backends(causal_form(heads=2)) == ["flash", "cudnn", "efficient", "math"]
    assert backends(sdpa_form(masked=True)) == ["cudnn", "efficient", "math"]
    assert backends(causal_form(dtype="float32")) == ["efficient", "math"]


def test_grouped_keys_and_values_are_never_repeated_where_a_fast_backend_reads_them_as_they_are():
    assert backends(causal_form(heads=8, kv_heads=2)) == ["flash", "cudnn", "math"]
    for backend in backends(causal_form(heads=8, kv_heads=2)):
        built = FAMILY.build(tasks(causal_form(heads=8, kv_heads=2)), (("backend", backend),), cuda_target())
        assert not [s for s in built.kernel.steps if isinstance(s, Call) and "expand" in s.op]
        assert sum(isinstance(s, CudaLaunch) for s in built.kernel.steps) == 1  # the append
    assert FAMILY.accepts(tasks(decode_form()), cuda_target()).reason == "unsupported"
    assert FAMILY.accepts(tasks(causal_form(sinks=True)), cuda_target()).detail.endswith("with sinks")


@pytest.mark.parametrize(
    "form", [causal_form(append=False), sdpa_form(), sdpa_form(masked=True)], ids=["causal", "plain", "masked"]
)
def test_math_equals_the_body(form):
    """The one backend that a CPU has under the same name; also runs the mask's conversion."""
    inputs = fill(form)
    if len(inputs) == 4:
        inputs[3][..., 0] = True
    built = FAMILY.build(tasks(form), (("backend", "math"),), cuda_target())
    mine = [t.clone() for t in inputs]
    result = bind_kernel(built.kernel, form, {}, torch.device("cpu"))(mine)[0]
    theirs = [t.clone() for t in inputs]
    assert relative_error(result, run_body(form, theirs)[0]) < 1e-2
    for ours, wanted in zip(mine, theirs, strict=True):
        assert torch.equal(ours.nan_to_num(9.0), wanted.nan_to_num(9.0))


@pytest.mark.parametrize("form", [causal_form(), sdpa_form(masked=True)], ids=["causal", "masked"])
def test_every_call_exists_with_these_arguments(form):
    """Arguments are checked against the operators' schemas; the operators themselves need a GPU."""
    for backend in backends(form):
        built = FAMILY.build(tasks(form), (("backend", backend),), cuda_target())
        for step in built.kernel.steps:
            if isinstance(step, CudaLaunch):
                continue
            operator = resolve(step.op)
            if step.op.startswith("aten."):
                schema = operator._schema
                assert len(step.args) <= len([a for a in schema.arguments if not a.kwarg_only])
                assert {k for k, _ in step.kwargs} <= {a.name for a in schema.arguments}
                assert len(step.results) == len(schema.returns)


def test_the_efficient_backends_preparation_is_right():
    """Repeated heads and the padded bias, run up to the attention itself, which then runs in float32 on a CPU."""
    form = sdpa_form(masked=True, length=33)
    inputs = fill(form)
    built = FAMILY.build(tasks(form), (("backend", "efficient"),), cuda_target())
    from form_runs import call

    from tune_model.runtime.program import bind_call
    from tune_model.runtime.replay import slot_sizes

    slots = dict(zip(("a0", "a1", "a2", "a3"), inputs, strict=True))
    for step in built.kernel.steps[:-1]:
        call(bind_call(step, slot_sizes(form)), slots)
    bias = slots["b_expanded"]
    assert bias.shape == (2, 4, 33, 33)
    assert bias.stride(2) % 16 == 0
    assert torch.equal(bias == 0, inputs[3].expand(2, 4, 33, 33))
