/* Device memory is host memory; reserving, mapping and unmapping keep the address contract of the real calls. */
#include "sim.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* What an Ascend910B1 card reports, in bytes. Only reported: the host's own limits decide what can be allocated. */
static const size_t DEVICE_MEMORY = (size_t)64 << 30;
enum { ALIGNMENT = 512 };

static int allocate(void **memory, size_t size) {
    if (!size) size = 1;
    return posix_memalign(memory, ALIGNMENT, size) ? SIM_NO_MEMORY : SIM_OK;
}
SIM_EXPORT int aclrtMalloc(void **memory, size_t size, int policy) { (void)policy; return allocate(memory, size); }
SIM_EXPORT int aclrtMallocAlign32(void **memory, size_t size, int policy) {
    (void)policy;
    return allocate(memory, size);
}
SIM_EXPORT int aclrtMallocHost(void **memory, size_t size) { return allocate(memory, size); }
SIM_EXPORT int aclrtMallocHostWithCfg(void **memory, uint64_t size, void *config) {
    (void)config;
    return allocate(memory, size);
}
SIM_EXPORT int aclrtFree(void *memory) { free(memory); return SIM_OK; }
SIM_EXPORT int aclrtFreeHost(void *memory) { free(memory); return SIM_OK; }

SIM_EXPORT int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
    (void)kind;
    *total_bytes = DEVICE_MEMORY;
    *free_bytes = DEVICE_MEMORY - ((size_t)1 << 30);
    return SIM_OK;
}

static int copy(void *to, size_t room, const void *from, size_t count) {
    if (count > room) return SIM_INVALID;
    memmove(to, from, count);
    return SIM_OK;
}
SIM_EXPORT int aclrtMemcpy(void *to, size_t room, const void *from, size_t count, int kind) {
    (void)kind;
    return copy(to, room, from, count);
}
SIM_EXPORT int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, int kind, void *stream) {
    (void)kind; (void)stream;
    return copy(to, room, from, count);
}
SIM_EXPORT int aclrtMemset(void *memory, size_t room, int32_t value, size_t count) {
    if (count > room) return SIM_INVALID;
    memset(memory, value, count);
    return SIM_OK;
}
SIM_EXPORT int aclrtMemsetAsync(void *memory, size_t room, int32_t value, size_t count, void *stream) {
    (void)stream;
    return aclrtMemset(memory, room, value, count);
}

/* Expandable segments: an address range is reserved without access and becomes usable where it is mapped. The size of
 * a range is kept, because releasing and unmapping name its start only. */
struct range { char *start; size_t size; struct range *next; };
static struct range *reserved, *mapped;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

static int remember(struct range **list, void *start, size_t size) {
    struct range *made = malloc(sizeof *made);
    if (!made) return SIM_NO_MEMORY;
    pthread_mutex_lock(&ranges_lock);
    *made = (struct range){start, size, *list};
    *list = made;
    pthread_mutex_unlock(&ranges_lock);
    return SIM_OK;
}
static size_t forget(struct range **list, void *start) {
    size_t size = 0;
    pthread_mutex_lock(&ranges_lock);
    for (struct range **at = list; *at; at = &(*at)->next) {
        if ((*at)->start != start) continue;
        struct range *found = *at;
        size = found->size;
        *at = found->next;
        free(found);
        break;
    }
    pthread_mutex_unlock(&ranges_lock);
    return size;
}
SIM_EXPORT int aclrtReserveMemAddress(void **start, size_t size, size_t alignment, void *wanted, uint64_t flags) {
    (void)alignment; (void)wanted; (void)flags;
    void *range = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return SIM_NO_MEMORY;
    *start = range;
    return remember(&reserved, range, size);
}
SIM_EXPORT int aclrtReleaseMemAddress(void *start) {
    size_t size = forget(&reserved, start);
    if (!size) return SIM_INVALID;
    return munmap(start, size) ? SIM_INVALID : SIM_OK;
}
SIM_EXPORT int aclrtMapMem(void *start, size_t size, size_t offset, void *handle, uint64_t flags) {
    (void)offset; (void)handle; (void)flags;
    if (mprotect(start, size, PROT_READ | PROT_WRITE)) return SIM_NO_MEMORY;
    return remember(&mapped, start, size);
}
SIM_EXPORT int aclrtUnmapMem(void *start) {
    size_t size = forget(&mapped, start);
    if (!size) return SIM_INVALID;
    madvise(start, size, MADV_DONTNEED);
    return mprotect(start, size, PROT_NONE) ? SIM_INVALID : SIM_OK;
}
SIM_EXPORT int aclrtMallocPhysical(void **handle, size_t size, const void *property, uint64_t flags) {
    (void)size; (void)property; (void)flags;
    *handle = sim_handle();
    return SIM_OK;
}
SIM_NOTHING(aclrtFreePhysical)
SIM_NOTHING(aclrtHostUnregister)
SIM_EXPORT int aclrtHostRegister(void *memory, uint64_t size, int kind, void **device) {
    (void)size; (void)kind;
    *device = memory;
    return SIM_OK;
}
/* Memory can't be shared between processes here: one process's host memory means nothing to another. */
static int not_shared(void) { return SIM_INVALID; }
SIM_EXPORT int aclrtMemExportToShareableHandle(void) { return not_shared(); }
SIM_EXPORT int aclrtMemImportFromShareableHandle(void) { return not_shared(); }
SIM_EXPORT int aclrtMemSetPidToShareableHandle(void) { return not_shared(); }
