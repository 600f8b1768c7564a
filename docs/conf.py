"""Sphinx configuration of the documentation: `make docs` builds it into build/docs.

Neither the build nor a reader of the pages loads anything from the network. The notebooks are
copied into a directory that git ignores. All other pages are in the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from elasticlib import __version__  # noqa: E402

project, author, copyright = "elasticlib", "", ""
version = release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "making.code_tables"]
exclude_patterns = ["making", "drawn", "static"]

html_theme = "furo"
html_title = f"elasticlib {__version__}"
html_static_path, html_css_files = ["static"], ["site.css"]
html_show_sphinx = html_show_copyright = False

smartquotes = False

# Docstrings are in Google style, and mark code as Markdown does: with one backtick.
default_role = "literal"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lightning", "ray", "transformers"]
napoleon_numpy_docstring = False
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True

REMOTE_RESOURCE = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["'](?:https?:)?//"""
)


def copy_notebooks() -> None:
    """Copy the notebooks to where Sphinx finds them, and remove earlier copies."""
    copies = HERE / "notebooks"
    copies.mkdir(exist_ok=True)
    texts = {copies / path.name: path.read_text() for path in (ROOT / "notebooks").glob("*.ipynb")}
    for path in set(copies.iterdir()) - texts.keys():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def set_kernel_environment() -> None:
    """Keep the files of the notebooks' kernels in the build directory.

    The kernels also find the modules in the directory of the notebooks.
    """
    (ROOT / "build" / "jupyter").mkdir(parents=True, exist_ok=True)
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        os.environ.setdefault(name, str(ROOT / "build" / "jupyter" / name.lower()))
    # Each kernel has a debugger, which warns about frozen modules. No debugger is used here.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "notebooks"), os.environ.get("PYTHONPATH")))
    )


def check_pages(app: Any, error: Exception | None) -> None:
    """Raise OSError for a page that would load a resource from the network."""
    if error is None and app.builder.format == "html":
        for path in Path(app.outdir).rglob("*.html"):
            match = REMOTE_RESOURCE.search(path.read_text())
            if match:
                raise OSError(f"{path} loads a resource from the network: {match[0]}")


def setup(app: Any) -> None:
    """Prepare the build. Sphinx calls this function."""
    set_kernel_environment()
    copy_notebooks()
    app.connect("build-finished", check_pages)
