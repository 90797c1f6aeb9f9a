// libcudart: device memory is host memory, all work is done at once, and kernels compute nothing.
//
// One kernel is an exception: torch's contiguous fill, so that ones(), full() and the loss scale have their values.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "core.h"

namespace {

enum class Kind { Device, Pinned, Registered };

struct Block {
  size_t bytes;
  int gpu;
  Kind kind;
};

struct Stream {
  int priority;
};

struct Event {
  std::chrono::steady_clock::time_point time;
};

struct Graph {};

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

std::mutex mutex;  // guards blocks and capturing
std::map<uintptr_t, Block> blocks;
std::set<cudaStream_t> capturing;

thread_local int current_ordinal = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local LaunchConfiguration configurations[64];
thread_local int configuration_count = 0;

cudaError_t fail(int error) { return last_error = (cudaError_t)error; }

// The result of a call that may be asked to fail.
cudaError_t outcome(const char* call) {
  int error = stub::fault(call);
  return error ? fail(error) : cudaSuccess;
}

bool exists(int ordinal) {
  int gpus[stub::MAX_GPUS];
  return ordinal >= 0 && ordinal < stub::visible(gpus);
}

void add_block(void* address, Block block) {
  std::lock_guard<std::mutex> guard(mutex);
  blocks[(uintptr_t)address] = block;
}

// Take the block that starts at an address out of the map.
bool remove_block(void* address, Block* removed) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = blocks.find((uintptr_t)address);
  if (found == blocks.end()) return false;
  *removed = found->second;
  blocks.erase(found);
  return true;
}

void copy(void* to, const void* from, size_t bytes) {
  if (bytes) memmove(to, from, bytes);
}

// Write bytes. Whole pages of zeros are given back to the system instead, so that they cost nothing.
void set_bytes(void* address, int value, size_t bytes) {
  if (value == 0 && bytes >= stub::MIB) {
    uintptr_t start = (uintptr_t)address, end = start + bytes;
    uintptr_t first = (start + stub::PAGE - 1) / stub::PAGE * stub::PAGE, last = end / stub::PAGE * stub::PAGE;
    memset(address, 0, first - start);
    memset((void*)last, 0, end - last);
    if (madvise((void*)first, last - first, MADV_DONTNEED) == 0) return;
  }
  if (bytes) memset(address, value, bytes);
}

// ---- Kernels ----

using KernelNames = std::map<const void*, const char*>;
using FillKernels = std::map<const void*, size_t>;  // to the size of an element

// Registered while libraries are loaded, before statics of this file exist.
KernelNames& kernel_names() {
  static auto* names = new KernelNames;
  return *names;
}

FillKernels& fill_kernels() {
  static auto* kernels = new FillKernels;
  return *kernels;
}

// The size of an element that a contiguous fill writes, from the kernel's mangled name; 0 for other kernels.
size_t fill_element_bytes(const char* name) {
  const char* functor = strstr(name, "vectorized_elementwise_kernel") ? strstr(name, "FillFunctorI") : nullptr;
  if (!functor) return 0;
  const char* type = functor + strlen("FillFunctorI");
  if (!strncmp(type, "N3c108BFloat16E", 15) || !strncmp(type, "N3c104HalfE", 11)) return 2;
  switch (*type) {
    case 'b': case 'h': case 'a': return 1;
    case 's': return 2;
    case 'f': case 'i': return 4;
    case 'd': case 'l': return 8;
    default: return 0;
  }
}

// Run vectorized_elementwise_kernel(int count, FillFunctor value, std::array<char*, 1> out).
void run_fill(size_t element_bytes, void** arguments) {
  size_t count = (size_t)*(int*)arguments[0];
  const char* value = (const char*)arguments[1];
  char* out = *(char**)arguments[2];
  bool is_zero = true;
  for (size_t i = 0; i < element_bytes; i++) is_zero = is_zero && value[i] == 0;
  if (is_zero) return set_bytes(out, 0, count * element_bytes);
  for (size_t i = 0; i < count; i++) memcpy(out + i * element_bytes, value, element_bytes);
}

