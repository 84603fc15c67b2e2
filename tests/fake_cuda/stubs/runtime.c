// libcudart: the functions that torch and vLLM import and that do something here. build.py adds the others.
#define _GNU_SOURCE
#include "fake.h"
#include "stream.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DRIVER 13000

static __thread int device;
static __thread cudaError_t last;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static struct Stream legacy;
static _Atomic int streams = 1;
static _Atomic int captures_in_global_mode;
static _Atomic unsigned long long next_capture = 1;

static cudaError_t error(int code) {
    if (code)
        last = code;
    return code;
}

static struct Stream *known_stream(cudaStream_t stream) {
    return (uintptr_t)stream <= 2 ? &legacy : (struct Stream *)stream;
}

int fake_forbidden(const char *what) {
    if (captures_in_global_mode == 0 || thread_mode == cudaStreamCaptureModeRelaxed)
        return 0;
    fake_add(FORBIDDEN, 1);
    fprintf(stderr, "fake CUDA: %s during the capture of a graph\n", what);
    return 1;
}

#define FORBID(what) \
    if (fake_forbidden(what)) \
    return error(cudaErrorStreamCaptureUnsupported)

// ------------------------------------------------------------------------------------------------------------ memory

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    FORBID("cudaMalloc");
    return error(fake_malloc(pointer, bytes));
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { return error(fake_malloc(pointer, bytes)); }

cudaError_t cudaFree(void *pointer) {
    FORBID("cudaFree");
    fake_host_waits_for_device();
    return pointer ? fake_free_memory(pointer) : 0;
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return pointer ? fake_free_memory(pointer) : 0; }

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    FORBID("cudaHostAlloc");
    fake_add(HOST_ALLOCS, 1);
    if (posix_memalign(pointer, 4096, bytes ? bytes : 1))
        return error(cudaErrorMemoryAllocation);
    fake_know((uintptr_t)*pointer, bytes, PINNED);
    return 0;
}

cudaError_t cudaFreeHost(void *pointer) {
    if (fake_forget(pointer, PINNED))
        free(pointer);
    return 0;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    fake_know((uintptr_t)pointer, bytes, PINNED);
    return 0;
}

cudaError_t cudaHostUnregister(void *pointer) {
    fake_forget(pointer, PINNED);
    return 0;
}

cudaError_t cudaHostGetDevicePointer(void **on_device, void *pointer, unsigned flags) {
    *on_device = pointer;
    return 0;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = fake_free();
    *total = fake_total();
    return 0;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    FORBID("cudaMemcpy");
    fake_add(BLOCKING_COPIES, 1);
    fake_launch(NULL);
    fake_host_waits_for_stream(NULL);
    fake_copy(to, from, bytes);
    return 0;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    fake_launch(stream);
    fake_copy(to, from, bytes);
    return 0;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind kind,
    cudaStream_t stream) {
    fake_launch(stream);
    if (height > 0 && width > 0)
        fake_copy(to, from, width);
    for (size_t row = 1; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return 0;
}

// Zeros of whole pages are given by dropping the pages: large buffers then take no memory of the host.
static cudaError_t set(void *pointer, int value, size_t bytes) {
    fake_add(MEMSETS, 1);
    uintptr_t start = (uintptr_t)pointer, first = (start + 4095) & ~4095ull, end = (start + bytes) & ~4095ull;
    if (value == 0 && bytes > (1 << 20) && fake_kind(pointer) == DEVICE) {
        memset(pointer, 0, first - start);
        madvise((void *)first, end - first, MADV_DONTNEED);
        memset((void *)end, 0, start + bytes - end);
    } else {
        memset(pointer, value, bytes);
    }
    return 0;
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes) { return set(pointer, value, bytes); }

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    fake_launch(stream);
    return set(pointer, value, bytes);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    int kind = fake_kind(pointer);
    attributes->type = kind == DEVICE   ? cudaMemoryTypeDevice
                       : kind == PINNED ? cudaMemoryTypeHost
                                        : cudaMemoryTypeUnregistered;
    attributes->device = kind ? device : -2;
    attributes->devicePointer = attributes->hostPointer = (void *)pointer;
    return 0;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int number) {
    *pool = malloc(64);
    return 0;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(uint64_t *)value = 0;
    return 0;
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char page[1 << 20];
    *pointer = page;
    return 0;
}

