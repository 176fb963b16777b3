"""Verify sharded PyTorch against single-device JAX. These are the names for users' files.

Each name is loaded on first use: ranks in other processes import this package and must not load JAX. `__init__.pyi`
lists the names and the module of each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

from shardproof import lazy_names

_NAMES = lazy_names.names_in(Path(__file__).with_suffix(".pyi"))
_load = lazy_names.loader(__name__, _NAMES)
__all__ = sorted(_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]

# Commands that run a user's code in their own process.
_RUN_USERS_CODE = ("verify", "replay", "tour", "draw", "timeline", "new", "trace", "cost")
# Packages of the extra `verify`, by import name: `torch_impl` needs none of them.
_OF_VERIFY = ("jax", "flax", "optax", "hypothesis", "pytest", "cloudpickle", "typer", "rich", "matplotlib")
_INSTALL = "pip install -e '.[verify]' in the clone"


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) in _OF_VERIFY:
            raise ImportError(f"shardproof.{name} needs {package}; {_INSTALL}") from error
        raise


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def _end_without_verdict(left: SystemExit) -> NoReturn:
    """With `python -m`, a file of the working folder hides Python's module of that name; its import may exit with 0."""
    import traceback

    from shardproof.endings.exit_status import RANK_FAILED

    *_, at = traceback.extract_tb(left.__traceback__)
    sentence = f"{at.filename}:{at.lineno} exits when it is imported; give the file another name"
    print(f"shardproof: {sentence}", file=sys.stderr)
    sys.exit(RANK_FAILED)


def main() -> None:
    """The command `shardproof`."""
    from shardproof.endings import earlier_files

    files: list[str] = []
    try:
        files += earlier_files.mark(sys.argv[1:])
        _run()
    except SystemExit as left:
        earlier_files.settle(files, left.code)
        raise
    except KeyboardInterrupt:  # before the command itself takes care of it
        from shardproof.endings.exit_status import INTERRUPTED, INTERRUPTED_SENTENCE

        print(f"shardproof: {INTERRUPTED_SENTENCE}", file=sys.stderr)
        earlier_files.settle(files, INTERRUPTED)
        sys.exit(INTERRUPTED)


def _run() -> None:
    from importlib.util import find_spec

    if missing := [package for package in _OF_VERIFY if find_spec(package) is None]:
        print(f"shardproof: needs {', '.join(missing)}; {_INSTALL}", file=sys.stderr)
        sys.exit(2)
    try:
        from shardproof.cli.app import main
        from shardproof.engines.supervised import supervised
    except SystemExit as left:
        _end_without_verdict(left)
    if sys.argv[1:] and sys.argv[1] in _RUN_USERS_CODE:
        raise SystemExit(supervised(main))  # a user's code may have replaced sys.exit
    main()