cudaError_t launch(const void* function, void** arguments) {
  stub::current_gpu();
  if (stub::tracing()) {
    auto name = kernel_names().find(function);
    stub::trace(name == kernel_names().end() ? "kernel without a name" : name->second);
  }
  auto fill = fill_kernels().find(function);
  if (fill != fill_kernels().end() && arguments) run_fill(fill->second, arguments);
  return outcome("launch");
}

}  // namespace

int stub::current_gpu() {
  int gpu = stub::physical(current_ordinal);
  stub::open_context(gpu);
  return gpu;
}

// For the driver: an address range that expandable segments reserve belongs to a GPU, too.
API void stub_register_range(void* address, size_t bytes, int gpu) { add_block(address, {bytes, gpu, Kind::Device}); }
API void stub_forget_range(void* address) {
  Block removed;
  remove_block(address, &removed);
}

// ---- Devices ----

API cudaError_t cudaGetDeviceCount(int* count) {
  TRACE_CALL;
  int gpus[stub::MAX_GPUS];
  *count = stub::visible(gpus);
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = current_ordinal;
  return cudaSuccess;
}

// Since CUDA 12, choosing a device opens its context.
API cudaError_t cudaSetDevice(int ordinal) {
  TRACE_CALL;
  if (!exists(ordinal)) return fail(cudaErrorInvalidDevice);
  current_ordinal = ordinal;
  stub::current_gpu();
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
  stub::current_gpu();
  return outcome("sync");
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int ordinal) {
  TRACE_CALL;
  if (!exists(ordinal)) return fail(cudaErrorInvalidDevice);
  int physical = stub::physical(ordinal);
  const stub::Gpu& gpu = stub::gpu(physical);
  *out = {};
  snprintf(out->name, sizeof out->name, "%s", gpu.name);
  stub::uuid_bytes(physical, gpu.is_mig, (unsigned char*)&out->uuid);
  out->major = gpu.major;
  out->minor = gpu.minor;
  out->multiProcessorCount = gpu.multiprocessors;
  out->totalGlobalMem = gpu.total;
  out->integrated = gpu.is_integrated;
  out->pciBusID = 1 + physical;
  // The rest is that of an H100.
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = 32;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerBlockOptin = 232448;
  out->sharedMemPerMultiprocessor = 233472;
  out->reservedSharedMemPerBlock = 1024;
  out->totalConstMem = 65536;
  out->memPitch = 2147483647;
  out->textureAlignment = 512;
  out->memoryBusWidth = 5120;
  out->l2CacheSize = 52428800;
  out->persistingL2CacheMaxSize = 32768000;
  out->asyncEngineCount = 3;
  out->unifiedAddressing = out->managedMemory = out->concurrentManagedAccess = 1;
  out->concurrentKernels = out->cooperativeLaunch = out->streamPrioritiesSupported = 1;
  out->canMapHostMemory = out->hostRegisterSupported = out->memoryPoolsSupported = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int ordinal) {
  cudaDeviceProp of;
  if (auto error = cudaGetDeviceProperties(&of, ordinal)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *out = of.major; break;
    case cudaDevAttrComputeCapabilityMinor: *out = of.minor; break;
    case cudaDevAttrMultiProcessorCount: *out = of.multiProcessorCount; break;
    case cudaDevAttrIntegrated: *out = of.integrated; break;
    case cudaDevAttrWarpSize: *out = of.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *out = of.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *out = of.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *out = of.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *out = of.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *out = of.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *out = of.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *out = of.maxGridSize[2]; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = of.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *out = of.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *out = of.regsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = (int)of.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = (int)of.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = (int)of.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *out = (int)of.reservedSharedMemPerBlock; break;
    case cudaDevAttrL2CacheSize: *out = of.l2CacheSize; break;
    case cudaDevAttrGlobalMemoryBusWidth: *out = of.memoryBusWidth; break;
    case cudaDevAttrClockRate: *out = 1980000; break;
    case cudaDevAttrMemoryClockRate: *out = 2619000; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrHostRegisterSupported: *out = 1; break;
    default: *out = 0;
  }
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int ordinal) {
  snprintf(out, (size_t)size, "0000:%02X:00.0", 1 + stub::physical(ordinal));
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) {
  *out = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

// ---- Errors ----

API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }

