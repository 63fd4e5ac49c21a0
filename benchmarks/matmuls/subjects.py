"""Matmuls whose search is judged."""

from collections.abc import Iterable

from bench.exhaustive import Subject

from matmuls.forms import linear_form
from matmuls.shapes import Matmul

__all__ = ["subjects_of"]


def subjects_of(rows: Iterable[Matmul]) -> list[Subject]:
    """Return the linear layers as subjects of an exhaustive race."""
    return [Subject(row.name, linear_form(row.m, row.n, row.k), {"m": row.m, "n": row.n, "k": row.k}) for row in rows]
