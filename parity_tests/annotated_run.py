"""`python -m parity_tests.annotated_run`: schemes run while beartype holds production to its annotations.

`python -m parity_tests.annotated_run 8` runs one scheme of eight.

In a process of its own, since a function is wrapped when its module is first imported; and not in the full suite,
where the wrapper's complaint would come before our own sentence for a user's mistake. No reference is evaluated: this
tests the arguments and results of production's functions, not whether they are right.
"""

from __future__ import annotations

import sys

from jaxtyping import install_import_hook

EXAMPLES = 2
SHAPES = 2
WRONG_ON_PURPOSE = ("rejected_plans",)  # passes values that no annotation admits


def main(step: int = 1) -> int:
    """Run some examples of the built-in schemes, one of `step`; prints which ranks failed."""
    with install_import_hook("torch_impl", "beartype.beartype"):
        from shardproof.declare import discover
        from shardproof.draw.choosers import seeded_chooser
        from shardproof.draw.drawing import draw_case
        from shardproof.engines.engines import run
        from shardproof.engines.failure import RankFailure
        from shardproof.engines.program import Program

        schemes = [scheme for scheme in discover.built_in() if scheme.name not in WRONG_ON_PURPOSE][::step]
        failures = []
        for scheme in schemes:
            for seed in range(EXAMPLES):
                case = draw_case(scheme, seeded_chooser(seed), {}, seed=seed, limit=SHAPES)
                try:
                    run(Program.of(scheme), case)
                except RankFailure as failure:
                    failures.append(f"{scheme.key}: {failure}\n{case.json}")
    examples = EXAMPLES * len(schemes)
    for failure in failures:
        print(failure)
    print(f"{examples - len(failures)} of {examples} examples keep to the annotations")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
