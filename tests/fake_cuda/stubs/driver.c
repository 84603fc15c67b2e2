// libcuda: the driver over the memory and streams of runtime.c. build.py adds the functions of cuda.h that are not here.
#define _GNU_SOURCE
#include "fake.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)2 << 20)
enum { SUCCESS = 0, INVALID = 1, OUT_OF_DEVICE_MEMORY = 2, NO_DEVICE = 100, NOT_FOUND = 500 };

typedef unsigned long long Pointer;

extern int cudaEventCreate(void **), cudaEventRecord(void *, void *), cudaStreamSynchronize(void *);
extern int cudaDeviceSynchronize(void), cudaSetDevice(int), cudaGetDevice(int *);

static char context[64];

int cuInit(unsigned flags) { return fake_devices() ? SUCCESS : NO_DEVICE; }

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == SUCCESS ? "CUDA_SUCCESS" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return 0;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == OUT_OF_DEVICE_MEMORY ? "out of memory" : "error of the fake driver";
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    char newer[160];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, newer);
    if (!*function)
        *function = dlsym(RTLD_DEFAULT, name);
    if (status)
        *status = *function ? 0 : 1;
    if (!*function)
        fake_missing(name, 0);
    return *function ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

int cuGetExportTable(const void **table, const void *id) { return NOT_FOUND; }

// -------------------------------------------------------------------------------------------------- devices, contexts

int cuDeviceGetCount(int *count) {
    *count = fake_devices();
    return 0;
}

int cuDeviceGet(int *device, int number) {
    *device = number;
    return 0;
}

int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, size, "%s", fake_name());
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = fake_attribute(attribute);
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = fake_total();
    return 0;
}

int cuDeviceGetUuid_v2(void *id, int device) {
    memset(id, 1 + device, 16);
    return 0;
}

int cuDevicePrimaryCtxRetain(void **made, int device) {
    *made = context;
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}

int cuCtxGetCurrent(void **current) {
    *current = context;
    return 0;
}

int cuCtxPopCurrent_v2(void **current) { return cuCtxGetCurrent(current); }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
int cuStreamSynchronize(void *stream) { return cudaStreamSynchronize(stream); }
int cuEventCreate(void **event, unsigned flags) { return cudaEventCreate(event); }
int cuEventRecord(void *event, void *stream) { return cudaEventRecord(event, stream); }

// ------------------------------------------------------------------------------------------------------------ memory

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *free_bytes = fake_free();
    *total = fake_total();
    return 0;
}

int cuMemAlloc_v2(Pointer *pointer, size_t bytes) { return fake_malloc((void **)pointer, bytes); }
int cuMemFree_v2(Pointer pointer) { return fake_free_memory((void *)pointer); }

int cuMemsetD8Async(Pointer pointer, unsigned char value, size_t bytes, void *stream) {
    fake_add(MEMSETS, 1);
    memset((void *)pointer, value, bytes);
    return 0;
}

int cuMemsetD32Async(Pointer pointer, unsigned value, size_t words, void *stream) {
    fake_add(MEMSETS, 1);
    for (size_t i = 0; i < words; i++)
        ((unsigned *)pointer)[i] = value;
    return 0;
}

static int copy(void *to, const void *from, size_t bytes, int blocking, void *stream) {
    fake_add(BLOCKING_COPIES, blocking);
    fake_launch(stream);
    if (blocking)
        fake_host_waits_for_stream(stream);
    fake_copy(to, from, bytes);
    return 0;
}

int cuMemcpyHtoD_v2(Pointer to, const void *from, size_t bytes) { return copy((void *)to, from, bytes, 1, NULL); }
int cuMemcpyDtoH_v2(void *to, Pointer from, size_t bytes) { return copy(to, (void *)from, bytes, 1, NULL); }

int cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t bytes, void *stream) {
    return copy((void *)to, from, bytes, 0, stream);
}

int cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, void *stream) {
    return copy(to, (void *)from, bytes, 0, stream);
}

int cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, void *stream) {
    return copy((void *)to, (void *)from, bytes, 0, stream);
}

// Virtual memory: what is not mapped, as in an engine that sleeps, cannot be touched.

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    *bytes = PAGE;
    return 0;
}

int cuMemAddressReserve(Pointer *pointer, size_t bytes, size_t alignment, Pointer wanted, unsigned long long flags) {
    char *place = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED)
        return OUT_OF_DEVICE_MEMORY;
    *pointer = ((uintptr_t)place + PAGE - 1) / PAGE * PAGE;
    return 0;
}

int cuMemCreate(size_t *handle, size_t bytes, const void *properties, unsigned long long flags) {
    *handle = bytes;
    return fake_reserve(bytes);
}

int cuMemRelease(size_t handle) {
    fake_release(handle);
    return 0;
}

int cuMemMap(Pointer pointer, size_t bytes, size_t offset, size_t handle, unsigned long long flags) {
    mprotect((void *)pointer, bytes, PROT_READ | PROT_WRITE);
    fake_know(pointer, bytes, DEVICE);
    return 0;
}

int cuMemUnmap(Pointer pointer, size_t bytes) {
    fake_forget((void *)pointer, DEVICE);
    madvise((void *)pointer, bytes, MADV_DONTNEED);
    mprotect((void *)pointer, bytes, PROT_NONE);
    return 0;
}

int cuPointerGetAttribute(void *value, int attribute, Pointer pointer) {
    if (attribute == 2) // memory type
        *(unsigned *)value = 2;
    else if (attribute == 3 || attribute == 4) // its address on the device and on the host
        *(Pointer *)value = pointer;
    else
        *(int *)value = 0;
    return 0;
}

int cuPointerGetAttributes(unsigned count, const int *attributes, void **values, Pointer pointer) {
    for (unsigned i = 0; i < count; i++)
        cuPointerGetAttribute(values[i], attributes[i], pointer);
    return 0;
}

// ----------------------------------------------------------------------------------------------------------- kernels

static int handle(void **made) {
    *made = malloc(64);
    return 0;
}

int cuModuleLoad(void **module, const char *file) { return handle(module); }
int cuModuleLoadData(void **module, const void *image) { return handle(module); }
int cuModuleLoadFatBinary(void **module, const void *image) { return handle(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return handle(function); }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { return handle(kernel); }

int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void **values) {
    return handle(module);
}

int cuLibraryLoadData(
    void **library, const void *code, void *a, void **b, unsigned n, void *c, void **d, unsigned m) {
    return handle(library);
}

int cuKernelGetFunction(void **function, void *kernel) {
    *function = kernel;
    return 0;
}

int cuModuleGetGlobal_v2(Pointer *pointer, size_t *bytes, void *module, const char *name) {
    static char page[4096];
    *pointer = (Pointer)page;
    if (bytes)
        *bytes = sizeof page;
    return 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 64 : 0; // threads of a block; registers
    return 0;
}

int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { return cuFuncGetAttribute(value, attribute, kernel); }

int cuLaunchKernel(
    void *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned shared, void *stream) {
    fake_add(LAUNCHES, 1);
    fake_launch(stream);
    return 0;
}

int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
    fake_add(LAUNCHES, 1);
    fake_launch(*(void *const *)((const char *)config + 32)); // CUlaunchConfig.hStream, after seven unsigned
    return 0;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int size, size_t shared) {
    *blocks = 1;
    return 0;
}

int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
    *clusters = 1;
    return 0;
}
