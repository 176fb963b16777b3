"""`python -m parity_tests.annotated_run`: schemes judged while beartype holds production to its annotations.

In a process of its own, since a function is wrapped when its module is first imported; and not in the full suite,
where the wrapper's complaint would come before our own sentence for a user's mistake.
"""

from __future__ import annotations

import sys

from jaxtyping import install_import_hook

EXAMPLES = 2
SHAPES = 2
WRONG_ON_PURPOSE = ("rejected_plans",)  # hands over what no annotation admits


def main() -> int:
    """Judge some examples of every built-in scheme; prints what was not equal."""
    with install_import_hook("torch_impl", "beartype.beartype"):
        from parity_tests.harness.declare import discover
        from parity_tests.harness.draw.drawing import draw_case, seeded_chooser
        from parity_tests.harness.judge import bridge
        from parity_tests.harness.verdict import judge

        bridge.start()
        schemes = [scheme for scheme in discover.built_in() if scheme.name not in WRONG_ON_PURPOSE]
        reports = [
            judge(scheme, draw_case(scheme, seeded_chooser(seed), {}, seed=seed, limit=SHAPES))
            for scheme in schemes
            for seed in range(EXAMPLES)
        ]
    wrong = [report for report in reports if not report.ok]
    for report in wrong:
        print(report)
    print(f"{len(reports) - len(wrong)} of {len(reports)} examples keep to the annotations")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
