"""Find schemes: in a user's file or folder, or by name or glob in the table of declared schemes."""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import importlib
import importlib.util
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from shardproof.declare import failed_declaration, scheme_index, travel
from shardproof.declare.declared import Declared
from shardproof.declare.failed_declaration import FailedDeclaration, FailedImport
from shardproof.declare.followed import followed
from shardproof.declare.own_modules import check_own_modules, is_beside
from shardproof.declare.scheme_mentions import declares
from shardproof.declare.targets import BrokenImport, LeftImport, NeedsExtra, NoScheme, UnusableTarget, is_path
from shardproof.endings import exits, journal
from shardproof.endings.exit_status import USAGE, of_error
from shardproof.endings.raised import message_of, pass_interrupt
from shardproof.places import SHARDPROOF, TESTS, component_folders

TABLE: dict[str, Declared] = {}
_spec_of: dict[str, Any] = {}  # by a scheme's key, the spec of the declaring module: each import makes a new spec


def enter(scheme: Declared, errors: Callable[[str], ValueError]) -> None:
    """Add a scheme to the table; reloading the same file, or running a notebook cell again, replaces its entry.

    Two schemes with one name in one file are rejected: a case identifies its scheme by name only.
    """
    old, spec = TABLE.get(scheme.key), getattr(sys.modules.get(scheme.declared_by or ""), "__spec__", None)
    if old is not None and not _is_cell(old.file):
        is_of_one_import = spec is not None and spec is _spec_of.get(scheme.key)
        if old.file != scheme.file:
            raise errors(f"is already declared in {old.file}:{old.line}")
        if old.line != scheme.line and (is_of_one_import or _is_defined_twice(scheme)):
            raise errors(f"is defined in line {old.line} and again in line {scheme.line}; give one another name")
        if is_of_one_import:
            raise errors(
                f"is declared twice by line {scheme.line}, as in a loop; "
                "give each function another __name__ before scheme(...) takes it"
            )
        if None not in (old.declared_by, scheme.declared_by) and old.declared_by != scheme.declared_by:
            raise errors(f"is already declared by {declaring_file(old)}; give the function a name of its own there")
    TABLE[scheme.key], _spec_of[scheme.key] = scheme, spec


def declaring_file(scheme: Declared) -> str:
    """The file that declares a scheme; its function may be defined in another file."""
    return getattr(sys.modules.get(scheme.declared_by or ""), "__file__", None) or scheme.file


def _is_defined_twice(scheme: Declared) -> bool:
    """Whether the scheme's file now has two functions of its name: one may only have moved since the last import."""
    linecache.checkcache(scheme.file)
    starts = f"def {scheme.name}("
    return sum(line.startswith(starts) for line in linecache.getlines(scheme.file)) > 1


def _is_cell(file: str) -> bool:
    return file.startswith("<") or "ipykernel" in file


def lookup(key: str) -> Declared:
    """The scheme of a CaseSpec; imports its module if necessary."""
    if key not in TABLE:
        importlib.import_module(key.partition(":")[0])
    return TABLE[key]


NOT_OWN = (
    "site-packages",
    "dist-packages",
    "node_modules",
    "__pycache__",
)  # folders in a project with other people's code
IMPORTS = "importing built-in schemes"
EXTRAS = {"transformers": "hf", "safetensors": "hf"}  # packages that some components need, with the extra of each


def find(targets: list[str]) -> list[Declared]:
    """Schemes of all targets, see `find_declarations`. Errors: UnusableTarget for a declaration that failed."""
    return _usable(find_declarations(targets))


