// libstubgpu.so: the state behind the stub libraries. Each variable is described in the README.
#include "core.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace stub {
namespace {

std::string text_of(const char* variable, const char* otherwise) {
  const char* value = getenv(variable);
  return value && *value ? value : otherwise;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  size_t start = 0;
  while (true) {
    size_t end = text.find(',', start);
    parts.push_back(text.substr(start, end - start));
    if (end == std::string::npos) return parts;
    start = end + 1;
  }
}

// A variable lists one value per GPU; the last one holds for all further GPUs.
std::string value_of(const char* variable, int physical, const char* otherwise) {
  auto values = split(text_of(variable, otherwise));
  return values[std::min<size_t>(physical, values.size() - 1)];
}

size_t mib_of(const char* variable, int physical, const char* otherwise) {
  return strtoull(value_of(variable, physical, otherwise).c_str(), nullptr, 10) * MIB;
}

Gpu read_gpu(int physical) {
  Gpu it{};
  it.total = mib_of("STUB_GPU_TOTAL_MIB", physical, "8192");
  it.driver_share = mib_of("STUB_GPU_DRIVER_MIB", physical, "256");
  it.context = mib_of("STUB_GPU_CONTEXT_MIB", physical, "256");
  it.library = mib_of("STUB_GPU_LIBRARY_MIB", physical, "64");
  it.multiprocessors = atoi(value_of("STUB_GPU_SMS", physical, "132").c_str());
  sscanf(value_of("STUB_GPU_CAPABILITY", physical, "9.0").c_str(), "%d.%d", &it.major, &it.minor);
  auto kind = value_of("STUB_GPU_KIND", physical, "discrete");
  it.is_mig = kind == "mig";
  it.is_integrated = kind == "integrated";
  snprintf(it.name, sizeof it.name, "%s", value_of("STUB_GPU_NAME", physical, "Stub GPU").c_str());
  return it;
}

// ---- The table of all processes, in a file that they map ----

constexpr int ROWS = 128;

struct Row {
  int pid;
  size_t bytes[MAX_GPUS];
};

struct Table {
  Row rows[ROWS];
};

Table* table = nullptr;
int table_file = -1;
std::mutex table_mutex;
int context_owner[MAX_GPUS], library_owner[MAX_GPUS];  // process ids, so that a fork starts without

void open_table() {
  auto path = text_of("STUB_GPU_STATE", ("/dev/shm/stub-gpu-" + std::to_string(getuid())).c_str());
  table_file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (table_file < 0 || ftruncate(table_file, sizeof(Table)) != 0) {
    fprintf(stderr, "stub GPU: cannot open %s: %s\n", path.c_str(), strerror(errno));
    abort();
  }
  table = (Table*)mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, table_file, 0);
}

// Lock the table over threads and processes, without the rows of processes that have ended.
class Lock {
 public:
  Lock() : threads_(table_mutex) {
    if (table == nullptr) open_table();
    flock(table_file, LOCK_EX);
    for (auto& row : table->rows) {
      if (row.pid && kill(row.pid, 0) != 0 && errno == ESRCH) memset(&row, 0, sizeof row);
    }
  }
  ~Lock() { flock(table_file, LOCK_UN); }

  Row& own_row() {
    for (auto& row : table->rows) {
      if (row.pid == getpid()) return row;
    }
    for (auto& row : table->rows) {
      if (row.pid) continue;
      memset(&row, 0, sizeof row);
      row.pid = getpid();
      return row;
    }
    fprintf(stderr, "stub GPU: more than %d processes\n", ROWS);
    abort();
  }

  size_t sum(int physical) {
    size_t bytes = 0;
    for (auto& row : table->rows) bytes += row.pid ? row.bytes[physical] : 0;
    return bytes;
  }

 private:
  std::lock_guard<std::mutex> threads_;
};

// Append who opened a context, with the stacks of C++ and Python, to the file that STUB_CONTEXT_LOG names.
void log_context(int physical) {
  const char* path = getenv("STUB_CONTEXT_LOG");
  if (!path) return;
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  dprintf(file, "process %d opens a context on GPU %d\n", getpid(), physical);
  void* frames[24];
  backtrace_symbols_fd(frames, backtrace(frames, 24), file);
  auto holds_gil = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
  auto run = (int (*)(const char*))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
  if (holds_gil && run && holds_gil()) {
    char code[160];
    const char* form = "import traceback; traceback.print_stack(file=open(%d, 'w', closefd=False))";
    snprintf(code, sizeof code, form, file);
    run(code);
  }
  close(file);
}

// ---- Injected errors ----

struct Fault {
  char call[64];
  long first, count = 1;
  int error, sticky = 0;
  bool wanted;

  Fault() {
    const char* given = getenv("STUB_FAULT");
    wanted = given && sscanf(given, "%63[^:]:%ld:%d:%ld:%d", call, &first, &error, &count, &sticky) >= 3;
  }
};

}  // namespace

int gpu_count() { return std::min(MAX_GPUS, atoi(text_of("STUB_GPU_COUNT", "1").c_str())); }

