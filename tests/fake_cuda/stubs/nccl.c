// libnccl: groups of ranks on one machine, which meet in shared memory. build.py adds the functions that only have to succeed.
//
// A collective runs in the thread that calls it and waits there for the other ranks. It moves pieces: every rank writes
// one into its slot, all wait for each other, each takes what it needs, and all wait again. Reductions add in the order
// of the ranks; those of half precision are computed in fp32.
#define _GNU_SOURCE
#include "fake.h"
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };
enum { RANKS = 8, PIECE = 1 << 20, LETTER = 1 << 16, PENDING = 256 };
enum { SUM, PRODUCT, MAX, MIN, AVERAGE };
static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; // of ncclDataType_t
static const double patience = 300;                              // seconds

typedef struct {
    char bytes[128];
} Id;

typedef struct {
    _Atomic int arrived, round;
    int colors[RANKS], keys[RANKS]; // of a split
    _Atomic size_t full[RANKS][RANKS]; // bytes of a letter from one rank to another; 0: taken
    char letters[RANKS][RANKS][LETTER];
    char slots[RANKS][PIECE];
} Meeting;

typedef struct {
    int rank, ranks, splits;
    char name[96];
    Meeting *place;
} Group;

// ------------------------------------------------------------------------------------------------------------ meeting

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static int late(double start, const Group *group) {
    usleep(20);
    if (seconds() - start < patience)
        return 0;
    fprintf(stderr, "fake NCCL: rank %d of %d has waited %.0f s for the others\n", group->rank, group->ranks, patience);
    return 1;
}

static int meet(Group *group) {
    Meeting *place = group->place;
    int round = place->round;
    if (atomic_fetch_add(&place->arrived, 1) + 1 == group->ranks) {
        place->arrived = 0;
        place->round = round + 1;
        return SUCCESS;
    }
    for (double start = seconds(); place->round == round;)
        if (late(start, group))
            return SYSTEM_ERROR;
    return SUCCESS;
}

static int join(Group **made, const char *name, int ranks, int rank) {
    *made = NULL;
    if (ranks > RANKS || rank < 0 || rank >= ranks)
        return INVALID_ARGUMENT;
    Group *group = calloc(1, sizeof *group);
    group->rank = rank;
    group->ranks = ranks;
    snprintf(group->name, sizeof group->name, "%s", name);
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Meeting)))
        return SYSTEM_ERROR;
    group->place = mmap(NULL, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (group->place == MAP_FAILED || meet(group))
        return SYSTEM_ERROR;
    if (rank == 0)
        shm_unlink(name);
    *made = group;
    return SUCCESS;
}

int ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}

int ncclGetUniqueId(Id *id) {
    unsigned long long number[2];
    if (getrandom(number, sizeof number, 0) != sizeof number)
        return SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/fake-nccl-%016llx%016llx", number[0], number[1]);
    return 0;
}

const char *ncclGetErrorString(int code) {
    return code == INVALID_ARGUMENT ? "the fake NCCL has no such operation, or no group of this size" : code ? "error" : "no error";
}

const char *ncclGetLastError(void *group) { return ""; }

int ncclCommInitRank(Group **group, int ranks, Id id, int rank) { return join(group, id.bytes, ranks, rank); }
int ncclCommInitRankConfig(Group **group, int ranks, Id id, int rank, void *config) { return join(group, id.bytes, ranks, rank); }

int ncclCommInitRankScalable(Group **group, int ranks, int rank, int ids, Id *list, void *config) {
    return join(group, list[0].bytes, ranks, rank);
}

int ncclCommSplit(Group *group, int color, int key, Group **part, void *config) {
    Meeting *place = group->place;
    place->colors[group->rank] = color;
    place->keys[group->rank] = key;
    int code = meet(group), ranks = 0, rank = 0;
    for (int other = 0; other < group->ranks; other++) {
        if (place->colors[other] != color)
            continue;
        ranks++;
        rank += place->keys[other] < key || (place->keys[other] == key && other < group->rank);
    }
    code = code ? code : meet(group);
    char name[96];
    snprintf(name, sizeof name, "%.60s-%d-%d", group->name, ++group->splits, color);
    *part = NULL;
    return code || color < 0 ? code : join(part, name, ranks, rank); // color -1: not a member of any part
}

