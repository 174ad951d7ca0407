"""Where the training text comes from: Python source under permissive licences, each package pinned."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON_VERSION = "3.11.7"  # its standard library is read, and its `ast` writes the normalised text
# tests repeat themselves, vendored code has other licences and is there twice, and encodings are tables
SKIPPED_FOLDERS = {"test", "tests", "testing", "idle_test", "_vendor", "vendor", "vendored", "extern", "externals"}
SKIPPED_FOLDERS |= {"third_party", "site-packages", "encodings", "locale", "locales", "locale-data", "pydoc_data"}
SKIPPED_FOLDERS |= {"lib2to3", "migrations", "examples"}


@dataclass(frozen=True)
class Package:
    """A package of the corpus: its name and version on PyPI, and the licence that its metadata names."""

    name: str
    version: str
    licence: str


PACKAGES = (
    Package("aiohttp", "3.14.5", "Apache-2.0 AND MIT"),
    Package("algorithms", "1.0.1", "MIT"),
    Package("astropy", "8.0.2", "BSD-3-Clause"),
    Package("attrs", "26.1.0", "MIT"),
    Package("babel", "2.19.0", "BSD-3-Clause"),
    Package("black", "26.10.1", "MIT"),
    Package("bokeh", "3.9.2", "BSD-3-Clause"),
    Package("boltons", "26.2.0", "BSD-3-Clause"),
    Package("bottle", "0.13.4", "MIT"),
    Package("celery", "5.7.0", "BSD-3-Clause"),
    Package("click", "8.5.1", "BSD-3-Clause"),
    Package("dask", "2026.8.0", "BSD-3-Clause"),
    Package("django", "5.2.19", "BSD-3-Clause"),
    Package("flask", "3.1.3", "BSD-3-Clause"),
    Package("funcy", "2.1", "BSD-3-Clause"),
    Package("ipython", "9.18.1", "BSD-3-Clause"),
    Package("jedi", "0.20.1", "MIT"),
    Package("jinja2", "3.1.6", "BSD-3-Clause"),
    Package("kombu", "5.7.0", "BSD-3-Clause"),
    Package("marshmallow", "4.4.0", "MIT"),
    Package("matplotlib", "3.11.2", "matplotlib licence (PSF-based)"),
    Package("mistune", "3.4.0", "BSD-3-Clause"),
    Package("more-itertools", "11.2.1", "MIT"),
    Package("mpmath", "1.4.1", "BSD-3-Clause"),
    Package("mypy", "2.4.1", "MIT"),
    Package("networkx", "3.6.1", "BSD-3-Clause"),
    Package("nltk", "3.10.4", "Apache-2.0"),
    Package("numpy", "2.4.6", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"),
    Package("pandas", "3.1.1", "BSD-3-Clause"),
    Package("parso", "0.8.7", "MIT"),
    Package("pillow", "13.0.0", "MIT-CMU"),
    Package("ply", "3.11", "BSD-3-Clause"),
    Package("pygments", "2.21.0", "BSD-2-Clause"),
    Package("pyparsing", "3.3.3", "MIT"),
    Package("pytest", "9.2.0", "MIT"),
    Package("requests", "2.34.2", "Apache-2.0"),
    Package("rich", "15.0.0", "MIT"),
    Package("schema", "0.7.8", "MIT"),
    Package("scikit-learn", "1.9.1", "BSD-3-Clause"),
    Package("scipy", "1.17.1", "BSD-3-Clause"),
    Package("sortedcontainers", "2.4.0", "Apache-2.0"),
    Package("sphinx", "9.0.4", "BSD-2-Clause"),
    Package("sqlalchemy", "2.1.9", "MIT"),
    Package("statsmodels", "0.15.0", "BSD-3-Clause"),
    Package("sympy", "1.14.0", "BSD-3-Clause"),
    Package("toolz", "1.2.0", "BSD-3-Clause"),
    Package("tornado", "6.6.1", "Apache-2.0"),
    Package("twisted", "26.10.0", "MIT"),
    Package("werkzeug", "3.1.9", "BSD-3-Clause"),
)

HELD_OUT_MODULES = ("bisect", "colorsys", "fractions", "heapq", "netrc", "queue", "sched", "shlex", "textwrap")


def fetch_packages(folder: Path) -> None:
    """Download the pinned packages as wheels into `folder` through pip; what is there already is kept.

    Raises CalledProcessError when pip cannot find one of them.
    """
    pins = [f"{package.name}=={package.version}" for package in PACKAGES]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), *pins], check=True)


def read_packages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (path inside the wheel, source text) of every Python file of the pinned packages, in a fixed order."""
    for package in PACKAGES:
        stem = package.name.replace("-", "_").lower()
        (wheel,) = [path for path in folder.glob("*.whl") if path.name.lower().startswith(f"{stem}-{package.version}-")]
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".py") and not SKIPPED_FOLDERS & set(Path(name).parts):
                    yield name, archive.read(name).decode("utf-8", errors="replace")


def read_standard_library() -> Iterator[tuple[str, str]]:
    """Yield (path below the library, source text) of every file of the running Python's standard library.

    Raises SystemExit when another version is running than the one that the corpus was made with.
    """
    running = ".".join(map(str, sys.version_info[:3]))
    if running != PYTHON_VERSION:
        raise SystemExit(f"Python {running} is running, the corpus is made with {PYTHON_VERSION}: run it with that one")
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not SKIPPED_FOLDERS & set(name.parts):
            yield str(name), path.read_text(encoding="utf-8", errors="replace")
