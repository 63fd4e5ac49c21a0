"""The tuning of `two_layers`, its weights re-laid out as tune settles layouts; the plain operators won everywhere."""

import msgspec
import two_layers

from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import fingerprint
from tune_model.tune.choice import Tuning
from tune_model.tune.relayout import apply_layouts


def settled(*layouts: tuple[str, str]) -> Tuning:
    """Return it with (slot, layout) for each weight slot that is not plain."""
    tuning = two_layers.tuning(b"")
    choices = tuple(msgspec.structs.replace(c, kernel=Kernel(two_layers.FORM.body)) for c in tuning.choices)
    plan = apply_layouts(tuning.plan, {fingerprint(two_layers.FORM): layouts})
    return msgspec.structs.replace(tuning, plan=plan, choices=choices, code={})
