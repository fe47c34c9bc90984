"""ncclpy.Plan: a group that is recorded once, launched by one call or as a CUDA graph."""

from benchmarks.overhead.road import GROUP, Road, timed
from benchmarks.work.setting import COUNT, FLOAT32, Setting

NAME = "ncclpy.Plan"


def open(setting: Setting) -> list[Road]:
    """Record a group twice and capture one of them, each on a communicator of its own.

    After a capture, other calls of a communicator are slower: NCCL has to order them with the graph's.
    """
    import ncclpy

    if setting.communicator is None:
        ncclpy.use(setting.library)
    dtype = ncclpy.DataType(FLOAT32)
    send = ncclpy.Buffer(setting.send, COUNT, dtype, device=setting.device)
    recvs = [ncclpy.Buffer(setting.recv + 4 * COUNT * i, COUNT, dtype, device=setting.device) for i in range(GROUP)]
    plans = []
    for _ in range(2):
        unique_id = ncclpy.UniqueId.from_bytes(setting.ids.pop(0)) if setting.ids else ncclpy.get_unique_id()
        communicator = ncclpy.Communicator.init(setting.nranks, setting.rank, unique_id, device=setting.device)
        plans.append(ncclpy.Plan())
        with plans[-1].record():
            for recv in recvs:
                communicator.all_reduce(send, recv, stream=setting.stream)
        setting.keep += [communicator, plans[-1]]
    graph = plans[1].capture()
    setting.keep.append(graph)
    # A graph launches kernels: the library is called at the capture, not at a launch.
    return [
        Road(f"{name} of {GROUP} x all_reduce", f"group of {GROUP}", host, result=setting.recv, **calls)
        for name, launch, calls in (
            ("Plan.launch", plans[0].launch, {"groups": 1 / GROUP}),
            ("Graph.launch", graph.launch, {"reduces": 0}),
        )
        for host in [timed(setting, "launch()", per=GROUP, launch=launch)]
    ]
