"""Parity of small decoders in stages: ties of every kind, and shapes that are told again."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_ref.pipelining import reference
from parity_tests.pipelining import tied_decoder
from parity_tests.pipelining.sharded_decoder import NAMES as DECODER_NAMES
from parity_tests.pipelining.tied_decoder import INTO, LAYERS, OUT, RATE, SHARED_LAYERS, TIES
from parity_tests.pipelining.written_orders import fill_and_drain, two_in_flight, with_late_messages
from shardproof import CaseSpec, scheme, token_below, values
from shardproof.engines.engines import run
from torch_impl.pipelining import Times, simulate, stage_to_rank
from torch_impl.pipelining._torch_compat import _in_separate_buffers
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.order import Action
from torch_impl.pipelining.partition import generate_hf_model_fqn_per_model_part
from torch_impl.pipelining.schedule import build_pipeline_schedule

LOOPED = ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
FLOATS = ("target", "table", "layers", "norm")
REPLICATED = {"token": "b s", "target": "b s v pp=R"}
STAGES = 4
# Of the ends of a model, in layers. 1 + 2.1 and 3 + 0.1 are one float and two numbers, so that they are no tie.
COSTS = {
    "nothing": {"embed_cost": 0.0, "head_cost": 0.0},
    "embedding": {"embed_cost": 0.5, "head_cost": 0.0},
    "head": {"embed_cost": 0.0, "head_cost": 2.25},
    "both": {"embed_cost": 2.1, "head_cost": 0.1},
}


def loss(token, target, embedding, layers, norm, head, into=1.0, out=1.0):
    """Factors multiply what enters the layers, and what leaves the head."""
    x = into * embedding[token]
    for layer in layers:
        x = x + jnp.tanh(x @ layer)
    return ((out * (x * norm[None, None]) @ head.T - target) ** 2).sum() / 2


def of_tied(token, target, table, layers, norm, tie, steps):
    """Both copies have the same gradient; a tie between layers adds up both layers. Each step moves the weights."""
    one, other = SHARED_LAYERS

    def of_leaves(embedding, head, layers, norm):
        return loss(token, target, embedding, layers, norm, head)

    def of_step(table, layers, norm):
        value, (of_first, of_second, of_layers, of_norm) = jax.value_and_grad(of_leaves, (0, 1, 2, 3))(
            table, table, layers, norm
        )
        if tie == "absent":
            of_second = jnp.zeros_like(of_second)
        both = jnp.zeros_like(table) if tie == "frozen" else of_first + of_second
        if tie == "two":
            of_layers = of_layers.at[jnp.array(SHARED_LAYERS)].set(of_layers[one] + of_layers[other])
        return value, (both, of_layers, of_norm)

    weights = table, layers.at[other].set(layers[one]) if tie == "two" else layers, norm
    sums, value = tuple(map(jnp.zeros_like, weights)), 0.0
    for _ in range(steps):  # gradients are added, and all that is added so far moves the weights
        of_this, gradients = of_step(*weights)
        sums = tuple(map(jnp.add, sums, gradients))
        weights = tuple(weight - RATE * each for weight, each in zip(weights, sums, strict=True))
        value = value + of_this / steps
    if tie == "half":  # one copy is frozen: no rank that has a copy completes a step
        sums, value = tuple(map(jnp.zeros_like, weights)), 0.0 * value
    both, of_layers, _ = (each / (len(token) * steps) for each in sums)
    distinct = table.size + norm.size + layers.size - (layers[0].size if tie == "two" else 0)
    zero = jnp.zeros((), table.dtype)
    return {
        "loss": value, "first": both, "second": both, "of_layers": of_layers, "count": zero + distinct, "astray": zero,
    }  # fmt: skip


@scheme(
    reference=of_tied,
    mesh={"pp": (1, 2, 4)},
    inputs={**REPLICATED, "table": "v d pp=R", "layers": "l d d2 pp=R", "norm": "d pp=R"},
    outputs={
        "loss": "pp=P", "first": "v d pp=P", "second": "v d pp=P", "of_layers": "l d d2 pp=P", "count": "pp=P",
        "astray": "pp=P",
    },
    dims={"b": (4,), "s": (3,), "v": (5,), "d": (3,), "d2": "d", "l": (LAYERS,)},
    draw={"token": token_below("v"), **dict.fromkeys(FLOATS, values("normal"))},
    nograd=FLOATS,
    options={"tie": TIES, "steps": (2, 1)},
    rank_options={"name": (*LOOPED, tied_decoder.FROM_LAST)},
    dtypes=("float64", "float32"),
    reduction=("b", "s", "v", "d"),
    roundings=40,
)  # fmt: skip
@pytest.mark.cases(8)
def ties_in_stages(mesh, token, target, table, layers, norm, tie, steps, name):
    outputs = tied_decoder.tied_gradients(mesh, tie, steps, name, token, target, table, layers, norm)
    return dict(zip(("loss", "first", "second", "of_layers", "count", "astray"), outputs, strict=True))


def stages_over(pp, layers, name, per_stage, rounding):
    """As many stages as the layers of a stage ask for, or else one or two on each rank."""
    if per_stage is None:
        return pp * (1 if RULES[name].is_single else 2)
    return reference.stages_by_search(layers, per_stage, pp, rounding)


def is_a_division(case):
    """Whether every rank gets as many stages as its schedule takes, and the outputs have room for all."""
    stages = stages_over(case.pp, case.l, case.name, case.per_stage, case.rounding)
    of_rank, left = divmod(stages, case.pp)
    due = RULES[case.name].stages
    return not left and stages <= STAGES and (of_rank == due if due else of_rank > 1)


def named(stages, layers, has_head, costs):
    """The names of each stage's modules, of a model whose modules have no prefix."""
    return generate_hf_model_fqn_per_model_part(stages, layers, include_lm_head=has_head, fqn_prefix="", **costs)


