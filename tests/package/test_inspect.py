import subprocess
import sys
from pathlib import Path

from tune_model.package.inspect import describe
from tune_model.package.read import open_artifact


def test_facts_of_an_artifact(artifact_file: Path):
    facts = describe(open_artifact(artifact_file))
    assert (facts.name, facts.task, facts.dtype, facts.parameters, facts.weight_bytes) == (
        "two-layers",
        "forward",
        "float32",
        144,
        576,
    )
    (program,) = facts.programs
    assert (program.steps, program.forms, program.calls) == (3, {"matmul": 2}, {"aten.mul.Tensor": 1})
    assert program.inputs == (("x", "float32", ("batch", 8)),)
    # 16 rows of 8 floats each: while step 2 runs, v0 and v1 are alive; v0 dies before v2 is made.
    assert program.memory.point == {"batch": 16}
    assert program.memory.activations == 2 * 16 * 8 * 4
    assert [(t.label, t.winner, t.status) for t in facts.tasks] == [
        ("matmul 16x8x8 f32 + relu", "aten", "no gain"),
        ("matmul 1x8x8 f32 + relu", "cpp_small(unroll=8)", "tuned"),
    ]
    assert facts.tasks[1].speedup == 2.0
    assert facts.tasks[1].sites == ("forward batch=1 x2",)
    assert facts.tasks[1].rejected == {"unsupported": 1}
    assert abs(sum(task.share for task in facts.tasks) - 1) < 1e-9
    (kernel,) = facts.kernels
    assert kernel.functions == ("linear_relu",)
    assert kernel.candidates == ("cpp_small(unroll=8)",)
    assert facts.notes == ("rung 1",)
    assert facts.steps == ()


def test_looking_into_an_artifact_needs_no_torch(artifact_file: Path):
    code = f"""
import sys
sys.modules["torch"] = None
from tune_model.package.inspect import describe
from tune_model.package.read import open_artifact
assert describe(open_artifact({str(artifact_file)!r})).name == "two-layers"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
