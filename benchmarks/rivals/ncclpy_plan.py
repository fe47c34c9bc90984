"""ncclpy.Plan: a group that is recorded once, launched by one call or as a CUDA graph."""

from benchmarks.road import GROUP, Road, timed
from benchmarks.setting import COUNT, FLOAT32, Setting

NAME = "ncclpy.Plan"


def open(setting: Setting) -> list[Road]:
    """Record and capture a group on a communicator of its own, or on the setting's."""
    import ncclpy

    if setting.communicator is None:
        ncclpy.use(setting.library)
    communicator = setting.communicator or ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0)
    dtype = ncclpy.DataType(FLOAT32)
    send, recv = (ncclpy.Buffer(at, COUNT, dtype, device=setting.device) for at in (setting.send, setting.recv))
    plan = ncclpy.Plan()
    with plan.record():
        for _ in range(GROUP):
            communicator.all_reduce(send, recv, stream=setting.stream)
    graph = plan.capture()
    setting.keep += [communicator, plan, graph]
    # A graph launches kernels: the library is called when it is captured, not when it is launched.
    return [
        Road(f"{name} of {GROUP} x all_reduce", f"group of {GROUP}", host, result=setting.recv, **calls)
        for name, launch, calls in (
            ("Plan.launch", plan.launch, {"groups": 1 / GROUP}),
            ("Graph.launch", graph.launch, {"reduces": 0}),
        )
        for host in [timed(setting, "launch()", per=GROUP, launch=launch)]
    ]
