"""Orders drawn for tests: named schedules with sizes that they accept, and topological orders drawn at random."""

from hypothesis import strategies as st

from torch_impl.pipelining import schedule_order, stage_to_rank
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.order import Action


def legal_sizes(name, ranks=range(1, 6), max_microbatches=12, chunks=(1, 2, 3)):
    """(p, n, v) that a schedule accepts."""
    rule = RULES[name]
    return [
        (p, n, v)
        for p in ranks
        for v in ([rule.stages] if rule.stages else chunks)
        for n in range(1, max_microbatches + 1)
        if rule.accepts(n, p)
    ]


@st.composite
def named_orders(draw, **limits):
    """(name, p, n, v, order, rank of each stage)."""
    name = draw(st.sampled_from(sorted(RULES)))
    p, n, v = draw(st.sampled_from(legal_sizes(name, **limits)))
    return name, p, n, v, schedule_order(name, p, n, v), stage_to_rank(p, p * v, RULES[name].style)


@st.composite
def own_orders(draw, for_torch=False):
    """(order, rank of each stage, n): a random order in which every action comes after the actions that it needs.

    With `for_torch`, the last stage's forwards are in the order of micro-batches, since torch numbers them so.
    """
    p = draw(st.integers(1, 3))
    placed = list(range(p)) + draw(st.lists(st.integers(0, p - 1), max_size=4 - p))
    placed = list(draw(st.permutations(placed)))
    n = draw(st.integers(1, 3))
    halved = {(s, m): draw(st.booleans()) for s in range(len(placed)) for m in range(n)}
    todo = {Action(s, kind, m) for (s, m), cut in halved.items() for kind in ("FIW" if cut else "FB")}
    done: set[Action] = set()
    order = [[] for _ in range(p)]
    while todo:
        ready = sorted(action for action in todo if needed(action, halved, len(placed)) <= done)
        if for_torch:
            last = [action for action in ready if action[:2] == (len(placed) - 1, "F")]
            turn = sum(action[:2] == (len(placed) - 1, "F") for action in done)
            ready = [action for action in ready if action not in last or action.microbatch == turn]
        action = draw(st.sampled_from(ready))
        order[placed[action.stage]].append(action)
        todo.remove(action)
        done.add(action)
    return order, placed, n


def needed(action, halved, stages):
    """The actions of its own and a neighbouring stage that must come before an action."""
    s, kind, m = action.stage, action.kind, action.microbatch
    if kind == "W":
        return {Action(s, "I", m)}
    if kind == "F":
        return {Action(s - 1, "F", m)} if s else set()
    after = {Action(s + 1, "I" if halved[s + 1, m] else "B", m)} if s < stages - 1 else set()
    return {Action(s, "F", m)} | after
