"""The methods by which participants join a collective of the Manager.

Each method checks the buffers and adds a participant. An error in the buffers is raised at once and leaves the key
unchanged.
"""

from ncclpy.core.arguments.buffers cimport View, read_view
from ncclpy.core.runtime.device cimport as_device, known_devices
from ncclpy.core.arguments.operation cimport Operation
from ncclpy.core.arguments.validation cimport (
    validate_all_gather,
    validate_all_reduce,
    validate_all_to_all,
    validate_broadcast,
    validate_gather,
    validate_reduce,
    validate_reduce_scatter,
    validate_scatter,
)
from ncclpy.core.start cimport builtin_op_code
from ncclpy.core.runtime.wait cimport as_timeout
from ncclpy.engine.work cimport Work
from ncclpy.manager.gathering cimport Participant

from ncclpy.types import ReduceOp, as_integer



cdef class Participants:
    """Methods that add participants; `Manager` is the class to use."""

    cdef Work add(self, key, Participant one, const View* view, held, output, stream, on_done):
        """Add a participant, and launch if it is the last one."""
        raise NotImplementedError

    def all_reduce(
        self, key, send, recv=None, op=ReduceOp.SUM, *, device=None, num_local, num_global=None,
        communicator_key=None, global_rank=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in an all-reduce.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            The input, contiguous, on `device`; it receives the result if `recv` is None.
        recv : buffer, optional
            The output, with as many elements of the same type.
        op : ReduceOp or str
            The reduction, the same for all participants.
        device : int, optional
            The participant's device; by default that of `send`, or the current one for CPU memory.
        num_local : int
            The number of participants in this process.
        num_global : int, optional
            The number of participants in all processes; `num_local` by default.
        communicator_key : bytes, optional
            128 bytes that the processes share; only with several processes.
        global_rank : int, optional
            This participant's rank; by default participants are numbered by device. Needed with several processes.
        stream : optional
            The stream that produces the input: communication waits for what is on it now. By default the current
            stream of the array's framework; none for CPU memory.
        on_done : callable, optional
            Called with the `Work` when it is done.
        timeout : float, optional
            Seconds, in place of the Manager's own timeout; the shortest one of a key's participants holds for all.

        Returns
        -------
        Work
            Its result is the array that receives.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong, a buffer does not fit or the Manager is closed. The participant was not added.
        NcclAborted
            If the Manager is aborted.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        validate_all_reduce(&o, &s, &r, send, recv, one.device)
        o.op = builtin_op_code(op, &s, one.num_global, "the Manager")
        one.bring(&o, &s)
        return self.add(key, one, &s, send, send if recv is None else recv, stream, on_done)

    def all_gather(
        self, key, send, recv, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in an all-gather.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            The input.
        recv : buffer
            The output, ``num_global`` times as many elements, in the order of the ranks.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        validate_all_gather(&o, &s, &r, send, recv, one.device, one.num_global, one.global_rank)
        one.bring(&o, &s)
        return self.add(key, one, &s, send, recv, stream, on_done)

    def reduce_scatter(
        self, key, send, recv, op=ReduceOp.SUM, *, device=None, num_local, num_global=None,
        communicator_key=None, global_rank=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in a reduce-scatter.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            The input, ``num_global`` times as many elements as `recv`.
        recv : buffer
            This rank's part of the result.
        op : ReduceOp or str
            The reduction, the same for all participants.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        validate_reduce_scatter(&o, &s, &r, send, recv, one.device, one.num_global, one.global_rank)
        o.op = builtin_op_code(op, &s, one.num_global, "the Manager")
        one.bring(&o, &s)
        return self.add(key, one, &s, send, recv, stream, on_done)

    def all_to_all(
        self, key, send, recv, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in an all-to-all; not in place.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            Part i goes to rank i; a multiple of ``num_global`` elements.
        recv : buffer
            Part i comes from rank i; as many elements.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        validate_all_to_all(&o, &s, &r, send, recv, one.device, one.num_global)
        one.bring(&o, &s)
        return self.add(key, one, &s, send, recv, stream, on_done)

    def broadcast_send(
        self, key, send, recv=None, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, root=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in a broadcast as its root.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            The data to send.
        recv : buffer, optional
            A copy of them here; none by default.
        root : int, optional
            The rank of the root, which each participant may name, and must name if the root is on another node.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        one.root, one.is_root = as_rank(root, "root"), True
        validate_broadcast(&o, &s, &r, send, recv, one.device, True)
        one.bring(&o, &s)
        return self.add(key, one, &s, send, send if recv is None else recv, stream, on_done)

    def broadcast_recv(
        self, key, recv, *, device=None, num_local, num_global=None, communicator_key=None, global_rank=None,
        root=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in a broadcast as a receiver.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        recv : buffer
            Where the data arrive.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            recv, "recv", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        one.root, one.is_root = as_rank(root, "root"), False
        validate_broadcast(&o, &s, &r, None, recv, one.device, False)
        one.bring(&o, &r)
        return self.add(key, one, &r, recv, recv, stream, on_done)

    def reduce_send(
        self, key, send, op=ReduceOp.SUM, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, root=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in a reduce as a rank that only contributes.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            The input.
        op : ReduceOp or str
            The reduction, the same for all participants.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        one.root, one.is_root = as_rank(root, "root"), False
        validate_reduce(&o, &s, &r, send, None, one.device, False)
        o.op = builtin_op_code(op, &s, one.num_global, "the Manager")
        one.bring(&o, &s)
        return self.add(key, one, &s, send, None, stream, on_done)

    def reduce_recv(
        self, key, send, recv=None, op=ReduceOp.SUM, *, device=None, num_local, num_global=None,
        communicator_key=None, global_rank=None, root=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in a reduce as its root, which contributes too.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            The root's own input; it receives the result if `recv` is None.
        recv : buffer, optional
            The output, with as many elements of the same type.
        op : ReduceOp or str
            The reduction, the same for all participants.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        one.root, one.is_root = as_rank(root, "root"), True
        validate_reduce(&o, &s, &r, send, recv, one.device, True)
        o.op = builtin_op_code(op, &s, one.num_global, "the Manager")
        one.bring(&o, &s)
        return self.add(key, one, &s, send, send if recv is None else recv, stream, on_done)

    def gather_send(
        self, key, send, *, device=None, num_local, num_global=None, communicator_key=None, global_rank=None,
        root=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in a gather as a rank that only sends.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            This rank's part.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        one.root, one.is_root = as_rank(root, "root"), False
        validate_gather(&o, &s, &r, send, None, one.device, one.num_global, one.global_rank, False)
        one.bring(&o, &s)
        return self.add(key, one, &s, send, None, stream, on_done)

    def gather_recv(
        self, key, send, recv, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, root=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in a gather as its root.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            The root's own part.
        recv : buffer
            The output, ``num_global`` times as many elements, in the order of the ranks.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        one.root, one.is_root = as_rank(root, "root"), True
        validate_gather(&o, &s, &r, send, recv, one.device, one.num_global, one.global_rank, True)
        one.bring(&o, &s)
        return self.add(key, one, &s, send, recv, stream, on_done)

    def scatter_send(
        self, key, send, recv, *, device=None, num_local, num_global=None, communicator_key=None,
        global_rank=None, root=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in a scatter as its root.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        send : buffer
            Part i goes to rank i; ``num_global`` times as many elements as `recv`.
        recv : buffer
            The root's own part.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            send, "send", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        one.root, one.is_root = as_rank(root, "root"), True
        validate_scatter(&o, &s, &r, send, recv, one.device, one.num_global, one.global_rank, True)
        one.bring(&o, &s)
        return self.add(key, one, &s, send, recv, stream, on_done)

    def scatter_recv(
        self, key, recv, *, device=None, num_local, num_global=None, communicator_key=None, global_rank=None,
        root=None, stream=None, on_done=None, timeout=None,
    ):
        """Take part in a scatter as a receiver.

        Parameters
        ----------
        key : hashable
            A name for this execution of the collective.
        recv : buffer
            Where this rank's part arrives.
        root : int, optional
            The rank of the root, as for `broadcast_send`.
        device, num_local, num_global, communicator_key, global_rank, stream, on_done, timeout
            As for `all_reduce`.

        Returns
        -------
        Work
            As for `all_reduce`.
        """
        cdef View s, r
        cdef Operation o
        cdef Participant one = _new_participant(
            recv, "recv", device, num_local, num_global, communicator_key, global_rank, timeout
        )
        one.root, one.is_root = as_rank(root, "root"), False
        validate_scatter(&o, &s, &r, None, recv, one.device, one.num_global, one.global_rank, False)
        one.bring(&o, &r)
        return self.add(key, one, &r, recv, recv, stream, on_done)


cdef Participant _new_participant(
    array, str argument, device, num_local, num_global, communicator_key, global_rank, timeout
):
    """Return a participant without its buffers; `argument` is the name of `array`, see `_device`."""
    cdef Participant one = Participant.__new__(Participant)
    one.device = _device(device, array, argument)
    one.num_global = _nranks(num_local, num_global)
    one.num_local = num_local
    one.global_rank = as_rank(global_rank, "global_rank")
    one.root = -1
    one.limit = -1 if timeout is None else as_timeout(timeout)
    one.communicator_key = b""
    if communicator_key is not None:
        if isinstance(communicator_key, (int, str)):
            raise TypeError(
                f"communicator_key: expected the bytes of generate_communicator_key(), got {communicator_key!r}"
            )
        one.communicator_key = bytes(communicator_key)
    return one


cdef int _device(device, array, str argument) except -2:
    """Return the participant's device: the given one, or the array's, or for CPU memory the current one."""
    cdef View view
    if device is not None:
        return as_device(device)
    read_view(array, &view, argument)
    return view.device if view.device >= 0 else as_device(None)


cdef int as_rank(rank, str argument) except -2:
    """Return a rank, -1 for None."""
    cdef int number
    if rank is None:
        return -1
    number = _number(rank, argument)
    if number < 0:
        raise ValueError(f"{argument}: expected a rank >= 0 or None, got {number}")
    return number


cdef int _nranks(num_local, num_global) except -1:
    """Return the number of all participants."""
    cdef int local = _number(num_local, "num_local")
    cdef int everywhere = local if num_global is None else _number(num_global, "num_global")
    if local < 1 or everywhere < local:
        raise ValueError(
            f"num_local, num_global: expected 1 <= num_local <= num_global, got {local} and {everywhere}"
        )
    if local > known_devices():
        raise ValueError(
            f"num_local: {local} participants in this process need a device each, and it sees {known_devices()}"
        )
    return everywhere


cdef int _number(value, str argument) except? -1:
    """Return an int; a float is refused, since it would be truncated."""
    try:
        return value if type(value) is int else as_integer(value, argument)
    except OverflowError:
        raise ValueError(f"{argument}: a number of {int(value).bit_length()} bits is too large") from None
