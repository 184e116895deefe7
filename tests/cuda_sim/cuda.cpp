// A CUDA runtime, driver, cuBLAS and NCCL without a device, for LD_PRELOAD under PyTorch's CUDA wheel (CUDA 13).
// Memory is accounted and capped, never computed on: kernels only take time. Streams and events run on a clock.
#include "registry.h"
#include <algorithm>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <deque>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>
using namespace sim;
#define API extern "C" __attribute__((visibility("default")))

namespace {
std::recursive_mutex big;
using Lock = std::lock_guard<std::recursive_mutex>;
struct Stream {
    int device;
    int priority;
    unsigned flags;
    int64_t busy_until;
    std::deque<int64_t> pending;
    bool capturing;
    unsigned long long id;
    cudaGraph_t graph;
};
struct Event {
    int64_t at = -1;
    unsigned flags = 0;
    int device = 0;
};
struct Graph {
    int64_t cost = 0;
    int nodes = 0;
};
struct Exec {
    int64_t cost;
};
struct Alloc {
    size_t size;
    int device;
    int kind;
    size_t charged;
}; // kind 0 device, 1 host, 2 reserved range
struct Handle {
    size_t size;
    int device;
};
std::map<uintptr_t, Alloc> allocs;
uint64_t pool_used[kDevices], pool_peak[kDevices];
Stream null_stream[kDevices];
bool active[kDevices];
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;
int64_t kernel_ns, copy_limit;
double copy_rate, flops;
unsigned long long captures = 0;
int captures_running = 0;
bool is_capture_spoiled = false;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
cudaError_t keep(cudaError_t e) {
    if (e != cudaSuccess) last = e;
    return e;
}

// Read when CUDA is first asked for, as the driver does: a program may choose its devices until then.
std::vector<int> &visible() {
    static std::vector<int> found = [] {
        std::vector<int> all;
        const char *sel = getenv("CUDA_VISIBLE_DEVICES");
        int n = physical_count();
        for (int i = 0; !sel && i < n; ++i) all.push_back(i);
        for (const char *p = sel ? sel : ""; *p;) { // numbers, or UUIDs as NVML tells them, up to the first unknown
            bool named = !strncmp(p, "GPU-", 4) || !strncmp(p, "MIG-", 4);
            char *e;
            long v = strtol(named ? p + 4 : p, &e, named ? 16 : 10) - named;
            if (e == p || v < 0 || v >= n) break;
            all.push_back(v);
            if (named) e += strcspn(e, ",");
            p = *e == ',' ? e + 1 : e;
            if (*e && *e != ',') break;
        }
        return all;
    }();
    return found;
}
struct Setup {
    Setup() {
        const char *k = getenv("CUDA_SIM_KERNEL_NS");
        kernel_ns = k ? atoll(k) : 5000;
        copy_limit = size_of(getenv("CUDA_SIM_COPY_LIMIT"), 65536);
        copy_rate = 12.0;
        flops = 10e12;
        if (const char *f = getenv("CUDA_SIM_FLOPS")) flops = atof(f);
    }
} setup;

int physical(int d) { return visible()[d]; }
bool valid(int d) { return d >= 0 && d < (int)visible().size(); }
void use(int d) {
    if (active[d]) return;
    active[d] = true;
    Held h;
    own_slot()->used[physical(d)] += context_bytes();
}
uint64_t room(int d) {
    uint64_t total = capacity(physical(d)), taken = used(physical(d)) + driver_reserved();
    return total > taken ? total - taken : 0;
}
bool charge(int d, size_t bytes) {
    use(d);
    Held h;
    if (room(d) < bytes) {
        prune();
        if (room(d) < bytes) return false;
    }
    own_slot()->used[physical(d)] += bytes;
    return true;
}
void credit(int d, size_t bytes) {
    Held h;
    auto &u = own_slot()->used[physical(d)];
    u = u > bytes ? u - bytes : 0;
}
Stream *of(cudaStream_t s) {
    if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) {
        null_stream[current].device = current;
        return &null_stream[current];
    }
    return (Stream *)s;
}
void sleep_until(int64_t t) {
    timespec ts{t / 1000000000, t % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, nullptr) == EINTR) {}
}
void launch(cudaStream_t stream, int64_t cost) {
    int64_t wait = 0;
    {
        Lock l(big);
        Stream *s = of(stream);
        if (s->capturing) {
            auto *g = (Graph *)s->graph;
            g->cost += cost;
            g->nodes++;
            return;
        }
        int64_t now = now_ns();
        s->busy_until = std::max(s->busy_until, now) + cost;
        while (!s->pending.empty() && s->pending.front() <= now) s->pending.pop_front();
        if (s->pending.size() >= 1024) {
            wait = s->pending.front();
            s->pending.pop_front();
        }
        s->pending.push_back(s->busy_until);
        __atomic_fetch_add(&([&]() -> uint64_t & {
            static thread_local Slot *slot;
            static thread_local int pid;
            if (!slot || pid != getpid()) {
                Held h;
                slot = own_slot();
                pid = getpid();
            }
            return slot->busy_ns[physical(s->device)];
        }()),
                           (uint64_t)cost, __ATOMIC_RELAXED);
    }
    if (wait) sleep_until(wait);
}
void drain(Stream *s) {
    int64_t t;
    {
        Lock l(big);
        t = s->busy_until;
    }
    if (t > now_ns()) sleep_until(t);
}
// Waiting for, or asking after, what may not have run yet spoils a graph that is being captured.
bool spoils_capture() {
    if (!captures_running || capture_mode == cudaStreamCaptureModeRelaxed) return false;
    return is_capture_spoiled = true;
}
#define REQUIRE_NO_CAPTURE                                                                                         \
    if (spoils_capture()) return keep(cudaErrorStreamCaptureUnsupported)
