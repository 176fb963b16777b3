"""The output of `shardproof schedule`: a simulated schedule, from a name or a file, as a grid, JSON or a figure."""

from __future__ import annotations

import json as json_module
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from shardproof.report.out_path import check_writable, naming, write_text
from shardproof.report.sentence import Sentence, is_broken
from shardproof.training.schedule_name import rule_by_name
from torch_impl.pipelining.csv_schedule import read_csv, write_csv
from torch_impl.pipelining.named_schedules import schedule_order
from torch_impl.pipelining.order import Order
from torch_impl.pipelining.partition import stage_to_rank
from torch_impl.pipelining.simulation import KIND_NAMES, Timeline, Times, draw, simulate

OPTIONS = {
    "n_microbatches=": "--microbatches ",
    "stages_per_rank=": "--stages-per-rank ",
    "pp_size=": "--pp ",
    "pp_size": "pp",
    "schedule=": "schedule ",
}


def show(
    target: str,
    pp: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    times: Times,
    json: str | None,
    figure: str | None,
    csv: str | None,
) -> None:
    """Print one schedule. Errors: ValueError for an unknown or impossible schedule."""
    check_writable(figure=figure, csv=csv, json=json)
    try:
        name, order, stage_ranks = _schedule_of(target, pp, microbatches, stages_per_rank)
        timeline = simulate(order, stage_ranks, times)
    except (ValueError, FileNotFoundError) as error:
        message = getattr(error, "strerror", None) or str(error)
        raise ValueError(_in_options(message, target)) from None
    if csv:
        with naming(csv):
            write_csv(order, csv)
    if figure:
        with naming(figure):
            draw(timeline, name).savefig(figure)
    if json:
        write_text(json, json_module.dumps(record(name, timeline), indent=2))
    if json != "-":
        console = Console()
        print(f"{name}: {timeline.text(console.width if is_broken(console) else None)}")
        console.print(Sentence(_legend(timeline)), highlight=False, soft_wrap=True)


def _legend(timeline: Timeline) -> str:
    """The meaning of the letters that occur."""
    kinds = {event.action.kind for event in timeline.events}
    letters = [f"{letter} {name}" for letter, name in KIND_NAMES.items() if letter in kinds]
    chunks = max((timeline.chunk(stage) for stage in range(len(timeline.stage_to_rank))), default=0)
    small = ["small letters: every second chunk of a rank"] if chunks else []
    return "; ".join([", ".join(letters), *small, "number: micro-batch", "dot: idle"])


def _in_options(sentence: str, target: str) -> str:
    """A function's message about its arguments, with the command's option names."""
    message = re.sub(r"^pipelining\.\w+: ", f"schedule {target!r}: ", sentence)
    for argument, option in OPTIONS.items():
        message = message.replace(argument, option)
    return message


def record(name: str, timeline: Timeline) -> dict[str, Any]:
    """A timeline as JSON."""
    return {
        "schedule": name,
        "pp": timeline.pp_size,
        "stage_to_rank": list(timeline.stage_to_rank),
        "makespan": timeline.makespan,
        "ranks": [
            {
                "idle": timeline.idle[rank],
                "bubble": timeline.bubble[rank],
                "peak_live": timeline.peak_live[rank],
                "events": [[str(event.action), event.start, event.stop] for event in timeline.of(rank)],
            }
            for rank in range(timeline.pp_size)
        ],
    }


def _schedule_of(
    target: str, pp: int | None, microbatches: int | None, stages_per_rank: int | None
) -> tuple[str, Order, list[int]]:
    """Name, order and the rank of each stage, from a file or from a name, which may be abbreviated."""
    if target.lower().endswith(".csv"):
        read = read_csv(target, pp_size=pp, n_microbatches=microbatches, argument="schedule")
        return Path(target).name, read.order, read.stage_to_rank
    rule = rule_by_name(target, "schedule", ", or a .csv file")
    if pp is None or microbatches is None:
        raise ValueError(f"schedule {target!r} needs --pp and --microbatches, such as --pp 4 --microbatches 8")
    chunks = stages_per_rank or rule.stages or 2
    return rule.name, schedule_order(rule.name, pp, microbatches, chunks), stage_to_rank(pp, pp * chunks, rule.style)
