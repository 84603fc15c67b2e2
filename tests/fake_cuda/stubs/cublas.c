// libcublas: products are counted. build.py adds the functions that torch imports and that only have to succeed.
#include "fake.h"
#include <stdlib.h>

int cublasCreate_v2(void **handle) {
    *handle = malloc(64);
    return 0;
}

int cublasDestroy_v2(void *handle) {
    free(handle);
    return 0;
}

int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

const char *cublasGetStatusString(int status) { return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS"; }
