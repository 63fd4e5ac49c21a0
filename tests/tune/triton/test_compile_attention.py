"""Attention kernels as the compiler sees them."""

import re

import pytest
import triton
from attention_forms import causal_form, chunk_form, decode_form, sdpa_form, turned_form
from devices import cuda_target
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.kernel import CudaLaunch, Pointer, Within
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.families import triton_decode_attention, triton_flash_attention
from tune_model.tune.triton.launch import Launch, specialise

DECODE, FLASH = triton_decode_attention.FAMILY, triton_flash_attention.FAMILY

LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def configs(family, form: Form) -> list[Config]:
    return list(family.configurations(Task(form, NumericRules()), cuda_target(), Effort.BALANCED))


def compiled(family, form: Form, config: Config) -> list[str]:
    plan = family.plan(Task(form, NumericRules()), config)
    assert not isinstance(plan, Rejected), plan
    texts = []
    for launch in plan.launches:
        assert isinstance(launch, Launch)
        s = specialise(launch)
        source = ASTSource(s.function, dict(s.signature), dict(s.constants), dict(s.attributes))
        options = {
            "num_warps": launch.options.num_warps,
            "num_stages": launch.options.num_stages,
            "launch_pdl": launch.options.programmatic,
        }
        texts.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
    return texts


def test_decode_copies_keys_ahead_sixteen_bytes_at_a_time():
    form = decode_form(**LLAMA, length=8448, context=(8191, 8191))
    text = compiled(DECODE, form, configs(DECODE, form)[0])[0]
    assert "cp.async.cg.shared.global" in text
    assert "cp.async.ca" not in text
    assert "mma" in text


def test_the_cache_is_asked_for_before_the_predecessor_is_waited_for():
    form = decode_form(**LLAMA, batch=1, length=8448, context=(8191, 8191))
    config = next(c for c in configs(DECODE, form) if ("prefetch", True) in c)
    text = compiled(DECODE, form, config)[0]
    asked, waited = text.index("cp.async.bulk.prefetch.L2.global"), text.index("griddepcontrol.wait")
    assert asked < waited
    # The position that says what to ask for may be the last step's: past the first level, and read again.
    (early,) = re.findall(r"ld\.global\.cg\.\w+ \{[^}]*\}, \[ (%rd\d+) \+ 0 \]", text)
    assert text.index("ld.global.cg") < asked
    assert re.search(rf"ld\.global\.b\d+ \{{[^}}]*\}}, \[ {early} \+ 0 \]", text[waited:])


@pytest.mark.parametrize("row", [128, 144])
def test_how_far_slots_lie_apart_is_compiled_in_where_they_are_dense(row: int):
    form = decode_form(**LLAMA, batch=1, length=512, context=(500, 500), row=row)
    plan = DECODE.plan(Task(form, NumericRules()), configs(DECODE, form)[0])
    assert not isinstance(plan, Rejected)
    fixed = [r for r in plan.requires if isinstance(r, Within) and str(r.expression).endswith(".stride2")]
    assert fixed == ([Within(f"{name}.stride2", 128, 128) for name in ("a0", "a1")] if row == 128 else [])


def test_rows_of_different_length_are_split_further():
    alike, uneven = (
        dict(configs(DECODE, decode_form(**LLAMA, batch=16, length=16384, context=context))[0])["splits"]
        for context in ((14335, 14335), (2047, 14335))
    )
    assert (alike, uneven) == (1, 4)


def test_a_cache_of_odd_rows_is_not_asked_for():
    form = decode_form(batch=1, heads=8, kv_heads=2, head_dim=40, length=512, context=(0, 500))
    assert any(("pdl", True) in c for c in configs(DECODE, form))
    assert not [c for c in configs(DECODE, form) if ("prefetch", True) in c]


def test_the_last_split_joins_in_the_same_launch():
    form = decode_form(**LLAMA, batch=1, length=8448, context=(8191, 8191))
    config = next(c for c in configs(DECODE, form) if ("last_joins", True) in c)
    (text,) = compiled(DECODE, form, config)
    assert "atom.global.gpu.acq_rel.add" in text
    assert "ld.global.cg" in text


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_heads_turned_within_the_attention_compile_for_every_architecture(arch: int, normal: bool):
    form = turned_form(**LLAMA, batch=1, length=8448, context=(8191, 8191), normal=normal)
    task, target = Task(form, NumericRules()), cuda_target(arch)
    assert DECODE.accepts(task, target) is None
    first = next(iter(DECODE.configurations(task, target, Effort.BALANCED)))
    built = DECODE.build(task, first, target)
    assert isinstance(built, Built), built
    assert built.spill_bytes == 0
    # What is made is no slot, and other batches are served by the same kernel.
    names = {r.name for r in form.parameters} | {"out"}
    assert not [r for r in built.kernel.requires if unmet(r, slot_sizes(form), {}) is not None]
    other = turned_form(**LLAMA, batch=7, length=4096, context=(100, 100), normal=normal)
    assert not [r for r in built.kernel.requires if unmet(r, slot_sizes(other), {}) is not None]
    slots = {
        a.slot
        for step in built.kernel.steps
        if isinstance(step, CudaLaunch)
        for a in step.arguments
        if isinstance(a, Pointer)
    }
    assert slots <= names | {w.name for w in built.kernel.workspaces}


