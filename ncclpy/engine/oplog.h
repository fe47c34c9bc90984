/* The operations that a rank has begun and not finished in a process group, or on a communicator of a Manager with a
   store, and the one that it has finished last. Written under the GIL; read by threads without the GIL, which never
   wait for a writer.

   Operations in flight are a list of notes, in the order in which they have begun. The version is a sequence lock: it
   is odd during a write, and a reader that sees an odd version, or a changed one after reading, reads again. Notes are
   reused, and freed only with the operation log, since a reader may still read them. */
#ifndef NCCLPY_ENGINE_OPLOG_H
#define NCCLPY_ENGINE_OPLOG_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* One operation, as its rank publishes it. */
typedef struct {
  uint64_t sequence;
  uint64_t count;
  uint64_t began; /* `began` and `done`: the bits of a double, a moment of the monotonic clock */
  uint64_t done;
  uint64_t call; /* kind, data type, whether it is a barrier, NCCLPY_BLOCKED_ON_INPUT */
  uint64_t op_and_root; /* operator in the high half, root in the low half; -1 for none */
} ncclpy_op;

/* In `call`: the device cannot begin the operation yet, since what produces its input is not done. */
#define NCCLPY_BLOCKED_ON_INPUT ((uint64_t)1 << 33)

enum { NCCLPY_OP_WORDS = sizeof(ncclpy_op) / sizeof(uint64_t), NCCLPY_NOTES_PER_BLOCK = 64 };

/* An operation in flight; or a spare note, whose `after` is the next spare note. */
typedef struct ncclpy_note {
  ncclpy_op what;
  struct ncclpy_note *before, *after;
  uint64_t order; /* the operation's number among all that have begun in its list, from 1 */
} ncclpy_note;

typedef struct {
  ncclpy_note *first, *tail;
  uint64_t begun;
  uint64_t finished_order; /* `order` of the operation in `finished`; 0 if none has finished */
  ncclpy_op finished;
} ncclpy_op_list;

typedef struct ncclpy_note_block {
  struct ncclpy_note_block* before;
  ncclpy_note notes[NCCLPY_NOTES_PER_BLOCK];
} ncclpy_note_block;

typedef struct {
  int users;
  uint64_t version;
  ncclpy_op_list lists[2]; /* collectives; operations between two ranks */
  ncclpy_note* spare;
  ncclpy_note_block* notes;
} ncclpy_oplog;

/* What a reader finds. */
typedef struct {
  int has_current, has_finished;
  ncclpy_op current, finished;
} ncclpy_status;

/* NCCLPY_LOAD_ACQUIRE orders the accesses after it, NCCLPY_STORE_RELEASE the accesses before it. Memory fences would
   do the same, but thread sanitizers do not know them. */
#define NCCLPY_LOAD_ACQUIRE(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define NCCLPY_STORE_RELEASE(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELEASE)

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

/* Copies word by word, each atomically: a reader may copy while a writer does. */
static inline void ncclpy_note_copy(ncclpy_op* to, const ncclpy_op* from) {
  uint64_t* out = (uint64_t*)to;
  const uint64_t* in = (const uint64_t*)from;
  int i;
  for (i = 0; i < NCCLPY_OP_WORDS; i++) NCCLPY_STORE_RELEASE(out[i], NCCLPY_LOAD_ACQUIRE(in[i]));
}

/* Returns an operation log with one user; NULL if memory is out. */
static inline ncclpy_oplog* ncclpy_oplog_new(void) {
  ncclpy_oplog* oplog = (ncclpy_oplog*)calloc(1, sizeof(ncclpy_oplog));
  if (oplog != NULL) oplog->users = 1;
  return oplog;
}

/* Adds a user. The last user that leaves frees the log. */
static inline void ncclpy_oplog_use(ncclpy_oplog* oplog) { __atomic_add_fetch(&oplog->users, 1, __ATOMIC_RELAXED); }

static inline void ncclpy_oplog_leave(ncclpy_oplog* oplog) {
  ncclpy_note_block *notes, *before;
  if (__atomic_sub_fetch(&oplog->users, 1, __ATOMIC_ACQ_REL) != 0) return;
  for (notes = oplog->notes; notes != NULL; notes = before) {
    before = notes->before;
    free(notes);
  }
  free(oplog);
}

static inline void ncclpy_oplog_flip_version(ncclpy_oplog* oplog) {
  NCCLPY_STORE_RELEASE(oplog->version, oplog->version + 1);
}

