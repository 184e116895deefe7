// NVML (libnvidia-ml.so.1) on simulated devices: what pynvml and PyTorch ask of it, answered from the registry.
// A function that is missing here is one that the driver lacks: pynvml raises NVMLError_FunctionNotFound.
#include "registry.h"

using namespace sim;

typedef int Result;
typedef void *Handle;
enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9, GPU_IS_LOST = 15 };

#define NVML extern "C" __attribute__((visibility("default")))
#define REQUIRE_DEVICE(handle)                                                                                     \
    if (Result failed = check(handle)) return failed

struct Memory { unsigned long long total, free, used; };
struct Memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct Process { unsigned pid; unsigned long long used_bytes; unsigned gpu_instance, compute_instance; };
struct Process_v1 { unsigned pid; unsigned long long used_bytes; };
struct Temperature { unsigned version, sensor; int celsius; };

// A handle is the number of a device plus 1. With CUDA_SIM_MIG=1 there is one GPU, and the devices are its parts.
static const Handle DIVIDED_GPU = (Handle)(intptr_t)0x1000;
static bool is_divided() { return getenv("CUDA_SIM_MIG"); }
static int number(Handle handle) { return handle == DIVIDED_GPU ? 0 : (int)(intptr_t)handle - 1; }

// CUDA_SIM_NVML_LOST=FILE: from the moment when that file exists, the GPU has fallen off the bus.
static bool is_lost() { const char *file = getenv("CUDA_SIM_NVML_LOST"); return file && access(file, F_OK) == 0; }
static Result check(Handle handle) {
    if (is_lost()) return GPU_IS_LOST;
    return number(handle) < 0 || number(handle) >= physical_count() ? INVALID : SUCCESS;
}

// For tests that need no CUDA: the calling process holds so much of a device.
NVML void cuda_sim_hold(int device, unsigned long long bytes) { Held lock; own_slot()->used[device] = bytes; }

NVML Result nvmlInit_v2() { return getenv("CUDA_SIM_NO_NVML") ? NOT_LOADED : SUCCESS; }
NVML Result nvmlInit() { return nvmlInit_v2(); }
NVML Result nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
NVML Result nvmlShutdown() { return SUCCESS; }
NVML const char *nvmlErrorString(Result result) {
    switch (result) {
    case SUCCESS: return "Success";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    }
    return "Unknown Error";
}
NVML Result nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.00.00"); return SUCCESS; }
NVML Result nvmlSystemGetNVMLVersion(char *text, unsigned size) { snprintf(text, size, "13.580.00"); return SUCCESS; }
NVML Result nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }

// --- devices
NVML Result nvmlDeviceGetCount_v2(unsigned *count) { *count = is_divided() ? 1 : physical_count(); return SUCCESS; }
NVML Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle) {
    unsigned count;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count) return INVALID;
    *handle = is_divided() ? DIVIDED_GPU : (Handle)(intptr_t)(index + 1);
    return SUCCESS;
}
NVML Result nvmlDeviceGetHandleByPciBusId_v2(const char *address, Handle *handle) {
    unsigned bus = 0;
    sscanf(address, "%*x:%x:", &bus);
    return nvmlDeviceGetHandleByIndex_v2(bus ? bus - 1 : 0, handle);
}
NVML Result nvmlDeviceGetHandleByUUID(const char *uuid, Handle *handle) {
    unsigned place = 0;
    if (sscanf(uuid, "GPU-%x", &place) != 1) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(place - 1, handle);
}
NVML Result nvmlDeviceGetIndex(Handle handle, unsigned *index) { REQUIRE_DEVICE(handle); *index = number(handle); return SUCCESS; }
NVML Result nvmlDeviceGetName(Handle handle, char *text, unsigned size) {
    REQUIRE_DEVICE(handle);
    snprintf(text, size, "Simulated CUDA device");
    return SUCCESS;
}
NVML Result nvmlDeviceGetUUID(Handle handle, char *text, unsigned size) {
    REQUIRE_DEVICE(handle);
    const char *kind = is_divided() && handle != DIVIDED_GPU ? "MIG" : "GPU";
    snprintf(text, size, "%s-%08x-0000-0000-0000-000000000000", kind, number(handle) + 1);
    return SUCCESS;
}
NVML Result nvmlDeviceGetMigMode(Handle handle, unsigned *current, unsigned *pending) {
    if (handle != DIVIDED_GPU) return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}
NVML Result nvmlDeviceGetMaxMigDeviceCount(Handle, unsigned *count) { *count = is_divided() ? 7 : 0; return SUCCESS; }
NVML Result nvmlDeviceGetMigDeviceHandleByIndex(Handle handle, unsigned index, Handle *part) {
    if (handle != DIVIDED_GPU || (int)index >= physical_count()) return NOT_FOUND;
    *part = (Handle)(intptr_t)(index + 1);
    return SUCCESS;
}

