from libc.stdint cimport uint64_t, uintptr_t
from libcpp cimport bool as bool_t
from libcpp.vector cimport vector

from ncclpy.core.handles.handle cimport WeakHandle

cdef extern from "ncclpy/memory/segments.hpp" namespace "ncclpy" nogil:
    cdef cppclass Segment:
        uintptr_t base
        size_t bytes
        int device
        uint64_t number
    cdef cppclass Ending "std::atomic<int>":
        int load()
        void store(int value)
        int exchange(int value)
    cdef cppclass Freed "std::atomic<uintptr_t>":
        uintptr_t load()
        void store(uintptr_t value)
    cdef cppclass CommSegments:  # a PreCallHook
        int device
        WeakHandle* weak
        void* comm
        Ending ending
        Freed ended_for
    cdef int NOT_ENDED "ncclpy::CommSegments::not_ended"
    cdef int IS_ENDING "ncclpy::CommSegments::is_ending"
    cdef int HAS_ENDED "ncclpy::CommSegments::has_ended"
    cdef int LEFT_BEHIND "ncclpy::CommSegments::left_behind"
    cdef cppclass Calls "ncclpy::SegmentCalls":
        int (*add)(void* ranges, void* comm, const Segment& segment, long long* range) noexcept nogil
        void (*drop)(void* ranges, void* comm, long long range) noexcept nogil
        bool_t (*event_passed)(void* event) noexcept nogil
        void (*destroy_event)(void* event) noexcept nogil
    cdef cppclass Counters "ncclpy::SegmentCounters":
        size_t segments, bytes, leaving, leaving_bytes, registrations
        uint64_t added, dropped, lost
        uint64_t* refused
    cdef enum:
        REFUSALS "ncclpy::segment_refusals"
    cdef int ADDED "ncclpy::segment_added"
    cdef int OVERLAPS "ncclpy::segment_overlaps"
    cdef int UNKNOWN "ncclpy::segment_unknown"
    cdef int GONE "ncclpy::segment_gone"
    cdef cppclass Segments:
        Segments(const Calls&)
        int add(
            uintptr_t base, size_t nbytes, int device, bint owned, uintptr_t* other, size_t* other_bytes, uint64_t pool
        )
        bool_t hold(uintptr_t base, uint64_t number)
        void let_go(uintptr_t base, uint64_t number)
        bool_t hold_until(uintptr_t base, void* event)
        void query_awaited()
        vector[Segment] of_pool(uint64_t pool) except +
        int remove(uintptr_t base, bint owned)
        int remove(uintptr_t base, bint owned, uint64_t* number)
        uint64_t give_back(uintptr_t base)
        bool_t has(uintptr_t base, size_t nbytes, int device)
        bool_t holders(uint64_t number, vector[CommSegments*]* found)
        void deregister_dropped(CommSegments& member, uint64_t number)
        int state(uintptr_t base, uint64_t number)
        bool_t join(CommSegments* member)
        void leave(CommSegments* member)
        void deregister_leaving(CommSegments& member, void* comm)
        void deregister_all(CommSegments& member, void* comm)
        bool_t next_to_free(uintptr_t* base, int* device)
        bool_t can_leave(const CommSegments* member)
        bool_t has_leaving()
        void freed(bool_t succeeded)
        Counters counters()
        vector[Segment] live(const CommSegments* member) except +
    CommSegments* new_member(Segments* registry, void* ranges, int device)
    void free_member(CommSegments* member)
