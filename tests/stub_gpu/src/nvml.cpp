// libnvidia-ml: what pynvml, torch.cuda and torch's allocator ask of it. It needs no headers.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core.h"

namespace {

enum Return { Success = 0, NotSupported = 3, NotFound = 6, InsufficientSize = 7, DriverNotLoaded = 9 };
constexpr int InvalidArgument = 2;

// A handle is a GPU's number, and whether it means the GPU's one MIG slice.
using Handle = struct Opaque*;
constexpr long SLICE = 0x100;

Handle handle_of(int gpu, bool slice = false) { return (Handle)(long)(gpu + 1 + (slice ? SLICE : 0)); }
bool is_slice(Handle handle) { return (long)handle > SLICE; }
int gpu_of(Handle handle) { return (int)((long)handle % SLICE) - 1; }

struct Memory {
  unsigned long long total, free, used;
};

struct Memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

struct Pci {
  char legacy_id[16];
  unsigned domain, bus, device, id, subsystem;
  char id_text[32];
};

struct Process1 {
  unsigned pid;
  unsigned long long bytes;
};

struct Process3 {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};

// A GPU that is split has twice the memory of its slice; the driver's share is the whole GPU's.
int read_memory(Handle handle, Memory2* out) {
  const stub::Gpu& gpu = stub::gpu(gpu_of(handle));
  if (gpu.is_integrated) return NotSupported;
  size_t used = std::min(stub::used(gpu_of(handle)), gpu.total);
  size_t usable = gpu.is_mig && !is_slice(handle) ? 2 * gpu.total : gpu.total;
  size_t reserved = is_slice(handle) ? 0 : gpu.driver_share;
  out->total = usable + reserved;
  out->reserved = reserved;
  out->free = usable - used;
  out->used = used;
  return Success;
}

template <typename Process>
int list_processes(Handle handle, unsigned* count, Process* out) {
  stub::Holder found[128];
  unsigned total = (unsigned)stub::holders(gpu_of(handle), found, 128);
  unsigned room = *count;
  *count = total;
  if (room < total) return InsufficientSize;
  for (unsigned i = 0; i < total; i++) {
    memset(&out[i], 0xff, sizeof out[i]);  // all ones: no instance
    out[i].pid = (unsigned)found[i].pid;
    out[i].bytes = found[i].bytes;
  }
  return Success;
}

}  // namespace

// ---- The library and the system ----

API int nvmlInit_v2() { return stub::nvml_is_absent() ? DriverNotLoaded : Success; }
API int nvmlInit() { return nvmlInit_v2(); }
API int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
API int nvmlShutdown() { return Success; }

API const char* nvmlErrorString(int error) {
  switch (error) {
    case Success: return "Success";
    case NotSupported: return "Not Supported";
    case NotFound: return "Not Found";
    case DriverNotLoaded: return "Driver Not Loaded";
    default: return "Unknown Error";
  }
}

API int nvmlSystemGetDriverVersion(char* out, unsigned size) {
  snprintf(out, size, "580.65.06");
  return Success;
}

API int nvmlSystemGetNVMLVersion(char* out, unsigned size) {
  snprintf(out, size, "13.580.65.06");
  return Success;
}

API int nvmlSystemGetCudaDriverVersion_v2(int* out) {
  *out = 13000;
  return Success;
}

API int nvmlSystemGetCudaDriverVersion(int* out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

API int nvmlSystemGetProcessName(unsigned pid, char* out, unsigned size) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  FILE* file = fopen(path, "r");
  if (!file) return NotFound;
  out[fread(out, 1, size - 1, file)] = 0;
  fclose(file);
  return Success;
}

// ---- GPUs and slices ----

API int nvmlDeviceGetCount_v2(unsigned* out) {
  *out = (unsigned)stub::gpu_count();
  return Success;
}

API int nvmlDeviceGetCount(unsigned* out) { return nvmlDeviceGetCount_v2(out); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* out) {
  if ((int)index >= stub::gpu_count()) return InvalidArgument;
  *out = handle_of((int)index);
  return Success;
}

API int nvmlDeviceGetHandleByIndex(unsigned index, Handle* out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }

