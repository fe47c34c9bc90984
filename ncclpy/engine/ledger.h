/* What a rank has begun in a process group and not finished, and what it has finished last: written under the GIL, read
   by threads that do not have it and never wait for who writes.

   An operation is noted under a ticket. Those on their way lie in a ring that grows with them; a version that is odd
   while somebody writes tells readers to look again. No memory that a reader might look at is given back before the
   ledger is. */
#ifndef NCCLPY_ENGINE_LEDGER_H
#define NCCLPY_ENGINE_LEDGER_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* One operation, as others are told of it. */
typedef struct {
  uint64_t sequence;
  uint64_t count;
  uint64_t began; /* the bits of a moment of the monotonic clock; so is `done` */
  uint64_t done;
  uint64_t call; /* kind, data type, whether it is a barrier */
  uint64_t beside; /* operator and root, -1 for none */
} ncclpy_noted;

enum { NCCLPY_NOTED_WORDS = sizeof(ncclpy_noted) / sizeof(uint64_t) };

typedef struct {
  uint64_t over; /* the ticket of what has ended here, plus 1 */
  ncclpy_noted what;
} ncclpy_slot;

typedef struct ncclpy_ring {
  struct ncclpy_ring* before; /* the one that it has replaced */
  uint64_t mask;
  ncclpy_slot slots[];
} ncclpy_ring;

typedef struct {
  ncclpy_ring* ring;
  uint64_t first, next; /* tickets: of the first that is on its way, and of what comes next */
  uint64_t last;        /* plus 1, of `finished`; 0 if there is none */
  ncclpy_noted finished;
} ncclpy_row;

typedef struct {
  int users;
  uint64_t version;
  ncclpy_row rows[2]; /* collectives; what is between two ranks */
} ncclpy_ledger;

/* What a reader finds. */
typedef struct {
  int has_current, has_finished;
  ncclpy_noted current, finished;
} ncclpy_standing;

/* Each orders what comes before or behind it: a fence would, too, but thread sanitizers do not know fences. */
#define NCCLPY_GET(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define NCCLPY_PUT(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELEASE)

static inline uint64_t ncclpy_bits_of(double moment) {
  uint64_t bits;
  memcpy(&bits, &moment, sizeof bits);
  return bits;
}

static inline double ncclpy_moment_of(uint64_t bits) {
  double moment;
  memcpy(&moment, &bits, sizeof moment);
  return moment;
}

static inline void ncclpy_note_copy(ncclpy_noted* to, const ncclpy_noted* from) {
  uint64_t* out = (uint64_t*)to;
  const uint64_t* in = (const uint64_t*)from;
  int i;
  for (i = 0; i < NCCLPY_NOTED_WORDS; i++) NCCLPY_PUT(out[i], NCCLPY_GET(in[i]));
}

static inline ncclpy_ring* ncclpy_ring_new(uint64_t size, ncclpy_ring* before) {
  ncclpy_ring* ring = (ncclpy_ring*)calloc(1, sizeof(ncclpy_ring) + size * sizeof(ncclpy_slot));
  if (ring != NULL) {
    ring->before = before;
    ring->mask = size - 1;
  }
  return ring;
}

/* A ledger with one user; NULL without memory. */
static inline ncclpy_ledger* ncclpy_ledger_new(void) {
  ncclpy_ledger* ledger = (ncclpy_ledger*)calloc(1, sizeof(ncclpy_ledger));
  int i;
  if (ledger == NULL) return NULL;
  ledger->users = 1;
  for (i = 0; i < 2; i++) {
    ledger->rows[i].ring = ncclpy_ring_new(16, NULL);
    if (ledger->rows[i].ring == NULL) {
      free(ledger->rows[0].ring);
      free(ledger);
      return NULL;
    }
  }
  return ledger;
}

static inline void ncclpy_ledger_use(ncclpy_ledger* ledger) { __atomic_add_fetch(&ledger->users, 1, __ATOMIC_RELAXED); }

static inline void ncclpy_ledger_leave(ncclpy_ledger* ledger) {
  int i;
  if (__atomic_sub_fetch(&ledger->users, 1, __ATOMIC_ACQ_REL) != 0) return;
  for (i = 0; i < 2; i++) {
    ncclpy_ring* ring = ledger->rows[i].ring;
    while (ring != NULL) {
      ncclpy_ring* before = ring->before;
      free(ring);
      ring = before;
    }
  }
  free(ledger);
}

