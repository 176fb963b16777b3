"""The definition of a run, and its rejections."""

import re

import pytest

from shardproof.training.run import Run

REJECTED = [
    (
        {"mesh": {"xp": 2}},
        "--mesh xp: no such axis; the axes are pp, dp_replicate, dp_shard, cp, ep, tp, and dp for dp_shard",
    ),
    (
        {"mesh": {"pp": 4}, "schedule": "zbv"},
        "--schedule ZBVZeroBubble over pp=4 has 8 stages, but the model has 4 layers; use fewer ranks of pp, or a "
        "schedule with fewer stages on each",
    ),
    (
        {"mesh": {"pp": 4, "dp": 2}},
        "--mesh pp=4: 2 micro-batches on each rank of dp=2 cannot be scheduled by 1F1B over pp_size=4 "
        "(n >= pp_size); use fewer ranks of dp or pp, or another schedule",
    ),
    ({"schedule": "interleaved"}, "--schedule 'interleaved' is not one of Interleaved1F1B, InterleavedZeroBubble"),
    ({"dtype": "float16"}, "--dtype 'float16' is not one of float64, float32, bfloat16"),
    ({"mamba": "both"}, "--mamba 'both' is not one of hidden, state"),
    ({"attention": "tree"}, "--attention 'tree' is not one of ring, all_gather, ulysses, usp"),
    ({"steps": 0}, "--steps 0 must be at least 1"),
    ({"mesh": {"dp": 3}}, "--mesh dp=3: cannot share the 4 streams of a step; use one of 1, 2, 4"),
    ({"mesh": {"dp": 0}}, "--mesh dp_shard=0: sizes are integers >= 1; leave out an unused axis"),
    ({"mesh": {"cp": 0}}, "--mesh cp=0: sizes are integers >= 1; leave out an unused axis"),
    (
        {"mesh": {"dp": 2, "dp_shard": 4}},
        "--mesh dp=2,dp_shard=4: dp means dp_shard; give one of them, or dp_replicate and dp_shard",
    ),
    ({"mesh": {"cp": 8}}, "--mesh cp=8: documents are padded for 1, 2, 3, 4, 6 or 12 ranks of cp"),
    ({"mesh": {"tp": 5}}, "--mesh tp=5: cannot share the heads of attention; use one of 1, 2, 3, 4, 6, 12"),
    (
        {"mesh": {"cp": 2, "tp": 4}, "attention": "ulysses"},
        "--attention ulysses: cannot shard the 6 query heads and 3 KV heads of each rank of tp=4 over 2 ranks; use "
        "ring or all_gather, or another --mesh",
    ),
    (
        {"mesh": {"cp": 4, "tp": 4}, "attention": "usp"},
        "--attention usp: cannot shard the 6 query heads and 3 KV heads of each rank of tp=4 over 2 ranks; use ring or "
        "all_gather, or another --mesh",
    ),
    ({"mesh": {"ep": 2}}, "--mesh ep=2: the model has no experts; add --experts, or use dp in place of ep"),
    (
        {"mesh": {"ep": 3}, "has_experts": True},
        "--mesh ep=3: cannot share the 8 experts; use one of 1, 2, 4, 8",
    ),
    (
        {"mesh": {"dp": 4, "ep": 2}, "has_experts": True},
        "--mesh dp=4,ep=2: cannot share the 4 streams of a step; use one of 1, 2, 4",
    ),
    ({"optimizer": "sgd"}, "--optimizer 'sgd' is not one of adamw, muon"),
    ({"clip": 0.0}, "--clip 0 must be positive and finite; leave it out to keep gradients unscaled"),
    ({"resume": True}, "--resume needs --checkpoint DIR, the folder of the saved state"),
    ({"overwrite": True}, "--overwrite needs --checkpoint DIR, the folder of the saved state"),
    (
        {"resume": True, "overwrite": True, "checkpoint": "here"},
        "--resume goes on from the checkpoints, --overwrite replaces them; give one of the two",
    ),
]


@pytest.mark.parametrize(("settings", "text"), REJECTED)
def test_rejection(settings, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Run.on(**{"mesh": {}, **settings})


def test_the_reference_knows_no_mesh():
    runs = [Run.on({"dp": 2}), Run.on({"pp": 2, "cp": 2}, schedule="zbv", checkpoint="here", resume=True)]
    assert runs[0].numbers == runs[1].numbers == runs[1].replace(steps=3, every=1).numbers
    assert all(runs[0].numbers != Run.on({}, **other).numbers for other in ({"seed": 1}, {"dtype": "float32"}))