// ------------------------------------------------------------------------------------------------------- the device

cudaError_t cudaGetDeviceCount(int *count) {
    *count = fake_devices();
    return *count ? 0 : error(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *number) {
    *number = device;
    return 0;
}

cudaError_t cudaSetDevice(int number) {
    if (number < 0 || number >= fake_devices())
        return error(cudaErrorInvalidDevice);
    device = number;
    return 0;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int number) {
    *value = fake_attribute(attribute);
    return 0;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int number) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", fake_name());
    p->uuid.bytes[0] = 1 + number;
    p->totalGlobalMem = fake_total();
    p->sharedMemPerBlock = fake_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = fake_capability() / 10;
    p->minor = fake_capability() % 10;
    p->multiProcessorCount = fake_attribute(cudaDevAttrMultiProcessorCount);
    p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = p->managedMemory = 1;
    p->canMapHostMemory = p->memoryPoolsSupported = 1;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = 50 << 20;
    p->maxThreadsPerMultiProcessor = fake_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    p->sharedMemPerMultiprocessor = fake_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    p->sharedMemPerBlockOptin = fake_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p->maxBlocksPerMultiProcessor = 32;
    p->asyncEngineCount = 3;
    p->pciBusID = 1 + number;
    return 0;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int number) {
    snprintf(text, size, "0000:%02x:00.0", 1 + number);
    return 0;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return 0;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) {
    *can = 1;
    return 0;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = DRIVER;
    return 0;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = DRIVER;
    return 0;
}

cudaError_t cudaDeviceSynchronize(void) {
    fake_add(DEVICE_SYNCS, 1);
    FORBID("cudaDeviceSynchronize");
    fake_host_waits_for_device();
    return 0;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t code = last;
    last = 0;
    return code;
}

cudaError_t cudaPeekAtLastError(void) { return last; }

const char *cudaGetErrorName(cudaError_t code) {
    switch ((int)code) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorUnknown";
    }
}

const char *cudaGetErrorString(cudaError_t code) {
    return code == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(code);
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
    static void *driver;
    if (!driver)
        driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = driver ? dlsym(driver, newer) : NULL;
    if (driver && !*function)
        *function = dlsym(driver, name);
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*function)
        fake_missing(name, 0);
    return 0;
}

// ------------------------------------------------------------------------------------------------ streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    struct Stream *made = calloc(1, sizeof *made);
    made->number = flags & cudaStreamNonBlocking ? atomic_fetch_add(&streams, 1) % STREAMS : 0; // others wait for number 0
    made->flags = flags;
    made->priority = priority;
    *stream = (cudaStream_t)made;
    return 0;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = known_stream(stream)->priority;
    return 0;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (known_stream(stream)->capturing)
        return error(cudaErrorStreamCaptureUnsupported);
    fake_host_waits_for_stream(stream);
    return 0;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    fake_add(STREAM_SYNCS, 1);
    if (known_stream(stream)->capturing) {
        fake_add(FORBIDDEN, 1);
        return error(cudaErrorStreamCaptureUnsupported);
    }
    fake_host_waits_for_stream(stream);
    return 0;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    fake_stream_waits(stream, event);
    return 0;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(struct Event));
    return 0;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return 0;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    fake_record(event, stream);
    return 0;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    fake_add(EVENT_SYNCS, 1);
    FORBID("cudaEventSynchronize");
    fake_host_waits_for_event(event);
    return 0;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    FORBID("cudaEventQuery");
    fake_host_waits_for_event(event);
    return 0;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t a, cudaEvent_t b) {
    *milliseconds = 1.0f;
    return 0;
}