static inline void ncclpy_ledger_turn(ncclpy_ledger* ledger) { NCCLPY_PUT(ledger->version, ledger->version + 1); }

/* Notes an operation that begins, by who has the GIL. Returns its ticket; -1 without memory, and it is not noted. */
static inline int64_t ncclpy_ledger_begin(ncclpy_ledger* ledger, int pair, const ncclpy_noted* what) {
  ncclpy_row* row = &ledger->rows[pair];
  ncclpy_ring* ring = row->ring;
  ncclpy_slot* slot;
  const uint64_t ticket = row->next;
  if (ticket - row->first > ring->mask) { /* it is full of what is on its way */
    uint64_t i;
    ncclpy_ring* wider = ncclpy_ring_new(2 * (ring->mask + 1), ring);
    if (wider == NULL) return -1;
    for (i = row->first; i != ticket; i++) {
      wider->slots[i & wider->mask] = ring->slots[i & ring->mask];
    }
    NCCLPY_PUT(row->ring, wider);
    ring = wider;
  }
  slot = &ring->slots[ticket & ring->mask];
  ncclpy_ledger_turn(ledger);
  ncclpy_note_copy(&slot->what, what);
  NCCLPY_PUT(row->next, ticket + 1);
  ncclpy_ledger_turn(ledger);
  return (int64_t)ticket;
}

/* Notes the end of an operation, by who has the GIL, and whether it was `done`: else it has failed, say. */
static inline void ncclpy_ledger_end(ncclpy_ledger* ledger, int pair, int64_t ticket, int done, double moment) {
  ncclpy_row* row = &ledger->rows[pair];
  ncclpy_ring* ring = row->ring;
  ncclpy_slot* slot = &ring->slots[(uint64_t)ticket & ring->mask];
  const uint64_t over = (uint64_t)ticket + 1;
  uint64_t first = row->first;
  if ((uint64_t)ticket - first >= row->next - first || slot->over == over) return; /* it has ended before */
  ncclpy_ledger_turn(ledger);
  NCCLPY_PUT(slot->over, over);
  if (done && over > row->last) {
    NCCLPY_PUT(slot->what.done, ncclpy_bits_of(moment));
    ncclpy_note_copy(&row->finished, &slot->what);
    NCCLPY_PUT(row->last, over);
  }
  while (first != row->next && ring->slots[first & ring->mask].over == first + 1) first++;
  NCCLPY_PUT(row->first, first);
  ncclpy_ledger_turn(ledger);
}

/* Reads one row, perhaps while it is written: then what it finds is wrong, but lies within the ring. */
static inline void ncclpy_row_read(const ncclpy_row* row, ncclpy_standing* found) {
  const ncclpy_ring* ring = NCCLPY_GET(row->ring);
  const uint64_t first = NCCLPY_GET(row->first);
  found->has_current = first != NCCLPY_GET(row->next);  /* the first is one that runs, or `first` would be further */
  if (found->has_current) ncclpy_note_copy(&found->current, &ring->slots[first & ring->mask].what);
  found->has_finished = NCCLPY_GET(row->last) != 0;
  if (found->has_finished) ncclpy_note_copy(&found->finished, &row->finished);
}

/* The first operation that is begun and not done, and the last that is done; collectives go before what is between two
   ranks. Returns 0 where somebody wrote all the time. */
static inline int ncclpy_ledger_read(const ncclpy_ledger* ledger, ncclpy_standing* standing) {
  int tries;
  for (tries = 0; tries < 1000; tries++) {
    const uint64_t version = NCCLPY_GET(ledger->version);
    ncclpy_standing pairs;
    if (version & 1) continue;
    ncclpy_row_read(&ledger->rows[0], standing);
    ncclpy_row_read(&ledger->rows[1], &pairs);
    if (NCCLPY_GET(ledger->version) != version) continue;
    if (!standing->has_current && pairs.has_current) {
      standing->current = pairs.current;
      standing->has_current = 1;
    }
    if (!standing->has_finished && pairs.has_finished) {
      standing->finished = pairs.finished;
      standing->has_finished = 1;
    }
    return 1;
  }
  return 0;
}

#endif
