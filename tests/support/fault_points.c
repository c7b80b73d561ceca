/* Faults in the calls by which a process changes the files of one folder, and in its clock: see fault_points.py.

   Loaded with LD_PRELOAD. The layout of struct control is that of fault_points.LAYOUT; another process writes into it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, RENAME = 4, CREATE = 8, UNLINK = 16, MKDIR = 32, TRUNCATE = 64 };
enum { NONE, FAIL, KILL_BEFORE, KILL_AFTER, TEAR, TERMINATE };

struct control {
    volatile int32_t action, kinds, error, countdown;
    volatile int64_t seen, hits, clock;
    char folder[1024];
};

static struct control *control;
static size_t folder_length;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("DITMESH_FAULT_POINTS");
    if (path == NULL) return;
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (found == MAP_FAILED) return;
    folder_length = strlen(((struct control *)found)->folder);
    control = found;
}

static int inside(const char *path) {
    return folder_length && strncmp(path, control->folder, folder_length) == 0;
}

static int inside_file(int file) {
    char link[64], path[2048];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return inside(path);
}

static void end_by(int number) {
    syscall(SYS_kill, getpid(), number);
    if (number == SIGKILL) for (;;) syscall(SYS_pause);
}

/* What to do with a call of a kind: an action whose turn it is, or NONE. */
static int turn(int kind) {
    int action = control->action;
    if (!(control->kinds & kind)) return NONE;
    __sync_add_and_fetch(&control->seen, 1);
    if (action == NONE) return NONE;
    if (action == FAIL) {
        __sync_add_and_fetch(&control->hits, 1);
        return FAIL;
    }
    if (__sync_sub_and_fetch(&control->countdown, 1) != 0) return NONE;
    control->action = NONE;
    __sync_add_and_fetch(&control->hits, 1);
    return action;
}

#define WATCHED(kind, where) (control != NULL && control->kinds != 0 && (where) ? turn(kind) : NONE)

/* A call between what comes before and after it. */
#define AROUND(kind, where, result_type, call)                    \
    int action = WATCHED(kind, where);                            \
    if (action == FAIL) { errno = control->error; return -1; }    \
    if (action == KILL_BEFORE) end_by(SIGKILL);                   \
    if (action == TERMINATE) end_by(SIGTERM);                     \
    result_type result = (call);                                  \
    if (action == KILL_AFTER || action == TEAR) end_by(SIGKILL);  \
    return result;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    /* A table would save the look-up, which is short beside a call of the system. */
    return dlsym(RTLD_NEXT, name);
}

ssize_t write(int file, const void *data, size_t size) {
    int action = WATCHED(WRITE, inside_file(file));
    if (action == FAIL) { errno = control->error; return -1; }
    if (action == KILL_BEFORE) end_by(SIGKILL);
    if (action == TERMINATE) end_by(SIGTERM);
    ssize_t result = syscall(SYS_write, file, data, action == TEAR && size > 1 ? size / 2 : size);
    if (action == KILL_AFTER || action == TEAR) end_by(SIGKILL);
    return result;
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    int action = WATCHED(WRITE, inside_file(file));
    if (action == FAIL) { errno = control->error; return -1; }
    if (action == KILL_BEFORE) end_by(SIGKILL);
    if (action == TERMINATE) end_by(SIGTERM);
    ssize_t result = syscall(SYS_pwrite64, file, data, action == TEAR && size > 1 ? size / 2 : size, at);
    if (action == KILL_AFTER || action == TEAR) end_by(SIGKILL);
    return result;
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return pwrite64(file, data, size, at); }

int fsync(int file) { AROUND(SYNC, inside_file(file), int, (int)syscall(SYS_fsync, file)) }

int fdatasync(int file) { AROUND(SYNC, inside_file(file), int, (int)syscall(SYS_fdatasync, file)) }

int ftruncate64(int file, off64_t size) {
    AROUND(TRUNCATE, inside_file(file), int, (int)syscall(SYS_ftruncate, file, size))
}

int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

int rename(const char *from, const char *to) {
    AROUND(RENAME, inside(to), int, (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to))
}

int unlink(const char *path) { AROUND(UNLINK, inside(path), int, (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0)) }

int mkdir(const char *path, mode_t mode) {
    AROUND(MKDIR, inside(path), int, (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode))
}

static int opened(const char *path, int flags, mode_t mode) {
    AROUND(CREATE, (flags & O_CREAT) && inside(path), int, (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode))
}

static mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; }

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = mode_of(flags, more);
    va_end(more);
    return opened(path, flags | O_LARGEFILE, mode);
}

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = mode_of(flags, more);
    va_end(more);
    return opened(path, flags, mode);
}

/* The calendar's clock, moved by control->clock nanoseconds; the monotonic one is left alone, as a system's is. */
static void moved(struct timespec *now) {
    if (control == NULL || control->clock == 0) return;
    int64_t all = now->tv_sec * 1000000000LL + now->tv_nsec + control->clock;
    now->tv_sec = all / 1000000000LL;
    now->tv_nsec = all % 1000000000LL;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (next == NULL) next = REAL(clock_gettime);
    int result = next(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME) moved(now);
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return (time_t)-1;
    if (out != NULL) *out = exact.tv_sec;
    return exact.tv_sec;
}
