"""Sphinx: MyST pages, those with code cells executed at each build, in the furo theme."""

project = "Shardproof"
author = "The Shardproof developers"
copyright = "The Shardproof developers"
extensions = ["myst_nb"]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_build", "jupyter_execute", "examples", "images"]
html_theme = "furo"
html_title = "Shardproof"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_show_tb = True
