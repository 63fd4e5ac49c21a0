"""SVG as text: escaped, with coordinates of one decimal, so that equal facts draw equal bytes."""

from collections.abc import Iterable
from html import escape

__all__ = ["circle", "document", "element", "line", "number", "path", "text"]


def number(value: float) -> str:
    """Return a coordinate: one decimal, none where it is zero."""
    rounded = round(value, 1)
    return str(int(rounded)) if rounded == int(rounded) else str(rounded)


def element(name: str, content: str = "", title: str = "", **attributes: str | float) -> str:
    """Return an element.

    Args:
        name: Of the element.
        content: SVG inside it, already escaped.
        title: Text that a browser shows when the element is pointed at.
        attributes: Numbers become coordinates; `_` in names becomes `-`, and a trailing one is dropped (`class_`).
    """
    parts = [name]
    for key, value in attributes.items():
        shown = number(value) if isinstance(value, int | float) else escape(value, quote=True)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    inner = (f"<title>{escape(title)}</title>" if title else "") + content
    return f"<{' '.join(parts)}>{inner}</{name}>" if inner else f"<{' '.join(parts)}/>"


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def circle(x: float, y: float, radius: float, class_: str, title: str = "") -> str:
    """Return a dot."""
    return element("circle", title=title, cx=x, cy=y, r=radius, class_=class_)


def text(x: float, y: float, content: str, class_: str, anchor: str = "start") -> str:
    """Return a line of text."""
    return element("text", escape(content, quote=False), x=x, y=y, class_=class_, text_anchor=anchor)


def path(points: Iterable[tuple[float, float]], class_: str) -> str:
    """Return a line through points."""
    steps = " ".join(f"{'L' if i else 'M'}{number(x)} {number(y)}" for i, (x, y) in enumerate(points))
    return element("path", d=steps, class_=class_)


def document(width: float, height: float, content: Iterable[str], label: str, class_: str) -> str:
    """Return a whole drawing that scales with its place; `label` says what it shows to those who cannot see it."""
    box = f"0 0 {number(width)} {number(height)}"
    return element("svg", "".join(content), viewBox=box, role="img", aria_label=label, class_=class_)
