// libcuda: contexts, and the virtual memory behind expandable segments.
#include <cuda.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>

#include "core.h"

extern "C" void stub_register_range(void* address, size_t bytes, int gpu);
extern "C" void stub_forget_range(void* address);

namespace {

struct Chunk {
  size_t bytes;
  int gpu;
};

std::mutex mutex;
std::map<CUmemGenericAllocationHandle, Chunk> chunks;
CUmemGenericAllocationHandle next_chunk = 1;
char any_context;

CUresult map_fixed(CUdeviceptr address, size_t bytes, int protection) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  bool failed = mmap((void*)address, bytes, protection, flags, -1, 0) == MAP_FAILED;
  return failed ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

}  // namespace

// ---- Devices and contexts ----

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

API CUresult cuDriverGetVersion(int* out) {
  *out = CUDA_VERSION;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* out, int ordinal) {
  *out = ordinal;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int* out) {
  int gpus[stub::MAX_GPUS];
  *out = stub::visible(gpus);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice ordinal) {
  const stub::Gpu& gpu = stub::gpu(stub::physical(ordinal));
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *out = 1; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = gpu.major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = gpu.minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = gpu.multiprocessors; break;
    default: *out = 0;
  }
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* out) {
  *out = (CUcontext)&any_context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

API CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = stub::has_context(stub::physical(ordinal));
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice ordinal) {
  stub::open_context(stub::physical(ordinal));
  return cuCtxGetCurrent(out);
}

API CUresult cuGetErrorString(CUresult error, const char** out) {
  *out = error == CUDA_SUCCESS ? "no error" : error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "stub error";
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char** out) {
  *out = error == CUDA_SUCCESS                ? "CUDA_SUCCESS"
         : error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                             : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(void**)out = &any_context; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr*)out = pointer; break;
    default: memset(out, 0, 4);
  }
  return CUDA_SUCCESS;
}

// ---- Virtual memory ----

API CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *out = stub::LARGE_PAGE;
  return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  TRACE_CALL;
  void* address = stub::map_memory(bytes, false);
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  stub_register_range(address, bytes, stub::current_gpu());
  *out = (CUdeviceptr)address;
  return CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  stub_forget_range((void*)address);
  stub::unmap_memory((void*)address, bytes);
  return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* wanted,
                         unsigned long long) {
  TRACE_CALL;
  int gpu = stub::physical(wanted->location.id);
  stub::open_context(gpu);
  if (int error = stub::fault("memcreate")) return (CUresult)error;
  if (!stub::take(gpu, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> guard(mutex);
  *out = next_chunk++;
  chunks[*out] = {bytes, gpu};
  return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = chunks.find(handle);
  if (found == chunks.end()) return CUDA_ERROR_INVALID_VALUE;
  stub::give(found->second.gpu, found->second.bytes);
  chunks.erase(found);
  return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return map_fixed(address, bytes, PROT_READ | PROT_WRITE);
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { return map_fixed(address, bytes, PROT_NONE); }
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

#undef cuMemsetD32Async
API CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream) {
  for (size_t i = 0; i < count; i++) ((unsigned*)address)[i] = value;
  return CUDA_SUCCESS;
}
