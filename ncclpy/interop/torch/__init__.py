"""What torch's users find here: a backend of torch.distributed; gradients averaged while a backward pass runs;
tensors read in less time.

To import this registers the backend. It is registered when torch is imported, too, where ncclpy is installed.
"""

from ncclpy.interop.torch.extension import read_tensors_natively
from ncclpy.interop.torch.gradients import GradientAverage, average_gradients
from ncclpy.interop.torch.parameters import broadcast_parameters
from ncclpy.interop.torch.recovery import backend_of, recover
from ncclpy.interop.torch.registration import register

__all__ = [
    "GradientAverage", "average_gradients", "backend_of", "broadcast_parameters", "read_tensors_natively", "recover",
]  # fmt: skip

try:
    register()
except ModuleNotFoundError as error:  # of torch: the names here are for those, too, who read about them without it
    if (error.name or "").startswith("ncclpy"):
        raise
