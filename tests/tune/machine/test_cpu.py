from tune_model.tune.machine.cpu import parse_cpuinfo, probe_cpu

X86 = """processor\t: 0
model name\t: Some CPU @ 2.40GHz
flags\t\t: fpu sse2 avx avx2 fma f16c bmi1 bmi2 avx512f avx512_bf16 amx_tile ht hypervisor
processor\t: 1
model name\t: Some CPU @ 2.40GHz
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp sve bf16 i8mm cpuid\n"


def test_flags_that_code_may_use_are_kept_sorted() -> None:
    expected = ("amx_tile", "avx", "avx2", "avx512_bf16", "avx512f", "bmi1", "bmi2", "f16c", "fma")
    assert parse_cpuinfo(X86) == ("Some CPU @ 2.40GHz", expected)
    assert parse_cpuinfo(ARM) == ("unknown", ("asimd", "asimddp", "bf16", "i8mm", "sve"))
    assert parse_cpuinfo("") == ("unknown", ())


def test_this_machine() -> None:
    target = probe_cpu()
    assert target.threads >= 1
    assert target.compiler.startswith("g++ ")
    assert target == probe_cpu()
