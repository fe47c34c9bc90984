"""Registrations of nested buffers: one registration with NCCL, which its last user deregisters."""

import gc
import random
import threading
import weakref

import numpy as np
import pytest
import thread_ranks

import ncclpy
import testing
from ncclpy import bindings
from ncclpy.core.runtime.device import using


class Memory:
    """Memory of ncclMemAlloc; tests register parts of it."""

    def __init__(self, device=0, nbytes=4096):
        self.device, self.nbytes = device, nbytes
        self.pointer = self._allocate()

    def _allocate(self):
        with using(self.device):
            return bindings.mem_alloc(self.nbytes)

    def part(self, begin=0, end=None):
        end = self.nbytes if end is None else end
        return ncclpy.Buffer(self.pointer + begin, end - begin, "uint8", device=self.device)

    def is_registered(self):
        """Return whether the engine refuses to free the memory; if it frees it, allocate again."""
        try:
            bindings.mem_free(self.pointer)
        except ncclpy.NcclError as error:
            assert "registered" in str(error), error
            return True
        self.pointer = self._allocate()
        return False

    def free(self):
        bindings.mem_free(self.pointer)


@pytest.fixture
def memory(comm1, host_engine):
    """Memory on the device of `comm1`, freed after its abort: the engine refuses to free memory that is registered."""
    memory = Memory(comm1.device)
    yield memory
    comm1.abort()
    memory.free()


def test_parts_use_the_registration_of_the_whole(comm1, memory):
    whole = comm1.register(memory.part())
    parts = [comm1.register(memory.part(*ends)) for ends in ((0, 4096), (0, 10), (4000, 4096), (77, 78))]
    assert {part.handle for part in parts} == {whole.handle} and whole.handle
    whole.close()
    comm1.all_reduce(memory.part(0, 64))
    ncclpy.synchronize(comm1.device)
    for part in parts:
        assert memory.is_registered()
        assert not part.closed
        part.close()
        part.close()
    assert not memory.is_registered()


def test_last_user_deregisters_in_any_order(comm1, memory):
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        made = [comm1.register(memory.part(*ends)) for ends in ((0, 2048), (0, 2048), (5, 9))]
        for number in order:
            assert memory.is_registered()
            made[number].close()
        assert not memory.is_registered()
    assert len(comm1_keeps(comm1)) == 0


def comm1_keeps(comm):
    """Return the registered buffers that the communicator keeps, among objects known to the garbage collector."""
    return [each for each in gc.get_referents(comm) if isinstance(each, dict) and each]


def test_buffer_is_kept_until_its_registration_ends(comm1, host_engine):
    """NCCL has the first registration, so its buffer outlives its own `Registration` while parts use it."""

    class Array(np.ndarray):
        pass

    array = np.zeros(1024, np.float32).view(Array)
    kept = weakref.ref(array)
    first = comm1.register(array)
    part = comm1.register((array.ctypes.data, 10, "float32"))
    del array
    first.close()
    gc.collect()
    assert kept() is not None
    part.close()
    gc.collect()
    assert kept() is None


def test_dropped_registration_lasts_until_close(comm1, memory):
    comm1.register(memory.part(0, 100))
    gc.collect()
    assert memory.is_registered()
    again = comm1.register(memory.part(0, 100))
    again.close()
    assert memory.is_registered()
    comm1.close()
    assert not memory.is_registered()


def test_adjacent_ranges_are_separate(comm1, memory):
    left, right = (comm1.register(memory.part(*ends)) for ends in ((0, 100), (100, 200)))
    assert left.handle != right.handle
    left.close()
    assert memory.is_registered()
    right.close()
    assert not memory.is_registered()


def test_partial_overlap_is_left_to_nccl(comm1, memory):
    """NCCL needs one registration that contains a buffer: neither contains the other. The checks refuse it."""
    with comm1.register(memory.part(100, 200)):
        for ends in ((50, 150), (150, 250), (0, 4096)):
            with pytest.raises(ncclpy.NcclError, match="registered twice"):
                comm1.register(memory.part(*ends))
    assert not memory.is_registered()
    assert comm1_keeps(comm1) == []