std::vector<Stream *> streams;
const Alloc *find(const void *p, uintptr_t *base = nullptr) {
    auto it = allocs.upper_bound((uintptr_t)p);
    if (it == allocs.begin()) return nullptr;
    --it;
    if ((uintptr_t)p >= it->first + it->second.size) return nullptr;
    if (base) *base = it->first;
    return &it->second;
}
bool on_device(const void *p) {
    Lock l(big);
    auto a = find(p);
    return a && a->kind != 1;
}
bool pinned(const void *p) {
    Lock l(big);
    auto a = find(p);
    return a && a->kind == 1;
}
void *lazy(size_t n) {
    void *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}
cudaError_t device_alloc(void **out, size_t n) {
    Lock l(big);
    if (visible().empty()) return keep(cudaErrorNoDevice);
    size_t c = (n + (2u << 20) - 1) & ~(size_t)((2u << 20) - 1);
    if (!charge(current, c)) return keep(cudaErrorMemoryAllocation);
    void *p = lazy(c);
    if (!p) {
        credit(current, c);
        return keep(cudaErrorMemoryAllocation);
    }
    allocs[(uintptr_t)p] = {c, current, 0, c};
    pool_used[current] += c;
    pool_peak[current] = std::max(pool_peak[current], pool_used[current]);
    *out = p;
    return cudaSuccess;
}
cudaError_t device_free(void *p) {
    if (!p) return cudaSuccess;
    Lock l(big);
    auto it = allocs.find((uintptr_t)p);
    if (it == allocs.end() || it->second.kind) return keep(cudaErrorInvalidValue);
    munmap(p, it->second.size);
    credit(it->second.device, it->second.charged);
    pool_used[it->second.device] -= it->second.size;
    allocs.erase(it);
    return cudaSuccess;
}
void move(void *dst, const void *src, size_t n) {
    bool to = on_device(dst), from = on_device(src);
    if (to && n > (size_t)copy_limit) return; // device memory stays untouched: it takes no host memory
    if (from && !to) {
        memcpy(dst, src, n);
        return;
    }
    memcpy(dst, src, n);
}
cudaError_t copy(void *dst, const void *src, size_t n, cudaStream_t s, bool wait) {
    if (!n) return cudaSuccess;
    bool dev2dev = on_device(dst) && on_device(src);
    launch(s, 3000 + (int64_t)(n / (dev2dev ? copy_rate * 50 : copy_rate)));
    bool pageable = !dev2dev && !(pinned(dst) || pinned(src));
    {
        Lock l(big);
        if (of(s)->capturing) return cudaSuccess;
    }
    if (wait || pageable) drain(of(s));
    move(dst, src, n);
    return cudaSuccess;
}
} // namespace

