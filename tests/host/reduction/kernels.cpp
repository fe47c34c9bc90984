// Compares reductions with one output, which is written directly, and with two, which are copies of a block: they must
// have the same bits, for each copy of the loops that this processor runs, for every data type and operator, for two
// and more inputs, at different alignments, in place or not, with non-temporal stores or not; and nothing beside the
// output may be written. Sums and maxima of three types are also compared with plain loops. Prints the number of
// comparisons.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "reduction/reduce.hpp"

namespace {
using namespace ncclpy::host;
using Bytes = std::vector<unsigned char>;

constexpr size_t guard = 128;
constexpr int most_inputs = 5;
std::mt19937_64 numbers(1);

// Without infinities and NaNs: the compiler decides which of two NaNs is kept.
Bytes finite(size_t bytes, size_t element) {
  Bytes made(bytes);
  for (size_t i = 0; i < bytes; i++) made[i] = static_cast<unsigned char>(numbers() & (i % element == element - 1 ? 0xbf : 0xff));
  return made;
}

struct Case {
  ncclDataType_t dtype;
  Operator op;
  size_t count;
  int inputs;
  size_t offsets[most_inputs + 1];  // in bytes, of the inputs and of the output
  int in_place;                     // the input that is also the output, or -1
  bool nontemporal;
};

template <class T>
bool is_plain(const Case& c, const Bytes* values, const Bytes& result) {
  for (size_t i = 0; i < c.count; i++) {
    T expected, next, got;
    std::memcpy(&expected, values[0].data() + i * sizeof(T), sizeof(T));
    for (int k = 1; k < c.inputs; k++) {
      std::memcpy(&next, values[k].data() + i * sizeof(T), sizeof(T));
      expected = c.op == Operator::sum ? T(expected + next) : next > expected ? next : expected;
    }
    std::memcpy(&got, result.data() + i * sizeof(T), sizeof(T));
    if (expected != got) return false;
  }
  return true;
}

bool is_plain(const Case& c, const Bytes* values, const Bytes& result) {
  if (c.op != Operator::sum && c.op != Operator::max) return true;
  if (c.dtype == ncclFloat32) return is_plain<float>(c, values, result);
  if (c.dtype == ncclUint8) return is_plain<uint8_t>(c, values, result);
  if (c.dtype == ncclUint64) return is_plain<uint64_t>(c, values, result);
  return true;
}

bool is_right(Kernels kernels, const Case& c) {
  const size_t element = size_of(c.dtype), bytes = c.count * element;
  Bytes values[most_inputs], memory[most_inputs + 1];
  void* at[most_inputs + 1];
  const void *inputs[most_inputs], *fresh[most_inputs];
  for (int k = 0; k <= c.inputs; k++) {
    memory[k].assign(guard + 64 + bytes + guard, 0x5a);
    unsigned char* line = memory[k].data() + guard;
    line += (64 - reinterpret_cast<uintptr_t>(line) % 64) % 64;
    at[k] = line - 64 + c.offsets[k];
    if (k == c.inputs) break;
    values[k] = finite(bytes, element);
    if (bytes > 0) std::memcpy(at[k], values[k].data(), bytes);
    inputs[k] = at[k];
    fresh[k] = values[k].data();
  }
  const int out = c.in_place < 0 ? c.inputs : c.in_place;
  const Bytes before = memory[out];
  kernels({c.dtype, c.op, c.inputs, inputs, 1, &at[out], c.count, nullptr, c.nontemporal});

  Bytes expected[2] = {Bytes(bytes + 1), Bytes(bytes + 1)};
  void* outputs[2] = {expected[0].data(), expected[1].data()};
  kernels({c.dtype, c.op, c.inputs, fresh, 2, outputs, c.count, nullptr, c.nontemporal});
  if (expected[0] != expected[1] || !is_plain(c, values, expected[0])) return false;
  if (bytes > 0 && std::memcmp(at[out], outputs[0], bytes) != 0) return false;
  const size_t begin = size_t(static_cast<unsigned char*>(at[out]) - memory[out].data());
  return std::memcmp(memory[out].data(), before.data(), begin) == 0 &&
         std::memcmp(memory[out].data() + begin + bytes, before.data() + begin + bytes, before.size() - begin - bytes) == 0;
}

}  // namespace

int main() {
  const std::vector<Kernels> copies = usable_kernels();
  size_t compared = 0;
  for (size_t copy = 0; copy < copies.size(); copy++) {
    for (int dtype = 0; dtype < ncclNumTypes; dtype++) {
      const size_t element = size_of(ncclDataType_t(dtype));
      for (Operator op : {Operator::sum, Operator::prod, Operator::max, Operator::min, Operator::avg}) {
        for (size_t count : {size_t(0), size_t(1), 63 / element, 64 / element, size_t(130), size_t(3000)}) {
          for (int inputs : {2, 3, 5}) {
            for (int in_place = -1; in_place < inputs; in_place++) {
              for (int way = 0; way < 4; way++) {
                const bool nontemporal = way & 1, aligned = way & 2;
                Case c = {ncclDataType_t(dtype), op, count, inputs, {}, in_place, nontemporal};
                for (size_t& offset : c.offsets) offset = aligned ? numbers() % (64 / element) * element : numbers() % 64;
                if (is_right(copies[copy], c)) {
                  compared++;
                  continue;
                }
                std::fprintf(stderr, "copy %zu type %d operator %d count %zu inputs %d in place %d past caches %d aligned %d\n", copy,
                             dtype, int(op), count, inputs, in_place, int(nontemporal), int(aligned));
                return 1;
              }
            }
          }
        }
      }
    }
  }
  std::printf("%zu\n", compared);
}