def test_keys_are_still_copied_ahead_where_heads_are_turned_first():
    form = turned_form(**LLAMA, batch=1, length=8448, context=(8191, 8191))
    text = compiled(DECODE, form, configs(DECODE, form)[0])[0]
    assert "cp.async.cg.shared.global" in text
    assert "cp.async.ca" not in text


def test_splits_are_no_more_than_there_are_blocks():
    form = decode_form(**LLAMA, batch=1, length=256, context=(99, 99))
    values = [dict(c) for c in configs(DECODE, form)]
    assert all((v["splits"] - 1) * v["block_n"] < 100 for v in values)


@pytest.mark.parametrize(
    "form",
    [
        causal_form(**LLAMA, length=2048, max_length=2048),
        causal_form(**LLAMA, length=2048, max_length=2048, window=512, softcap=30.0, sinks=True),
        sdpa_form(heads=12, head_dim=64, length=512, mask=("bool", (2, 1, 1, 512)), dtype="bfloat16"),
        chunk_form(**LLAMA, new=64, length=4096),
    ],
    ids=["causal", "window", "padding", "chunk"],
)
def test_many_queries_use_hoppers_instructions(form: Form):
    text = compiled(FLASH, form, configs(FLASH, form)[0])[-1]
    assert "wgmma.mma_async" in text
    assert "cp.async.cg.shared.global" in text


@pytest.mark.slow
@pytest.mark.parametrize("family", [DECODE, FLASH])
def test_every_corner_of_the_space_compiles(family):
    form = decode_form(**LLAMA, length=2048) if family is DECODE else causal_form(**LLAMA, length=512, max_length=512)
    seen: dict = {}
    for config in configs(family, form):
        for pair in config:
            seen.setdefault(pair, config)
    corners = list(dict.fromkeys(seen.values()))
    found = [family.build(Task(form, NumericRules()), config, cuda_target()) for config in corners]
    refused = [built for built in found if not isinstance(built, Built)]
    assert {r.reason for r in refused} <= {"spills", "shared memory", "registers"}, refused
    assert len(refused) <= len(corners) // 2


def test_a_masks_broadcast_dims_stay_broadcast():
    form = sdpa_form(heads=4, head_dim=64, length=64, mask=("bool", (2, 1, 1, 64)))
    built = FLASH.build(Task(form, NumericRules()), configs(FLASH, form)[0], cuda_target())
    assert isinstance(built, Built), built
    assert {Within("a3.size1", 1, 1), Within("a3.size2", 1, 1)} <= set(built.kernel.requires)
    other = sdpa_form(heads=4, head_dim=64, length=64, mask=("bool", (2, 1, 64, 64)))
    assert [r for r in built.kernel.requires if unmet(r, slot_sizes(other), {})]
    longer = sdpa_form(batch=3, heads=4, head_dim=64, length=77, mask=("bool", (3, 1, 1, 77)))
    assert not [r for r in built.kernel.requires if isinstance(r, Within) and unmet(r, slot_sizes(longer), {})]


def test_what_is_refused_says_why():
    task = Task(decode_form(), NumericRules())
    assert FLASH.accepts(task, cuda_target()).detail == "one query per row over a cache; expected several"
    odd = sdpa_form(mask=("int64", (2, 1, 33, 33)))
    assert FLASH.accepts(Task(odd, NumericRules()), cuda_target()).detail == "a int64 mask of 4 dims; expected 4"


def test_the_append_is_one_launch_before_the_attention():
    form = causal_form(**LLAMA, length=512, max_length=1024)
    built = FLASH.build(Task(form, NumericRules()), configs(FLASH, form)[0], cuda_target())
    assert isinstance(built, Built), built
    append, attend = built.kernel.steps
    assert isinstance(append, CudaLaunch)
    assert isinstance(attend, CudaLaunch)
    assert append.entry == "append"


def test_parameters_are_spelled_alike():
    """Descents move along parameters: every configuration of a family names the same ones in the same order."""
    form = decode_form(**LLAMA)
    assert len({tuple(name for name, _ in c) for c in configs(DECODE, form)}) == 1
    names = [name for name, _ in configs(DECODE, form)[0]]
    assert names == ["splits", "block_n", "num_warps", "num_stages", "last_joins", "pdl", "prefetch"]