// --- memory
static void read_memory(int device, unsigned long long &total, unsigned long long &used_bytes) {
    Held lock;
    prune();
    total = capacity(device);
    used_bytes = used(device);
}
NVML Result nvmlDeviceGetMemoryInfo(Handle handle, Memory *memory) {  // counts the driver's own memory as used
    REQUIRE_DEVICE(handle);
    read_memory(number(handle), memory->total, memory->used);
    memory->used += driver_reserved();
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
NVML Result nvmlDeviceGetMemoryInfo_v2(Handle handle, Memory_v2 *memory) {
    REQUIRE_DEVICE(handle);
    read_memory(number(handle), memory->total, memory->used);
    memory->reserved = driver_reserved();
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

// --- processes. CUDA_SIM_NO_PROCESSES=1: none are told, as in a container.
NVML Result nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned *count, Process *processes) {
    REQUIRE_DEVICE(handle);
    unsigned found = 0, room = *count;
    Held lock;
    prune();
    for (auto &slot : registry()->slots) {
        if (!slot.pid || !slot.used[number(handle)] || getenv("CUDA_SIM_NO_PROCESSES")) continue;
        if (found < room && processes) processes[found] = {(unsigned)slot.pid, slot.used[number(handle)], ~0u, ~0u};
        ++found;
    }
    *count = found;
    return found > room ? TOO_SMALL : SUCCESS;
}
NVML Result nvmlDeviceGetComputeRunningProcesses(Handle handle, unsigned *count, Process_v1 *processes) {  // PyTorch's
    Process all[kSlots];
    unsigned found = kSlots, room = *count;
    if (Result failed = nvmlDeviceGetComputeRunningProcesses_v3(handle, &found, all)) return failed;
    for (unsigned at = 0; at < found && at < room && processes; ++at) processes[at] = {all[at].pid, all[at].used_bytes};
    *count = found;
    return found > room ? TOO_SMALL : SUCCESS;
}

// --- gauges
NVML Result nvmlDeviceGetUtilizationRates(Handle handle, unsigned *percents) {
    REQUIRE_DEVICE(handle);
    static uint64_t last_busy_ns[kDevices];
    static int64_t last_ns[kDevices];
    static unsigned percent[kDevices];
    int device = number(handle);
    Held lock;
    uint64_t busy_ns = 0;
    for (auto &slot : registry()->slots) {
        if (slot.pid) busy_ns += slot.busy_ns[device];
    }
    int64_t now = now_ns(), passed_ns = now - last_ns[device];
    if (passed_ns > 100000000) {
        double share = last_ns[device] && busy_ns >= last_busy_ns[device]
                           ? 100.0 * (busy_ns - last_busy_ns[device]) / passed_ns
                           : 0;
        percent[device] = share > 100 ? 100 : share;
        last_ns[device] = now;
        last_busy_ns[device] = busy_ns;
    }
    percents[0] = percent[device];
    percents[1] = percent[device] / 2;
    return SUCCESS;
}
NVML Result nvmlDeviceGetPowerUsage(Handle handle, unsigned *milliwatts) { REQUIRE_DEVICE(handle); *milliwatts = 90000; return SUCCESS; }
NVML Result nvmlDeviceGetEnforcedPowerLimit(Handle handle, unsigned *milliwatts) { REQUIRE_DEVICE(handle); *milliwatts = 300000; return SUCCESS; }
NVML Result nvmlDeviceGetPowerManagementLimit(Handle handle, unsigned *milliwatts) { return nvmlDeviceGetEnforcedPowerLimit(handle, milliwatts); }
NVML Result nvmlDeviceGetTemperature(Handle handle, unsigned, unsigned *celsius) { REQUIRE_DEVICE(handle); *celsius = 41; return SUCCESS; }
NVML Result nvmlDeviceGetTemperatureV(Handle handle, Temperature *found) { REQUIRE_DEVICE(handle); found->celsius = 41; return SUCCESS; }
NVML Result nvmlDeviceGetCudaComputeCapability(Handle handle, int *major, int *minor) {
    REQUIRE_DEVICE(handle);
    *major = 8;
    *minor = 0;
    return SUCCESS;
}

// --- what PyTorch looks up when it loads the library
NVML Result nvmlDeviceGetNvLinkRemoteDeviceType(Handle, unsigned, void *) { return NOT_SUPPORTED; }
NVML Result nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle, unsigned, void *) { return NOT_SUPPORTED; }
NVML Result nvmlDeviceGetGpuFabricInfoV(Handle handle, void *) { return check(handle); }
