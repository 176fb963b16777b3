"""HTML and SVG as trees of elements, so that text is always escaped and elements are always closed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Child = Element | str | None
NOT_IN_A_PAGE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def tag(name: str, /, *children: Child, **attributes: object) -> Element:
    """An element with its children and attributes; None is skipped in both.

    `class_` is the attribute class, `stroke_width` stroke-width.

    >>> as_text(tag("p", "1 < 2", tag("b", "&"), class_="x"))
    '<p class="x">1 &lt; 2<b>&amp;</b></p>'
    """
    element = Element(name)
    for key, value in attributes.items():
        if value is not None:
            element.set(key.rstrip("_").replace("_", "-"), _clean(value))
    return add(element, children)


def add(element: Element, children: Iterable[Child]) -> Element:
    """Add children to an element and return it."""
    for child in children:
        if isinstance(child, str):
            if len(element):
                element[-1].tail = (element[-1].tail or "") + _clean(child)
            else:
                element.text = (element.text or "") + _clean(child)
        elif child is not None:
            element.append(child)
    return element


def prose(text: str) -> list[Child]:
    """The children for a sentence: what stands between two backticks is code.

    >>> [as_text(each) if isinstance(each, Element) else each for each in prose("has `a < b`, not `a`")]
    ['has ', '<code>a &lt; b</code>', ', not ', '<code>a</code>', '']
    """
    parts = re.split(r"`([^`\n]+)`", text)
    return [tag("code", part) if number % 2 else part for number, part in enumerate(parts)]


def svg(width: float, height: float, *children: Child, label: str, **attributes: object) -> Element:
    """A drawing with a text label for screen readers."""
    sizes = {"viewBox": f"0 0 {_clean(width)} {_clean(height)}", "width": width, "height": height}
    return tag("svg", *children, role="img", aria_label=label, **sizes, **attributes)


def as_text(element: Element) -> str:
    return ElementTree.tostring(element, encoding="unicode", method="html")


def _clean(value: object) -> str:
    """Numbers to one decimal; text without characters that a page may not contain, such as ANSI colours."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return NOT_IN_A_PAGE.sub("\N{REPLACEMENT CHARACTER}", str(value))
