// Waits that their thread looks up from now and then.
#pragma once

namespace ncclpy::host {

// Either what a thread wants to look at now and then while it waits for another rank, a deadline or a signal, say: the
// wait itself goes on, and ends early only if what was looked at ends it (an abort). Or the time that a thread has: when
// it is over, it leaves what it is in, if that can be left.
class Interruption {
 public:
  // Returns in how many seconds it is to be called again; negative to have the wait ended. Called under no lock of the
  // streams.
  using Tick = double (*)(void*);

  Interruption(Tick tick, void* argument) : tick_(tick), argument_(argument), outer_(current) { current = this; }
  // For a thread that goes its way after so many seconds, whatever becomes of what it waits for: it runs what it can
  // leave, and nothing else.
  explicit Interruption(double seconds);
  ~Interruption() { current = outer_; }
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  // How long this thread may sleep, in seconds; negative without end.
  static double patience();
  // Looks, if it is time.
  static void attend();
  // Whether this thread has a time, and whether that is over.
  static bool has_time();
  static bool wants_out();

 private:
  static thread_local Interruption* current;
  const Tick tick_;
  void* const argument_;
  Interruption* const outer_;
  double due_ = 0;
  bool over_ = false;
};

}  // namespace ncclpy::host
