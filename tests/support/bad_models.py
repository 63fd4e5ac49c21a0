"""Factories of models that cannot be tuned, one fault each."""

import sys

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """Without a fault; the others change what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor | None:
        return torch.relu(self.linear(x))


class Branching(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


class Reading(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Selecting(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Silent(Linear):
    def forward(self, x: Tensor) -> None:
        return None


class Narrow(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(3, 8)


class Leaving(Linear):
    def forward(self, x: Tensor) -> Tensor:
        sys.exit("gone")


class Doubling(Linear):
    """Runs in no dtype but its own: its weights are cast to the configuration's, its input is not."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.double()).float()


class Drawing(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.randn_like(x)


class Undefined(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-1.0 - self.linear(x).square())


class PartlyUndefined(Linear):
    """Not a number where the linear layer is negative, and minus infinity in one place."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.linear(x)) + torch.log(torch.arange(8.0))


class Lazy(Linear):
    """Has no weights until it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())


class Initialised(Lazy):
    """Has been called."""

    def __init__(self) -> None:
        super().__init__()
        self(torch.zeros(2, 8))


class Sparse(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight = nn.Parameter(self.linear.weight.detach().to_sparse())


class Outer(Linear):
    """Has another module inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(8, 8))


def partly_scripted() -> nn.Module:
    return Outer(scripted())


def jit_traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(8, 8), torch.zeros(2, 8))


def quantised() -> nn.Module:
    return Outer(torch.ao.nn.quantized.dynamic.Linear(8, 8))


def exported() -> nn.Module:
    return torch.export.export(nn.Linear(8, 8), (torch.zeros(2, 8),)).module()


def failing() -> nn.Module:
    raise ValueError("no such file:\nweights.bin")


def leaving() -> nn.Module:
    sys.exit("gone")


def number() -> int:
    return 3


not_callable = 3
