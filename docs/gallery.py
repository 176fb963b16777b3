"""The gallery: every figure of the committed notebooks, on one page with its caption. `make docs` writes both."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from shardproof.report import themes

ROOT = Path(__file__).resolve().parents[1]

HEAD = """# Gallery

Every figure of the project, with what makes it. A rank has the same colour in all of them, and its number beside it;
lines and kinds of actions have colours of their own. All three sets stay apart for every kind of colour vision, which
`parity_tests/harness/report/test_colours.py` tests.
"""
# A file of docs/images, the light one of two, one line, and the command that makes it.
PICTURES = (
    ("layouts.svg", "Four layouts of one dim over four ranks, and the causal work of each.", "python docs/images.py"),
    ("report.png", "The page of a verdict: the collective that is one too many.", "python docs/report_picture.py"),
    ("spec.svg", "Spec strings: who holds what, and how gradients come back.", "python docs/images.py"),
    (
        "schedule.svg",
        "A pipeline schedule on paper.",
        "shardproof schedule zbv --pp 4 --microbatches 8 --figure schedule.svg",
    ),
    (
        "training.png",
        "A training run on four ranks beside one device.",
        "shardproof train --mesh dp=2,cp=2 --figure training.png",
    ),
    (
        "crossovers.svg",
        "Attention over 8 to 8,192 ranks: ring, all-gather, Ulysses and USP on a model of links.",
        "python docs/images.py",
    ),
    ("injected_bugs.svg", "How many examples it takes to catch an injected bug.", "make bugs"),
    ("tour.svg", "Error over budget of every built-in scheme, and three injected bugs.", "python docs/images.py tour"),
)
# One line for each figure of a notebook, in its order.
CAPTIONS = {
    "01_layouts_by_eye": (
        "Five layouts of one dim, and the causal work of each rank.",
        "A matrix sharded over two axes, in four ways.",
        "What a spec string says of values and of gradients.",
        "The collectives of the gather, forward and backward.",
    ),
    "02_vocab_parallel_logprob": (
        "Who owns which column of the logits.",
        "Memory and bytes of four ways to the same log-probability.",
    ),
    "03_dual_chunk_swap_and_packing": (
        "Whose queries see which keys, in three layouts.",
        "A packed stream sharded inside each sequence, and as one sequence.",
        "The mask of a packed stream, in the colours of the ranks that compute it.",
        "What padding to a multiple of twice the ranks costs.",
        "Where targets are wrong that were shifted after sharding.",
    ),
    "04_ring_and_ulysses": (
        "A ring step by step: whose keys are where, and how much of the work that is.",
        "Ulysses: positions of all heads become all positions of some heads.",
        "What goes over the wire with Ulysses.",
        "What goes over the wire with the ring.",
        "Bytes that each exchange sends, over the number of ranks.",
    ),
    "05_mamba2_two_ways": (
        "Who holds what while a Mamba2 mixer runs, in two ways.",
        "How that mistake runs on from the first border.",
        "Bytes of both ways, over the length of the sequence.",
    ),
    "06_fsdp2_and_tp": (
        "Three weights under FSDP2 and tensor parallelism.",
        "Every parameter's gradient with two norms in the plan, and without them.",
    ),
    "07_pipeline_schedules": (
        "Seven schedules of four ranks and eight micro-batches.",
        "Activations that each rank holds.",
        "Idle time over the number of micro-batches.",
        "1F1B with a slow last stage.",
        "A schedule from a file, beside 1F1B.",
    ),
    "08_write_your_own_scheme": (
        "Who holds what in a norm and a projection over sharded columns.",
        "How that error falls with the width, and does not go away.",
        "Its collectives.",
        "The collectives of the version in one.",
    ),
    "09_find_the_injected_bug": (
        "Every parameter's gradient of a model with an injected bug.",
        "All tensors of one step in the order of execution, and the first that differs.",
        "The timeline of its collectives: one too many.",
        "What the loss curve would have shown.",
    ),
    "10_one_run_every_axis": (
        "One training run on four meshes: the same curve, and how far apart.",
        "A trace of its first step, healthy and with an injected bug.",
    ),
    "11_cost_on_large_meshes": (
        "Attention over 8 to 8,192 ranks: the time of a step, of its communication, and bytes between hosts.",
        "Which way to share attention has the shortest step, for sequences and worlds, on two kinds of host.",
        "A Mamba mixer over 8 to 1,024 ranks: heads exchanged for tokens, or states passed on.",
    ),
    "12_where_a_token_goes": (
        "The experts of each token, and the ranks that have them.",
        "Bytes of two exchanges over the experts of a token, on 4 and on 16 ranks.",
        "The collectives of a layer of experts, forward and backward.",
    ),
    "13_a_sharded_muon_step": (
        "Singular values after one to five steps of Newton-Schulz.",
        "Bytes of a matrix that travels to its owner, and of one that stays sharded.",
        "The collectives of a step by owners.",
        "The collectives of a step over shards.",
    ),
}


def figures(notebook: Path) -> list[bytes]:
    """Every PNG among a notebook's outputs, in order."""
    images: list[str] = []
    for cell in json.loads(notebook.read_text())["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            images += ["".join(data["image/png"])] if "image/png" in data else []
    return [base64.b64decode(text) for text in images]


def files() -> dict[str, bytes]:
    """Every figure, under its notebook's name and its number."""
    notebooks = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    return {f"{n.stem}-{k}.png": png for n in notebooks for k, png in enumerate(figures(n), 1)}


def shown(name: str, caption: str) -> str:
    """The lines that show a file of docs/images, with its dark twin if there is one."""
    path = f"images/{name}"
    if not (ROOT / "docs" / path).exists():
        return "Not drawn in this build, since it takes minutes.\n"
    has_twin = themes.path_of(ROOT / "docs" / path, "dark").exists()
    return themes.directives(path, caption) if has_twin else f"![{caption}]({path})\n"


def page() -> str:
    """The text of the page."""
    parts = [HEAD, "\n## Pages and commands\n"]
    parts += [f"\n{caption} `{command}`\n\n{shown(name, caption)}" for name, caption, command in PICTURES]
    for stem, captions in CAPTIONS.items():
        number, _, words = stem.partition("_")
        title = words.replace("_", " ").capitalize()
        parts.append(f"\n## {number} {title}\n\n[The notebook](../notebooks/{stem}.ipynb)\n")
        parts += [
            f"\n{caption}\n\n![{caption}](images/gallery/{stem}-{k}.png)\n" for k, caption in enumerate(captions, 1)
        ]
    return "".join(parts)


def write(docs: Path) -> None:
    """Write `gallery.md` and its figures below a folder of pages."""
    folder = docs / "images" / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    for name, png in files().items():
        (folder / name).write_bytes(png)
    (docs / "gallery.md").write_text(page())
