"""Row kernels as the compiler sees them: legal for Hopper, and with accesses of 16 bytes."""

import re

import pytest
import triton
from devices import cuda_target
from form_builder import FormBuilder
from row_forms import argmax, gelu_chain, normal_rope, rms_norm, rope, softmax
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.kernel import Multiple
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Config, Effort, Family, Rejected
from tune_model.tune.families import triton_pointwise, triton_rows, triton_split_rows
from tune_model.tune.triton.launch import KernelPlan, Launch, specialise

ROWS, SPLIT, POINTWISE = triton_rows.FAMILY, triton_split_rows.FAMILY, triton_pointwise.FAMILY


def column_sum(rows: int, columns: int) -> Form:
    """A sum over leading dims, as extract states it: columns along memory become rows."""
    b = FormBuilder("reduction")
    return b.form(b.call("sum.dim_IntList", b.input((columns, rows), "bfloat16", (1, columns)), [-1]))


def layer_norm(rows: int, columns: int) -> Form:
    b = FormBuilder("reduction")
    x, w, c = b.input((rows, columns), "bfloat16"), b.input((columns,), "bfloat16"), b.input((columns,), "bfloat16")
    return b.form(b.call("layer_norm.default", x, [columns], w, c))


def swiglu(elements: int) -> Form:
    b = FormBuilder()
    x, y = b.input((elements,), "bfloat16"), b.input((elements,), "bfloat16")
    return b.form(b.call("mul.Tensor", b.call("silu.default", x), y))


def configs(family: Family, form: Form) -> list[Config]:
    return list(family.configurations(Task(form, NumericRules()), cuda_target(), Effort.BALANCED))


def planned(family, form: Form, config: Config | None = None) -> KernelPlan:
    plan = family.plan(Task(form, NumericRules()), config or configs(family, form)[0])
    assert not isinstance(plan, Rejected), plan
    return plan


def compiled(plan: KernelPlan) -> list[str]:
    texts = []
    for launch in plan.launches:
        assert isinstance(launch, Launch)
        s = specialise(launch)
        source = ASTSource(s.function, dict(s.signature), dict(s.constants), dict(s.attributes))
        options = {"num_warps": launch.options.num_warps, "launch_pdl": launch.options.programmatic}
        texts.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
    return texts


def accesses(ptx: str) -> set[str]:
    """The widths of loads and stores, and of copies to shared memory."""
    return set(re.findall(r"(?:ld|st)\.global\S*?(v\d\.b\d+|\.b\d+)\b", ptx)) | set(
        re.findall(r"cp\.async\.c[ag]", ptx)
    )


@pytest.mark.parametrize(
    ("family", "form", "launch"),
    [
        (ROWS, rms_norm(16, 4096), 0),
        (ROWS, rms_norm(7, 4000), 0),
        (ROWS, softmax(4096, 8192, "bfloat16"), 0),
        (ROWS, column_sum(4096, 4096), 0),
        (POINTWISE, swiglu(1 << 20), 0),
        (POINTWISE, rope(2048, 40, 128), 0),
        (POINTWISE, gelu_chain(2048, 4096), 0),
        (ROWS, normal_rope(2048, 32, 128), 0),
        (SPLIT, softmax(16, 131072, "bfloat16"), 1),
        (SPLIT, argmax(4, 262144), 0),
        (SPLIT, layer_norm(4, 262144), 1),
        (SPLIT, column_sum(32768, 1024), 0),
    ],
    ids=lambda value: value.body[0].op if isinstance(value, Form) else getattr(value, "name", value),
)
def test_rows_are_read_sixteen_bytes_at_a_time(family, form: Form, launch: int):
    """Only what there is one of per row is narrower."""
    text = compiled(planned(family, form))[launch]
    rows = [w for w in re.findall(r"ld\.global\S*?(v\d\.b\d+|\.b\d+)\b", text) if w.startswith("v")]
    assert rows
    assert set(rows) == {"v4.b32"}, accesses(text)


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_a_rotary_embedding_compiles_for_every_architecture(arch: int):
    task, target = Task(rope(64, 8, 128), NumericRules()), cuda_target(arch)
    built = POINTWISE.build(task, next(iter(POINTWISE.configurations(task, target, Effort.QUICK))), target)
    assert not isinstance(built, Rejected), built
    assert built.spill_bytes == 0


def test_no_element_of_a_rotary_embedding_asks_which_half_it_lies_in():
    assert "selp" not in compiled(planned(POINTWISE, rope(2048, 40, 128)))[0]


def test_stages_copy_ahead_into_shared_memory():
    config = next(c for c in configs(ROWS, rms_norm(16, 4096)) if ("stages", 3) in c)
    assert "cp.async.cg" in accesses(compiled(planned(ROWS, rms_norm(16, 4096), config))[0])


def test_a_vector_of_one_row_is_not_spread_over_rows():
    """Triton gives a matrix of one row a layout in which every thread holds all columns of a row's parts."""
    plan = planned(SPLIT, layer_norm(4, 262144))
    second = plan.launches[1]
    assert isinstance(second, Launch)
    assert len(re.findall(r"ld\.global\S*v4", compiled(plan)[1])) <= 8


def test_what_wide_masks_were_promised_is_demanded():
    """Of elements always, of rows only where rows lie along memory."""
    multiples = [r for r in _demands(POINTWISE, swiglu(1 << 10)) if isinstance(r, Multiple)]
    assert {r.of for r in multiples} == {16}
    assert not [r for r in _demands(ROWS, gelu_norm()) if isinstance(r, Multiple)]


def gelu_norm() -> Form:
    b = FormBuilder("reduction")
    return b.form(b.call("rms_norm.default", b.call("gelu.default", b.input((48, 64))), [64], None, 1e-6))


def _demands(family: Family, form: Form):
    built = family.build(Task(form, NumericRules()), configs(family, form)[0], cuda_target())
    assert not isinstance(built, Rejected), built
    return built.kernel.requires


def test_few_long_rows_are_split_and_many_are_not():
    assert configs(SPLIT, softmax(4, 262144, "bfloat16"))
    assert SPLIT.accepts(Task(softmax(8192, 8192), NumericRules()), cuda_target()).detail.endswith("need no splitting")
    assert SPLIT.accepts(Task(gelu_chain(4, 64), NumericRules()), cuda_target()).detail == "nothing is reduced"


@pytest.mark.slow
@pytest.mark.parametrize("family", [ROWS, SPLIT])
@pytest.mark.parametrize("form", [layer_norm(16, 131072), argmax(16, 131072)], ids=["layer_norm", "argmax"])
def test_every_corner_of_the_space_compiles(family: Family, form: Form):
    task, target = Task(form, NumericRules()), cuda_target()
    seen = {}
    for config in configs(family, form):
        for name, value in config:
            seen.setdefault((name, value), config)
    corners = list(dict.fromkeys(seen.values()))
    refused = [built for config in corners if isinstance(built := family.build(task, config, target), Rejected)]
    assert {r.reason for r in refused} <= {"spills", "shared memory", "registers"}, refused
    assert len(refused) <= len(corners) // 2
