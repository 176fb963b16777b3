"""Read a page as a browser would, for tests: check that each element is closed, and return its content."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = ("meta", "br", "hr", "img", "input", "link")


@dataclass
class Node:
    """An element: its name, attributes, children in order, and text."""

    name: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def all(self, name: str = "", class_: str = "") -> list[Node]:
        """The elements below of a name and a class, in the order of the page."""
        elements = []
        for child in self.children:
            if isinstance(child, Node):
                if (not name or child.name == name) and (not class_ or class_ in child.classes):
                    elements.append(child)
                elements += child.all(name, class_)
        return elements


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Node("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> where <{self.open[-1].name}> is open"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read(page: str) -> Node:
    """The page as a tree. Errors: AssertionError where an element is not closed, or closed in another."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].name}> is never closed"
    return reader.open[0]