def find_declarations(targets: list[str]) -> list[Declared | FailedDeclaration | FailedImport]:
    """Declarations of all targets, including failed ones; all built-in schemes if there is no target.

    A target is a file, `file.py::name`, a folder, a name or a glob.
    """
    by_key: dict[str, Declared | FailedDeclaration | FailedImport] = {}
    here = os.getcwd() if targets else ""

    def from_here(file: str | Path) -> str:
        """The file's path from the first working folder, which an earlier file may have changed at its import."""
        return str(file) if os.getcwd() == here else os.path.join(here, file)

    def try_declarations(file: str, name: str = "") -> Sequence[Declared | FailedDeclaration | FailedImport]:
        """A file without schemes, or whose import fails, is returned as a failure, so that the others are judged."""
        try:
            return [declaration_of_file(file, name)] if name else declarations_of_file(file)
        except (NoScheme, BrokenImport, LeftImport) as error:
            path, sentence = Path(file).resolve(), str(error)
            return [FailedImport(path.name, str(path), _line_of(path, sentence), sentence, of_error(error))]

    for target in targets or ["*"]:
        file, _, name = target.partition("::")
        path = Path(from_here(target)) if targets else Path(target)
        found: Sequence[Declared | FailedDeclaration | FailedImport]
        if not is_path(str(path)):
            found = _schemes_by_pattern(target)
        elif name:
            find_one = try_declarations if len(targets) > 1 else lambda file, name: [declaration_of_file(file, name)]
            found = find_one(from_here(file), name)
        elif path.is_dir():
            files = [file for file in python_files(path) if declares(file)]
            if not files:
                raise UnusableTarget(f"{target}: no file below declares a scheme (none has '@scheme')")
            found = [each for file in files for each in try_declarations(from_here(file))]
        else:
            found = (declarations_of_file if len(targets) == 1 else try_declarations)(from_here(target))
        by_key |= {each.key: each for each in found}
    return list(by_key.values())


def _usable(declarations: Sequence[Declared | FailedDeclaration | FailedImport]) -> list[Declared]:
    for each in declarations:
        if isinstance(each, FailedImport) and each.status != USAGE:
            raise LeftImport(each.sentence, each.line)
        if not isinstance(each, Declared):
            raise UnusableTarget(each.sentence)
    return [each for each in declarations if isinstance(each, Declared)]


def python_files(folder: Path) -> list[Path]:
    """Python files below a folder, except installed or hidden ones; a link to a folder is followed.

    Errors: UnusableTarget for a root directory.
    """
    if folder.resolve() == Path(folder.resolve().anchor):
        raise UnusableTarget(f"{folder} is a whole disk; give a file, or the folder of a project")
    paths: list[Path] = []
    # A link to a parent folder would bring other projects' files, a link to a seen folder the same files twice.
    seen = {folder.resolve(), *folder.resolve().parents}
    for place, inner, files in os.walk(folder, followlinks=True):
        own = [name for name in inner if name not in NOT_OWN and not name.startswith(".")]
        new = {real: name for name in own if (real := (Path(place) / name).resolve()) not in seen}
        seen |= {*new}
        inner[:] = new.values()
        paths += [path for name in files if name.endswith(".py") and (path := Path(place) / name).is_file()]
    return sorted(paths)


def built_in() -> list[Declared]:
    """Every scheme that the parity tests declare, in order of file and line, except those in `left_out`."""
    files = followed(_declaring(), IMPORTS)
    return [scheme for file in files if not _needs(file) for scheme in schemes_of_file(str(file))]


def left_out() -> dict[str, str]:
    """Files with schemes that `built_in` lacks, each with the extra that it needs."""
    return {str(file.relative_to(TESTS.parent)): reason for file in _declaring() if (reason := _needs(file))}


def _declaring() -> list[Path]:
    files = [file for folder in component_folders() for file in sorted(folder.glob("test_*.py"))]
    # A test's own wrapper may call `scheme(`, so that `declares` would miss it.
    return [file for file in files if "scheme(" in file.read_text(encoding="utf-8")]


def _needs(file: Path) -> str | None:
    try:
        schemes_of_file(str(file))
    except NeedsExtra as reason:
        return str(reason)
    return None


def schemes_of_file(file: str) -> list[Declared]:
    """Import a file and return the schemes it declares. Errors: UnusableTarget, also if one declaration failed."""
    return _usable(declarations_of_file(file))


def declarations_of_file(file: str) -> list[Declared | FailedDeclaration | FailedImport]:
    """Import a file and return its declarations, including failed ones, in order of lines. Errors: UnusableTarget.

    If the import exits, the schemes declared by then are returned too: a training script often ends with an exit.
    """
    declarations: list[Declared | FailedDeclaration | FailedImport] = []
    try:
        name = module_of_file(file).__name__
    except LeftImport as left:
        path = Path(file).resolve()
        declarations.append(FailedImport(path.name, str(path), left.line, str(left)))
        name = _name_of(path)
    declarations += [scheme for scheme in TABLE.values() if scheme.declared_by == name]
    declarations += failed_declaration.of_module(name)
    if not declarations:
        raise NoScheme(f"{file}: declares no scheme; decorate a function with @scheme")
    return sorted(declarations, key=lambda each: each.line)


