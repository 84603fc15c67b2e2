// Streams and events, as the runtime makes them.
#pragma once
#include <stdint.h>

#define STREAMS 256 // beyond these two streams share a number, and their order is not looked at

struct Stream {
    int number, priority, capturing, mode;
    unsigned flags;
    unsigned long long capture;
};

struct Event {
    uint64_t clock[STREAMS];
};

// The legacy stream and the per-thread one are number 0.
static inline int stream_number(const void *stream) { return (uintptr_t)stream <= 2 ? 0 : ((struct Stream *)stream)->number; }