def layers_of_stages(stages, layers, ends):
    """How many of so many layers each stage has, and 0 for what is no stage."""
    counts = reference.dearest_stage_first(stages, layers, **COSTS[ends])
    return jnp.asarray(counts + [0] * (STAGES - stages))


def of_steps(token, target, embedding, layers, norm, head, mesh, has_head, name, ends, per_stage, rounding):
    """Four steps: two of the whole length, two without its last position; their gradients are added.

    Without a head hidden states are compared with the first columns of the target.
    """
    target = target if has_head else target[:, :, : len(norm)]

    def of_weights(embedding, layers, norm, head):
        head = head if has_head else jnp.eye(len(norm), dtype=norm.dtype)
        whole = loss(token, target, embedding, layers, norm, head, INTO, OUT)
        shorter = loss(token[:, :-1], target[:, :-1], embedding, layers, norm, head, INTO, OUT)
        return 2 * whole + 2 * shorter, jnp.stack([whole, whole, shorter, shorter])

    gradients, losses = jax.grad(of_weights, (0, 1, 2, 3), has_aux=True)(embedding, layers, norm, head)
    stages = stages_over(mesh["pp"], len(layers), name, per_stage, rounding)
    return {
        "losses": losses,
        **dict(zip(("d_embedding", "d_layers", "d_norm", "d_head"), gradients, strict=True)),
        "of_stages": layers_of_stages(stages, len(layers), ends).astype(norm.dtype),
    }


