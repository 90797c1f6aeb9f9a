/* A stand-in for libnvidia-ml.so.1: two GPUs, with the fault that STUB_MODE names.
 *
 *   (none)        GPU 0 "Alpha" with 24 GiB, 4 GiB used by two processes; GPU 1 "Beta" with 80 GiB, idle
 *   init:N        nvmlInit answers N
 *   memory:N      the memory reading answers N
 *   zero          the memory reading answers "0 of 0 bytes"
 *   old           the memory reading answers 13 (function not found), as an old driver does
 *   lost          GPU 1 is lost
 *   mig           GPU 1 is split into two slices of 10 GiB
 *   latin         the name of GPU 0 is not UTF-8
 *   private       processes are listed, their memory is not available
 *   noprocesses:N the process readings answer N
 *   loud          opening and closing are written to the error stream
 */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#define GIB (1ull << 30)
enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_FUNCTION = 13, LOST = 15 };

typedef struct { const char *uuid, *name; unsigned long long total, used; } Gpu;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

static Gpu gpus[] = {
    {"GPU-aaaa1111-0000-0000-0000-000000000000", "Alpha", 24 * GIB, 4 * GIB},
    {"GPU-bbbb2222-0000-0000-0000-000000000000", "Beta", 80 * GIB, 0},
    {"MIG-cccc3333-0000-0000-0000-000000000000", "Beta MIG 1g.10gb", 10 * GIB, 1 * GIB},
    {"MIG-dddd4444-0000-0000-0000-000000000000", "Beta MIG 1g.10gb", 10 * GIB, 0},
};

static int is(const char *mode) { const char *set = getenv("STUB_MODE"); return set && !strcmp(set, mode); }
static int code(const char *what) {
    const char *set = getenv("STUB_MODE");
    size_t length = strlen(what);
    return set && !strncmp(set, what, length) && set[length] == ':' ? atoi(set + length + 1) : OK;
}
static int put(char *out, unsigned size, const char *text) { snprintf(out, size, "%s", text); return OK; }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (is("loud")) fputs("open\n", stderr);
    return code("init");
}
int nvmlShutdown(void) {
    if (is("loud")) fputs("close\n", stderr);
    return OK;
}
const char *nvmlErrorString(int value) { (void)value; return "stub error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **out) {
    if (index == 1 && is("lost")) return LOST;
    *out = &gpus[index];
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **out) {
    for (int i = 0; i < (is("mig") ? 4 : 2); i++)
        if (!strcmp(gpus[i].uuid, uuid)) { *out = &gpus[i]; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(Gpu *gpu, char *out, unsigned size) { return put(out, size, gpu->uuid); }
int nvmlDeviceGetName(Gpu *gpu, char *out, unsigned size) {
    if (is("latin") && gpu == gpus) return put(out, size, "Alph\xe4");
    return put(out, size, gpu->name);
}
int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory2 *out) {
    if (is("old")) return NO_FUNCTION;
    if (out->version != 0x02000028) return 25;
    if (is("zero")) { memset(out, 0, sizeof *out); return OK; }
    out->total = gpu->total;
    out->reserved = GIB / 2;
    out->used = gpu->used;
    out->free = out->total - out->used - out->reserved;
    return code("memory");
}

int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *current, unsigned *pending) {
    if (gpu != &gpus[1]) return NOT_SUPPORTED;
    *current = *pending = is("mig");
    return OK;
}
static int list(Gpu *gpu, unsigned *count, Process *out, const Process *found, unsigned n) {
    int answer = code("noprocesses");
    if (answer) return answer;
    if (gpu != gpus) n = 0;
    if (*count < n) { *count = n; return TOO_SMALL; }
    for (unsigned i = 0; i < n; i++) {
        out[i] = found[i];
        if (is("private")) out[i].used = ~0ull;
    }
    *count = n;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, Process *out) {
    static const Process found[] = {{4711, 1 * GIB, 0, 0}, {4712, 2 * GIB, 0, 0}};
    return list(gpu, count, out, found, 2);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *gpu, unsigned *count, Process *out) {
    static const Process found[] = {{4712, 2 * GIB, 0, 0}, {4713, 64, 0, 0}};
    return list(gpu, count, out, found, 2);
}
int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    return pid == 4713 ? NOT_FOUND : put(out, size, pid == 4711 ? "python" : "Xorg");
}
