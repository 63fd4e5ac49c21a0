"""Memory with a fence on both sides: what a kernel writes outside the tensor it was given shows.

A stray write often does no harm where it happens and ruins a neighbour in the deployed program. So while candidates are
checked and timed, results and caches lie between zones of a known pattern. What must not be written at all, inputs and
the gaps between a result's elements, is compared with what it was.
"""

from typing import Final

import torch

__all__ = ["Fences", "StrayWriteError", "digest"]

ZONE_BYTES: Final = 256 << 10
"""Of each zone: some rows of most results, and a multiple of every alignment, so a tensor lies as it would alone."""

_PATTERN: Final = 0xA5


class StrayWriteError(Exception):
    """A kernel wrote outside its results. Internal; the candidate is rejected and its process replaced."""


class _Plot:
    """One allocation: its elements, the zones around them, and which of the elements are a tensor's."""

    def __init__(self, elements: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        self.elements = elements
        self.zones = (("before", before), ("behind", after))
        self.gaps: torch.Tensor | None = None


class Fences:
    """Allocations that are watched together."""

    def __init__(self) -> None:
        self._plots: list[_Plot] = []

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return so many elements, uninitialised, in one dimension, between two zones (`inputs.Allocate`)."""
        end = ZONE_BYTES + count * dtype.itemsize
        raw = torch.empty(end + ZONE_BYTES, dtype=torch.uint8, device=device)
        raw.fill_(_PATTERN)
        plot = _Plot(raw[ZONE_BYTES:end].view(dtype), raw[:ZONE_BYTES], raw[end:])
        self._plots.append(plot)
        return plot.elements

    def close(self, tensors: list[torch.Tensor]) -> None:
        """Watch the gaps between the elements of tensors that lie in the allocations, in the same order, as well."""
        for plot, tensor in zip(self._plots, tensors, strict=True):
            if tensor.numel() < plot.elements.numel():
                gaps = torch.ones(plot.elements.shape, dtype=torch.bool, device=tensor.device)
                gaps.as_strided(tensor.shape, tensor.stride()).fill_(False)
                plot.gaps = gaps
                # The tensor's own elements keep what they hold.
                plot.elements.view(torch.uint8).view(-1, plot.elements.itemsize)[gaps] = _PATTERN

    def check(self, names: list[str]) -> None:
        """Look at everything around the tensors.

        Args:
            names: Of the allocations, in order, for the error.

        Raises:
            StrayWriteError: Something was written there.
        """
        for plot, name in zip(self._plots, names, strict=True):
            for where, zone in plot.zones:
                _check_zone(zone, where, name)
            if plot.gaps is not None:
                between = plot.elements.view(torch.uint8).view(-1, plot.elements.itemsize)[plot.gaps]
                if not bool((between == _PATTERN).all()):
                    raise StrayWriteError(f"wrote between the rows of {name}")


def digest(value: torch.Tensor) -> int | None:
    """Return a sum over all bytes of a tensor's memory, gaps included; `None` for a library's own opaque layout."""
    if value.layout is not torch.strided or value.numel() == 0:
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    flat = value.as_strided((extent,), (1,)).view(torch.uint8)
    whole = flat.numel() // 8 * 8 if flat.storage_offset() % 8 == 0 else 0
    rest = int(flat[whole:].sum(dtype=torch.int64))
    return rest + (int(flat[:whole].view(torch.int64).sum()) if whole else 0)


def _check_zone(zone: torch.Tensor, where: str, name: str) -> None:
    clean = zone == _PATTERN
    if bool(clean.all()):
        return
    written = torch.nonzero(~clean).flatten()
    nearest = len(zone) - int(written[-1]) if where == "before" else int(written[0]) + 1
    zone.fill_(_PATTERN)
    raise StrayWriteError(f"wrote {len(written)} bytes {where} {name}, the nearest {nearest} away from it")
