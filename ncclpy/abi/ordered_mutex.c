/* Checks of the order of locks, for a build with -Ddebug_locks=true: each thread records the locks that it holds. All
 * compiled parts of the package share this record. */
#define _GNU_SOURCE
#include "ordered_mutex.h"

#include <execinfo.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Functions of Python, NULL in a process without Python: the first three tell whether this thread has the GIL, the
 * others wait for the GIL. */
typedef struct _ts PyThreadState;
extern PyThreadState* PyThreadState_GetUnchecked(void) __attribute__((weak));
extern PyThreadState* _PyThreadState_UncheckedGet(void) __attribute__((weak)); /* before Python 3.13 */
extern PyThreadState* PyGILState_GetThisThreadState(void) __attribute__((weak));
extern void PyEval_RestoreThread(PyThreadState*) __attribute__((weak));
extern int PyGILState_Ensure(void) __attribute__((weak));

#define NCCLPY_ONE(name) (UINT64_C(1) << NCCLPY_LOCK_##name)
#define NCCLPY_BELOW(name) (~UINT64_C(0) << NCCLPY_LOCK_##name << 1)
#define NCCLPY_STREAMS (NCCLPY_ONE(DEVICE) | NCCLPY_ONE(STREAM) | NCCLPY_ONE(SWEEPER))
#define NCCLPY_ENGINE (~UINT64_C(0) << NCCLPY_LOCK_CONTROL)

typedef struct {
  const char* words;
  uint64_t under; /* the locks that may be taken under it, directly */
  int how;
} lock_rule;

/* Under a lock only locks that are later in the list may be taken, so that no cycle is possible. */
#define NCCLPY_DOWN(name, words, under, how) \
  _Static_assert(((under) & ~NCCLPY_BELOW(name)) == 0, "a lock allowed under " words " stands before it in the list");
NCCLPY_LOCKS(NCCLPY_DOWN)
_Static_assert(NCCLPY_LOCK_COUNT <= 64, "the locks are the bits of a number");

#define NCCLPY_RULE(name, words, under, how) {words, under, how},
static const lock_rule rules[] = {NCCLPY_LOCKS(NCCLPY_RULE)};

/* The locks that this thread holds, in the order in which it took them. */
enum { MAX_HELD = 256 };
static __thread struct {
  ncclpy_lock lock;
  const void* which;
} held[MAX_HELD];
static __thread int count;

/* The locks that may be taken under a lock, also indirectly. */
static uint64_t all_under(ncclpy_lock lock) {
  uint64_t all = rules[lock].under;
  for (int i = lock + 1; i < NCCLPY_LOCK_COUNT; i++) {
    if (all >> i & 1) all |= rules[i].under;
  }
  return all;
}

static int has_gil(void) {
  PyThreadState* current = NULL;
  if (PyThreadState_GetUnchecked != NULL) current = PyThreadState_GetUnchecked();
  else if (_PyThreadState_UncheckedGet != NULL) current = _PyThreadState_UncheckedGet();
  return current != NULL && PyGILState_GetThisThreadState != NULL && current == PyGILState_GetThisThreadState();
}

/* Ends the process with a message, the locks that this thread holds, and its stack. */
static void fail(const char* format, ...) {
  char name[16] = "?";
  void* frames[64];
  va_list values;
  pthread_getname_np(pthread_self(), name, sizeof name);
  fprintf(stderr, "ncclpy: locks out of order in thread %ld (%s): ", (long)syscall(SYS_gettid), name);
  va_start(values, format);
  vfprintf(stderr, format, values);
  va_end(values);
  fprintf(stderr, ".\nIt holds, from the first taken:\n");
  for (int i = 0; i < count; i++) fprintf(stderr, "  %s (%p)\n", rules[held[i].lock].words, held[i].which);
  fprintf(stderr, "docs/locks.md says what may be taken under what. The thread's stack:\n");
  fflush(stderr);
  backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  abort();
}

void ncclpy_lock_wanted(ncclpy_lock lock, const void* which) {
  const lock_rule* const wanted = &rules[lock];
  if ((wanted->how & NCCLPY_AWAITED_WITHOUT_GIL) && has_gil())
    fail("it waits for %s (%p) and has not given the GIL up", wanted->words, which);
  for (int i = 0; i < count; i++) {
    if (held[i].lock == lock) {
      if (held[i].which == which && (wanted->how & NCCLPY_RECURSIVE)) continue;
      if (held[i].which == which) fail("it waits for %s (%p), which it holds", wanted->words, which);
      if ((uintptr_t)held[i].which < (uintptr_t)which && (wanted->how & NCCLPY_BY_ADDRESS)) continue;
    } else if (all_under(held[i].lock) >> lock & 1) {
      continue;
    }
    fail("it waits for %s (%p) while it holds %s (%p)", wanted->words, which, rules[held[i].lock].words,
         held[i].which);
  }
}

void ncclpy_lock_taken(ncclpy_lock lock, const void* which) {
  if (count == MAX_HELD) fail("it takes %s (%p), but no further lock can be recorded", rules[lock].words, which);
  held[count].lock = lock;
  held[count].which = which;
  count++;
}

void ncclpy_lock_released(ncclpy_lock lock, const void* which) {
  int i = count - 1;
  while (i >= 0 && (held[i].lock != lock || held[i].which != which)) i--;
  if (i < 0) fail("it gives %s (%p) back, which it does not hold", rules[lock].words, which);
  for (count--; i < count; i++) held[i] = held[i + 1];
}

void ncclpy_lock_none(ncclpy_lock first, const char* before) {
  for (int i = 0; i < count; i++) {
    if (held[i].lock >= first) fail("%s, while it holds %s (%p)", before, rules[held[i].lock].words, held[i].which);
  }
}

static void gil_wanted(void) {
  for (int i = 0; i < count; i++) {
    if (!(rules[held[i].lock].how & NCCLPY_TAKES_GIL))
      fail("it waits for the GIL while it holds %s (%p)", rules[held[i].lock].words, held[i].which);
  }
}

/* The linker redirects the calls of ncclpy's modules to these functions (--wrap). */
void __wrap_PyEval_RestoreThread(PyThreadState* state);
int __wrap_PyGILState_Ensure(void);

void __wrap_PyEval_RestoreThread(PyThreadState* state) {
  gil_wanted();
  PyEval_RestoreThread(state);
}

int __wrap_PyGILState_Ensure(void) {
  if (!has_gil()) gil_wanted();
  return PyGILState_Ensure();
}
