"""What torch loads when it is imported: its entry points of the group ``torch.backends``, of which this is one.

It lies outside of the package, since to import that takes longer than torch's import may take for it; and whatever
goes wrong here must not be in the way of a program that has nothing to do with ncclpy.
"""

from collections.abc import Sequence


class _Devices(Sequence):
    """The types of device that the backend serves in this process, as torch asks for them when it makes a group.

    Torch's helpers allocate on what a backend is registered for, and fail where there are no GPUs. Whether there are
    any must not be asked when torch is imported: that initialises CUDA, after which the process cannot fork.
    """

    def _types(self):
        from ncclpy.interop.torch.registration import device_types

        return device_types()

    def __getitem__(self, index):
        return self._types()[index]

    def __len__(self):
        return len(self._types())

    def __repr__(self):
        return repr(self._types())


def register():
    """Have ``init_process_group("ncclpy")`` find the backend, which is imported when a group is made."""
    try:
        from torch.distributed import Backend

        add_to(Backend)
    except Exception:  # a torch without torch.distributed, say
        pass


def add_to(registry):
    """Add the backend to ``torch.distributed.Backend``, unless it is there: torch 2.6 refuses a second time."""
    if hasattr(registry, "NCCLPY"):
        return
    registry.register_backend("ncclpy", _create, extended_api=True, devices=["cpu", "cuda"])
    registry.backend_capability["ncclpy"] = _Devices()


def _create(options, backend_options):
    from ncclpy.interop.torch.registration import create

    return create(options, backend_options)
