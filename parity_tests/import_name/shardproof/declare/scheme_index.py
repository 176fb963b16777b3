"""A cached index of the built-in schemes, so that finding a scheme by its name imports no test.

The index also has pictures of each scheme on its declared meshes, which `shardproof draw` prints without torch and JAX.
It is built from the imported schemes, and built anew when a source, Python or a package in `VERSIONS` changes. It is
stored in the user's cache folder; if the folder is not writable, every process imports the schemes. This file imports
nothing slow.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.declare.followed import followed
from shardproof.places import ROOT, SOURCES

if TYPE_CHECKING:
    from shardproof.declare.declared import Declared

VERSIONS = ("torch", "jax", "numpy", "transformers", "safetensors")  # declarations depend on these packages
NOT_PRINTED = ("key", "line", "search_texts", "public")  # fields of an entry
MAX_FILES = 8  # indexes to keep: each checkout and environment has its own


@dataclass(frozen=True)
class Entry:
    """A built-in scheme: its key in the table, its file relative to the root, and its arguments.

    `public` says whether it verifies a public function or class, see `public_names.is_public`; `verifies` has the names
    of these, except records of arguments. `search_texts` are where `shardproof list WORD` looks too: values of options,
    and the first docstring lines of these functions, of their files and of the reference.
    """

    key: str
    name: str
    file: str
    line: int
    mesh: dict[str, list[int]]
    inputs: dict[str, str]
    outputs: dict[str, str]
    dtypes: list[str]
    engines: list[str]
    reference: str
    verifies: list[str]
    search_texts: list[str]
    public: bool

    def to_dict(self) -> dict[str, Any]:
        """As `shardproof list --json` prints it."""
        record = {name: value for name, value in asdict(self).items() if name not in NOT_PRINTED}
        return {**record, "file": f"{self.file}:{self.line}"}


def entry_of(scheme: Declared) -> Entry:
    """The entry of an imported scheme, built-in or a user's."""
    from shardproof.implementation.public_names import is_public, public_names_of

    verified = [each for each in public_names_of(scheme.fn) if not each.carries_arguments]
    functions = [each.value for each in verified]
    described = [*functions, *(sys.modules[function.__module__] for function in functions), scheme.reference]
    options = [value for values in scheme.all_options.values() for value in values if isinstance(value, str)]
    reference = getattr(scheme.reference, "__name__", type(scheme.reference).__name__)
    path = Path(scheme.file)
    return Entry(
        key=scheme.key,
        name=scheme.name,
        file=str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else scheme.file,
        line=scheme.line,
        mesh={axis: list(sizes) for axis, sizes in scheme.mesh.items()},
        inputs={arg.name: str(arg.spec) for arg in scheme.inputs},
        outputs={arg.name: str(arg.spec) for arg in scheme.outputs},
        dtypes=list(scheme.dtypes),
        engines=list(scheme.engines),
        reference=f"{scheme.reference.__module__}.{reference}",
        verifies=[f"{each.package}.{each.name}" for each in verified],
        search_texts=list(dict.fromkeys([*options, *map(_first_line, described)])),
        public=is_public(scheme.fn),
    )


def _first_line(described: Any) -> str:
    return (described.__doc__ or "").strip().partition("\n")[0]


def entries() -> list[Entry]:
    """Every built-in scheme, in order of file and line: from the stored index if there is one, else by importing.

    Importing takes half a minute; standard error shows its progress if it is a terminal.
    """
    if index := _stored():
        return [Entry(**record) for record in index["schemes"]]
    from shardproof.declare import discover
    from shardproof.report.declared_pictures import declared_pictures

    schemes = discover.built_in()
    imported = [entry_of(scheme) for scheme in followed(schemes, "indexing built-in schemes")]
    if _is_complete(imported, discover.left_out()):
        drawn = followed(schemes, "drawing built-in schemes")
        _store(
            lambda: {
                "schemes": [asdict(entry) for entry in imported],
                "pictures": {scheme.name: declared_pictures(scheme) for scheme in drawn},
            }
        )
    return imported


def stored_picture(name: str, sizes: Mapping[str, int]) -> str | None:
    """The picture of a built-in scheme with these sizes of mesh axes; None if not stored."""
    index = _stored()
    return index["pictures"].get(name, {}).get(sizes_key(sizes)) if index else None


def sizes_key(sizes: Mapping[str, int]) -> str:
    """The key of a stored picture."""
    return " ".join(f"{axis}={size}" for axis, size in sorted(sizes.items()))


def _is_complete(imported: list[Entry], left_out: dict[str, str]) -> bool:
    """Whether every file was imported, except those that need a missing package."""
    missing = [name for name in VERSIONS if not _is_installed(name)]
    return bool(imported) and all(any(f"needs {name};" in reason for name in missing) for reason in left_out.values())


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _stored() -> dict[str, Any] | None:
    """The index for these sources, if stored: a record of each scheme, and its pictures by name and sizes."""
    try:
        index = json.loads(_file().read_text(encoding="utf-8"))
        are_records = index["schemes"] and all(isinstance(Entry(**each).key, str) for each in index["schemes"])
        are_texts = all(isinstance(text, str) for each in index["pictures"].values() for text in each.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return index if are_records and are_texts else None


def _store(index: Callable[[], dict[str, Any]]) -> None:
    """Write the index if the folder is writable. Moving it into place keeps other processes from reading half of it."""
    file = _file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            part = Path(folder) / file.name
            part.write_text(json.dumps(index()), encoding="utf-8")
            os.replace(part, file)
        by_age = sorted(file.parent.glob("schemes-*.json"), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-MAX_FILES]:
            old.unlink(missing_ok=True)


def _file() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shardproof" / f"schemes-{_fingerprint()}.json"


def _fingerprint() -> str:
    """A digest of the sources' paths, sizes and modification times, and of the versions that declarations depend on."""
    digest = hashlib.sha256(f"{ROOT} {sys.version}".encode())
    for name in VERSIONS:
        digest.update(f"{name} {version(name) if _is_installed(name) else None}".encode())
    for source in SOURCES:
        for folder, inner, files in os.walk(source):
            inner[:] = sorted(name for name in inner if name != "__pycache__")
            for name in sorted(name for name in files if name.endswith(".py")):
                status = os.stat(os.path.join(folder, name))
                digest.update(f"{folder}/{name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
