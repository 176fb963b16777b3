"""The run of `shardproof train` step by step, and the trace of its first step.

Names are loaded on first use, because ranks in other processes import this package and must not load JAX.
`__init__.pyi` lists each name with its module.
"""

from pathlib import Path

from shardproof import lazy_names

__getattr__ = lazy_names.loader(__name__, lazy_names.names_in(Path(__file__).with_suffix(".pyi")))
