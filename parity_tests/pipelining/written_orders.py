"""Pipeline orders, with torch's or late messages, and their CSV text. Ranks import this, so it loads no JAX."""

import tempfile
from pathlib import Path

from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad, _add_send_recv, _add_unshard_reshard

from torch_impl.pipelining import write_csv
from torch_impl.pipelining.order import parse_action


def dumped(order):
    with tempfile.TemporaryDirectory() as folder:
        write_csv(order, Path(folder) / "s.csv")
        return (Path(folder) / "s.csv").read_text()


def with_communication(order, placed, n):
    """Torch's full version of an order, as text: with sends, gathers and reductions."""
    theirs = {rank: [_Action.from_str(str(a)) for a in actions if a] for rank, actions in enumerate(order)}
    full_order = {rank: _add_reduce_grad(_add_unshard_reshard(actions), n) for rank, actions in theirs.items()}
    sent = _add_send_recv(full_order, lambda stage: placed[stage], len(placed))
    return [[parse_action(str(action)) for action in sent[rank]] for rank in range(len(order))]


def fill_and_drain(placed, n):
    """Rows of (stage, kind, micro-batch): each rank runs all forwards of its stages in turn, then all backwards."""
    order = []
    for rank in range(max(placed) + 1):
        stages = [stage for stage, other in enumerate(placed) if other == rank]
        forwards = [(stage, "F", m) for stage in stages for m in range(n)]
        order.append([*forwards, *((stage, "B", m) for stage in reversed(stages) for m in range(n))])
    return order


def two_in_flight(placed, n, *, halves):
    """Rows in which each rank runs the forward of micro-batch m + 2 after the backward of micro-batch m.

    With `halves`, the second half of that backward comes after the forward.
    """
    order = []
    for rank in range(max(placed) + 1):
        stages = [stage for stage, other in enumerate(placed) if other == rank]
        forwards = [[(stage, "F", m) for stage in stages] for m in range(n)] + [[], []]
        row = [*forwards[0], *forwards[1]]
        for m in range(n):
            row += [(stage, "I" if halves else "B", m) for stage in reversed(stages)]
            row += forwards[m + 2]
            row += [(stage, "W", m) for stage in reversed(stages)] if halves else []
        order.append(row)
    return order


def with_late_messages(order, placed, *, late):
    """The order with its messages: received before use, sent after their computation or one computation later (`late`).

    A rank sends its late message before it waits for another one, so that no two ranks wait for each other.
    """
    rows = []
    for rank, row in enumerate(order):
        waiting, actions = [], []
        for stage, kind, m in row:
            if kind == "W":  # needs no message, and sends none
                actions.append((stage, kind, m))
                continue
            step = 1 if kind == "F" else -1
            source, to, sent = stage - step, stage + step, kind.replace("I", "B")
            if 0 <= source < len(placed) and placed[source] != rank:
                actions += [*waiting, (stage, f"RECV_{sent}", m)]
                waiting = []
            actions.append((stage, kind, m))
            due, waiting = (waiting, []) if late else ([], waiting)
            actions += due
            if 0 <= to < len(placed) and placed[to] != rank:
                (waiting if late else actions).append((stage, f"SEND_{sent}", m))
        rows.append([*actions, *waiting])
    return rows
