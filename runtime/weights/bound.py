"""The weights of a loaded model for as long as it lives: reload them, share them with a module, notice when they age.

A weight that was copied (merged, packed, moved, converted) does not follow later changes of what it was made from. What
it came from is watched through torch's version counters and addresses, and compared on demand.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tune_model.runtime.program import Program
from tune_model.runtime.weights.checkpoint import WeightSource
from tune_model.runtime.weights.transforms import BoundWeight, WeightError, bind_each, source_views, weight_packing

__all__ = ["BoundWeights", "SharedMemory", "StaleWeightsWarning"]

_PROBED = 64
"""Elements of a tensor that a thorough look compares."""


class StaleWeightsWarning(UserWarning):
    """What weights were copied from has changed since: the model still computes with the old values."""


class SharedMemory(NamedTuple):
    """How much of a model's weights lies in the memory of the module they came from.

    Attributes:
        shared_bytes: Of weights whose parts are the module's parameters.
        copied_bytes: Of weights that the module holds a second time.
        copied: The checkpoint's names of those.
    """

    shared_bytes: int
    copied_bytes: int
    copied: tuple[str, ...]


class _Origin(NamedTuple):
    """A tensor that a weight was made from, as it was then."""

    name: str
    tensor: "weakref.ref[Tensor]"
    version: int
    address: int
    copied: bool
    probe: Tensor | None


class _Place(NamedTuple):
    """Where a module keeps a tensor."""

    owner: "weakref.ref[nn.Module]"
    attribute: str

    def look(self) -> Tensor | None:
        """Return the tensor that is there now."""
        owner = self.owner()
        if owner is None:
            return None
        held = owner._parameters.get(self.attribute)
        return owner._buffers.get(self.attribute) if held is None else held


class _Kept(NamedTuple):
    """A weight, and whether its memory is this model's to write to."""

    bound: BoundWeight
    own: bool


class BoundWeights:
    """Weights by the programs' names.

    Args:
        programs: Whose weights.
        source: Where they come from; not kept alive.
        device: Where they lie.
        share: Let the source's parameters become views of the weights made from them, where dtype and device agree and
            the layout is no library's own. What they held before is freed weight by weight.

    Raises:
        CheckpointError: The source is a path without readable safetensors.
        WeightError: The source does not fit.
    """

    def __init__(
        self, programs: Sequence[Program], source: WeightSource, device: torch.device, *, share: bool = False
    ) -> None:
        self._programs = tuple(programs)
        self._device = device
        self._remember(source)
        self._kept: list[_Kept] = []
        self._origins: list[_Origin] = []
        taken: set[int] = set()
        for bound in bind_each(self._programs, source, device):
            aliases = _aliases(bound)
            if share and not aliases:
                _become_views(bound, taken)
            taken.update(id(origin) for origin in bound.origins)
            self._origins += _watched(bound)
            self._kept.append(_Kept(bound._replace(origins=()), own=share or not aliases))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every weight."""
        return {name: bound.tensor for bound, _ in self._kept for name in bound.names}

    @property
    def size_bytes(self) -> int:
        """Their memory."""
        return sum(_size_bytes(bound.tensor) for bound, _ in self._kept)

    def shared(self) -> SharedMemory:
        """Say how much lies in the memory of the tensors it was made from."""
        copied = {origin.name for origin in self._origins if origin.copied}
        sizes = [(_size_bytes(bound.tensor), copied.isdisjoint(bound.sources)) for bound, _ in self._kept]
        return SharedMemory(
            sum(size for size, shared in sizes if shared),
            sum(size for size, shared in sizes if not shared),
            tuple(sorted(copied)),
        )

    def stale(self, *, thorough: bool = False) -> tuple[str, ...]:
        """Name the sources that have changed since the weights were made of them, as far as they are still there.

        Args:
            thorough: Compare a sample of their elements too: writing through `parameter.data`, as some tools that merge
                adapters do, moves no version counter.
        """
        found = []
        for origin in self._origins:
            place = self._places.get(origin.name)
            # Another tensor may have been put in its place, and it be gone.
            held = None if place is None else place.look()
            tensor = origin.tensor() if held is None else held
            if tensor is None:
                continue
            changed = _address(tensor) != origin.address
            if origin.copied and not changed:
                changed = _version(tensor) != origin.version
                if thorough and not changed and origin.probe is not None:
                    changed = not torch.equal(_probe(tensor), origin.probe)
            if changed:
                found.append(origin.name)
        return tuple(dict.fromkeys(found))

    def _remember(self, source: WeightSource) -> None:
        """Note which module the weights come from, if it is one, and where in it they are."""
        self._module: weakref.ref[nn.Module] | None = None
        self._places: dict[str, _Place] = {}
        if isinstance(source, nn.Module):
            self._module = weakref.ref(source)
            for path, owner in source.named_modules(remove_duplicate=False):
                for attribute in (*owner._parameters, *owner._buffers):
                    name = f"{path}.{attribute}" if path else attribute
                    self._places[name] = _Place(weakref.ref(owner), attribute)

    def reload(self, source: WeightSource | None = None) -> frozenset[str]:
        """Make all weights again.

        Values are written into the memory that is there, so what was captured or prepared over it stays right; memory
        that belongs to the caller and packed weights are replaced instead. All names, shapes and dtypes are compared
        before anything is written.

        Args:
            source: Where from; by default the module that they came from last, if it was one.

        Returns:
            The programs' names of weights that are other tensors now.

        Raises:
            CheckpointError: The source is a path without readable safetensors. If the disk fails while they are read,
                some weights are new and some are not: reload again.
            WeightError: The source does not fit, or there is none; all weights are as they were.
        """
        if source is None:
            source = None if self._module is None else self._module()
        if source is None:
            raise WeightError("the weights came from no module that is still there; pass the ones to load")
        known = {kept.bound.names: kept for kept in self._kept}
        replaced: set[str] = set()
        remade, origins = [], []
        with torch.no_grad():
            for new in bind_each(self._programs, source, self._device):
                kept, moved = _put(known.get(new.names), new)
                if moved:
                    replaced.update(new.names)
                origins += _watched(new._replace(tensor=kept.bound.tensor))
                remade.append(kept)
        self._kept, self._origins = remade, origins
        self._remember(source)
        return frozenset(replaced)


def _put(old: _Kept | None, new: BoundWeight) -> tuple[_Kept, bool]:
    """Write a weight's new values over its old ones where that may be; otherwise say that it is another tensor now."""
    if old is None:
        return _Kept(new._replace(origins=()), not _aliases(new)), True
    before, after = old.bound.tensor, new.tensor
    if before is after or (_plain(before) and _plain(after) and before.data_ptr() == after.data_ptr()):
        return old, False
    if old.own and weight_packing(new.weight) is None:
        before.copy_(after)
        return old, False
    return _Kept(new._replace(origins=()), not _aliases(new)), True


