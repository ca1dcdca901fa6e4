"""Sphinx configuration: MyST pages, API pages from docstrings, formulas as MathML.

Build with ``python -m sphinx -W --keep-going docs docs/_build``.
"""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

import cupyops

project = "cupyops"
author = "the cupyops authors"
project_copyright = "the cupyops authors, MIT licence"
release = version = cupyops.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# The words of numpydoc's type descriptions ("array, shape (B, L, D)") pass for names of classes.
nitpick_ignore_regex = [("py:class", r"[^.]*|cupy\..*|numpy\..*")]

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"cupyops {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_math_renderer = "mathml"


logger = logging.getLogger(__name__)


def mathml(node: nodes.math | nodes.math_block) -> str:
    try:
        return str(latex2mathml.tex2mathml(node.astext(), isinstance(node, nodes.math_block)))
    except latex2mathml.MathError as error:
        logger.warning("formula: %s", error, location=node)
        return ""


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(mathml(node))
    raise nodes.SkipNode


def visit_display(translator: HTML5Translator, node: nodes.math_block) -> None:
    number = get_node_equation_number(translator, node) if node["number"] else ""
    translator.body.append(f'<div class="formula">{mathml(node)}<span>{number}</span></div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    # MathML is shown by every browser, without a script from elsewhere.
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
