// Collectives among processes: the data pass through the segment in steps that stay in the cache.
//
// In each step a rank writes to its own step buffer what others need (in scatter the root writes to the other ranks'
// step buffers), all ranks pass the barrier, and all read. There are two of each buffer: what is read after barrier s
// is overwritten after barrier s + 1 at the earliest, when all have finished reading. An abort may happen at any
// barrier, since no rank accesses another rank's own memory. A thread may suspend the collective at any barrier; the
// resuming thread begins before that barrier and repeats the step's copies.
#include <algorithm>
#include <cstring>
#include <utility>

#include "collective.hpp"

namespace ncclpy::host {
namespace {

class ShmStaged {
 public:
  ShmStaged(Comm& comm, CollectiveProgress& progress)
      : comm_(comm), segment_(*comm.segment), place_(progress.place), progress_(progress),
        nranks_(size_t(comm.nranks)), rank_(size_t(comm.rank)), mine_(segment_.slot(comm.rank).record(place_)), element_(size_of(mine_.dtype)),
        send_(static_cast<const char*>(mine_.send)), recv_(static_cast<char*>(mine_.recv)),
        bytes_(mine_.count * element_), root_(size_t(mine_.root)), at_root_(comm.rank == mine_.root) {}

  WaitResult run() {
    switch (mine_.kind) {
      case Collective::all_reduce: reduce_everything(); break;
      // With two ranks, handing half of the result to the root costs more than having the root compute all of it.
      case Collective::reduce: nranks_ == 2 ? reduce_at_root() : reduce_everything(); break;
      case Collective::reduce_scatter: reduce_scatter(); break;
      case Collective::broadcast: broadcast(); break;
      case Collective::all_gather: gather(true); break;
      case Collective::gather: gather(at_root_); break;
      case Collective::scatter: scatter(); break;
      case Collective::all_to_all: all_to_all(); break;
    }
    if (nontemporal_) nontemporal_fence();
    return result_;
  }

 private:
  // Waits at the barrier of this step. Returns false if the collective must end here, or is suspended.
  bool barrier(size_t step) {
    progress_.step = step;
    result_ = comm_.rendezvous.data_barrier();
    return result_ == WaitResult::ok;
  }
  char* input(size_t rank, size_t step) { return segment_.step_input(int(rank), int(step & 1)); }
  char* result(size_t rank, size_t step) { return segment_.step_result(int(rank), int(step & 1)); }
  void copy(void* to, const void* from, size_t bytes) {
    if (to != from) std::memcpy(to, from, bytes);
  }
  // Copies to the caller's memory, with non-temporal stores if the result is large.
  void deliver(void* to, const void* from, size_t bytes) {
    if (to != from) copy_out(to, from, bytes, nontemporal_);
  }
  // The bytes of one part if a step buffer has `parts` equal parts: whole cache lines, at least one.
  static size_t part_of_step(size_t parts) { return std::max<size_t>(64, step_bytes / parts / 64 * 64); }

  void broadcast() {
    for (size_t step = progress_.step, at = step * step_bytes; at < bytes_; step++, at += step_bytes) {
      const size_t n = std::min(step_bytes, bytes_ - at);
      if (at_root_) copy(input(rank_, step), send_ + at, n);
      if (!barrier(step)) return;
      deliver(recv_ + at, at_root_ ? send_ + at : input(root_, step), n);
    }
  }

  void gather(bool collects) {
    for (size_t step = progress_.step, at = step * step_bytes; at < bytes_; step++, at += step_bytes) {
      const size_t n = std::min(step_bytes, bytes_ - at);
      copy(input(rank_, step), send_ + at, n);
      if (!barrier(step)) return;
      for (size_t i = 0; collects && i < nranks_; i++) {
        const size_t r = (rank_ + i) % nranks_;
        deliver(recv_ + r * bytes_ + at, r == rank_ ? send_ + at : input(r, step), n);
      }
    }
  }

  void reduce_at_root() {
    for (size_t step = progress_.step, at = step * step_bytes; at < bytes_; step++, at += step_bytes) {
      const size_t n = std::min(step_bytes, bytes_ - at);
      if (!at_root_) copy(input(rank_, step), send_ + at, n);
      if (!barrier(step)) return;
      if (!at_root_) continue;
      const auto part = [&](int r) { return size_t(r) == rank_ ? send_ + at : input(size_t(r), step); };
      reduce_pieces(comm_, place_, part, n / element_, {recv_ + at}, bytes_);
    }
  }

