// libcudnn: one engine for every convolution and attention, with a workspace of a fixed size.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core.h"

namespace {

int make(void** out) {
  *out = calloc(1, 256);
  return 0;
}

int write_size(size_t* out, size_t bytes) {
  if (out) *out = bytes;
  return 0;
}

}  // namespace

API size_t cudnnGetVersion() { return 92000; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(int) { return "stub status"; }

API void cudnnGetLastErrorString(char* out, size_t size) {
  if (size) *out = 0;
}

API int cudnnGetProperty(int which, int* out) {
  const int version[] = {9, 20, 0};
  *out = version[which];
  return 0;
}

API int cudnnCreate(void** out) {
  TRACE_CALL;
  stub::load_libraries(stub::current_gpu());
  return make(out);
}

API int cudnnGetStream(void*, void** out) {
  *out = nullptr;
  return 0;
}

// ---- Descriptors ----

API int cudnnCreateActivationDescriptor(void** out) { return make(out); }
API int cudnnCreateCTCLossDescriptor(void** out) { return make(out); }
API int cudnnCreateConvolutionDescriptor(void** out) { return make(out); }
API int cudnnCreateDropoutDescriptor(void** out) { return make(out); }
API int cudnnCreateFilterDescriptor(void** out) { return make(out); }
API int cudnnCreatePoolingDescriptor(void** out) { return make(out); }
API int cudnnCreateRNNDataDescriptor(void** out) { return make(out); }
API int cudnnCreateRNNDescriptor(void** out) { return make(out); }
API int cudnnCreateSpatialTransformerDescriptor(void** out) { return make(out); }
API int cudnnCreateTensorDescriptor(void** out) { return make(out); }

// ---- Scratch. Its real sizes depend on shapes and engines, which nobody publishes. ----

API int cudnnDropoutGetStatesSize(void*, size_t* out) { return write_size(out, stub::MIB); }

API int cudnnGetRNNTempSpaceSizes(void*, void*, int, void*, size_t* workspace, size_t* reserve) {
  write_size(reserve, stub::MIB);
  return write_size(workspace, stub::cudnn_workspace());
}

API int cudnnGetRNNWeightSpaceSize(void*, void*, size_t* out) { return write_size(out, 0); }

API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*,
                                                                 size_t* out) {
  return write_size(out, 0);
}

API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, void*,
                                                          void*, size_t* out) {
  return write_size(out, 0);
}

API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* out) {
  return write_size(out, 0);
}

// ---- The graph interface: heuristics offer one engine, and a plan has a workspace ----

API int cudnnBackendCreateDescriptor(int, void** out) { return make(out); }

API int cudnnBackendDestroyDescriptor(void* descriptor) {
  free(descriptor);
  return 0;
}

API int cudnnBackendFinalize(void*) { return 0; }
API int cudnnBackendSetAttribute(void*, int, int, int64_t, const void*) { return 0; }

API int cudnnBackendExecute(void*, void*, void*) {
  TRACE_CALL;
  return 0;
}

API int cudnnBackendGetAttribute(void*, int name, int, int64_t, int64_t* count, void* out) {
  constexpr int HEURISTIC_RESULTS = 202, SHARED_MEMORY_USED = 304, PLAN_WORKSPACE_BYTES = 402;
  bool known = name == HEURISTIC_RESULTS || name == SHARED_MEMORY_USED || name == PLAN_WORKSPACE_BYTES;
  if (count) *count = known;
  if (out && name == SHARED_MEMORY_USED) *(int*)out = 0;
  if (out && name == PLAN_WORKSPACE_BYTES) *(int64_t*)out = (int64_t)stub::cudnn_workspace();
  return 0;
}
