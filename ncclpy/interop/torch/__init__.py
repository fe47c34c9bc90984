"""ncclpy for torch: a backend of torch.distributed, gradients averaged during the backward pass, faster reads of
tensors.

Importing this package registers the backend. If ncclpy is installed, importing torch registers it too.
"""

from ncclpy.interop.torch.extension import read_tensors_natively
from ncclpy.interop.torch.gradients import GradientAverage, average_gradients
from ncclpy.interop.torch.parameters import broadcast_parameters
from ncclpy.interop.torch.recovery import backend_of, recover
from ncclpy.interop.torch.registration import register
from ncclpy.interop.torch.weights import WeightReceiver, Weights, WeightSender

__all__ = [
    "GradientAverage", "WeightReceiver", "WeightSender", "Weights", "average_gradients", "backend_of",
    "broadcast_parameters", "read_tensors_natively", "recover",
]  # fmt: skip

try:
    register()
except ModuleNotFoundError as error:  # torch is missing: the names here can still be imported and read about
    if (error.name or "").startswith("ncclpy"):
        raise
