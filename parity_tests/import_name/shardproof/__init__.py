"""Verify sharded PyTorch against single-device JAX. These are the names for users' files.

Each name is loaded on first use: ranks in other processes import this package and must not load JAX.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_ref import layouts as layouts
    from parity_tests.benchmarks.live_peak import LivePeak as LivePeak
    from parity_tests.harness.declare.case import CaseSpec as CaseSpec
    from parity_tests.harness.declare.declared import Cost as Cost
    from parity_tests.harness.declare.discover import schemes_of_file as schemes_of_file
    from parity_tests.harness.declare.draws import ids as ids
    from parity_tests.harness.declare.draws import integers as integers
    from parity_tests.harness.declare.draws import lengths as lengths
    from parity_tests.harness.declare.draws import mask as mask
    from parity_tests.harness.declare.draws import offsets as offsets
    from parity_tests.harness.declare.draws import token_below as token_below
    from parity_tests.harness.declare.draws import values as values
    from parity_tests.harness.declare.more_draws import block_table as block_table
    from parity_tests.harness.declare.more_draws import drawn as drawn
    from parity_tests.harness.declare.more_draws import exactly as exactly
    from parity_tests.harness.declare.more_draws import permutation as permutation
    from parity_tests.harness.declare.spec import parse as parse
    from parity_tests.harness.draw.strategy import every_case as every_case
    from parity_tests.harness.judge.reference import ReferenceFailure as ReferenceFailure
    from parity_tests.harness.replay import replay as replay
    from parity_tests.harness.report import colours as colours
    from parity_tests.harness.report.colours import rank_legend as rank_legend
    from parity_tests.harness.report.colours import tiles as tiles
    from parity_tests.harness.report.layout_picture import figure as layout_figure  # noqa: F401
    from parity_tests.harness.report.ledger_picture import figure as ledger_figure  # noqa: F401
    from parity_tests.harness.report.picture import figure as figure
    from parity_tests.harness.report.picture import owner_strips as owner_strips
    from parity_tests.harness.report.picture import scheme_figure as scheme_figure
    from parity_tests.harness.report.report import CostMismatch as CostMismatch
    from parity_tests.harness.report.report import EnginesDisagree as EnginesDisagree
    from parity_tests.harness.report.report import GradientMismatch as GradientMismatch
    from parity_tests.harness.report.report import HygieneViolation as HygieneViolation
    from parity_tests.harness.report.report import ProtocolMismatch as ProtocolMismatch
    from parity_tests.harness.report.report import Report as Report
    from parity_tests.harness.report.report import ValueMismatch as ValueMismatch
    from parity_tests.harness.report.report import VerdictError as VerdictError
    from parity_tests.harness.report.show import show as show
    from parity_tests.harness.run.engines import run as run
    from parity_tests.harness.run.failure import CollectiveMismatch as Mismatch  # noqa: F401
    from parity_tests.harness.run.failure import Deadlock as Deadlock
    from parity_tests.harness.run.failure import Died as Died
    from parity_tests.harness.run.failure import Modified as Modified
    from parity_tests.harness.run.failure import NotRun as NotRun
    from parity_tests.harness.run.failure import Raised as Raised
    from parity_tests.harness.run.failure import RankFailure as RankFailure
    from parity_tests.harness.run.failure import Shared as Shared
    from parity_tests.harness.run.failure import Stalled as Stalled
    from parity_tests.harness.run.failure import Unwaited as Unwaited
    from parity_tests.harness.run.ledger_table import table as ledger_table  # noqa: F401
    from parity_tests.harness.run.modules import load_parameters as load_parameters
    from parity_tests.harness.run.watched import watch as watch
    from parity_tests.harness.scheme import Scheme as Scheme
    from parity_tests.harness.scheme import scheme as scheme
    from parity_tests.harness.verify import check as check
    from parity_tests.harness.verify import check_cases as check_cases
    from parity_tests.harness.verify import verify as verify
    from parity_tests.harness.verify_one_case import verify_case as verify_case
    from parity_tests.tracing.pair import Pair as Pair
    from parity_tests.tracing.pair import trace_pair as trace  # noqa: F401

# Home of each name: `module:attribute`, or `module` for a module. A test compares this with the imports above.
_HOMES = {
    # declare
    "scheme": "parity_tests.harness.scheme:scheme",
    "Scheme": "parity_tests.harness.scheme:Scheme",
    "Cost": "parity_tests.harness.declare.declared:Cost",
    "CaseSpec": "parity_tests.harness.declare.case:CaseSpec",
    "schemes_of_file": "parity_tests.harness.declare.discover:schemes_of_file",
    "parse": "parity_tests.harness.declare.spec:parse",
    # draw
    "ids": "parity_tests.harness.declare.draws:ids",
    "integers": "parity_tests.harness.declare.draws:integers",
    "lengths": "parity_tests.harness.declare.draws:lengths",
    "mask": "parity_tests.harness.declare.draws:mask",
    "offsets": "parity_tests.harness.declare.draws:offsets",
    "token_below": "parity_tests.harness.declare.draws:token_below",
    "block_table": "parity_tests.harness.declare.more_draws:block_table",
    "drawn": "parity_tests.harness.declare.more_draws:drawn",
    "exactly": "parity_tests.harness.declare.more_draws:exactly",
    "permutation": "parity_tests.harness.declare.more_draws:permutation",
    "load_parameters": "parity_tests.harness.run.modules:load_parameters",
    "values": "parity_tests.harness.declare.draws:values",
    "every_case": "parity_tests.harness.draw.strategy:every_case",
    # run and judge
    "run": "parity_tests.harness.run.engines:run",
    "verify": "parity_tests.harness.verify:verify",
    "check": "parity_tests.harness.verify:check",
    "check_cases": "parity_tests.harness.verify:check_cases",
    "verify_case": "parity_tests.harness.verify_one_case:verify_case",
    "Report": "parity_tests.harness.report.report:Report",
    "replay": "parity_tests.harness.replay:replay",
    "trace": "parity_tests.tracing.pair:trace_pair",
    "watch": "parity_tests.harness.run.watched:watch",
    "Pair": "parity_tests.tracing.pair:Pair",
    "LivePeak": "parity_tests.benchmarks.live_peak:LivePeak",
    # exceptions: a verdict other than equal
    "VerdictError": "parity_tests.harness.report.report:VerdictError",
    "ValueMismatch": "parity_tests.harness.report.report:ValueMismatch",
    "GradientMismatch": "parity_tests.harness.report.report:GradientMismatch",
    "ProtocolMismatch": "parity_tests.harness.report.report:ProtocolMismatch",
    "CostMismatch": "parity_tests.harness.report.report:CostMismatch",
    "HygieneViolation": "parity_tests.harness.report.report:HygieneViolation",
    "EnginesDisagree": "parity_tests.harness.report.report:EnginesDisagree",
    # exceptions: a run that did not finish
    "RankFailure": "parity_tests.harness.run.failure:RankFailure",
    "Raised": "parity_tests.harness.run.failure:Raised",
    "Died": "parity_tests.harness.run.failure:Died",
    "Mismatch": "parity_tests.harness.run.failure:CollectiveMismatch",
    "Deadlock": "parity_tests.harness.run.failure:Deadlock",
    "Shared": "parity_tests.harness.run.failure:Shared",
    "Stalled": "parity_tests.harness.run.failure:Stalled",
    "Unwaited": "parity_tests.harness.run.failure:Unwaited",
    "Modified": "parity_tests.harness.run.failure:Modified",
    "NotRun": "parity_tests.harness.run.failure:NotRun",
    "ReferenceFailure": "parity_tests.harness.judge.reference:ReferenceFailure",
    # layouts and pictures
    "layouts": "jax_ref.layouts",
    "figure": "parity_tests.harness.report.picture:figure",
    "scheme_figure": "parity_tests.harness.report.picture:scheme_figure",
    "owner_strips": "parity_tests.harness.report.picture:owner_strips",
    "show": "parity_tests.harness.report.show:show",
    "layout_figure": "parity_tests.harness.report.layout_picture:figure",
    "ledger_figure": "parity_tests.harness.report.ledger_picture:figure",
    "ledger_table": "parity_tests.harness.run.ledger_table:table",
    "tiles": "parity_tests.harness.report.colours:tiles",
    "rank_legend": "parity_tests.harness.report.colours:rank_legend",
    "colours": "parity_tests.harness.report.colours",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]

_RUN_RANKS = ("verify", "replay", "tour")  # commands that run a user's function in their own process
# Packages of the extra `verify`, by import name: `torch_impl` needs none of them.
_OF_VERIFY = ("jax", "flax", "optax", "hypothesis", "pytest", "cloudpickle", "typer", "rich", "matplotlib")
_INSTALL = "pip install -e '.[verify]' in the clone"


class _SameName:
    """Finds `parity_tests.x` in every folder named `parity_tests` on the path.

    A user may also have a folder of that name. Whichever of the two Python has imported, this finds modules of the
    other after the usual search has failed.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: Any = None) -> ModuleSpec | None:
        parents = name.split(".")[:-1]
        if parents[:1] != ["parity_tests"]:
            return None
        return PathFinder.find_spec(name, [os.path.join(entry or os.curdir, *parents) for entry in sys.path], target)


sys.meta_path.append(_SameName)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardproof' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, _, attribute = _HOMES[name].partition(":")
    try:
        # A user's file parity_tests.py is not a package, and Python would not search for modules in it.
        vars(import_module("parity_tests")).setdefault("__path__", [])
        home = import_module(module)
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) in _OF_VERIFY:
            raise ImportError(f"shardproof.{name} needs {package}; {_INSTALL}") from error
        raise
    return getattr(home, attribute) if attribute else home


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def main() -> None:
    """The command `shardproof`."""
    from importlib.util import find_spec

    if missing := [package for package in _OF_VERIFY if find_spec(package) is None]:
        print(f"shardproof: needs {', '.join(missing)}; {_INSTALL}", file=sys.stderr)
        sys.exit(2)
    from parity_tests.cli.app import main
    from parity_tests.harness.run.supervised import supervised

    if sys.argv[1:] and sys.argv[1] in _RUN_RANKS:
        sys.exit(supervised(main))
    main()
