"""The recorder of one rank: which work counts as never waited for."""

import pytest
import torch
import torch.distributed as dist

from shardproof.engines.processes.recorder import Recorder, _Issued


class WithFuture(dist.Work):
    """Work whose future has its result before the work calls itself complete, as on gloo for a moment."""

    def __init__(self, *, is_done):
        super().__init__()
        self._is_done = is_done

    def get_future(self):
        future = torch.futures.Future()
        if self._is_done:
            future.set_result([])
        return future


@pytest.mark.parametrize(
    ("work", "is_reported"), [(WithFuture(is_done=True), False), (WithFuture(is_done=False), True)]
)
def test_work_of_cpp_with_a_result_was_waited_for(work, is_reported):
    recorder = Recorder()
    recorder.rows.append("row")
    recorder._works[id(work)] = _Issued(work, "row", has_handle=False)
    assert recorder.unwaited() == ["row"] * is_reported
