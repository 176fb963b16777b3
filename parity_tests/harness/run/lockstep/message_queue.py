"""Mailboxes: sends and receives between two ranks of one group, matched in order of posting.

Rendezvous, as NCCL's: a send is complete when its receive is posted. Nothing here knows of threads.
"""

from __future__ import annotations

from collections import defaultdict, deque

from parity_tests.harness.run.lockstep.call import Call
from parity_tests.harness.run.lockstep.rendezvous import Disagreement


class Mailboxes:
    """The unmatched messages of one group; places are positions in the group."""

    def __init__(self) -> None:
        self._sends: dict[tuple[int, int], deque[Call]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[Call]] = defaultdict(deque)
        self._open: dict[int, deque[Call]] = defaultdict(deque)  # receives from anybody

    def send(self, call: Call, target: int) -> Call | None:
        """Post a send; the receive that it meets, if one is there."""
        waiting = self._receives[call.place, target] or self._open[target]
        if waiting:
            return _deliver(call, waiting.popleft())
        self._sends[call.place, target].append(call)
        return None

    def receive(self, call: Call, origin: int | None) -> Call | None:
        """Post a receive, `origin` None for anybody's; the send that it meets, if one is there."""
        if origin is None:
            lines = [line for (_, target), line in self._sends.items() if target == call.place and line]
            waiting = min(lines, key=lambda line: line[0].order, default=None)
            if not waiting:
                self._open[call.place].append(call)
                return None
        else:
            waiting = self._sends[origin, call.place]
            if not waiting:
                self._receives[origin, call.place].append(call)
                return None
        send = waiting.popleft()
        _deliver(send, call)
        return send


def _deliver(send: Call, receive: Call) -> Call:
    a, b = send.row, receive.row
    if a.tag != b.tag:
        raise Disagreement(f"tags differ, {a.tag} and {b.tag}", a, b)
    if a.dtypes != b.dtypes:
        raise Disagreement(f"dtypes differ, {a.dtypes[0]} and {b.dtypes[0]}", a, b)
    if a.shapes != b.shapes:
        raise Disagreement(f"shapes differ, {list(a.shapes[0])} and {list(b.shapes[0])}", a, b)
    receive.results = send.copies
    receive.origin = send.place
    return receive
