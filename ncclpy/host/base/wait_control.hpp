// Waits that their thread looks up from now and then.
#pragma once

namespace ncclpy::host {

// Either what a thread wants to look at now and then while it waits for another rank, a deadline or a signal, say: the
// wait itself goes on, and ends early only if what was looked at ends it (an abort). Or the time that a thread has: when
// it is over, it leaves what it is in, if that can be left.
class WaitControl {
 public:
  // Returns in how many seconds it is to be called again; negative to have the wait ended. Called under no lock of the
  // streams.
  using Tick = double (*)(void*);

  WaitControl(Tick tick, void* argument) : tick_(tick), argument_(argument), outer_(current) { current = this; }
  // For a thread that goes its way after so many seconds, whatever becomes of what it waits for: it runs what it can
  // leave, and nothing else.
  explicit WaitControl(double seconds);
  ~WaitControl() { current = outer_; }
  WaitControl(const WaitControl&) = delete;
  WaitControl& operator=(const WaitControl&) = delete;

  // How long this thread may sleep, in seconds; negative without end.
  static double max_sleep();
  // Looks, if it is time.
  static void poll();
  // Whether this thread has a time, and whether that is over.
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
