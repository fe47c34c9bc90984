// Many threads on many clients of one server at once, with servers and clients that end meanwhile; run under a
// sanitizer. Exits with 0, or prints what went wrong and aborts.

#include <atomic>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client.hpp"
#include "clock.hpp"
#include "server.hpp"
#include "store_driver.hpp"

#ifdef __SANITIZE_THREAD__
// ThreadSanitizer before GCC 13 does not intercept this function, and so misses that it releases the mutex.
extern "C" int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                      const timespec* until) {
  timespec from, to, real = *until;
  clock_gettime(clock, &from);
  clock_gettime(CLOCK_REALTIME, &to);
  real.tv_sec += to.tv_sec - from.tv_sec;
  real.tv_nsec += to.tv_nsec - from.tv_nsec;
  for (; real.tv_nsec < 0; real.tv_sec--) real.tv_nsec += 1000000000;
  for (; real.tv_nsec >= 1000000000; real.tv_sec++) real.tv_nsec -= 1000000000;
  return pthread_cond_timedwait(condition, mutex, &real);
}
#endif

using namespace ncclpy::store;

namespace {

constexpr std::string_view kToken = "of the stress";
constexpr int kRounds = 150;

std::shared_ptr<Client> connect(uint16_t port) {
  const int fd = call(port);
  shake_hands(fd, kToken);
  auto client = std::make_shared<Client>(fd, 2.0, 1 << 24);
  CHECK(client->start());
  return client;
}

// Sends a request and waits for the answer; returns false if the connection is lost.
bool call(Client& client, Op op, const Writer& body, Answer& answer, double patience = 30) {
  const uint64_t id = client.submit(op, body.body);
  if (id == 0) return false;
  const double until = now() + patience;
  while (true) {
    // Not in slices: the end of a slice would hide a missing wake-up.
    const auto turn = client.wait(id, until);
    if (turn == Client::WaitResult::lost) return false;
    if (turn == Client::WaitResult::answered) return client.take(id, answer);
    if (now() >= until) {
      client.forget(id, true);
      answer = {};
      answer.status = Status::late;
      return true;
    }
  }
}

std::atomic<int64_t> added{0};

void use(Client& client, int seed, bool may_be_lost) {
  std::mt19937 chance(static_cast<unsigned>(seed));
  const std::string mine = "key " + std::to_string(seed);
  for (int round = 0; round < kRounds; round++) {
    Answer answer;
    std::string value(chance() % 20 ? chance() % 50 : 200000, 'v');
    Writer set;
    set.bytes(mine).bytes(value).integer(chance() % 2);
    bool there = call(client, Op::set, set, answer);
    Writer get;
    get.bytes(mine).integer(-1);
    there = there && call(client, Op::get, get, answer);
    std::string_view got;
    CHECK(!there || (Reader(answer.body).bytes(got) && got == value));
    Writer sets, gets;
    sets.integer(2).bytes(mine).bytes("first").bytes("many " + mine).bytes(value);
    there = there && call(client, Op::multi_set, sets, answer);
    gets.integer(-1).integer(2).bytes("many " + mine).bytes(mine);
    there = there && call(client, Op::multi_get, gets, answer);
    Reader both(answer.body);
    int64_t without;
    CHECK(!there || (both.integer(without) && without == 0 && both.bytes(got) && got == value && both.bytes(got) &&
                     got == "first"));
    Writer add;
    add.bytes("sum").integer(1);
    there = there && call(client, Op::add, add, answer);
    if (there) added++;
    if (chance() % 4 == 0) {  // a wait left early, by the server's clock or by this one
      Writer never;
      never.bytes("never").integer(chance() % 2 ? 100 : -1);
      there = there && call(client, Op::get, never, answer, 0.0005);
      CHECK(!there || answer.status == Status::late);
    }
    CHECK(there || may_be_lost);
    if (!there) return;
  }
}

void meet(Client& client, int rank, int size) {
  for (int round = 0; round < 20; round++) {
    Answer answer;
    Writer gather;
    gather.bytes("meeting").integer(rank).integer(size).integer(-1).bytes(std::to_string(rank));
    CHECK(call(client, Op::gather, gather, answer) && answer.status == Status::ok);
  }
}

void watch(Client& client, std::atomic<bool>& ended) {
  Writer prefix;
  prefix.bytes("key");
  const uint64_t id = client.submit(Op::watch, prefix.body);
  int64_t changes = 0;
  while (!ended) {
    Answer answer;
    if (client.wait(id, now() + 0.05) == Client::WaitResult::answered && client.take(id, answer)) changes++;
  }
  CHECK(changes > kRounds);
  client.forget(id, true);
}

std::string value_of(Client& client, const std::string& key) {
  Answer answer;
  Writer get;
  get.bytes(key).integer(-1);
  CHECK(call(client, Op::get, get, answer));
  std::string_view got;
  CHECK(Reader(answer.body).bytes(got));
  return std::string(got);
}

void ask(Client& client, const std::string& asked) {
  Answer answer;
  Writer add;
  add.bytes(asked).integer(1);
  CHECK(call(client, Op::add, add, answer));
}

// One client answers questions of another from a source, and never after end_publisher(), as the source is freed then.
void tell(Client& teller, Client& asker, int seed) {
  const std::string key = "told " + std::to_string(seed), asked = "asked " + std::to_string(seed);
  for (int round = 0; round < 40; round++) {
    auto* count = new std::atomic<int>(2 * round);
    const Source source{count, [](void* what, char* at, size_t space, size_t* lasting) {
                          const int length = snprintf(at, space, "%d", static_cast<std::atomic<int>*>(what)->load());
                          *lasting = static_cast<size_t>(length);
                          return *lasting;
                        }};
    const uint64_t id = teller.start_publisher(asked, Publisher(key, ".", source));
    CHECK(id != 0);
    while (value_of(asker, key) != std::to_string(2 * round) + ".") usleep(100);  // at once
    *count = 2 * round + 1;
    ask(asker, asked);
    while (value_of(asker, key) != std::to_string(2 * round + 1) + ".") usleep(100);
    if (round % 2) ask(asker, asked);  // which may arrive in the middle of end_publisher()
    teller.end_publisher(id);
    delete count;
    ask(asker, asked);
    CHECK(value_of(teller, key) == std::to_string(2 * round + 1) + ".");
  }
}

}  // namespace