// --- devices
API cudaError_t cudaGetDeviceCount(int *n) {
    *n = visible().size();
    return *n ? cudaSuccess : keep(cudaErrorNoDevice);
}
API cudaError_t cudaSetDevice(int d) {
    if (!valid(d)) return keep(cudaErrorInvalidDevice);
    current = d;
    Lock l(big);
    use(d);
    return cudaSuccess;
}
API cudaError_t cudaGetDevice(int *d) {
    if (visible().empty()) return keep(cudaErrorNoDevice);
    *d = current;
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
    REQUIRE_NO_CAPTURE;
    std::vector<Stream *> all;
    {
        Lock l(big);
        all = streams;
    }
    for (auto *s : all)
        if (s->device == current) drain(s);
    drain(&null_stream[current]);
    return cudaSuccess;
}
API cudaError_t cudaDeviceReset() { return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int d) {
    if (!valid(d)) return keep(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Simulated CUDA device");
    p->uuid.bytes[3] = physical(d) + 1;
    p->totalGlobalMem = capacity(physical(d));
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->memPitch = 1 << 30;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = 8;
    p->minor = 0;
    p->textureAlignment = 512;
    p->multiProcessorCount = 108;
    p->canMapHostMemory = 1;
    p->concurrentKernels = 1;
    p->pciBusID = physical(d) + 1;
    p->asyncEngineCount = 3;
    p->unifiedAddressing = 1;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = 40 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->streamPrioritiesSupported = 1;
    p->sharedMemPerMultiprocessor = 167936;
    p->regsPerMultiprocessor = 65536;
    p->managedMemory = 1;
    p->cooperativeLaunch = 1;
    p->sharedMemPerBlockOptin = 166912;
    p->maxBlocksPerMultiProcessor = 32;
    p->reservedSharedMemPerBlock = 1024;
    p->memoryPoolsSupported = 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int) {
    switch ((int)a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMultiProcessorCount: *v = 108; break;
    case cudaDevAttrComputeCapabilityMajor: *v = 8; break;
    case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 166912; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = 32; break;
    case cudaDevAttrMemoryPoolsSupported: *v = 1; break;
    case cudaDevAttrMaxBlockDimX: *v = 1024; break;
    case cudaDevAttrMaxRegistersPerBlock: *v = 65536; break;
    case cudaDevAttrL2CacheSize: *v = 40 << 20; break;
    default: *v = 0;
    }
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
    snprintf(s, n, "00000000:%02X:00.0", physical(d) + 1);
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *lo, int *hi) {
    if (lo) *lo = 0;
    if (hi) *hi = -5;
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *v) {
    *v = 13000;
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
    Lock l(big);
    use(current);
    Held h;
    prune();
    *t = capacity(physical(current));
    *f = room(current);
    return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
// --- errors
API cudaError_t cudaGetLastError() {
    auto e = last;
    last = cudaSuccess;
    return e;
}
API cudaError_t cudaPeekAtLastError() { return last; }
API const char *cudaGetErrorString(cudaError_t e) {
    switch ((int)e) {
    case 0: return "no error";
    case 1: return "invalid argument";
    case 2: return "out of memory";
    case 100: return "no CUDA-capable device is detected";
    case 101: return "invalid device ordinal";
    case 600: return "device not ready";
    case 801: return "operation not supported";
    case 900: return "operation not permitted when stream is capturing";
    case 901: return "operation failed due to a previous error during capture";
    }
    return "simulated error";
}
API const char *cudaGetErrorName(cudaError_t e) {
    switch ((int)e) {
    case 0: return "cudaSuccess";
    case 2: return "cudaErrorMemoryAllocation";
    case 600: return "cudaErrorNotReady";
    case 801: return "cudaErrorNotSupported";
    }
    return "cudaErrorUnknown";
}
// --- memory
API cudaError_t cudaMalloc(void **p, size_t n) { return device_alloc(p, n); }
API cudaError_t cudaFree(void *p) {
    if (p) {
        int64_t t = 0;
        {
            Lock l(big);
            for (auto *s : streams) t = std::max(t, s->busy_until);
            t = std::max(t, null_stream[current].busy_until);
        }
        if (t > now_ns()) sleep_until(t);
    } else {
        Lock l(big);
        if (!visible().empty()) use(current);
    }
    return device_free(p);
}
API cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t) { return device_alloc(p, n); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return device_free(p); }
API cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) {
    if (posix_memalign(p, 4096, n)) return keep(cudaErrorMemoryAllocation);
    memset(*p, 0, n);
    Lock l(big);
    allocs[(uintptr_t)*p] = {n, current, 1, 0};
    return cudaSuccess;
}
API cudaError_t cudaFreeHost(void *p) {
    Lock l(big);
    allocs.erase((uintptr_t)p);
    free(p);
    return cudaSuccess;
}
API cudaError_t cudaHostRegister(void *p, size_t n, unsigned) {
    Lock l(big);
    allocs[(uintptr_t)p] = {n, current, 1, 0};
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *p) {
    Lock l(big);
    allocs.erase((uintptr_t)p);
    return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind) {
    return copy(d, s, n, nullptr, true);
}
API cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind, cudaStream_t st) {
    return copy(d, s, n, st, false);
}
API cudaError_t cudaMemcpyPeerAsync(void *d, int, const void *s, int, size_t n, cudaStream_t st) {
    return copy(d, s, n, st, false);
}
API cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, cudaMemcpyKind,
                                  cudaStream_t st) {
    if (w * h < (size_t)copy_limit)
        for (size_t i = 0; i < h; ++i) memcpy((char *)d + i * dp, (const char *)s + i * sp, w);
    launch(st, 3000 + w * h / copy_rate);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void **p, const void *) {
    static void *zeros = lazy(1 << 20);
    *p = zeros;
    return cudaSuccess;
}
API cudaError_t cudaMemset(void *p, int v, size_t n) {
    launch(nullptr, kernel_ns);
    if (n <= (size_t)copy_limit) memset(p, v, n);
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
    launch(s, kernel_ns);
    if (n <= (size_t)copy_limit) memset(p, v, n);
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
    Lock l(big);
    memset(a, 0, sizeof *a);
    auto x = find(p);
    if (!x) {
        a->type = cudaMemoryTypeUnregistered;
        a->hostPointer = (void *)p;
        a->device = -2;
        return cudaSuccess;
    }
    a->type = x->kind == 1 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = x->device;
    a->devicePointer = (void *)p;
    if (x->kind == 1) a->hostPointer = (void *)p;
    return cudaSuccess;
}
API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *, void *) { return keep(cudaErrorNotSupported); }
API cudaError_t cudaIpcOpenMemHandle(void **, cudaIpcMemHandle_t, unsigned) { return keep(cudaErrorNotSupported); }
API cudaError_t cudaIpcCloseMemHandle(void *) { return cudaSuccess; }
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *, cudaEvent_t) { return keep(cudaErrorNotSupported); }
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *, cudaIpcEventHandle_t) { return keep(cudaErrorNotSupported); }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) {
    *p = (cudaMemPool_t)(intptr_t)(d + 1);
    return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, cudaMemPoolAttr a, void *) {
    Lock l(big);
    int d = (int)(intptr_t)p - 1;
    if (a == cudaMemPoolAttrReservedMemHigh || a == cudaMemPoolAttrUsedMemHigh) pool_peak[d] = pool_used[d];
    return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, cudaMemPoolAttr a, void *v) {
    Lock l(big);
    int d = (int)(intptr_t)p - 1;
    bool is_peak = a == cudaMemPoolAttrReservedMemHigh || a == cudaMemPoolAttrUsedMemHigh;
    *(uint64_t *)v = (int)a < 5 ? 0 : is_peak ? pool_peak[d] : pool_used[d];
    return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc *, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
// --- streams and events
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int pr) {
    Lock l(big);
    use(current);
    auto *n = new Stream();
    n->device = current;
    n->flags = f;
    n->priority = pr;
    streams.push_back(n);
    *s = (cudaStream_t)n;
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) {
    return cudaStreamCreateWithPriority(s, f, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) {
    Lock l(big);
    streams.erase(std::remove(streams.begin(), streams.end(), (Stream *)s), streams.end());
    delete (Stream *)s;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
    *p = of(s)->priority;
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
    REQUIRE_NO_CAPTURE;
    Lock l(big);
    return of(s)->busy_until > now_ns() ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    REQUIRE_NO_CAPTURE;
    drain(of(s));
    return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    Lock l(big);
    auto *st = of(s);
    st->busy_until = std::max(st->busy_until, ((Event *)e)->at);
    return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *u, unsigned) {
    f(s, cudaSuccess, u);
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void *u) {
    f(u);
    return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
    Lock l(big);
    use(current);
    auto *n = new Event();
    n->flags = f;
    n->device = current;
    *e = (cudaEvent_t)n;
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
    delete (Event *)e;
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    Lock l(big);
    auto *st = of(s);
    if (st->capturing) return cudaSuccess;
    ((Event *)e)->at = std::max(st->busy_until, now_ns());
    return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaEventQuery(cudaEvent_t e) {
    REQUIRE_NO_CAPTURE;
    return ((Event *)e)->at > now_ns() ? keep(cudaErrorNotReady) : cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    REQUIRE_NO_CAPTURE;
    auto t = ((Event *)e)->at;
    if (t > now_ns()) sleep_until(t);
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    auto *x = (Event *)a, *y = (Event *)b;
    if (x->at < 0 || y->at < 0) return keep(cudaErrorInvalidResourceHandle);
    if ((x->flags | y->flags) & cudaEventDisableTiming) return keep(cudaErrorInvalidResourceHandle);
    if (std::max(x->at, y->at) > now_ns()) return keep(cudaErrorNotReady);
    *ms = (y->at - x->at) / 1e6f;
    return cudaSuccess;
}
// --- graphs
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *c) {
    Lock l(big);
    *c = of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    Lock l(big);
    if (!captures_running++) is_capture_spoiled = false;
    auto *st = of(s);
    st->capturing = true;
    st->id = ++captures;
    st->graph = (cudaGraph_t) new Graph();
    return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
    Lock l(big);
    auto *st = of(s);
    st->capturing = false;
    *g = st->graph;
    --captures_running;
    return is_capture_spoiled ? keep(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus *c, unsigned long long *id,
                                         cudaGraph_t *g, const cudaGraphNode_t **deps, const cudaGraphEdgeData **ed,
                                         size_t *n) {
    Lock l(big);
    auto *st = of(s);
    *c = st->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = st->id;
    if (g) *g = st->graph;
    if (deps) *deps = nullptr;
    if (ed) *ed = nullptr;
    if (n) *n = 0;
    return cudaSuccess;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t *, const cudaGraphEdgeData *,
                                                    size_t, unsigned) {
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    std::swap(*mode, capture_mode);
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long) {
    *e = (cudaGraphExec_t) new Exec{((Graph *)g)->cost};
    return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
    launch(s, ((Exec *)e)->cost);
    return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *, size_t *n) {
    *n = ((Graph *)g)->nodes;
    return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    delete (Graph *)g;
    return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
    delete (Exec *)e;
    return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *, size_t *n) {
    *n = 0;
    return cudaSuccess;
}
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char *, unsigned) { return cudaSuccess; }
// --- kernels
struct Fatbin {
    int x;
};
API void **__cudaRegisterFatBinary(void *) {
    static void *h[1];
    return h;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *,
                                int *) {}
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
API char __cudaInitModule(void **) { return 1; }
namespace {
struct Call {
    dim3 g, b;
    size_t s;
    cudaStream_t st;
};
thread_local std::vector<Call> calls;
} // namespace
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, cudaStream_t st) {
    calls.push_back({g, b, s, st});
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *s, void *st) {
    auto c = calls.back();
    calls.pop_back();
    *g = c.g;
    *b = c.b;
    *s = c.s;
    *(cudaStream_t *)st = c.st;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
    *k = (cudaKernel_t)f;
    return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t s) {
    launch(s, kernel_ns);
    return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t s) {
    launch(s, kernel_ns);
    return cudaSuccess;
}
API cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t s) {
    launch(s, kernel_ns);
    return cudaSuccess;
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *, void **) {
    launch(c->stream, kernel_ns);
    return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = 80;
    a->binaryVersion = 80;
    a->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *, int, size_t) {
    *n = 2;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int, size_t,
                                                                       unsigned) {
    *n = 2;
    return cudaSuccess;
}
// --- driver
API CUresult cuInit(unsigned) { return visible().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *v) {
    *v = 13000;
    return CUDA_SUCCESS;
}
namespace {
CUresult GetAttribute(int *v, CUdevice_attribute a, CUdevice) {
    *v = a == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
         a == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    return CUDA_SUCCESS;
}
CUresult AddressReserve(CUdeviceptr *p, size_t n, size_t, CUdeviceptr, unsigned long long) {
    void *m = mmap(nullptr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    Lock l(big);
    allocs[(uintptr_t)m] = {n, current, 2, 0};
    *p = (CUdeviceptr)m;
    return CUDA_SUCCESS;
}
CUresult AddressFree(CUdeviceptr p, size_t n) {
    Lock l(big);
    allocs.erase((uintptr_t)p);
    munmap((void *)p, n);
    return CUDA_SUCCESS;
}
CUresult Create(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *prop, unsigned long long) {
    Lock l(big);
    int d = prop->location.id;
    if (!charge(d, n)) return CUDA_ERROR_OUT_OF_MEMORY;
    *h = (CUmemGenericAllocationHandle) new Handle{n, d};
    return CUDA_SUCCESS;
}
CUresult Release(CUmemGenericAllocationHandle h) {
    auto *x = (Handle *)h;
    credit(x->device, x->size);
    delete x;
    return CUDA_SUCCESS;
}
CUresult Map(CUdeviceptr p, size_t n, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    return mmap((void *)p, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                0) == MAP_FAILED
               ? CUDA_ERROR_UNKNOWN
               : CUDA_SUCCESS;
}
CUresult Unmap(CUdeviceptr p, size_t n) {
    mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}
CUresult SetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return CUDA_SUCCESS; }
CUresult Granularity(size_t *g, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    *g = 2 << 20;
    return CUDA_SUCCESS;
}
CUresult CtxState(CUdevice d, unsigned *f, int *a) {
    *f = 0;
    *a = valid(d) && active[d];
    return CUDA_SUCCESS;
}
CUresult CtxCurrent(CUcontext *c) {
    *c = (CUcontext)(intptr_t)(current + 1);
    return CUDA_SUCCESS;
}
CUresult ErrorString(CUresult e, const char **s) {
    *s = cudaGetErrorString((cudaError_t)e);
    return CUDA_SUCCESS;
}
CUresult Refuse() { return CUDA_ERROR_NOT_SUPPORTED; }
} // namespace
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *status) {
    static const std::unordered_map<std::string, void *> known = {
        {"cuDeviceGetAttribute", (void *)GetAttribute},
        {"cuMemAddressReserve", (void *)AddressReserve},
        {"cuMemAddressFree", (void *)AddressFree},
        {"cuMemCreate", (void *)Create},
        {"cuMemRelease", (void *)Release},
        {"cuMemMap", (void *)Map},
        {"cuMemUnmap", (void *)Unmap},
        {"cuMemSetAccess", (void *)SetAccess},
        {"cuMemGetAllocationGranularity", (void *)Granularity},
        {"cuDevicePrimaryCtxGetState", (void *)CtxState},
        {"cuCtxGetCurrent", (void *)CtxCurrent},
        {"cuGetErrorString", (void *)ErrorString},
        {"cuDeviceGet", (void *)+[](CUdevice *d, int i) {
             *d = i;
             return CUDA_SUCCESS;
         }}};
    auto it = known.find(name);
    *f = it == known.end() ? (void *)Refuse : it->second;
    if (it == known.end() && getenv("CUDA_SIM_TRACE")) fprintf(stderr, "[cuda-sim] no driver function %s\n", name);
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
// --- cuBLAS: a handle, and time
namespace {
int gemm(void *h, int64_t m, int64_t n, int64_t k, int64_t batches = 1) {
    launch(h ? *(cudaStream_t *)h : nullptr, kernel_ns + (int64_t)(2.0 * m * n * k * batches / flops * 1e9));
    return 0;
}
} // namespace
API int cublasCreate_v2(void **h) {
    *h = calloc(1, 64);
    return 0;
}
API int cublasDestroy_v2(void *h) {
    free(h);
    return 0;
}
API int cublasSetStream_v2(void *h, cudaStream_t s) {
    *(cudaStream_t *)h = s;
    return 0;
}
API int cublasSetWorkspace_v2(void *, void *, size_t) { return 0; }
API int cublasSetMathMode(void *, int) { return 0; }
API int cublasGetMathMode(void *, int *m) {
    *m = 0;
    return 0;
}
API int cublasSetPointerMode_v2(void *, int) { return 0; }
API int cublasGetPointerMode_v2(void *, int *m) {
    *m = 0;
    return 0;
}
API int cublasSetSmCountTarget(void *, int) { return 0; }
#define GEMM(T)                                                                                                    \
    API int cublas##T##gemm_v2(void *h, int, int, int m, int n, int k, ...) { return gemm(h, m, n, k); }           \
    API int cublas##T##gemmStridedBatched(void *h, int, int, int m, int n, int k, ...) {                           \
        return gemm(h, m, n, k, 8);                                                                                \
    }                                                                                                              \
    API int cublas##T##gemv_v2(void *h, int, int m, int n, ...) { return gemm(h, m, n, 1); }
