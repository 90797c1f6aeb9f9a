// libcublas: handles, and products that compute nothing.
#include <cstdlib>

#include "core.h"

// Each handle needs an address of its own: torch keeps a workspace for each.
API int cublasCreate_v2(void** out) {
  TRACE_CALL;
  stub::load_libraries(stub::current_gpu());
  if (int error = stub::fault("cublascreate")) return error;
  *out = calloc(1, 64);
  return 0;
}

API int cublasDestroy_v2(void* handle) {
  free(handle);
  return 0;
}

API int cublasGetMathMode(void*, int* out) { return *out = 0; }
API int cublasGetPointerMode_v2(void*, int* out) { return *out = 0; }
API const char* cublasGetStatusString(int) { return "stub status"; }

#define PRODUCT(name) \
  API int name() {    \
    TRACE_CALL;       \
    return stub::fault("gemm"); \
  }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