int main() {
  ServerOptions options;
  options.token = kToken;
  options.heartbeat = 2;
  options.max_value = options.max_answer = 1 << 23;
  options.max_backlog = 1 << 28;
  options.capacity = 1 << 28;
  uint16_t port;
  Server server(options);
  server.listen(listener(port));
  CHECK(server.start());

  std::vector<std::shared_ptr<Client>> clients;
  for (int i = 0; i < 3; i++) clients.push_back(connect(port));
  std::vector<std::thread> threads, others;
  std::atomic<bool> ended{false};
  std::thread watcher(watch, std::ref(*clients[0]), std::ref(ended));
  for (int i = 0; i < 9; i++) threads.emplace_back(use, std::ref(*clients[i % 3]), i, false);
  for (int i = 0; i < 4; i++) threads.emplace_back(meet, std::ref(*clients[i % 3]), i, 4);
  for (int i = 0; i < 2; i++) threads.emplace_back(tell, std::ref(*clients[i]), std::ref(*clients[i + 1]), i);
  for (int i = 0; i < 3; i++) {  // clients that are closed while they are used
    others.emplace_back([port, i] {
      for (int turn = 0; turn < 10; turn++) {
        auto client = connect(port);
        std::thread user(use, std::ref(*client), 100 + i, true);
        usleep(3000);
        client->close("closed", turn % 2 ? 0.0 : 1.0);
        user.join();
        CHECK(client->lost() == "closed");
      }
    });
  }
  others.emplace_back([&] {
    std::string line;
    while (!server.stopped()) server.next_line(line, 0.1);
  });
  for (auto& each : threads) each.join();
  ended = true;
  watcher.join();
  for (int i = 0; i < 3; i++) others[static_cast<size_t>(i)].join();
  Answer answer;
  Writer add;
  add.bytes("sum").integer(0);
  int64_t sum = 0;
  CHECK(call(*clients[1], Op::add, add, answer) && Reader(answer.body).integer(sum));
  CHECK(sum >= added && sum <= added + 30);  // the answer for a closed client may be lost

  // The server stops while clients use it.
  threads.clear();
  for (int i = 0; i < 6; i++) threads.emplace_back(use, std::ref(*clients[i % 3]), 200 + i, true);
  usleep(5000);
  server.stop();
  for (auto& each : threads) each.join();
  others.back().join();
  for (auto& client : clients) {
    CHECK(!client->lost().empty());
    client->close("closed", 1.0);
  }
  std::puts("all counts agree");
}
