"""The figure of a ledger and the matrix of ranks draw exactly their inputs."""

import numpy as np
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.ledger import Ledger
from shardproof.report.colours import of_rank, rank_legend, tiles
from shardproof.report.ledger_picture import figure
from torch_impl.collectives import all_reduce, ring_shift


def sums(mesh, case):
    x = torch.ones(3, requires_grad=True)
    total = all_reduce(x, mesh["tp"], out="R")
    (total if mesh.rank("cp") else all_reduce(total, mesh["tp"])).sum().backward()


def shifted(mesh, case):
    ring_shift(torch.ones(2), mesh["cp"], 1)


def boxes(canvas):
    """(column, rank, colour) of every box."""
    bars = [patch for patch in canvas.axes[0].patches if patch.get_height() < 1]
    return {(round(b.get_x() + 0.4), round(b.get_y() + 0.35), to_hex(b.get_facecolor())) for b in bars}


def test_a_column_for_each_collective_and_a_box_for_each_rank_in_it():
    canvas = figure(run(sums, CaseSpec("sums", {"cp": 2, "tp": 2})).ledger, "sums")
    panel = canvas.axes[0]
    labels = [label.get_text().split("\n")[0] for label in panel.get_xticklabels()]
    assert labels == ["all_reduce, 12 B"] * 5  # three on the ranks 0 and 1, two on the others
    rectangles = boxes(canvas)
    assert {colour for _, rank, colour in rectangles if rank == 2} == {of_rank(2).lower()}
    assert [len({column for column, rank, _ in rectangles if rank == of}) for of in range(4)] == [3, 3, 2, 2]
    assert [label.get_text() for label in panel.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]
    assert panel.get_title(loc="left") == "sums"


def test_backward_stands_on_grey():
    panel = figure(run(sums, CaseSpec("sums", {"cp": 1, "tp": 2})).ledger).axes[0]
    grey = sorted(round(patch.get_x() + 0.5) for patch in panel.patches if patch.get_height() == 1)
    assert grey == [2]  # of two forward and one backward


def test_a_common_collective_is_one_column():
    canvas = figure(run(shifted, CaseSpec("shifted", {"cp": 2})).ledger)
    labels = [label.get_text().split(",")[0] for label in canvas.axes[0].get_xticklabels()]
    assert sorted(labels) == ["recv", "send"]
    assert len(boxes(canvas)) == 4


def test_no_collectives_make_an_empty_figure():
    assert boxes(figure(Ledger())) == set()


def test_cells_have_the_colours_and_numbers_of_their_ranks():
    canvas = Figure()
    panel = canvas.subplots()
    owners = np.array([[0, 1], [-1, 1]])
    tiles(panel, owners, 2, text=owners, title="who", xlabel="column")
    (image,) = panel.images
    painted = [to_hex(pixel) for row in image.cmap(image.norm(image.get_array())) for pixel in row]
    assert painted == [of_rank(0).lower(), of_rank(1).lower(), "#ffffff", of_rank(1).lower()]
    assert [text.get_text() for text in panel.texts] == ["0", "1", "1"]
    assert (panel.get_title(), panel.get_xlabel()) == ("who", "column")
    rank_legend(canvas, 2)
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == ["rank 0", "rank 1"]
