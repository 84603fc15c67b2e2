// The card, its memory, the counters, and the order of its streams.
#define _GNU_SOURCE
#include "fake.h"
#include "stream.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define PAGE (2 * MIB)      // of device memory, as the virtual memory functions state it
#define CONTEXT (500 * MIB) // what a real driver keeps for itself

// ---------------------------------------------------------------------------------------------------------- the card

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

int fake_capability(void) { return atoi(setting("FAKE_CUDA_CAPABILITY", "90")); }
const char *fake_name(void) { return setting("FAKE_CUDA_NAME", "Fake GPU"); }
size_t fake_total(void) { return (size_t)(atof(setting("FAKE_CUDA_GIB", "79.1")) * 1024) * MIB; }

int fake_devices(void) {
    int count = atoi(setting("FAKE_CUDA_COUNT", "1"));
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible)
        return count;
    if (!*visible || *visible == '-')
        return 0;
    int listed = 1;
    for (const char *c = visible; *c; c++)
        listed += *c == ',';
    return listed < count ? listed : count;
}

int fake_attribute(int attribute) {
    int capability = fake_capability();
    int consumer = capability == 86 || capability == 89 || capability == 120; // less shared memory than data centers' cards
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return capability / 10;
    case cudaDevAttrComputeCapabilityMinor: return capability % 10;
    case cudaDevAttrMultiProcessorCount: return capability == 75 ? 40 : capability == 80 ? 108 : 132;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: return 1024;
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return capability == 75 ? 65536 : consumer ? 101376 : capability == 80 ? 166912 : 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return capability == 75 ? 65536 : consumer ? 102400 : capability == 80 ? 167936 : 233472;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return capability == 75 ? 1024 : consumer ? 1536 : 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrManagedMemory: return 1;
    case 102: return 1; // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    default: return 0;
    }
}

// ---------------------------------------------------------------------------------------------------------- counters

static const char *names[COUNTERS] = {
    "launches", "products", "graph_launches", "captures", "stream_syncs", "device_syncs", "event_syncs", "blocking_copies",
    "h2d", "d2h", "d2d", "pageable_h2d", "pageable_d2h", "mallocs", "frees", "host_allocs", "memsets", "out_of_memory",
    "forbidden", "collectives", "races"};
static _Atomic long long counters[COUNTERS];

void fake_add(int counter, long long n) { atomic_fetch_add(&counters[counter], n); }

long long fake_count(const char *name) {
    for (int i = 0; i < COUNTERS; i++)
        if (!strcmp(names[i], name))
            return counters[i];
    return -1;
}

long fake_missing(const char *function, long error) {
    static _Atomic int told;
    if (atomic_fetch_add(&told, 1) < 64)
        fprintf(stderr, "fake CUDA: %s was called and has no stub (tests/fake_cuda/stubs)\n", function);
    return error;
}

// ------------------------------------------------------------------------------------------------------------ memory

typedef struct {
    uintptr_t start;
    size_t size;
    int kind;
    int file; // of memory that other processes may open; 0: none
} Block;

static Block *blocks;
static size_t count, capacity;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic size_t used;

size_t fake_used(void) { return used; }

size_t fake_free(void) {
    size_t taken = used + CONTEXT;
    return taken < fake_total() ? fake_total() - taken : 0;
}

int fake_reserve(size_t bytes) {
    if (bytes > fake_free()) {
        fake_add(OUT_OF_MEMORY, 1);
        return cudaErrorMemoryAllocation;
    }
    atomic_fetch_add(&used, bytes);
    return 0;
}

void fake_release(size_t bytes) { atomic_fetch_sub(&used, bytes); }

void fake_know(uintptr_t start, size_t size, int kind) {
    pthread_mutex_lock(&lock);
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 1024;
        blocks = realloc(blocks, capacity * sizeof *blocks);
    }
    blocks[count++] = (Block){start, size, kind, 0};
    pthread_mutex_unlock(&lock);
}

int fake_kind(const void *pointer) {
    uintptr_t place = (uintptr_t)pointer;
    int kind = PAGEABLE;
    pthread_mutex_lock(&lock);
    for (size_t i = count; i-- > 0 && !kind;)
        if (blocks[i].start <= place && place - blocks[i].start < (blocks[i].size ? blocks[i].size : 1))
            kind = blocks[i].kind;
    pthread_mutex_unlock(&lock);
    return kind;
}

size_t fake_forget(const void *pointer, int kind) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = count; i-- > 0;)
        if (blocks[i].start == (uintptr_t)pointer && blocks[i].kind == kind) {
            size = blocks[i].size ? blocks[i].size : 1;
            if (blocks[i].file)
                close(blocks[i].file);
            blocks[i] = blocks[--count];
            break;
        }
    pthread_mutex_unlock(&lock);
    return size;
}

int fake_malloc(void **pointer, size_t bytes) {
    fake_add(MALLOCS, 1);
    size_t size = bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE;
    *pointer = NULL;
    int error = fake_reserve(size);
    if (error)
        return error;
    // Pages are zero and take no memory of the host before they are written.
    char *place = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    uintptr_t start = ((uintptr_t)place + PAGE - 1) / PAGE * PAGE;
    if (start > (uintptr_t)place)
        munmap(place, start - (uintptr_t)place);
    munmap((void *)(start + size), (uintptr_t)place + PAGE - start);
    fake_know(start, size, DEVICE);
    *pointer = (void *)start;
    return 0;
}

