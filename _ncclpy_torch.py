"""What torch loads when it is imported: its entry points of the group ``torch.backends``, of which this is one.

It lies outside of the package, since to import that takes longer than torch's import may take for it; and whatever
goes wrong here must not be in the way of a program that has nothing to do with ncclpy.
"""


def register():
    """Have ``init_process_group("ncclpy")`` find the backend, which is imported when a group is made."""
    try:
        from torch.distributed import Backend

        if hasattr(Backend, "NCCLPY"):
            return
        Backend.register_backend("ncclpy", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # a torch without torch.distributed, say
        pass


def _create(options, backend_options):
    from ncclpy.interop.torch_registration import create

    return create(options, backend_options)
