/* What the machine does to the processes of a run: a disk that is full, storage that fails or dawdles, a clock that
 * jumps, connections that lead elsewhere.
 *
 * Loaded before the C library (LD_PRELOAD) into every process of the run. What is wrong right now stands in a page of
 * memory that all of them share with the campaign (FAULTS_PAGE names its file); zeros stand for a sound machine. Only
 * files below the run's folder (FAULTS_FOLDER) are touched. Linux.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define DETOURS 2
#define NS_PER_S 1000000000LL

/* Mirrored by faults_machine.py; each field is written by the campaign alone, but for `room`. */
struct page {
    _Atomic int64_t clock_ns;    /* added to the time of day */
    _Atomic int64_t full;        /* whether the disk is */
    _Atomic int64_t room;        /* bytes that can still be written */
    _Atomic int64_t store_errno; /* what every access to the weight store fails with */
    _Atomic int64_t store_us;    /* how long each takes */
    struct { _Atomic int64_t from, to; } detours[DETOURS]; /* ports on the loopback */
};

static struct page sound;
static struct page *page = &sound;
static char folder[PATH_MAX];
static char store[PATH_MAX];
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void prepare(void)
{
    const char *file = getenv("FAULTS_PAGE"), *run = getenv("FAULTS_FOLDER"), *campaign = getenv("FAULTS_CAMPAIGN");
    const char *weights = getenv("FAULTS_STORE");
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (campaign && getppid() == atoi(campaign))
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody else is there to end what a dead campaign started */
    if (!file || !run || !weights || strlen(run) + 2 > PATH_MAX || strlen(weights) + 2 > PATH_MAX)
        return;
    snprintf(folder, sizeof folder, "%s/", run);
    snprintf(store, sizeof store, "%s/", weights);
    int fd = open(file, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *shared = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared != MAP_FAILED)
        page = shared;
}

/* ── where something lies ─────────────────────────────────────────────────────────────────────────────────────────── */

static int below(const char *place, const char *path)
{
    return *place && path && strncmp(path, place, strlen(place)) == 0;
}

static int lies_below(const char *place, int fd)
{
    char link[32], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return below(place, path);
}

/* ── storage that fails or dawdles ────────────────────────────────────────────────────────────────────────────────── */

static int storage_is_ill(void) { return page->store_errno || page->store_us; }

/* Whether an access to the weight store fails; errno says how. */
static int storage_fails(void)
{
    int64_t dawdled_us = page->store_us, error = page->store_errno;
    if (dawdled_us)
        nanosleep(&(struct timespec){dawdled_us / 1000000, dawdled_us % 1000000 * 1000}, NULL);
    if (error)
        errno = (int)error;
    return error != 0;
}

static int path_fails(const char *path) { return storage_is_ill() && below(store, path) && storage_fails(); }
static int file_fails(int fd) { return storage_is_ill() && lies_below(store, fd) && storage_fails(); }

/* ── a disk that is full ──────────────────────────────────────────────────────────────────────────────────────────── */

/* How many of some bytes fit; -1 and errno when none does. */
static ssize_t fitting(int fd, size_t size)
{
    if (!page->full || !size || !lies_below(folder, fd))
        return (ssize_t)size;
    int64_t left = atomic_fetch_sub(&page->room, (int64_t)size);
    if (left >= (int64_t)size)
        return (ssize_t)size;
    if (left > 0)
        return (ssize_t)left;
    errno = ENOSPC;
    return -1;
}

/* Whether a new file has no room; one that is there can be opened on the fullest disk. */
static int cannot_be_made(const char *path, int flags)
{
    if (!page->full || !(flags & O_CREAT) || page->room > 0 || !below(folder, path))
        return 0;
    if (syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0)
        return 0;
    errno = ENOSPC;
    return 1;
}

/* ── the C library's calls ────────────────────────────────────────────────────────────────────────────────────────── */

static int open_at(int dir, const char *path, int flags, mode_t mode)
{
    if (path_fails(path) || cannot_be_made(path, flags))
        return -1;
    return (int)syscall(SYS_openat, dir, path, flags, mode);
}

#define MODE_OF(flags)                                                                                                 \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                                                                           \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }

int open(const char *path, int flags, ...) { MODE_OF(flags) return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return open_at(AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE_OF(flags) return open_at(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE_OF(flags) return open_at(dir, path, flags, mode); }

ssize_t read(int fd, void *data, size_t size)
{
    return file_fails(fd) ? -1 : syscall(SYS_read, fd, data, size);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset)
{
    return file_fails(fd) ? -1 : syscall(SYS_pread64, fd, data, size, offset);
}

ssize_t pread(int fd, void *data, size_t size, off_t offset) { return pread64(fd, data, size, offset); }

ssize_t write(int fd, const void *data, size_t size)
{
    ssize_t fits = file_fails(fd) ? -1 : fitting(fd, size);
    return fits < 0 ? -1 : syscall(SYS_write, fd, data, fits);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    ssize_t fits = file_fails(fd) ? -1 : fitting(fd, size);
    return fits < 0 ? -1 : syscall(SYS_pwrite64, fd, data, fits, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    if (count > 0 && (page->full || storage_is_ill()) && lies_below(folder, fd))
        return write(fd, parts[0].iov_base, parts[0].iov_len);
    return syscall(SYS_writev, fd, parts, count);
}

int link(const char *from, const char *to)
{
    return path_fails(to) ? -1 : (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags)
{
    return path_fails(to) ? -1 : (int)syscall(SYS_linkat, from_dir, from, to_dir, to, flags);
}

int unlink(const char *path)
{
    return path_fails(path) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

/* ── a clock that jumps ───────────────────────────────────────────────────────────────────────────────────────────── */

static void jump(struct timespec *now)
{
    int64_t clock_ns = page->clock_ns;
    if (!clock_ns)
        return;
    int64_t jumped_ns = now->tv_sec * NS_PER_S + now->tv_nsec + clock_ns;
    now->tv_sec = jumped_ns / NS_PER_S;
    now->tv_nsec = jumped_ns % NS_PER_S;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = real_clock_gettime ? real_clock_gettime(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        jump(now);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    if (!failed)
        *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *where)
{
    struct timespec exact = {0};
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where)
        *where = exact.tv_sec;
    return exact.tv_sec;
}

/* ── connections that lead elsewhere ──────────────────────────────────────────────────────────────────────────────── */

int connect(int fd, const struct sockaddr *address, socklen_t size)
{
    struct sockaddr_in led;
    if (address && address->sa_family == AF_INET && size >= sizeof led) {
        memcpy(&led, address, sizeof led);
        for (int i = 0; i < DETOURS; i++)
            if (page->detours[i].to && led.sin_addr.s_addr == htonl(INADDR_LOOPBACK)
                && ntohs(led.sin_port) == page->detours[i].from) {
                led.sin_port = htons((uint16_t)page->detours[i].to);
                return (int)syscall(SYS_connect, fd, &led, sizeof led);
            }
    }
    return (int)syscall(SYS_connect, fd, address, size);
}
