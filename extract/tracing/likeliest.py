"""The greedy choice as a step of the decode program, so that it is tuned like everything else between the matmuls.

An argmax over a vocabulary of 128k is a reduction over few long rows, for which torch has no good kernel.
"""

import msgspec

from tune_model.extract.layout import make_type
from tune_model.runtime.generation.sampling import LIKELIEST
from tune_model.runtime.program import Call, Output, Program, Ref

__all__ = ["add_likeliest_token"]

_LOGITS = "logits"


def add_likeliest_token(program: Program) -> Program:
    """Give a decode program one more output after its logits: every row's most likely token, (batch, 1) int64."""
    logits = next(o.value for o in program.outputs if o.name == _LOGITS)
    type_ = program.values[logits]
    choice = Call("aten.argmax.default", (Ref(logits), -1), (), (LIKELIEST,))
    return msgspec.structs.replace(
        program,
        steps=(*program.steps, choice),
        values={**program.values, LIKELIEST: make_type("int64", type_.shape[:-1])},
        outputs=(*program.outputs, Output(LIKELIEST, LIKELIEST)),
    )