API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    default: return "cudaErrorOther";
  }
}

API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorNotSupported: return "operation not supported";
    default: return "unknown error";
  }
}

// ---- Memory ----

API cudaError_t cudaMalloc(void** out, size_t bytes) {
  TRACE_CALL;
  int gpu = stub::current_gpu();
  if (auto error = outcome("malloc")) return error;
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (!stub::take(gpu, bytes)) return fail(cudaErrorMemoryAllocation);
  void* address = stub::map_memory(bytes);
  if (!address) {
    stub::give(gpu, bytes);
    return fail(cudaErrorMemoryAllocation);
  }
  add_block(address, {bytes, gpu, Kind::Device});
  *out = address;
  return cudaSuccess;
}

API cudaError_t cudaFree(void* address) {
  TRACE_CALL;
  stub::current_gpu();
  if (auto error = outcome("free")) return error;
  if (!address) return cudaSuccess;
  Block block;
  if (!remove_block(address, &block)) return fail(cudaErrorInvalidValue);
  stub::unmap_memory(address, block.bytes);
  stub::give(block.gpu, block.bytes);
  return cudaSuccess;
}

API cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  TRACE_CALL;
  int gpu = stub::current_gpu();
  if (auto error = outcome("meminfo")) return error;
  size_t used = stub::used(gpu);
  *total = stub::gpu(gpu).total;
  *free = used > *total ? 0 : *total - used;
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  TRACE_CALL;
  int gpu = stub::current_gpu();
  if (auto error = outcome("hostalloc")) return error;
  *out = bytes ? stub::map_memory(bytes) : nullptr;
  if (bytes && !*out) return fail(cudaErrorMemoryAllocation);
  if (bytes) add_block(*out, {bytes, gpu, Kind::Pinned});
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* address) {
  if (!address) return cudaSuccess;
  Block block;
  if (!remove_block(address, &block)) return fail(cudaErrorInvalidValue);
  stub::unmap_memory(address, block.bytes);
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  add_block(address, {bytes, stub::physical(current_ordinal), Kind::Registered});
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* address) {
  Block removed;
  return remove_block(address, &removed) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  *out = {};
  std::lock_guard<std::mutex> guard(mutex);
  auto after = blocks.upper_bound((uintptr_t)pointer);
  auto found = after == blocks.begin() ? blocks.end() : std::prev(after);
  if (found == blocks.end() || (uintptr_t)pointer >= found->first + found->second.bytes) {
    out->type = cudaMemoryTypeUnregistered;
    out->device = -2;
    out->hostPointer = (void*)pointer;
    return cudaSuccess;
  }
  bool on_host = found->second.kind != Kind::Device;
  out->type = on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  out->devicePointer = (void*)pointer;
  out->hostPointer = on_host ? (void*)pointer : nullptr;
  int gpus[stub::MAX_GPUS];
  for (int i = stub::visible(gpus) - 1; i >= 0; i--) {
    if (gpus[i] == found->second.gpu) out->device = i;
  }
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  TRACE_CALL;
  stub::current_gpu();
  if (auto error = outcome("memcpy")) return error;
  copy(to, from, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; row++) copy((char*)to + row * to_pitch, (char*)from + row * from_pitch, width);
  return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  TRACE_CALL;
  set_bytes(address, value, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  return cudaMemsetAsync(address, value, bytes, nullptr);
}

API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

API cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  static void* any = stub::map_memory(stub::MIB);
  *out = any;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int) {
  static Graph any;
  *out = (cudaMemPool_t)&any;
  return cudaSuccess;
}

