// A fuzzer (libFuzzer) of how ranks meet: the bytes of a unique id, and the memory that it leads to, which any process
// of the user can write. Joining must end with an answer, without touching what is not there or taking memory for it.
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "nccl/segment.hpp"

using namespace ncclpy::host;

namespace {

// Takes values from the front of the input; zeros when it is used up.
struct Input {
  const uint8_t* data;
  size_t size;

  void bytes(void* target, size_t wanted) {
    const size_t given = std::min(wanted, size);
    memcpy(target, data, given);
    data += given;
    size -= given;
  }
  template <class T>
  T value() {
    T result = {};
    bytes(&result, sizeof result);
    return result;
  }
};

// What a unique id and the memory begin with, learnt from one that the engine made.
struct Made {
  ncclUniqueId id;
  Header* header;
  int32_t pid, descriptor;

  Made() {
    if (create_unique_id(&id) != ncclSuccess) abort();
    memcpy(&pid, id.internal + 8, 4);
    memcpy(&descriptor, id.internal + 12, 4);
    header = static_cast<Header*>(mmap(nullptr, sizeof(Header), PROT_READ, MAP_SHARED, descriptor, 0));
    if (header == MAP_FAILED || pid != getpid()) abort();
  }
};

// Phase and sizes as the first rank of a communicator leaves them.
void set_up(Header* header, int nranks) {
  ncclUniqueId id;
  std::shared_ptr<Segment> segment;
  if (create_unique_id(&id) != ncclSuccess || join_segment(id, nranks, 0, 0, &segment) != ncclSuccess) abort();
  header->phase.store(segment->header().phase.load());
  header->nranks = segment->header().nranks;
  header->bytes = segment->header().bytes;
  segment.reset();
  withdraw_unique_id(id);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Made& made = *new Made;
  Input input = {data, size};
  const auto kind = input.value<uint8_t>();
  const auto nranks = input.value<int32_t>();
  const auto rank = input.value<int32_t>();
  if (nranks < 1 || rank < 0 || rank >= nranks) return -1;  // refused before the id is looked at

  const int memory = memfd_create("ncclpy-communicator", MFD_CLOEXEC);
  if (memory < 0 || ftruncate(memory, off_t(input.value<uint32_t>() % (64 << 20))) != 0) abort();
  ncclUniqueId id = made.id;
  memcpy(id.internal + 12, &memory, 4);

  alignas(Header) unsigned char bytes[sizeof(Header)] = {};
  Header* header = reinterpret_cast<Header*>(bytes);
  header->magic = made.header->magic;
  memcpy(header->nonce, made.header->nonce, sizeof header->nonce);
  if (kind & 16) set_up(header, std::min(nranks, 64));
  // Bit by bit: damage the memory behind the beginning, its beginning, the id behind its beginning, all of the id.
  if (kind & 1) input.bytes(&header->phase, sizeof(Header) - offsetof(Header, phase));
  if (kind & 2) input.bytes(bytes, offsetof(Header, phase));
  if (kind & 4) input.bytes(id.internal + 16, sizeof id - 16);
  if (kind & 8) input.bytes(id.internal, sizeof id);
  if (header->phase.load() != 1 && pwrite(memory, bytes, sizeof bytes, 0) < 0) abort();  // 1 is waited upon, for 2 s

  std::shared_ptr<Segment> segment;
  if (join_segment(id, nranks, rank, 0, &segment) == ncclSuccess) {
    segment->complete();
    segment->take_pulses();
    if (segment->first_dead() >= nranks) abort();
    segment->buffer_bytes(rank);
    segment->small(rank, 1)[0] = 1;
    segment->piece(rank, rank, channel_slots - 1)[piece_bytes - 1] = 1;
  }
  segment.reset();
  retire_unique_ids();
  close(memory);
  return 0;
}
