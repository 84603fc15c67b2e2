// libcublasLt: products are counted. build.py adds the functions that only have to succeed.
#include "fake.h"
#include <stdlib.h>
#include <string.h>

static int made(void **thing) {
    *thing = calloc(1, 1024);
    return 0;
}

int cublasLtCreate(void **handle) { return made(handle); }
size_t cublasLtGetVersion(void) { return 130101; }
int cublasLtMatmulDescCreate(void **description, int compute, int scale) { return made(description); }
int cublasLtMatmulPreferenceCreate(void **preference) { return made(preference); }
int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) { return made(layout); }

int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *description, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results,
    int *count) {
    memset(results, 0, 96); // cublasLtMatmulHeuristicResult_t of an algorithm that needs no workspace
    *count = 1;
    return 0;
}

int cublasLtMatmul() {
    fake_add(PRODUCTS, 1);
    return 0;
}
