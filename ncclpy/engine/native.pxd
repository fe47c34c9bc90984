cdef extern from "ncclpy/engine/native.h" nogil:
    int load "ncclpy_load"(const int* word)
    void store "ncclpy_store"(int* word, int value)
    int add "ncclpy_add"(int* word, int value)  # returns the sum
    int swap "ncclpy_swap"(int* word, int value)  # returns the previous value
    bint change "ncclpy_change"(int* word, int old, int new)  # from `old` to `new`; returns whether it was `old`
    double now "ncclpy_now"()
    void sleep_on "ncclpy_sleep_on"(int* word, int value, double seconds)
    void wake "ncclpy_wake"(int* word)
    void wake_one "ncclpy_wake_one"(int* word)
    void sharp_timers "ncclpy_sharp_timers"()

    struct ncclpy_job:
        void (*run)(ncclpy_job*) noexcept nogil
