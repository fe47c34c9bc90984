// Limits and callbacks of a thread's waits.
#pragma once

namespace ncclpy::host {

// While an object exists, it controls all waits of its thread for other ranks, in one of two ways. With a callback:
// the callback runs from time to time during a wait, to check a deadline or signals, and the wait lasts until the
// awaited tasks have ended, for example by an abort that the callback makes. With a time limit: once the limit has
// passed, the thread suspends the task that it runs, if the task is interruptible.
class WaitControl {
 public:
  // The callback. It returns the seconds until its next call, or a negative number if the wait should end. The waiting
  // thread holds no lock of the streams during the callback.
  using Tick = double (*)(void*);

  WaitControl(Tick tick, void* argument) : tick_(tick), argument_(argument), outer_(current) { current = this; }
  // For a thread that returns after `seconds` whether or not the wait is over: it runs interruptible tasks only.
  explicit WaitControl(double seconds);
  ~WaitControl() { current = outer_; }
  WaitControl(const WaitControl&) = delete;
  WaitControl& operator=(const WaitControl&) = delete;

  // Seconds, at most 1, that this thread may sleep before it calls poll(); negative: no limit.
  static double max_sleep();
  // Calls the callback if it is due, or notes that the time limit has passed.
  static void poll();
  // Whether this thread has a time limit, and whether it has passed.
  static bool has_time_limit();
  static bool must_leave();

 private:
  static thread_local WaitControl* current;
  const Tick tick_;
  void* const argument_;
  WaitControl* const outer_;
  double due_ = 0;
  bool expired_ = false;
};

}  // namespace ncclpy::host
