"""What torch's users find here: gradients averaged while a backward pass runs, parameters alike on all ranks."""

from ncclpy.interop.torch_gradients import GradientAverage, average_gradients
from ncclpy.interop.torch_parameters import broadcast_parameters

__all__ = ["GradientAverage", "average_gradients", "broadcast_parameters"]