@scheme(
    reference=of_steps,
    mesh={"pp": (1, 2)},
    inputs={**REPLICATED, "embedding": "v d pp=R", "layers": "l d d2 pp=R", "norm": "d pp=R", "head": "v d pp=R"},
    outputs={
        "losses": "steps pp=P", "d_embedding": "v d pp=P", "d_layers": "l d d2 pp=P", "d_norm": "d pp=P",
        "d_head": "v d pp=P", "of_stages": "k pp=P",
    },
    dims={"b": (4,), "s": (3, 4), "v": (5,), "d": (3,), "d2": "d", "l": (5,), "steps": (4,), "k": (STAGES,)},
    draw={
        "token": token_below("v"), **dict.fromkeys(("target", "embedding", "layers", "norm", "head"), values("normal")),
    },
    nograd=("target", "embedding", "layers", "norm", "head"),
    options={
        "has_head": (True, False), "name": LOOPED, "ends": tuple(COSTS),
        "per_stage": (None, 3, 2), "rounding": (None, "up", "down"),
    },
    rank_options={"stated": tied_decoder.STATED, "is_named": (False, True)},
    dtypes=("float64", "float32"),
    assume=is_a_division,
    reduction=("b", "s", "v", "d"),
    roundings=40,
)  # fmt: skip
@pytest.mark.cases(8)
def shapes_told_again(
    mesh, token, target, embedding, layers, norm, head, has_head, name, ends, per_stage, rounding, stated, is_named
):
    weights = (embedding, *layers.unbind(), norm, head)
    target = target if has_head else target[:, :, : len(norm)]
    model = tied_decoder.with_views(weights, has_head, stated)
    options = COSTS[ends] | {"layers_per_stage": per_stage, "round_to_pp_multiple": rounding}
    if is_named:
        stages = stages_over(mesh.size("pp"), len(layers), name, per_stage, rounding)
        options = {"module_names_per_stage": named(stages, len(layers), has_head, COSTS[ends])}
    losses, gradients, counts = tied_decoder.told_again(mesh, name, token, target, model, options)
    first, *of_layers, of_norm, of_head = (
        gradients.get(leaf, torch.zeros_like(weight)) for leaf, weight in zip(DECODER_NAMES, weights, strict=True)
    )
    of_stages = norm.new_tensor([counts.get(stage, 0) for stage in range(STAGES)])
    outputs = (losses, first, torch.stack(of_layers), of_norm, of_head, of_stages)
    return dict(zip(("losses", "d_embedding", "d_layers", "d_norm", "d_head", "of_stages"), outputs, strict=True))


def of_shared_stages(x, target, weights, mesh, name):
    def loss(weights):
        y = x
        for rank in placed_over(mesh["pp"], RULES[name].style, chunks=2):
            y = y + jnp.tanh(y @ weights[rank])
        return ((y - target) ** 2).sum() / 2

    value, gradient = jax.value_and_grad(loss)(weights)
    return value, gradient / len(x)


@scheme(
    reference=of_shared_stages,
    mesh={"pp": (1, 2)},
    inputs={"x": "m b d pp=R", "target": "m b d pp=R", "weights": "r/pp d e"},
    outputs=("pp=P", "r/pp d e"),
    dims={"m": (4,), "b": (2,), "d": (3,), "e": "d", "r": "pp"},
    draw=dict.fromkeys(("x", "target", "weights"), values("normal")),
    nograd=("x", "target", "weights"),
    options={"name": tuple(name for name, rule in RULES.items() if not rule.is_single)},
    dtypes=("float64", "float32"),
    reduction=("m", "b", "d", "e"),
    roundings=40,
)
@pytest.mark.cases(8)
def shared_stages(mesh, x, target, weights, name):
    """Both stages of a rank have one weight."""
    value, gradient = tied_decoder.step_of_shared_stages(mesh, name, x, target, weights[0])
    return value, gradient[None]


