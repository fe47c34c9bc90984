// Collectives among threads of one process: no intermediate copies; one rendezvous before, one after.
//
// Reductions are divided by ranges: each rank reduces its range over all ranks' inputs and stores the result wherever
// it is needed, so that each element is read once from each input and written once to each output. Buffers may be in
// place: a rank's range of an input is read by that rank alone, before it overwrites it.
#include <algorithm>
#include <utility>
#include <vector>

#include "collective.hpp"

namespace ncclpy::host {
namespace {

class InProcess {
 public:
  InProcess(Comm& comm, int place)
      : comm_(comm), segment_(*comm.segment), place_(place), nranks_(comm.nranks), rank_(comm.rank), mine_(record(comm.rank)),
        element_(size_of(mine_.dtype)), bytes_(mine_.count * element_) {}

  void run() {
    switch (mine_.kind) {
      case Collective::all_reduce: return all_reduce();
      case Collective::reduce: return reduce_to_root();
      case Collective::reduce_scatter: return reduce_scatter();
      case Collective::broadcast: return copy(mine_.recv, record(mine_.root).send);
      case Collective::all_gather:
        for (int i = 0; i < nranks_; i++) copy(block(mine_.recv, from(i)), record(from(i)).send);
        return;
      case Collective::all_to_all:
        for (int i = 0; i < nranks_; i++) copy(block(mine_.recv, from(i)), block(record(from(i)).send, rank_));
        return;
      case Collective::gather: return copy(block(record(mine_.root).recv, rank_), mine_.send);
      case Collective::scatter: return copy(mine_.recv, block(record(mine_.root).send, rank_));
    }
  }
  // Orders the non-temporal stores before the barrier, at which other ranks learn of the data.
  void finish() const {
    if (nontemporal_) nontemporal_fence();
  }

 private:
  const Record& record(int rank) { return segment_.slot(rank).record(place_); }
  // Each rank begins with a different peer, so that not all read the same one.
  int from(int i) const { return (rank_ + i) % nranks_; }
  char* block(const void* base, int index) const {
    return static_cast<char*>(const_cast<void*>(base)) + size_t(index) * bytes_;
  }
  void copy(void* to, const void* source) const {
    if (to != source) copy_out(to, source, bytes_, nontemporal_);
  }

  void all_reduce() {
    std::vector<void*> outputs;
    for (int r = 0; r < nranks_; r++) outputs.push_back(record(r).recv);
    reduce_my_range(outputs);
  }

  void reduce_to_root() { reduce_my_range({record(mine_.root).recv}); }

  void reduce_my_range(std::vector<void*> outputs) {
    // Ranges end at cache lines of an aligned buffer, so that two ranks do not write to the same line.
    const size_t line = 64 / element_;
    const size_t step = (mine_.count + size_t(nranks_) - 1) / size_t(nranks_);
    const size_t range = (step + line - 1) / line * line;
    const size_t begin = std::min(mine_.count, range * size_t(rank_));
    const size_t end = std::min(mine_.count, begin + range);
    for (void*& output : outputs) output = static_cast<char*>(output) + begin * element_;
    reduce_at(begin * element_, end - begin, outputs);
  }

  void reduce_scatter() { reduce_at(size_t(rank_) * bytes_, mine_.count, {mine_.recv}); }

  void reduce_at(size_t offset, size_t count, std::vector<void*> outputs) {
    reduce_pieces(comm_, place_, [&](int r) { return static_cast<const char*>(record(r).send) + offset; }, count,
                  std::move(outputs), bytes_);
  }

  Comm& comm_;
  Segment& segment_;
  const int place_, nranks_, rank_;
  const Record& mine_;
  const size_t element_, bytes_;
  const bool nontemporal_ = uses_nontemporal(mine_, nranks_);
};

}  // namespace

void run_in_process(Comm& comm, int place) {
  InProcess direct(comm, place);
  direct.run();
  direct.finish();
  // No rank leaves while others read its buffers. All have arrived, so this wait ends by itself.
  comm.rendezvous.data_barrier_uninterruptible();
}

}  // namespace ncclpy::host