int ncclCommDestroy(Group *group) {
    munmap(group->place, sizeof(Meeting));
    free(group);
    return 0;
}

int ncclCommCount(Group *group, int *ranks) {
    *ranks = group->ranks;
    return 0;
}

int ncclCommUserRank(Group *group, int *rank) {
    *rank = group->rank;
    return 0;
}

int ncclCommGetAsyncError(void *group, int *code) {
    *code = 0;
    return 0;
}

// --------------------------------------------------------------------------------------------------------- reductions

static float of_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bf16(float value) { // to the nearest, and to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return bits >> 16 | 0x40; // not a number
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#define REDUCED(name, type, wide, load, store) \
    static void name(const Group *group, void *to, size_t n, int operation) { \
        for (size_t i = 0; i < n; i++) { \
            wide sum = load(((type *)group->place->slots[0])[i]); \
            for (int rank = 1; rank < group->ranks; rank++) { \
                wide x = load(((type *)group->place->slots[rank])[i]); \
                sum = operation == PRODUCT ? sum * x \
                      : operation == MAX   ? (x > sum || x != x ? x : sum) \
                      : operation == MIN   ? (x < sum || x != x ? x : sum) \
                                           : sum + x; \
            } \
            ((type *)to)[i] = store(operation == AVERAGE ? sum / group->ranks : sum); \
        } \
    }

REDUCED(reduce_i8, int8_t, int8_t, , )
REDUCED(reduce_u8, uint8_t, uint8_t, , )
REDUCED(reduce_i32, int32_t, int32_t, , )
REDUCED(reduce_u32, uint32_t, uint32_t, , )
REDUCED(reduce_i64, int64_t, int64_t, , )
REDUCED(reduce_u64, uint64_t, uint64_t, , )
REDUCED(reduce_f16, _Float16, float, , (_Float16))
REDUCED(reduce_f32, float, float, , )
REDUCED(reduce_f64, double, double, , )
REDUCED(reduce_bf16, uint16_t, float, of_bf16, to_bf16)

static void (*const reductions[])(const Group *, void *, size_t, int) = {
    reduce_i8,  reduce_u8,  reduce_i32, reduce_u32, reduce_i64,
    reduce_u64, reduce_f16, reduce_f32, reduce_f64, reduce_bf16};

// -------------------------------------------------------------------------------------------------------- collectives

enum Collective { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL };

static void take(Group *group, enum Collective kind, char *to, size_t whole, size_t done, size_t bytes, int type, int operation) {
    if (kind == BROADCAST) {
        memmove(to + done, group->place->slots[operation], bytes);
    } else if (kind == ALL_GATHER || kind == ALL_TO_ALL) {
        for (int rank = 0; rank < group->ranks; rank++)
            memmove(to + rank * whole + done, group->place->slots[rank], bytes);
    } else {
        reductions[type](group, to + done, bytes / sizes[type], operation);
    }
}

// ``operation``: of a reduction; of a broadcast its root.
static int collective(
    Group *group, enum Collective kind, const char *from, char *to, size_t n, int type, int operation, int root, void *stream) {
    int reduces = kind <= REDUCE_SCATTER;
    if (reduces && (type > 9 || operation > AVERAGE))
        return INVALID_ARGUMENT;
    fake_add(COLLECTIVES, 1);
    fake_launch(stream);
    size_t whole = n * sizes[type];
    if (group->ranks == 1) { // every collective of one rank is a copy
        if (to != from)
            fake_copy(to, from, whole);
        return SUCCESS;
    }
    int parts = kind == REDUCE_SCATTER || kind == ALL_TO_ALL ? group->ranks : 1;
    for (int part = 0; part < parts; part++) {
        int mine = parts > 1 ? part == group->rank : kind != REDUCE || root == group->rank;
        for (size_t done = 0; done < whole; done += PIECE) {
            size_t bytes = whole - done < PIECE ? whole - done : PIECE;
            if (kind != BROADCAST || root == group->rank)
                memcpy(group->place->slots[group->rank], from + part * whole + done, bytes);
            if (meet(group))
                return SYSTEM_ERROR;
            if (mine)
                take(group, kind, to, whole, done, bytes, type, operation);
            if (meet(group))
                return SYSTEM_ERROR;
        }
    }
    return SUCCESS;
}

int ncclAllReduce(const void *from, void *to, size_t n, int type, int operation, Group *group, void *stream) {
    return collective(group, ALL_REDUCE, from, to, n, type, operation, 0, stream);
}

int ncclReduce(const void *from, void *to, size_t n, int type, int operation, int root, Group *group, void *stream) {
    return collective(group, REDUCE, from, to, n, type, operation, root, stream);
}

int ncclReduceScatter(const void *from, void *to, size_t n, int type, int operation, Group *group, void *stream) {
    return collective(group, REDUCE_SCATTER, from, to, n, type, operation, 0, stream);
}

int ncclAllGather(const void *from, void *to, size_t n, int type, Group *group, void *stream) {
    return collective(group, ALL_GATHER, from, to, n, type, 0, 0, stream);
}

int ncclAlltoAll(const void *from, void *to, size_t n, int type, Group *group, void *stream) {
    return collective(group, ALL_TO_ALL, from, to, n, type, 0, 0, stream);
}

int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, Group *group, void *stream) {
    return collective(group, BROADCAST, from, to, n, type, root, root, stream);
}