int fake_free_memory(void *pointer) {
    fake_add(FREES, 1);
    size_t size = fake_forget(pointer, DEVICE);
    if (size) {
        fake_release(size);
        munmap(pointer, size);
    }
    return 0;
}

// Another process maps the file instead of the device's memory. The block keeps its address and its contents.
int fake_share(const void *pointer, size_t *size) {
    int file = -1;
    pthread_mutex_lock(&lock);
    for (size_t i = count; i-- > 0;) {
        Block *block = &blocks[i];
        if (block->start != (uintptr_t)pointer || block->kind != DEVICE)
            continue;
        *size = block->size;
        file = block->file ? block->file : memfd_create("device memory", MFD_CLOEXEC);
        if (!block->file && file > 0) {
            void *place = (void *)block->start;
            if (write(file, place, block->size) != (ssize_t)block->size ||
                mmap(place, block->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
                close(file);
                file = -1;
            } else {
                block->file = file;
            }
        }
        break;
    }
    pthread_mutex_unlock(&lock);
    return file;
}

// Where only sizes count, copies on the device need not write pages that take memory of the host.
static size_t moved_at_most(void) {
    static const char *limit;
    if (!limit)
        limit = setting("FAKE_CUDA_MOVED_MIB", "1e9");
    return atof(limit) * MIB;
}

void fake_copy(void *to, const void *from, size_t bytes) {
    int target = fake_kind(to), source = fake_kind(from);
    if (target == DEVICE && source != DEVICE) {
        fake_add(H2D, 1);
        fake_add(PAGEABLE_H2D, source == PAGEABLE);
    } else if (source == DEVICE && target != DEVICE) {
        fake_add(D2H, 1);
        fake_add(PAGEABLE_D2H, target == PAGEABLE);
    } else {
        fake_add(D2D, 1);
        if (source == DEVICE && bytes > moved_at_most())
            return;
    }
    memmove(to, from, bytes);
}

// ------------------------------------------------------------------------------------------------- order of streams
//
// Each stream has a clock: how much of every stream's work comes before its next kernel. The host's clock is what it
// has waited for, in whatever thread. A kernel that reads memory must come after the last write to it, and one that
// writes after the last write and all reads since.

#define PLACES (1 << 16) // of the table of accesses; a power of two

typedef struct {
    uintptr_t start;
    int writer; // stream + 1; 0: nobody has written
    uint64_t written;
    uint64_t read[STREAMS];
} Place;

static uint64_t done[STREAMS];           // kernels that a stream was given
static uint64_t known[STREAMS][STREAMS]; // known[s][t]: kernels of t that come before the next one of s
static uint64_t host[STREAMS];
static Place *places[PLACES];
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

static int ordered(void) {
    static int on = -1;
    if (on < 0)
        on = *setting("FAKE_CUDA_ORDER", "") != 0;
    return on;
}

static void merge(uint64_t *into, const uint64_t *from) {
    for (int i = 0; i < STREAMS; i++)
        if (from[i] > into[i])
            into[i] = from[i];
}

static void tick(int stream) {
    merge(known[stream], host);
    known[stream][stream] = ++done[stream];
}

void fake_launch(void *stream) {
    if (!ordered())
        return;
    pthread_mutex_lock(&order);
    tick(stream_number(stream));
    pthread_mutex_unlock(&order);
}

void fake_host_waits_for_stream(void *stream) {
    if (!ordered())
        return;
    pthread_mutex_lock(&order);
    merge(host, known[stream_number(stream)]);
    pthread_mutex_unlock(&order);
}

void fake_host_waits_for_device(void) {
    if (!ordered())
        return;
    pthread_mutex_lock(&order);
    merge(host, done);
    pthread_mutex_unlock(&order);
}

void fake_record(void *event, void *stream) {
    if (!ordered())
        return;
    pthread_mutex_lock(&order);
    int number = stream_number(stream);
    memcpy(((Event *)event)->clock, known[number], sizeof known[number]);
    merge(((Event *)event)->clock, host);
    pthread_mutex_unlock(&order);
}

void fake_stream_waits(void *stream, void *event) {
    if (!ordered())
        return;
    pthread_mutex_lock(&order);
    merge(known[stream_number(stream)], ((Event *)event)->clock);
    pthread_mutex_unlock(&order);
}

void fake_host_waits_for_event(void *event) {
    if (!ordered())
        return;
    pthread_mutex_lock(&order);
    merge(host, ((Event *)event)->clock);
    pthread_mutex_unlock(&order);
}

static Place *place_of(uintptr_t start) {
    for (size_t i = (start >> 9) * 0x9E3779B97F4A7C15ull >> 48;; i = (i + 1) % PLACES) {
        if (!places[i]) {
            places[i] = calloc(1, sizeof **places);
            places[i]->start = start;
        }
        if (places[i]->start == start)
            return places[i];
    }
}

int fake_access(const void *start, int writes, void *stream) {
    if (!ordered() || ((uintptr_t)stream > 2 && ((struct Stream *)stream)->capturing)) // what is captured does not run yet
        return 0;
    pthread_mutex_lock(&order);
    int self = stream_number(stream), race = 0;
    Place *place = place_of((uintptr_t)start);
    tick(self);
    if (place->writer && place->written > known[self][place->writer - 1])
        race = 1;
    for (int i = 0; writes && i < STREAMS; i++)
        race |= place->read[i] > known[self][i];
    if (writes) {
        place->writer = self + 1;
        place->written = done[self];
        memset(place->read, 0, sizeof place->read);
    } else {
        place->read[self] = done[self];
    }
    pthread_mutex_unlock(&order);
    fake_add(RACES, race);
    return race;
}
