"""The program that runs a later part of a prompt: prefill with attention over the cache in place of the part itself.

Made from the prefill program when a model is loaded, so an artifact needs no third phase. Everything but attention
keeps its form and so its tuned kernels.
"""

import msgspec

from tune_model.runtime.program import Apply, Call, Form, Program, Ref, Step, fingerprint

__all__ = ["CONTINUATION", "continuation_of"]

CONTINUATION = "continuation"
"""Name of the program, which no artifact has."""

_APPEND = "tune_model.append_kv"
_WITHIN = "tune_model.causal_attention"
_OVER_CACHE = "tune_model.cached_attention"


def continuation_of(prefill: Program) -> Program | None:
    """Return the program, or `None` where an attention cannot be told which cache it belongs to."""
    renamed: dict[str, str] = {}
    forms: dict[str, Form] = {}
    for key, form in prefill.forms.items():
        body = _over_cache(form.body)
        if body is None:
            return None
        changed = form if body == form.body else msgspec.structs.replace(form, body=body)
        renamed[key] = key if changed is form else fingerprint(changed)
        forms[renamed[key]] = changed
    calls = _over_cache(tuple(s for s in prefill.steps if isinstance(s, Call)))
    if calls is None:
        return None
    remaining = iter(calls)
    steps: tuple[Step, ...] = tuple(
        msgspec.structs.replace(s, form=renamed[s.form]) if isinstance(s, Apply) else next(remaining)
        for s in prefill.steps
    )
    return msgspec.structs.replace(prefill, name=CONTINUATION, forms=forms, steps=steps)


def _over_cache(calls: tuple[Call, ...]) -> tuple[Call, ...] | None:
    """Let every attention in a sequence read the cache that its keys and values were just appended to."""
    made: list[Call] = []
    append: Call | None = None
    for call in calls:
        if call.op == _APPEND:
            append = call
        if call.op != _WITHIN:
            made.append(call)
            continue
        if append is None or len(call.args) < 4 or call.args[1:3] != append.args[2:4]:
            return None
        query, _, _, scale, *settings = call.args
        caches, positions = append.args[:2], append.args[4]
        if not all(isinstance(arg, Ref) for arg in (*caches, positions)):
            return None
        args = (query, *caches, positions, scale, *settings)
        made.append(msgspec.structs.replace(call, op=_OVER_CACHE, args=args))
        append = None
    return tuple(made)