int ncclBcast(void *buffer, size_t n, int type, int root, Group *group, void *stream) {
    return ncclBroadcast(buffer, buffer, n, type, root, group, stream);
}

// ------------------------------------------------------------------------------------------------- from rank to rank

// Between ncclGroupStart and ncclGroupEnd these calls belong together: none has to wait for another.
static __thread struct {
    Group *group;
    char *memory;
    size_t bytes, done;
    int peer, sends, ended;
} pending[PENDING];
static __thread int waiting, depth;

static int deliver(void) {
    double start = seconds();
    for (int left = waiting; left > 0;) {
        int moved = 0;
        for (int i = 0; i < waiting; i++) {
            Group *group = pending[i].group;
            int own = group->rank, peer = pending[i].peer, earlier = 0;
            for (int j = 0; j < i; j++) // between the same ranks, in the order of the calls
                earlier |= !pending[j].ended && pending[j].group == group && pending[j].peer == peer &&
                           pending[j].sends == pending[i].sends;
            if (pending[i].ended || earlier)
                continue;
            size_t rest = pending[i].bytes - pending[i].done, bytes = rest < LETTER ? rest : LETTER;
            _Atomic size_t *full = pending[i].sends ? &group->place->full[own][peer] : &group->place->full[peer][own];
            char *letter = pending[i].sends ? group->place->letters[own][peer] : group->place->letters[peer][own];
            if (rest && pending[i].sends != (*full == 0))
                continue;
            memcpy(pending[i].sends ? letter : pending[i].memory + pending[i].done,
                   pending[i].sends ? pending[i].memory + pending[i].done : letter, bytes);
            if (rest)
                *full = pending[i].sends ? bytes : 0;
            pending[i].done += bytes;
            pending[i].ended = pending[i].done == pending[i].bytes;
            left -= pending[i].ended;
            moved = 1;
        }
        if (moved)
            start = seconds();
        else if (late(start, pending[0].group))
            return SYSTEM_ERROR;
    }
    waiting = 0;
    return SUCCESS;
}

static int post(Group *group, void *memory, size_t bytes, int peer, int sends, void *stream) {
    if (waiting == PENDING || peer >= group->ranks)
        return INVALID_ARGUMENT;
    fake_add(COLLECTIVES, 1);
    fake_launch(stream);
    memset(&pending[waiting], 0, sizeof pending[waiting]);
    pending[waiting].group = group;
    pending[waiting].memory = memory;
    pending[waiting].bytes = bytes;
    pending[waiting].peer = peer;
    pending[waiting++].sends = sends;
    return depth ? SUCCESS : deliver();
}

int ncclSend(const void *from, size_t n, int type, int peer, Group *group, void *stream) {
    return post(group, (void *)from, n * sizes[type], peer, 1, stream);
}

int ncclRecv(void *to, size_t n, int type, int peer, Group *group, void *stream) {
    return post(group, to, n * sizes[type], peer, 0, stream);
}

int ncclGroupStart(void) {
    depth++;
    return 0;
}

int ncclGroupEnd(void) { return --depth ? SUCCESS : deliver(); }
