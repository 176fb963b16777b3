"""Draw the pictures that the pages and the README show, with the project's own drawing: `python docs/images.py`."""

from pathlib import Path

from parity_tests.harness import picture
from parity_tests.harness.spec import parse

FOLDER = Path(__file__).with_name("images")


def spec_strings() -> None:
    """A scheme's input and output: who holds which position, and what the other axes promise."""
    axes = ("cp", "tp")
    tensors = {"logits": parse("b s/cp:dual_chunk_swap v/tp", axes), "-> logprob": parse("b s tp=I cp=R", axes)}
    figure = picture.figure(tensors, {"b": 2, "s": 16, "v": 12}, {"cp": 4, "tp": 2})
    figure.savefig(FOLDER / "spec.png", dpi=150)


def layouts() -> None:
    """One dim of 16 positions cut over 4 ranks in each order that needs no lengths."""
    tensors = {name: parse(f"s/cp:{name}", ("cp",)) for name in ("contiguous", "striped", "dual_chunk_swap")}
    picture.figure(tensors, {"s": 16}, {"cp": 4}).savefig(FOLDER / "layouts.png", dpi=150)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    spec_strings()
    layouts()
