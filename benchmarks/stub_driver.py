"""Triton's own launcher above a CUDA driver that does nothing: what a launch costs the host, without a GPU.

Kernels are compiled for an architecture, loaded and launched by Triton's code. The functions of libcuda that this calls
are those of a small library made here, which return at once.
"""

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

# The interpreter's kernels have no launcher.
os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget

SUCCEED = (
    *("cuInit", "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuCtxSetCurrent", "cuCtxSetLimit", "cuModuleUnload"),
    *("cuPointerGetAttribute", "cuPointerGetAttributes", "cuGetErrorString", "cuLaunchKernelEx", "cuLaunchKernel"),
    *("cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col", "cuOccupancyMaxActiveClusters", "cuDevicePrimaryCtxRetain"),
    *("cuDeviceGet", "cuCtxGetDevice", "cuDriverGetVersion", "cuCtxGetLimit", "cuStreamIsCapturing"),
)
GIVE = {
    # Handles may be anything but null, and every limit is large.
    **dict.fromkeys(("cuModuleLoadData", "cuModuleGetFunction", "cuCtxGetCurrent"), "*(void **)out = (void *)64;"),
    **dict.fromkeys(("cuDeviceGetAttribute", "cuFuncGetAttribute"), "*(int *)out = 232448;"),
    "cuDeviceGetCount": "*(int *)out = 1;",
}


@contextlib.contextmanager
def stub_driver(arch: int = 90) -> Iterator[None]:
    """Within, ``kernel[grid](...)`` compiles for ``sm_<arch>`` and launches nothing. Tensors may be on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")
        body = "".join(f"int {name}(void) {{ return 0; }}\n" for name in SUCCEED)
        body += "".join(f"int {name}(void *out) {{ {code} return 0; }}\n" for name, code in GIVE.items())
        Path(folder, "cuda.c").write_text(body)
        compiler = os.environ.get("CC", "cc")
        options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", str(Path(folder, "cuda.c"))]
        subprocess.run([compiler, *options, "-o", str(library)], check=True)
        # Older versions of Triton link with it by this name.
        library.with_suffix("").symlink_to(library)
        # Triton's launcher looks it up by its name, which is found since it is loaded.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        with mock.patch.dict(os.environ, {"TRITON_LIBCUDA_PATH": folder}):
            from triton.backends.nvidia import driver

            driver.libcuda_dirs.cache_clear()
            driver.library_dirs.cache_clear()
            stub = object.__new__(driver.CudaDriver)
            stub.utils, stub.launcher_cls = driver.CudaUtils(), driver.CudaLauncher
            stub.get_current_device = lambda: 0
            stub.get_current_stream = lambda device: 0  # noqa: ARG005
            stub.get_current_target = lambda: GPUTarget("cuda", arch, 32)
            before = triton.runtime.driver._active
            triton.runtime.driver.set_active(stub)
            try:
                yield
            finally:
                triton.runtime.driver._active = before
