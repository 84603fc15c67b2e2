// A CUDA device that computes nothing: shared by the stub libraries of this folder.
//
// Device memory is memory of the host with an account of its size, copies are copies, kernels are counted and do
// nothing. FAKE_CUDA_CAPABILITY (90), FAKE_CUDA_GIB (79.1), FAKE_CUDA_COUNT (1) and FAKE_CUDA_NAME describe the card.
// Copies on the device of more than FAKE_CUDA_MOVED_MIB are counted and not made; the default has no limit.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum Kind { PAGEABLE = 0, PINNED = 1, DEVICE = 2 };

enum Counter {
    LAUNCHES, PRODUCTS, GRAPH_LAUNCHES, CAPTURES, STREAM_SYNCS, DEVICE_SYNCS, EVENT_SYNCS, BLOCKING_COPIES, H2D, D2H, D2D,
    PAGEABLE_H2D, PAGEABLE_D2H, MALLOCS, FREES, HOST_ALLOCS, MEMSETS, OUT_OF_MEMORY, FORBIDDEN, COLLECTIVES, RACES, COUNTERS
};

// The card.
int fake_capability(void); // 90 for 9.0
int fake_devices(void);
const char *fake_name(void);
int fake_attribute(int attribute);
size_t fake_total(void);
size_t fake_used(void);
size_t fake_free(void);

// Counters.
void fake_add(int counter, long long n);
long long fake_count(const char *name); // -1 for an unknown name
long fake_missing(const char *function, long error); // reports a function that has no stub, and returns the error

// Memory.
int fake_reserve(size_t bytes); // 0, or 2 (out of memory): account for device memory
void fake_release(size_t bytes);
void fake_know(uintptr_t start, size_t size, int kind);
int fake_kind(const void *pointer);
size_t fake_forget(const void *pointer, int kind); // size of the block that began here, or 0
int fake_malloc(void **pointer, size_t bytes);
int fake_free_memory(void *pointer);
int fake_share(const void *pointer, size_t *size); // a file with the memory of the block that begins here, or -1
void fake_copy(void *to, const void *from, size_t bytes);
int fake_forbidden(const char *what); // during a capture

// Order of streams, by vector clocks; off unless FAKE_CUDA_ORDER is set.
typedef struct Event Event;
typedef struct Stream Stream;
void fake_launch(void *stream);
void fake_host_waits_for_stream(void *stream);
void fake_host_waits_for_device(void);
void fake_record(void *event, void *stream);
void fake_stream_waits(void *stream, void *event);
void fake_host_waits_for_event(void *event);
int fake_access(const void *start, int writes, void *stream); // 1 for an access that nothing orders
