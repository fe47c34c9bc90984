cdef extern from "ordered_mutex.h" nogil:
    const bint DEBUG_LOCKS "NCCLPY_DEBUG_LOCKS"  # whether this build asserts the order of locks

    ctypedef enum ncclpy_lock:
        LOCK_DEFAULT_MANAGER "NCCLPY_LOCK_DEFAULT_MANAGER"
        LOCK_PLAN "NCCLPY_LOCK_PLAN"
        LOCK_MANAGER "NCCLPY_LOCK_MANAGER"
        LOCK_ORDER "NCCLPY_LOCK_ORDER"
        LOCK_COMM "NCCLPY_LOCK_COMM"
        LOCK_GATE "NCCLPY_LOCK_GATE"
        LOCK_MONITOR "NCCLPY_LOCK_MONITOR"
        LOCK_LIBRARY "NCCLPY_LOCK_LIBRARY"

    ctypedef struct mutex_t "ncclpy_mutex":
        pass
    int mutex_init "ncclpy_mutex_init"(mutex_t*, ncclpy_lock)
    int mutex_destroy "ncclpy_mutex_destroy"(mutex_t*)
    int mutex_lock "ncclpy_mutex_lock"(mutex_t*)
    int mutex_trylock "ncclpy_mutex_trylock"(mutex_t*)
    int mutex_unlock "ncclpy_mutex_unlock"(mutex_t*)

    # Call `lock_wanted` before a thread waits for a lock in a loop of `mutex_trylock`, which does not check the order.
    # For locks that are no `mutex_t`, call all three. Without DEBUG_LOCKS these functions do nothing.
    void lock_wanted "ncclpy_lock_wanted"(ncclpy_lock, const void*)
    void lock_taken "ncclpy_lock_taken"(ncclpy_lock, const void*)
    void lock_released "ncclpy_lock_released"(ncclpy_lock, const void*)
