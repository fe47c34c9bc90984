"""The machine of a result: processor, memory, kernel, GPUs and the versions of packages."""

import importlib.metadata
import os
import platform
import shutil
import subprocess

PACKAGES = ("ncclpy", "numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "nccl4py", "cuda-core", "cuda-bindings")


def describe() -> dict[str, object]:
    """Describe this machine, without anything that identifies it."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "gpus": _gpus(),
        "load": round(os.getloadavg()[0], 1),
    }


def versions() -> dict[str, str]:
    """Return the version of Python, and of each package of interest that is installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # no /proc: the platform module knows a little
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Return one line for each GPU, as nvidia-smi names it; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
