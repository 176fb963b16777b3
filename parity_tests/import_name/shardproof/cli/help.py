"""The text under a verb's options in --help: examples, and the meaning of each exit status."""

from __future__ import annotations

import textwrap

WIDTH = 78  # columns, behind the two by which typer indents it

EXAMPLES: dict[str, tuple[str, ...]] = {
    "verify": (
        "shardproof verify my_scheme.py --watch --html verdict.html",
        "shardproof verify my_scheme.py::sharded_logprob --mesh cp=2,tp=2 --dim s=8 --engine gloo",
        "shardproof verify 'vocab_parallel_*' --profile ci --json verdicts.json --quiet",
    ),
    "new": (
        "shardproof new my_function.py::scaled_logits",
        "shardproof new my_function.py::scaled_logits --inputs inputs --mesh tp=2 --out scheme_of_logits.py",
    ),
    "list": (
        "shardproof list my_scheme.py",
        "shardproof list 'vocab_parallel_*' --quiet",
        "shardproof list vocab_parallel_logprob --json",
    ),
    "draw": (
        "shardproof draw my_scheme.py --mesh cp=4,tp=2 --dim s=16",
        "shardproof draw vocab_parallel_logprob --mesh tp=4 --dim v=8 --figure layouts.svg",
    ),
    "replay": (
        "shardproof replay replay_975d73c9.py",
        "shardproof replay replay_975d73c9.py --engine gloo --repeat 10 --quiet",
    ),
    "timeline": (
        "shardproof timeline replay_975d73c9.py --out timeline.json",
        "shardproof timeline replay_975d73c9.py --out -",
    ),
    "schedule": (
        "shardproof schedule zbv --pp 4 --microbatches 8",
        "shardproof schedule 1f1b --pp 4 --microbatches 8 --times 1,1,2 --figure 1f1b.png",
        "shardproof schedule interleaved1f1b --pp 2 --microbatches 4 --csv mine.csv --json",
    ),
    "train": (
        "shardproof train --mesh dp=2,cp=2 --figure curves.png",
        "shardproof train --mesh dp=2 --mesh tp=2 --steps 5 --quiet",
        "shardproof train --mesh dp=2,tp=2 --checkpoint run --every 5 --resume",
    ),
    "trace": (
        "shardproof trace --mesh dp=2,cp=2",
        "shardproof trace my_sharded.py::sharded --twin single --inputs inputs --mesh tp=2",
        "shardproof trace my_pair.py --dtype bfloat16 --whole --json trace.json",
    ),
    "plan": (
        "shardproof plan qwen3 --mesh dp=8,tp=4",
        "shardproof plan transformers.LlamaConfig --mesh tp=2 --option num_hidden_layers=2 --json",
        "shardproof plan my_model.py:make_model --mesh dp_replicate=2,dp_shard=4",
    ),
    "cost": (
        "shardproof cost attention --mesh cp=64,tp=8 --dim s=131072,h=64,g=8",
        "shardproof cost attention --mesh cp=8..8192 --dim s=4096*cp,h=64,g=8 --links b200",
        "shardproof cost vocab_parallel_logprob --mesh tp=8 --dim b=1,s=4096,v=131072 --json",
    ),
    "watch": (
        "shardproof watch train.py --steps 1",
        "shardproof watch --rows my_watch.py",
    ),
    "tour": (
        "shardproof tour",
        "shardproof tour --examples 2 --figure tour.png --json tour.json --quiet",
    ),
}
FIRST = (
    "shardproof verify my_scheme.py --mesh tp=4",
    "shardproof verify --help",
)
STATUS = {
    0: "all equal",
    1: "a mismatch: value, gradient, protocol, cost or hygiene; or no verdict: undecided, engines disagree",
    2: "usage: a target, option or declaration that cannot be used, or an output file that cannot be written",
    3: "a rank failed: raised, died, collective mismatch, deadlock, stalled, shared, unwaited, modified; "
    "or a user's code exited or ended the process",
    4: "nothing ran, such as nccl without a GPU",
    70: "an internal error, which is a bug of this command",
    130: "interrupted",
    141: "the reader of the output has closed it",
}
JUDGING = ("verify", "replay", "train", "trace", "tour")


def epilog(verb: str | None) -> str:
    """Examples of a verb, or of the command, and its exit statuses; a verb that judges can end with any of them."""
    lines = ["\b", "Examples:", *map(_example, EXAMPLES[verb] if verb else FIRST)]
    lines += ["", "\b", "Exit status:"]
    statuses = (
        STATUS if verb is None or verb in JUDGING else {0: "done", **{n: STATUS[n] for n in (2, 3, 70, 130, 141)}}
    )
    return "\n".join([*lines, *(_folded(f"  {number:>3}  {what}", " " * 7) for number, what in statuses.items())])


def _example(command: str) -> str:
    """The command as a shell reads it: a backslash at the end of each line but the last."""
    return _folded(f"  {command}", " " * 6, end=" \\")


def _folded(line: str, below: str, end: str = "") -> str:
    lines = textwrap.wrap(
        line, WIDTH - len(end), subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )
    return f"{end}\n".join(lines)


def versions() -> str:
    """`shardproof 0.1.0 (Python 3.11.7, torch 2.13.0, jax 0.10.2)`, and a line for each newer than tested."""
    import platform
    from importlib.metadata import version

    from shardproof.report.tested_versions import newer

    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax"))
    return "\n".join([f"shardproof {version('shardproof')} (Python {platform.python_version()}, {packages})", *newer()])