// ------------------------------------------------------------------------------------------------------------ graphs

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = known_stream(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    static const cudaGraphNode_t none[1];
    cudaStreamIsCapturing(stream, status);
    if (id)
        *id = known_stream(stream)->capture;
    if (graph)
        *graph = (cudaGraph_t)known_stream(stream);
    if (nodes)
        *nodes = none;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    return 0;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    struct Stream *own = known_stream(stream);
    if (own == &legacy)
        return error(cudaErrorStreamCaptureImplicit);
    fake_add(CAPTURES, 1);
    own->capturing = 1;
    own->mode = mode;
    own->capture = atomic_fetch_add(&next_capture, 1);
    captures_in_global_mode += mode == cudaStreamCaptureModeGlobal;
    return 0;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    struct Stream *own = known_stream(stream);
    if (!own->capturing)
        return error(cudaErrorStreamCaptureUnmatched);
    own->capturing = 0;
    captures_in_global_mode -= own->mode == cudaStreamCaptureModeGlobal;
    *graph = malloc(64);
    return 0;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return 0;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
    *ready = malloc(64);
    return 0;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    fake_add(GRAPH_LAUNCHES, 1);
    fake_launch(stream);
    return 0;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = 1;
    return 0;
}

// ----------------------------------------------------------------------------------------------------------- kernels

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configured[8];
static __thread int depth;

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, 64); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }

void __cudaRegisterFunction(
    void **handle, const char *host, char *on_device, const char *name, int limit, uint3 *a, uint3 *b, dim3 *c, dim3 *d,
    int *e) {}

void __cudaRegisterVar(
    void **handle, char *host, char *address, const char *name, int external, size_t size, int constant, int global) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    if (depth < 8) {
        configured[depth].grid = grid;
        configured[depth].block = block;
        configured[depth].shared = shared;
        configured[depth++].stream = stream;
    }
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (depth > 0) {
        *grid = configured[--depth].grid;
        *block = configured[depth].block;
        *shared = configured[depth].shared;
        *(void **)stream = configured[depth].stream;
    }
    return 0;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return 0;
}

static cudaError_t launched(cudaStream_t stream) {
    fake_add(LAUNCHES, 1);
    fake_launch(stream);
    return 0;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 g, dim3 b, void **arguments, size_t shared, cudaStream_t stream) {
    return launched(stream);
}

cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **arguments, size_t shared, cudaStream_t stream) {
    return launched(stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **arguments, size_t shared, cudaStream_t stream) {
    return launched(stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **arguments) {
    return launched(config->stream);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return 0;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    int capability = fake_capability(); // torch has no code for 8.9, which takes that of 8.6
    attributes->binaryVersion = attributes->ptxVersion = capability == 89 ? 86 : capability;
    attributes->maxDynamicSharedSizeBytes = 49152;
    return 0;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int b, size_t s, unsigned fl) {
    *blocks = 2;
    return 0;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int b, size_t s) {
    *blocks = 2;
    return 0;
}

cudaError_t cudaLibraryLoadData(
    cudaLibrary_t *library, const void *code, enum cudaJitOption *a, void **b, unsigned n, enum cudaLibraryOption *c,
    void **d, unsigned m) {
    *library = malloc(64);
    return 0;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = malloc(64);
    return 0;
}

// ------------------------------------------------------------------------------------------- shared between processes

// A handle names a file of the process that shares its memory.
struct Shared {
    int process, file;
    size_t size;
};

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    struct Shared shared = {getpid(), -1, 0};
    shared.file = fake_share(pointer, &shared.size);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &shared, sizeof shared);
    return error(shared.file < 0 ? cudaErrorInvalidValue : 0);
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    struct Shared shared;
    memcpy(&shared, &handle, sizeof shared);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.process, shared.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    *pointer = file < 0 ? MAP_FAILED : mmap(NULL, shared.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    if (*pointer == MAP_FAILED)
        return error(cudaErrorMapBufferObjectFailed);
    fake_know((uintptr_t)*pointer, shared.size, DEVICE); // the account has it in the other process
    return 0;
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    size_t size = fake_forget(pointer, DEVICE);
    if (size)
        munmap(pointer, size);
    return 0;
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    memset(handle, 0, sizeof *handle);
    return 0;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { return cudaEventCreate(event); }
