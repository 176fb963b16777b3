"""Find where a model first departs from its reference: every module's input, output and gradients, in order.

Names are loaded on first use, because ranks in other processes import this package and must not load JAX.
`__init__.pyi` lists each name with its module.
"""

from pathlib import Path

from shardproof import lazy_names

__getattr__ = lazy_names.loader(__name__, lazy_names.names_in(Path(__file__).with_suffix(".pyi")))
