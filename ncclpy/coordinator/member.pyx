"""A rank in a process set: the path of each call to the control plane, and the launches."""

import os

from ncclpy.coordinator.buffers cimport TensorEntry, FusedLaunch
from ncclpy.coordinator.plan cimport AllReduce, Call, Pending, Ready, RememberedCalls, Step, new_all_reduce, plan
from ncclpy.coordinator.data_plane cimport LaunchStep, LaunchQueue
from ncclpy.process_group.group cimport ProcessGroup

from ncclpy.coordinator.reductions import reduction
from ncclpy.coordinator.signature import Kind
from ncclpy.errors import NcclError
from ncclpy.types import Result


cdef tuple _COUNTER_NAMES = (
    "brought", "frames", "launches", "fused", "fused_launches", "bytes", "disagreements", "overdue", "stalls",
)


cdef class OperationStats:
    """Counters to which several threads add. No addition is lost, since no method releases the GIL.

    Attributes
    ----------
    operations : dict
        How many operations of each kind were launched.
    """

    def __cinit__(self):
        self.operations = {}
        self.numbers = dict.fromkeys(_COUNTER_NAMES, 0)

    cpdef int add(self, str what, long long number=1) except -1:
        """Add to a counter, by its name."""
        self.numbers[what] = <long long>self.numbers[what] + number
        return 0

    cdef int launched(self, str kind, long long number, long long nbytes) except -1:
        """Count launched operations of one kind, of `nbytes` together."""
        self.operations[kind] = <long long>self.operations.get(kind, 0) + number
        return self.add("bytes", nbytes)

    def as_dict(self):
        """Return all counters."""
        return {**self.numbers, "operations": self.operations.copy()}


cdef int _forks = 0  # how many forks lead to this process


cdef class SubmitGate:
    """What each submitter of a session, of whatever process set, reads before it brings an operation.

    Attributes
    ----------
    shut : bool
        Whether a thread that brings an operation must first call the session's `check`, which raises if no operation
        can be brought now.
    timeline : Timeline or None
        The timeline that records each operation.
    """


cdef class Submitter:
    """Bring this rank's operations to one process set, during one session.

    Parameters
    ----------
    session : Session
        The session of the set; its `check` is called if the gate is shut.
    member : ProcessSetWorker
        This rank in the set.
    gate : SubmitGate
        The session's gate.
    control : Control
        The session's control plane.
    counts : OperationStats
        The counters to add to.

    Attributes
    ----------
    device : int
        The device of this rank.
    """

    def __init__(
        self, session, ProcessSetWorker member not None, SubmitGate gate not None, control, OperationStats counts not None
    ):
        self.session, self.member, self.gate = session, member, gate
        self.send, self.counts = control.bring, counts
        self.device = session.device
        self.forks = _forks

    def follow(self, ProcessGroup group not None, long long number):
        """Make this submitter outdated once the group's epoch is not `number`: the group then has other ranks."""
        self.group, self.number = group, number

    def is_outdated(self):
        """Return whether a new submitter is needed: the process was forked, or the group has other ranks."""
        return self.forks != _forks or (self.group is not None and self.group.epoch() != self.number)

    def all_reduce(self, name, array, op, prescale=None, postscale=None):
        """Bring an all-reduce; return its work."""
        cdef ProcessSetWorker member = self.member
        cdef AllReduce call = new_all_reduce(
            name, array, op, self.device, member.size, member.remembered, prescale, postscale
        )
        self.bring(call)
        return (<TensorEntry>call.parts[0]).work

    cpdef int bring(self, Call call) except -1:
        """Bring an operation; if this raises, the operation is withdrawn and nothing of it was sent."""
        cdef ProcessSetWorker member = self.member
        timeline = None
        try:
            if self.gate.shut:
                self.session.check()
            member.note(call)
            timeline = self.gate.timeline
            if timeline is not None:
                timeline.watch(call.parts)
            # The send is last: Cython code runs no signal handler, so nothing raises once the operation was sent, and
            # no operation is withdrawn that the other ranks know.
            self.send(member.number, call.key, call.fixed, call.own, call.joinable)
        except BaseException as error:
            member.pending.forget(call)
            call.withdraw(error)
            if timeline is not None:
                timeline.forget(call.parts)
            self.session.explain(error)
            raise
        self.counts.add("brought", len(call.parts))
        if self.gate.shut:  # the session may have ended meanwhile, and not have failed this call
            self.session.fail_late(member)
        return 0


