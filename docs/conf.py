"""Sphinx: MyST pages, those with code cells executed at each build, and docstrings as they are, in the furo theme.

The notebooks are shown as they are committed: a test executes each and compares.
"""

import inspect
import re
import runpy
import shutil
from pathlib import Path

import torch

from torch_impl.contract import spec_line

project = "Shardproof"
author = "The Shardproof developers"
copyright = "The Shardproof developers"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build", "jupyter_execute", "examples", "images"]
html_theme = "furo"
html_title = "Shardproof"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_excludepatterns = ["notebooks/*"]
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_show_tb = True
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
OURS = ("torch_impl.", "jax_ref.")


def with_notebooks(app):
    """Put the notebooks among the pages."""
    folder = Path(app.srcdir) / "notebooks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for notebook in sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("[0-9]*.ipynb")):
        shutil.copy(notebook, folder)


def with_gallery(app):
    """Write the gallery's page and take its figures from the notebooks."""
    runpy.run_path(str(Path(app.srcdir) / "gallery.py"))["write"](Path(app.srcdir))


def to_notebooks(app, page, source):
    """A page's link to a notebook of the repository leads to the copy among the pages."""
    source[0] = re.sub(r"\]\(((?:\.\./)*)\.\./notebooks/", r"](\1notebooks/", source[0])


def as_it_is(app, what, name, of, options, lines):
    """Docstrings are laid out by hand: formulas, specs, costs in columns. A package's first line is its page's."""
    if what == "module" and not name.startswith("jax_ref."):
        del lines[:2]
    specs = spec_line(of) if what in ("function", "class", "method") else ""
    if specs:  # a contract's specs stand in the signature; here they are one line below the first sentence
        lines[1:1] = ["", f"    {specs}"]
    lines[:] = [".. code-block:: text", "", *(f"   {line}" for line in lines), ""] if any(lines) else []


def of_apply(app, what, name, of, options, signature, returned):
    """An autograd Function is called with the arguments of its forward but the context."""
    if not (inspect.isclass(of) and issubclass(of, torch.autograd.Function)):
        return None
    forward = inspect.signature(of.forward)
    parameters = [
        f"{x.name}: {x.annotation}" + ("" if x.default is x.empty else f" = {x.default}")
        for x in list(forward.parameters.values())[1:]
    ]
    return f"({', '.join(parameters)})", forward.return_annotation


def is_left_out(app, what, name, of, skip, options):
    """What is called through `apply`, what Python adds, and what a module only has for itself."""
    if name.startswith("__") or name in ("forward", "backward"):
        return True
    return None if what == "class" else skip or not str(getattr(of, "__module__", "")).startswith(OURS)


def setup(app):
    app.connect("builder-inited", with_notebooks)
    app.connect("builder-inited", with_gallery)
    app.connect("source-read", to_notebooks)
    app.connect("autodoc-process-docstring", as_it_is)
    app.connect("autodoc-process-signature", of_apply)
    app.connect("autodoc-skip-member", is_left_out)
