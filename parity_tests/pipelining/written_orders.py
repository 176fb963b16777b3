"""Orders as the text of a file, with the actions that torch adds. Ranks import this, so it loads no JAX."""

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
