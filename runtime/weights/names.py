"""Match programs' names of weights with those of a checkpoint: one prefix more or less, tied embeddings."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from tune_model.runtime.errors import TuneModelError

__all__ = ["WeightError", "resolve_names"]


class WeightError(TuneModelError):
    """A checkpoint does not fit the programs: names are missing, or a shape or dtype differs."""


# Ends of names that share one tensor in models with tied embeddings: the output side, then the input side.
_OUTPUT_EMBEDDINGS = ("lm_head.weight", "embed_out.weight", "proj_out.weight", "predictions.decoder.weight")
_INPUT_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)

_SHOWN = 5


def _tied(name: str, names: AbstractSet[str]) -> list[str]:
    """Return the names that may hold the tensor which `name` shares."""
    for own, others in ((_OUTPUT_EMBEDDINGS, _INPUT_EMBEDDINGS), (_INPUT_EMBEDDINGS, _OUTPUT_EMBEDDINGS)):
        if name.endswith(own):
            return [other for other in names if other.endswith(others)]
    return []


def _prefixes(wanted: Sequence[str], present: AbstractSet[str]) -> list[tuple[str, str]]:
    """Return every (cut, add) that may turn the wanted names into names of the checkpoint.

    A base model's own weights lack the prefix that the same weights have inside a model with a head, and vice versa.
    """
    probe = max((name for name in wanted if name not in present), key=len)
    parts = probe.split(".")
    cut = [(".".join(parts[:i]) + ".", "") for i in range(1, len(parts)) if ".".join(parts[i:]) in present]
    added = [("", name[: -len(probe)]) for name in present if name.endswith(f".{probe}")]
    return list(dict.fromkeys([*cut, *sorted(added)]))


def _find(name: str, prefix: tuple[str, str], present: AbstractSet[str]) -> str | None:
    """Return the checkpoint's name for a program's, given what to cut and add."""
    cut, add = prefix
    for candidate in (add + name.removeprefix(cut), name):
        if candidate in present:
            return candidate
    tied = _tied(name, present)
    return tied[0] if len(tied) == 1 else None


def resolve_names(wanted: Sequence[str], present: AbstractSet[str]) -> dict[str, str]:
    """Map the names that programs use to those of the checkpoint.

    Raises:
        WeightError: Some are missing, or could be several.
    """
    found = {name: _find(name, ("", ""), present) for name in wanted}
    missing = [name for name, to in found.items() if to is None]
    if not missing:
        return {name: to for name, to in found.items() if to is not None}
    complete = []
    for prefix in _prefixes(missing, present):
        renamed = {name: to for name in wanted if (to := _find(name, prefix, present)) is not None}
        if len(renamed) == len(wanted):
            complete.append((prefix, renamed))
    if len(complete) == 1:
        return complete[0][1]
    message = f"{len(missing)} of {len(wanted)} weights are missing from the checkpoint: {_listed(missing)}"
    if complete:
        options = " or ".join(repr(add) if add else f"without {cut!r}" for (cut, add), _ in complete)
        raise WeightError(f"{message}; they could be under prefix {options}: pass the weights of one model")
    raise WeightError(f"{message}; it has {len(present)} names: {_listed(sorted(present))}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
