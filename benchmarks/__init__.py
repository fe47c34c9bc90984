"""Measurements of ncclpy and its rivals; run one with ``python -m benchmarks``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