API int nvmlDeviceGetHandleByUUID(const char* wanted, Handle* out) {
  for (int i = 0; i < stub::gpu_count(); i++) {
    for (bool slice : {false, true}) {
      if (slice && !stub::gpu(i).is_mig) continue;
      char uuid[64];
      stub::uuid_text(i, slice, uuid, sizeof uuid);
      if (strcmp(uuid, wanted) != 0) continue;
      *out = handle_of(i, slice);
      return Success;
    }
  }
  return NotFound;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char* wanted, Handle* out) {
  for (int i = 0; i < stub::gpu_count(); i++) {
    char bus[32];
    snprintf(bus, sizeof bus, "%02X:00.0", 1 + i);
    if (!strstr(wanted, bus)) continue;
    *out = handle_of(i);
    return Success;
  }
  return NotFound;
}

API int nvmlDeviceGetHandleByPciBusId(const char* wanted, Handle* out) {
  return nvmlDeviceGetHandleByPciBusId_v2(wanted, out);
}

API int nvmlDeviceGetIndex(Handle handle, unsigned* out) {
  *out = (unsigned)gpu_of(handle);
  return Success;
}

API int nvmlDeviceGetUUID(Handle handle, char* out, unsigned size) {
  stub::uuid_text(gpu_of(handle), is_slice(handle), out, size);
  return Success;
}

API int nvmlDeviceGetName(Handle handle, char* out, unsigned size) {
  snprintf(out, size, "%s", stub::gpu(gpu_of(handle)).name);
  return Success;
}

API int nvmlDeviceGetPciInfo_v3(Handle handle, Pci* out) {
  if (is_slice(handle)) return NotSupported;
  memset(out, 0, sizeof *out);
  out->bus = 1 + (unsigned)gpu_of(handle);
  snprintf(out->legacy_id, sizeof out->legacy_id, "0000:%02X:00.0", out->bus);
  snprintf(out->id_text, sizeof out->id_text, "00000000:%02X:00.0", out->bus);
  return Success;
}

API int nvmlDeviceGetMigMode(Handle handle, unsigned* current, unsigned* pending) {
  if (is_slice(handle)) return NotSupported;
  *current = *pending = stub::gpu(gpu_of(handle)).is_mig;
  return Success;
}

API int nvmlDeviceGetMaxMigDeviceCount(Handle handle, unsigned* out) {
  *out = stub::gpu(gpu_of(handle)).is_mig;
  return Success;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(Handle handle, unsigned index, Handle* out) {
  if (index > 0 || !stub::gpu(gpu_of(handle)).is_mig) return NotFound;
  *out = handle_of(gpu_of(handle), true);
  return Success;
}

API int nvmlDeviceGetCudaComputeCapability(Handle handle, int* major, int* minor) {
  *major = stub::gpu(gpu_of(handle)).major;
  *minor = stub::gpu(gpu_of(handle)).minor;
  return Success;
}

// ---- Memory and its holders ----

API int nvmlDeviceGetMemoryInfo_v2(Handle handle, Memory2* out) { return read_memory(handle, out); }

// The first version counts the driver's share as used.
API int nvmlDeviceGetMemoryInfo(Handle handle, Memory* out) {
  Memory2 full;
  if (int error = read_memory(handle, &full)) return error;
  *out = {full.total, full.free, full.used + full.reserved};
  return Success;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned* count, Process3* out) {
  return list_processes(handle, count, out);
}

// Torch's out-of-memory message asks under the name without a version, with the struct of version 1.
API int nvmlDeviceGetComputeRunningProcesses(Handle handle, unsigned* count, Process1* out) {
  return list_processes(handle, count, out);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle, unsigned* count, Process3*) {
  *count = 0;
  return Success;
}

// ---- Readings without a meaning here ----

// Expandable segments need an answer: no fabric.
API int nvmlDeviceGetGpuFabricInfoV(Handle, void* out) {
  memset((char*)out + sizeof(unsigned), 0, 28);
  return Success;
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(Handle, unsigned, void*) { return NotSupported; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle, unsigned, void*) { return NotSupported; }

API int nvmlDeviceGetP2PStatus(Handle, Handle, int, int* out) {
  *out = 1;  // the chipset does not support it
  return Success;
}

API int nvmlDeviceGetUtilizationRates(Handle, unsigned* out) {
  out[0] = out[1] = 0;
  return Success;
}
