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

// What descriptors of recurrent layers remember.
struct Rnn {
  int gates, element_bytes, input, hidden, layers, directions;
  bool has_bias;

  // Each layer and direction has its matrices for the input, then those for the hidden state.
  size_t input_width(int pseudo_layer) const {
    return pseudo_layer < directions ? (size_t)input : (size_t)hidden * directions;
  }
  size_t matrices_before(int pseudo_layer) const {
    size_t elements = 0;
    for (int i = 0; i < pseudo_layer; i++) elements += gates * hidden * (input_width(i) + hidden);
    return elements;
  }
  size_t biases() const { return has_bias ? 2 * gates * hidden * layers * directions : 0; }
  size_t weights() const { return matrices_before(layers * directions) + biases(); }
};

struct RnnData {
  int element_bytes, longest, batch;
};

struct TensorShape {
  int dimensions[3];
};

int element_bytes(int data_type) {
  switch (data_type) {
    case 1: return 8;           // double
    case 2: case 9: return 2;  // half, bfloat16
    default: return 4;
  }
}

}  // namespace

// Torch refuses a version below the one it was compiled with.
API size_t cudnnGetVersion() { return 99900; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(int) { return "stub status"; }

API void cudnnGetLastErrorString(char* out, size_t size) {
  if (size) *out = 0;
}

API int cudnnGetProperty(int which, int* out) {
  const int version[] = {9, 99, 0};
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

// ---- Recurrent layers: their weights have cuDNN's sizes; what they keep for the backward pass is a guess ----

API int cudnnSetRNNDescriptor_v8(Rnn* out, int, int cell, int bias, int direction, int, int data_type, int, int,
                                 int input, int hidden, int, int layers, void*, unsigned) {
  const int gates[] = {1, 1, 4, 3};  // ReLU, tanh, LSTM, GRU
  *out = {gates[cell], element_bytes(data_type), input, hidden, layers, 1 + direction, bias != 0};
  return 0;
}

API int cudnnSetRNNDataDescriptor(RnnData* out, int data_type, int, int longest, int batch, int, const int*, void*) {
  *out = {element_bytes(data_type), longest, batch};
  return 0;
}

API int cudnnGetRNNWeightSpaceSize(void*, const Rnn* rnn, size_t* out) {
  return write_size(out, rnn->weights() * rnn->element_bytes);
}

// Torch asks for the matrix or for the bias, and passes null for the other.
API int cudnnGetRNNWeightParams(void*, const Rnn* rnn, int layer, size_t, const char* weights, int which,
                                TensorShape* matrix, const char** matrix_out, TensorShape* bias,
                                const char** bias_out) {
  size_t hidden = rnn->hidden, width = rnn->input_width(layer);
  bool of_input = which < rnn->gates;
  if (matrix) {
    size_t place = rnn->matrices_before(layer) + hidden * (of_input ? which * width : rnn->gates * width);
    if (!of_input) place += (which - rnn->gates) * hidden * hidden;
    *matrix = {1, rnn->hidden, (int)(of_input ? width : hidden)};
    *matrix_out = weights + place * rnn->element_bytes;
  }
  if (bias) {
    size_t place = rnn->weights() - rnn->biases() + (2 * rnn->gates * layer + which) * hidden;
    *bias = {1, rnn->hidden, 1};
    *bias_out = weights + place * rnn->element_bytes;
  }
  return 0;
}

API int cudnnGetTensorNdDescriptor(const TensorShape* of, int, int*, int* count, int* sizes, int* strides) {
  *count = 3;
  for (int i = 0; i < 3; i++) sizes[i] = strides[i] = of->dimensions[i];
  return 0;
}

API int cudnnGetRNNTempSpaceSizes(void*, const Rnn* rnn, int, const RnnData* data, size_t* workspace,
                                  size_t* reserve) {
  size_t states = (size_t)data->longest * data->batch * rnn->hidden * rnn->layers * rnn->directions;
  write_size(reserve, (rnn->gates + 1) * states * data->element_bytes);
  return write_size(workspace, stub::cudnn_workspace());
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
