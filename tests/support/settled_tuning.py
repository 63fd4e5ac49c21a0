"""The handmade tuning with its weights re-laid out, as tune settles layouts; the plain operators won everywhere."""

import handmade
import msgspec

from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import fingerprint
from tune_model.tune.choice import Tuning
from tune_model.tune.relayout import apply_layouts


def settled(*layouts: tuple[str, str]) -> Tuning:
    """Return it with (slot, layout) for each weight slot that is not plain."""
    tuning = handmade.tuning(b"")
    choices = tuple(msgspec.structs.replace(c, kernel=Kernel(handmade.FORM.body)) for c in tuning.choices)
    plan = apply_layouts(tuning.plan, {fingerprint(handmade.FORM): layouts})
    return msgspec.structs.replace(tuning, plan=plan, choices=choices, code={})
