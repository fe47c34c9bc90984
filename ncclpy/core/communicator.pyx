"""The communicator: one rank's end of a clique.

It adds to NCCL's own calls those that a group of them makes up (parts of different sizes, the barrier), and what
belongs to one communicator: operators and registered buffers.
"""

from ncclpy.abi.nccl cimport ncclUint8
from ncclpy.core.buffers cimport View
from ncclpy.core.collectives cimport Collectives
from ncclpy.core.operation cimport ALL_REDUCE, Operation
from ncclpy.core.parts cimport Spread
from ncclpy.core.stream cimport as_stream_of
from ncclpy.core.submit cimport submit
from ncclpy.core.wait cimport as_timeout

from ncclpy.core import device as _device
from ncclpy.core.resources import CustomOp, Registration
from ncclpy.core.types import ReduceOp
from ncclpy.core.window import Window


cdef class Communicator(Collectives):
    """Take part in collectives as one rank of a clique (`ncclComm_t`).

    Make it with `init`, `init_all`, `split`, `shrink`, `grow`, `join` or `from_handle`; give it back with `close`, or
    use it in a ``with`` statement.

    Buffers are numpy, torch or CuPy arrays, objects with ``__cuda_array_interface__`` or ``__dlpack__``, cuda.core
    buffers, `ncclpy.Buffer` or ``(pointer, count, dtype)``. They are C-contiguous, on this communicator's device (CPU
    memory on the host engine), and live until the work on the stream is done. Whatever does not fit raises
    `TypeError` or `ValueError` before NCCL is called.

    Reductions take NCCL's data types, bool and complex numbers. Calls that only move data take any of a fixed size.

    ``stream`` is any stream object or handle; by default the current stream of the array's framework, or the legacy
    default stream where there is none. Arrays in CPU memory have none: the call waits for them.

    Calls on one communicator from several threads are made one after the other.

    Attributes
    ----------
    rank, nranks : int
        This rank and how many there are.
    device : int
        The ordinal of the device.
    """

    def all_gather_v(self, send, recv, counts, *, stream=None, timeout=None):
        """Collect parts of different sizes on all ranks: a group of broadcasts.

        Parameters
        ----------
        send : buffer
            This rank's part, ``counts[rank]`` elements.
        recv : buffer
            ``sum(counts)`` elements of the same type; the parts stand in the order of the ranks.
        counts : sequence of int
            The elements of each rank's part, the same on all ranks.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef Spread spread
        self.check_alive()
        spread = self.spread()
        spread.all_gather_v(send, recv, counts)
        self.start_spread(spread, stream, timeout)

    def reduce_scatter_v(self, send, recv, counts, op=ReduceOp.SUM, *, stream=None, timeout=None):
        """Reduce over all ranks and leave a part of its own size on each: a group of reduces.

        Parameters
        ----------
        send : buffer
            ``sum(counts)`` elements; the parts stand in the order of the ranks.
        recv : buffer
            This rank's part of the result, ``counts[rank]`` elements of the same type.
        counts : sequence of int
            The elements of each rank's part, the same on all ranks.
        op : ReduceOp, str or CustomOp
            The reduction, as for `all_reduce`.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef Spread spread
        self.check_alive()
        spread = self.spread()
        spread.reduce_scatter_v(send, recv, counts)
        spread.operation.op = self.op_code(op, &spread.view)
        self.start_spread(spread, stream, timeout)

    def all_to_all_v(self, send, recv, send_counts, recv_counts, *, stream=None, timeout=None):
        """Send a part of its own size to each rank and receive one from each: a group of sends and receives.

        Parameters
        ----------
        send : buffer
            ``sum(send_counts)`` elements; the parts stand in the order of the ranks.
        recv : buffer
            ``sum(recv_counts)`` elements of the same type.
        send_counts, recv_counts : sequence of int
            The elements that go to, and come from, each rank. ``send_counts[j]`` on rank i is ``recv_counts[i]`` on
            rank j.
        stream : optional
            Where the work is enqueued.
        timeout : float, optional
            Seconds for this operation; by default the communicator's, which must be one that can be ended.
        """
        cdef Spread spread
        self.check_alive()
        spread = self.spread()
        spread.all_to_all_v(send, recv, send_counts, recv_counts)
        self.start_spread(spread, stream, timeout)

    def barrier(self, *, stream=None, timeout=None):
        """Wait until all ranks are here: an all-reduce of one byte.

        Parameters
        ----------
        stream : optional
            Let this stream wait, and not the CPU. By default the call (or the group's end) returns when all ranks
            have come.
        timeout : float, optional
            As for `all_gather_v`.
        """
        cdef Operation o
        cdef double limit = self.limit
        if timeout is not None:
            limit = as_timeout(timeout)
            self.check_endable("timeout")
            self.be_watched(limit)
        self.check_alive()
        if self.scratch == 0:
            made = _device.allocate(8, self.device)  # without the GIL: another thread may have been here meanwhile
            if self.scratch == 0:
                self.scratch = made
            else:
                _device.free(made)
        o.kind = ALL_REDUCE
        o.datatype = <int>ncclUint8
        o.op = <int>ReduceOp.MAX
        o.count = 1
        o.send = o.recv = <void*>self.scratch
        if stream is None:
            o.stream = self.own_stream()
            submit(self, &o, None, None, True, limit)
        else:
            o.stream = as_stream_of(stream, self.device)
            submit(self, &o, None, None, False, limit)

    def pre_mul_sum(self, scalar, dtype):
        """Return an operator that multiplies each rank's input by a scalar and sums (`ncclRedOpCreatePreMulSum`).

        Parameters
        ----------
        scalar : float, int or buffer
            A number, or one element in device memory that is read while a collective runs; each rank has its own.
        dtype : DataType, str or numpy.dtype
            The data type of the arrays to be reduced.

        Returns
        -------
        CustomOp
            For the ``op`` of this communicator's reductions.
        """
        return CustomOp(self, scalar, dtype)

    def register(self, buf):
        """Register a buffer for zero-copy communication (`ncclCommRegister`, NCCL 2.19).

        Parameters
        ----------
        buf : buffer
            The whole allocation or a part of it.

        Returns
        -------
        Registration
            Its `close` deregisters the buffer; do that before the memory is freed.
        """
        cdef View view
        self.check_alive()
        self.read(buf, &view, "buf")
        return Registration(self, buf)

    def window(self, buf, *, bint symmetric=True, bint strict_ordering=False):
        """Register a buffer together with all ranks (`ncclCommWindowRegister`, NCCL 2.27); all ranks call it.

        Collectives whose buffers lie in symmetric windows take fewer steps: small ones on NVLink are faster for it.
        One thread with several communicators calls it for all of them in a ``group()``.

        Parameters
        ----------
        buf : buffer
            This rank's part, of the same size on all ranks; on GPUs memory of `bindings.mem_alloc`.
        symmetric : bool
            Whether collectives may use the window (`NCCL_WIN_COLL_SYMMETRIC`); all ranks then pass buffers at the
            same offset into it.
        strict_ordering : bool
            Whether what is written through it arrives in order (`NCCL_WIN_STRICT_ORDERING`).

        Returns
        -------
        Window
            Its `close` deregisters the buffer; do that before the memory is freed.

        Raises
        ------
        NcclUnsupported
            If the loaded NCCL is older than 2.27.
        """
        return Window(self, buf, symmetric=symmetric, strict_ordering=strict_ordering)
