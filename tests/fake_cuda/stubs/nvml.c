// libnvidia-ml: what vLLM and torch ask it. build.py adds the functions that pynvml names and that are not here.
#include "fake.h"
#include <stdio.h>
#include <string.h>

#define VERSION "580.95.05"

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code ? "Not Supported" : "Success"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = fake_devices();
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) {
    *device = (void *)(uintptr_t)(number + 1);
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *id, void **device) { return nvmlDeviceGetHandleByIndex_v2(id[4] - '0', device); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { // "0000:01:00.0" is the first
    unsigned domain = 0, bus = 1;
    sscanf(id, "%x:%x", &domain, &bus);
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}

int nvmlDeviceGetIndex(void *device, unsigned *number) {
    *number = (uintptr_t)device - 1;
    return 0;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    snprintf(text, size, "GPU-%lu0000000-0000-0000-0000-000000000000", (unsigned long)(uintptr_t)device - 1);
    return 0;
}

int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    snprintf(text, size, "%s", fake_name());
    return 0;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = fake_capability() / 10;
    *minor = fake_capability() % 10;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = fake_total();
    memory[1] = fake_free();
    memory[2] = memory[0] - memory[1];
    return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, unsigned long long *memory) { // after the version: total, reserved, free, used
    memory[1] = fake_total();
    memory[2] = 0;
    memory[3] = fake_free();
    memory[4] = memory[1] - memory[3];
    return 0;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, VERSION);
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}

int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) {
    *status = 0;
    return 0;
}

int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level) {
    *level = 10;
    return 0;
}

int nvmlDeviceGetNumaNodeId(void *device, unsigned *node) {
    *node = 0;
    return 0;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    *current = *pending = 0;
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *list) {
    *count = 0;
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *list) {
    return nvmlDeviceGetComputeRunningProcesses(device, count, list);
}
