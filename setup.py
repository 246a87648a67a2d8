"""Finds the packages; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

# pyproject.toml can only name packages after the folders in which they are found, so that it would find the adapters
# through the symlink powersgd_triton/integrations. An sdist leaves that out, and zip archives and checkouts on Windows
# hold a text file in its place. The adapters are therefore found in the folder that holds them.
NAME = "powersgd_triton"
ADAPTERS = f"{NAME}.integrations"

setup(
    packages=[
        *find_packages(include=[NAME, f"{NAME}.*"], exclude=[ADAPTERS, f"{ADAPTERS}.*"]),
        *(f"{NAME}.{package}" for package in find_packages(include=["integrations", "integrations.*"])),
    ],
    package_dir={ADAPTERS: "integrations"},
)
