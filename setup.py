"""What pyproject.toml cannot say: which files are compiled, and what a wheel carries beside the packages.

A wheel carries conf/ and run.py inside the package, where the `gpp` command finds them; an editable install finds them here.
"""

import json
import runpy
import shutil
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
COMPILED = runpy.run_path(str(ROOT / "gpp" / "compiled.py"))
LINUX = sys.platform == "linux"
EXACT = ["-O2", "-ffp-contract=off"]  # no fused products: they round differently
# No symbols, no tables for a debugger, one segment: a wheel carries what runs. Without the limit gcc repeats Cython's helpers
# wherever they are called: a sixth of the code, and planning is no faster for it. Loops alone start where a cache line does.
PACKED = ["-finline-limit=40", "-fmerge-all-constants", "-fno-plt", "-falign-functions=1", "-falign-jumps=1", "-falign-labels=1"]
SMALL = ["-g0", "-fvisibility=hidden", *(["-fno-asynchronous-unwind-tables", "-fno-ident", *PACKED] if LINUX else [])]
# All modules are one file, linked as one program: what Cython repeats in each of them is there once, three quarters of the bytes.
WHOLE = ["-flto=auto"] if LINUX else []
LINKED = ["-s", "-Wl,--build-id=none", "-Wl,-z,noseparate-code"] if LINUX else []
MODULES = [Extension(name, [name.replace(".", "/") + ".py"]) for name in COMPILED["names"]()]
# Cython's views of arrays, which all of them need: once, and not in each.
SHARED = Extension(COMPILED["VIEWS"], ["gpp/memoryviews.c"])
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "annotation_typing": False,  # the types stand in the .pxd files
    "auto_pickle": False,  # nothing here is pickled, or asks a function for its signature
    "binding": False,
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
    """Writes down what was compiled: `gpp.compiled` leaves aside what no longer is what its source says."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception:  # a compiler or linker that does not know how to save bytes
            ext.extra_compile_args, ext.extra_link_args = EXACT, []
            super().build_extension(ext)

    def run(self) -> None:
        super().run()
        library = Path(self.get_ext_fullpath(LIBRARY))
        sources = [ROOT.joinpath(*name.split(".")).with_suffix(kind) for name in COMPILED["names"]() for kind in (".py", ".pxd")]
        # One that is older was built before; this build has failed, and what is compiled is not what these files say.
        if library.exists() and library.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
            digests = {name: COMPILED["digest"](name) for name in COMPILED["names"]()}
            library.with_name("compiled.json").write_text(json.dumps(digests))


LIBRARY = f"gpp.{COMPILED['LIBRARY'].partition('.')[0]}"
TRANSLATED = cythonize(
    [*MODULES, SHARED],
    shared_utility_qualified_name=SHARED.name,
    build_dir="build/cython",
    compiler_directives=DIRECTIVES,
)
setup(
    cmdclass={"build_py": WithSettings, "build_ext": WithDigests},
    ext_modules=[
        Extension(
            LIBRARY,
            [source for module in TRANSLATED for source in module.sources],
            extra_compile_args=[*EXACT, *SMALL, *WHOLE],
            extra_link_args=[*LINKED, *WHOLE],
            optional=True,  # without a compiler the build goes on
        )
    ],
)
