// Shared by programs that drive a store's native part: a listener, and the client's part of the handshake.
#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "handshake.hpp"

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      std::fprintf(stderr, "%s:%d: %s; errno: %s\n", __FILE__, __LINE__, #condition, std::strerror(errno)); \
      std::abort(); \
    } \
  } while (0)

namespace ncclpy::store {

inline int listener(uint16_t& port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(fd, 128) == 0);
  CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  port = ntohs(address.sin_port);
  return fd;
}

inline std::string receive(int fd, size_t count) {
  std::string data(count, '\0');
  for (size_t at = 0; at < count;) {
    const ssize_t got = recv(fd, data.data() + at, count - at, 0);
    if (got < 0 && errno == EINTR) continue;  // a fuzzer's timer
    CHECK(got > 0);
    at += static_cast<size_t>(got);
  }
  return data;
}

// Returns a connection before the handshake.
inline int call(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  CHECK(errno == EINTR);  // a fuzzer's timer, while the server's backlog was full: the kernel continues to connect
  pollfd made{fd, POLLOUT, 0};
  int ready;
  do ready = poll(&made, 1, 4000);
  while (ready < 0 && errno == EINTR);
  CHECK(ready == 1);
  int error;
  socklen_t size = sizeof error;
  CHECK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0);
  return fd;
}

// Proves to the server that this end knows the token, and checks the server's proof.
inline void shake_hands(int fd, std::string_view token) {
  const std::string mine = server_greeting(false, 0, std::string(kNonce, 'n'));
  CHECK(send(fd, mine.data(), mine.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(mine.size()));
  const std::string greetings = mine + receive(fd, kGreeting);
  const std::string known = proof("client", token, greetings);
  CHECK(send(fd, known.data(), known.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(known.size()));
  CHECK(equal_in_constant_time(receive(fd, 4 + kDigest + 8).substr(4, kDigest), proof("server", token, greetings)));
}

}  // namespace ncclpy::store
