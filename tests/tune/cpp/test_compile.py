import hashlib
import subprocess
from pathlib import Path

import msgspec
import pytest

from tune_model.runtime.launch.cpu_library import find_entry, load_library
from tune_model.tune.candidate import Rejected
from tune_model.tune.cpp.compile import (
    CompilerMissingError,
    compile_library,
    compiler_flags,
    compiler_version,
    digest,
)
from tune_model.tune.cpp.library import full_source
from tune_model.tune.machine.cpu import probe_cpu

TARGET = probe_cpu()
SOURCE = full_source(
    'extern "C" __attribute__((visibility("default"))) void entry(void *const *, const int64_t *) {'
    " Floats x{}; x = op_exp(x) + op_log(x); volatile float y = x[0]; (void)y;"
    " parallel(nullptr, nullptr, nullptr, 0, 1); }"
)


def test_same_source_same_bytes_and_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_library(SOURCE, TARGET)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    second = compile_library(SOURCE, TARGET)
    assert isinstance(first, bytes)
    assert first == second
    assert digest(first) == hashlib.sha256(first).hexdigest()
    for text in (b"/tmp", str(tmp_path).encode(), b"kernel.cpp", b"GNU C++", b".note.gnu.build-id"):
        assert text not in first
    assert list(tmp_path.iterdir()) == []


def test_only_libm_and_libc_are_needed(tmp_path: Path) -> None:
    """A server has torch's OpenMP runtime but no second one, and no compiler's own libraries."""
    code = compile_library(SOURCE, TARGET)
    assert isinstance(code, bytes)
    (tmp_path / "kernel.so").write_bytes(code)
    listing = subprocess.run(["readelf", "-d", "kernel.so"], cwd=tmp_path, capture_output=True, text=True, check=True)
    needed = {line.rsplit("[", 1)[1].rstrip("]") for line in listing.stdout.splitlines() if "NEEDED" in line}
    assert all(name.startswith(("libm.", "libc.")) for name in needed), needed
    find_entry(load_library(code), "entry")


def test_compiler_errors_are_values() -> None:
    refused = compile_library("int entry( { return 0; }", TARGET)
    assert isinstance(refused, Rejected)
    assert refused.reason == "compiler"
    assert "error" in refused.detail
    assert len(refused.detail) <= 2000


def test_no_compiler_is_said_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissingError, match=r"no g\+\+ on PATH; .*Install it"):
        compile_library(SOURCE, TARGET)
    with pytest.raises(CompilerMissingError):
        compiler_version()


def test_flags_follow_the_target_not_this_machine() -> None:
    narrow = msgspec.structs.replace(TARGET, isa=("avx2", "fma"))
    wide = msgspec.structs.replace(TARGET, isa=("avx2", "avx512_bf16", "avx512f", "fma"))
    arm = msgspec.structs.replace(TARGET, machine="aarch64", isa=("asimd",))
    assert "-mavx512f" not in compiler_flags(narrow)
    assert "-mavx512f" in compiler_flags(wide)
    assert not any(flag.startswith("-m") for flag in compiler_flags(arm))
    assert not any("native" in flag or "fast-math" in flag for t in (narrow, wide, arm) for flag in compiler_flags(t))


@pytest.mark.parametrize("isa", [(), ("avx512bw", "avx512dq", "avx512f", "avx512vl", "avx2", "f16c", "fma")])
def test_headers_compile_for_other_machines(isa: tuple[str, ...]) -> None:
    if TARGET.machine != "x86_64":
        pytest.skip("flags of x86-64")
    use = (
        'extern "C" __attribute__((visibility("default"))) void entry(void *const *p, const int64_t *) {'
        " Floats x = load((const float *)p[0]); x = fused(op_erf(x), op_tanh(x), op_sqrt(op_floor(x)));"
        " store((uint16_t *)p[1], to_bfloat16(x));"
        " store((uint16_t *)p[2], to_float16(from_bfloat16(to_bfloat16(x)))); }"
    )
    assert isinstance(compile_library(full_source(use), msgspec.structs.replace(TARGET, isa=isa)), bytes)