API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* out) {
  *(uint64_t*)out = 0;
  return cudaSuccess;
}

API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// ---- Streams and events ----

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
  TRACE_CALL;
  stub::current_gpu();
  *out = (cudaStream_t) new Stream{priority};
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete (Stream*)stream;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* out) {
  bool is_default = (uintptr_t)stream <= 2;  // the legacy and the per-thread stream are small numbers
  *out = is_default ? 0 : ((Stream*)stream)->priority;
  return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t) { return outcome("sync"); }
API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) {
  call(data);
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  stub::current_gpu();
  *out = (cudaEvent_t) new Event{};
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  ((Event*)event)->time = std::chrono::steady_clock::now();
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

API cudaError_t cudaEventQuery(cudaEvent_t) { return outcome("event"); }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

API cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t start, cudaEvent_t end) {
  std::chrono::duration<float, std::milli> passed = ((Event*)end)->time - ((Event*)start)->time;
  *out = passed.count();
  return cudaSuccess;
}

// ---- Kernels ----

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                                dim3*, int*) {
  if (stub::tracing()) kernel_names()[function] = name;
  if (size_t bytes = fill_element_bytes(name)) fill_kernels()[function] = bytes;
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  if (configuration_count == 64) return 1;
  configurations[configuration_count++] = {grid, block, shared_bytes, stream};
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (configuration_count == 0) return fail(cudaErrorMissingConfiguration);
  const auto& top = configurations[--configuration_count];
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *(cudaStream_t*)stream = top.stream;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
  *out = (cudaKernel_t)function;
  return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t) {
  return launch(kernel, arguments);
}

API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t) {
  return launch(function, arguments);
}

API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(function, nullptr);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return launch(function, nullptr);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  *out = {};
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->maxDynamicSharedSizeBytes = 49152;
  int gpu = stub::physical(current_ordinal);
  out->ptxVersion = out->binaryVersion = 10 * stub::gpu(gpu).major + stub::gpu(gpu).minor;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
  *out = 2;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) {
  *out = 2;
  return cudaSuccess;
}

API cudaError_t cudaLibraryLoadData(cudaLibrary_t* out, const void*, cudaJitOption*, void**, unsigned,
                                    cudaLibraryOption*, void**, unsigned) {
  static Graph any;
  *out = (cudaLibrary_t)&any;
  return cudaSuccess;
}

API cudaError_t cudaLibraryGetKernel(cudaKernel_t* out, cudaLibrary_t, const char*) {
  static Graph any;
  *out = (cudaKernel_t)&any;
  return cudaSuccess;
}

API cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- Graphs: what is captured has run already, so a replay does nothing ----

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard<std::mutex> guard(mutex);
  capturing.insert(stream);
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*,
                                              const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(stream, mode);
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  std::lock_guard<std::mutex> guard(mutex);
  capturing.erase(stream);
  *out = (cudaGraph_t) new Graph;
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  std::lock_guard<std::mutex> guard(mutex);
  *out = capturing.count(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  static Graph any;
  cudaStreamIsCapturing(stream, status);
  if (id) *id = (unsigned long long)(uintptr_t)stream;
  if (graph) *graph = (cudaGraph_t)&any;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                    unsigned) {
  return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local auto current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t, unsigned long long) {
  *out = (cudaGraphExec_t) new Graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(out, graph, flags);
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (Graph*)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete (Graph*)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return cudaSuccess;
}

API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}

// ---- The driver's entries, which torch asks the runtime for ----

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  *out = driver ? dlsym(driver, name) : nullptr;
  if (!*out && driver) *out = dlsym(driver, (std::string(name) + "_v2").c_str());
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*out) stub::trace((std::string("no driver entry ") + name).c_str());
  return cudaSuccess;  // a missing entry is a result, not an error
}

API cudaError_t cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long flags,
                                        cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, out, 0, flags, result);
}
