"""Measurements of ncclpy and of other libraries, its rivals; run one with ``python -m benchmarks``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
