"""Finds the packages, and builds what is in C; everything else is in pyproject.toml."""

from glob import glob

from setuptools import Extension, find_packages, setup

# pyproject.toml can only name packages after the folders in which they are found, so that it would find the adapters
# through the symlink powersgd_triton/integrations. An sdist leaves that out, and zip archives and checkouts on Windows
# hold a text file in its place. The adapters are therefore found in the folder that holds them.
NAME = "powersgd_triton"
ADAPTERS = f"{NAME}.integrations"

# Python loads it by ctypes: it uses neither Python's headers nor torch's. Not linked with OpenMP, whose functions are
# those that torch has loaded. Without a compiler the package does without it. Python's own options have -fwrapv, with
# which loops over ints are slower.
HOST = Extension(
    f"{NAME}.ops._host",
    sorted(glob(f"{NAME}/ops/*.c")),
    depends=glob(f"{NAME}/ops/*.h"),
    extra_compile_args=[
        *("-std=c11", "-O3", "-fopenmp", "-ffp-contract=off", "-fno-trapping-math", "-fno-wrapv", "-Wno-psabi")
    ],
    optional=True,
)

setup(
    ext_modules=[HOST],
    packages=[
        *find_packages(include=[NAME, f"{NAME}.*"], exclude=[ADAPTERS, f"{ADAPTERS}.*"]),
        *(f"{NAME}.{package}" for package in find_packages(include=["integrations", "integrations.*"])),
    ],
    package_dir={ADAPTERS: "integrations"},
)
