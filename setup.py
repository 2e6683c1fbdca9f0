"""What pyproject.toml cannot say: which files are compiled, and what a wheel carries beside the packages.

A wheel carries conf/ and run.py inside the package, where the `gpp` command finds them; an editable install finds them here.
"""

import json
import runpy
import shutil
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
COMPILED = runpy.run_path(str(ROOT / "gpp" / "compiled.py"))
FOLDERS = sorted({path.parent.relative_to(ROOT) for path in (ROOT / "gpp").rglob("*.pxd")})
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
    """Writes down which sources were compiled: `gpp.compiled` leaves aside what no longer is what its source says."""

    def run(self) -> None:
        super().run()
        for folder in FOLDERS:
            built = [Path(self.get_ext_fullpath(extension.name)) for extension in extensions_of(folder)]
            if all(path.exists() for path in built):
                (built[0].parent / "compiled.json").write_text(json.dumps(COMPILED["digests"](ROOT / folder)))


def extensions_of(folder: Path) -> list[Extension]:
    """Those of a folder. Without a compiler the build goes on. No fused products: they round differently."""
    return [
        Extension(
            ".".join((*folder.parts, name)),
            [str(folder / f"{name}.py")],
            extra_compile_args=["-O2", "-ffp-contract=off", "-g0"],
            optional=True,
        )
        for name in COMPILED["parts"](ROOT / folder)
    ]


setup(
    cmdclass={"build_py": WithSettings, "build_ext": WithDigests},
    ext_modules=cythonize(
        [extension for folder in FOLDERS for extension in extensions_of(folder)],
        build_dir="build/cython",
        compiler_directives=DIRECTIVES,
    ),
)
