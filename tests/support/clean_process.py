"""A process like a bare server: no compiler, tracer or model library, nothing on PATH, nowhere to write.

What it does is watched: a child process, an import of Dynamo or a file opened for writing ends it with an error.
"""

import os
import subprocess
import sys
from pathlib import Path

ABSENT = ("triton", "transformers", "onnx", "torch._inductor", "safetensors", "click", "rich", "yaml", "jinja2")

PRELUDE = """
import os, resource, sys
for name in {absent!r}:
    sys.modules[name] = None

def watch(event, arguments):
    if event in {{"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "os.spawn"}}:
        stop(97, f"a child process was started: {{event}} {{arguments}}")
    if event == "open" and isinstance(arguments[0], str | bytes) and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        if os.fsdecode(arguments[0]) != os.devnull:
            stop(98, f"a file was opened for writing: {{arguments}}")

def stop(code, what):
    sys.stderr.write(what)
    sys.stderr.flush()
    os._exit(code)

sys.addaudithook(watch)
"""

EPILOGUE = """
assert "torch._dynamo" not in sys.modules, "torch._dynamo was imported"
assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss == 0, "a child process ran"
for task in os.listdir("/proc/self/task"):
    children = open(f"/proc/self/task/{task}/children").read()
    assert not children, f"child processes are running: {children}"
"""


def run_in_clean_process(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` there.

    Args:
        code: Python; may use `sys` and `os`.
        folders: To import from, besides what this process's PYTHONPATH holds.
    """
    paths = [*(str(folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PATH": "",
        "HOME": "/proc/self/fdinfo",  # empty of files, and read-only for root too
        "TMPDIR": "/proc/self/fdinfo",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    program = PRELUDE.format(absent=ABSENT) + code + EPILOGUE
    return subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, env=environment, timeout=120
    )
