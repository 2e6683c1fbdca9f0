"""A wheel carries conf/ and run.py inside the package, where the `gpp` command finds them; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class WithSettings(build_py):
    """Copies what lies beside the package in the repository; an editable install finds it there."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "gpp"
            ignored = shutil.ignore_patterns("__pycache__", "local")
            shutil.copytree(ROOT / "conf", package / "conf", ignore=ignored, dirs_exist_ok=True)
            shutil.copy2(ROOT / "run.py", package / "run.py")


setup(cmdclass={"build_py": WithSettings})
