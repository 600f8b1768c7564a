"""The site: `make docs` builds it into build/docs, from the pages here and from the code.

Nothing is fetched while it is built, and nothing by its pages when they are read. What is not
written by hand (the reference, the notebooks' copies) is made anew by each build, in folders that
git ignores.
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
sys.path[:0] = [str(HERE), str(ROOT)]

from making.reference import fields_of, pages, plain, with_bold_fields  # noqa: E402

from elasticlib import __version__  # noqa: E402

project, author, copyright = "elasticlib", "", ""
version = release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
exclude_patterns = ["making", "drawn", "static"]

html_theme = "furo"
html_title = f"elasticlib {__version__}"
html_static_path, html_css_files = ["static"], ["site.css"]
html_show_sphinx = html_show_copyright = False

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 120
smartquotes = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = True
napoleon_numpy_docstring = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True

FROM_ELSEWHERE = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["'](?:https?:)?//"""
)


def make_sources() -> None:
    """The pages that are made: the reference, and a copy of each notebook."""
    made, notebooks = HERE / "reference" / "made", HERE / "notebooks"
    for folder in (made, notebooks):
        folder.mkdir(exist_ok=True)
    texts = {made / name: text for name, text in pages().items()}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        texts[notebooks / path.name] = path.read_text()
    for path in {*made.iterdir(), *notebooks.iterdir()} - texts.keys():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def keep_kernels_here() -> None:
    """The notebooks' kernels keep their files in the build, and none at their user's home.

    They find the modules beside the notebooks.
    """
    (ROOT / "build" / "jupyter").mkdir(parents=True, exist_ok=True)
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        os.environ.setdefault(name, str(ROOT / "build" / "jupyter" / name.lower()))
    # Frozen modules upset the debugger that every kernel carries; nobody debugs here.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "notebooks"), os.environ.get("PYTHONPATH")))
    )


def read_docstring(_app: Any, _what: str, _name: str, obj: Any, _options: Any, lines: Any) -> None:
    """Docstrings are plain text, and some tell of their fields in running sentences."""
    lines[:] = plain(with_bold_fields("\n".join(lines), fields_of(obj))).split("\n")


def check_pages(app: Any, error: Exception | None) -> None:
    """Raises OSError for a page that would load anything from elsewhere."""
    if error is None and app.builder.format == "html":
        for path in Path(app.outdir).rglob("*.html"):
            found = FROM_ELSEWHERE.search(path.read_text())
            if found:
                raise OSError(f"{path} loads from elsewhere: {found[0]}")


def setup(app: Any) -> None:
    """Sphinx calls this; docstrings are read before napoleon does, at 500."""
    keep_kernels_here()
    make_sources()
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    app.connect("build-finished", check_pages)
