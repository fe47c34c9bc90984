from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from ncclpy.core.arguments.datatypes cimport MAX_NAME


cdef extern from * nogil:
    """
    #include <errno.h>
    #include <linux/futex.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    /* Unlike the words of native.h, several processes sleep on these. */
    static inline void ncclpy_shared_sleep(int* word, int value, double seconds) {
      struct timespec t;
      if (seconds <= 0) return;
      t.tv_sec = (time_t)seconds;
      t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
      syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
    }
    static inline void ncclpy_shared_wake(int* word) { syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0); }
    static inline uint64_t ncclpy_shared_load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }
    static inline void ncclpy_shared_store(uint64_t* word, uint64_t value) {
      __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    }
    static inline void* ncclpy_shared_map(int fd, size_t offset, size_t size) {
      void* at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
      return at == MAP_FAILED ? NULL : at;
    }
    """
    void sleep_shared "ncclpy_shared_sleep"(int* word, int value, double seconds)
    void wake_shared "ncclpy_shared_wake"(int* word)
    uint64_t load_shared "ncclpy_shared_load"(const uint64_t* word)
    void store_shared "ncclpy_shared_store"(uint64_t* word, uint64_t value)
    void* map_shared "ncclpy_shared_map"(int fd, size_t offset, size_t size)
    int munmap(void* at, size_t size)

# The length in bytes of the random token at the beginning of shared memory, by which processes recognise the memory.
cdef enum:
    TOKEN = 16

# A rank's message, as it is stored in shared memory.
cdef struct Note:
    uint64_t number  # the note's number in its ring, plus 1; written last: a note is read whole or not at all
    uint64_t place  # the message's number in its channel
    uint64_t count
    int channel
    int kind
    int tag
    char type[MAX_NAME + 1]  # the name of the data type

# The futex word `changes` that a rank sleeps on, and its counters.
cdef struct WakeupWord:
    char token[16]
    int changes
    int sleepers
    int expects  # 1 while requests are held back here; otherwise a note wakes no thread
    int watchers  # threads that poll `changes`: while there are any, no sleeper has to be woken


cdef class MappedPages:
    cdef char* base
    cdef size_t length


# The shared memory of one rank: its wake-up word, and a ring of notes from each other rank.
cdef class RingSet:
    cdef int size
    cdef int fd  # -1 if there is no memory that peers could open
    cdef int owner  # the process that made it, the only one to close `fd`
    cdef bytes token
    cdef MappedPages head
    cdef WakeupWord own_word  # stands in for `wakeup_word` if the rank has no shared memory
    cdef WakeupWord* wakeup_word

    # What peers need to open this memory; empty if they cannot open it.
    cdef dict offered(self)
    # The value of `changes`, which counts the times that the rank was woken or got a note.
    cdef int change_count(self) noexcept
    # Wake the threads of this rank that sleep or poll.
    cdef void wake(self) noexcept
    # Sleep until `changes` differs from `seen`, for so many seconds at most.
    cdef int wait(self, int seen, double seconds) except -1
    # From `watch` to `leave` a thread polls `changes` instead of sleeping, and peers wake no sleeper. `is_woken` polls
    # until `changes` differs from `seen`, or until a moment, and returns whether it differs. If it differs at the end,
    # `leave` wakes the sleepers.
    cdef void watch(self) noexcept
    cdef bint is_woken(self, int seen, double until) noexcept
    cdef void leave(self, int seen) noexcept
    # Set whether notes of the peers wake a sleeping thread.
    cdef void expect(self, bint expects) noexcept
    cdef int close(self) except -1


# One rank's end of the memory that two ranks of one machine share. It is not thread-safe: its callers call it one at a
# time.
cdef class RingPair:
    cdef MappedPages inbox
    cdef MappedPages outbox
    cdef MappedPages wakeup  # with the peer's wake-up word
    cdef uint64_t written
    cdef uint64_t read

    # Write a note into the peer's ring; False if there is no space.
    cdef bint put(self, Note* note) noexcept
    # Wake the peer.
    cdef void wake_peer(self) noexcept
    # Take the peer's next note; False if there is none.
    cdef bint next(self, Note* note) noexcept
