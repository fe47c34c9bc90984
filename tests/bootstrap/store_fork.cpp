// Forks while threads are busy in a client, and makes a client in each child, which lacks those threads. Exits with
// the number of children that hung.

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "client.hpp"
#include "connection_thread.hpp"

using namespace ncclpy::store;

namespace {

std::shared_ptr<Client> made() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) _exit(101);
  auto client = std::make_shared<Client>(ends[0], 10.0, 1000);
  if (!client->start()) _exit(102);
  return client;
}

}  // namespace

int main() {
  std::atomic<bool> ended{false};
  const auto client = made();
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; i++) {
    threads.emplace_back([&] {
      while (!ended) connection_thread::watch(client.get(), true, false);  // as in each waiting call
    });
  }
  int hung = 0;
  for (int i = 0; i < 300 && hung == 0; i++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);  // reached only by a hang
      made();
      _exit(0);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) hung++;
  }
  ended = true;
  for (auto& each : threads) each.join();
  _exit(hung);
}