  // The root copies each rank's part of the step into that rank's buffer.
  void scatter() {
    for (size_t step = progress_.step, at = step * step_bytes; at < bytes_; step++, at += step_bytes) {
      const size_t n = std::min(step_bytes, bytes_ - at);
      for (size_t r = 0; at_root_ && r < nranks_; r++) {
        if (r != rank_) copy(input(r, step), send_ + r * bytes_ + at, n);
      }
      if (!barrier(step)) return;
      deliver(recv_ + at, at_root_ ? send_ + rank_ * bytes_ + at : input(rank_, step), n);
    }
  }

  // In each step a rank's step buffer holds a part of `part_bytes` for each other rank. After the barrier
  // `finish(at, n, step, part_bytes)` makes this rank's result from the parts that the other ranks hold for it.
  template <class Finish>
  void send_parts(Finish finish) {
    const size_t part_bytes = part_of_step(nranks_);
    for (size_t step = progress_.step, at = step * part_bytes; at < bytes_; step++, at += part_bytes) {
      const size_t n = std::min(part_bytes, bytes_ - at);
      for (size_t r = 0; r < nranks_; r++) {
        if (r != rank_) copy(input(rank_, step) + r * part_bytes, send_ + r * bytes_ + at, n);
      }
      if (!barrier(step)) return;
      finish(at, n, step, part_bytes);
    }
  }

  // The part of rank `r` for this rank in a step.
  const char* part_from(size_t r, size_t at, size_t step, size_t part_bytes) {
    return r == rank_ ? send_ + r * bytes_ + at : input(r, step) + rank_ * part_bytes;
  }

  void all_to_all() {
    send_parts([&](size_t at, size_t n, size_t step, size_t part_bytes) {
      for (size_t i = 0; i < nranks_; i++) {
        const size_t r = (rank_ + i) % nranks_;
        deliver(recv_ + r * bytes_ + at, part_from(r, at, step, part_bytes), n);
      }
    });
  }

  void reduce_scatter() {
    send_parts([&](size_t at, size_t n, size_t step, size_t part_bytes) {
      reduce_pieces(comm_, place_, [&](int r) { return part_from(size_t(r), at, step, part_bytes); }, n / element_,
                    {recv_ + at}, bytes_);
    });
  }

  // After barrier s each rank reduces its range of step s; after barrier s + 1 the results of step s can be collected.
  void reduce_everything() {
    const bool collects = mine_.kind == Collective::all_reduce || at_root_;
    const bool publishes = mine_.kind == Collective::all_reduce || !at_root_;
    const size_t steps = (bytes_ + step_bytes - 1) / step_bytes;
    for (size_t step = progress_.step; step <= steps; step++) {
      const size_t at = step * step_bytes;
      const size_t n = step < steps ? std::min(step_bytes, bytes_ - at) : 0;
      const auto [begin, end] = part_of(n, comm_.rank, comm_.nranks);
      copy(input(rank_, step), send_ + at, begin);
      copy(input(rank_, step) + end, send_ + at + end, n - end);
      if (!barrier(step)) return;
      if (n > 0) reduce_range(step, at, begin, end, collects, publishes);
      if (step > 0 && collects) collect(step - 1);
    }
  }

  void reduce_range(size_t step, size_t at, size_t begin, size_t end, bool collects, bool publishes) {
    std::vector<void*> outputs;
    if (collects) outputs.push_back(recv_ + at + begin);
    if (publishes) outputs.push_back(result(rank_, step));
    const auto piece = [&, first = begin](int r) -> const char* {
      return size_t(r) == rank_ ? send_ + at + first : input(size_t(r), step) + first;
    };
    reduce_pieces(comm_, place_, piece, (end - begin) / element_, std::move(outputs), 0);
  }

  void collect(size_t step) {
    const size_t at = step * step_bytes;
    const size_t n = std::min(step_bytes, bytes_ - at);
    for (size_t i = 1; i < nranks_; i++) {
      const size_t r = (rank_ + i) % nranks_;
      const auto [begin, end] = part_of(n, int(r), comm_.nranks);
      deliver(recv_ + at + begin, result(r, step), end - begin);
    }
  }

  Comm& comm_;
  Segment& segment_;
  const int place_;
  CollectiveProgress& progress_;
  WaitResult result_ = WaitResult::ok;
  const size_t nranks_, rank_;
  const Record& mine_;
  const size_t element_;
  const char* const send_;
  char* const recv_;
  const size_t bytes_, root_;
  const bool at_root_;
  const bool nontemporal_ = uses_nontemporal(mine_, comm_.nranks);
};

}  // namespace

WaitResult run_shm_staged(Comm& comm, CollectiveProgress& progress) { return ShmStaged(comm, progress).run(); }

}  // namespace ncclpy::host
