"""pytest in a process that need not import torch and JAX, in any tree of the repository, for some time at most."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from parity_tests import warm_python
from parity_tests.evidence.workers import Workers

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=quick", "-c", "pyproject.toml")
IMPORTED = (*warm_python.TORCH_AND_JAX, "flax", "optax", "torch.distributed.tensor", "torch.distributed.fsdp")


@cache
def _origin() -> warm_python.Origin:
    return warm_python.Origin(IMPORTED)


def status(
    tree: Path, arguments: Sequence[str], environment: Mapping[str, str], limit: float, workers: Workers
) -> int | None:
    """Of pytest with these arguments, -N where signal N ended it; None where it does not end in time.

    Its plugins must make it the leader of a session, so that processes of its tests end with it.
    """
    path = os.pathsep.join([str(tree), str(tree / "parity_tests" / "import_name")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command, deadline = [*PYTEST, "--rootdir", str(tree), *arguments], time.monotonic() + limit
    with tempfile.TemporaryFile() as output:
        files = [output.fileno(), output.fileno()]
        with _origin().forked(command, tree, environment, files) as fork, workers.session(fork.pid):
            try:
                return fork.status(deadline)
            except subprocess.TimeoutExpired:
                return None