GEMM(S) GEMM(D) GEMM(C) GEMM(Z) API int cublasSgemmEx(void *h, int, int, int m, int n, int k, ...) {
    return gemm(h, m, n, k);
}
API int cublasGemmEx(void *h, int, int, int m, int n, int k, ...) { return gemm(h, m, n, k); }
API int cublasGemmStridedBatchedEx(void *h, int, int, int m, int n, int k, ...) { return gemm(h, m, n, k, 8); }
API int cublasDotEx(void *h, int n, ...) { return gemm(h, n, 1, 1); }
API int cublasSdot_v2(void *h, int n, ...) { return gemm(h, n, 1, 1); }
API int cublasDdot_v2(void *h, int n, ...) { return gemm(h, n, 1, 1); }
API size_t cublasLtGetVersion() { return 130101; }
#define MAKE(N)                                                                                                    \
    API int N##Create(void **d, ...) {                                                                             \
        *d = calloc(1, 256);                                                                                       \
        return 0;                                                                                                  \
    }                                                                                                              \
    API int N##Destroy(void *d) {                                                                                  \
        free(d);                                                                                                   \
        return 0;                                                                                                  \
    }                                                                                                              \
    API int N##SetAttribute(void *, int, const void *, size_t) { return 0; }
MAKE(cublasLtMatmulDesc) MAKE(cublasLtMatmulPreference) struct Layout {
    uint64_t rows, cols;
};
API int cublasLtMatrixLayoutCreate(void **d, int, uint64_t r, uint64_t c, int64_t) {
    auto *l = (Layout *)calloc(1, 256);
    l->rows = r;
    l->cols = c;
    *d = l;
    return 0;
}
API int cublasLtMatrixLayoutDestroy(void *d) {
    free(d);
    return 0;
}
API int cublasLtMatrixLayoutSetAttribute(void *, int, const void *, size_t) { return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *r,
                                       int *n) {
    memset(r, 0, 88);
    *n = 1;
    return 0;
}
API int cublasLtMatmul(void *, void *, const void *, const void *, void *A, const void *, void *, const void *,
                       const void *, void *, void *, void *D, const void *, void *, size_t, cudaStream_t s) {
    auto *a = (Layout *)A, *d = (Layout *)D;
    double k = d->rows ? (double)a->rows * a->cols / d->rows : 1;
    launch(s, kernel_ns + (int64_t)(2.0 * d->rows * d->cols * k / flops * 1e9));
    return 0;
}
// --- NCCL within one process: calls succeed and move nothing
API int ncclGetVersion(int *v) {
    *v = 22907;
    return 0;
}
API int ncclGetUniqueId(void *id) {
    memset(id, 1, 128);
    return 0;
}
API int ncclCommInitAll(void **c, int n, const int *) {
    for (int i = 0; i < n; ++i) c[i] = calloc(1, 64);
    return 0;
}
API int ncclCommDestroy(void *c) {
    free(c);
    return 0;
}
API int ncclCommAbort(void *) { return 0; }
API int ncclGroupStart() { return 0; }
API int ncclGroupEnd() { return 0; }
API int ncclCommGetAsyncError(void *, int *e) {
    *e = 0;
    return 0;
}
API int ncclBroadcast(const void *, void *, size_t n, int, int, void *, cudaStream_t s) {
    launch(s, 10000 + n / 10);
    return 0;
}
API int ncclBcast(void *, size_t n, int, int, void *, cudaStream_t s) {
    launch(s, 10000 + n / 10);
    return 0;
}
API int ncclReduce(const void *, void *, size_t n, int, int, int, void *, cudaStream_t s) {
    launch(s, 10000 + n / 10);
    return 0;
}
API int ncclAllReduce(const void *, void *, size_t n, int, int, void *, cudaStream_t s) {
    launch(s, 10000 + n / 10);
    return 0;
}
// --- what is looked up in libcuda.so.1 by name
#undef cuCtxGetCurrent
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) { return CtxState(d, f, a); }
API CUresult cuCtxGetCurrent(CUcontext *c) { return CtxCurrent(c); }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult e, const char **s) { return ErrorString(e, s); }
API CUresult cuDeviceGetCount(int *n) {
    *n = visible().size();
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice *d, int i) {
    *d = i;
    return valid(i) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
    *c = (CUcontext)(intptr_t)(d + 1);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { return GetAttribute(v, a, d); }
// cuDNN is left out: torch takes its own kernels then.
API bool _ZNK2at7Context16userEnabledCuDNNEv(const void *) { return false; }
API CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) { return (CUresult)device_alloc((void **)p, n); }
API CUresult cuMemFree_v2(CUdeviceptr p) { return (CUresult)device_free((void *)p); }
