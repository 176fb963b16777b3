"""The figures' colours for every kind of colour vision, by the matrices of Machado, Oliveira and Fernandes (2009)."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.colors import to_rgb

from shardproof.report.colours import (
    LINES,
    LINES_ON_DARK,
    RANKS,
    ink,
    line,
    linear,
    lines,
    luminance,
    of_rank,
    of_ranks,
    rank_map,
    shade,
)
from torch_impl.pipelining.simulation import COLOURS as KINDS

# CIELAB's distance of two colours. 2 is just seen side by side; at 24 they are not confused across a figure.
APART = 24.0
CONTRAST = 4.5  # of text on its ground: WCAG 2, level AA

VISIONS = {
    "normal": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour, vision):
    seen = np.clip(np.asarray(VISIONS[vision]) @ linear(colour), 0, 1)
    t = TO_XYZ @ seen / TO_XYZ.sum(1)
    x, y, z = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def apart(one, other, vision):
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


def test_white_and_black_are_a_hundred_apart():
    assert round(apart("#ffffff", "#000000", "normal")) == 100
    assert apart("#123456", "#123456", "no red") == 0


@pytest.mark.parametrize("vision", VISIONS)
def test_neighbouring_ranks_stay_apart_and_so_do_any_of_four(vision):
    around = [*pairwise(RANKS), (RANKS[-1], RANKS[0]), *combinations(RANKS[:4], 2)]
    assert {pair for pair in around if apart(*pair, vision) < APART} == set()


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize(
    "colours", [LINES, LINES_ON_DARK, tuple(KINDS.values())], ids=["lines", "lines on dark", "kinds of actions"]
)
def test_lines_and_kinds_of_actions_stay_apart(colours, vision):
    assert {pair for pair in combinations(colours, 2) if apart(*pair, vision) < APART} == set()


def test_red_and_green_of_a_traffic_light_do_not():
    assert apart("#aa5500", "#887700", "normal") > APART > apart("#aa5500", "#887700", "no green")


@pytest.mark.parametrize("ground", [*RANKS])
def test_a_number_can_be_read_on_its_rank(ground):
    text = luminance({"black": "#000000", "white": "#ffffff"}[ink(ground)])
    light, dark = max(text, luminance(ground)), min(text, luminance(ground))
    assert (light + 0.05) / (dark + 0.05) > CONTRAST


def test_a_rank_has_one_colour_wherever_it_is_drawn():
    assert of_ranks(8) == list(RANKS) and len(set(RANKS)) == 8
    assert of_rank(8) == of_rank(0)
    painted = rank_map(4)["cmap"]
    assert [tuple(round(255 * x) for x in painted(rank / 3)[:3]) for rank in range(4)] == [
        tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in RANKS[:4]
    ]


def test_each_line_has_a_distinct_colour_and_mark():
    looks = [(line(number)["color"], line(number)["marker"]) for number in range(len(LINES))]
    assert len(set(looks)) == len({colour for colour, _ in looks}) == len({mark for _, mark in looks}) == len(LINES)


def test_lines_and_greys_follow_the_ground():
    assert lines() == LINES and shade(0.9) == to_rgb("0.9")
    with rc_context({"axes.facecolor": "#101010", "text.color": "#f0f0f0"}):
        assert lines() == LINES_ON_DARK and line(4)["color"] == LINES_ON_DARK[4]
        assert shade(1) == to_rgb("#101010") and shade(0) == to_rgb("#f0f0f0")