def scheme_of_file(file: str, name: str) -> Declared:
    """As `declaration_of_file`. Errors: UnusableTarget, also if the declaration failed."""
    return _usable([declaration_of_file(file, name)])[0]


def declaration_of_file(file: str, name: str) -> Declared | FailedDeclaration:
    """The declaration with this name that a file contains or imports. Errors: UnusableTarget."""
    module = module_of_file(file)
    by_name = {key: value for key, value in vars(module).items() if isinstance(value, Declared | FailedDeclaration)}
    by_name |= {each.name: each for each in failed_declaration.of_module(module.__name__)}
    by_name |= {each.name: each for each in TABLE.values() if each.declared_by == module.__name__}
    if name not in by_name:
        has = f"it has {', '.join(sorted(by_name))}" if by_name else "it declares and imports none"
        raise UnusableTarget(f"{file}::{name}: no scheme of this name{nearest(name, sorted(by_name))} ({has})")
    return by_name[name]


def module_of_file(file: str) -> ModuleType:
    """Import a file; its functions are pickled by value. Errors: UnusableTarget."""
    try:
        path = Path(file).resolve()
    except (OSError, RuntimeError):  # which one depends on the version of Python
        raise UnusableTarget(f"{file}: is a loop of symbolic links; give a file") from None
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UnusableTarget(f"{file}: is a pipe or a device; give a file")
    if not path.is_file():
        hint = nearest(path.name, sorted(other.name for other in path.parent.glob("*.py")))
        raise UnusableTarget(f"{file}: {'is a folder; give a file' if path.is_dir() else f'no such file{hint}'}")
    key, record = f"{journal.IMPORT}{path}", journal.current
    sentence = None if record is None else record.sentence(key)
    if sentence is not None:
        raise LeftImport(f"cannot import {file}: {sentence}", _line_of(path, sentence))
    try:
        if record is None or _name_of(path) in sys.modules:
            with exits.raised():
                return _import_file(path)
        record.begin(key)
        try:
            return _import_file(path)
        finally:
            record.done(key)
    except SystemExit as left:
        from shardproof.engines.ledger import at_users_line  # here: engines are above declarations

        at = at_users_line(left)
        what = f" by {message_of(left)}" if isinstance(left.code, str) else ""
        remedy = "run that code only if __name__ == '__main__'"
        raise LeftImport(f"cannot import {file}: it exits{what}{at}; {remedy}", _line_of(path, at)) from None
    except BaseException as error:
        pass_interrupt(error)
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in EXTRAS and path.is_relative_to(TESTS):
            raise NeedsExtra(f"needs {package}; pip install -e '.[{EXTRAS[package]}]' in the clone") from error
        raise BrokenImport(f"cannot import {file}{_message_of(error, path)}") from error


def _line_of(path: Path, sentence: str) -> int:
    """The line of this file that a sentence names last; 0 if it names none."""
    return int([0, *re.findall(rf"\b{re.escape(path.name)}:(\d+)", sentence)][-1])


def _schemes_by_pattern(pattern: str) -> list[Declared]:
    entries = scheme_index.entries()
    matches = [entry for entry in entries if fnmatch.fnmatch(entry.name, pattern) or entry.key == pattern]
    if not matches:
        if "=" in pattern:
            raise UnusableTarget(
                f"{pattern} is not a target; write sizes after --mesh or --dim, as in --mesh dp=2,cp=2"
            )
        file_hint = f"; did you mean {pattern}.py?" if Path(f"{pattern}.py").is_file() else ""
        hint = file_hint or nearest(pattern, [entry.name for entry in entries])
        raise UnusableTarget(f"{pattern}: no file and no scheme of this name{hint} (shardproof list --all shows all)")
    for file in followed(sorted({entry.file for entry in matches}), IMPORTS):
        schemes_of_file(str(TESTS.parent / file))
    return [TABLE[entry.key] for entry in matches]


def nearest(word: str, names: Sequence[str]) -> str:
    """`; did you mean that?` if there is a similar name, else an empty string."""
    matches = [name for name in names if word in name] or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


class LeftToParent(BaseException):
    """A file starts a run when imported, and this process is a rank of such a run: only the parent runs it."""


_on_rank: set[str] = set()
is_importing_on_rank = False


