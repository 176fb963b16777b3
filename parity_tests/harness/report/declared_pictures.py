"""The pictures of a scheme on the meshes that it declares, which are stored beside the index of schemes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any

from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.declare.scheme_index import sizes_key
from parity_tests.harness.draw.drawing import one_case
from parity_tests.harness.draw.size_choices import meshes
from parity_tests.harness.report.picture import scheme_picture

MOST_MESHES = 12  # of a scheme


def declared_pictures(scheme: Declared) -> Mapping[str, str]:
    """The picture for each part of each declared mesh, as sizes may be given for some of its axes; by `sizes_key`."""
    declared = meshes(scheme, {}, None)[:MOST_MESHES]
    parts = {part for mesh in declared for n in range(len(mesh) + 1) for part in combinations(mesh.items(), n)}
    pictures = {}
    for part in sorted(parts):
        sizes: dict[str, Any] = dict(part)
        with suppress(ValueError):  # no case has these sizes
            pictures[sizes_key(sizes)] = scheme_picture(scheme, one_case(scheme, **sizes))
    return pictures
