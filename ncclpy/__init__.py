"""NCCL for Python."""
from ncclpy.core.library import library, use
