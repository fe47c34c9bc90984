// A fuzzer (libFuzzer) of the rendezvous of ranks: the bytes of a unique id, and the memory that it refers to, which
// any process of the user can write. Joining must return, without accessing memory that does not exist or allocating
// memory for it.
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "segment/segment.hpp"

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

// The beginnings of a unique id and of the memory, taken from those that the engine made.
struct Made {
  ncclUniqueId id;
  uint64_t magic;
  Made() {
    ncclUniqueId used;
    std::shared_ptr<Segment> segment;
    if (create_unique_id(&id) != ncclSuccess || create_unique_id(&used) != ncclSuccess) abort();
    if (join_segment(used, 1, 0, 0, &segment) != ncclSuccess) abort();
    magic = segment->header().magic;
  }
};

// A memfd as the engine makes them, of `bytes`, with `content` at `offset`.
int file(const char* name, size_t bytes, size_t offset, const void* content, size_t size, bool sealed) {
  const int made = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made < 0 || ftruncate(made, off_t(bytes)) != 0) abort();
  if (offset + size <= bytes && pwrite(made, content, size, off_t(offset)) != ssize_t(size)) abort();
  if (sealed && fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) abort();
  return made;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Made& made = *new Made;
  Input input = {data, size};
  const auto kind = input.value<uint8_t>();
  const auto nranks = input.value<int32_t>();
  const auto rank = input.value<int32_t>();
  if (nranks < 1 || rank < 0 || rank >= nranks) return -1;  // refused before the id is read

  // Damages the memory's beginning, the entry in the table, the id after its beginning, or the whole id.
  alignas(Header) unsigned char bytes[sizeof(Header)] = {};
  Header* header = reinterpret_cast<Header*>(bytes);
  header->magic = made.magic;
  memcpy(header->nonce, made.id.internal + 16, sizeof header->nonce);
  header->nranks = uint32_t(nranks);
  header->bytes = segment_bytes(std::min(nranks, 64));
  size_t length = header->bytes;
  if (kind & 1) {
    input.bytes(bytes, sizeof bytes);
    length = input.value<uint32_t>() % (64 << 20);
  }
  const int memory = file("ncclpy-communicator", length, 0, bytes, sizeof bytes, !(kind & 16));

  IdEntry entry;
  memcpy(entry.nonce, made.id.internal + 16, 16);
  entry.word = (kind & 32) ? uint64_t(Phase::offered) : uint64_t(Phase::laid_out);
  entry.memory = uint64_t(getpid()) << 32 | uint64_t(memory);
  entry.nranks = uint32_t(nranks);
  if (kind & 2) input.bytes(static_cast<void*>(&entry), sizeof entry);
  if (uint8_t(entry.word) == uint8_t(Phase::being_laid_out)) entry.word = 0;  // joining would wait for 2 s
  const int table = file("ncclpy-ids", 1 << 20, 0, &entry, sizeof entry, !(kind & 64));

  ncclUniqueId id = made.id;
  memcpy(id.internal + 12, &table, 4);
  memset(id.internal + 32, 0, 4);  // the first entry
  if (kind & 4) input.bytes(id.internal + 16, sizeof id - 16);
  if (kind & 8) input.bytes(id.internal, sizeof id);

  std::shared_ptr<Segment> segment;
  if (join_segment(id, nranks, rank, 0, &segment) == ncclSuccess) {
    segment->complete();
    segment->find_dead_ranks();
    if (segment->first_dead() >= nranks) abort();
    segment->buffer_bytes(rank);
    segment->inline_buffer(rank, 1, inline_bytes)[0] = 1;
    segment->inline_buffer(rank, 1, record_inline_bytes)[record_inline_bytes - 1] = 1;
    segment->piece(rank, rank, channel_slots - 1, piece_inline_bytes)[piece_inline_bytes - 1] = 1;
    segment->piece(rank, rank, channel_slots - 1, piece_bytes)[piece_bytes - 1] = 1;
    segment->end_id_rendezvous();
  }
  segment.reset();
  close(table);
  close(memory);
  return 0;
}
