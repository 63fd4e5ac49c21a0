"""Which operations are measured at which sizes."""

from typing import Any, Final, NamedTuple

from bench.exhaustive import Subject

from reducing.operations import OPERATIONS, operation_named
from tune_model.extract.cost import size_bytes
from tune_model.runtime.program import Form

__all__ = ["LARGE", "REGRET", "SMALL", "SMALL_REGRET", "Row", "subjects_of"]


class Row(NamedTuple):
    """An operation over a matrix.

    Attributes:
        operation: Its name.
        rows: Of the matrix.
        columns: Of the matrix.
    """

    operation: str
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """The row's name in the result file."""
        return f"{self.operation} {self.rows}x{self.columns}"

    @property
    def form(self) -> Form:
        """What is tuned."""
        return operation_named(self.operation).form(self.rows, self.columns)

    @property
    def facts(self) -> dict[str, Any]:
        """What the result file says of the row besides its times."""
        return {
            "operation": self.operation,
            "rows": self.rows,
            "columns": self.columns,
            "size_bytes": size_bytes(self.form),
            "chain": operation_named(self.operation).chain,
        }


# One row of a decode step, a batch of them, a prompt, a training batch; a vocabulary of logits for many and for few.
_SIZES: Final = ((1, 4096), (64, 4096), (2048, 4096), (32768, 8192), (16, 131072), (4, 262144))
_CHAIN_SIZES: Final = ((64, 4096), (2048, 4096), (32768, 8192))

LARGE: Final = tuple(
    Row(operation.name, rows, columns)
    for rows, columns in _SIZES
    for operation in OPERATIONS
    if not operation.chain or (rows, columns) in _CHAIN_SIZES
)

# Every regime twice or more: few and many rows, short, long and ragged ones, with and without a pass that writes.
REGRET: Final = tuple(
    Row(operation, rows, columns)
    for operation, rows, columns in (
        ("rms_norm", 1, 4096),
        ("rms_norm", 2048, 4096),
        ("residual+rms_norm", 16, 4096),
        ("residual+rms_norm", 8192, 1024),
        ("layer_norm", 512, 768),
        ("layer_norm", 4096, 5120),
        ("residual+layer_norm", 16384, 768),
        ("softmax", 4, 262144),
        ("softmax", 16, 131072),
        ("softmax", 2048, 2048),
        ("softmax", 65536, 128),
        ("scale+mask+softmax", 1536, 577),
        ("log_softmax", 64, 32000),
        ("log_softmax", 16, 128256),
        ("sum", 32768, 1024),
        ("sum", 8, 131072),
        ("mean", 4096, 4096),
        ("var", 1024, 8192),
        ("argmax", 1, 128256),
        ("argmax", 16, 128256),
    )
)

SMALL: Final = tuple(
    Row(name, rows, columns)
    for name in ("residual+rms_norm", "softmax", "argmax")
    for rows, columns in ((3, 256), (2, 5000))
)
"""To try the benchmark itself in seconds."""

SMALL_REGRET: Final = SMALL[2:3]


def subjects_of(rows: tuple[Row, ...]) -> list[Subject]:
    """Return rows as subjects of an exhaustive race."""
    return [Subject(row.name, row.form, row.facts, told=row.operation == "softmax") for row in rows]
