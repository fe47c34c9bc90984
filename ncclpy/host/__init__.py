"""The host engine, ``libncclpy_host.so``: NCCL's and the CUDA driver's C interface over CPU memory.

There is nothing to import from here: `ncclpy.core.runtime.library` opens the shared library beside this file.
"""