def test_memory_at_the_same_address_is_registered_anew(comm1, memory):
    handles = set()
    for _ in range(5):
        with comm1.register(memory.part()) as registration:
            handles.add(registration.handle)
        assert not memory.is_registered()  # freed and allocated again
    assert len(handles) == 5


def test_each_communicator_has_its_own_registrations(comms2, host_engine):
    memory = Memory(0)
    child = testing.run_threads(2, lambda rank: comms2[rank.rank].split(0), comms=comms2)
    both = [comm.register(memory.part()) for comm in (comms2[0], child[0])]
    assert both[0].handle != both[1].handle
    both[0].close()
    assert memory.is_registered()
    both[1].close()
    memory.free()
    for each in child:
        each.abort()


def test_registration_that_failed_to_end_is_not_reused(comm1, memory):
    registration = comm1.register(memory.part())
    with ncclpy.faults("call=CommDeregister nth=1 do=error:ncclSystemError"):
        with pytest.raises(ncclpy.NcclError, match="ncclCommDeregister"):
            registration.close()
    assert registration.closed
    with pytest.raises(ncclpy.NcclError, match="registered twice"):  # nothing was done, so the engine still has it
        comm1.register(memory.part())
    comm1.close()
    assert not memory.is_registered()


def test_failed_registration_keeps_nothing(comm1, memory):
    with ncclpy.faults("call=CommRegister nth=1 do=error:ncclSystemError"):
        with pytest.raises(ncclpy.NcclError, match="ncclCommRegister"):
            comm1.register(memory.part())
    assert comm1_keeps(comm1) == []
    comm1.register(memory.part()).close()
    assert not memory.is_registered()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_registrations_end_with_the_communicator(comm1, memory, end):
    made = [comm1.register(memory.part(*ends)) for ends in ((0, 100), (0, 50))]
    getattr(comm1, end)()
    assert not memory.is_registered()
    for each in made:
        each.close()
    with pytest.raises((ValueError, ncclpy.NcclAborted)):
        comm1.register(memory.part())


def test_many_threads_and_one_range(comm1, memory):
    """One thread registers while another closes the last registration: each is valid until it is closed."""
    ready = threading.Barrier(6)

    def body(seed):
        choose = random.Random(seed)
        ready.wait()
        for _ in range(150):
            begin = choose.choice((0, 0, 16, 32))
            with comm1.register(memory.part(0, 4096)) as whole, comm1.register(memory.part(begin, 64)) as part:
                assert part.handle == whole.handle
                assert memory.is_registered()

    thread_ranks.run_ranks(6, body, 60)
    assert not memory.is_registered()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_threads_and_the_communicators_end(host_engine, end):
    for seed in range(15):
        comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0)
        memory = Memory(0)
        begun, failures = threading.Barrier(4), []

        def body(comm=comm, memory=memory, begun=begun, failures=failures):
            begun.wait()
            try:
                while True:
                    with comm.register(memory.part()), comm.register(memory.part(0, 8)):
                        pass
            except (ValueError, ncclpy.NcclAborted):  # closed, aborted
                pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=body, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        threading.Event().wait(random.Random(seed).random() * 0.004)
        getattr(comm, end)()
        for thread in threads:
            thread.join(30)
        assert failures == [] and not any(thread.is_alive() for thread in threads), seed
        memory.free()


# Graphs


