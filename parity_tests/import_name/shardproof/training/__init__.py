"""The run of `shardproof train` step by step, and the trace of its first step.

Nothing is loaded before it is used: ranks in other processes import this package and must not load JAX. `__init__.pyi`
has the names, each with its place.
"""

from pathlib import Path

from shardproof import lazy_names

__getattr__ = lazy_names.loader(__name__, lazy_names.names_in(Path(__file__).with_suffix(".pyi")))
