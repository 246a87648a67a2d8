"""Sphinx configuration: MyST Markdown, and API pages from the docstrings. Nothing is fetched from a network."""

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# So that the pages describe this checkout, whatever is installed.
sys.path.insert(0, str(ROOT))

project = "powersgd_triton"
author = "powersgd_triton authors"
html_title = project

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# Headings can be linked as page.md#heading, as on GitHub.
myst_heading_anchors = 3

# Importing DeepSpeed takes seconds, prints, and compiles. The adapter reads ``initialize`` from the dictionary of the
# module, which a mock of Sphinx does not have. Submodules are Sphinx's mocks.
autodoc_mock_imports = ["deepspeed"]
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
vars(sys.modules["deepspeed"]).update(__path__=[], __version__="0", initialize=lambda: None)
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
# Long signatures have one argument a line.
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_theme_options = {"navigation_with_keys": False}
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_use_index = False
html_show_copyright = False
html_show_sourcelink = False
