"""Configure Sphinx. ``sphinx-build -W docs build/docs`` builds the pages, where ncclpy is installed."""

import ast
import re
import sys
from importlib import resources
from pathlib import Path

import ncclpy

sys.path.insert(0, str(Path(__file__).parent))
from nccl_pages import link_to_nvidia

project = "ncclpy"
author = copyright = "the ncclpy authors"
release = version = ncclpy.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build", "reference"]  # docs/reference has the pages of docs/api for readers of the repository
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"ncclpy {release}"
nitpicky = False

myst_heading_anchors = 3  # so that [text](page.md#heading) works here as on GitHub

# A name in single backticks is linked if the package has it; any other text stays as it is.
default_role = "py:obj"
autodoc_typehints = "none"  # the docstrings have the types in words
# Sphinx 9.0 fails if the hook below gives a signature to an object without one.
autodoc_use_legacy_class_based = True
autodoc_member_order = "groupwise"
napoleon_google_docstring = False
napoleon_use_ivar = True

# `group` and `faults` are classes under another name, which autodoc would show as "alias of ...".
for name in ("group", "faults"):
    original = getattr(ncclpy, name)
    setattr(ncclpy, name, type(name, (original,), {"__doc__": original.__doc__, "__module__": "ncclpy"}))


def mend_docstring(app, what, name, obj, options, lines):
    """Link C functions to NVIDIA's pages, and put attributes that share a line on lines of their own."""
    mended = []
    for line in lines:
        shared = re.match(r":(ivar|vartype) (\w+(?:, \w+)+):(.*)", line)
        each = [f":{shared[1]} {one}:{shared[3]}" for one in shared[2].split(", ")] if shared else [line]
        mended += map(link_to_nvidia, each)
    lines[:] = mended


def sign_class(app, what, name, obj, options, signature, returned):
    """Take the signature of a compiled class from its stub: a Cython constructor has none."""
    if what != "class" or signature:
        return None
    for base in obj.__mro__:
        package, _, module = base.__module__.rpartition(".")
        stub = resources.files(package) / f"{module}.pyi" if package else None
        if stub is None or not stub.is_file():
            continue
        for node in ast.walk(ast.parse(stub.read_text())):
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__new__"):
                        return constructor(method.args), None
    return None


def constructor(arguments):
    """Write a stub's arguments without self and without types; nothing if the constructor takes none."""
    del arguments.args[0]
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            if argument.annotation is not None and ast.unparse(argument.annotation) == "NoReturn":
                return ""
            argument.annotation = None
    return f"({ast.unparse(arguments)})"


def link_to_api(app, page, source):
    """Turn links to docs/reference, which the repository shows with signatures, into links to docs/api."""
    source[0] = re.sub(r"(\]\((?:\.\./)*)reference/", r"\1api/", source[0])


def setup(app):
    """Register the hooks."""
    app.connect("source-read", link_to_api)
    app.connect("autodoc-process-docstring", mend_docstring)
    app.connect("autodoc-process-signature", sign_class)
