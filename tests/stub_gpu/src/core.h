// What all stub libraries share: the GPUs of the machine, who holds how many bytes, and injected errors.
#pragma once
#include <cstddef>
#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))
#define TRACE_CALL stub::trace(__func__)

namespace stub {

constexpr int MAX_GPUS = 8;
constexpr size_t MIB = size_t(1) << 20;
constexpr size_t PAGE = 4096;
constexpr size_t LARGE_PAGE = 2 * MIB;

// One GPU as its environment variables describe it.
struct Gpu {
  size_t total;         // bytes that the CUDA runtime reports
  size_t driver_share;  // bytes that only NVML reports: the driver's own
  size_t context;       // bytes that a process's context takes
  size_t library;       // bytes that cuBLAS and cuDNN take in a process
  int major, minor, multiprocessors;
  bool is_mig, is_integrated;
  char name[64];
};

struct Holder {
  int pid;
  size_t bytes;
};

int gpu_count();
const Gpu& gpu(int physical);
bool nvml_is_absent();
size_t cudnn_workspace();

// CUDA_VISIBLE_DEVICES, as physical numbers. Return how many there are.
int visible(int (&physical)[MAX_GPUS]);
int physical(int ordinal);  // the GPU behind an ordinal of this process, 0 if there is none

// Identity. A MIG slice has a UUID of its own, which CUDA reports in place of the GPU's.
void uuid_bytes(int physical, bool slice, unsigned char out[16]);
void uuid_text(int physical, bool slice, char* out, size_t size);

// The table that all processes share. Rows of processes that have ended are removed.
bool take(int physical, size_t bytes);  // false: it does not fit
void give(int physical, size_t bytes);
size_t used(int physical);
int holders(int physical, Holder* out, int capacity);

// Open this process's context on a GPU, or load its libraries, once.
void open_context(int physical);
bool has_context(int physical);
void load_libraries(int physical);

// Memory that costs nothing until it is written. Addresses are multiples of 2 MiB.
void* map_memory(size_t bytes, bool accessible = true);
void unmap_memory(void* address, size_t bytes);

// The error that STUB_FAULT asks for at this call, 0 for none.
int fault(const char* call);

// With STUB_TRACE, print each name once.
void trace(const char* name);
bool tracing();

// The GPU of the calling thread, with its context open. Defined by the CUDA runtime.
int current_gpu();

}  // namespace stub