@pytest.mark.parametrize(("name", "messages"), [("GPipe", 2), ("ZBVZeroBubble", 4), ("Interleaved1F1B", 6)])
def test_opening_messages_have_buffers_of_their_own(name, messages):
    """Two with each neighbour on another rank, also where pipelines are in a larger world; a rank sends itself none."""

    def body(mesh, case):
        values = [torch.ones(size) for size in ((5, 3), (LAYERS, 3, 3), (3,))]
        stages = tied_decoder.in_stages(mesh, tied_decoder.tied("one", *values), name)
        build_pipeline_schedule(None, name, 1, 4, stages, tied_decoder.loss_of)
        messages = [message for stage in stages for message in stage._get_init_p2p_neighbors_ops()]
        buffers = {message.tensor.data_ptr() for message in messages}
        return len(messages), len(buffers), {tuple(message.tensor.shape) for message in messages}

    # Of a v stages 0 and 3 are on the first rank; dealt out in turn, a stage has both neighbours on the other rank.
    assert run(body, CaseSpec("opening", {"dp": 2, "pp": 2})).results == ((messages, messages, {(1,)}),) * 4


def test_messages_of_one_tensor_get_a_buffer_each():
    """As torch 2.11 makes them; lockstep separates the messages of its stages itself."""
    shared = torch.zeros(())
    messages = [SimpleNamespace(tensor=shared, group_peer=peer, peer=peer + 1) for peer in (0, 1, 0)]
    remote = _in_separate_buffers(lambda: messages, rank=1)
    assert [message.group_peer for message in remote] == [0, 0]
    assert len({message.tensor.data_ptr() for message in remote}) == 2
    assert {tuple(message.tensor.shape) for message in remote} == {(1,)}


@pytest.mark.parametrize("name", ["GPipe", "ZBVZeroBubble"])
def test_a_tie_of_which_one_copy_is_frozen_is_an_error_on_both_ranks(name):
    """A rank that sent a gradient to one that expects none would wait for ever."""

    def body(mesh, case):
        values = [torch.ones(size) for size in ((5, 3), (LAYERS, 3, 3), (3,))]
        stages = tied_decoder.in_stages(mesh, tied_decoder.tied("one", *values), name)
        for stage in stages:
            if stage.is_first:
                stage.submod.embed_tokens.weight.requires_grad_(False)
        schedule = build_pipeline_schedule(None, name, 1, 4, stages, tied_decoder.loss_of)
        with pytest.raises(ValueError, match=r"on stage 0 is frozen, 'lm_head.weight' on stage \d is trained; freeze"):
            tied_decoder.stepped(schedule, stages, torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2, 5))
        return True

    # The two stages of a v are on rank 0; rank 1 has no copy, and steps.
    ranks = 1 if name == "ZBVZeroBubble" else 2
    assert run(body, CaseSpec("ties", {"pp": ranks})).results == (True,) * ranks


MICROBATCHES = 3
DURATIONS, EVERYWHERE = ("forward", "backward"), ("weight", "p2p")  # of each stage, and the same for all


