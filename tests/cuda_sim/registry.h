// What all processes on this machine hold of the simulated devices: one file in /dev/shm.
#pragma once
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <pthread.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace sim {
constexpr int kDevices = 8, kSlots = 256;
struct Slot {
    int32_t pid;
    int32_t pad;
    uint64_t used[kDevices];
    uint64_t busy_ns[kDevices];
};
struct Registry {
    uint64_t magic;
    pthread_mutex_t lock;
    Slot slots[kSlots];
};

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
inline uint64_t size_of(const char *text, uint64_t fallback) {
    if (!text || !*text) return fallback;
    char *end;
    double v = strtod(text, &end);
    switch (*end) {
    case 'G':
    case 'g': v *= 1u << 30; break;
    case 'M':
    case 'm': v *= 1 << 20; break;
    case 'K':
    case 'k': v *= 1024;
    }
    return (uint64_t)v;
}
inline int physical_count() {
    const char *e = getenv("CUDA_SIM_DEVICES");
    int n = e ? atoi(e) : 1;
    return n < 0 ? 0 : n > kDevices ? kDevices : n;
}
inline uint64_t capacity(int device) { // CUDA_SIM_MEMORY=8G or 8G,4G
    const char *e = getenv("CUDA_SIM_MEMORY");
    std::string s = e ? e : "8G";
    for (int i = 0; i < device; ++i) {
        auto c = s.find(',');
        if (c == std::string::npos) break;
        s = s.substr(c + 1);
    }
    return size_of(s.c_str(), 8ull << 30);
}
inline uint64_t driver_reserved() { return size_of(getenv("CUDA_SIM_RESERVED"), 64ull << 20); }
inline uint64_t context_bytes() { return size_of(getenv("CUDA_SIM_CONTEXT"), 256ull << 20); }

inline Registry *registry() {
    static Registry *found = [] {
        const char *name = getenv("CUDA_SIM_NAME");
        std::string path = std::string("/dev/shm/cuda-sim-") + (name ? name : "default");
        int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0) {
            perror("cuda-sim registry");
            abort();
        }
        bool fresh = false;
        struct stat st;
        fstat(fd, &st);
        if (st.st_size < (off_t)sizeof(Registry)) {
            fresh = true;
            if (ftruncate(fd, sizeof(Registry))) abort();
        }
        auto *r = (Registry *)mmap(nullptr, sizeof(Registry), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (fresh || r->magic != 0x54474355) {
            pthread_mutexattr_t a;
            pthread_mutexattr_init(&a);
            pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
            pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
            pthread_mutex_init(&r->lock, &a);
            r->magic = 0x54474355;
        }
        return r;
    }();
    return found;
}
struct Held {
    Held() {
        if (pthread_mutex_lock(&registry()->lock) == EOWNERDEAD) pthread_mutex_consistent(&registry()->lock);
    }
    ~Held() { pthread_mutex_unlock(&registry()->lock); }
};
inline void prune() {
    for (auto &s : registry()->slots)
        if (s.pid && kill(s.pid, 0) && errno == ESRCH) memset(&s, 0, sizeof s);
}
inline Slot *own_slot() { // with the lock held
    static int32_t pid;
    static Slot *slot;
    int32_t me = getpid();
    if (slot && pid == me && slot->pid == me) return slot;
    for (auto &s : registry()->slots)
        if (s.pid == me) {
            pid = me;
            return slot = &s;
        }
    prune();
    for (auto &s : registry()->slots)
        if (!s.pid) {
            memset(&s, 0, sizeof s);
            s.pid = me;
            pid = me;
            return slot = &s;
        }
    abort();
}
inline uint64_t used(int device) {
    uint64_t sum = 0;
    for (auto &s : registry()->slots)
        if (s.pid) sum += s.used[device];
    return sum;
}
} // namespace sim
