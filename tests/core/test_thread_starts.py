"""Threads that were started and have yet to begin when the process ends."""

from __future__ import annotations

import pytest
from sanitizers import compiled

import testing

LATE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
struct Job { void* (*run)(void*); void* argument; };
static void* late(void* given) {
  Job job = *static_cast<Job*>(given);
  usleep(200000);
  return job.run(job.argument);
}
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* data) noexcept {
  static auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (!getenv("BEGINS_LATE")) return real(thread, how, run, data);
  return real(thread, how, late, new Job{run, data});
}
"""


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """Return a library that delays the start of threads once BEGINS_LATE is in the environment."""
    folder = tmp_path_factory.mktemp("late")
    (folder / "late.cpp").write_text(LATE)
    done = compiled(folder / "late.so", "-shared", "-fPIC", folder / "late.cpp", "-ldl")
    assert done.returncode == 0, done.stderr
    return folder / "late.so"


def test_exit_waits_until_a_started_thread_has_begun(host_engine, late):
    """Python frees memory that a thread reads when it begins: in a short program the watchdog has crashed there."""
    done = testing.run_python(
        """
        import atexit, os, time

        def names():
            found = []
            for task in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{task}/comm") as file:
                    found.append(file.read().strip())
            return found

        @atexit.register  # the first, which is called last
        def tell():
            time.sleep(0.05)  # it takes its name once it has begun
            print("at the end:", *sorted(names()))

        import ncclpy

        os.environ["BEGINS_LATE"] = "yes"
        comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0, timeout=60)
        print("before:", *sorted(names()))
        """,
        env={"LD_PRELOAD": str(late)},
    )
    before, end = done.stdout.splitlines()
    assert before.startswith("before:") and "ncclpy-watcher" not in before
    assert end.startswith("at the end:") and "ncclpy-watcher" in end
