"""The baseline: the form's own ATen sequence, as PyTorch would run it. Accepts every task on every machine."""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel, Requirement, Within
from tune_model.runtime.program import Call, Form, Items
from tune_model.tune.candidate import ALL_KINDS, Built, Config, Effort, Rejected
from tune_model.tune.target import Target

__all__ = ["FAMILY", "Aten", "holds_sizes"]

_MATMULS = {"aten.linear.default", "aten.mm.default", "aten.addmm.default"}
_TAKES_SIZES = {
    "_unsafe_view",
    "arange",
    "as_strided",
    "constant_pad_nd",
    "empty",
    "expand",
    "full",
    "narrow",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones",
    "repeat",
    "reshape",
    "slice",
    "split",
    "split_with_sizes",
    "unflatten",
    "view",
    "zeros",
}


class Aten:
    """See the module."""

    name = "aten"
    version = 1
    kinds = ALL_KINDS

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept everything."""
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the only configuration."""
        return ()

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield the only configuration."""
        yield ()

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State the body as a kernel."""
        return Built(Kernel(task.form.body, requires=_pinned_sizes(task.form)), {})


def _pinned_sizes(form: Form) -> tuple[Requirement, ...]:
    """Demand exactly the task's sizes when a call of the concrete body may hold one of them as a number."""
    products = {name for call in form.body if call.op in _MATMULS for name in call.results}
    if not any(holds_sizes(call, products) for call in form.body):
        return ()
    pinned: list[Requirement] = []
    for parameter in form.parameters:
        for axis, size in enumerate(parameter.type.shape):
            if not isinstance(size, int):
                raise TypeError(f"a task's form must be concrete; {parameter.name} has size {size!r}")
            pinned.append(Within(f"{parameter.name}.size{axis}", size, size))
    return tuple(pinned)


def holds_sizes(call: Call, products: set[str | None]) -> bool:
    """Say whether a call holds integers that may be sizes of the task, so that it serves those sizes only.

    Args:
        call: One call of a concrete body.
        products: Names of what the body's matmuls make.
    """
    parts = call.op.split(".")
    if parts[0] != "aten" or parts[1] not in _TAKES_SIZES:
        return False
    if parts[1] in {"slice", "split", "split_with_sizes"} and getattr(call.args[0], "name", None) in products:
        # Halves of a product: its columns are the weight's rows, which no call changes.
        axis = call.args[-1] if parts[1] != "slice" else (call.args[1] if len(call.args) > 1 else 0)
        return axis not in {1, -1}
    integers = [a for a in (*call.args[1:], *(v for _, v in call.kwargs)) if isinstance(a, int | Items)]
    return bool(integers)


FAMILY = Aten()