def file_of(job: Any) -> str | None:
    """The file that a rank's process imports before it loads a job with a scheme's function as `.fn`.

    None for a notebook cell, for the running script, which must not run again, and for this project's files, unless a
    folder of the user hides them.
    """
    module = getattr(getattr(job, "fn", None), "__module__", None) or "__main__"
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None or not Path(file).is_file():
        return None
    path = Path(file).resolve()
    return None if _is_ours(path) and not _are_tests_hidden() else str(path)


def import_on_rank(file: str) -> None:
    """In a rank's process: import a scheme's file once, so that its patches and settings apply here too.

    A file that is missing on another host is skipped: its function is pickled by value.
    """
    global is_importing_on_rank
    if file in _on_rank or not Path(file).is_file():
        return
    _on_rank.add(file)
    is_importing_on_rank = True
    try:
        with exits.raised():
            _import_file(Path(file))
    except (LeftToParent, SystemExit):  # the parent has reported an exit
        pass
    finally:
        is_importing_on_rank = False


_left: dict[str, SystemExit] = {}  # modules whose import has exited


def _name_of(path: Path) -> str:
    """The name under which a file outside of any package is imported."""
    return f"{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


class _FromSource(SourceFileLoader):
    """Compiles a file each time: cached bytecode may be of an earlier text with the same size, from the same second."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import_file(path: Path) -> ModuleType:
    if path.is_relative_to(SHARDPROOF):
        return importlib.import_module(".".join(path.relative_to(SHARDPROOF.parent).with_suffix("").parts))
    if path.is_relative_to(TESTS):
        return _import_test(path)
    if (path.parent / "__init__.py").is_file():
        return _import_in_package(path)
    name = _name_of(path)
    if name in _left:
        raise _left[name]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    check_own_modules(path, path.parent)
    before = set(sys.modules)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        with failed_declaration.collected(name):
            spec.loader.exec_module(module)
    except SystemExit as left:  # the module stays, with the schemes that stand before the exit
        _left[name] = left
        travel.IMPORTED_WITH_SCHEMES |= {name}
        raise
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        with suppress(ValueError):  # the file may have removed its folder, so as to hide no module
            sys.path.remove(str(path.parent))
    travel.IMPORTED_WITH_SCHEMES |= {name} | {new for new in set(sys.modules) - before if is_beside(new, path.parent)}
    return module


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(TESTS) or path.is_relative_to(SHARDPROOF)


def _are_tests_hidden() -> bool:
    """Whether the user has a package or file `parity_tests` that is found before ours."""
    package = importlib.import_module(TESTS.name)
    first, *_ = [*vars(package).get("__path__", ()), ""]  # a file parity_tests.py has none
    return Path(first).resolve() != TESTS


def _import_test(path: Path) -> ModuleType:
    """Import a file of the built-in schemes, even if the user has a package of the same name."""
    if _are_tests_hidden():
        package = importlib.import_module(TESTS.name)
        package.__path__ = list(dict.fromkeys([*vars(package).get("__path__", ()), str(TESTS)]))
    return importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


def _import_in_package(path: Path) -> ModuleType:
    """Import a file of a package under its dotted name, so that its relative imports work."""
    root = next(folder for folder in path.parents if not (folder / "__init__.py").is_file())
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    check_own_modules(path, root)
    before = set(sys.modules)
    sys.path.insert(0, str(root))
    try:
        with nullcontext() if name in sys.modules else failed_declaration.collected(name):
            module = importlib.import_module(name)
    finally:
        with suppress(ValueError):
            sys.path.remove(str(root))
    if Path(module.__file__ or "").resolve() != path:
        raise ImportError(f"another package {name.partition('.')[0]!r} is already imported; rename this one")
    travel.IMPORTED_WITH_SCHEMES |= {new for new in set(sys.modules) - before if is_beside(new, root)}
    return module


def _message_of(error: BaseException, path: Path) -> str:
    """The text after the file's name: the line of the error, and the error, `:12: NameError: ...`."""
    if isinstance(error, SyntaxError):
        lines, text = [error.lineno], f"SyntaxError: {error.msg}"
    else:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        message = message_of(error)
        text = message if message.startswith("scheme '") else f"{type(error).__name__}: {message}"
    return f":{lines[-1]}: {text}" if lines and lines[-1] else f": {text}"
