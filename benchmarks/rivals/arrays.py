"""The arrays that rivals reduce, of each framework that is installed, on the setting's device."""

import importlib.util

from benchmarks.work.setting import COUNT, Setting


def torch_pair(setting: Setting):
    """Return two torch tensors, of ones and of zeros, or None without torch; torch's stream becomes the setting's."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not setting.gpu:
        return torch.ones(COUNT), torch.zeros(COUNT)
    if not torch.cuda.is_available():
        return None
    torch.cuda.set_device(setting.device)
    torch.cuda.set_stream(torch.cuda.ExternalStream(setting.stream, device=setting.device))
    pair = torch.ones(COUNT, device="cuda"), torch.zeros(COUNT, device="cuda")
    torch.cuda.synchronize()
    return pair


def cupy_pair(setting: Setting):
    """Return two CuPy arrays, of ones and of zeros, or None without CuPy; CuPy's stream becomes the setting's."""
    if not setting.gpu or importlib.util.find_spec("cupy") is None:
        return None
    import cupy

    cupy.cuda.Device(setting.device).use()
    stream = cupy.cuda.ExternalStream(setting.stream, setting.device)
    stream.use()
    setting.keep.append(stream)
    pair = cupy.ones(COUNT, "float32"), cupy.zeros(COUNT, "float32")
    stream.synchronize()
    return pair
