"""Which calls are accepted is a function of their arguments: what breaks a rule is rejected, and nothing else is.

Each scheme draws arguments, right and wrong ones, and returns 0 for a call that is accepted, or the number of the rule
that it breaks; the reference has the rules alone.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardproof import check_cases, integers, scheme, values
from torch_impl import vocab_parallel as vp

NEXT_TOKEN = "vocab_parallel.get_next_token_logprobs_from_logits"
PACKED = "vocab_parallel.from_parallel_logits_to_logprobs_packed_sequences"
POSITIONS = 40  # of the stream that offsets must fit


def broken_rule(call, function, beginnings):
    """0, or the number from 1 of the beginning that the message of its rejection has, after the function's name."""
    try:
        call()
    except (TypeError, ValueError) as error:
        name, _, reason = str(error).partition(": ")
        numbers = [n for n, words in enumerate(beginnings, 1) if name == function and reason.startswith(words)]
        if not numbers:
            raise
        return numbers[0]
    return 0


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def rule_of_sampling(x, top_k, top_p, temperature, with_entropy):
    if top_k is not None and not (is_number(top_k) and top_k == int(top_k)):
        return x * 1
    if top_p is not None and not (is_number(top_p) and 0 <= top_p <= 1):
        return x * 2
    if temperature <= 0:
        return x * 3
    is_filtered = (top_k is not None and top_k > 0) or (top_p is not None and top_p < 1)
    return x * (4 if with_entropy and is_filtered else 0)


@scheme(
    reference=rule_of_sampling,
    mesh={"tp": (1, 2)},
    inputs={"x": "b tp=I"},
    outputs="b tp=I",
    dims={"b": (1,)},
    options={
        "top_k": (None, 0, 2, 3, 2.5),
        "top_p": (None, 1.0, 0.5, 0.0, 0.75, 1.5, -0.25, True),
        "temperature": (1.0, 0.5, 2.0, 0.0, -1.0),
        "with_entropy": (False, True),
    },
    nograd=("x",),
    draw={"x": values("ones")},
)
def accepted_sampling_params(mesh, x, top_k, top_p, temperature, with_entropy):
    """Parameters of a sampler are rejected by kind, then by range; an entropy by a filter beside it."""
    params = SimpleNamespace(top_k=top_k, top_p=top_p, temperature=temperature)

    def call():
        vp.get_next_token_logprobs_from_logits(
            x.new_zeros(1, 2, dtype=torch.int64),
            x.new_zeros(1, 2, 4, dtype=torch.float32),
            vocab_parallel_rank=mesh.rank("tp"),
            vocab_parallel_group=mesh["tp"],
            sampling_params=params,
            with_entropy=with_entropy,
        )

    return x * broken_rule(call, NEXT_TOKEN, ("top_k=", "top_p=", "temperature=", "with_entropy=True"))


FLAWS = {
    "logits of integers": "next_token_logits is int64",
    "ids of floats": "input_ids is float32",
    "ids without a batch": "input_ids is [",
}


def rule_of_placements(mesh, x, logits_over_cp, ids, order, flaw):
    cp, is_sharded = mesh["cp"], logits_over_cp == "sharded"
    if flaw:
        return x * (1 + list(FLAWS).index(flaw))
    if ids == "plain":
        is_accepted = not is_sharded and order is None
    elif order == "repeated":
        is_accepted = False
    elif cp == 1:
        is_accepted = True
    else:
        # The order of stored positions belongs to shards of them, which the ids alone cannot be.
        is_accepted = order is not None if is_sharded else ids == "replicated" and order is None
    return x * (0 if is_accepted else 4)


@scheme(
    reference=rule_of_placements,
    mesh={"cp": (1, 2), "tp": (1, 2)},
    inputs={"x": "b cp=I tp=I"},
    outputs="b cp=I tp=I",
    dims={"b": (1,)},
    options={
        "logits_over_cp": ("sharded", "replicated"),
        "ids": ("sharded", "replicated", "plain"),
        "order": (None, "permuted", "repeated"),
        "flaw": (None, None, None, *FLAWS),
    },
    nograd=("x",),
    draw={"x": values("ones")},
)
def accepted_placements(mesh, x, logits_over_cp, ids, order, flaw):
    """DTensor logits go with ids and a stored order that cp shards as it shards them."""
    s, cp = 4, mesh.size("cp")
    is_sharded = logits_over_cp == "sharded"
    dtype = torch.int64 if flaw == "logits of integers" else torch.float32
    logits = x.new_zeros(1, s // cp if is_sharded else s, 3, dtype=dtype)
    logits = DTensor.from_local(logits, mesh.device_mesh, [Shard(1) if is_sharded else Replicate(), Shard(2)])
    stored = x.new_zeros(1, s // cp if ids == "sharded" else s, dtype=torch.int64)
    if flaw in ("ids of floats", "ids without a batch"):
        stored = stored.float() if flaw == "ids of floats" else stored[0]
    if ids != "plain":
        placement = Shard(stored.ndim - 1) if ids == "sharded" else Replicate()
        stored = DTensor.from_local(stored, mesh.device_mesh, [placement, Replicate()])
    places = torch.arange(s, device=x.device)
    index = {None: None, "permuted": places.flip(0), "repeated": 0 * places}[order]
    rules = (*FLAWS.values(), ("next_token_logits is sharded over cp", "seq_index is", "input_ids is sharded over cp"))
    return x * broken_rule(
        lambda: vp.get_next_token_logprobs_from_logits(stored, logits, seq_index=index), NEXT_TOKEN, rules
    )


def rule_of_offsets(mesh, x, lengths, extra, unit):
    padded, multiple = lengths * unit, 2 * mesh["cp"] if mesh["cp"] > 1 else 1
    real = padded + extra
    broken = ((real < 0).any(), (padded % multiple != 0).any(), (real > padded).any(), padded.sum() > POSITIONS)
    number = (jnp.argmax(jnp.stack([*broken, jnp.array(True)])) + 1) % (len(broken) + 1)
    return x * number.astype(x.dtype)


@scheme(
    reference=rule_of_offsets,
    mesh={"cp": (1, 2), "tp": (1, 2)},
    inputs={"x": "b cp=I tp=I", "lengths": "n", "extra": "n"},
    outputs="b cp=I tp=I",
    dims={"b": (1,), "n": (1, 2, 3)},
    options={"unit": (4, 1, 2)},
    nograd=("x",),
    draw={"x": values("ones"), "lengths": integers(0, 5), "extra": integers(-1, 1)},
)
def accepted_offsets(mesh, x, lengths, extra, unit):
    """Offsets ascend, by multiples of 2 cp over ranks, a sequence fits its slot, and the slots fit the stream."""
    offsets = [torch.cat([lengths[:1] * 0, each.cumsum(0)]) for each in (lengths * unit, lengths * unit + extra)]

    def call():
        vp.from_parallel_logits_to_logprobs_packed_sequences(
            x.new_zeros(1, POSITIONS // mesh.size("cp"), 3, dtype=torch.float32),
            x.new_zeros(1, POSITIONS, dtype=torch.int64),
            offsets[0],
            8,
            3 * mesh.rank("tp"),
            3 * mesh.rank("tp") + 3,
            mesh["tp"],
            cp_group=mesh["cp"],
            cu_seqlens=offsets[1],
        )

    rules = ("cu_seqlens: sequence", "cu_seqlens_padded[", "cu_seqlens gives", "cu_seqlens_padded ends")
    return x * broken_rule(call, PACKED, rules)


SCHEMES = (accepted_sampling_params, accepted_placements, accepted_offsets)


@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared):
    check_cases(declared, 60)
