/* A host function for a stream: holds the stream up for a while, then notes the time and lets the stream continue. */
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct {
  double seconds;
  double stamp; /* CLOCK_MONOTONIC, in seconds */
} hold;

EXPORT void hold_and_stamp(void* argument) {
  hold* h = (hold*)argument;
  struct timespec t;
  t.tv_sec = (time_t)h->seconds;
  t.tv_nsec = (long)((h->seconds - (double)t.tv_sec) * 1e9);
  nanosleep(&t, NULL);
  clock_gettime(CLOCK_MONOTONIC, &t);
  h->stamp = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