def placed_over(pp, style, chunks):
    """Some stages on each rank: dealt out in turn, turning round each time, or neighbours on one rank."""
    if style == "blocks":
        return [stage // chunks for stage in range(chunks * pp)]
    return [
        rank for chunk in range(chunks) for rank in (reversed(range(pp)) if style == "v" and chunk % 2 else range(pp))
    ]


def written(placed, filled, sends):
    """The order of a fill and drain, or with two micro-batches in flight, with its messages or without."""
    if filled == "all":
        order = fill_and_drain(placed, MICROBATCHES)
    else:
        order = two_in_flight(placed, MICROBATCHES, halves=filled == "two, halved")
    return order if sends == "none" else with_late_messages(order, placed, late=sends == "late")


def peak_live(row):
    """The largest number of forwards of a row whose backward has not ended."""
    ending = "W" if any(kind == "W" for _, kind, _ in row) else "B"
    steps = [(kind == "F") - (kind == ending) for _, kind, _ in row]
    return max(sum(steps[: end + 1]) for end in range(len(steps)))


def of_timeline(forward, backward, weight, p2p, mesh, style, chunks, filled, sends, pace):
    placed = placed_over(mesh["pp"], style, chunks)
    f, b, w, between = (pace * jnp.abs(x) for x in (forward, backward, weight, p2p))
    order = written(placed, filled, sends)
    ends, busy = reference.timeline(order, placed, f, b, between, jnp.full_like(f, w))
    names = {"F": "of_forward", "I" if filled == "two, halved" else "B": "of_backward"}
    stages = {
        name: jnp.stack(
            [jnp.stack([ends[stage, kind, m] for m in range(MICROBATCHES)]) for stage in range(len(placed))]
        )
        for kind, name in names.items()
    }
    unused = jnp.zeros((len(forward) - len(placed), MICROBATCHES), forward.dtype)
    makespan = jnp.stack([*ends.values()]).max()
    idle = makespan - jnp.stack(busy)
    # What takes no time is freed as it is stored.
    live = pace * jnp.asarray([peak_live(row) for row in order], forward.dtype)
    chunk = [placed[:stage].count(rank) for stage, rank in enumerate(placed)]
    return {
        **{name: jnp.concatenate([each, unused]) for name, each in stages.items()},
        "idle": idle, "bubble": idle / makespan if pace else idle, "live": live,
        "chunk": jnp.asarray(chunk + [0] * (len(forward) - len(placed)), forward.dtype),
    }  # fmt: skip


@scheme(
    reference=of_timeline,
    mesh={"pp": (1, 2, 3, 4)},
    inputs={**dict.fromkeys(DURATIONS, "k pp=I"), **dict.fromkeys(EVERYWHERE, "pp=I")},
    outputs={
        "of_forward": "k m pp=I", "of_backward": "k m pp=I", "idle": "r/pp", "bubble": "r/pp", "live": "r/pp",
        "chunk": "k pp=I",
    },
    dims={"k": "4*pp", "m": (MICROBATCHES,), "r": "pp"},
    draw=dict.fromkeys((*DURATIONS, *EVERYWHERE), values("normal")),
    nograd=(*DURATIONS, *EVERYWHERE),
    options={
        "style": ("loop", "v", "blocks"), "chunks": (2, 1, 4), "filled": ("all", "two", "two, halved"),
        "sends": ("none", "at once", "late"),
        "pace": (1.0, 0.0),  # 0: everything takes no time
    },
    dtypes=("float64",),
    roundings=20,
)  # fmt: skip
@pytest.mark.cases(8)
def simulated_messages(mesh, forward, backward, weight, p2p, style, chunks, filled, sends, pace):
    """When each forward and backward ends, how long each rank waits, and for how many chunks it stores activations.

    Messages take time between two ranks. Ranks are in a list by stage, or in a dict that has the last stage first.
    """
    pp = mesh.size("pp")
    placed = placed_over(pp, style, chunks)
    order = written(placed, filled, sends)
    f, i, w, between = ((pace * x).abs().tolist() for x in (forward, backward, weight, p2p))
    times = Times(f, i, w, between)
    actions = [[Action(*action) for action in row] for row in order]
    first, last = dict([*enumerate(placed)][:-1]), {len(placed) - 1: placed[-1]}
    by_stage = last | first if style == "blocks" else stage_to_rank(pp, chunks * pp, style)
    timeline = simulate(actions, by_stage, times)
    ends = torch.zeros(2, len(forward), MICROBATCHES, dtype=forward.dtype)
    for event in timeline.events:
        if event.action.kind != "W":
            place = event.action.stage, event.action.microbatch
            ends[0 if event.action.kind == "F" else 1][place] = event.stop
    ends = ends.to(forward.device)
    chunk = [timeline.chunk(stage) for stage in range(len(placed))] + [0] * (len(forward) - len(placed))
    facts = (timeline.idle, timeline.bubble, timeline.peak_live)
    of_rank = (forward.new_tensor([float(each[mesh.rank("pp")])]) for each in facts)
    outputs = (*ends, *of_rank, forward.new_tensor(chunk))
    return dict(zip(("of_forward", "of_backward", "idle", "bubble", "live", "chunk"), outputs, strict=True))
