"""Two hosts under torchrun: one verdict, and where one host is gone, a sentence and nothing left behind.

Each host is a network namespace where that is allowed, else an agent on loopback; see two_hosts.sh.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parity_tests.training.started import Mark

SCRIPT = Path(__file__).with_name("two_hosts.sh")
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "my_scheme.py"
LIMIT_S = 240  # of a full run, on a loaded machine
GONE_S = 10.0  # until the last process has ended, on a loaded machine
ENDS_S = 60.0  # from the death of one host to the end of the other: ten seconds of silence, and a loaded machine
NETWORK = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])
LOOPBACK = 'ip link set lo up && exec "$0" "$@"'


def on_loopback():
    """A network of its own with nothing but loopback, where that is allowed: torch's stores listen on every address."""
    for prefix in NETWORK:
        if (
            subprocess.run([*prefix, "sh", "-c", LOOPBACK, "true"], check=False, stderr=subprocess.DEVNULL).returncode
            == 0
        ):
            return [*prefix, "sh", "-c", LOOPBACK]
    return []


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def hosts():
    """Start a command on two hosts; returns the script's process. All that came of it ends with the test."""
    mark = Mark()

    def start(*command, where="namespaces", module="parity_tests.training.small"):
        settings = {"PYTHON": sys.executable, "PORT": free_port(), "TWO_HOSTS": where, "MODULE": module}
        prefix = on_loopback() if where == "loopback" else []
        return subprocess.Popen(
            [*prefix, str(SCRIPT), *command],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**mark.environment, **settings},
        )  # fmt: skip

    start.mark = mark
    yield start
    mark.kill()


def ended(process, mark, limit=LIMIT_S):
    """Status, standard output and error of a run that has left nothing behind."""
    out, err = process.communicate(timeout=limit)
    assert mark.left_after(GONE_S) == []
    return process.returncode, out, err


@pytest.mark.slow
def test_one_training_run_on_two_hosts(hosts):
    status, out, err = ended(hosts("train", "--mesh", "dp=2", "--engine", "torchrun", "--steps", "2"), hosts.mark)
    assert status == 0, err
    assert out.count("dp_shard=2  hidden  ring  float64: 2 steps as on one device") == 1  # rank 0 alone speaks
    assert err.startswith("two hosts: two ")


@pytest.mark.slow
def test_one_verdict_on_two_agents_over_loopback(hosts):
    command = ("verify", str(EXAMPLE), "--engine", "torchrun", "--mesh", "tp=2,cp=1", "--examples", "1")
    status, out, err = ended(hosts(*command, where="loopback", module="shardproof"), hosts.mark)
    assert status == 0, err
    assert out.endswith("1 scheme, 0 mismatches, 0 not run.\n")
    assert err.startswith("two hosts: two agents over loopback")


SAID = {
    "is_host=false": "has ended, and its ranks with it",
    "is_host=true": "is gone, and with it the host that held it",
}


@pytest.mark.slow
@pytest.mark.parametrize("killed", SAID)
def test_a_host_that_is_gone_ends_the_other(hosts, tmp_path, killed):
    command = ("train", "--mesh", "dp=2", "--engine", "torchrun", "--steps", "100000")
    process = hosts(*command, "--checkpoint", str(tmp_path), "--every", "1")
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "step_000001" / "done").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (agent,) = [p.pid for p in hosts.mark.running() if killed in p.command and "torch.distributed.run" in p.command]
    os.kill(agent, signal.SIGKILL)
    status, out, err = ended(process, hosts.mark, ENDS_S)
    assert status != 0
    assert SAID[killed] in err
    if killed == "is_host=false":  # the store is there, and rank 0 or its host says who does not answer
        assert "rank 0" in out + err
    # The exit code of its rank on the other host's agent; without the store, that agent may end before its rank does.
    assert "exitcode  : 3" in err or (killed == "is_host=true" and "RendezvousConnectionError" in err)
