// libFuzzer: no bytes that a store's server receives make it crash or stop serving other clients; see .ci/fuzz.
//
// The first byte of an input chooses the way. Requests of several connections, with nearly valid bodies and pauses
// between them, go straight to the table; or bytes go to a server through a socket, before or after the handshake.
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "server.hpp"
#include "store_driver.hpp"
#include "table.hpp"

using namespace ncclpy::store;

namespace {

constexpr size_t kMaxValue = 4096, kMaxAnswer = 1 << 16, kCapacity = 2000;

// Reads the bytes of the input in order.
class Input {
 public:
  explicit Input(std::string_view bytes) : rest_(bytes) {}
  bool end() const { return rest_.empty(); }
  uint8_t byte() {
    if (rest_.empty()) return 0;
    const auto value = static_cast<uint8_t>(rest_[0]);
    rest_.remove_prefix(1);
    return value;
  }
  std::string_view bytes(size_t count) {
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

class Last final : public Post {
 public:
  void send(uint64_t, uint64_t, Op op, Status status, Body body) override {
    CHECK(op >= Op::set && op <= Op::farewell && status <= Status::refused);
    answer = std::move(body.head);
    if (body.tail) answer += *body.tail;
    CHECK(answer.size() <= kMaxAnswer + kMaxValue + 1024);
  }
  std::string answer;
};

// Few keys and names, so that requests refer to the same ones.
std::string key_of(Input& in) { return std::string(1, static_cast<char>('a' + in.byte() % 4)); }

std::string body_of(Input& in, Op op) {
  Writer out;
  const auto value = [&] { out.bytes(in.bytes(in.byte() % 64)); };
  const auto keys = [&] {
    const int count = in.byte() % 4;
    out.integer(in.byte() % 8 == 0 ? in.byte() * 1000000ll : count);
    for (int i = 0; i < count; i++) out.bytes(key_of(in));
  };
  const auto wait = [&] { out.integer(in.byte() % 4 == 0 ? -1 : in.byte() * 1000ll); };
  switch (op) {
    case Op::set: out.bytes(key_of(in)); value(); out.integer(in.byte() % 3); break;
    case Op::get: out.bytes(key_of(in)); wait(); break;
    case Op::add: out.bytes(key_of(in)); out.integer(in.byte() % 8 == 0 ? INT64_MAX : in.byte()); break;
    case Op::compare_set: out.bytes(key_of(in)).integer(in.byte() % 2); value(); out.integer(in.byte() % 2); value(); break;
    case Op::append: out.bytes(key_of(in)); value(); break;
    case Op::wait: wait(); keys(); break;
    case Op::multi_get: wait(); keys(); break;
    case Op::multi_set: {
      const int count = in.byte() % 4;
      out.integer(count);
      for (int i = 0; i < count; i++) out.bytes(key_of(in)), value();
      break;
    }
    case Op::check: keys(); break;
    case Op::erase: case Op::keys: case Op::watch: out.bytes(key_of(in)); break;
    case Op::gather:
      out.bytes(key_of(in)).integer(in.byte() % 8 == 0 ? -1 : in.byte() % 4).integer(in.byte() % 8 == 0 ? INT64_MAX : in.byte() % 4);
      wait();
      value();
      break;
    default: out.integer(in.byte() % 16);
  }
  if (in.byte() % 16 == 0) out.body.resize(out.body.size() - out.body.size() / 3);
  if (in.byte() % 16 == 0) out.body.append(in.bytes(8));
  return out.body;
}

void ask_table(Input& in) {
  Last post;
  Table table(post, kMaxValue, kMaxAnswer, kCapacity);
  double time = 1;
  while (!in.end()) {
    const uint8_t what = in.byte();
    const uint64_t connection = 1 + what % 3;
    if (what >= 250) {
      table.gone(connection, what % 2);
      continue;
    }
    Header header;
    header.op = static_cast<Op>(1 + in.byte() % 18);
    header.id = in.byte() % 16;
    const std::string body = what >= 240 ? std::string(in.bytes(in.byte())) : body_of(in, header.op);
    header.length = body.size();
    if (!table.request(connection, header, body, time)) table.gone(connection, false);
    CHECK(table.kept() <= kCapacity);
    if (what % 8 == 0) {
      time += in.byte() * 1e-3;
      if (table.next_deadline() <= time) table.expire(time);
      CHECK(table.next_deadline() > time);
    }
  }
  for (uint64_t connection = 1; connection <= 3; connection++) table.gone(connection, true);
  CHECK(table.next_deadline() > 1e300);  // no waiting request is left
  // The table counts only existing entries: without keys the count is 0.
  Header header;
  header.op = Op::keys;
  CHECK(table.request(4, header, Writer().bytes("").body, time));
  const std::string found = post.answer;
  Reader keys(found);
  int64_t count;
  CHECK(keys.integer(count));
  header.op = Op::erase;
  for (std::string_view key; keys.bytes(key);) CHECK(table.request(4, header, Writer().bytes(key).body, time));
  CHECK(table.kept() == 0);
}

struct Served {
  Served() {
    const int fd = listener(port);
    ServerOptions options;
    options.heartbeat = 600;  // long, since the witness is silent while inputs go straight to tables
    options.max_value = kMaxValue;
    options.max_answer = kMaxAnswer;
    options.capacity = 1 << 20;
    options.max_backlog = 1 << 20;
    server = new Server(options);
    server->listen(fd);
    CHECK(server->start());
    witness = connect();
  }

  int connect() const {
    const int fd = call(port);
    const linger reset{1, 0};  // otherwise the ports of the machine run out
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    return fd;
  }

  uint16_t port = 0;
  Server* server = nullptr;
  int witness = -1;
};

void tell_server(Input& in, bool met) {
  static Served* served = nullptr;
  if (served == nullptr) {
    served = new Served;
    shake_hands(served->witness, "");
  }
  const int fd = served->connect();
  if (met) shake_hands(fd, "");
  // In pieces: the server joins a torn frame again.
  while (!in.end()) {
    const std::string_view piece = in.bytes(1 + in.byte());
    if (send(fd, piece.data(), piece.size(), MSG_NOSIGNAL) < 0) break;  // the server has refused the connection
  }
  close(fd);
  // The witness, another client, is still served.
  char frame[kHeader];
  Header ping;
  ping.id = 7;
  ping.op = Op::ping;
  ping.put(frame);
  CHECK(send(served->witness, frame, kHeader, MSG_NOSIGNAL) == static_cast<ssize_t>(kHeader));
  pollfd answer{served->witness, POLLIN, 0};
  int ready;
  do ready = poll(&answer, 1, 4000);
  while (ready < 0 && errno == EINTR);  // interrupted by the fuzzer's timer
  CHECK(ready == 1);
  Header header;
  CHECK(header.get(receive(served->witness, kHeader).data()) && header.op == Op::ping && header.length == 0);
  std::string line;
  while (served->server->next_line(line, 0)) continue;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in({reinterpret_cast<const char*>(data), size});
  const uint8_t way = in.byte();
  if (way % 8 < 6) ask_table(in);
  else tell_server(in, way % 8 == 7);
  return 0;
}
