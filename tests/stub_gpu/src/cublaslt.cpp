// libcublasLt: descriptors, one heuristic without a workspace, and products that compute nothing.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core.h"

namespace {

struct HeuristicResult {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

// Torch initialises descriptors in place, so they need room.
int make(void** out) {
  *out = calloc(1, 4096);
  return 0;
}

}  // namespace

API size_t cublasLtGetVersion() { return 130000; }
API int cublasLtCreate(void** out) { return make(out); }
API int cublasLtMatmulDescCreate(void** out, int, int) { return make(out); }
API int cublasLtMatrixLayoutCreate(void** out, int, uint64_t, uint64_t, int64_t) { return make(out); }
API int cublasLtMatmulPreferenceCreate(void** out) { return make(out); }

#define DESTROY(name)      \
  API int name(void* it) { \
    free(it);              \
    return 0;              \
  }
DESTROY(cublasLtMatmulDescDestroy)
DESTROY(cublasLtMatrixLayoutDestroy)
DESTROY(cublasLtMatmulPreferenceDestroy)

API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, HeuristicResult* out,
                                       int* count) {
  memset(out, 0, sizeof *out);
  *count = 1;
  return 0;
}

API int cublasLtMatmul() {
  TRACE_CALL;
  return stub::fault("gemm");
}
