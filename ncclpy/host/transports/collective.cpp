// Runs one collective: each rank writes a record of its call, and moves its data when the ranks that it needs have
// arrived.
#include <chrono>
#include <cstring>
#include <string>

#include "faults/abandon.hpp"
#include "collective.hpp"
#include "peer_memory.hpp"
#include "segment/abort_corruption.hpp"

namespace ncclpy::host {
namespace {

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::all_reduce: return "AllReduce";
    case Collective::reduce: return "Reduce";
    case Collective::broadcast: return "Broadcast";
    case Collective::all_gather: return "AllGather";
    case Collective::reduce_scatter: return "ReduceScatter";
    case Collective::all_to_all: return "AlltoAll";
    case Collective::gather: return "Gather";
    case Collective::scatter: return "Scatter";
  }
  return "?";
}

}  // namespace

const char* name_of(const Operation& operation) {
  switch (operation.kind) {
    case Operation::send: return "Send";
    case Operation::recv: return "Recv";
    case Operation::put: return "PutSignal";
    case Operation::signal: return "Signal";
    case Operation::wait_signal: return "WaitSignal";
    case Operation::collective: break;
  }
  return name_of(operation.collective_kind);
}

const char* type_name(ncclDataType_t dtype) {
  static const char* const types[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                      "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return size_t(dtype) < sizeof types / sizeof *types ? types[dtype] : "?";
}

namespace {

Record record_of(const Operation& operation) {
  Record record;
  record.kind = operation.collective_kind;
  record.dtype = operation.dtype;
  record.op = operation.op;
  record.root = operation.root;
  record.count = operation.count;
  record.send = operation.sendbuff;
  record.recv = operation.recvbuff;
  record.scalar = operation.scalar;
  record.reads_peers = record.cma_read = false;
  if (operation.scalar_memory != nullptr) std::memcpy(&record.scalar, operation.scalar_memory, size_of(operation.dtype));
  return record;
}

bool same(const Record& a, const Record& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.count == b.count;
}

bool has_root(Collective kind) {
  return kind == Collective::reduce || kind == Collective::broadcast || kind == Collective::gather ||
         kind == Collective::scatter;
}

// Whether the send and the receive buffer have `count` elements each. In the other kinds, one of them or both have a
// block of `count` elements for each rank.
bool has_equal_buffers(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce || kind == Collective::broadcast;
}

// The call as text, with the arguments that its kind has: "AllReduce of 3 float32 (sum)", "Broadcast of 8 int8 (root
// 1)".
std::string described(const Record& record) {
  static const char* const operators[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
  std::string text = std::string(name_of(record.kind)) + " of " + std::to_string(record.count) + " " + type_name(record.dtype);
  if (!reduces(record.kind) && !has_root(record.kind)) return text;
  text += " (";
  if (reduces(record.kind)) text += operators[uint32_t(record.op)];
  if (reduces(record.kind) && has_root(record.kind)) text += ", ";
  if (has_root(record.kind)) text += "root " + std::to_string(record.root);
  return text + ")";
}

// Whether rank `rank` has described the same collective as this rank.
bool has_same_record(Comm& comm, uint64_t number, int rank) {
  const int place = place_of(number);
  return same(comm.segment->slot(comm.rank).record(place), comm.segment->slot(rank).record(place));
}

// Compares the records of all ranks. All ranks that meet see the same records, so all of them skip a mismatched
// operation and every later one. If a record has been overwritten, the ranks agreed: its rank had compared all records
// before.
bool check_agreement(Comm& comm, uint64_t number) {
  Record first, other;
  const int place = place_of(number);
  if (!comm.segment->slot(0).placed[place].read(number, &first)) return true;
  for (int r = 1; r < comm.nranks; r++) {
    if (!comm.segment->slot(r).placed[place].read(number, &other)) return true;
    if (same(first, other)) continue;
    fail(ncclInvalidUsage, "the ranks do not agree: rank 0 calls %s, rank %d calls %s (%s)", described(first).c_str(), r,
         described(other).c_str(), comm.title().c_str());
    comm.health.set_async(ncclInvalidUsage, last_error());
    return false;
  }
  return true;
}

// A communicator of one rank: applies the operator to its input.
void run_alone(const Record& record) {
  if (reduces(record.kind) && record.op == Operator::premulsum) {
    reduce({record.dtype, record.op, 1, &record.send, 1, &record.recv, record.count, &record.scalar});
  } else if (record.send != record.recv) {
    std::memcpy(record.recv, record.send, record.count * size_of(record.dtype));
  }
}

}  // namespace

bool fits_interruptible(const Comm& comm, const Operation& operation, size_t* bytes) {
  if (operation.kind != Operation::collective && !operation.message()) return false;
  const bool has_blocks = operation.kind == Operation::collective && !has_equal_buffers(operation.collective_kind);
  const size_t unit = size_of(operation.dtype) * size_t(has_blocks ? comm.nranks : 1);
  if (operation.count > *bytes / unit) return false;
  *bytes -= operation.count * unit;
  return true;
}

namespace {

// Whether all data come from the root.
bool only_root_sends(const Operation& operation) {
  return operation.collective_kind == Collective::broadcast || operation.collective_kind == Collective::scatter;
}

// Whether this rank of an inline collective must wait for others. A rank that does not wait learns of a mismatch only
// in a later wait for other ranks.
bool needs_others(const Operation& operation, int rank) {
  return only_root_sends(operation) ? rank != operation.root : operation.receives(rank);
}

// Writes the record of this rank's collective, and waits for the other ranks if it needs them. The result is `ended` if
// the ranks do not agree.
WaitResult meet(Comm& comm, const Operation& operation, bool is_inlined, CollectiveProgress& progress) {
  const size_t bytes = is_inlined ? inline_contribution_bytes(comm, operation) : 0;
  if (!comm.rendezvous.is_waiting()) {
    const WaitResult result = comm.rendezvous.await_record_space(bytes, comm, check_agreement);
    if (result != WaitResult::ok) return result;
    Record mine = record_of(operation);
    if (!is_inlined) {
      mine.reads_peers = reads_peers(comm);
      mine.cma_read = mine.reads_peers && wants_cma(comm, mine);
    }
    progress.place = comm.rendezvous.next_place();
    comm.segment->slot(comm.rank).placed[progress.place].write(mine);
    if (is_inlined) write_inline(comm, mine, progress.place, bytes);
    if (is_inlined && !needs_others(operation, comm.rank)) {
      comm.rendezvous.post_record();
      prefetch_inline(comm, comm.rendezvous.next_place(), bytes);
      progress.arrived = true;
      return WaitResult::ok;
    }
  }
  Rendezvous& rendezvous = comm.rendezvous;
  const WaitResult result =
      !is_inlined                  ? rendezvous.meet_at_barrier(comm, check_agreement)
      : only_root_sends(operation) ? rendezvous.meet_root(operation.root, comm, has_same_record, check_agreement)
                                   : rendezvous.meet(comm, check_agreement);
  progress.arrived = result == WaitResult::ok;
  prefetch_inline(comm, comm.rendezvous.next_place(), bytes);
  return result;
}

// Moves the data of a collective for which all needed ranks have arrived.
WaitResult move_data(Comm& comm, bool is_inlined, CollectiveProgress& progress) {
  if (is_inlined) {
    run_inline(comm, progress.place);
    return WaitResult::ok;
  }
  if (comm.segment->one_process()) {
    run_in_process(comm, progress.place);
    return WaitResult::ok;
  }
  using Clock = std::chrono::steady_clock;
  const bool cma = uses_cma(comm, progress.place);
  const auto began = Clock::now();
  const WaitResult result = cma ? run_cma_read(comm, progress) : run_shm_staged(comm, progress);
  if (result == WaitResult::suspended) progress.suspended = true;
  if (result == WaitResult::ok && !progress.suspended) {
    record_duration(comm, progress.place, cma, std::chrono::duration<double>(Clock::now() - began).count());
  }
  return result;
}

// Ends a collective without the other ranks' data; the next rank's collective then ends in the same way.
void complete_corrupted(Comm& comm, const Operation& operation) {
  if (operation.receives(comm.rank)) {
    const size_t blocks = blocks_received(operation.collective_kind, comm.nranks);
    overwrite_with_garbage(operation.recvbuff, operation.count * size_of(operation.dtype) * blocks);
  }
  count_abandoned(*comm.segment, comm.rank, 1);
  comm.segment->notify_all();
}

}  // namespace

ncclResult_t exchange(Comm& comm, const void* mine, size_t bytes, void* all) {
  return comm.rendezvous.exchange(mine, bytes, all, comm, check_agreement) ? ncclSuccess : comm.stop_reason("the other ranks");
}

bool finds_disagreement(Comm& comm) { return comm.rendezvous.finds_disagreement(comm, check_agreement); }

WaitResult await_all_passed(Comm& comm) { return comm.rendezvous.await_all_passed(comm, check_agreement); }

bool run_collective(Comm& comm, const Operation& operation, CollectiveProgress& progress) {
  if (comm.nranks == 1) {
    run_alone(record_of(operation));
    return true;
  }
  const bool is_inlined = is_inline(operation.collective_kind, operation.dtype, operation.count, comm.nranks);
  WaitResult result = progress.arrived ? WaitResult::ok : meet(comm, operation, is_inlined, progress);
  if (result == WaitResult::ok) result = move_data(comm, is_inlined, progress);
  // The barrier may open although a read of a dead rank's memory has failed.
  if (result == WaitResult::ok && comm.health.hangs_on_dead_rank()) result = WaitResult::ended;
  switch (result) {
    case WaitResult::ok: comm.rendezvous.mark_passed(); break;
    case WaitResult::ended:
      if (!hang_until_released(comm)) return false;
      abandon_operations(comm, &operation, 1);
      break;
    case WaitResult::corrupted: complete_corrupted(comm, operation); break;
    case WaitResult::suspended: return false;
  }
  return true;
}

}  // namespace ncclpy::host
