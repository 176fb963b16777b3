"""A number and its noun: `1 call`, `2 calls`."""


def counted(number: int, noun: str) -> str:
    """The number and the noun, in the plural unless the number is 1.

    >>> counted(1, "call"), counted(0, "call"), counted(2, "mesh")
    ('1 call', '0 calls', '2 meshes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("sh", "s", "ch")) else "s"
    return f"{number} {noun}{ending}"
