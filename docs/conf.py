"""Sphinx: MyST pages, those with code cells executed at each build, and docstrings as sentences, in the furo theme.

The notebooks are shown as they are committed: a test executes each and compares. What is built needs no network:
formulas are MathML, and fonts are the reader's own.
"""

import inspect
import re
import runpy
import shutil
import sys
from pathlib import Path

import torch
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.addnodes import desc_signature
from sphinx.util.inspect import object_description
from sphinx.util.typing import stringify_annotation

from torch_impl.contract import spec_line

sys.path.insert(0, str(Path(__file__).parent))

from docstring_layout import as_rst

project = "Shardproof"
author = "The Shardproof developers"
copyright = "The Shardproof developers"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build", "jupyter_execute", "examples", "images"]
html_theme = "furo"
html_title = "Shardproof"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"
smartquotes = False  # specs stand in quotes
copybutton_prompt_text = "$ "  # of a console: commands are copied, and not what they print
python_maximum_signature_line_length = 80  # of a longer one each parameter has a line
toc_object_entries_show_parents = "hide"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_render_markdown_format = "myst"  # tables among the outputs
nb_execution_excludepatterns = ["notebooks/*"]
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds of one cell, on a machine that has other work too
nb_execution_show_tb = True
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
OURS = ("torch_impl.", "jax_ref.")
CODE = re.compile(r'(<span class="sig-(?:pre)?name[^"]*">)?<span class="pre">([^<]*)</span>')
BREAK = re.compile(r"(?<=[a-z0-9][._])(?![._])|(?<=[a-z])(?=[A-Z])")
WHOLE = 24  # characters of a word of code up to which it fits into a line, and moves to the next one
IN_COLUMN = 14  # the same in a column of a phone's table


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


def as_sentences(app, what, name, of, options, lines):
    """Sentences wrap; formulas, specs and columns stay as they are. A package's first line is its page's."""
    if what == "module" and not name.startswith("jax_ref."):
        del lines[:2]
    specs = spec_line(of) if what in ("function", "class", "method") else ""
    if specs:  # a contract's specs stand in the signature; here they follow the first sentence
        lines[1:1] = ["", f"    {specs}"]
    lines[:] = as_rst(lines, arguments(of))


def arguments(of):
    """The names of a function's parameters, which are no links."""
    try:
        return set(inspect.signature(of.forward if is_apply(of) else of).parameters)
    except (TypeError, ValueError):
        return set()


def is_apply(of):
    return inspect.isclass(of) and issubclass(of, torch.autograd.Function)


def as_written(app, what, name, of, options, signature, returned):
    """A signature in the words of the source: autodoc would spell out `Sharded[...]`.

    An autograd Function is called with the arguments of its forward but the context.
    """
    if not signature or signature == "()":
        return None
    try:
        written = inspect.signature(of.forward if is_apply(of) else of)
    except (TypeError, ValueError):
        return None
    parameters = list(written.parameters.values())[1 if is_apply(of) else 0 :]
    parameters = [each for each in parameters if each.name not in ("self", "cls")]
    texts, is_keyword = [], False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not is_keyword:
            texts.append("*")
        is_keyword |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        texts.append(parameter(each))
    result = written.return_annotation
    return f"({', '.join(texts)})", result if isinstance(result, str) else returned


def parameter(of):
    """One parameter of a signature: `dim: int = 0`."""
    stars = {of.VAR_POSITIONAL: "*", of.VAR_KEYWORD: "**"}.get(of.kind, "")
    kind = "" if of.annotation is of.empty else f": {stringify_annotation(of.annotation, 'smart')}"
    if of.default is of.empty:
        return f"{stars}{of.name}{kind}"
    default = getattr(of.default, "__name__", None) or object_description(of.default)  # a function by its name
    return f"{stars}{of.name}{kind} = {default}"


def is_left_out(app, what, name, of, skip, options):
    """Methods that are called through `apply`, names that Python adds, and private names of a module."""
    if name.startswith("__") or name in ("forward", "backward"):
        return True
    return None if what == "class" else skip or not str(getattr(of, "__module__", "")).startswith(OURS)


def without_private_names(app, tree):
    """Leave private names out of a page's contents; on the page itself they stand, for those who link to them."""
    for signature in tree.findall(desc_signature):
        if str(signature.get("_toc_name", "")).startswith("_"):
            signature["_toc_name"] = ""


def with_places_to_break(app, page, template, context, tree):
    """Names in titles, long ones elsewhere and all in a column break between their words; a short option does not."""
    if "body" in context:
        context["body"] = CODE.sub(_breakable, context["body"])
    for neighbour in filter(None, (context.get("prev"), context.get("next"))):
        neighbour["title"] = BREAK.sub("<wbr>", neighbour["title"])


def _breakable(found):
    title, text = found.groups("")
    is_whole = not title and len(text) <= WHOLE
    if is_whole and "-" in text:
        return f'<span class="pre whole">{text}</span>'
    if is_whole and len(text) <= IN_COLUMN:
        return found[0]
    place = '<wbr class="narrow">' if is_whole else "<wbr>"
    return f'{title}<span class="pre">{BREAK.sub(place, text)}</span>'


def with_sentences(app, name, source):
    """Add the sentences to the page of failures, to be shown at a click."""
    if name == "failures":
        from parity_tests.evidence.failures import page, stored

        source[0] = page.with_sentences(stored.read(Path(app.srcdir) / "failures.json"))


def in_mathml(display):
    def visit(translator, node):
        text = node.astext().replace("{aligned}", "{split}")  # the same, under the name that latex2mathml knows
        translator.body.append(convert(text, display=display))
        raise nodes.SkipNode

    return visit, None


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=in_mathml("inline"), block_renderers=in_mathml("block"))
    app.connect("doctree-read", without_private_names, priority=400)  # before contents are collected
    app.connect("builder-inited", with_notebooks)
    app.connect("builder-inited", with_gallery)
    app.connect("source-read", with_sentences)
    app.connect("source-read", to_notebooks)
    app.connect("html-page-context", with_places_to_break)
    app.connect("autodoc-process-docstring", as_sentences)
    app.connect("autodoc-process-signature", as_written)
    app.connect("autodoc-skip-member", is_left_out)
