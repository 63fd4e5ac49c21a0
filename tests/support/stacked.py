"""A model for tests that stop a tune on the way: enough different layers that it takes a while."""

import itertools

import torch
from torch import Tensor, nn


class Stacked(nn.Module):
    """Linear layers of different widths with their norms."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 192, 64)) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.LayerNorm(b)) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(x)
