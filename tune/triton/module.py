"""Generated `@triton.jit` functions: from source text to a function that Triton can read the source of.

Triton reads a function's source through `inspect`, which asks `linecache`; the text is registered there under a name
made from its hash, so nothing is written to disk.
"""

import hashlib
import linecache
from typing import Any

__all__ = ["PREAMBLE", "load_function"]

PREAMBLE = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice
from tune_model.tune.triton.kernels import numeric
"""


def load_function(body: str, name: str) -> Any:
    """Define the `@triton.jit` function `name` that `body` (after `PREAMBLE`) contains."""
    source = PREAMBLE + body
    file = f"tune_model_generated_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    # The text is ours, printed from typed nodes; nothing in it comes from a model but numbers and slot names.
    namespace: dict[str, Any] = {"__name__": file.removesuffix(".py")}
    exec(compile(source, file, "exec"), namespace)  # noqa: S102
    return namespace[name]
