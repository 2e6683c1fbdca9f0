"""What pyproject.toml cannot say: the compiled part of the search, and what a wheel carries beside the packages.

A wheel carries conf/ and run.py inside the package, where the `gpp` command finds them; an editable install finds them here.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SEARCH = ("shape", "step", "climb")
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "annotation_typing": False,  # the types stand in the .pxd files
}


class WithSettings(build_py):
    """Copies what lies beside the package in the repository."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "gpp"
            ignored = shutil.ignore_patterns("__pycache__", "local")
            shutil.copytree(ROOT / "conf", package / "conf", ignore=ignored, dirs_exist_ok=True)
            shutil.copy2(ROOT / "run.py", package / "run.py")


class WithDigests(build_ext):
    """Writes down which sources were compiled: `gpp.planners.search` leaves aside what no longer is what its source says."""

    def run(self) -> None:
        super().run()
        built = [Path(self.get_ext_fullpath(f"gpp.planners.search.{name}")) for name in SEARCH]
        if all(path.exists() for path in built):
            sources = ROOT / "gpp" / "planners" / "search"
            digests = {name: hashlib.sha256((sources / f"{name}.py").read_bytes()).hexdigest() for name in SEARCH}
            (built[0].parent / "compiled.json").write_text(json.dumps(digests))


setup(
    cmdclass={"build_py": WithSettings, "build_ext": WithDigests},
    # Without a compiler the build goes on, and the same files run as plain Python. No fused products: they round differently.
    ext_modules=cythonize(
        [
            Extension(
                f"gpp.planners.search.{name}",
                [f"gpp/planners/search/{name}.py"],
                extra_compile_args=["-O2", "-ffp-contract=off", "-g0"],
                extra_link_args=["-s"] if sys.platform == "linux" else [],  # no symbols: a tenth of the wheel
                optional=True,
            )
            for name in SEARCH
        ],
        build_dir="build/cython",
        compiler_directives=DIRECTIVES,
    ),
)