/* Notes an operation that begins; with the GIL. Returns the note; NULL if memory is out. */
static inline ncclpy_note* ncclpy_oplog_begin(ncclpy_oplog* oplog, int pair, const ncclpy_op* what) {
  ncclpy_op_list* list = &oplog->lists[pair];
  ncclpy_note* note = oplog->spare;
  if (note == NULL) {
    int i;
    ncclpy_note_block* more = (ncclpy_note_block*)calloc(1, sizeof(ncclpy_note_block));
    if (more == NULL) return NULL;
    more->before = oplog->notes;
    oplog->notes = more;
    for (i = 0; i < NCCLPY_NOTES_PER_BLOCK - 1; i++) more->notes[i].after = &more->notes[i + 1];
    note = more->notes;
  }
  oplog->spare = note->after;
  ncclpy_oplog_flip_version(oplog);
  ncclpy_note_copy(&note->what, what);
  note->order = ++list->begun;
  note->before = list->tail;
  note->after = NULL;
  if (list->tail != NULL) {
    list->tail->after = note;
  } else {
    NCCLPY_STORE_RELEASE(list->first, note);
  }
  list->tail = note;
  ncclpy_oplog_flip_version(oplog);
  return note;
}

/* Notes whether an operation in flight waits for what produces its input; with the GIL. */
static inline void ncclpy_oplog_set_blocked(ncclpy_oplog* oplog, ncclpy_note* note, int blocked) {
  const uint64_t call = (note->what.call & ~NCCLPY_BLOCKED_ON_INPUT) | (blocked ? NCCLPY_BLOCKED_ON_INPUT : 0);
  if (call == note->what.call) return;
  ncclpy_oplog_flip_version(oplog);
  NCCLPY_STORE_RELEASE(note->what.call, call);
  ncclpy_oplog_flip_version(oplog);
}

/* Notes the end of an operation, once; with the GIL. `done` is false if it was not completed, for example if it has
   failed. */
static inline void ncclpy_oplog_end(ncclpy_oplog* oplog, int pair, ncclpy_note* note, int done, double moment) {
  ncclpy_op_list* list = &oplog->lists[pair];
  ncclpy_oplog_flip_version(oplog);
  if (note->before != NULL) {
    note->before->after = note->after;
  } else {
    NCCLPY_STORE_RELEASE(list->first, note->after);
  }
  if (note->after != NULL) {
    note->after->before = note->before;
  } else {
    list->tail = note->before;
  }
  if (done && note->order > list->finished_order) {
    NCCLPY_STORE_RELEASE(note->what.done, ncclpy_bits_of(moment));
    ncclpy_note_copy(&list->finished, &note->what);
    NCCLPY_STORE_RELEASE(list->finished_order, note->order);
  }
  ncclpy_oplog_flip_version(oplog);
  note->after = oplog->spare;
  oplog->spare = note;
}

/* Reads one list. During a write the result is garbage, which the caller drops; no memory outside the log is read. */
static inline void ncclpy_op_list_read(const ncclpy_op_list* list, ncclpy_status* found) {
  const ncclpy_note* first = NCCLPY_LOAD_ACQUIRE(list->first);
  found->has_current = first != NULL;
  if (first != NULL) ncclpy_note_copy(&found->current, &first->what);
  found->has_finished = NCCLPY_LOAD_ACQUIRE(list->finished_order) != 0;
  if (found->has_finished) ncclpy_note_copy(&found->finished, &list->finished);
}

/* Reads the first operation that has begun and not ended, and the last one that was completed; each is an operation
   between two ranks only if there is no collective. Returns 0 if every attempt met a write. */
static inline int ncclpy_oplog_read(const ncclpy_oplog* oplog, ncclpy_status* status) {
  int tries;
  for (tries = 0; tries < 1000; tries++) {
    const uint64_t version = NCCLPY_LOAD_ACQUIRE(oplog->version);
    ncclpy_status pairs;
    if (version & 1) continue;
    ncclpy_op_list_read(&oplog->lists[0], status);
    ncclpy_op_list_read(&oplog->lists[1], &pairs);
    if (NCCLPY_LOAD_ACQUIRE(oplog->version) != version) continue;
    if (!status->has_current && pairs.has_current) {
      status->current = pairs.current;
      status->has_current = 1;
    }
    if (!status->has_finished && pairs.has_finished) {
      status->finished = pairs.finished;
      status->has_finished = 1;
    }
    return 1;
  }
  return 0;
}

#endif
