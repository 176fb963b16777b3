"""Functions of mamba-ssm and causal-conv1d in plain torch and in Triton, from packages built without CUDA.

Their `__init__` files import compiled modules that such a build lacks. A stand-in replaces each of these only while
the files beside them are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

PACKAGES = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
COMPILED = ("selective_scan_cuda", "causal_conv1d_cuda")
NEEDS = "not run: needs mamba-ssm and causal-conv1d, built without CUDA; make oracles"


def is_installed() -> bool:
    try:
        return all(metadata.version(name) for name in PACKAGES.values())
    except metadata.PackageNotFoundError:
        return False


@cache
def outside() -> SimpleNamespace:
    """The modules of both packages, by short names."""
    with _without_compiled_modules():
        return SimpleNamespace(
            scan=import_module("mamba_ssm.ops.triton.ssd_combined"),
            minimal=import_module("mamba_ssm.modules.ssd_minimal"),
            selective=import_module("mamba_ssm.ops.selective_scan_interface"),
            step=import_module("mamba_ssm.ops.triton.selective_state_update"),
            norm=import_module("mamba_ssm.ops.triton.layernorm_gated"),
            conv=import_module("causal_conv1d.causal_conv1d_interface"),
        )


@contextmanager
def _without_compiled_modules() -> Iterator[None]:
    before = dict(sys.modules)
    for package, name in PACKAGES.items():
        bare = ModuleType(package)
        bare.__path__ = [str(Path(str(metadata.distribution(name).locate_file(package))))]
        sys.modules[package] = bare
    sys.modules.update({name: ModuleType(name) for name in COMPILED})
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in (*PACKAGES, *COMPILED):
                del sys.modules[name]