def _address(tensor: Tensor) -> int | None:
    """Return where a tensor lies, if it lies anywhere: a module's parameter may be sparse by now."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):
        return None


def _plain(tensor: Tensor) -> bool:
    return not tensor.is_mkldnn


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _aliases(bound: BoundWeight) -> bool:
    """Whether a weight is its source's own memory."""
    return (
        len(bound.origins) == 1
        and bound.origins[0] is not None
        and _plain(bound.tensor)
        and bound.origins[0].data_ptr() == bound.tensor.data_ptr()
    )


def _become_views(bound: BoundWeight, taken: set[int]) -> None:
    """Let the sources of a weight be its parts, unless another weight has them."""
    origins = [origin for origin in bound.origins if origin is not None]
    fits = all(o.dtype == bound.tensor.dtype and o.device == bound.tensor.device for o in origins)
    if len(origins) != len(bound.origins) or weight_packing(bound.weight) is not None or not fits:
        return
    views = source_views(bound.weight, bound.tensor, [tuple(o.shape) for o in origins])
    for origin, view in zip(origins, views, strict=True):
        if id(origin) not in taken:
            origin.data = view


def _watched(bound: BoundWeight) -> list[_Origin]:
    """Note what the sources of a weight are like now."""
    origins = [origin for origin in bound.origins if origin is not None]
    if len(origins) != len(bound.origins):
        return []
    parts: Sequence[Tensor | None] = [None] * len(origins)
    if weight_packing(bound.weight) is None:
        parts = source_views(bound.weight, bound.tensor, [tuple(o.shape) for o in origins])
    noted = []
    for name, origin, part in zip(bound.sources, origins, parts, strict=True):
        copied = part is None or part.data_ptr() != origin.data_ptr()
        probe = _probe(origin) if copied else None
        noted.append(_Origin(name, weakref.ref(origin), _version(origin), origin.data_ptr(), copied, probe))
    return noted


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _probe(tensor: Tensor) -> Tensor:
    """Return some elements, spread over the tensor."""
    count = tensor.numel()
    step = max(count // _PROBED, 1)
    return torch.take(tensor.detach(), torch.arange(0, count, step, device=tensor.device))
