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
    from shardproof.declaration import Scheme as Scheme
    from shardproof.declaration import scheme as scheme
    from shardproof.declare.case import CaseSpec as CaseSpec
    from shardproof.declare.declared import Cost as Cost
    from shardproof.declare.discover import schemes_of_file as schemes_of_file
    from shardproof.declare.draws import ids as ids
    from shardproof.declare.draws import integers as integers
    from shardproof.declare.draws import lengths as lengths
    from shardproof.declare.draws import mask as mask
    from shardproof.declare.draws import offsets as offsets
    from shardproof.declare.draws import token_below as token_below
    from shardproof.declare.draws import values as values
    from shardproof.declare.more_draws import block_table as block_table
    from shardproof.declare.more_draws import drawn as drawn
    from shardproof.declare.more_draws import exactly as exactly
    from shardproof.declare.more_draws import permutation as permutation
    from shardproof.declare.spec import parse as parse
    from shardproof.draw.strategy import every_case as every_case
    from shardproof.engines.engines import run as run
    from shardproof.engines.failure import CollectiveMismatch as Mismatch  # noqa: F401
    from shardproof.engines.failure import Deadlock as Deadlock
    from shardproof.engines.failure import Died as Died
    from shardproof.engines.failure import Modified as Modified
    from shardproof.engines.failure import NotRun as NotRun
    from shardproof.engines.failure import Raised as Raised
    from shardproof.engines.failure import RankFailure as RankFailure
    from shardproof.engines.failure import Shared as Shared
    from shardproof.engines.failure import Stalled as Stalled
    from shardproof.engines.failure import Unwaited as Unwaited
    from shardproof.engines.ledger_table import table as ledger_table  # noqa: F401
    from shardproof.engines.live_peak import LivePeak as LivePeak
    from shardproof.engines.modules import load_parameters as load_parameters
    from shardproof.engines.watched import watch as watch
    from shardproof.judge.reference import ReferenceFailure as ReferenceFailure
    from shardproof.replays import replay as replay
    from shardproof.report import colours as colours
    from shardproof.report.colours import rank_legend as rank_legend
    from shardproof.report.colours import tiles as tiles
    from shardproof.report.layout_picture import figure as layout_figure  # noqa: F401
    from shardproof.report.ledger_picture import figure as ledger_figure  # noqa: F401
    from shardproof.report.picture import figure as figure
    from shardproof.report.picture import owner_strips as owner_strips
    from shardproof.report.picture import scheme_figure as scheme_figure
    from shardproof.report.report import CostMismatch as CostMismatch
    from shardproof.report.report import EnginesDisagree as EnginesDisagree
    from shardproof.report.report import GradientMismatch as GradientMismatch
    from shardproof.report.report import HygieneViolation as HygieneViolation
    from shardproof.report.report import ProtocolMismatch as ProtocolMismatch
    from shardproof.report.report import Report as Report
    from shardproof.report.report import ValueMismatch as ValueMismatch
    from shardproof.report.report import VerdictError as VerdictError
    from shardproof.report.show import show as show
    from shardproof.tracing.pair import Pair as Pair
    from shardproof.tracing.pair import trace_pair as trace  # noqa: F401
    from shardproof.verification import check as check
    from shardproof.verification import check_cases as check_cases
    from shardproof.verification import verify as verify
    from shardproof.verify_one_case import verify_case as verify_case

# Home of each name: `module:attribute`, or `module` for a module. A test compares this with the imports above.
_HOMES = {
    # declare
    "scheme": "shardproof.declaration:scheme",
    "Scheme": "shardproof.declaration:Scheme",
    "Cost": "shardproof.declare.declared:Cost",
    "CaseSpec": "shardproof.declare.case:CaseSpec",
    "schemes_of_file": "shardproof.declare.discover:schemes_of_file",
    "parse": "shardproof.declare.spec:parse",
    # draw
    "ids": "shardproof.declare.draws:ids",
    "integers": "shardproof.declare.draws:integers",
    "lengths": "shardproof.declare.draws:lengths",
    "mask": "shardproof.declare.draws:mask",
    "offsets": "shardproof.declare.draws:offsets",
    "token_below": "shardproof.declare.draws:token_below",
    "block_table": "shardproof.declare.more_draws:block_table",
    "drawn": "shardproof.declare.more_draws:drawn",
    "exactly": "shardproof.declare.more_draws:exactly",
    "permutation": "shardproof.declare.more_draws:permutation",
    "load_parameters": "shardproof.engines.modules:load_parameters",
    "values": "shardproof.declare.draws:values",
    "every_case": "shardproof.draw.strategy:every_case",
    # run and judge
    "run": "shardproof.engines.engines:run",
    "verify": "shardproof.verification:verify",
    "check": "shardproof.verification:check",
    "check_cases": "shardproof.verification:check_cases",
    "verify_case": "shardproof.verify_one_case:verify_case",
    "Report": "shardproof.report.report:Report",
    "replay": "shardproof.replays:replay",
    "trace": "shardproof.tracing.pair:trace_pair",
    "watch": "shardproof.engines.watched:watch",
    "Pair": "shardproof.tracing.pair:Pair",
    "LivePeak": "shardproof.engines.live_peak:LivePeak",
    # exceptions: a verdict other than equal
    "VerdictError": "shardproof.report.report:VerdictError",
    "ValueMismatch": "shardproof.report.report:ValueMismatch",
    "GradientMismatch": "shardproof.report.report:GradientMismatch",
    "ProtocolMismatch": "shardproof.report.report:ProtocolMismatch",
    "CostMismatch": "shardproof.report.report:CostMismatch",
    "HygieneViolation": "shardproof.report.report:HygieneViolation",
    "EnginesDisagree": "shardproof.report.report:EnginesDisagree",
    # exceptions: a run that did not finish
    "RankFailure": "shardproof.engines.failure:RankFailure",
    "Raised": "shardproof.engines.failure:Raised",
    "Died": "shardproof.engines.failure:Died",
    "Mismatch": "shardproof.engines.failure:CollectiveMismatch",
    "Deadlock": "shardproof.engines.failure:Deadlock",
    "Shared": "shardproof.engines.failure:Shared",
    "Stalled": "shardproof.engines.failure:Stalled",
    "Unwaited": "shardproof.engines.failure:Unwaited",
    "Modified": "shardproof.engines.failure:Modified",
    "NotRun": "shardproof.engines.failure:NotRun",
    "ReferenceFailure": "shardproof.judge.reference:ReferenceFailure",
    # layouts and pictures
    "layouts": "jax_ref.layouts",
    "figure": "shardproof.report.picture:figure",
    "scheme_figure": "shardproof.report.picture:scheme_figure",
    "owner_strips": "shardproof.report.picture:owner_strips",
    "show": "shardproof.report.show:show",
    "layout_figure": "shardproof.report.layout_picture:figure",
    "ledger_figure": "shardproof.report.ledger_picture:figure",
    "ledger_table": "shardproof.engines.ledger_table:table",
    "tiles": "shardproof.report.colours:tiles",
    "rank_legend": "shardproof.report.colours:rank_legend",
    "colours": "shardproof.report.colours",
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
    from shardproof.cli.app import main
    from shardproof.engines.supervised import supervised

    if sys.argv[1:] and sys.argv[1] in _RUN_RANKS:
        sys.exit(supervised(main))
    main()