@pytest.mark.parametrize("end", ["graph", "close", "abort"])
def test_graph_keeps_its_memory_registered(comm1, memory, end):
    """NCCL may have put the registration into the graph; a plan looks it up at each launch."""
    registration, other = comm1.register(memory.part(0, 1024)), comm1.register(memory.part(2048, 3072))
    plan = ncclpy.Plan()
    with plan.record():
        comm1.all_reduce(memory.part(64, 128))
    graph = plan.capture()
    other.close()
    registration.close()
    assert registration.closed
    assert memory.is_registered()
    handle = registration.handle
    graph.launch()
    ncclpy.synchronize(comm1.device)
    with comm1.register(memory.part(0, 8)) as again:
        assert again.handle == handle
    for _ in range(2):
        graph.close() if end == "graph" else getattr(comm1, end)()
    assert not memory.is_registered()


def test_plan_alone_keeps_no_registration(comm1, memory):
    plan = ncclpy.Plan()
    with comm1.register(memory.part(0, 1024)), plan.record():
        comm1.all_reduce(memory.part(64, 128))
    assert not memory.is_registered()
    del plan


def test_failed_capture_keeps_nothing(comm1, memory):
    registration = comm1.register(memory.part(0, 1024))
    plan = ncclpy.Plan()
    with plan.record():
        comm1.all_reduce(memory.part(64, 128))
    with ncclpy.faults("call=AllReduce nth=1 do=error:ncclSystemError"), pytest.raises(ncclpy.NcclError):
        plan.capture()
    registration.close()
    assert not memory.is_registered()


# Random programs compared with a model


class Model:
    """The registered ranges and their numbers of users, as `Communicator.register` promises."""

    def __init__(self):
        self.ranges = []  # [begin, end, handle, users]

    def register(self, begin, end):
        """Return the range to use, or "refused", or None where a new range must be made."""
        for known in self.ranges:
            if known[0] <= begin and end <= known[1]:
                return known
        overlaps = any(begin < known[1] and known[0] < end for known in self.ranges)
        return "refused" if overlaps else None


def one_program(seed, steps=40):
    choose = random.Random(seed)
    memory = Memory(0, 256)
    comms = [ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0) for _ in range(2)]
    models, opened = [Model(), Model()], []
    for _ in range(steps):
        which = choose.randrange(2)
        act = choose.choice(("register",) * 5 + ("close",) * 4 + ("drop", "renew", "reallocate"))
        if act == "register":
            begin = choose.randrange(0, 250, choose.choice((1, 32)))
            end = min(256, begin + choose.choice((1, 8, 32, 64, 256)))
            wanted = models[which].register(begin, end)
            if wanted == "refused":
                with pytest.raises(ncclpy.NcclError, match="registered twice"):
                    comms[which].register(memory.part(begin, end))
                continue
            made = comms[which].register(memory.part(begin, end))
            if wanted is None:
                assert made.handle not in {known[2] for model in models for known in model.ranges}
                wanted = [begin, end, made.handle, 0]
                models[which].ranges.append(wanted)
            assert made.handle == wanted[2]
            wanted[3] += 1
            opened.append((which, made, wanted))
        elif act == "close" and opened:
            number, made, used = opened.pop(choose.randrange(len(opened)))
            made.close()
            used[3] -= 1
            if used[3] == 0:
                models[number].ranges.remove(used)
        elif act == "drop" and opened and choose.random() < 0.3:
            opened.pop(choose.randrange(len(opened)))  # still registered until the communicator ends
        elif act == "renew" and choose.random() < 0.5:
            getattr(comms[which], choose.choice(("close", "abort")))()
            for number, made, _ in opened:
                if number == which:
                    made.close()
            opened = [each for each in opened if each[0] != which]
            models[which] = Model()
            comms[which] = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=0)
        elif act == "reallocate":
            assert memory.is_registered() == any(model.ranges for model in models)
    for comm in comms:
        getattr(comm, choose.choice(("close", "abort")))()
    memory.free()


@pytest.mark.parametrize("block", range(4))
def test_random_programs(host_engine, block):
    for seed in range(50 * block, 50 * block + 50):
        try:
            one_program(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else print(f"seed {seed}")
            raise


@pytest.mark.campaign
def test_many_random_programs(host_engine):
    for seed in range(1000, 3000):
        one_program(seed)
