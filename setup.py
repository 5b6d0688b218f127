"""Puts the configurations and the examples into the wheel, below the package: they aren't part of src."""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConfigurations(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout is read where it lies
            for folder in ("configs", "examples"):
                target = Path(self.build_lib, "treetune", folder)
                copytree(folder, target, dirs_exist_ok=True, ignore=ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": WithConfigurations})