const Gpu& gpu(int physical) {
  static const auto* gpus = [] {
    auto* made = new Gpu[MAX_GPUS];
    for (int i = 0; i < MAX_GPUS; i++) made[i] = read_gpu(i);
    return made;
  }();
  return gpus[physical];
}

bool nvml_is_absent() { return text_of("STUB_NVML", "present") == "absent"; }

size_t cudnn_workspace() { return mib_of("STUB_CUDNN_WORKSPACE_MIB", 0, "4"); }

int visible(int (&out)[MAX_GPUS]) {
  int found = 0;
  const char* chosen = getenv("CUDA_VISIBLE_DEVICES");
  if (!chosen) {
    for (; found < gpu_count(); found++) out[found] = found;
    return found;
  }
  for (auto& one : split(chosen)) {
    int match = -1;
    for (int i = 0; i < gpu_count(); i++) {
      char whole[64], slice[64];
      uuid_text(i, false, whole, sizeof whole);
      uuid_text(i, true, slice, sizeof slice);
      if (one == std::to_string(i) || one == whole || one == slice) match = i;
    }
    if (match < 0 || found == MAX_GPUS) break;  // CUDA ignores everything after a name that it does not know
    out[found++] = match;
  }
  return found;
}

int physical(int ordinal) {
  int gpus[MAX_GPUS];
  return ordinal < visible(gpus) ? gpus[ordinal] : 0;
}

void uuid_bytes(int physical, bool slice, unsigned char out[16]) {
  for (int i = 0; i < 16; i++) out[i] = (unsigned char)(0x10 + i);
  out[14] = slice ? 0xa1 : 0xa0;
  out[15] = (unsigned char)physical;
}

void uuid_text(int physical, bool slice, char* out, size_t size) {
  unsigned char raw[16];
  uuid_bytes(physical, slice, raw);
  std::string text = slice ? "MIG-" : "GPU-";
  for (int i = 0; i < 16; i++) {
    char pair[4];
    snprintf(pair, sizeof pair, "%02x", raw[i]);
    text += i == 4 || i == 6 || i == 8 || i == 10 ? std::string("-") + pair : pair;
  }
  snprintf(out, size, "%s", text.c_str());
}

bool take(int physical, size_t bytes) {
  Lock lock;
  if (lock.sum(physical) + bytes > gpu(physical).total) return false;
  lock.own_row().bytes[physical] += bytes;
  return true;
}

void give(int physical, size_t bytes) {
  Lock lock;
  lock.own_row().bytes[physical] -= bytes;
}

size_t used(int physical) {
  Lock lock;
  return lock.sum(physical);
}

int holders(int physical, Holder* out, int capacity) {
  Lock lock;
  int found = 0;
  for (auto& row : table->rows) {
    if (!row.pid || !row.bytes[physical]) continue;
    if (found < capacity) out[found] = {row.pid, row.bytes[physical]};
    found++;
  }
  return found;
}

bool has_context(int physical) { return context_owner[physical] == getpid(); }

void open_context(int physical) {
  if (has_context(physical)) return;
  context_owner[physical] = getpid();
  {
    Lock lock;
    lock.own_row().bytes[physical] += gpu(physical).context;
  }
  log_context(physical);
}

void load_libraries(int physical) {
  if (library_owner[physical] == getpid()) return;
  library_owner[physical] = getpid();
  Lock lock;
  lock.own_row().bytes[physical] += gpu(physical).library;
}

void* map_memory(size_t bytes, bool accessible) {
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  int protection = accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, bytes + LARGE_PAGE, protection, flags, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  uintptr_t start = (uintptr_t)mapped, end = start + bytes + LARGE_PAGE;
  uintptr_t aligned = (start + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
  if (aligned != start) munmap((void*)start, aligned - start);
  if (aligned + bytes != end) munmap((void*)(aligned + bytes), end - aligned - bytes);
  return (void*)aligned;
}

void unmap_memory(void* address, size_t bytes) { munmap(address, (bytes + PAGE - 1) / PAGE * PAGE); }

int fault(const char* call) {
  static const Fault asked;
  static std::atomic<long> calls{0};
  static std::atomic<bool> context_is_lost{false};
  if (!asked.wanted) return 0;
  if (context_is_lost) return asked.error;
  if (strcmp(asked.call, call) != 0) return 0;
  long number = ++calls;
  if (number < asked.first || number >= asked.first + asked.count) return 0;
  if (asked.sticky) context_is_lost = true;
  return asked.error;
}

bool tracing() {
  static const bool wanted = getenv("STUB_TRACE") != nullptr;
  return wanted;
}

void trace(const char* name) {
  if (!tracing()) return;
  static std::mutex mutex;
  static std::set<std::string> seen;
  std::lock_guard<std::mutex> guard(mutex);
  if (seen.insert(name).second) fprintf(stderr, "stub GPU: %s\n", name);
}

}  // namespace stub

// For C++ that is generated, and for Python through ctypes.
API void stub_trace(const char* name) { stub::trace(name); }
API int stub_holders(int physical, stub::Holder* out, int capacity) {
  return stub::holders(physical, out, capacity);
}
