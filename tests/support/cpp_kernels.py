"""Nests as C++ in one library, called with ctypes."""

import ctypes
import math
from collections.abc import Sequence

import torch

from tune_model.runtime.expression import evaluate
from tune_model.runtime.launch.cpu_library import find_entry, load_library
from tune_model.runtime.program import Form, Parameter
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.cpp.compile import compile_library, header
from tune_model.tune.cpp.emit import Printed, Shape, print_nest
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.target import CpuTarget


class Library:
    """Every nest compiled once, with one shape."""

    def __init__(self, nests: dict[str, LoopNest], target: CpuTarget, shape: Shape) -> None:
        self.printed: dict[str, Printed] = {}
        sources = [header("vector.h"), header("parallel.h")]
        for k, (name, nest) in enumerate(nests.items()):
            self.printed[name] = print_nest(nest, shape, f"entry{k}")
            sources.append(self.printed[name].source)
        code = compile_library("\n".join(sources), target)
        assert isinstance(code, bytes), code
        library = load_library(code)
        self.entries = {name: find_entry(library, f"entry{k}") for k, name in enumerate(nests)}

    def run(self, name: str, form: Form, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs = [poisoned(r) for r in form.results]
        slots = {p.name: t for p, t in zip((*form.parameters, *form.results), (*inputs, *outputs), strict=True)}
        printed = self.printed[name]
        pointers = (ctypes.c_void_p * len(printed.pointers))(*(slots[s].data_ptr() for s in printed.pointers))
        values = slot_sizes(form)
        sizes = (ctypes.c_int64 * max(1, len(printed.sizes)))(*(evaluate(z, values) for z in printed.sizes))
        self.entries[name](pointers, sizes)
        return outputs


def poisoned(result: Parameter) -> torch.Tensor:
    """Allocate a result full of what must be overwritten."""
    dtype = getattr(torch, result.type.dtype)
    poison = math.nan if dtype.is_floating_point else dtype == torch.bool or 99
    if result.type.strides is None:
        return torch.full(result.type.shape, poison, dtype=dtype)
    return torch.empty_strided(result.type.shape, result.type.strides, dtype=dtype).fill_(poison)