def _forked():
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


# Arrays of at least so many bytes, or of a quarter of `fusion_bytes` if that is less, are launched alone: copying
# them takes longer than a launch, as measured.
cdef long long _LARGE_ON_HOST = 64 << 10
cdef long long _LARGE_ON_DEVICES = 16 << 20

# Most bytes in a fusion buffer on GPUs. With small launches more work overlaps: while the arrays of one launch are
# reduced, those of the next are copied in, and those of the one before are copied out.
cdef long long _MAX_FUSION_BYTES_ON_DEVICES = 32 << 20
cdef object _ALL_REDUCE = Kind.ALL_REDUCE, _BARRIER = Kind.BARRIER
cdef list _never_freed = []  # arrays with copies that may never end
cdef dict _NAMES = {kind: kind.name.lower() for kind in Kind}


cdef class ProcessSetWorker:
    """This rank in one process set.

    Parameters
    ----------
    pending : Pending
        What this rank has brought and not launched; it has the set's number and ranks.
    plane : DataPlane
        The set's data plane.
    fusion_bytes : int
        See `Coordinator`.
    staged : bool
        Whether `plane` copies arrays of CPU memory to the device; with a `host_plane` no such array reaches `plane`.
    counts : OperationStats
        The counters to add to.
    on_error : callable
        ``on_error(error)`` is called with the error of a launch that may have failed on this rank only: without this
        call the other ranks would wait for the launch without end.
    cache : int
        How many names, or groups of names, are remembered.
    host_plane : DataPlane, optional
        The data plane of arrays in CPU memory, if `plane` is only for arrays in device memory.
    accepts_device_arrays : bool
        Whether arrays in device memory are accepted.
    on_launch : callable, optional
        ``on_launch(parts, fused)`` is called with arrays that are launched together.

    Attributes
    ----------
    closing : bool
        Whether this rank has asked for the end of the set; it then brings nothing more to the set.
    """

    def __init__(
        self, Pending pending not None, plane, long long fusion_bytes, bint staged, OperationStats counts not None, on_error,
        Py_ssize_t cache, host_plane=None, bint accepts_device_arrays=True, on_launch=None
    ):
        self.pending, self.label = pending, pending.label
        self.number, self.ranks, self.rank, self.size = (
            pending.number, pending.members, pending.rank, len(pending.members)
        )
        self.plane, self.host_plane, self.accepts_device_arrays = plane, host_plane, accepts_device_arrays
        self.fusion_bytes = min(fusion_bytes, _MAX_FUSION_BYTES_ON_DEVICES) if staged else fusion_bytes
        self.staged = staged and host_plane is None
        self.large = min(fusion_bytes // 4, _LARGE_ON_DEVICES if staged else _LARGE_ON_HOST)
        self.counts, self.on_error, self.on_launch = counts, on_error, on_launch
        self.remembered, self.unnamed = RememberedCalls(cache), {}
        self.launch_queue = LaunchQueue(f"ncclpy-coordinator-{self.number}", on_error)

    # Bringing.

    def next_name(self, str kind not None):
        """Return a name for an unnamed operation: its kind, and the number of unnamed ones of this kind before it."""
        cdef long long number = self.unnamed.get(kind, 0)
        self.unnamed[kind] = number + 1
        return f"{kind}.unnamed.{number}"

    def return_name(self, str kind not None, str name not None):
        """Have `next_name` return this name again, as it was not used; do nothing if it has returned a later one."""
        cdef long long number = self.unnamed.get(kind, 0) - 1
        if name == f"{kind}.unnamed.{number}":
            self.unnamed[kind] = number

    cdef int note(self, Call call) except -1:
        """Note what this rank is about to bring.

        Raises
        ------
        ValueError
            If one of its names is in flight or is listed twice, if one of its arrays overlaps memory in use and one of
            the two is written, if no plane carries an array's memory, or if the set is closed.
        """
        if self.closing:
            raise ValueError(f"{self.label} is closed on this rank. Nothing of this call was sent")
        if not self.accepts_device_arrays and any(part.on_device for part in call.parts):
            raise ValueError(
                f"array: {call.names[0]!r} is in device memory, and MPI carries the data of this coordinator, which "
                "takes CPU memory. Nothing of this call was sent"
            )
        return self.pending.enter(call)

    # Launches.

    def run(self, list operations not None, then):
        """Launch the operations of one frame, in this thread or in the launch queue's.

        This thread makes the launches up to the first one that has to wait; the queue's thread makes that one and all
        behind it. If the queue's thread is still at work for an earlier frame, it makes all of them. Once all are made
        and their results are being copied out, ``then(number)`` is called with the set's number.
        """
        cdef Ready ready
        cdef Step step
        cdef list launches = []
        for ready in operations:
            if not ready.agreed.is_plain:
                operations = [each for each in operations if self._is_executable(each)]
                break
        for step in plan(operations, self.fusion_bytes, self.large, self.staged):
            launches.append(_launch(self, step))
        launches.append(_frame_launched(then, self.number))
        self.launch_queue.add(launches)

    cdef bint _is_executable(self, Ready ready) except -1:
        """Return whether an operation can be launched; fail an all-reduce that NCCL cannot make, as all ranks do."""
        if ready.agreed.is_plain:
            return True
        try:
            for signature in ready.agreed.signatures:
                if signature.kind is _ALL_REDUCE:
                    reduction(signature, self.size, len(ready.absent))
        except ValueError as error:
            if ready.call is not None:
                ready.call.fail(_NotExecutable(str(error), result=Result.INVALID_USAGE))
            return False
        return True

    cdef int _launch(self, Step step) except -1:
        """Launch one step of a plan."""
        cdef list brought = step.brought()
        cdef Call call
        try:
            self._count(step, brought)
            fused = self._begin(step, brought[0])
        except BaseException as error:
            failure = self._plane_of(step).cause_of(error) if isinstance(error, NcclError) else _not_launched(error)
            try:
                self._plane_of(step).abandon(failure)  # before part.fail(), which may free arrays still being copied
            except BaseException as another:  # when the copies end is not known: the arrays are never freed
                _never_freed.append(brought)
                self.on_error(another)
            for part in brought:
                if part is not None:
                    part.fail(failure)
            call = (<Ready>step.operations[0]).call
            if call is not None and len(brought) == 1 and not step.fused:
                call.fail(failure)
            if not isinstance(error, _NotExecutable):
                self.on_error(failure)
            return 0
        for each in reversed(fused if isinstance(fused, list) else [fused]):
            if each is not None:
                self.launch_queue.put_first(_copy_out(self, each))
        return 0

    cdef int _count(self, Step step, list brought) except -1:
        cdef TensorEntry part
        cdef Ready first = step.operations[0]
        cdef Py_ssize_t fused = len(brought)
        cdef long long nparts = 0, nbytes = 0
        if first.call is not None and not first.agreed.fusable:  # the call itself launches all its arrays
            brought = first.call.parts
            nparts = len(first.call.names)  # not len(parts): a sparse array has two parts under one name
        else:
            nparts = fused - brought.count(None)
        for part in brought:
            if part is not None:
                nbytes += <long long>part.view.nbytes
        if nparts:  # otherwise this rank has joined
            self.counts.launched(_NAMES[step.signature.kind], nparts, nbytes)
        self.counts.add("launches", 1)
        if fused > 1:
            self.counts.add("fused", fused)
            self.counts.add("fused_launches", 1)
        if self.on_launch is not None:
            self.on_launch([part for part in brought if part is not None], fused > 1)
        return 0

    cdef object _plane_of(self, Step step):
        """Return the data plane of a step."""
        if self.host_plane is None or step.signature.on_device:
            return self.plane
        return self.host_plane

    cdef object _begin(self, Step step, TensorEntry first):
        """Launch a step; return the `FusedLaunch` to copy out after it or None, for several arrays a list of these."""
        cdef Ready ready = step.operations[0]
        plane, signature, factor = self._plane_of(step), step.signature, None
        op = signature.op
        if op < 0 or (ready.call is not None and not ready.call.joinable):
            return None if ready.call is None else ready.call.launch(plane, ready.owns, step.absent)
        if not ready.agreed.is_plain:
            try:
                op, factor = reduction(signature, self.size, step.absent)
            except ValueError as error:
                raise _NotExecutable(str(error), result=Result.INVALID_USAGE) from None
        if not step.fused and first is not None:
            plane.all_reduce(first, op, factor)
            return None
        return plane.fuse(step.members(), signature.datatype, op, factor, signature.on_device)

    cdef int _copied_out(self, FusedLaunch fused) except -1:
        """Copy out what was launched through a fusion buffer, and hand its works over to the monitor."""
        try:
            fused.copy_out()
        except BaseException as error:
            failure = error if isinstance(error, NcclError) else _not_launched(error)
            fused.end(failure)
            self.on_error(failure)
        return 0

    cdef bint _can_launch(self, Step step) except -1:
        """Return whether a step can be launched without a wait for other ranks.

        Two things may have to wait: the communicator may still be in the making, and copies of CPU memory may have to
        wait for an earlier launch, and so for other ranks.
        """
        plane, signature = self._plane_of(step), step.signature
        if not plane.is_settled():
            return False
        copies = (step.fused or self.staged) and not signature.on_device and signature.kind is not _BARRIER
        return not copies or plane.is_free()

    # Ending.

    def fail(self, error):
        """End the operations of this set on this rank with an error."""
        for plane in (self.plane, self.host_plane):
            if plane is not None:
                plane.fail(error)

    def close(self, double timeout):
        """Wait for what was launched, and release everything; fail the launches left after `timeout` seconds."""
        if not self.launch_queue.end(timeout):  # before the planes: the queue's thread may use memory of a plane
            what = f"launches still wait for other ranks {timeout:.3g} s after it began to end"
            self.fail(NcclError(f"{self.label}: {what}"))
        try:
            if self.host_plane is not None:
                self.host_plane.close(timeout)
        finally:
            self.plane.close(timeout)


class _NotExecutable(NcclError):
    """No rank can launch the operation, and each rank finds that by itself, so `on_error` is not called."""


cdef object _not_launched(error):
    what = f"{type(error).__name__}: {error}"
    made = NcclError(f"an operation that all ranks have brought could not be launched: {what}")
    made.__cause__ = error
    return made


cdef _Launch _launch(ProcessSetWorker member, Step step):
    cdef _Launch made = _Launch.__new__(_Launch)
    made.member, made.step = member, step
    return made


cdef class _Launch(LaunchStep):
    """The launch of a step of a plan."""

    cdef ProcessSetWorker member
    cdef Step step

    cdef bint is_ready(self) except -1:
        return self.member._can_launch(self.step)

    cdef int take(self) except -1:
        return self.member._launch(self.step)


cdef _FrameLaunched _frame_launched(then, int number):
    cdef _FrameLaunched made = _FrameLaunched.__new__(_FrameLaunched)
    made.then, made.number = then, number
    return made


cdef class _FrameLaunched(LaunchStep):
    """The call of `then` once all operations of a frame are launched."""

    cdef object then
    cdef int number

    cdef int take(self) except -1:
        self.then(self.number)
        return 0


cdef _CopyOut _copy_out(ProcessSetWorker member, fused):
    cdef _CopyOut made = _CopyOut.__new__(_CopyOut)
    made.member, made.fused = member, fused
    return made


cdef class _CopyOut(LaunchStep):
    """The copy out of a fusion buffer, once its launch is made."""

    cdef ProcessSetWorker member
    cdef object fused

    cdef bint is_ready(self) except -1:
        return self.fused.is_passed()

    cdef int take(self) except -1:
        return self.member._copied_out(self.fused)
