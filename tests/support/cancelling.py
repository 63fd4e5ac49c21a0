"""Dot products whose terms cancel: long sums of large numbers with a small result."""

import torch

from tune_model.runtime.program import Form


def cancelling(form: Form, seed: int = 0) -> list[torch.Tensor]:
    """Fill a linear form so that each dot product is a small part of the sum of its terms' sizes.

    Along k, term by term, the second half takes the first half's products away again, but for a thousandth of the
    weights. The order of the halves' terms differs, so nothing cancels before the end.
    """
    generator = torch.Generator().manual_seed(seed)
    (m, k), (n, _) = form.parameters[0].type.shape, form.parameters[1].type.shape
    dtype = getattr(torch, form.parameters[0].type.dtype)
    half = k // 2
    order = torch.randperm(half, generator=generator)
    x, w = torch.randn(m, half, generator=generator), torch.randn(n, half, generator=generator)
    small = torch.randn(n, half, generator=generator) * (torch.rand(n, half, generator=generator) < 1e-3)
    x, w = x.to(dtype), w.to(dtype)
    back = (-w.float() + small).to(dtype)[:, order]
    filled = [torch.cat([x, x[:, order]], 1), torch.cat([w, back], 1)]
    rest = [torch.randn(p.type.shape, generator=generator).to(dtype) for p in form.parameters[2:]]
    return [*filled, *rest]
